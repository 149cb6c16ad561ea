"""Vector clocks: which actions of other devices are certainly over when an action ends, however long each takes.

The method is that of Fidge, 1988, and Mattern, 1989. An action depends on the previous one of its device and on those
that it reads, so its clock is the maximum of theirs, plus itself::

    device 0   F0.0 [1 0] ── F0.1 [2 0] ───────────── B0.0 [3 2]
                   └──────┐                      ┌──────┘
    device 1            F1.0 [1 1] ── B1.0 [1 2] ┘
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roundpipe_fx.schedules.places import Places
from roundpipe_fx.schedules.timetable import Schedule

__all__ = ["vector_clocks"]


def vector_clocks(
    schedule: Schedule, codes: Sequence[np.ndarray], waves: Sequence[np.ndarray], reads: np.ndarray, places: Places
) -> list[np.ndarray]:
    """For each device and each of its actions, the number of actions of every device that must be over when it ends.

    Args:
        schedule: the order in which devices run their actions.
        codes: for each device, the number of each action's stage action.
        waves: for each device, a number for each action that is greater than those of all that it waits for.
        reads: for each stage action, the numbers of those that it reads; padded with -1.
        places: where stage actions run.
    """
    clocks = [np.zeros((len(of_device), len(codes)), dtype=np.int64) for of_device in codes]
    # By waves, whatever an action waits for has its clock already.
    order = sorted(
        (wave, device, at) for device, of_device in enumerate(waves) for at, wave in enumerate(of_device.tolist())
    )
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
