"""Costs of stage actions, and the peak memory of each device under a schedule.

A value is on the device that computes it until its last reader there. A device that reads a value of another device
holds it from the moment it is computed, whether it waits for it or not, until its own last reader. Between its actions
a device holds such values; during an action it needs the peak of the stage module in addition. Gradients of parameters
live from the first microbatch of a stage action to the end of the step, gradients of inputs from their own microbatch
to the end, where they are concatenated to the batch's gradient. Where a loss is computed outside the model, between all
forwards and all backwards, the caller's device needs memory for that too.

Devices may be faster or slower than simulated, so a received value is counted from the earliest action at which it can
have arrived: only those actions of the receiver that the sender depends on are certain to be over when the value is
computed. The peak is therefore an upper bound for any timing; on one device nothing is received, and it is exact.
Schedules of more than a hundred thousand actions are assumed to run as simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from roundpipe_fx.schedules.action import ActionKind, StageAction
from roundpipe_fx.schedules.places import Places
from roundpipe_fx.schedules.residency import ResidencyWindow, residency_windows
from roundpipe_fx.schedules.schedule import KINDS, Schedule

__all__ = ["Held", "StepCosts", "peaks_of"]


@dataclass(frozen=True)
class Held:
    """Bytes that outlive the stage action that allocates them.

    Attributes:
        bytes: number of bytes, for one microbatch.
        maker: the stage action that allocates them.
        readers: stage actions that read them.
        lasts: whether they stay allocated to the end of the step, on the device of ``maker``.
    """

    bytes: int
    maker: StageAction
    readers: tuple[StageAction, ...]
    lasts: bool = False


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs of stage actions. Bytes and seconds are those of one microbatch.

    Attributes:
        seconds: of each stage action.
        transfer_seconds: of sending the results of a stage action to a reader, by (maker, reader); 0 where absent.
        held: bytes that outlive the stage action that allocates them.
        peak_bytes: peak bytes that a stage action allocates beyond those that are allocated when it begins.
        first_peak_bytes: the same for the first time that a device runs the stage action; where absent, as later.
        base_bytes: bytes that stay allocated once a stage action has run for the first time (gradients of parameters),
            by stage action and by number of the parameter. Stage actions on one device share a parameter's gradient.
        input_gradient_bytes: bytes of gradients of inputs that each microbatch has for itself, by stage action and by
            number of the input. At the end of the step those of all microbatches are concatenated on the first device.
        brought_bytes: bytes of incoming gradients, by the stage action that reads them. They are allocated from the
            beginning or, where all forwards run before all backwards, from the first backward on.
        outside_bytes: bytes that a loss outside the model needs on the first device, between all forwards and all
            backwards.
        loss_bytes: those of ``outside_bytes`` that stay allocated until the last backward is over.
        copied_bytes: bytes of the caller's tensors that a stage action reads, by stage action and by number of the
            tensor.
        parameters: numbers of the tensors that are shared by all microbatches.
        away: devices other than the caller's. They hold copies of its tensors, assumed to be there for the whole step,
            and return gradients at the end.
        on_host: numbers of the tensors that stay on the host: devices hold copies of them, and their gradients, during
            residency windows (:mod:`roundpipe_fx.schedules.residency`). The caller's other tensors are on its device.
            ``None``: the model is not offloaded.
        host_bandwidth: bytes per second between the host and a device.
    """

    seconds: Mapping[StageAction, float]
    transfer_seconds: Mapping[tuple[StageAction, StageAction], float] = field(default_factory=dict)
    held: tuple[Held, ...] = ()
    peak_bytes: Mapping[StageAction, int] = field(default_factory=dict)
    first_peak_bytes: Mapping[StageAction, int] = field(default_factory=dict)
    base_bytes: Mapping[StageAction, Mapping[int, int]] = field(default_factory=dict)
    input_gradient_bytes: Mapping[StageAction, Mapping[int, int]] = field(default_factory=dict)
    brought_bytes: Mapping[StageAction, int] = field(default_factory=dict)
    outside_bytes: int = 0
    loss_bytes: int = 0
    copied_bytes: Mapping[StageAction, Mapping[int, int]] = field(default_factory=dict)
    parameters: frozenset[int] = frozenset()
    away: frozenset[int] = frozenset()
    on_host: frozenset[int] | None = None
    host_bandwidth: float = 1.0

    def windows(
        self, schedule: Schedule, codes: Sequence[np.ndarray], steps: Sequence[StageAction]
    ) -> list[list[ResidencyWindow]]:
        """The residency windows of each device; none if the model is not offloaded.

        Args:
            schedule: the actions of each device.
            codes: for each device, the number of each action's stage action.
            steps: the stage actions, by number.
        """
        if self.on_host is None:
            return [[] for _ in codes]
        reads, gradients = (
            [{number: size for number, size in of.get(step, {}).items() if number in self.on_host} for step in steps]
            for of in (self.copied_bytes, self.base_bytes)
        )
        return [
            residency_windows(order[:, 1], own, reads, gradients, _turn(order, schedule))
            for order, own in zip(schedule.orders, codes, strict=True)
        ]


