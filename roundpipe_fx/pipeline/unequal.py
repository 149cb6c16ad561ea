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

__all__ = ["UnequalMicrobatchesError", "check_host_together", "check_together", "costs_of_others"]


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
        UnequalMicrobatchesError: it is more than a device is allowed.
    """
    main, allowed = pipelines[0].main.costs, pipelines[0].allowed
    others = costs_of_others(pipelines)
    if not others or allowed is None:
        return
    needed = max(simulate_time(schedule, graph, main, others, offloads, kept).peak_bytes)
    if needed > allowed:
        raise UnequalMicrobatchesError(needed, allowed)


def check_host_together(
    schedule: Schedule, graph: StageGraph, pipelines: Sequence[LoweredPipeline], offloads: Sequence[Offload]
) -> None:
    """Compare the host memory of all microbatches together with the budget, if they differ.

    Args:
        schedule: of all of them.
        graph: all steps.
        pipelines: each microbatch's lowered pipeline.
        offloads: values that leave for the host.

    Raises:
        HostMemoryError: it is more.
    """
    first, others = pipelines[0], costs_of_others(pipelines)
    if not others or first.offload is None:
        return
    timing = simulate_time(schedule, graph, first.main.costs, others, offloads)
    check_host_memory(host_memory_of(first, timing, first.pipelining), host_budget_of(first, first.pipelining))
