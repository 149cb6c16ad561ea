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
        # Three devices, three microbatches:
        #     0: F0.0 F0.1 F0.2 B0.0 B0.1 B0.2
        #     1: F1.0 F1.1 F1.2 B1.0 B1.1 B1.2
        #     2: F2.0 F2.1 F2.2 B2.0 B2.1 B2.2
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
