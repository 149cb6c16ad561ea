"""Given microbatches: those of a caller who has split the batch, as ``forward_backward(microbatches=[…])``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Microbatch", "given_microbatches"]


class Microbatch(NamedTuple):
    """The inputs of one microbatch, split by the caller.

    Attributes:
        args: positional inputs of the model.
        kwargs: its keyword inputs.
        labels: for the loss function.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Any


def given_microbatches(batches: Sequence[Any], most: int, has_loss_fn: bool) -> list[Microbatch]:
    """The microbatches of a caller who has split the batch.

    Args:
        batches: for each a mapping of keyword inputs, or a tuple of positional ones.
        most: how many the model is compiled for.
        has_loss_fn: whether ``labels`` among keyword inputs are for a loss function.

    Raises:
        TypeError: one is neither.
        ValueError: there is none, there are too many, or only some have labels.
    """
    if isinstance(batches, (Mapping, str, torch.Tensor)) or not isinstance(batches, Sequence):
        raise TypeError(
            f"microbatches must be a list with an item for each microbatch, not a {type(batches).__name__}."
        )
    if not batches:
        raise ValueError("microbatches is empty: give at least one.")
    if len(batches) > most:
        raise ValueError(
            f"{len(batches)} microbatches were given, but the model is compiled for {most}, and so are its schedule "
            f"and its plan: compile it with num_microbatches={len(batches)}."
        )
    microbatches = []
    for index, item in enumerate(batches):
        if isinstance(item, Mapping):
            kwargs = dict(item)
            labels = kwargs.pop("labels", None) if has_loss_fn else None
            microbatches.append(Microbatch((), kwargs, labels))
        elif type(item) is tuple:
            microbatches.append(Microbatch(item, {}, None))
        else:
            raise TypeError(
                f"microbatches[{index}] is a {type(item).__name__}: each must be a dict of the model's keyword "
                "arguments (and labels), or a tuple of its positional ones."
            )
    if len({microbatch.labels is None for microbatch in microbatches}) > 1:
        raise ValueError("some microbatches have labels and others do not: all or none must.")
    return microbatches
