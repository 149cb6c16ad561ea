"""A scheduled run: what workers do with captured microbatches, by the schedule of their plan.

A batch that is not divisible leaves microbatches of two sizes, which are planned separately. A plan assumes a step
whose microbatches all have one size, so the smaller ones may save more than fits beside the larger ones, on a device or
on the host. Then all are planned for less, down to the plans that need least. What these need together is the least
budget of the step: it may be more than the least of a step whose microbatches all have one of the sizes, or less, if
few have the larger one.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roundpipe_fx.budget import InfeasibleBudgetError, bytes_text, plan_or_error
from roundpipe_fx.pipeline.capture.captured_calls import CapturedCalls
from roundpipe_fx.pipeline.host_memory import check_host_memory, host_budget_of, host_memory_of
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.pipeline.pipelined_graph import merge_stage_graphs
from roundpipe_fx.runtime.pipeline_program import Instruction, PipelineProgram, instructions_of
from roundpipe_fx.runtime.value_offloading import OffloadSteps, offload_steps_of
from roundpipe_fx.schedules import Action, ActionKind, Schedule, StageGraph, StepCosts, simulate_time
from roundpipe_fx.schedules.offloads import Offload
from roundpipe_fx.schedules.sharding import KeptGathered
from roundpipe_fx.schedules.timetable import KINDS


class UnequalMicrobatchesError(InfeasibleBudgetError):
    """Microbatches that were planned separately do not fit together.

    Attributes:
        unfitting: how far they do not.
    """

    def __init__(self, unfitting: UnequalMicrobatches) -> None:
        needed, allowed = unfitting.needed, unfitting.allowed
        super().__init__(
            f"microbatches of different sizes need {needed} bytes ({bytes_text(needed)}) on a device together, and "
            f"{allowed} bytes ({bytes_text(allowed)}) are allowed. Use a batch size that is divisible by "
            "num_microbatches, or a larger budget.",
            needed,
        )
        self.unfitting = unfitting


def costs_of_other_sizes(pipelines: Sequence[LoweredPipeline]) -> dict[int, StepCosts]:
    """Costs of the microbatches that differ from the first, by index.

    Args:
        pipelines: each microbatch's lowered pipeline.
    """
    main = pipelines[0].main.costs
    return {batch: pipeline.main.costs for batch, pipeline in enumerate(pipelines) if pipeline.main.costs is not main}


def check_memory_together(
    schedule: Schedule,
    graph: StageGraph,
    pipelines: Sequence[LoweredPipeline],
    offloads: Sequence[Offload] = (),
    kept: Sequence[KeptGathered] = (),
) -> None:
    """Simulate the memory of all microbatches together, if they differ.

    Args:
        schedule: of all of them.
        pipelines: each microbatch's lowered pipeline.
        offloads: values that leave for the host.
        kept: sharded parameters that stay gathered for a while.

    Raises:
        HostMemoryError: values that leave unasked need more than the host's budget.
        InfeasibleBudgetError: all have one size, which was refused.
        UnequalMicrobatchesError: it is more than a device is allowed.
    """
    first, others = pipelines[0], costs_of_other_sizes(pipelines)
    if not others:
        # All microbatches are alike, and the plan was made for this very count: only its own refusal can be left.
        if first.refused is not None and first.allowed is not None and first.refused.minimum > first.allowed:
            plan_or_error(first.refused)
        return
    # Plans of microbatches of another size are simulated in one schedule: their saved bytes overlap on each device.
    timing = simulate_time(schedule, graph, first.main.costs, others, offloads, kept)
    needed = max(timing.peak_bytes)
    if first.allowed is not None and needed > first.allowed:
        # If every microbatch is already at its smallest plan, the sum is the least budget there is.
        least = all(pipeline.refused is not None for pipeline in pipelines)
        raise UnequalMicrobatchesError(UnequalMicrobatches(needed, first.allowed, least))
    if first.offload is not None:
        check_host_memory(host_memory_of(first, timing, first.pipelining), host_budget_of(first, first.pipelining))


class Scheduled(NamedTuple):
    """The instructions that workers run.

    Attributes:
        offloads: for each device, which values leave for the host and come back; empty: none.
        kept: for each device, the sharded parameters that stay gathered, by positions of its instructions.
    """

    instructions: list[list[Instruction]]
    offloads: list[Mapping[int, OffloadSteps]]
    kept: list[list[KeptGathered]]
    programs: list[PipelineProgram]


def schedule_run(captured: CapturedCalls, kinds: tuple[ActionKind, ...] | None) -> Scheduled:
    """Work out what workers run.

    Args:
        kinds: which kinds of actions the run consists of; ``None``: all.

    Raises:
        HostMemoryError: the values that leave need more than the host's budget together.
        InvalidScheduleError: a given schedule does not fit.
        UnequalMicrobatchesError: the microbatches do not fit together.
    """
    graph = merge_stage_graphs([program.graph for program in captured.programs])
    pipeline = captured.graphs[0].pipeline
    whole = pipeline.schedule(graph, len(captured.programs))
    pipelines = [of_batch.pipeline for of_batch in captured.graphs]
    others = costs_of_other_sizes(pipelines)
    # A run of forwards alone cannot keep values on the host unless the backwards follow as a second run of the same
    # order.
    offloads = pipeline.offloads(whole, graph, others) if kinds is None or whole.forwards_before_backwards else []
    kept = pipeline.kept(whole, graph, others)
    check_memory_together(whole, graph, pipelines, offloads, kept)
    schedule = whole if kinds is None else whole.only(*kinds)
    # Forwards have to know what the later backwards read, or they would free it.
    later = whole.only(*KINDS[1:]) if kinds == (ActionKind.FORWARD,) else None
    instructions = instructions_of(schedule, captured.programs, later)
    steps = offload_steps_of(whole, instructions, offloads, kinds) if offloads else []
    # The programs are referred to, so that their identities are not reused.
    return Scheduled(instructions, steps, find_kept_gathered(whole, instructions, kept), captured.programs)


def find_unreachable_read(instructions: Sequence[Sequence[Instruction]]) -> Action | None:
    """Find a backward action that reads a value which only another device holds after all forwards; else ``None``.

    Args:
        instructions: of each device, for a whole step.
    """
    left: set[tuple[int, int]] = set()
    known: list[set[tuple[int, int]]] = []
    for of_device in instructions:
        forwards = [instruction for instruction in of_device if instruction.action.kind is ActionKind.FORWARD]
        # What a device has when the forwards are done: its own results, and what it received for its own forwards.
        made = {(each.action.microbatch, number) for each in forwards for number in each.code.outputs}
        left |= made
        known.append(made | {read for each in forwards for read in _values_read(each)})
    for of_device, here in zip(instructions, known, strict=True):
        backwards = [instruction for instruction in of_device if instruction.action.kind is not ActionKind.FORWARD]
        for instruction in backwards:
            # The backward would ask another device for a value after that device's run has ended.
            if (left - here).intersection(_values_read(instruction)):
                return instruction.action
    return None


def _values_read(instruction: Instruction) -> list[tuple[int, int]]:
    batch = instruction.action.microbatch
    return [(batch, source.index) for source in instruction.code.inputs if source.kind == "value"]


@dataclass(frozen=True)
class UnequalMicrobatches:
    """Microbatches of different sizes that were planned separately, and do not fit together.

    Attributes:
        needed: bytes of the device that needs most.
        allowed: bytes that the user allows it.
        least: whether the plans are those that need least.
    """

    needed: int
    allowed: int
    least: bool


def find_kept_gathered(
    schedule: Schedule, instructions: Sequence[Sequence[Instruction]], kept: Sequence[KeptGathered]
) -> list[list[KeptGathered]]:
    """Tensors that stay gathered on each rank, by positions of its instructions.

    Args:
        schedule: the schedule of a whole step, whose positions are given.
        instructions: of each rank, some kinds of actions perhaps; actions that a microbatch does not have are missing.
    """
    gaps_of_ranks: list[list[KeptGathered]] = []
    for rank, of_rank in enumerate(instructions):
        staying = [each for each in kept if each.device == rank]
        positions: list[int] = []
        if staying:
            where = {action: position for position, action in enumerate(schedule.actions(rank))}
            positions = [where[instruction.action] for instruction in of_rank]
        gaps_of_ranks.append(
            # Positions of the schedule become positions among this rank's instructions, which lack actions that a
            # microbatch does not have.
            [
                dataclasses.replace(
                    each,
                    dropped=bisect_left(positions, each.dropped),
                    regathered=bisect_left(positions, each.regathered),
                )
                for each in staying
            ]
        )
    return gaps_of_ranks
