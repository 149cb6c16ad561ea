"""A scheduled run: what workers do with captured microbatches, by the schedule of their plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from roundpipe_fx.distributed.gathering import kept_of
from roundpipe_fx.pipeline.captured_calls import CapturedCalls
from roundpipe_fx.pipeline.graph import union
from roundpipe_fx.pipeline.unequal import check_together, costs_of_others
from roundpipe_fx.runtime.pipeline_program import Instruction, PipelineProgram, instructions_of
from roundpipe_fx.runtime.value_offloading import OffloadSteps, offload_steps_of
from roundpipe_fx.schedules import Action, ActionKind
from roundpipe_fx.schedules.schedule import KINDS
from roundpipe_fx.schedules.sharding import KeptGathered

__all__ = ["Scheduled", "reads_left_elsewhere", "scheduled_run"]


class Scheduled(NamedTuple):
    """What workers run.

    Attributes:
        instructions: of each device.
        offloads: for each device, which values leave for the host and come back; empty: none.
        kept: for each device, the sharded parameters that stay gathered, by positions of its instructions.
        programs: of each microbatch.
    """

    instructions: list[list[Instruction]]
    offloads: list[Mapping[int, OffloadSteps]]
    kept: list[list[KeptGathered]]
    programs: list[PipelineProgram]


def scheduled_run(captured: CapturedCalls, kinds: tuple[ActionKind, ...] | None) -> Scheduled:
    """Work out what workers run.

    Args:
        captured: the microbatches.
        kinds: which kinds of actions the run consists of; ``None``: all.

    Raises:
        HostMemoryError: the values that leave need more than the host's budget together.
        InvalidScheduleError: a given schedule does not fit.
        UnequalMicrobatchesError: the microbatches do not fit together.
    """
    graph = union([program.graph for program in captured.programs])
    pipeline = captured.graphs[0].pipeline
    whole = pipeline.schedule(graph, len(captured.programs))
    pipelines = [of_batch.pipeline for of_batch in captured.graphs]
    others = costs_of_others(pipelines)
    offloads = pipeline.offloads(whole, graph, others) if kinds is None or whole.forwards_before_backwards else []
    kept = pipeline.kept(whole, graph, others)
    check_together(whole, graph, pipelines, offloads, kept)
    schedule = whole if kinds is None else whole.only(*kinds)
    later = whole.only(*KINDS[1:]) if kinds == (ActionKind.FORWARD,) else None
    instructions = instructions_of(schedule, captured.programs, later)
    steps = offload_steps_of(whole, instructions, offloads, kinds) if offloads else []
    # The programs are referred to, so that their identities are not reused.
    return Scheduled(instructions, steps, kept_of(whole, instructions, kept), captured.programs)


def reads_left_elsewhere(instructions: Sequence[Sequence[Instruction]]) -> Action | None:
    """An action of the backward that reads what only another device has when all forwards are done; ``None``: there is
    none.

    Args:
        instructions: of each device, for a whole step.
    """
    left: set[tuple[int, int]] = set()
    known: list[set[tuple[int, int]]] = []
    for of_device in instructions:
        forwards = [instruction for instruction in of_device if instruction.action.kind is ActionKind.FORWARD]
        made = {(each.action.microbatch, number) for each in forwards for number in each.code.outputs}
        left |= made
        known.append(made | {read for each in forwards for read in _values_read(each)})
    for of_device, here in zip(instructions, known, strict=True):
        backwards = [instruction for instruction in of_device if instruction.action.kind is not ActionKind.FORWARD]
        for instruction in backwards:
            if (left - here).intersection(_values_read(instruction)):
                return instruction.action
    return None


def _values_read(instruction: Instruction) -> list[tuple[int, int]]:
    batch = instruction.action.microbatch
    return [(batch, source.index) for source in instruction.code.inputs if source.kind == "value"]
