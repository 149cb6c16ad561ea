"""Interleaved 1F1B: each device has several non-adjacent stages, so the pipeline fills faster.

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021. With v equal
stages per device, the bubble is v times smaller than that of 1F1B, at the cost of more microbatches in flight.
Microbatches are processed in groups of the number of devices; the last group may be smaller.
"""

from __future__ import annotations

import numpy as np

from roundpipe_fx.schedules.action import ActionKind
from roundpipe_fx.schedules.spec import ScheduleSpec
from roundpipe_fx.schedules.timetable import NUMBER, Schedule, pairs


def interleaved(devices: int, stages: int, microbatches: int) -> Schedule:
    """The interleaved 1F1B schedule. Stage s runs on device s modulo ``devices``."""
    # A smaller last group is scheduled as a full one and the missing microbatches are removed afterwards; likewise
    # for stages, where some devices have one less than others.
    whole = -(-microbatches // devices) * devices
    all_stages = -(-stages // devices) * devices
    orders = []
    for device in range(devices):
        # Two devices, four stages, four microbatches, in groups of two:
        #     0: F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3
        #     1: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3
        stages_here = list(range(device, all_stages, devices))
        forward = _grouped(ActionKind.FORWARD, stages_here, devices, whole)
        backward = _grouped(ActionKind.BACKWARD, stages_here[::-1], devices, whole)
        # Forwards ahead of the first backward: two for each later device, and a whole group for each further stage of
        # this one (Narayanan et al., section 2.2).
        ahead = min(2 * (devices - 1 - device) + (len(stages_here) - 1) * devices, len(forward))
        steady = len(forward) - ahead
        order = np.concatenate([forward[:ahead], pairs(forward[ahead:], backward[:steady], 1), backward[steady:]])
        orders.append(order[(order[:, 1] < stages) & (order[:, 2] < microbatches)])
    return Schedule("interleaved", tuple(orders))


def _grouped(kind: ActionKind, stages: list[int], group: int, microbatches: int) -> np.ndarray:
    """For each group of microbatches: the first stage for the whole group, then the next stage."""
    rows = [
        (NUMBER[kind], stage, microbatch)
        for start in range(0, microbatches, group)
        for stage in stages
        for microbatch in range(start, start + group)
    ]
    return np.array(rows, dtype=np.int32).reshape(-1, 3)


INTERLEAVED = ScheduleSpec(
    "interleaved",
    interleaved,
    stages_per_device=2,
    gains_by_stages=True,
    about="several non-adjacent stages per device, so the pipeline fills faster",
)
