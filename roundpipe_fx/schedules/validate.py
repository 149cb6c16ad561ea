"""Validation of a whole schedule before anything runs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from roundpipe_fx.schedules.action import Action, ActionKind, StageAction
from roundpipe_fx.schedules.stage_graph import StageGraph
from roundpipe_fx.schedules.step_costs import StepCosts
from roundpipe_fx.schedules.timetable import KINDS, Schedule
from roundpipe_fx.schedules.timing import Deadlock, simulate_time
from roundpipe_fx.torch_private import PassedThrough


class InvalidScheduleError(PassedThrough, ValueError):
    """A schedule cannot run. The message names the action at fault."""


def validate(schedule: Schedule, graph: StageGraph, microbatches: int, devices: int) -> None:
    """Check that a schedule contains every action exactly once, without deadlock.

    Args:
        schedule: the schedule to check.
        graph: the stage actions to run for each microbatch.
        devices: number of devices that are available.

    Raises:
        InvalidScheduleError: an action is unknown, missing or duplicated; the forwards of a stage are not in the order
            of microbatches, in which buffers are updated; the schedule deadlocks; or it has too many devices.
    """
    if schedule.devices > devices:
        raise InvalidScheduleError(f"the schedule is for {schedule.devices} devices, but there are {devices}.")
    seen: dict[StageAction, np.ndarray] = {step: np.full(microbatches, -1) for step in graph.steps}
    for device, order in enumerate(schedule.orders):
        # Each stage action once per device: kind and stage are one number.
        for code in np.unique(order[:, 0] * (1 << 20) + order[:, 1]).tolist():
            kind, stage = KINDS[code >> 20], code & ((1 << 20) - 1)
            batches = order[(order[:, 0] == code >> 20) & (order[:, 1] == stage), 2]
            _check(device, kind, stage, batches, seen, graph, microbatches)
    for (kind, stage), where in seen.items():
        if (where < 0).any():
            missing = Action(kind, stage, int(np.flatnonzero(where < 0)[0]))
            raise InvalidScheduleError(f"{missing} is missing from the schedule.")
    # A run with equal seconds finds every circle: a deadlock depends on the orders only.
    try:
        simulate_time(schedule, graph, StepCosts(seconds=dict.fromkeys(graph.steps, 1.0)))
    except Deadlock as error:
        raise InvalidScheduleError(str(error)) from None


def _check(
    device: int,
    kind: ActionKind,
    stage: int,
    batches: np.ndarray,
    seen: dict[StageAction, np.ndarray],
    graph: StageGraph,
    microbatches: int,
) -> None:
    if not graph.has(kind, stage):
        example = Action(kind, stage, int(batches[0]))
        raise InvalidScheduleError(
            f"{example} on device {device} is not an action of this model; valid actions are "
            f"{_steps_text(graph.steps)}."
        )
    if (batches >= microbatches).any() or (batches < 0).any():
        wrong = Action(kind, stage, int(batches[(batches >= microbatches) | (batches < 0)][0]))
        raise InvalidScheduleError(f"{wrong} on device {device}: there are {microbatches} microbatches.")
    where = seen[kind, stage]
    counts = np.bincount(batches, minlength=microbatches)
    # Twice on this device, or once here and once on another one.
    twice = np.flatnonzero((counts > 1) | ((counts > 0) & (where >= 0)))
    if len(twice):
        again = Action(kind, stage, int(twice[0]))
        devices = sorted({device, *(int(where[b]) for b in twice[:1] if where[b] >= 0)})
        devices_text = "twice on device" if len(devices) == 1 else "on devices"
        raise InvalidScheduleError(f"{again} occurs more than once: {devices_text} {', '.join(map(str, devices))}.")
    if kind is ActionKind.FORWARD and (np.diff(batches) < 0).any():
        late = int(batches[1:][np.diff(batches) < 0][0])
        raise InvalidScheduleError(
            f"{Action(kind, stage, late)} on device {device} comes after a later microbatch: a stage's forwards run in "
            "the order of the microbatches, which update statistics one after another."
        )
    where[batches] = device


def _steps_text(steps: Iterable[StageAction]) -> str:
    by_kind: dict[ActionKind, list[int]] = {}
    for kind, stage in steps:
        by_kind.setdefault(kind, []).append(stage)
    return ", ".join(f"{kind}{min(stages)} to {kind}{max(stages)}" for kind, stages in by_kind.items())
