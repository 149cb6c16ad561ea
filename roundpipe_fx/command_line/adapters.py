"""Adapters that a command asks for: ``--lora r=16,targets=q_proj+v_proj``, by PEFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_fx.command_line.model_of import CommandError

EXAMPLE = "r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj or targets=all-linear"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters.

    Attributes:
        rank: inner dimension of the two factors of each adapter.
        alpha: by which their results are scaled, over the rank; ``None``: the rank.
        dropout: share of their inputs that are left out.
        targets: names of the layers that get one, or ``"all-linear"``; ``None``: those that PEFT knows for the model.
    """

    rank: int = 16
    alpha: int | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] | str | None = None


def parse_lora(text: str) -> Lora:
    """Read the option's value.

    Raises:
        ValueError: it cannot be understood.
    """
    values: dict[str, str] = {}
    # ``r=16,alpha=32,targets=q_proj+v_proj``: a plus joins names, since commas part the options.
    for part in text.split(","):
        key, separator, value = part.partition("=")
        if key not in ("r", "alpha", "dropout", "targets") or not separator or not value or key in values:
            raise ValueError(f"{part!r} is not understood: give r, alpha, dropout and targets, such as {EXAMPLE}")
        values[key] = value
    try:
        rank, alpha = int(values.get("r", 16)), values.get("alpha")
        dropout = float(values.get("dropout", 0.0))
        if rank < 1 or (alpha is not None and int(alpha) < 1) or not 0 <= dropout < 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"{text!r}: r and alpha are whole numbers of at least 1, dropout is below 1") from None
    named = values.get("targets")
    targets = tuple(named.split("+")) if named is not None and named != "all-linear" else named
    return Lora(rank=rank, alpha=None if alpha is None else int(alpha), dropout=dropout, targets=targets)


def add_lora(model: nn.Module, lora: Lora) -> nn.Module:
    """Freeze a model, and give it adapters.

    Args:
        model: on the meta device; changed.

    Returns:
        the model with its adapters.

    Raises:
        CommandError: PEFT is not installed, or does not find the layers.
    """
    try:
        import peft
    except ImportError as error:
        raise CommandError("--lora needs PEFT: pip install peft") from error
    targets: Any = list(lora.targets) if isinstance(lora.targets, tuple) else lora.targets
    # PEFT's own default for `alpha` is 8, whatever the rank; here the scale is 1 unless it is given.
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha or lora.rank, lora_dropout=lora.dropout, target_modules=targets
    )
    try:
        # Factors are made where the model is, on the meta device: nothing is allocated or drawn.
        with torch.device("meta"):
            adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        first = str(error).splitlines()[0].rstrip(".")
        raise CommandError(f"--lora: {first}; give targets, such as {EXAMPLE}") from error
    return adapted
