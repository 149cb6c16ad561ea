"""Specifications of schedules: how one is built, and what the rest of the compiler asks about it.

Nothing else compares a schedule by its name: who adds one to :data:`roundpipe_fx.schedules.SCHEDULES` says everything
there is to know about it here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from roundpipe_fx.schedules.action import ActionKind
from roundpipe_fx.schedules.timetable import NUMBER, Schedule


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule for any number of devices, stages and microbatches.

    Attributes:
        name: as users write it.
        build: takes the numbers of devices, stages and microbatches, and returns the schedule. There may be more or
            fewer stages than ``stages_per_device`` asks for, if the user says so, or the model cannot be cut as often.
            Where ``dispatches`` is true, it is also given ``slots`` (how many; the stages are those with a forward),
            ``seconds`` (of each slot, for one microbatch) and ``once`` (whether each slot is assigned once, for all
            microbatches).
        stages_per_device: stages on each device, where the user does not say how many.
        splits_backward: whether gradients of inputs and of parameters are separate actions.
        updates_across_stages: whether all forwards of a microbatch can be over before any of the next one begins. A
            buffer may then be updated by one stage, and be read by another one for the next microbatch. If it is false,
            whatever reads and updates a buffer is one stage.
        gains_by_stages: whether the bubble shrinks with the stages of a device. Where devices are to be divided, more
            are then tried.
        holds_all_microbatches: whether a device holds all microbatches at one time, however many there are.
        takes_pieces: whether stages may be cut into more, consecutive on their device, so that values have something to
            be copied beside.
        dispatches: whether stages belong to no device: forward and backward are cut into slots independently, and any
            device runs any of them.
        auto: whether ``schedule="auto"`` tries it.
        stages: how many there are where the schedule was written for these; ``None``: any number.
        about: what it does, in a few words, for the table of schedules.
    """

    name: str
    build: Callable[..., Schedule]
    stages_per_device: int = 1
    splits_backward: bool = False
    updates_across_stages: bool = field(default=False, kw_only=True)
    gains_by_stages: bool = field(default=False, kw_only=True)
    holds_all_microbatches: bool = field(default=False, kw_only=True)
    takes_pieces: bool = field(default=False, kw_only=True)
    dispatches: bool = field(default=False, kw_only=True)
    auto: bool = field(default=True, kw_only=True)
    stages: int | None = field(default=None, kw_only=True)
    about: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.name == "auto":
            raise ValueError(f"the name of a schedule is a text other than 'auto', and not {self.name!r}.")
        if not callable(self.build):
            raise TypeError(f"schedule {self.name!r}: build is to be a function, not {self.build!r}.")
        if isinstance(self.stages_per_device, bool) or not isinstance(self.stages_per_device, int):
            raise TypeError(f"schedule {self.name!r}: stages_per_device={self.stages_per_device!r} is no number.")
        if self.stages_per_device < 1:
            raise ValueError(
                f"schedule {self.name!r}: stages_per_device={self.stages_per_device} must be at least one."
            )

    def orders_as(self, other: ScheduleSpec, devices: int, microbatches: int) -> bool:
        """Return whether another schedule has the same order of actions; on one device, many do.

        A backward that is split is another order unless there is a single device, which waits for none.

        Args:
            other: a schedule with whole backwards.
        """
        alone = devices == 1 or (microbatches == 1 and not self.splits_backward)
        if not alone or self.dispatches:
            return False
        stages = devices * self.stages_per_device
        orders, others = (spec.build(devices, stages, microbatches).orders for spec in (self, other))
        return len(orders) == len(others) and all(map(np.array_equal, map(_merge_halves, orders), others))


def make_custom_spec(schedule: Schedule) -> ScheduleSpec:
    """The specification of a schedule that the user has written."""
    forwards = (order[order[:, 0] == NUMBER[ActionKind.FORWARD], 1] for order in schedule.orders)
    return ScheduleSpec(
        "given",
        lambda devices, stages, microbatches: schedule,
        splits_backward=schedule.only(ActionKind.BACKWARD_INPUT).size > 0,
        stages=1 + max((int(stages.max()) for stages in forwards if len(stages)), default=0),
    )


def _merge_halves(order: np.ndarray) -> np.ndarray:
    """An order with the halves of each backward as one action, where the gradients of inputs are computed."""
    kept = order[order[:, 0] != NUMBER[ActionKind.BACKWARD_WEIGHT]].copy()
    kept[kept[:, 0] == NUMBER[ActionKind.BACKWARD_INPUT], 0] = NUMBER[ActionKind.BACKWARD]
    return kept