def _turn(order: np.ndarray, schedule: Schedule) -> int:
    """Position at which a device's backwards begin, if all forwards run before all backwards; else 0."""
    return int((order[:, 0] == _FORWARD).sum()) if schedule.forwards_before_backwards else 0


def peaks_of(
    schedule: Schedule,
    codes: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    waves: Sequence[np.ndarray],
    reads: np.ndarray,
    steps: Sequence[StageAction],
    costs: StepCosts,
    others: Mapping[int, StepCosts],
    windows: Sequence[Sequence[ResidencyWindow]],
) -> tuple[int, ...]:
    """Peak bytes of each device.

    For each device, ``changes[i]`` collects the bytes allocated minus the bytes freed just before its action i; its
    cumulative sum is the level of bytes held while action i runs. Everything that outlives an action is entered there:
    values from ``maker + 1`` (their maker counts them in its own peak) to ``last reader + 1``, received values from the
    earliest action at which they can arrive, gradients from the first action that computes them to the end. The peak is
    the largest sum of the level and the peak of the action that runs then. The moment between forwards and backwards,
    and the end of the step, at which gradients are gathered, are counted separately.

    Args:
        schedule: the order in which devices run their actions.
        codes: for each device, the number of each action's stage action.
        ends: for each device, the seconds at which its actions end.
        waves: for each device, a number for each action that is greater than those of all that it waits for.
        reads: for each stage action, the numbers of those that it reads; padded with -1.
        steps: the stage actions, by number.
        costs: costs of the stage actions.
        others: costs of microbatches of another size, by index.
        windows: residency windows of each device, where tensors stay on the host.
    """
    number = {step: index for index, step in enumerate(steps)}
    places = Places(schedule, codes)
    # The distinct costs, and which of them each microbatch has.
    kinds = list({id(kind): kind for kind in (costs, *others.values())}.values())
    kind_of = np.zeros(max(schedule.microbatches, 1), dtype=np.intp)
    for batch, of_batch in others.items():
        kind_of[batch] = next(place for place, kind in enumerate(kinds) if kind is of_batch)
    peak = np.array([[kind.peak_bytes.get(step, 0) for step in steps] for kind in kinds], dtype=np.int64)
    first_peak = np.array(
        [[kind.first_peak_bytes.get(step, kind.peak_bytes.get(step, 0)) for step in steps] for kind in kinds],
        dtype=np.int64,
    )
    brought = np.array([[kind.brought_bytes.get(step, 0) for step in steps] for kind in kinds], dtype=np.int64)
    certain = None
    if any(kind.held for kind in kinds) and len(codes) > 1 and schedule.size <= _MOST_EXACT:
        certain = _certainly_over(schedule, codes, waves, reads, places)
    changes = [np.zeros(len(own) + 2, dtype=np.int64) for own in codes]
    callers = next((device for device in range(len(codes)) if device not in costs.away), -1)
    made_here = 0  # bytes of outputs that the caller's device computes itself; it gets the others too
    # Values that outlive their stage action: on the device of their maker, then on every other device that reads them.
    for which, held in ((place, held) for place, kind in enumerate(kinds) for held in kind.held):
        maker = number[held.maker]
        for device, at, batches in places.of(maker):
            at, batches = at[kind_of[batches] == which], batches[kind_of[batches] == which]
            until = places.last(device, [number[reader] for reader in held.readers], batches)
            if held.lasts:
                until = np.full(len(at), len(codes[device]))
                made_here += held.bytes * len(at) if device == callers else 0
            here = until >= 0
            np.add.at(changes[device], at[here] + 1, held.bytes)
            np.add.at(changes[device], until[here] + 1, -held.bytes)
            made = ends[device][at]
            for other in {d for reader in held.readers for d in places.devices(number[reader])} - {device}:
                until = places.last(other, [number[reader] for reader in held.readers], batches)
                there = until >= 0
                if certain is not None:
                    arrives = certain[device][at[there], other]
                else:
                    arrives = np.searchsorted(ends[other], made[there], side="right")
                np.add.at(changes[other], np.minimum(arrives, until[there]), held.bytes)
                np.add.at(changes[other], until[there] + 1, -held.bytes)
    # Gradients of inputs: from the first action of their microbatch that contributes to them, to the end of the step.
    of_inputs = [_by_owner(kind.input_gradient_bytes) for kind in kinds]
    for which, by_owner in enumerate(of_inputs):
        for device, change in enumerate(changes):
            for owner, size in by_owner.items():
                makers = [number[step] for step, own in kinds[which].input_gradient_bytes.items() if owner in own]
                at = places.first(device, makers, np.flatnonzero(kind_of[: schedule.microbatches] == which))
                np.add.at(change, at[at >= 0] + 1, size)
    inputs_gradients = sum(sum(of_inputs[which].values()) for which in kind_of[: schedule.microbatches].tolist())
    put_together = 0  # inputs are concatenated one after another, and their parts freed
    if schedule.microbatches > 1:
        put_together = sum(max(of_inputs[which].values(), default=0) for which in kind_of[: schedule.microbatches])
    lasting = [sum(held.bytes for held in kind.held if held.lasts) for kind in kinds]
    outside_bytes, loss_bytes = [kind.outside_bytes for kind in kinds], [kind.loss_bytes for kind in kinds]
    every_gradient = {
        owner: size for kind in kinds for base in kind.base_bytes.values() for owner, size in base.items()
    }
    brought_to = [
        int(brought[kind_of[order[:, 2]], own].sum()) for order, own in zip(schedule.orders, codes, strict=True)
    ]
    outputs = int(np.take(lasting, kind_of[: schedule.microbatches]).sum())
    found = []
    for device, (order, own, change) in enumerate(zip(schedule.orders, codes, changes, strict=True)):
        kind_at = kind_of[order[:, 2]]
        turn = _turn(order, schedule)
        firsts = []
        # Gradients of parameters: from the first action that adds to them. Those of an offloaded model leave after each
        # residency window, and so begin again in the next one. Such first actions have peaks of their own, too.
        for part in [window.places for window in windows[device]] or [range(len(own))]:
            present, first = np.unique(own[part.start : part.stop], return_index=True)
            firsts.append(first + part.start)
            known: set[int] = set()
            for place, code in sorted(zip(firsts[-1].tolist(), present.tolist(), strict=True)):
                base = kinds[kind_at[place]].base_bytes.get(steps[code], {})
                new = {owner: size for owner, size in base.items() if owner not in known}
                change[place + 1] += sum(new.values())
                known |= new.keys()
        first = np.concatenate(firsts)
        _add_windows(change, windows[device])
        outside = 0
        # Between forwards and backwards: outputs of other devices arrive at the caller's, where the loss is computed.
        if device == callers and (costs.away or schedule.forwards_before_backwards):
            change[turn] += outputs - made_here
        if schedule.forwards_before_backwards and device == callers:
            outside = int(np.cumsum(change)[turn] + np.take(outside_bytes, kind_of[: schedule.microbatches]).sum())
            change[turn] += np.take(loss_bytes, kind_of[: schedule.microbatches]).sum()
        change[turn] += sum(brought_to) if costs.away and device == callers else brought_to[device]
        # Copies of the caller's tensors live for the whole step.
        if costs.on_host is not None and device == callers:
            change[0] += _copies(np.concatenate(schedule.orders), np.concatenate(codes), steps, costs)
        elif device in costs.away:
            change[0] += _copies(order, own, steps, costs)
        # The peak while an action runs: what is held then, plus what the action itself allocates.
        levels = np.cumsum(change)
        level = levels[: len(own)]
        needed = peak[kind_at, own]
        needed[first] = first_peak[kind_at[first], own[first]]
        # At the end of the step the caller's device holds all gradients, and concatenates those of inputs.
        brings_all = costs.away and device not in costs.away and costs.on_host is None
        at_end = 0
        if brings_all:
            at_end = sum(every_gradient.values()) + inputs_gradients + put_together + outputs + sum(brought_to)
        elif device == callers:
            at_end = int(levels[len(own)]) + put_together
        found.append(max(outside, at_end, int((level + needed).max(initial=0)), int(level.max(initial=0))))
    return tuple(found)


