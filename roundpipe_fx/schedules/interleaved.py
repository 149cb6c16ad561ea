"""Interleaved 1F1B: each device has several stages that lie apart, so the pipeline fills faster.

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021. With v equal
stages a device the bubble is v times smaller than 1F1B's, for more microbatches in flight. Microbatches go in groups of
as many as there are devices; a last group that is smaller works too.
"""

from __future__ import annotations

import numpy as np

from roundpipe_fx.schedules.action import ActionKind
from roundpipe_fx.schedules.blocks import pairs
from roundpipe_fx.schedules.schedule import NUMBER, Schedule

__all__ = ["interleaved"]


def interleaved(devices: int, stages: int, microbatches: int) -> Schedule:
    """Stage s runs on device s modulo ``devices``."""
    # A last group that is smaller is scheduled as a whole one, of which some microbatches are then left out; so are
    # stages, where some devices have one less.
    whole = -(-microbatches // devices) * devices
    all_stages = -(-stages // devices) * devices
    orders = []
    for device in range(devices):
        own = list(range(device, all_stages, devices))
        forward = _grouped(ActionKind.FORWARD, own, devices, whole)
        backward = _grouped(ActionKind.BACKWARD, own[::-1], devices, whole)
        ahead = min(2 * (devices - 1 - device) + (len(own) - 1) * devices, len(forward))
        steady = len(forward) - ahead
        order = np.concatenate([forward[:ahead], pairs(forward[ahead:], backward[:steady], 1), backward[steady:]])
        orders.append(order[(order[:, 1] < stages) & (order[:, 2] < microbatches)])
    return Schedule("interleaved", tuple(orders))


def _grouped(kind: ActionKind, stages: list[int], group: int, microbatches: int) -> np.ndarray:
    """Groups of microbatches; of each the first stage for all of the group, then the next stage."""
    rows = [
        (NUMBER[kind], stage, microbatch)
        for start in range(0, microbatches, group)
        for stage in stages
        for microbatch in range(start, start + group)
    ]
    return np.array(rows, dtype=np.int32).reshape(-1, 3)
