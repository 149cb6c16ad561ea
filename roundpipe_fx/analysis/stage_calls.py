"""Memory of stage calls: what a schedule of microbatches needs to know of each call of a stage module.

Each call is looked at on its own. Values that live across the whole call belong to the schedule
(:mod:`roundpipe_fx.schedules.memory`); here are counted the bytes beyond those that are allocated when it begins::

    bytes          ┌─┐ ◀─ peak
                ┌──┘ └──┐
             ┌──┘       └────────── what outlives it, and its gradients
    ─────────┘ ◀─ begins; values that die in it are a part of this
              the call's operations

What outlives a call is entered in the schedule from the next action on, gradients of parameters from the first
microbatch on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from roundpipe_fx.analysis.liveness import find_peak
from roundpipe_fx.analysis.program_events import Course, Follow, follow_events
from roundpipe_fx.analysis.storage_ids import OUTSIDE
from roundpipe_fx.codegen import Program
from roundpipe_fx.ir.joint_graph import Phase


@dataclass(frozen=True)
class CallBytes:
    """Memory of a call of a stage module, for one microbatch.

    Attributes:
        name: name of the stage module.
        peak: peak bytes that it allocates beyond those that are allocated when it begins, which include accumulated
            gradients of earlier microbatches.
        first_peak: the same for the first microbatch, which finds no accumulated gradients.
        gradients: bytes of the gradients that it returns, keyed by the number of the input they belong to.
        incoming_gradient_bytes: bytes of incoming gradients whose last reader it is.
    """

    name: str
    peak: int
    first_peak: int
    gradients: Mapping[int, int]
    incoming_gradient_bytes: int


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that outlive the call that allocates them.

    Attributes:
        maker: name of the stage module that allocates them.
        readers: names of the stage modules that read them.
        lasts: whether the caller gets and holds them.
        result: position of the result of ``maker`` that is all that refers to them between calls; ``None``: several
            results share them, or someone else holds them.
    """

    bytes: int
    maker: str
    readers: tuple[str, ...]
    lasts: bool
    result: int | None = None


def simulate_calls(
    forward: Program,
    backward: Program | None,
    owners: Sequence[int | None] = (),
    tangents: Collection[fx.Node] = (),
    granularity: int = 1,
    parameters: Collection[int] = (),
    follow: Follow | None = None,
) -> tuple[list[CallBytes], list[HeldBytes]]:
    """Memory of each call of one microbatch's forward and backward, and of the values between calls.

    Gradients do not count as values between calls: those of parameters are accumulated.

    Args:
        backward: the backward program; ``None`` for inference.
        owners: for each result of the backward, the number of the input that it is the gradient of, or contributes to.
        tangents: incoming gradients that the step is expected to get.
        granularity: bytes that the device's allocator rounds sizes up to.
        parameters: numbers of the inputs that all microbatches share.
        follow: see :func:`roundpipe_fx.analysis.program_events.follow_events`; the first microbatch is not followed so.

    Returns:
        memory of each call, and of the values that outlive the call that computes them.
    """
    # Followed twice: a device's first microbatch allocates the sums of gradients, later ones find them.
    first = _Calls(follow_events(forward, backward, tangents, granularity), owners)
    course = follow_events(forward, backward, tangents, granularity, sums=bool(parameters), follow=follow)
    later = _Calls(course, owners)
    calls = [
        CallBytes(call.name, peak, first_peak, first.gradient_bytes(index), later.incoming_gradient_bytes(index))
        for index, (call, first_peak, peak) in enumerate(
            zip(later.calls, first.peaks(()), later.peaks(parameters), strict=True)
        )
    ]
    return calls, later.held()