def _by_owner(gradients: Mapping[StageAction, Mapping[int, int]]) -> dict[int, int]:
    """Bytes by number of the input, whose gradient several stage actions may contribute to."""
    found: dict[int, int] = {}
    for of_step in gradients.values():
        for owner, size in of_step.items():
            found[owner] = max(size, found.get(owner, 0))
    return found


def _copies(order: np.ndarray, codes: np.ndarray, steps: Sequence[StageAction], costs: StepCosts) -> int:
    """Bytes of a device's copies of the caller's tensors, except those that stay on the host."""
    batches: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    for code, batch in zip(codes.tolist(), order[:, 2].tolist(), strict=True):
        for tensor, size in costs.copied_bytes.get(steps[code], {}).items():
            if tensor in (costs.on_host or ()):
                continue
            sizes[tensor] = size
            batches.setdefault(tensor, set()).add(0 if tensor in costs.parameters else batch)
    return sum(size * len(batches[tensor]) for tensor, size in sizes.items())


def _add_windows(change: np.ndarray, windows: Sequence[ResidencyWindow]) -> None:
    """Enter the tensors of residency windows; gradients of a window are freed when the next one is over."""
    for window in windows:
        change[window.places.start] += window.resident
        change[window.places.stop] -= window.resident
    for window, following in pairwise(windows):
        change[following.places.stop] -= sum(window.gradients.values())


_MOST_EXACT = 100_000
"""Above this many actions the arrival of values is taken from the simulated times."""
_FORWARD = KINDS.index(ActionKind.FORWARD)


def _certainly_over(
    schedule: Schedule, codes: Sequence[np.ndarray], waves: Sequence[np.ndarray], reads: np.ndarray, places: Places
) -> list[np.ndarray]:
    """For each device and each of its actions, the number of actions of every device that must be over when it ends.

    These are vector clocks (Fidge, 1988; Mattern, 1989): an action depends on the previous one of its device and on
    those that it reads, so its clock is the maximum of theirs, plus itself.
    """
    clocks = [np.zeros((len(own), len(codes)), dtype=np.int64) for own in codes]
    order = sorted((wave, device, at) for device, own in enumerate(waves) for at, wave in enumerate(own.tolist()))
    for _, device, at in order:
        clock = clocks[device][at]
        if at:
            np.maximum(clock, clocks[device][at - 1], out=clock)
        batch = int(schedule.orders[device][at, 2])
        for source in reads[codes[device][at]].tolist():
            if source >= 0:
                maker, place = places.where(source, batch)
                np.maximum(clock, clocks[maker][place], out=clock)
        clock[device] = at + 1
    return clocks
