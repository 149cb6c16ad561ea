"""ZB-V: a zero bubble within the memory of 1F1B, by a V-shaped pipeline.

Qi et al., "Zero bubble pipeline parallelism", 2024, section 6; it is V-ZB among the V-shaped schedules of "Pipeline
parallelism with controllable memory", 2024. Each device has two runs of stages, and backwards are split. Where F, I and
W of a stage take the same time t, a step of m microbatches on p devices takes 6mt + (p - 1)t, if m is at least 2p - 1:
each device waits for its first forward only. No device holds more than 2p microbatches of a stage. These are as many
bytes as the first device of 1F1B holds, which has p microbatches of a stage of twice the size.
"""

from __future__ import annotations

from roundpipe_fx.schedules.spec import ScheduleSpec
from roundpipe_fx.schedules.timetable import Schedule
from roundpipe_fx.schedules.v_shape import SchedulePhase, v_shaped


def zbv(devices: int, stages: int, microbatches: int) -> Schedule:
    """The ZB-V schedule. With two stages a device, device d has stages d and 2 × ``devices`` - 1 - d."""
    return v_shaped("zbv", _phases, devices, stages, microbatches)


def _phases(device: int, devices: int, microbatches: int) -> list[SchedulePhase]:
    after = devices - 1 - device
    return [
        # Repetitions and actions. Two devices, four microbatches (F0.0: stage 0 of microbatch 0):
        #     0: F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F0.3 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 F3.3 …
        #     1: F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 F1.3 I1.1 W1.1 F2.3 I2.2 W2.2 …
        (2 * after + 1, "F0"),
        (device, "F1 F0"),
        (after + 1, "F1 I1 W"),
        (microbatches - 2 * devices + 1 + device, "F0 I0 W F1 I1 W"),
        (after, "I0 W F1 I1 W"),
        (device, "I0 I1"),  # gradients of inputs are sent on first: others wait for them
        (after + 1, "I0 W"),
        (2 * device, "W"),
    ]


ZBV = ScheduleSpec(
    "zbv",
    zbv,
    stages_per_device=2,
    splits_backward=True,
    about="ZB-V: two stages per device, assigned down the devices and back up; almost no bubble, with the memory of "
    "1F1B",
)
