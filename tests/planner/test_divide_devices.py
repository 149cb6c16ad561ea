"""A number of devices: the division with the shortest step, held against all others; bounds, budgets and odd input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.analysis.cost import DEVICES
from roundpipe_fx.budget import Infeasible, Result
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.pipeline.settings import Undivided
from roundpipe_fx.planner import lower_pipeline as lowering
from roundpipe_fx.planner.divide_devices import NoDivisionError, enumerate_divisions
from roundpipe_fx.planner.step_bound import Division, StepBounds
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.schedules.data_parallel import TOGETHER_BYTES

_WIDTH = 512
_SIZE = 4 * _WIDTH**2
"""Bytes of a layer."""


class _Layers(nn.Module):
    """Layers whose values are as large as their weights, and a loss."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin()
        return (x - labels).square().mean()


def _planned(devices: int, rows: int = 8 * _WIDTH, count: int = 8, layers: int = 4, **options: Any) -> Plan:
    with torch.device("meta"):
        model = _Layers(layers)
    x = torch.empty(rows, _WIDTH, device="meta")
    common = {"device": "H100", "num_microbatches": count, "schedule": "auto"}
    return roundpipe_fx.plan(model, x, labels=torch.empty_like(x), mesh_shape=devices, **common | options)


class _Noted:
    """What a plan's devices were divided with.

    Attributes:
        divisions: all.
        bounds: of them.
        lower: lowers one.
    """

    divisions: list[Division]
    bounds: StepBounds
    lower: Callable[[Division, bool], Result[LoweredPipeline]]

    def seconds(self, division: Division, tiles: bool = False) -> float:
        """Of a step, infinite if it does not fit."""
        result = self.lower(division, tiles)
        if isinstance(result, Infeasible):
            return math.inf
        return result.value.predict(result.value.pipelining.microbatches).makespan


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> _Noted:
    found = _Noted()
    divide = lowering.lower_divided

    def lower_divided(
        undivided: Undivided, divisions: list[Division], bounds: StepBounds, lower: Any
    ) -> Result[LoweredPipeline]:
        found.divisions, found.bounds, found.lower = divisions, bounds, lower
        return divide(undivided, divisions, bounds, lower)

    monkeypatch.setattr(lowering, "lower_divided", lower_divided)
    return found


_CASES: list[dict[str, Any]] = [
    {"devices": 2, "rows": 8 * 64},
    {"devices": 2, "memory_budget": 12 * _SIZE, "schedule": "1f1b"},
    {
        "devices": 4,
        "memory_budget": 4 * _SIZE,
        "schedule": "1f1b",
        "layers": 8,
        "rows": 4 * 64,
        "count": 4,
        "stages": 8,
    },
]


@pytest.mark.long  # each of some ten to thirty divisions is planned
@pytest.mark.parametrize("options", _CASES)
def test_no_other_division_has_a_shorter_step(noted: _Noted, options: dict[str, Any]) -> None:
    plan = _planned(**options)
    assert plan.pipeline is not None and plan.pipeline.mesh is not None
    seconds = {division: noted.seconds(division) for division in noted.divisions}
    assert len(seconds) >= 5
    assert plan.pipeline.makespan == min(seconds.values())
    if "memory_budget" in options:
        assert max(plan.pipeline.peak_bytes) <= options["memory_budget"]
    for division, own in seconds.items():
        assert noted.bounds.of(division).seconds <= own, division
        assert noted.bounds.simulate_seconds(division, estimate=False) <= own, division
    told = plan.pipeline.mesh.divisions
    (chosen,) = (own for own in told if own.chosen)
    assert chosen.seconds == plan.pipeline.makespan and chosen.bytes == max(plan.pipeline.device_bytes)
    for row in told:
        alike = [own for own in seconds if (own.pipeline, own.sharded) == (row.pipeline, row.sharded)]
        best = min(seconds[division] for division in alike)
        assert row.seconds is None or row.seconds <= best or row.planned
        assert row.fits or best == math.inf
    assert "the others take longer at the least" in str(plan)


