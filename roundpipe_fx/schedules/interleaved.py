"""Interleaved 1F1B: each device has several stages that lie apart, so the pipeline fills faster.

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021. With v equal
stages a device the bubble is v times smaller than 1F1B's, for more microbatches in flight. Microbatches go in groups of
as many as there are devices; a last group that is smaller works too.
"""

from __future__ import annotations

import numpy as np

from roundpipe_fx.schedules.action import Kind
from roundpipe_fx.schedules.blocks import pairs
from roundpipe_fx.schedules.schedule import NUMBER, Schedule

__all__ = ["interleaved"]


def interleaved(devices: int, stages: int, microbatches: int) -> Schedule:
    """Stage s runs on device s modulo ``devices``."""
    orders = []
    for device in range(devices):
        own = list(range(device, stages, devices))
        forward = _grouped(Kind.FORWARD, own, devices, microbatches)
        backward = _grouped(Kind.BACKWARD, own[::-1], devices, microbatches)
        ahead = 2 * (devices - 1 - device) + (len(own) - 1) * devices
        if microbatches % devices:
            # A smaller last group would otherwise be waited for by a device that it waits for.
            ahead = len(forward)
        ahead = min(ahead, len(forward))
        steady = len(forward) - ahead
        orders.append(
            np.concatenate([forward[:ahead], pairs(forward[ahead:], backward[:steady], 1), backward[steady:]])
        )
    return Schedule("interleaved", tuple(orders))


def _grouped(kind: Kind, stages: list[int], group: int, microbatches: int) -> np.ndarray:
    """Groups of microbatches; of each the first stage for all of the group, then the next stage."""
    rows = [
        (NUMBER[kind], stage, microbatch)
        for start in range(0, microbatches, group)
        for stage in stages
        for microbatch in range(start, min(start + group, microbatches))
    ]
    return np.array(rows, dtype=np.int32).reshape(-1, 3)
