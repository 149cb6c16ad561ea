"""GPipe: all forwards, then all backwards.

Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", 2019. With equal stages,
p devices and m microbatches, devices idle for (p - 1) / (m + p - 1) of the time; all microbatches are in flight at
once.
"""

from __future__ import annotations

import numpy as np

from roundpipe_fx.schedules.action import ActionKind
from roundpipe_fx.schedules.spec import ScheduleSpec
from roundpipe_fx.schedules.timetable import Schedule, block_of, run_of


def gpipe(devices: int, stages: int, microbatches: int) -> Schedule:
    """The GPipe schedule. Each device has consecutive stages, divided as evenly as possible."""
    orders = []
    for device in range(devices):
        stages_here = run_of(device, devices, stages)
        orders.append(
            np.concatenate(
                [
                    block_of(ActionKind.FORWARD, stages_here, microbatches),
                    block_of(ActionKind.BACKWARD, stages_here[::-1], microbatches),
                ]
            )
        )
    return Schedule("gpipe", tuple(orders))


GPIPE = ScheduleSpec(
    "gpipe",
    gpipe,
    updates_across_stages=True,
    holds_all_microbatches=True,
    takes_pieces=True,
    about="all forwards, then all backwards",
)
