"""Early recomputation: the part of a schedule that runs before the incoming gradients of its stage arrive.

The planner recomputes *just in time*, which is best for memory. Operations that depend on no incoming gradient can also
run *early*, in the stage's recompute module: beside the backward of the stage before it, or while a device of a
pipeline waits. The operations of a stage's backward up to the first that depends on a gradient run in the same order
either way, so they are early for free. Each further one is held longer. Candidates grow by whole segments, in the order
of the schedule, so stages that are alike take few different forms and share their modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.ir.joint_graph import is_seeded
from roundpipe_fx.remat.schedule import PlannedOp, PlannedSchedule, peaks_by_stage

EarlyChoices = Mapping[int, list[frozenset[int]]]
"""By stage, sets of steps that may run early, in increasing order, as positions among the schedule's steps."""


def find_early_choices(graph: OperationGraph, schedule: PlannedSchedule, split: bool = False) -> EarlyChoices:
    """By stage, sets of steps that may run early, from none to all, as positions among the schedule's steps.

    Each recomputes more than the one before; other steps that need no incoming gradient go with it.

    Args:
        schedule: in which nothing is early.
        split: whether gradients of parameters are computed in modules of their own. Values that only these need are not
            early: they are recomputed there.
    """
    # With a backward that is split in two, only what the input's half waits for can gain by being early.
    steps = _steps(schedule)
    needed = _needed_by_earlier_stages(schedule) if split else range(len(steps))
    free = set(_gradient_independent(graph, steps)).intersection(needed)
    of_stages: dict[int, list[frozenset[int]]] = {}
    waiting: set[int] = set()
    position = 0
    for segment, block in schedule.backward:
        stage = block[0].stage if block else graph.stages[segment]
        choices = of_stages.setdefault(stage, [frozenset()])
        # Two growths per segment: `prefix` moves nothing past a step that waits, so its order does not change;
        # `covered` moves later steps in front of such steps, and holds their results longer.
        prefix, covered = set(choices[-1]), set(choices[-1])
        for index in range(position, position + len(block)):
            if index in free:
                covered.add(index)
                # A step before the first that waits can be early for free: it is only called from another module.
                prefix |= {index} if stage not in waiting else set()
            elif index in needed:
                waiting.add(stage)
        # A choice that recomputes nothing more has no effect on memory, so it is none.
        for grown in (prefix, covered):
            if any(steps[index].recipe is not None for index in grown - choices[-1]):
                choices.append(frozenset(grown))
        position += len(block)
    return {stage: choices if stage in waiting else choices[:1] for stage, choices in of_stages.items()}


def move_early(schedule: PlannedSchedule, choices: EarlyChoices, level: Mapping[int, int]) -> PlannedSchedule:
    """The schedule with one of the choices of each stage early, and nothing else."""
    early = frozenset().union(*(options_there[level[stage]] for stage, options_there in choices.items()))
    backward = []
    position = 0
    for segment, block in schedule.backward:
        marked = (
            step if step.early is (index in early) else dataclasses.replace(step, early=index in early)
            for index, step in enumerate(block, position)
        )
        backward.append((segment, tuple(marked)))
        position += len(block)
    return dataclasses.replace(schedule, backward=tuple(backward))


def move_early_within_peak(
    graph: OperationGraph, schedule: PlannedSchedule, overlapped: Collection[int]
) -> PlannedSchedule:
    """The schedule with as much early as does not raise its peak, on one device.

    Therefore a plan's peak does not depend on what is early, nor does the rule that a smaller budget never gives a
    larger peak.

    Args:
        schedule: in which nothing is early.
        overlapped: stages whose recompute module can overlap with something. In the others, only steps that cost no
            memory are early.
    """
    choices = find_early_choices(graph, schedule)
    # A stage with nothing to overlap takes only the prefix, which costs no memory.
    level = {
        stage: len(options_there) - 1 if stage in overlapped else min(len(options_there) - 1, 1)
        for stage, options_there in choices.items()
    }
    limit, _ = peaks_by_stage(graph, schedule)
    # Every round lowers some stage's level, so this ends.
    while any(level.values()):
        early_schedule = move_early(schedule, choices, level)
        _, peaks = peaks_by_stage(graph, early_schedule)
        # Only stages at fault give up something: what another one does early stays.
        over = {stage for stage, live in peaks.items() if live > limit and level[stage]}
        if not over:
            return early_schedule
        for stage in over:
            level[stage] -= 1
    return schedule


def _steps(schedule: PlannedSchedule) -> list[PlannedOp]:
    return [step for _, block in schedule.backward for step in block]


def _gradient_independent(graph: OperationGraph, steps: list[PlannedOp]) -> list[int]:
    """Steps that depend on no incoming gradient, returned gradients and operations that draw new numbers apart."""
    dependent = set(graph.tangents)
    independent = []
    for position, step in enumerate(steps):
        waits = step.rng_shape_source is not None or not dependent.isdisjoint(step.reads)
        # A step waits if it reads, directly or through another step, an incoming gradient. Replayed masks read a
        # gradient's shape.
        if step.recipe is None:
            waits = waits or is_seeded(step.operation.node) or not graph.gradients.isdisjoint(step.makes)
        # A storage that is recomputed again from sources that do not wait is independent from then on.
        if waits:
            dependent.update(step.makes)
        else:
            dependent.difference_update(step.makes)
            independent.append(position)
    return independent


def _needed_by_earlier_stages(schedule: PlannedSchedule) -> set[int]:
    """Steps that an earlier stage waits for; of the last one to run, those that an earlier segment waits for."""
    steps = [(segment, step) for segment, block in schedule.backward for step in block]
    last_to_run = min((step.stage for _, step in steps), default=0)
    readers: dict[int, list[tuple[int, PlannedOp, bool]]] = {}
    reached: set[int] = set()
    # From the end: a step is awaited if a reader of its result is, or runs in another stage.
    for position in range(len(steps) - 1, -1, -1):
        segment, step = steps[position]
        awaited = any(
            needed or reader.stage != step.stage or (step.stage == last_to_run and reads_in < segment)
            for storage in step.makes
            for reads_in, reader, needed in readers.pop(storage, ())
        )
        if awaited:
            reached.add(position)
        for storage in step.reads:
            readers.setdefault(storage, []).append((segment, step, awaited))
    return reached
