"""A sequence as nested checkpoints.

In a persistent sequence a layer saves what its backward needs, or it begins a run of layers of which only the input is
saved, and which is recomputed by its own sequence before its backward. That is a checkpointed function with others
inside. So a sequence is executed by nested calls of :func:`roundpipe_fx.checkpoint`, which reproduces random numbers
and autocast, stops early, and works for any arguments and results of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from roundpipe_fx.compat.checkpointing.checkpoint import checkpoint
from roundpipe_fx.remat.sequences.sequence import (
    Backward,
    ForwardCheck,
    ForwardEnable,
    ForwardNograd,
    Loss,
    Sequence,
    SequenceOperation,
)


@dataclass(frozen=True)
class Kept:
    """A layer that saves what its backward needs."""

    index: int


@dataclass(frozen=True)
class Rerun:
    """A run of layers, the first of which saves its input; ``inside``: how they are recomputed."""

    first: int
    last: int
    inside: tuple[Kept | Rerun, ...]


def nest(sequence: Sequence, length: int) -> tuple[Kept | Rerun, ...]:
    """Choose how the layers of a chain run in the forward.

    Args:
        sequence: of a chain with ``length`` layers and a loss.

    Raises:
        ValueError: the sequence does not belong to this chain, or is not persistent; the message names the operation.
    """
    reader = _SequenceReader(sequence, length)
    nested = reader.read(0, length)
    reader.end()
    return nested


class _SequenceReader:
    """Reads a sequence operation by operation; recursion is as deep as checkpoints are nested."""

    def __init__(self, sequence: Sequence, loss: int) -> None:
        self._operations = list(sequence)
        self._loss = loss
        self._position = 0

    def _next(self) -> SequenceOperation | None:
        return self._operations[self._position] if self._position < len(self._operations) else None

    def _take(self, expected: SequenceOperation) -> None:
        if self._next() != expected:
            raise ValueError(
                f"operation {self._position} of the sequence is {self._next() or 'missing'} where a persistent "
                f"sequence of this chain has {expected}."
            )
        self._position += 1

    def end(self) -> None:
        if self._next() is not None:
            raise ValueError(f"operation {self._position} of the sequence, {self._next()}, comes after its end.")

    def read(self, first: int, last: int) -> tuple[Kept | Rerun, ...]:
        """Layers ``first`` to ``last``, including their backwards; the loss is the layer after the last one."""
        items: list[Kept | Rerun] = []
        at = first
        while at <= last:
            # The loss ends the forward of the whole sequence; what follows are backwards.
            if at == self._loss:
                self._take(Loss())
                break
            if self._next() == ForwardEnable(at):
                self._take(ForwardEnable(at))
                items.append(Kept(at))
                at += 1
                continue
            # ``ForwardCheck`` saves the input of a run, ``ForwardNograd`` continues it without saving: together they
            # are a checkpoint.
            self._take(ForwardCheck(at))
            until = at + 1
            while self._next() == ForwardNograd(until):
                self._take(ForwardNograd(until))
                until += 1
            items.append(Rerun(at, until - 1, ()))
            at = until
        # Backwards come in reverse order. Before the backward of a run its layers run again, as a sequence of their
        # own: that is the recursion.
        for position, item in reversed(list(enumerate(items))):
            if isinstance(item, Kept):
                self._take(Backward(item.index))
            else:
                items[position] = Rerun(item.first, item.last, self.read(item.first, item.last))
        return tuple(items)


def run(
    functions: SequenceOf[Callable[..., Any]], items: tuple[Kept | Rerun, ...], value: Any, preserve_rng_state: bool
) -> Any:
    """Run layers as nested checkpoints.

    Args:
        functions: the layers; each takes the result of the one before.
        value: the input of the first.
        preserve_rng_state: whether recomputation draws the same random numbers.
    """
    for item in items:
        if isinstance(item, Kept):
            value = functions[item.index](value)
        else:
            value = checkpoint(
                _Runner(functions, item.inside, preserve_rng_state), value, preserve_rng_state=preserve_rng_state
            )
    return value


class _Runner:
    """A run of layers as a function, named after them."""

    def __init__(
        self, functions: SequenceOf[Callable[[Any], Any]], items: tuple[Kept | Rerun, ...], preserve_rng_state: bool
    ) -> None:
        self._functions, self._items, self._preserve = functions, items, preserve_rng_state
        layers = list(_list_layers(items))
        self.__qualname__ = f"layers {layers[0]} to {layers[-1]}"

    def __call__(self, value: Any) -> Any:
        return run(self._functions, self._items, value, self._preserve)


def _list_layers(items: tuple[Kept | Rerun, ...]) -> Iterator[int]:
    for item in items:
        if isinstance(item, Kept):
            yield item.index
        else:
            yield from range(item.first, item.last + 1)
