"""Unequal microbatches: whether microbatches of different sizes, planned separately, fit together.

A batch that is not divisible leaves microbatches of two sizes. A plan assumes a step whose microbatches all have one
size, so the smaller ones may save more than fits beside the larger ones, on a device or on the host. Then all are
planned for less, down to the plans that need least. What these need together is the least budget of the step: it may be
more than the least of a step whose microbatches all have one of the sizes, or less, if few have the larger one.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_fx.budget import InfeasibleBudgetError, bytes_text, plan_or_error
from roundpipe_fx.distributed.agreement import Unfitting
from roundpipe_fx.pipeline.host_memory import check_host_memory, host_budget_of, host_memory_of
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.schedules import Schedule, StageGraph, StepCosts, simulate_time
from roundpipe_fx.schedules.offloads import Offload
from roundpipe_fx.schedules.sharding import KeptGathered

__all__ = ["UnequalMicrobatchesError", "check_together", "costs_of_others"]


class UnequalMicrobatchesError(InfeasibleBudgetError):
    """Microbatches that were planned separately do not fit together.

    Attributes:
        unfitting: how far they do not.
    """

    def __init__(self, unfitting: Unfitting) -> None:
        needed, allowed = unfitting.needed, unfitting.allowed
        super().__init__(
            f"microbatches of different sizes need {needed} bytes ({bytes_text(needed)}) on a device together, and "
            f"{allowed} bytes ({bytes_text(allowed)}) are allowed. Use a batch size that is divisible by "
            "num_microbatches, or a larger budget.",
            needed,
        )
        self.unfitting = unfitting


def costs_of_others(pipelines: Sequence[LoweredPipeline]) -> dict[int, StepCosts]:
    """Costs of the microbatches that differ from the first, by index.

    Args:
        pipelines: each microbatch's lowered pipeline.
    """
    main = pipelines[0].main.costs
    return {batch: pipeline.main.costs for batch, pipeline in enumerate(pipelines) if pipeline.main.costs is not main}


def check_together(
    schedule: Schedule,
    graph: StageGraph,
    pipelines: Sequence[LoweredPipeline],
    offloads: Sequence[Offload] = (),
    kept: Sequence[KeptGathered] = (),
) -> None:
    """Simulate the memory of all microbatches together, if they differ.

    Args:
        schedule: of all of them.
        graph: all steps.
        pipelines: each microbatch's lowered pipeline.
        offloads: values that leave for the host.
        kept: sharded parameters that stay gathered for a while.

    Raises:
        HostMemoryError: values that leave unasked need more than the host's budget.
        InfeasibleBudgetError: all have one size, which was refused.
        UnequalMicrobatchesError: it is more than a device is allowed.
    """
    first, others = pipelines[0], costs_of_others(pipelines)
    if not others:
        if first.refused is not None and first.allowed is not None and first.refused.minimum > first.allowed:
            plan_or_error(first.refused)
        return
    timing = simulate_time(schedule, graph, first.main.costs, others, offloads, kept)
    needed = max(timing.peak_bytes)
    if first.allowed is not None and needed > first.allowed:
        least = all(pipeline.refused is not None for pipeline in pipelines)
        raise UnequalMicrobatchesError(Unfitting(needed, first.allowed, least))
    if first.offload is not None:
        check_host_memory(host_memory_of(first, timing, first.pipelining), host_budget_of(first, first.pipelining))
