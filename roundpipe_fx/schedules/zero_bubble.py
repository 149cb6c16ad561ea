"""Zero bubble: gradients of parameters, on which no other stage depends, are computed where devices would idle.

The schedule ZB-H1 of Qi et al., "Zero bubble pipeline parallelism", 2024: as 1F1B, but a stage's backward is split,
and device d delays the gradients of parameters by d microbatches, so that gradients of inputs are sent on immediately.
With equal stages of F, I and W seconds each device idles for (p - 1)(F + I - W) seconds, where 1F1B idles for
(p - 1)(F + I + W); no device holds more microbatches than the first device under 1F1B.
"""

from __future__ import annotations

from roundpipe_fx.schedules.action import Action, ActionKind
from roundpipe_fx.schedules.spec import ScheduleSpec
from roundpipe_fx.schedules.timetable import Schedule, run_of


def zero_bubble(devices: int, stages: int, microbatches: int) -> Schedule:
    """The ZB-H1 schedule. Each device has consecutive stages, divided as evenly as possible; backwards are split."""
    return Schedule.of(
        "zero_bubble",
        [_order(run_of(device, devices, stages), device, devices, microbatches) for device in range(devices)],
    )


def _order(stages: list[int], device: int, devices: int, microbatches: int) -> list[Action]:
    def act(kind: ActionKind, microbatch: int) -> list[Action]:
        order = stages if kind is ActionKind.FORWARD else stages[::-1]
        return [Action(kind, stage, microbatch) for stage in order]

    # Three devices, four microbatches:
    #     0: F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3
    #     1: F1.0 F1.1 I1.0 F1.2 I1.1 W1.0 F1.3 I1.2 W1.1 I1.3 W1.2 W1.3
    #     2: F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 F2.3 I2.3 W2.1 W2.2 W2.3
    ahead = min(microbatches, devices - 1 - device)
    actions = [action for microbatch in range(ahead) for action in act(ActionKind.FORWARD, microbatch)]
    # Device d holds back the W of d microbatches: while its first ones run, their inputs' gradients are on their way.
    put_off = device
    for microbatch in range(microbatches):
        if ahead + microbatch < microbatches:
            actions += act(ActionKind.FORWARD, ahead + microbatch)
        actions += act(ActionKind.BACKWARD_INPUT, microbatch)
        if microbatch >= put_off:
            actions += act(ActionKind.BACKWARD_WEIGHT, microbatch - put_off)
    # What was held back runs at the end, where 1F1B idles.
    for microbatch in range(max(0, microbatches - put_off), microbatches):
        actions += act(ActionKind.BACKWARD_WEIGHT, microbatch)
    return actions


ZERO_BUBBLE = ScheduleSpec(
    "zero_bubble",
    zero_bubble,
    splits_backward=True,
    updates_across_stages=True,
    about="ZB-H1: gradients of parameters, for which nothing waits, fill the bubbles",
)
