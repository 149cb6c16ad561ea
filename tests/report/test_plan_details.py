"""What a plan tells when it is looked at closely: memory over the step, emitted lines, other plans."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

import roundpipe_fx
from roundpipe_fx.analysis.caching_allocator import CachingAllocator
from roundpipe_fx.analysis.liveness import Event, find_lifetimes, find_peak, levels_of
from roundpipe_fx.analysis.program_events import follow_events
from roundpipe_fx.analysis.simulator import find_course_peak, levels_of_course
from roundpipe_fx.ir.decisions import LISTS
from roundpipe_fx.report.plan_details import details_as_data, details_from_data
from tests.golden_models import DropoutMLP, MixtureOfExperts, TiedTransformer
from tests.pipeline.steps import CPUS, Blocks


@pytest.fixture(scope="module")
def plan() -> roundpipe_fx.Plan:
    tokens = torch.randint(16, (2, 8))
    return roundpipe_fx.compile(TiedTransformer(width=16, depth=4), memory_budget=0.2).trace(tokens, tokens)


def test_the_highest_moment_is_the_peak_and_its_values_are_those_of_the_peak(plan: roundpipe_fx.Plan) -> None:
    step = plan.look_into().step
    assert step is not None
    moments, values = step.memory.moments, step.memory.values
    sums = [sum(value.bytes for value in values if value.first <= at <= value.last) for at in range(len(moments))]
    assert [total + moment.workspace for total, moment in zip(sums, moments, strict=True)] == [m.bytes for m in moments]
    at = max(range(len(moments)), key=lambda at: moments[at].bytes)
    assert (moments[at].bytes, moments[at].call) == (plan.peak.bytes, plan.peak.call)
    alive = [value for value in values if value.first <= at <= value.last]
    listed = Counter(value.bytes for value in plan.peak.live if value.bytes) - Counter([moments[at].workspace])
    assert Counter(value.bytes for value in alive) == listed
    assert moments[step.memory.forward].call == "the caller"
    assert step.memory.source[moments[at].line]


def test_stages_that_do_the_same_work_have_values_of_their_own(plan: roundpipe_fx.Plan) -> None:
    assert any(stage.same_as is not None for stage in plan.stages)
    step = plan.look_into().step
    assert step is not None
    blocks = {value.module.split(".")[1] for value in step.memory.values if value.module.startswith("blocks.")}
    assert blocks == {"0", "1", "2", "3"}
    names = {value.name for stage in plan.stages for fate in LISTS for value in getattr(stage, fate)}
    assert names <= step.lines.keys()
    recomputed = {value.name for stage in plan.stages for value in stage.recomputed}
    copies = {value.origin for value in step.memory.values if value.origin != value.name}
    # The plan lists operators with several results as one value, if at all.
    assert recomputed == {name for name in copies if "getitem" not in name}
    sources = plan.sources()
    for name in names:
        for line in step.lines[name]:
            text = sources[line.file].splitlines()[line.line - 1]
            assert text.strip() == line.text and re.match(r'\w+: "', line.text)
            same = [f"# the same work on the same shapes as {line.file}\n" == other for other in sources.values()]
            assert line.modules == 1 + sum(same)
        assert step.lines[name][0].file.endswith(".forward.py")


def test_every_plan_of_the_frontier_is_told_apart(plan: roundpipe_fx.Plan) -> None:
    found = plan.look_into().alternatives
    assert [(own.bytes, own.seconds) for own in found.plans] == plan.frontier()
    assert found.chosen is not None and found.plans[found.chosen].seconds == pytest.approx(plan.recompute_seconds)
    for own in found.plans:
        assert max(own.curve) == own.bytes and 0 < own.forward < len(own.curve)
        assert not set(own.saved) & set(own.recomputed)
        assert bool(own.recomputed) == (own.seconds > 0)
    first, chosen = found.plans[0], found.plans[found.chosen]
    assert not first.recomputed and set(chosen.recomputed) <= set(first.saved)
    named = {found.values[place].name for place in chosen.recomputed}
    listed = {value.name for stage in plan.stages for value in stage.recomputed}
    assert listed == {name for name in named if "getitem" not in name}


def test_every_plan_of_a_pipelines_frontier_is_told_apart() -> None:
    x = torch.randn(8, 16)
    compiled = roundpipe_fx.compile(Blocks(), devices=CPUS, num_microbatches=4, memory_budget=0.3)
    plan = compiled.trace(x)
    found = plan.look_into().alternatives
    points = [(own.bytes, own.seconds) for own in found.plans]
    assert points[: len(plan.trade_off)] == plan.frontier() and len(plan.trade_off) > 2
    assert found.chosen is not None and plan.pipeline is not None
    chosen = found.plans[found.chosen]
    assert (chosen.bytes, chosen.makespan) == (plan.peak_bytes, plan.pipeline.makespan)
    assert {found.values[at].name for at in chosen.recomputed} == _named(plan, "recomputed")
    assert _named(plan, "saved") <= {found.values[at].name for at in (*chosen.saved, *chosen.recomputed)}
    for own in found.plans:
        assert len(own.devices) == 2 and max(map(max, own.devices)) <= own.bytes
        assert bool(own.recomputed) == (own.seconds > 0)
    every = plan.timeline().predicted
    for device, curve in enumerate(chosen.devices):
        bars = [bar for bar in every if bar.device == device]
        piece = max(bar.end for bar in every) / len(curve)
        assert max(curve) == max(bar.bytes for bar in bars)
        for at, size in enumerate(curve):
            during = [bar.bytes for bar in bars if bar.start < (at + 1) * piece and bar.end > at * piece]
            assert size == max(during, default=0)
    assert roundpipe_fx.Plan.from_json(plan.to_json()).look_into() == plan.look_into()


def _named(plan: roundpipe_fx.Plan, fate: str) -> set[str]:
    return {value.name for stage in plan.stages for value in getattr(stage, fate)}


def test_they_are_plain_data(plan: roundpipe_fx.Plan) -> None:
    details = plan.look_into()
    assert details_from_data(details_as_data(details)) == details
    assert roundpipe_fx.Plan.from_json(plan.to_json()).look_into() == details


def test_plans_without_budget_or_backward_or_frontier() -> None:
    x = torch.randn(6, 8)
    with torch.no_grad():
        inference = roundpipe_fx.compile(MixtureOfExperts()).trace(x)
    for plan in (inference, roundpipe_fx.compile(DropoutMLP(), stages=2, recompute="full").trace(x)):
        details = plan.look_into()
        assert details.step is not None and not details.alternatives.plans
        moments = details.step.memory.moments
        assert max(moment.bytes for moment in moments) == plan.peak.bytes
        assert roundpipe_fx.Plan.from_json(plan.to_json()).look_into() == details


def test_with_a_caching_allocator_the_moments_are_those_of_the_peak(plan: roundpipe_fx.Plan) -> None:
    course = follow_events(*plan.programs, granularity=512)
    levels = levels_of_course(course, CachingAllocator(), range(3))
    assert max(levels) == find_course_peak(course, CachingAllocator(), range(3)).bytes > plan.peak.bytes


def test_lifetimes_and_levels_of_events() -> None:
    events = [Event("a", (), (0,)), Event("b", (0,), (1,)), Event("c", (1,), (2,), workspace=700)]
    sizes = [100, 600, 1500]
    levels = levels_of(events, sizes, (2,), {}, CachingAllocator())
    assert [during for during, _ in levels] == [512, 512 + 1024, 1024 + 1536 + 1024]
    assert (
        max(during for during, _ in levels) == find_peak(events, sizes, (), (2,), {}, False, CachingAllocator()).bytes
    )
    assert find_lifetimes(events, (2,), {1: (3,)}) == {0: (0, 1), 3: (1, 1), 1: (1, 2), 2: (2, 2)}
