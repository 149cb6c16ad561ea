"""A step of several calls or backwards: the memory of calls that are alive at the same time.

A budget applies to the step, and a step may call the model several times before the backward (a Siamese loss, a
discriminator that sees real and generated data), or run it as several graphs. While the forward of a call runs, earlier
calls hold their saved values and outputs; while its backward runs, they still do, and the gradients of later calls are
allocated. The calls of a step are observed as it runs (:mod:`roundpipe_fx.runtime.step_calls`); the memory of each call
follows from its plan, as a *footprint*. The peak of the step is computed by going through its events once.

A call may also go backward several times (``retain_graph=True``, one backward for each of several losses). All but the
last keep what the call has saved, and gradients of the later ones are made beside those of the earlier ones.

Outputs count until the step is over, and so do inputs of later calls that no earlier call was given, since they may
have been computed within the step. What other code allocates, beyond the loss that plans expect
(:mod:`roundpipe_fx.analysis.outside_loss`), is not counted.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roundpipe_fx.analysis.liveness import Event, find_lifetimes, levels_of


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory of one call of a graph, in bytes.

    Attributes:
        forward: peak of its forward.
        saved: values that it saves for its backward.
        loss: peak of a loss outside the model.
        arriving: what stays allocated until the backward is over: the loss and the incoming gradients.
        backward: peak of its backward beyond all these.
        retained: the same for a backward that keeps the saved values for another one (``retain_graph=True``).
        gradients: gradients, by number of the input.
    """

    forward: int
    saved: int
    outputs: int
    loss: int = 0
    arriving: int = 0
    backward: int = 0
    retained: int = 0
    gradients: Mapping[int, int] = field(default_factory=dict)

    @property
    def held(self) -> int:
        """Bytes that are held between its forward and its backward."""
        return self.saved + self.outputs


def compute_footprint(
    events: Sequence[Event],
    forward: int,
    sizes: Sequence[int] | Mapping[int, int],
    lasting: Sequence[int],
    arriving: Mapping[int, Sequence[int]],
    outputs: int,
    gradients: Mapping[int, int],
    beyond: int = 0,
) -> Footprint:
    """Compute the footprint of a call.

    Args:
        events: events of its forward, one for the loss outside the model, and those of its backward.
        forward: number of events of the forward.
        lasting: storages that live to the end.
        arriving: storages allocated by others, by position; those after the loss are the loss and incoming gradients.
        outputs: bytes of its outputs.
        gradients: bytes of gradients, by number of the input.
        beyond: bytes that are added to its backward.
    """
    # Three parts of the events: forward, the loss's moment, backward.
    levels = levels_of(events, sizes, lasting, arriving)
    before = max((during for during, _ in levels[:forward]), default=0)
    during_loss, held = levels[forward]
    come = sum(sizes[storage] for storage in arriving.get(forward + 1, ()))

    def peak_beyond(levels: Sequence[tuple[int, int]]) -> int:
        within = max((during for during, _ in levels[forward + 1 :]), default=held + come)
        return max(within - held - come, 0) + beyond

    lifetimes = find_lifetimes(events, lasting, arriving)
    # What was made in the forward and is read in the backward. A retained backward keeps all of it to its end.
    saved = [storage for storage, (first, last) in lifetimes.items() if first <= forward < last]
    retaining = levels_of(events, sizes, [*lasting, *saved], arriving)
    return Footprint(
        forward=max(before, during_loss - events[forward].workspace),
        saved=max(held - outputs, 0),
        outputs=outputs,
        loss=events[forward].workspace,
        arriving=come,
        backward=peak_beyond(levels),
        retained=peak_beyond(retaining),
        gradients=gradients,
    )


