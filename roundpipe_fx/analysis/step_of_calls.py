"""A step of several calls: what calls hold together that are alive at once.

A budget is a promise about the step, and a step may call the model more often than once before it goes backward (a
Siamese loss, a discriminator that sees real and false), or run it as several graphs. While one call's forward runs,
those before it hold what they saved and returned; while its backward runs, those before it still do, and the gradients
of those after it are there. Which calls a step is made of is seen as it runs (:mod:`roundpipe_fx.runtime.step_calls`);
what each does to memory its plan says, as a *footprint*. The peak of the step follows by going through it once.

Counted are the outputs, until the step is over, and inputs of later calls that earlier ones have not been given: they
may have been made within the step. Not seen is what code outside allocates beyond the loss that plans expect
(:mod:`roundpipe_fx.analysis.outside_loss`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roundpipe_fx.analysis.liveness import Event, levels_of

__all__ = [
    "Footprint",
    "NotedCall",
    "NotedEvent",
    "NotedStep",
    "StepNeeds",
    "footprint_of",
    "most_alive",
    "peak_of_step",
]


@dataclass(frozen=True)
class Footprint:
    """What one call of a graph does to memory, in bytes.

    Attributes:
        forward: most that its forward allocates at one time.
        saved: what it keeps for its backward.
        outputs: what it returns.
        loss: what a loss outside takes at most at one time.
        arriving: what is there of that until the backward is over: the loss and the incoming gradients.
        backward: most that its backward allocates at one time beyond all these.
        gradients: by number of the input.
    """

    forward: int
    saved: int
    outputs: int
    loss: int = 0
    arriving: int = 0
    backward: int = 0
    gradients: Mapping[int, int] = field(default_factory=dict)

    @property
    def held(self) -> int:
        """What is there between its forward and its backward."""
        return self.saved + self.outputs


def footprint_of(
    events: Sequence[Event],
    forward: int,
    sizes: Sequence[int] | Mapping[int, int],
    lasting: Sequence[int],
    arriving: Mapping[int, Sequence[int]],
    outputs: int,
    gradients: Mapping[int, int],
    beyond: int = 0,
) -> Footprint:
    """The footprint of a call.

    Args:
        events: of its forward, one for the loss outside, and those of its backward.
        forward: how many events the forward has.
        sizes: bytes by storage.
        lasting: storages that live to the end.
        arriving: storages that others make, by position; those after the loss are the loss's and incoming gradients.
        outputs: bytes of what it returns.
        gradients: bytes by number of the input.
        beyond: bytes that are counted in its backward beyond what events say.
    """
    levels = levels_of(events, sizes, lasting, arriving)
    before = max((during for during, _ in levels[:forward]), default=0)
    during_loss, held = levels[forward]
    come = sum(sizes[storage] for storage in arriving.get(forward + 1, ()))
    within = max((during for during, _ in levels[forward + 1 :]), default=held + come)
    return Footprint(
        max(before, during_loss - events[forward].workspace),
        max(held - outputs, 0),
        outputs,
        events[forward].workspace,
        come,
        max(within - held - come, 0) + beyond,
        gradients,
    )


class NotedEvent(enum.Enum):
    """What happens to a call."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FREED = "freed"
    """What it saved is there no longer."""


@dataclass(frozen=True)
class NotedCall:
    """A call that a step made.

    Attributes:
        graph: name of the graph.
        inputs: numbers of the storages that it was given, by place.
        outputs: numbers of those that it returned.
        brought: bytes of those that no earlier call of the step knows.
        consumed: whether later calls are given all that it returns, so that no loss is computed from that.
        footprint: of its plan, when it was noted.
    """

    graph: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    brought: int
    consumed: bool
    footprint: Footprint


@dataclass(frozen=True)
class NotedStep:
    """A step with several calls: what happened to which of them, in order.

    Attributes:
        calls: in the order of their forwards.
        events: with the number of the call.
    """

    calls: tuple[NotedCall, ...]
    events: tuple[tuple[NotedEvent, int], ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for steps that are planned for alike."""
        numbers: dict[int, int] = {}

        def numbered(storages: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(numbers.setdefault(storage, len(numbers)) for storage in storages)

        calls = tuple(
            (call.graph, call.brought, call.consumed, numbered(call.inputs), numbered(call.outputs))
            for call in self.calls
        )
        return calls, self.events


def most_alive(step: NotedStep, graph: str) -> int:
    """How many calls of a graph are alive at once in a step."""
    alive: set[int] = set()
    most = 0
    for what, number in step.events:
        if step.calls[number].graph != graph:
            continue
        if what is NotedEvent.FORWARD:
            alive.add(number)
        elif what is NotedEvent.FREED:
            alive.discard(number)
        most = max(most, len(alive))
    return most


def peak_of_step(step: NotedStep, footprints: Mapping[str, Footprint]) -> int:
    """The most bytes that a step holds at one time.

    Args:
        step: its calls.
        footprints: of its graphs; of others the call's own is taken.
    """
    live = peak = 0
    totals: dict[int, int] = {}  # gradients that are there, by input
    waiting: list[int] = []  # calls from whose outputs a loss is yet to be computed
    for what, number in step.events:
        call = step.calls[number]
        own = footprints.get(call.graph, call.footprint)
        if what is NotedEvent.FORWARD:
            live += call.brought
            peak = max(peak, live + own.forward)
            live += own.held
            if not call.consumed:
                waiting.append(number)
        elif what is NotedEvent.BACKWARD:
            losses = [footprints.get(step.calls[n].graph, step.calls[n].footprint) for n in waiting]
            waiting.clear()
            peak = max(peak, live + sum(loss.loss for loss in losses))
            live += sum(loss.arriving for loss in losses)
            peak = max(peak, live + own.backward)
            made = sum(own.gradients.values())
            again = [size for place, size in own.gradients.items() if call.inputs[place] in totals]
            # Autograd adds gradients of one input one after another, the first time into a new place.
            peak = max(peak, live - own.saved + made + max(again, default=0))
            live += made - sum(again)
            totals.update((call.inputs[place], size) for place, size in own.gradients.items())
            # What later calls' backwards have made of its outputs has been read.
            live -= sum(totals.pop(storage, 0) for storage in call.outputs)
        else:
            live -= own.saved
    return peak


@dataclass(frozen=True)
class StepNeeds:
    """What steps need while one of their graphs is planned.

    Attributes:
        graph: name of the one that is planned.
        steps: in which it takes part.
        footprints: of the others.
        gradients: of its own, by number of the input.
        limit: bytes of the budget, where that is a share of what several graphs can reach together.
    """

    graph: str
    steps: tuple[NotedStep, ...]
    footprints: Mapping[str, Footprint]
    gradients: Mapping[int, int] = field(default_factory=dict)
    limit: int | None = None

    def peak(self, own: Footprint) -> int:
        """The peak of the step that needs most, if the graph has this footprint."""
        whole = dataclasses.replace(own, gradients=self.gradients or own.gradients)
        footprints = {**self.footprints, self.graph: whole}
        return max(peak_of_step(step, footprints) for step in self.steps)

    @property
    def alive(self) -> int:
        """How many calls of the graph are alive at once."""
        return max(most_alive(step, self.graph) for step in self.steps)
