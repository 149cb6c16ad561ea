"""Batches that are no tensors, and outputs as such: records, mappings, lists of samples, plain objects.

The same program is called with them in a module around it, which takes a batch apart and puts its outputs together.
What a step is to leave behind is what the program leaves that is called with tensors; only samples, whose rows are
stacked, are not updated.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["BATCHES", "Structured", "parts_of", "structured"]

BATCHES = ("dict", "named tuple", "dataclass", "mapping", "samples", "object", "number")
"""``"object"``: PyTorch does not know how to take it apart; the first input is one, the others stand beside it.
``"number"``: inputs are tensors, and beside the outputs stands a mean as a Python number."""


class Named(NamedTuple):
    """Up to three inputs; or the first output, and the others."""

    first: Any
    second: Any = None
    third: Any = None


@dataclass
class Record:
    """A dataclass that is registered nowhere."""

    first: Any
    second: Any = None
    third: Any = None


class Encoding(UserDict):
    """A mapping that is no dict, with attributes, as tokenizers return it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Bare:
    """An object with attributes."""

    def __init__(self, first: Any, second: Any = None) -> None:
        self.first = first
        self.second = second


class Structured(nn.Module):
    """A program that is called with batches of a kind and returns outputs of that kind."""

    def __init__(self, net: nn.Module, kind: str, inputs: int) -> None:
        super().__init__()
        self.net = net
        self.kind = kind
        self.inputs = inputs

    def forward(self, *batch: Any) -> Any:
        inputs = _tensors(batch, self.kind, self.inputs)
        return _packed(self.net(*inputs), self.kind, len(inputs[0]))


def structured(inputs: Sequence[torch.Tensor], kind: str) -> tuple[Any, ...]:
    """Arguments for :class:`Structured`."""
    if kind == "dict":
        return (dict(zip(("first", "second", "third"), inputs, strict=False)),)
    if kind == "named tuple":
        return (Named(*inputs),)
    if kind == "dataclass":
        return (Record(*inputs),)
    if kind == "mapping":
        return (Encoding(dict(zip(("first", "second", "third"), inputs, strict=False))),)
    if kind == "samples":
        return ([tuple(x[row] for x in inputs) for row in range(len(inputs[0]))],)
    if kind == "object":
        return (Bare(inputs[0]), *inputs[1:])
    return tuple(inputs)


def _tensors(batch: Sequence[Any], kind: str, count: int) -> Sequence[torch.Tensor]:
    if kind == "dict":
        return list(batch[0].values())
    if kind in ("named tuple", "dataclass", "mapping"):
        return [batch[0].first, batch[0].second, batch[0].third][:count] if count == 3 else _up_to_two(batch[0], count)
    if kind == "samples":
        return [torch.stack([sample[i] for sample in batch[0]]) for i in range(count)]
    if kind == "object":
        return [batch[0].first, *batch[1:]]
    return batch


def _up_to_two(batch: Any, count: int) -> list[torch.Tensor]:
    return [batch.first, batch.second] if count == 2 else [batch.first]


def _listed(output: Any) -> list[Any]:
    if isinstance(output, dict):
        return list(output.values())
    return list(output) if isinstance(output, tuple) else [output]


def _packed(output: Any, kind: str, rows: int) -> Any:
    parts = _listed(output)
    if kind == "dict":
        return {f"part {place}": part for place, part in enumerate(parts)}
    if kind == "named tuple":
        return Named(parts[0], parts[1:])
    if kind == "dataclass":
        return Record(parts[0], parts[1:])
    if kind == "mapping":
        return Encoding({"first": parts[0], "second": parts[1:]})
    if kind == "object":
        return Bare(parts[0], parts[1:])
    if kind == "number":
        return parts, {"mean": parts[0].detach().real.double().mean().item()}
    if all(isinstance(part, torch.Tensor) and part.dim() and len(part) == rows for part in parts):
        return [tuple(part[row] for part in parts) for row in range(rows)]
    return parts


_CLASSES: dict[str, type] = {
    "dict": dict,
    "named tuple": Named,
    "dataclass": Record,
    "mapping": Encoding,
    "samples": list,
    "object": Bare,
    "number": tuple,
}


def parts_of(output: Any, kind: str) -> list[Any]:
    """The program's own outputs; the number, where there is one, is the last.

    Raises:
        AssertionError: the output is none of the kind.
    """
    assert type(output) is _CLASSES[kind], f"{type(output).__name__} was returned, not {_CLASSES[kind].__name__}"
    if kind == "dict":
        return list(output.values())
    if kind in ("named tuple", "dataclass", "mapping", "object"):
        return [output.first, *output.second]
    if kind == "number":
        return [*output[0], torch.tensor(output[1]["mean"], dtype=torch.float64)]
    if output and isinstance(output[0], tuple):
        return [torch.stack(rows) for rows in zip(*output, strict=True)]
    return output
