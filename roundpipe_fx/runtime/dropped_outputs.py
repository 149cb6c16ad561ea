"""Dropped outputs: outputs of a model that its caller holds no longer when the backward begins.

A training loop often takes the loss alone and drops the scores, which at a language model's head are the largest values
of the step::

    loss = model(**batch).loss        scores freed here
    outputs = model(**batch)          scores held until ``outputs`` is bound anew
    loss.backward()

When the backward program is called, an output is held if memory of it is still referred to: by a weak reference to its
storage, or, where the backward reads it, by more than the list of the backward's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from roundpipe_fx.runtime.compiled_loops import Boxed
from roundpipe_fx.torch_private import StorageReference, count_sharing, graph_is_kept, is_sole_reference

_MANY = 64
"""Calls that wait for their backwards, from which on those are looked for of which nothing is held."""


class DroppedOutputs:
    """Observes which outputs of a graph's calls are held when their backwards begin.

    Args:
        outputs: numbers of the outputs.
        saved: position among the backward's inputs, by number of an output that the backward reads.
        see: called before each backward with the numbers of those that are held.
    """

    def __init__(
        self, outputs: Collection[int], saved: Mapping[int, int], see: Callable[[frozenset[int]], None]
    ) -> None:
        self._saved = saved
        self._others = [position for position in outputs if position not in saved]
        self._see = see
        self._waiting: list[dict[int, StorageReference]] = []

    def forward(self, run: Boxed) -> Boxed:
        """Wrap the forward program."""

        def call(arguments: list[Any]) -> tuple[Any, ...]:
            # Calls without a backward (evaluation under grad mode) would add up.
            results = run(arguments)
            if len(self._waiting) >= _MANY:  # of which many may never go backward
                self._waiting = [references for references in self._waiting if _held_of([references])]
            self._waiting.append(
                {
                    position: StorageReference(results[position].untyped_storage())
                    for position in self._others
                    if isinstance(results[position], torch.Tensor) and results[position].layout is torch.strided
                }
            )
            return results

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def backward(self, run: Boxed) -> Boxed:
        """Wrap the backward program."""

        def call(arguments: list[Any]) -> tuple[Any, ...]:
            if not graph_is_kept():  # else autograd holds what it has saved
                # An output that the backward reads is among its arguments, whose references are counted instead.
                # Calls are not told apart: an output of any call that waits is held.
                waiting, self._waiting = self._waiting, []
                held = _held_of(waiting)
                held.update(position for position, of in self._saved.items() if not is_sole_reference(arguments, of))
                self._see(frozenset(held))
            return run(arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def is_held(reference: StorageReference, saved: Iterable[torch.Tensor]) -> bool:
    """Test for an output whose memory somebody still refers to.

    Args:
        reference: refers to the output's memory weakly.
        saved: strided tensors that the backward reads, which may have the same memory.
    """
    if reference.expired():
        return False
    sharing = {id(value): value for value in saved if value.untyped_storage()._cdata == reference.cdata}
    return not sharing or count_sharing(next(iter(sharing.values()))) > len(sharing)


def _held_of(calls: Iterable[Mapping[int, StorageReference]]) -> set[int]:
    """Numbers of the outputs of some calls whose memory is still referred to."""
    return {position for references in calls for position, of in references.items() if not of.expired()}
