"""V-shaped schedules: each device has two runs of stages, one on the way down the devices and one on the way back up.

::

    device 0   stage 0 │      ▲ stage 5      the loss is computed where the batch comes in, and the middle of the model
    device 1   stage 1 │      │ stage 4      passes from one stage to the next without leaving its device
    device 2   stage 2 ▼──────┘ stage 3

Qi et al., "Pipeline parallelism with controllable memory", 2024: a stage that is early in one half of the model is
late in the other, so all devices hold about the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from roundpipe_fx.schedules.action import ActionKind
from roundpipe_fx.schedules.timetable import NUMBER, Schedule, run_of

SchedulePhase = tuple[int, str]
"""How often something is repeated, and what: ``"F0 I1 W"`` is a forward of the way down, gradients of inputs on the way
up, and the gradients of parameters that have waited longest. Each takes the next microbatch."""

_FORWARD, _WEIGHT = NUMBER[ActionKind.FORWARD], NUMBER[ActionKind.BACKWARD_WEIGHT]


def v_shaped(
    name: str, phases: Callable[[int, int, int], Sequence[SchedulePhase]], devices: int, stages: int, microbatches: int
) -> Schedule:
    """The schedule of some phases. Stages are divided among both ways of all devices as evenly as possible.

    Args:
        phases: returns those of a device, given its number, how many there are, and how many microbatches: at least as
            many as fill the pipeline. If there are fewer, the actions of those that are missing are left out.
    """
    # The phases assume enough microbatches to fill the pipeline; the surplus is removed below.
    enough = max(microbatches, 2 * devices - 1)
    orders = []
    for device in range(devices):
        parts = [np.tile(_parsed(text), (count, 1)) for count, text in phases(device, devices, enough)]
        work = _numbered(np.concatenate(parts))
        # Device d has run d on the way down, and run 2p - 1 - d on the way up.
        runs = [run_of(position, 2 * devices, stages) for position in (device, 2 * devices - 1 - device)]
        orders.append(_by_stages(work[work[:, 2] < microbatches], runs))
    return Schedule(name, tuple(orders))


def _parsed(text: str) -> np.ndarray:
    """Kind and way of each action; that of gradients of parameters is known once all actions are."""
    rows = [(NUMBER[ActionKind(word[0])], int(word[1:] or -1)) for word in text.split()]
    return np.array(rows, dtype=np.int32).reshape(-1, 2)


def _numbered(work: np.ndarray) -> np.ndarray:
    """Kind, way and microbatch: the n-th of a kind and way is for microbatch n, and W follows I in the same order."""
    batches = np.zeros((len(work), 1), dtype=np.int32)
    numbered = np.concatenate([work, batches], axis=1)
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT):
        for way in (0, 1):
            positions = np.flatnonzero((work[:, 0] == NUMBER[kind]) & (work[:, 1] == way))
            numbered[positions, 2] = np.arange(len(positions))
    # The n-th W belongs to the n-th I, whichever way that is.
    numbered[work[:, 0] == _WEIGHT, 1:] = numbered[work[:, 0] == NUMBER[ActionKind.BACKWARD_INPUT], 1:]
    return numbered


def _by_stages(work: np.ndarray, runs: Sequence[Sequence[int]]) -> np.ndarray:
    """Each action for all stages of its way, backwards from the last one to the first."""
    firsts = np.array([run[0] if run else 0 for run in runs])[work[:, 1]]
    counts = np.array([len(run) for run in runs])[work[:, 1]]
    order = np.repeat(work, counts, axis=0)
    # Position within the run of stages: 0, 1, … for each action, forwards upwards and backwards downwards.
    within = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts, counts = np.repeat(firsts, counts), np.repeat(counts, counts)
    order[:, 1] = firsts + np.where(order[:, 0] == _FORWARD, within, counts - 1 - within)
    return order