class _Calls:
    """The calls of a course, by number, and who reads their storages."""

    def __init__(self, course: Course, owners: Sequence[int | None]) -> None:
        self._arrived = course.arrived
        self._events = course.run.events
        self._sizes = course.run.numbers.sizes
        self.calls = course.run.calls
        self._returned = {storage for leaves in course.results[: course.forward.outputs] for storage in leaves}
        self._results_with = Counter(s for call in self.calls for leaves in call.returns for s in set(leaves))
        """By storage, how many results of calls refer to it."""
        self._readers: dict[int, list[int]] = {}
        for index, call in enumerate(self.calls):
            for storage in call.reads:
                self._readers.setdefault(storage, []).append(index)
        by_name = _gradients(course, owners)
        self._gradients = [by_name.get(call.name, {}) for call in self.calls]
        """By call, the owners of the gradients that it returns, by storage: another call may have computed them."""
        self._outlive = [self._outlive_call(index) for index in range(len(self.calls))]

    def peaks(self, accumulated: Collection[int]) -> list[int]:
        """Peak bytes of each call beyond those that are allocated when it begins.

        Args:
            accumulated: numbers of the inputs that have accumulated gradients when the microbatch begins.
        """
        accumulated_owners = set(accumulated)
        peaks = []
        for index, call in enumerate(self.calls):
            dying, outlive, kept_gradients = self._dying(index), self._outlive[index], self._gradients[index]
            # What comes in and dies here was counted by whoever held it, so the call starts at that level.
            before = self._bytes(dying)
            events = self._events[call.start : call.end]
            during = (
                find_peak(events, self._sizes, before=dying, lasting=outlive | kept_gradients.keys()).bytes - before
            )
            # Gradients that the call does not accumulate itself are added one after another, out of place the first
            # time.
            adding = max(
                (self._sizes[storage] for storage, owner in kept_gradients.items() if owner in accumulated_owners),
                default=0,
            )
            # From the second call on that returns this gradient, it is added to an existing one.
            accumulated_owners |= set(kept_gradients.values())
            after = self._bytes(outlive) - before + self._bytes(kept_gradients) + adding
            peaks.append(max(during, after, 0))
        return peaks

    def gradient_bytes(self, index: int) -> Mapping[int, int]:
        """Bytes of the gradients that a call returns, by owner."""
        total: Counter[int] = Counter()
        for storage, owner in self._gradients[index].items():
            total[owner] += self._sizes[storage]
        return total

    def incoming_gradient_bytes(self, index: int) -> int:
        """Bytes of incoming gradients whose last reader a call is."""
        return self._bytes(s for s in self._arrived if self._readers.get(s, [-1])[-1] == index)

    def held(self) -> list[HeldBytes]:
        """The values that outlive the call that computes them; those with the same maker and readers, of which no
        single result refers to the memory, as one."""
        bytes_of_value: Counter[tuple[str, tuple[str, ...], bool, int | None]] = Counter()
        for index, (call, outlive) in enumerate(zip(self.calls, self._outlive, strict=True)):
            for storage in sorted(outlive):
                readers = tuple(self.calls[reader].name for reader in self._readers.get(storage, ()))
                bytes_of_value[call.name, readers, storage in self._returned, self._only_result(index, storage)] += (
                    self._sizes[storage]
                )
        return [HeldBytes(size, *key) for key, size in bytes_of_value.items()]

    def _only_result(self, index: int, storage: int) -> int | None:
        """The position of a call's result that alone refers to a storage, and to no other; ``None``: there is none."""
        if storage in self._returned or self._results_with.get(storage, 0) != 1:
            return None
        if any(storage in gradients for gradients in self._gradients):
            return None
        return next(
            (position for position, storages in enumerate(self.calls[index].returns) if storages == [storage]), None
        )

    def _outlive_call(self, index: int) -> set[int]:
        """Storages that a call makes and later ones read, or the caller gets."""
        events = self._events[self.calls[index].start : self.calls[index].end]
        allocated = {storage for event in events for storage in event.makes}
        return {s for s in allocated if self._readers.get(s, [-1])[-1] > index} | (allocated & self._returned)

    # A storage that the backward of weights reads may die later than in this order: schedules delay that backward.
    def _dying(self, index: int) -> set[int]:
        """Storages that come in, have no later reader, and belong to neither the caller nor the schedule."""
        incoming = self.calls[index].reads - self._returned - self._arrived
        return {s for s in incoming if self._readers[s][-1] == index and not self._is_contested(self._readers[s])}

    def _is_contested(self, readers: list[int]) -> bool:
        """Return whether the last reader depends on the schedule, which may delay gradients of parameters."""
        return len(readers) > 1 and any(self.calls[reader].name.endswith(Phase.WEIGHT) for reader in readers)

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._sizes[storage] for storage in storages)


def _gradients(course: Course, owners: Sequence[int | None]) -> dict[str, dict[int, int]]:
    """By name of the call that returns them, the owners of gradients by storage."""
    by_call: dict[str, dict[int, int]] = {}
    if course.backward is None:
        return by_call
    items: Any = course.backward.module.graph.output_node().args[0]
    for item, owner, leaves in zip(items, owners, course.gradients, strict=True):
        if isinstance(item, fx.Node) and item.op == "call_function" and owner is not None:
            (giver, *_) = item.all_input_nodes
            by_call.setdefault(str(giver.target), {}).update(dict.fromkeys(set(leaves) - {OUTSIDE}, owner))
    return by_call
