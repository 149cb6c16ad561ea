"""Schedules: whatever is kept, held, or dropped, the bits are the same and the simulation is what is measured."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from roundpipe_fx.analysis.program_events import follow_events
from roundpipe_fx.analysis.read_operations import read_operations
from roundpipe_fx.analysis.simulator import find_course_peak
from roundpipe_fx.codegen import emit_backward_program, emit_forward_program
from roundpipe_fx.remat.blocks import Blocks, planned_schedule
from roundpipe_fx.remat.chain_search import search
from roundpipe_fx.remat.early import find_early_choices, move_early, move_early_within_peak
from roundpipe_fx.remat.reduce_peak import MAX_REMAT_LEVEL
from roundpipe_fx.remat.schedule import RematChoice, remat_schedule, simulate
from tests import listed
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.remat.graphs import mlp, operations_of
from tests.remat.test_save_policy import RandomModel, _run_programs, operations, relaxed


@relaxed
@given(st.data(), operations, st.integers(1, 3))
@pytest.mark.long
def test_any_choice_gives_the_same_bits_within_the_simulated_bytes(
    data: st.DataObject, chain: list, stages: int
) -> None:
    torch.manual_seed(0)
    joint, setting = listed.staged(capture_joint(RandomModel([("linear", 0), *chain]), torch.randn(5, 4)), stages)
    segments = len(joint.segments)
    inputs = example_inputs(joint)
    torch.manual_seed(1)
    expected = run_joint(joint, copy.deepcopy(inputs))
    graph = read_operations(joint, segments)
    storages = sorted(graph.makers)
    kept = frozenset(s for s in storages if data.draw(st.booleans()))
    held = {}
    for segment in range(segments):
        if data.draw(st.booleans()):
            earlier = [s for s in storages if graph.segment_of[s] <= segment]
            held[segment] = frozenset(s for s in earlier if data.draw(st.booleans()))
    remat_level = {segment: data.draw(st.integers(0, MAX_REMAT_LEVEL + 1)) for segment in range(segments)}
    schedule = planned_schedule(Blocks(graph), RematChoice(kept, held, remat_level))
    choices = find_early_choices(graph, schedule)
    level = {stage: data.draw(st.integers(0, len(own) - 1)) for stage, own in choices.items()}
    schedule = move_early(schedule, choices, level)
    planned = simulate(graph, schedule)
    joint = listed.planned(joint, setting, remat_schedule(graph, schedule))
    joint.graph.lint()
    modules = listed.stage_modules(joint, setting)
    forward, backward = emit_forward_program(joint, modules), emit_backward_program(joint, modules)
    # What is held and read by nobody is dead code.
    assert find_course_peak(follow_events(forward, backward, joint.expected_tangents)).bytes <= planned.bytes
    torch.manual_seed(1)
    found = _run_programs(joint, setting, inputs)
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert (left is None and right is None) or torch.equal(left, right)


@pytest.mark.long
@relaxed
@given(operations, st.integers(1, 3), st.floats(0, 1))
@example([("split", 1), ("split", 1)], 1, 1.0)  # something is held that nobody reads
def test_plans_that_are_found_are_simulated_to_the_byte(chain: list, stages: int, place: float) -> None:
    torch.manual_seed(0)
    joint, setting = listed.staged(capture_joint(RandomModel([("linear", 0), *chain]), torch.randn(5, 4)), stages)
    segments = len(joint.segments)
    graph = read_operations(joint, segments)
    candidates = search(Blocks(graph)).candidates
    chosen = candidates[round(place * (len(candidates) - 1))]
    early = move_early_within_peak(graph, chosen.schedule, range(stages))
    joint = listed.planned(joint, setting, remat_schedule(graph, early))
    modules = listed.stage_modules(joint, setting)
    forward, backward = emit_forward_program(joint, modules), emit_backward_program(joint, modules)
    peak = find_course_peak(follow_events(forward, backward, joint.expected_tangents)).bytes
    assert peak == simulate(graph, early).bytes <= chosen.peak.bytes


def test_nested_recomputation_runs_a_segment_more_than_once() -> None:
    graph = operations_of(mlp(depth=12), torch.randn(2048, 16))
    candidates = search(Blocks(graph)).candidates
    lowest = candidates[-1]
    assert lowest.schedule.choice.held
    times: dict[int, int] = {}
    for _, steps in lowest.schedule.backward:
        for step in steps:
            if step.recipe is not None:
                times[step.operation.index] = times.get(step.operation.index, 0) + 1
    assert max(times.values()) >= 2
    assert [c.peak.bytes for c in candidates] == sorted((c.peak.bytes for c in candidates), reverse=True)
    assert [c.seconds for c in candidates] == sorted(c.seconds for c in candidates)


def test_a_dropouts_mask_is_drawn_without_its_input() -> None:
    joint, _ = listed.staged(capture_joint(mlp(), torch.randn(8, 16)), left_out=("dropout",))
    graph = read_operations(joint, len(joint.segments))
    assert graph.mask_only
    schedule = planned_schedule(Blocks(graph), RematChoice(frozenset(graph.live_across)))
    steps = [step for _, block in schedule.backward for step in block]
    masks = [step for step in steps if step.rng_shape_source is not None]
    # The layers before the dropouts are not run again: nothing but the masks needed them. The last one is, since the
    # loss squares what comes out.
    assert len(masks) == 3
    repeated = [str(step.operation.node.target) for step in steps if step.recipe is not None]
    assert repeated.count("aten.addmm.default") == 4 + 1
