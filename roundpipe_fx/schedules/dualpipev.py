"""DualPipeV: forwards of one half of the model beside backwards of the other, on V-shaped stages.

DualPipe (DeepSeek-AI, "DeepSeek-V3 technical report", 2024), cut in half by Sea AI Lab (Qi et al., "Cut-in-half
DualPipe", 2025), so that each parameter is on one device only. The order is that of DeepSeek's implementation, which
overlaps each forward with the backward that follows it; here a device runs one after the other. With p devices, and
F, I, W for a stage's parts, each device waits for at most (p - 1)(F&B + B - 3W), where B = I + W and F&B = F + B, and
holds the microbatches of at most 2p + 1 stages.
"""

from __future__ import annotations

from roundpipe_fx.schedules.spec import ScheduleSpec
from roundpipe_fx.schedules.timetable import Schedule
from roundpipe_fx.schedules.v_shape import SchedulePhase, v_shaped


def dualpipev(devices: int, stages: int, microbatches: int) -> Schedule:
    """The DualPipeV schedule. With two stages a device, device d has stages d and 2 × ``devices`` - 1 - d."""
    return v_shaped("dualpipev", _phases, devices, stages, microbatches)


def _phases(device: int, devices: int, microbatches: int) -> list[SchedulePhase]:
    after, pairs, odd = devices - 1 - device, (device + 1) // 2, (device + 1) % 2
    return [
        (2 * after, "F0"),
        (device + 1, "F0 F1"),
        (after, "I1 W F1"),
        (microbatches - 2 * devices + device + 1, "F0 I1 W F1 I0 W"),
        (after, "I1 W F1 I0 W"),
        (pairs, "I1 W I0 W"),  # of 2 (device + 1) backwards the gradients of parameters of the second half wait
        (odd, "I1 W I0"),
        (pairs, "I1 I0"),
        (after, "W I0"),
        (device + 1, "W"),
    ]


DUALPIPEV = ScheduleSpec(
    "dualpipev",
    dualpipev,
    stages_per_device=2,
    splits_backward=True,
    about="DualPipeV: alternates forwards of one half of the model with backwards of the other, on the stages of ZB-V",
)
