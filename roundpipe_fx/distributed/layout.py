"""Layouts: what a rank knows of a value before it receives it.

A traced graph knows shapes, strides and dtypes. What depends on data (a number, a size that a step shows) travels
first, as integers. Elements then travel dense, in the order of memory, and get the strides of the graph again:
reductions accumulate in memory order, so other strides would be other bits::

    value                                    integers that travel first     elements that travel
    tensor (2, 3), strides (3, 1)            none                           6
    tensor (2, 3), strides (1, 2)            none                           6, column by column, as they lie in memory
    tensor (2, 3), strides (1, 0)            none                           2: what is repeated travels once
    tensor of 2 dimensions, size unknown     4: its shape and strides       as many as these say
    int, bool                                1                              none
    float                                    1: the bits of the double      none
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class ValueLayout:
    """The layout of a value.

    Attributes:
        kind: ``"tensor"``, or ``"int"``, ``"float"`` or ``"bool"`` for a number.
        shape: of a tensor; ``None`` if it depends on data.
        dims: number of dimensions of a tensor.
        device: type of its device.
    """

    kind: str
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    dims: int = 0
    dtype: torch.dtype = torch.int64
    device: str = "cpu"

    @classmethod
    def of(cls, fake: Any) -> ValueLayout:
        """The layout of a value of a traced graph.

        Raises:
            TypeError: it is neither a tensor nor a number.
        """
        if isinstance(fake, (bool, torch.SymBool)):
            return cls(kind="bool")
        if isinstance(fake, (int, torch.SymInt)):
            return cls(kind="int")
        if isinstance(fake, (float, torch.SymFloat)):
            return cls(kind="float")
        if not isinstance(fake, torch.Tensor) or fake.layout is not torch.strided:
            raise TypeError(f"a value of type {type(fake).__name__} cannot be sent to another process.")
        shape, stride = tuple(fake.shape), tuple(fake.stride())
        static = all(type(size) is int for size in (*shape, *stride))
        return cls(
            kind="tensor",
            shape=shape if static else None,
            stride=stride if static else None,
            dims=fake.dim(),
            dtype=fake.dtype,
            device=fake.device.type,
        )

    @property
    def numbers(self) -> int:
        """Number of integers that travel first."""
        return 1 if self.kind != "tensor" else 0 if self.shape is not None else 2 * self.dims


def numbers_of(values: Sequence[Any], layouts: Sequence[ValueLayout]) -> list[int]:
    """The integers that travel before some values."""
    numbers: list[int] = []
    # Layouts are known on both sides, so no tags are sent: the reader knows how many integers each value has.
    for value, layout in zip(values, layouts, strict=True):
        if layout.kind == "float":
            # The bits of a double as an integer: all of them travel exactly.
            numbers += struct.unpack("<q", struct.pack("<d", float(value)))
        elif layout.kind != "tensor":
            numbers.append(int(value))
        elif layout.shape is None:
            numbers += (*value.shape, *value.stride())
    return numbers


def split_numbers(layouts: Sequence[ValueLayout], numbers: Sequence[int]) -> list[Any]:
    """From what has travelled first: the numbers among the values, and (shape, stride) of each tensor."""
    rest = iter(numbers)
    return [_read_number(layout, rest) for layout in layouts]


def _read_number(layout: ValueLayout, rest: Iterator[int]) -> Any:
    if layout.kind == "tensor":
        if layout.shape is not None:
            return layout.shape, layout.stride
        sizes = [next(rest) for _ in range(2 * layout.dims)]
        return tuple(sizes[: layout.dims]), tuple(sizes[layout.dims :])
    number = next(rest)
    if layout.kind == "float":
        return struct.unpack("<d", struct.pack("<q", number))[0]
    return bool(number) if layout.kind == "bool" else number


def as_dense_row(value: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The elements of a tensor in the order in which they lie in memory with given strides, one-dimensional.

    It is a view if the tensor is dense with those strides, else a copy. What is repeated (stride 0) occurs once.
    """
    narrow = _drop_repeated(shape, stride)
    # Not dense in these strides: the elements are copied in the order that memory will have.
    if tuple(value.stride()) != tuple(stride) or not _is_dense(narrow, stride):
        order = sorted(range(len(narrow)), key=lambda dim: -stride[dim])
        once = value[tuple(slice(0, size) for size in narrow)]
        return once.permute(order).contiguous().view(-1)
    return value.as_strided((_count(narrow),), (1,))


def as_strided_tensor(flat: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The tensor of a shape and strides whose elements :func:`as_dense_row` has put in a row."""
    narrow = _drop_repeated(shape, stride)
    if _is_dense(narrow, stride):
        return flat.as_strided(shape, stride)
    order = sorted(range(len(narrow)), key=lambda dim: -stride[dim])
    tensor = torch.empty_strided(narrow, stride, dtype=flat.dtype, device=flat.device)
    tensor.permute(order).copy_(flat.view([narrow[dim] for dim in order]))
    return tensor.expand(shape)


def count(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Number of elements that :func:`as_dense_row` returns."""
    return _count(_drop_repeated(shape, stride))


def _drop_repeated(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """A shape with every dimension along which elements are repeated once."""
    return tuple(min(size, 1) if step == 0 else size for size, step in zip(shape, stride, strict=True))


def _count(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements lie in memory without gaps, each once."""
    expected = 1
    # From the smallest stride: each one has to be the product of the sizes inside it.
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 0:
            return True
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True
