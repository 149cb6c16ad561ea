"""Unequal microbatches: whether microbatches of different sizes, planned separately, fit together.

A batch that is not divisible leaves microbatches of two sizes. A plan assumes a step whose microbatches all have one
size, so the smaller ones may save more than fits beside the larger ones, on a device or on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_fx.budget import InfeasibleBudgetError, bytes_text
from roundpipe_fx.pipeline.host_memory import check_host_memory, host_budget_of, host_memory_of
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.schedules import Schedule, StageGraph, StepCosts, simulate_time
from roundpipe_fx.schedules.offloads import Offload
from roundpipe_fx.schedules.sharding import KeptGathered

__all__ = ["UnequalMicrobatchesError", "check_together", "costs_of_others"]


class UnequalMicrobatchesError(InfeasibleBudgetError):
    """Microbatches that were planned separately do not fit together.

    Attributes:
        needed: bytes of the device that needs most.
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
        UnequalMicrobatchesError: it is more than a device is allowed.
    """
    first, others = pipelines[0], costs_of_others(pipelines)
    if not others:
        return
    timing = simulate_time(schedule, graph, first.main.costs, others, offloads, kept)
    needed = max(timing.peak_bytes)
    if first.allowed is not None and needed > first.allowed:
        raise UnequalMicrobatchesError(needed, first.allowed)
    if first.offload is not None:
        check_host_memory(host_memory_of(first, timing, first.pipelining), host_budget_of(first, first.pipelining))