class NotedEvent(enum.Enum):
    """An event of a call: its forward runs, its backward runs, or its saved values are freed.

    A retained backward keeps the saved values, so that another one may follow (``retain_graph=True``).
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    RETAINED = "retained"
    FREED = "freed"


@dataclass(frozen=True, kw_only=True)
class NotedCall:
    """A call that a step made.

    Attributes:
        graph: name of the graph.
        inputs: storages of its inputs, by position.
        outputs: storages of its outputs.
        new_input_bytes: bytes of inputs that no earlier call of the step has read or returned.
        consumed: whether later calls read all its outputs, so that no loss is computed from them.
        footprint: footprint of its plan when it was recorded.
    """

    graph: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    new_input_bytes: int
    consumed: bool
    footprint: Footprint


@dataclass(frozen=True)
class NotedStep:
    """A step with several calls.

    Attributes:
        calls: the calls, in the order of their forwards.
        events: the events in order, with the number of the call.
    """

    calls: tuple[NotedCall, ...]
    events: tuple[tuple[NotedEvent, int], ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for steps that lead to the same plan."""
        numbers: dict[int, int] = {}

        # Storages by order of appearance, so that two steps with other tensors and the same pattern are equal.
        def numbered(storages: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(numbers.setdefault(storage, len(numbers)) for storage in storages)

        calls = tuple(
            (call.graph, call.new_input_bytes, call.consumed, numbered(call.inputs), numbered(call.outputs))
            for call in self.calls
        )
        return calls, self.events

    @property
    def retains(self) -> bool:
        """Return whether a backward of it kept the saved values for another one."""
        return any(event is NotedEvent.RETAINED for event, _ in self.events)

    @property
    def most_backwards(self) -> int:
        """Largest number of backwards of one call."""
        times = Counter(number for event, number in self.events if event in _BACKWARDS)
        return max(times.values(), default=0)


_BACKWARDS = (NotedEvent.BACKWARD, NotedEvent.RETAINED)


def is_usual(calls: int, events: Sequence[tuple[NotedEvent, int]]) -> bool:
    """Return whether a step is one call that goes backward at most once, during which its saved values die.

    Args:
        calls: number of its calls.
    """
    return calls == 1 and [event for event, _ in events if event in _BACKWARDS] in ([], [NotedEvent.BACKWARD])


def count_most_alive(step: NotedStep, graph: str | None = None) -> int:
    """Largest number of calls of a graph, or of all graphs, that are alive at the same time in a step."""
    alive: set[int] = set()
    largest = 0
    for event, number in step.events:
        if graph is not None and step.calls[number].graph != graph:
            continue
        if event is NotedEvent.FORWARD:
            alive.add(number)
        elif event is NotedEvent.FREED:
            alive.discard(number)
        largest = max(largest, len(alive))
    return largest


def simulate_step_peak(step: NotedStep, footprints: Mapping[str, Footprint]) -> int:
    """Peak bytes of a step.

    Args:
        footprints: footprints by graph; for other graphs the call's own footprint is used.
    """
    live = peak = 0
    totals: dict[int, int] = {}  # bytes of accumulated gradients, by storage of the input
    waiting: list[int] = []  # calls whose outputs go into a loss that is not computed yet
    went_back: set[int] = set()
    for event, number in step.events:
        call = step.calls[number]
        footprint = footprints.get(call.graph, call.footprint)
        if event is NotedEvent.FORWARD:
            # Inputs that no earlier call knows were allocated within the step.
            live += call.new_input_bytes
            peak = max(peak, live + footprint.forward)
            live += footprint.held
            if not call.consumed:
                waiting.append(number)
        elif event in _BACKWARDS:
            if number in went_back and not call.consumed:
                waiting.append(number)  # the loss of another backward has memory of its own
            went_back.add(number)
            # All losses of calls that wait are computed before the first backward runs.
            losses = [footprints.get(step.calls[n].graph, step.calls[n].footprint) for n in waiting]
            waiting.clear()
            peak = max(peak, live + sum(loss.loss for loss in losses))
            live += sum(loss.arriving for loss in losses)
            is_retained = event is NotedEvent.RETAINED
            peak = max(peak, live + (footprint.retained if is_retained else footprint.backward))
            gradient_bytes = sum(footprint.gradients.values())
            # Inputs with a gradient already get the sum of both: the new gradient is freed after it was added.
            added = [size for position, size in footprint.gradients.items() if call.inputs[position] in totals]
            # Autograd accumulates the gradients of an input one after another, out of place the first time.
            freed = 0 if is_retained else footprint.saved
            peak = max(peak, live - freed + gradient_bytes + max(added, default=0))
            live += gradient_bytes - sum(added)
            totals.update((call.inputs[position], size) for position, size in footprint.gradients.items())
            # The gradients of its outputs, which later calls have computed, have been read.
            live -= sum(totals.pop(storage, 0) for storage in call.outputs)
        else:
            live -= footprint.saved
    return peak


@dataclass(frozen=True)
class StepNeeds:
    """The steps that a graph takes part in, for planning it.

    Attributes:
        graph: name of the graph that is planned.
        steps: steps that call it.
        footprints: footprints of the other graphs.
        gradients: bytes of its gradients, by number of the input.
        limit: bytes of the budget, where that is a share of what several graphs can reach together.
    """

    graph: str
    steps: tuple[NotedStep, ...]
    footprints: Mapping[str, Footprint]
    gradients: Mapping[int, int] = field(default_factory=dict)
    limit: int | None = None

    def peak(self, footprint: Footprint) -> int:
        """Peak bytes of the largest step, if the graph has a footprint."""
        planned = dataclasses.replace(footprint, gradients=self.gradients or footprint.gradients)
        footprints = {**self.footprints, self.graph: planned}
        return max(simulate_step_peak(step, footprints) for step in self.steps)

    @property
    def alive(self) -> int:
        """Largest number of calls of the graph that are alive at the same time."""
        return max(count_most_alive(step, self.graph) for step in self.steps)

    @property
    def alive_of_all(self) -> int:
        """Largest number of calls of any graphs that are alive at the same time."""
        return max(count_most_alive(step) for step in self.steps)