def test_a_division_is_planned_as_its_mesh_is(noted: _Noted) -> None:
    plan = _planned(4, memory_budget=12 * _SIZE, rows=4 * 64, count=4, schedule="1f1b")
    assert plan.pipeline is not None and plan.pipeline.mesh is not None
    (own,) = (own for own in plan.pipeline.mesh.divisions if own.chosen)
    with torch.device("meta"):
        model = _Layers(4)
    x = torch.empty(4 * 64 // own.replicas, _WIDTH, device="meta")
    same = roundpipe_fx.plan(
        model,
        x,
        labels=torch.empty_like(x),
        device="H100",
        mesh_shape=(own.replicas, own.pipeline),
        shard="dp" if own.sharded else None,
        stages=own.stages,
        schedule=own.schedule,
        num_microbatches=4 // own.replicas,
        memory_budget=12 * _SIZE,
    )
    assert same.pipeline is not None
    assert (same.pipeline.makespan, same.pipeline.peak_bytes) == (plan.pipeline.makespan, plan.pipeline.peak_bytes)
    assert same.sources() == plan.sources()
    assert Plan.from_json(plan.to_json()) == plan
    assert len(str(plan).splitlines()) <= 40
    text = plan.details()
    assert f"* {own.replicas} x {own.pipeline}" in " ".join(text.split())
    assert text.count(" x ") >= len(plan.pipeline.mesh.divisions)


@pytest.mark.long
def test_a_budget_below_all_gradients_takes_shards_or_a_pipeline() -> None:
    few: dict[str, Any] = {"devices": 4, "schedule": "1f1b", "layers": 8, "rows": 4 * 64, "count": 4}
    for budget, expected in ((9 * _SIZE, (4, 1, True)), (4 * _SIZE, (1, 4, False))):
        plan = _planned(**few, memory_budget=budget)
        assert plan.pipeline is not None and plan.pipeline.mesh is not None
        mesh = plan.pipeline.mesh
        assert (mesh.replicas, len(plan.pipeline.devices), mesh.sharded) == expected
        (whole,) = (own for own in mesh.divisions if own.pipeline == 1 and not own.sharded)
        assert whole.bytes > 16 * _SIZE  # weights, gradients and the largest one once more
    assert not whole.fits and "does not fit" in str(plan)


def test_a_prime_number_of_devices() -> None:
    plan = _planned(3, count=3, rows=3 * 64, schedule="1f1b")
    assert plan.pipeline is not None and plan.pipeline.mesh is not None
    assert {own.pipeline for own in plan.pipeline.mesh.divisions} == {1, 3}
    # Of five, no three microbatches are run by five replicas, and there are not as many layers.
    with pytest.raises(NoDivisionError, match="no number of replicas divides both, with at most 4 devices each"):
        _planned(5, count=3, rows=3 * 64, schedule="1f1b", stages=4)


def test_more_replicas_than_microbatches_are_no_division() -> None:
    plan = _planned(4, count=2, rows=2 * 64, schedule="1f1b")
    assert plan.pipeline is not None and plan.pipeline.mesh is not None
    assert {own.replicas for own in plan.pipeline.mesh.divisions} == {1, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "mesh_shape=0: a mesh has at least one device"),
        ({"devices": -2}, "mesh_shape=-2: a mesh has at least one device"),
        ({"devices": True}, "sizes of the dimensions 'dp' and 'pp'"),
        ({"devices": 4, "count": 3}, "4096 rows, which are not divisible by it"),
        ({"devices": 4, "count": 0}, "num_microbatches=0: there must be at least one"),
        ({"devices": 4, "stages": ["layers.1"]}, "stages with names exclude each other"),
        ({"devices": 4, "memory_budget": 0.5}, "a share means other bytes for each way to divide devices"),
        ({"devices": 4, "schedule": roundpipe_fx.Schedule.parse("0: F0.0 B0.0")}, "and a Schedule exclude each other"),
        ({"devices": 4, "offloaded": True}, "exclude each other"),
        ({"devices": 4, "host_budget": "1GiB"}, "mesh_shape=4 and host_budget= exclude each other"),
        ({"devices": 2, "memory_budget": 1000, "schedule": "1f1b"}, "none of .* ways to divide 2 devices fits"),
    ],
)
def test_what_cannot_be_divided(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _planned(**options)


def test_what_needs_no_gradient_is_not_divided() -> None:
    x = torch.empty(8, _WIDTH)
    with torch.no_grad(), pytest.raises(NoDivisionError, match="devices are divided for training"):
        roundpipe_fx.plan(_Layers(2), x, labels=x, device="H100", mesh_shape=2)


def test_divisions_of_devices() -> None:
    found = enumerate_divisions(Undivided(6, 12), 8, "auto", ["1f1b", "interleaved"], False)
    assert {(own.replicas, own.pipeline) for own in found} == {(6, 1), (3, 2), (2, 3), (1, 6)}
    assert {own.stages for own in found if own.pipeline == 3 and own.schedule == "1f1b"} == {3, 6}
    assert {own.stages for own in found if own.pipeline == 3 and own.schedule == "interleaved"} == {6}
    alone = [own for own in found if own.pipeline == 6]
    assert [(own.stages, own.sharded, own.schedule) for own in alone] == [(6, False, "1f1b")]
    only = enumerate_divisions(Undivided(6, 12), 8, 4, ["1f1b"], True)
    assert [(own.pipeline, own.sharded) for own in only] == [(1, True), (2, True), (3, True)]


def test_bounds_of_equal_layers(noted: _Noted) -> None:
    """By hand, for a pipeline of two devices: each waits for the other's part of one microbatch."""
    _planned(2, schedule="1f1b", count=4, rows=4 * 64)
    costs = noted.bounds.costs
    assert costs.count >= 4 and all(costs.tensors[number].shape == (_WIDTH, _WIDTH) for number in costs.tensors)
    assert sum(sum(own.values()) for own in costs.gradients) == 4 * _SIZE
    pipeline = Division(pipeline=2, replicas=1, sharded=False, stages=2, schedule="1f1b")
    total = sum(costs.forward_seconds) + sum(costs.backward_seconds)
    bound = noted.bounds.of(pipeline)
    assert 5 / 2 * total * 0.9 < bound.seconds < 5 / 2 * total * 1.2
    replicas = Division(pipeline=1, replicas=2, sharded=False, stages=1, schedule="1f1b")
    assert 4 * _SIZE == TOGETHER_BYTES
    reduced = DEVICES["H100"].network.ring(2, 1).all_reduce_seconds(4 * _SIZE)
    assert noted.bounds.of(replicas).seconds == pytest.approx(2 * total + reduced)


def test_schedules_that_run_alike_are_planned_once() -> None:
    names = ["gpipe", "1f1b", "interleaved", "zero_bubble"]
    for count, devices, expected in ((2, 1, {"1f1b"}), (4, 1, {"1f1b", "gpipe", "interleaved"}), (2, 2, {*names})):
        found = enumerate_divisions(Undivided(2, count), 8, "auto", names, False)
        assert {own.schedule for own in found if own.pipeline == devices} == expected
