"""Side by side: a Llama with a large vocabulary and a GPT-2 with dropout, by each way to train them on one device.

The peers come first; ours are then held against each of them at its measured peak. All in bfloat16, forward and
backward, ``loss = model(**batch).loss``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from torch._functorch import config as functorch_config

import roundpipe_fx
from benchmarks.gpu.measurement import (
    FIRST_STEP,
    Measurement,
    Row,
    Sizes,
    allocated_and_reserved,
    first_seconds,
    mebibytes,
    median_seconds,
)
from benchmarks.side_by_side import checkpoint_blocks

PART = "side by side"
MODELS = ("Llama", "GPT-2 with dropout")
_STEPS = 3
"""Steps before those that are measured; the first of them compiles."""

_Run = Callable[..., Any]
_Way = Callable[[nn.Module, Sizes], _Run]


class MissingPackage(Exception):
    """A peer that is not installed, or that has no form for the model."""


def _eager(model: nn.Module, _: Sizes) -> _Run:
    return model


def _checkpointed(model: nn.Module, _: Sizes) -> _Run:
    return checkpoint_blocks(model, _layers(model))


def _layers(model: nn.Module) -> tuple[str, ...]:
    blocks = "transformer.h" if isinstance(model, transformers.GPT2LMHeadModel) else "model.layers"
    return tuple(f"{blocks}.{index}" for index in range(len(list(model.get_submodule(blocks).children()))))


def _liger(model: nn.Module, _: Sizes) -> _Run:
    if importlib.util.find_spec("liger_kernel") is None:
        raise MissingPackage("Liger is not installed")
    if not isinstance(model, transformers.LlamaForCausalLM):
        raise MissingPackage("Liger has no kernels for this model")
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)
    return checkpoint_blocks(model, _layers(model))


def _by_torch(model: nn.Module, sizes: Sizes) -> _Run:
    return torch.compile(model, backend=sizes.peer_backend)


PEERS: dict[str, tuple[_Way, float]] = {
    "eager": (_eager, 1.0),
    "checkpoint per layer": (_checkpointed, 1.0),
    "torch.compile": (_by_torch, 1.0),
    "torch.compile, budget 0.5": (_by_torch, 0.5),
    "torch.compile, budget 0.1": (_by_torch, 0.1),
    "Liger, checkpoint per layer": (_liger, 1.0),
}
"""Peers, with their ``activation_memory_budget``."""


def peer_measurements(model: str) -> list[Measurement]:
    """A measurement a peer."""
    return [Measurement(f"{model}, {peer}", functools.partial(_peer, model, peer)) for peer in PEERS]


def our_measurements(model: str) -> list[Measurement]:
    """Ours without a budget, and at the peak of each peer."""
    return [
        Measurement(f"{model}, ours", functools.partial(_ours, model, "ours", None)),
        *(
            Measurement(f"{model}, ours at the peak of {peer}", functools.partial(_at_the_peak_of, model, peer))
            for peer in PEERS
        ),
    ]


def make(name: str, sizes: Sizes) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model with random weights on the device, in training mode, and its batch."""
    heads = max(2, sizes.width // 64)
    words = sizes.words[MODELS.index(name)]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module
        if name == "Llama":
            model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=words,
                    hidden_size=sizes.width,
                    intermediate_size=4 * sizes.width,
                    num_hidden_layers=sizes.layers,
                    num_attention_heads=heads,
                    num_key_value_heads=max(1, heads // 4),
                    tie_word_embeddings=True,
                    use_cache=False,
                )
            )
        else:
            model = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=words,
                    n_positions=sizes.length,
                    n_embd=sizes.width,
                    n_layer=sizes.layers,
                    n_head=heads,
                    use_cache=False,
                )
            )
        tokens = torch.randint(words, (sizes.rows, sizes.length))
    return model.bfloat16().train(), {"input_ids": tokens, "labels": tokens}


def _peer(model_name: str, peer: str, sizes: Sizes, _: Sequence[Row]) -> Iterator[Row]:
    way, budget = PEERS[peer]
    row = {"part": PART, "model": model_name, "way": peer}
    model, batch = make(model_name, sizes)
    with functorch_config.patch(activation_memory_budget=budget):
        try:
            run = way(model, sizes)
        except MissingPackage as error:
            yield {**row, **_figures(), "note": str(error)}
            return
        yield {**row, **_measured(run, model, batch, sizes)}


def _at_the_peak_of(model_name: str, peer: str, sizes: Sizes, rows: Sequence[Row]) -> Iterator[Row]:
    peaks = [row["peak MiB"] for row in rows if (row.get("model"), row.get("way")) == (model_name, peer)]
    way = f"ours at the peak of {peer}"
    if not peaks or peaks[-1] is None:
        yield {"part": PART, "model": model_name, "way": way, **_figures(), "note": "no peak of the peer is known"}
        return
    yield from _ours(model_name, way, int(peaks[-1] * 2**20), sizes, rows)


def _ours(model_name: str, way: str, budget: int | None, sizes: Sizes, _: Sequence[Row]) -> Iterator[Row]:
    row = {"part": PART, "model": model_name, "way": way}
    model, batch = make(model_name, sizes)
    compiled = roundpipe_fx.compile(model, memory_budget=budget)
    try:
        measured = _measured(compiled, model, batch, sizes)
    except roundpipe_fx.InfeasibleBudgetError as error:
        note = f"refused: the least is {mebibytes(error.minimum):,.1f} MiB"
        yield {**row, **_figures(budget=budget), "note": note}
        return
    plan = compiled.plan
    in_tiles = f"in tiles: {len(plan.tiles)}" if plan.tiles else ""
    yield {**row, **measured, **_planned(budget, plan), "note": measured["note"] or in_tiles}


def _planned(budget: int | None, plan: roundpipe_fx.Plan) -> Row:
    return {"planned MiB": mebibytes(plan.peak_bytes), "budget MiB": budget and mebibytes(budget)}


def _figures(budget: int | None = None, **known: Any) -> Row:
    """All columns, with ``None`` where nothing is known."""
    columns = ("ms", "tokens/s", "peak MiB", "reserved MiB", "planned MiB", "budget MiB", FIRST_STEP, "note")
    return {**dict.fromkeys(columns), "budget MiB": budget and mebibytes(budget), "note": "", **known}


def _measured(run: _Run, model: nn.Module, batch: dict[str, torch.Tensor], sizes: Sizes) -> Row:
    def step() -> None:
        model.zero_grad()
        run(**batch).loss.backward()

    try:
        first = first_seconds(step)
        for _ in range(_STEPS - 1):
            step()
        peak, reserved = allocated_and_reserved(model, step)
        seconds = median_seconds(step, sizes.rounds)
    except torch.OutOfMemoryError as error:
        return _figures(note=f"out of memory: {str(error).splitlines()[0][:120]}")
    return _figures(
        **{
            "ms": round(seconds * 1e3, 2),
            "tokens/s": round(batch["input_ids"].numel() / seconds),
            "peak MiB": mebibytes(peak),
            "reserved MiB": mebibytes(reserved),
            FIRST_STEP: first,
        }
    )
