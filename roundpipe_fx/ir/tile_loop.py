"""Tile loops: a run of operations that is carried out on one tile of rows after another.

In a joint graph a loop is one node: it reads the operands of the run, and returns the results that others read. Wide
values inside exist for one tile at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, kw_only=True)
class TileResult:
    """A result of a loop.

    Attributes:
        dim: the dimension that tiles are put together along; ``None``: the sum over tiles.
        is_logarithm: whether sums are of exponentials: their logarithm is the result, and what each tile has is.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    is_logarithm: bool = False

    @property
    def start(self) -> float:
        """The value of a sum over no tiles."""
        return -math.inf if self.is_logarithm else 0.0

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The element type while tiles are carried out: sums of many tiles need more digits than half precision has.

        A logarithm is rounded to its own digits, however small the part is that a tile adds.
        """
        if self.dim is not None or not self.dtype.is_floating_point:
            return self.dtype
        if self.is_logarithm:
            return torch.float64
        return torch.float32 if self.dtype in (torch.bfloat16, torch.float16) else self.dtype

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes in an element type."""
        return math.prod(self.shape) * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class WidestValue:
    """A value that exists for one tile at a time.

    Attributes:
        shape: sizes of the whole.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


class TileLoop:
    """The target of a loop's node: called with the operands, it returns a tuple of the results.

    Args:
        name: of the loop, in emitted text.
        bodies: by number of rows, the operations on a tile with that number. Each takes one list: the tile's part of
            every operand, then the sums so far; and returns the parts of the results that are put together. Sums are
            added to in place.
        tiles: number of tiles; the last one has fewer rows if they do not divide the rows.
        dims: by operand, the dimension that it is divided along, where a row is one position or the same number of
            them; ``None``: each tile reads all of it.
        widest: the widest value inside, which never exists as a whole.
        digest: equal for loops that compute the same.
    """

    def __init__(
        self,
        *,
        name: str,
        bodies: dict[int, Any],
        rows: int,
        tiles: int,
        dims: Sequence[int | None],
        results: Sequence[TileResult],
        widest: WidestValue,
        digest: str,
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__
        self.bodies = bodies
        self.rows = rows
        self.tiles = tiles
        self.dims = tuple(dims)
        self.results = tuple(results)
        self.widest = widest
        self.digest = digest

    @property
    def size(self) -> int:
        """Rows of a tile."""
        return -(-self.rows // self.tiles)

    def workspace(self, of_bodies: int) -> int:
        """Bytes that the loop allocates beside its results.

        Args:
            of_bodies: bytes that the operations on one tile hold at most.
        """
        # Sums of half precision are made in float32 over the tiles and cast once: they exist in both types when all
        # tiles are done, and in one before.
        cast = [result for result in self.results if result.accumulation_dtype is not result.dtype]
        wider = sum(result.bytes(result.accumulation_dtype) for result in cast)
        return max(wider, wider - sum(result.bytes(result.dtype) for result in cast) + of_bodies)

    def __repr__(self) -> str:
        return f"{self.__name__}<{self.tiles} tiles, {self.digest}>"

    def map_bodies(self, change: Callable[[fx.GraphModule], Callable[[list[Any]], Any]]) -> TileLoop:
        """The same loop with other bodies.

        Args:
            change: returns a body for a body.
        """
        return TileLoop(
            name=self.__name__,
            bodies={rows: change(body) for rows, body in self.bodies.items()},
            rows=self.rows,
            tiles=self.tiles,
            dims=self.dims,
            results=self.results,
            widest=self.widest,
            digest=self.digest,
        )

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the loop."""
        device = next(operand.device for operand in operands if isinstance(operand, torch.Tensor))
        outputs = tuple(
            torch.empty_strided(result.shape, result.stride, dtype=result.accumulation_dtype, device=device)
            for result in self.results
        )
        sums = [
            total.fill_(result.start) for total, result in zip(outputs, self.results, strict=True) if result.dim is None
        ]
        for start in range(0, self.rows, self.size):
            # The last tile may be smaller: 10 rows in 4 tiles are tiles of 3, 3, 3 and 1, and there is a body for each
            # size.
            rows = min(self.size, self.rows - start)
            tile = [
                # Operands without the divided dimension are passed whole to every tile.
                operand if dim is None else self._narrow(operand, dim, start, rows)
                for operand, dim in zip(operands, self.dims, strict=True)
            ]
            # Sums are updated in place by the body; the other parts are returned.
            parts = iter(self.bodies[rows]([*tile, *sums]))
            for output, result in zip(outputs, self.results, strict=True):
                if result.dim is not None:
                    self._narrow(output, result.dim, start, rows).copy_(next(parts))
            # Before the next tile: otherwise two tiles' results would be alive at once.
            del parts
        return tuple(output.to(result.dtype) for output, result in zip(outputs, self.results, strict=True))

    def _narrow(self, whole: torch.Tensor, dim: int, start: int, rows: int) -> torch.Tensor:
        """Some rows of an operand or a result: each is one position, or several, along a dimension."""
        multiple = whole.shape[dim] // self.rows
        return whole.narrow(dim, start * multiple, rows * multiple)
