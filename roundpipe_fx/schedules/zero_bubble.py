"""Zero bubble: the gradients of parameters, for which nobody waits, fill the places where devices would idle.

The schedule ZB-H1 of Qi et al., "Zero bubble pipeline parallelism", 2024: as 1F1B, but a stage's backward is split, and
device d puts the gradients of parameters off by d microbatches, so that the gradients of inputs travel on at once. With
equal stages of F, I and W seconds it idles for (p - 1)(F + I - W) seconds, where 1F1B idles for (p - 1)(F + I + W); no
device holds more microbatches than 1F1B's first.
"""

from __future__ import annotations

from roundpipe_fx.schedules.action import Action, ActionKind
from roundpipe_fx.schedules.blocks import run_of
from roundpipe_fx.schedules.schedule import Schedule

__all__ = ["zero_bubble"]


def zero_bubble(devices: int, stages: int, microbatches: int) -> Schedule:
    """Each device has a run of consecutive stages; the backwards are split."""
    return Schedule.of(
        "zero_bubble",
        [_order(run_of(device, devices, stages), device, devices, microbatches) for device in range(devices)],
    )


def _order(own: list[int], device: int, devices: int, microbatches: int) -> list[Action]:
    def act(kind: ActionKind, microbatch: int) -> list[Action]:
        order = own if kind is ActionKind.FORWARD else own[::-1]
        return [Action(kind, stage, microbatch) for stage in order]

    ahead = min(microbatches, devices - 1 - device)
    actions = [action for microbatch in range(ahead) for action in act(ActionKind.FORWARD, microbatch)]
    put_off = device
    for microbatch in range(microbatches):
        if ahead + microbatch < microbatches:
            actions += act(ActionKind.FORWARD, ahead + microbatch)
        actions += act(ActionKind.BACKWARD_INPUT, microbatch)
        if microbatch >= put_off:
            actions += act(ActionKind.BACKWARD_WEIGHT, microbatch - put_off)
    for microbatch in range(max(0, microbatches - put_off), microbatches):
        actions += act(ActionKind.BACKWARD_WEIGHT, microbatch)
    return actions
