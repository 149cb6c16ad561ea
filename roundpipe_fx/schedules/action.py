"""Actions: the work of a device for one stage and one microbatch."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class ActionKind(enum.StrEnum):
    """Kinds of actions. The value is the letter that schedules print."""

    FORWARD = "F"
    RECOMPUTE = "R"
    """The part of a stage's backward that does not depend on the incoming gradient."""
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    """Gradients with respect to a stage's inputs, which the previous stage waits for."""
    BACKWARD_WEIGHT = "W"
    """Gradients with respect to a stage's parameters, on which no other stage depends."""
    SEND = "S"
    RECEIVE = "V"


StageAction = tuple[ActionKind, int]
"""A kind of work and a stage: an action without its microbatch."""

_TEXT = re.compile(r"([FRBIW])(\d+)\.(\d+)$|([SV]):([FRBIW])(\d+)\.(\d+)([<>])(\d+)$")


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of work of a device.

    ``str(action)`` is ``F2.5`` (forward of stage 2 for microbatch 5), ``S:F2.5>3`` (send its results to device 3) or
    ``V:F2.5<1`` (receive it from device 1).

    Attributes:
        kind: what the action does.
        stage: index of the stage.
        microbatch: index of the microbatch.
        of: for a transfer, the kind of the action whose results are sent.
        peer: for a transfer, index of the other device.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    of: ActionKind | None = None
    peer: int | None = None

    @property
    def step(self) -> StageAction:
        """The action without its microbatch; for a transfer, that of the action whose results are sent."""
        return (self.of or self.kind, self.stage)

    def __str__(self) -> str:
        if self.of is None:
            return f"{self.kind}{self.stage}.{self.microbatch}"
        arrow = ">" if self.kind is ActionKind.SEND else "<"
        return f"{self.kind}:{self.of}{self.stage}.{self.microbatch}{arrow}{self.peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse an action.

        Args:
            text: as ``str(action)`` returns it.

        Returns:
            the action.

        Raises:
            ValueError: ``text`` is not an action.
        """
        matched = _TEXT.match(text)
        if matched is None:
            raise ValueError(
                f"{text!r} is not an action: write one of F, R, B, I, W, a stage and a microbatch, such as F0.3."
            )
        if matched.group(1):
            return cls(ActionKind(matched.group(1)), int(matched.group(2)), int(matched.group(3)))
        kind, of, stage, microbatch, _, peer = matched.groups()[3:]
        return cls(ActionKind(kind), int(stage), int(microbatch), ActionKind(of), int(peer))
