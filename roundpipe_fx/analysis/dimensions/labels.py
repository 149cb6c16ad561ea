"""Labels of dimensions, as in einops, and how rules assign them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from roundpipe_fx.analysis.dimensions.operands import Call

Dim = tuple[int, ...]
"""Labels that a dimension is the row-major product of; ``()``: a dimension of size 1."""

Dims = tuple[Dim, ...]
"""The dimensions of a tensor."""


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The labels of an operation: each dimension of an operand or a result is a product of some.

    A view of ``[B * T, V]`` as ``[B, T, V]`` has operand ``((b, t), (v,))`` and result ``((b,), (t,), (v,))``. Labels
    belong to one operation. What a label means follows from where it stands, for each result on its own:

    - *mixed*: positions along it depend on each other, so it is never divided.
    - *independent* in a result that has it: a tile of the result needs that tile of each operand that has the label,
      and all of each operand that does not.
    - *summed* in a result that does not have it: the result is the sum, over tiles, of the result on each tile. The
      results of ``LOGARITHMS`` are logarithms of sums: their exponentials are summed.

    So the rows of a layer norm's backward are independent in the gradient of its input, and summed in those of its
    weight and bias. What has no meaning (random state returned by an attention without dropout) may be summed too.

    The results of operations that return tuples are those of the tuple; ``getitem`` is not described.

    Tiles of an operand of ``view`` must be such that PyTorch can view them: contiguous, if in doubt.

    Attributes:
        operands: for each of ``operand_nodes(node)`` its dimensions; ``()`` for a dimension of size 1.
        results: for each of ``tensor_values(node)`` its dimensions. Results that an output mask leaves out are not
            counted.
        sizes: number of positions by label.
        mixed: labels along which the work does not divide.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[int, int | torch.SymInt]
    mixed: frozenset[int]


class Unknown(Exception):
    """A rule does not know this form of its operator."""


class Labels:
    """Assigns the labels of one operation.

    Attributes:
        mixed: labels along which the work does not divide.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, Any] = {}
        self.mixed: set[int] = set()

    def new(self, size: Any, mixed: bool = False) -> Dim:
        """A dimension of its own; ``()`` if its size is known to be 1."""
        # A dimension of size 1 has no label: it is the same in all tiles, and broadcasting needs no rule.
        if is_one(size):
            return ()
        label = len(self.sizes)
        self.sizes[label] = size
        if mixed:
            self.mixed.add(label)
        return (label,)

    def of(self, shape: Sequence[Any], mixed: Collection[int] = ()) -> list[Dim]:
        """The dimensions of a tensor, each with a label of its own; those of the given numbers are mixed."""
        return [self.new(size, axis in mixed) for axis, size in enumerate(shape)]

    def all_mixed(self, shape: Sequence[Any]) -> Dims:
        """The dimensions of a tensor, each with a mixed label of its own."""
        return tuple(self.new(size, True) for size in shape)

    def mix(self, dims: Sequence[Dim]) -> None:
        """Forbid to divide along dimensions."""
        self.mixed.update(label for dim in dims for label in dim)

    def same(self, shape: Sequence[Any], dims: Sequence[Dim]) -> Dims:
        """Given dimensions for a tensor of the same shape, or one that is broadcast to it.

        Raises:
            Unknown: it is not known statically which of its dimensions are broadcast.
        """
        # Broadcasting aligns at the end; a longer operand has no counterpart for its first dimensions.
        if len(shape) > len(dims):
            raise Unknown
        aligned = dims[len(dims) - len(shape) :]
        return tuple(self._same(size, dim) for size, dim in zip(shape, aligned, strict=True))

    def _same(self, size: Any, dim: Dim) -> Dim:
        if is_one(size):
            return ()
        if not dim or not same_size(size, math.prod(self.sizes[label] for label in dim)):
            raise Unknown
        return dim


CallDims = tuple[Mapping[str, Any], Sequence[Sequence[Dim]]]
"""What a rule finds: for each tensor argument a list of the dimensions of its tensors, and those of the results."""

Rule = Callable[[Call, Labels], CallDims]
"""Describes a call of an operator; raises ``Unknown`` where it cannot."""


def same_size(size: Any, other: Any) -> bool:
    """Return whether two sizes are known to be equal. Adds no guards."""
    return statically_known_true(size == other)


def is_one(size: Any) -> bool:
    """Return whether a size is known to be 1. Adds no guards."""
    return same_size(size, 1)
