"""Kinds of operands: the numbers that an operator's kernel may be given without harm.

Kernels trust their operands. On CUDA an index beyond its dimension ends the context, a seed that is read through a host
pointer ends the process. A kind says which numbers are safe, refuses a call for which there are none, and turns filled
memory into such numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx.torch_private import size_hint

EACH = "each"
"""In :class:`Below`: the item at position i of a list indexes dimension i."""

Arguments = Mapping[str, Any]
"""Arguments of a call by name: fake tensors, numbers, lists of them."""


class OperandKind:
    """Numbers that an operand may have."""

    def exists(self, operand: Any, arguments: Arguments) -> bool:
        """Return whether there are such numbers for an operand of a call."""
        return self._exists(operand, arguments)

    def write(self, filled: torch.Tensor, operand: Any, arguments: Arguments, position: int) -> None:
        """Replace the numbers of a filled tensor by such ones.

        Args:
            filled: as large as the operand.
            operand: the operand, or the list of which it is an item.
            arguments: of the call.
            position: of the operand in the list; 0 for one that is not in a list.
        """
        self._write(filled, operand, arguments, position)

    def _exists(self, operand: Any, arguments: Arguments) -> bool:
        return True

    def _write(self, filled: torch.Tensor, operand: Any, arguments: Arguments, position: int) -> None:
        return


class Below(OperandKind):
    """Integers from 0 up to a limit; of the limit 0 there are none.

    Args:
        name: the argument that the limit is of.
        dims: the dimensions of a tensor whose sizes are multiplied: numbers, or an argument's name that holds one.
            Without any it is the argument itself if it is a number, the product if it is a list of sizes, else the
            tensor's number of elements.
    """

    def __init__(self, name: str, *dims: int | str) -> None:
        self.name, self.dims = name, dims

    def _limit(self, arguments: Arguments, indexed: int) -> int:
        """The number that indices are below; ``indexed`` is the dimension for :data:`EACH`."""
        argument = arguments[self.name]
        if not hasattr(argument, "shape"):
            return math.prod(map(size_hint, argument)) if isinstance(argument, Sequence) else size_hint(argument)
        shape = [size_hint(size) for size in argument.shape] or [1]
        if not self.dims:
            return math.prod(shape)
        numbers = [indexed if dim == EACH else arguments[dim] if isinstance(dim, str) else dim for dim in self.dims]
        return math.prod(shape[number] for number in numbers)

    def limits(self, operand: Any, arguments: Arguments) -> dict[int, int]:
        """The number that indices are below, by position of the operand in a list; without masks and empty operands."""
        limits, dim = {}, 0
        for position, item in enumerate(operand if isinstance(operand, list | tuple) else (operand,)):
            if item is not None and not _is_mask(item) and 0 not in map(size_hint, item.shape):
                limits[position] = self._limit(arguments, dim)
            dim += len(item.shape) if item is not None and _is_mask(item) else 1
        return limits

    def _exists(self, operand: Any, arguments: Arguments) -> bool:
        return all(self.limits(operand, arguments).values())

    def _write(self, filled: torch.Tensor, operand: Any, arguments: Arguments, position: int) -> None:
        limit = self.limits(operand, arguments).get(position)
        if limit is not None:
            _memory_of(filled).clamp_(0, limit - 1)


@dataclass(frozen=True)
class Constant(OperandKind):
    """One number everywhere."""

    number: int

    def _write(self, filled: torch.Tensor, operand: Any, arguments: Arguments, position: int) -> None:
        filled.fill_(self.number)


class UnitInterval(OperandKind):
    """Probabilities, and other numbers from 0 to 1."""

    def _write(self, filled: torch.Tensor, operand: Any, arguments: Arguments, position: int) -> None:
        if filled.is_floating_point():
            _memory_of(filled).clamp_(0, 1)


class Pivots(OperandKind):
    """Row interchanges of a factorization, which count from 1: none is interchanged."""

    def _write(self, filled: torch.Tensor, operand: Any, arguments: Arguments, position: int) -> None:
        if filled.dim():
            filled.copy_(torch.arange(1, filled.shape[-1] + 1, device=filled.device).expand(filled.shape))


@dataclass(frozen=True)
class Counts(OperandKind):
    """Numbers that add up to an argument; ones if that is not given."""

    total: str

    def _exists(self, operand: Any, arguments: Arguments) -> bool:
        total = arguments.get(self.total)
        return total is None or size_hint(total) == 0 or math.prod(map(size_hint, operand.shape)) > 0

    def _write(self, filled: torch.Tensor, operand: Any, arguments: Arguments, position: int) -> None:
        total, count = arguments.get(self.total), filled.numel()
        quotient, remainder = divmod(count if total is None else size_hint(total), max(count, 1))
        filled.fill_(quotient)
        filled[:remainder].add_(1)


class OnHost(OperandKind):
    """A number that the kernel reads through a host pointer, whatever its fake kernel says of the device."""


class Absent(OperandKind):
    """``None``: offsets of packed sequences, which cannot be made up."""

    def _exists(self, operand: Any, arguments: Arguments) -> bool:
        return operand is None


def index_limits(kinds: Mapping[str, OperandKind], arguments: Arguments) -> list[int]:
    """The limits of all indices of a call."""
    indices = {name: kind for name, kind in kinds.items() if isinstance(kind, Below)}
    return [limit for name, kind in indices.items() for limit in kind.limits(arguments[name], arguments).values()]


def _is_mask(operand: Any) -> bool:
    return operand.dtype in (torch.bool, torch.uint8)


def _memory_of(filled: torch.Tensor) -> torch.Tensor:
    """All memory of a tensor without gaps and overlaps, where operators write in place."""
    return filled.as_strided((filled.untyped_storage().nbytes() // filled.dtype.itemsize,), (1,), 0)
