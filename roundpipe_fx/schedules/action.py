"""Actions: what a device does for one stage and one microbatch."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

__all__ = ["Action", "ActionKind", "StageAction"]


class ActionKind(enum.StrEnum):
    """What an action does; the letter by which schedules print it."""

    FORWARD = "F"
    RECOMPUTE = "R"
    """What of a stage's backward needs no incoming gradient."""
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    """The gradients of what a stage was given: what the stage before it waits for."""
    BACKWARD_WEIGHT = "W"
    """The gradients of a stage's parameters, for which nobody waits."""
    SEND = "S"
    RECEIVE = "V"


StageAction = tuple[ActionKind, int]
"""A kind of work and a stage: what an action does, without the microbatch."""

_TEXT = re.compile(r"([FRBIW])(\d+)\.(\d+)$|([SV]):([FRBIW])(\d+)\.(\d+)([<>])(\d+)$")


@dataclass(frozen=True, slots=True)
class Action:
    """Something that a device does.

    ``str(action)`` is ``F2.5`` (forward of stage 2 for microbatch 5), ``S:F2.5>3`` (send what it made to device 3) or
    ``V:F2.5<1`` (receive it from device 1).

    Attributes:
        kind: what is done.
        stage: of the model.
        microbatch: counted from 0.
        of: of a transfer, the kind of the action whose results travel.
        peer: of a transfer, the other device.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    of: ActionKind | None = None
    peer: int | None = None

    @property
    def step(self) -> StageAction:
        """The action without its microbatch; of a transfer, that of the action whose results travel."""
        return (self.of or self.kind, self.stage)

    def __str__(self) -> str:
        if self.of is None:
            return f"{self.kind}{self.stage}.{self.microbatch}"
        arrow = ">" if self.kind is ActionKind.SEND else "<"
        return f"{self.kind}:{self.of}{self.stage}.{self.microbatch}{arrow}{self.peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """An action from its text.

        Raises:
            ValueError: the text is no action.
        """
        found = _TEXT.match(text)
        if found is None:
            raise ValueError(
                f"{text!r} is no action: write a kind of F, R, B, I, W, a stage and a microbatch, as F0.3."
            )
        if found.group(1):
            return cls(ActionKind(found.group(1)), int(found.group(2)), int(found.group(3)))
        kind, of, stage, microbatch, _, peer = found.groups()[3:]
        return cls(ActionKind(kind), int(stage), int(microbatch), ActionKind(of), int(peer))
