"""Unequal microbatches: whether those of different sizes, each planned for itself, fit together.

A batch that is not divisible leaves microbatches of two sizes. A plan is made for a step whose microbatches are all of
one size, so the smaller ones may keep more than the larger ones leave room for.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_fx.budget import InfeasibleBudgetError, bytes_text
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.schedules import Schedule, StageGraph, simulate_time

__all__ = ["UnequalMicrobatchesError", "check_together"]


class UnequalMicrobatchesError(InfeasibleBudgetError):
    """Microbatches that were planned for themselves do not fit together.

    Attributes:
        needed: bytes that the device needs which needs most.
        allowed: bytes that the user allows it.
    """

    def __init__(self, needed: int, allowed: int) -> None:
        super().__init__(
            f"microbatches of different sizes need {bytes_text(needed)} on a device together, and {allowed} bytes "
            f"({bytes_text(allowed)}) are allowed. Use a batch size that is divisible by num_microbatches, or a larger "
            "budget.",
            needed,
        )
        self.needed = needed
        self.allowed = allowed


def check_together(schedule: Schedule, graph: StageGraph, pipelines: Sequence[LoweredPipeline]) -> None:
    """Simulate what microbatches need together, if they differ.

    Args:
        schedule: of all of them.
        graph: all steps that there are.
        pipelines: what each microbatch was lowered to.

    Raises:
        UnequalMicrobatchesError: it is more than a device is allowed.
    """
    main, allowed = pipelines[0].main.costs, pipelines[0].allowed
    others = {batch: own.main.costs for batch, own in enumerate(pipelines) if own.main.costs is not main}
    if not others or allowed is None:
        return
    needed = max(simulate_time(schedule, graph, main, others).peak_bytes)
    if needed > allowed:
        raise UnequalMicrobatchesError(needed, allowed)
