"""1F1B: the fewest microbatches in flight that keep all devices busy.

Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019, in the flushing form of
"Memory-efficient pipeline-parallel DNN training", 2021. With equal stages its bubble is that of GPipe, but device d
of p holds at most p - d microbatches.
"""

from __future__ import annotations

import numpy as np

from roundpipe_fx.schedules.action import ActionKind
from roundpipe_fx.schedules.spec import ScheduleSpec
from roundpipe_fx.schedules.timetable import Schedule, block_of, pairs, run_of


def one_f_one_b(devices: int, stages: int, microbatches: int) -> Schedule:
    """The 1F1B schedule. Each device has consecutive stages, divided as evenly as possible."""
    orders = []
    for device in range(devices):
        # Three devices, four microbatches:
        #     0: F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3
        #     1: F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
        #     2: F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3
        # Device d runs p - 1 - d forwards ahead, then one forward and one backward in turn, then the rest.
        stages_here = run_of(device, devices, stages)
        ahead = min(microbatches, devices - 1 - device)
        forward = block_of(ActionKind.FORWARD, stages_here, microbatches)
        backward = block_of(ActionKind.BACKWARD, stages_here[::-1], microbatches)
        warm, width = ahead * len(stages_here), len(stages_here)
        steady = len(forward) - warm
        orders.append(
            np.concatenate([forward[:warm], pairs(forward[warm:], backward[:steady], width), backward[steady:]])
            if width
            else forward
        )
    return Schedule("1f1b", tuple(orders))


ONE_F_ONE_B = ScheduleSpec(
    "1f1b",
    one_f_one_b,
    updates_across_stages=True,
    takes_pieces=True,
    about="the fewest microbatches in flight that keep all devices busy",
)
