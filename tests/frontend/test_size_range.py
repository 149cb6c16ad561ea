"""A budget in bytes holds for every size of the inputs, also when one graph runs with many."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.budget import Found, Infeasible, Result
from roundpipe_fx.frontend.size_range import lower_for_sizes, steps_above
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.torch_private import assumed_sizes, dynamo_flags
from tests import hugging_face
from tests.capturing import capture_joint
from tests.comparison import Step, assert_bitwise, train_step


def _mlp(depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))]
    return nn.Sequential(*layers)


def _peak_of_step(compiled: Any, x: torch.Tensor) -> int:
    compiled.zero_grad()
    with roundpipe_fx.measure_peak() as peak:
        compiled(x).sum().backward()
    return peak.bytes


def _references(model: nn.Module, batches: list[dict[str, Any]]) -> list[Step]:
    model = copy.deepcopy(model)
    with dynamo_flags():
        run = torch.compile(model, backend="aot_eager")
        return [train_step(run, model, batch) for batch in batches]


@pytest.mark.long
def test_no_length_exceeds_the_budget() -> None:
    torch.manual_seed(0)
    model = hugging_face.gpt2(layers=1)
    longest = hugging_face.language_batch(2, 96)
    budget = roundpipe_fx.plan(copy.deepcopy(model), **longest, memory_budget=0.2, device="cpu").peak_bytes
    budget = int(1.2 * budget)
    lengths = (24, 96, 17)
    batches = [hugging_face.language_batch(2, length) for length in lengths]
    references = _references(model, batches)
    compiled = roundpipe_fx.compile(model, memory_budget=budget, fullgraph=True)
    for batch, reference in zip(batches, references, strict=True):
        with roundpipe_fx.measure_peak() as peak:
            step = train_step(compiled, model, batch)
        assert peak.bytes <= budget
        assert_bitwise(step, reference)


@pytest.mark.long
def test_as_many_plans_as_the_sizes_are_apart() -> None:
    model = _mlp()
    compiled = roundpipe_fx.compile(model, memory_budget=110_000, fullgraph=True)
    for rows in range(64, 129):
        assert _peak_of_step(compiled, torch.randn(rows, 16)) <= 110_000
    # The first size is planned alone, 65 for up to 73, then 74, 83, 94, 105 and 119 for up to an eighth more.
    assert len(compiled.plans) == 7
    made = len(compiled.plans)
    for rows in (65, 77, 100, 128):
        _peak_of_step(compiled, torch.randn(rows, 16))
    assert len(compiled.plans) == made


def test_small_batches_recompute_no_more_than_they_need() -> None:
    model = _mlp()
    whole = roundpipe_fx.plan(_mlp(), torch.randn(100, 16), memory_budget=1.0, device="cpu").peak_bytes
    compiled = roundpipe_fx.compile(model, memory_budget=whole, fullgraph=True)
    compiled(torch.randn(8, 16)).sum().backward()
    compiled(torch.randn(128, 16)).sum().backward()
    assert compiled.plan.recompute_seconds > 0
    compiled(torch.randn(32, 16)).sum().backward()
    assert compiled.plan.recompute_seconds == 0
    assert compiled.plan.sizes
    plans = len(compiled.plans)
    compiled(torch.randn(20, 16)).sum().backward()  # what recomputes nothing serves all that is smaller
    assert len(compiled.plans) == plans


def test_plan_says_for_which_sizes_it_is() -> None:
    compiled = roundpipe_fx.compile(_mlp(), memory_budget=110_000, fullgraph=True)
    compiled(torch.randn(8, 16)).sum().backward()
    assert not compiled.plan.sizes
    compiled(torch.randn(32, 16)).sum().backward()
    assert dict(compiled.plan.sizes) == {"args_0, dimension 0": 36}
    assert "made for sizes up to: args_0, dimension 0 ≤ 36" in str(compiled.plan)
    assert roundpipe_fx.Plan.from_json(compiled.plan.to_json()).sizes == compiled.plan.sizes


@pytest.mark.long
def test_a_size_that_is_too_large_is_refused_and_others_go_on() -> None:
    compiled = roundpipe_fx.compile(_mlp(), memory_budget=40_000, fullgraph=True)
    for rows in (16, 24):
        _peak_of_step(compiled, torch.randn(rows, 16))
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError, match="at least"):
        compiled(torch.randn(4096, 16))
    assert _peak_of_step(compiled, torch.randn(24, 16)) <= 40_000


def test_what_fits_at_this_size_and_at_none_larger() -> None:
    least = roundpipe_fx.plan(_mlp(), torch.randn(64, 16), memory_budget=0.0, device="cpu").peak_bytes
    compiled = roundpipe_fx.compile(_mlp(), memory_budget=int(1.01 * least), fullgraph=True, dynamic=True)
    assert _peak_of_step(compiled, torch.randn(64, 16)) <= 1.01 * least
    assert dict(compiled.plan.sizes) == {"args_0, dimension 0": 64}


def test_two_sizes() -> None:
    compiled = roundpipe_fx.compile(_mlp(), memory_budget=110_000, fullgraph=True)
    for rows, length in ((2, 16), (3, 24), (2, 48), (5, 20)):
        assert _peak_of_step(compiled, torch.randn(rows, length, 16)) <= 110_000
    assert len(compiled.plan.sizes) == 2


@pytest.mark.long
def test_behind_torch_compile() -> None:
    model = _mlp()
    run = torch.compile(model, backend="roundpipe_fx", options={"memory_budget": 110_000}, fullgraph=True)
    for rows in (8, 32, 100, 128):
        model.zero_grad()
        with roundpipe_fx.measure_peak() as peak:
            run(torch.randn(rows, 16)).sum().backward()
        assert peak.bytes <= 110_000


def test_range_that_the_user_gives_is_planned_for_whole() -> None:
    compiled = roundpipe_fx.compile(_mlp(), memory_budget=110_000, fullgraph=True)
    x = torch.randn(8, 16)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=128)
    compiled(x).sum().backward()
    assert dict(compiled.plan.sizes) == {"args_0, dimension 0": 128}
    for rows in (128, 3):
        assert _peak_of_step(compiled, torch.randn(rows, 16)) <= 110_000
    assert len(compiled.plans) == 1


def test_marked_without_a_largest_size() -> None:
    compiled = roundpipe_fx.compile(_mlp(), memory_budget=110_000, fullgraph=True)
    for rows in (8, 64, 128):
        x = torch.randn(rows, 16)
        torch._dynamo.mark_dynamic(x, 0)
        assert _peak_of_step(compiled, x) <= 110_000


def test_shares_and_no_budget_serve_all_sizes() -> None:
    for options in ({"memory_budget": 0.3}, {"recompute": "full"}, {}):
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(_mlp(), fullgraph=True, **options)
        for rows in (8, 100, 12):
            compiled(torch.randn(rows, 16)).sum().backward()
        assert len(compiled.plans) == 2
        assert not compiled.plan.sizes


@pytest.mark.long
def test_ragged_microbatches_of_many_batches() -> None:
    model = _mlp()
    compiled = roundpipe_fx.compile(
        model, stages=2, devices=["cpu"], num_microbatches=3, schedule="1f1b", memory_budget=60_000
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (24, 25, 200):
            x = torch.randn(rows, 16)
            model.zero_grad()
            with roundpipe_fx.measure_peak() as peak:
                compiled.forward_backward(x, loss_fn=torch.sum)
            assert peak.bytes <= 60_000


def test_steps_keep_what_a_size_is_a_multiple_of() -> None:
    sizes = {3: 3, 8: 9, 32: 36, 33: 37, 48: 54, 100: 112, 1024: 1152}
    assert {size: steps_above(size, 1.125) for size in sizes} == sizes


def test_a_plan_for_larger_sizes_of_data_serves_where_the_search_misses_one_for_smaller_ones() -> None:
    """The search is no exact one: for fewer rows it may find nothing within bytes that suffice for more."""
    joint = capture_joint(lambda x: x[x > 0].sin().sum(), torch.randn(64, requires_grad=True))
    (symbol,) = {s for node in joint.computed() for s in map(str, node.meta.get("unbacked_bindings", ()))}
    tried: list[int] = []

    def lower(given: JointGraph) -> Result[JointGraph]:
        rows = assumed_sizes(given.module)[symbol] if assumed_sizes(given.module) else 64
        tried.append(rows)
        if rows in refused:
            return Infeasible(minimum=1000 - rows, bottleneck="")
        return Found(given)

    refused = {10}
    assert isinstance(lower_for_sizes(joint, {symbol: 10}, lower, lambda _: False), Found)
    assert tried == [10, 64]
    refused = {10, 64}
    assert lower_for_sizes(joint, {symbol: 10}, lower, lambda _: False) == Infeasible(minimum=1000 - 64, bottleneck="")


class _Routed(nn.Module):
    """Rows are picked by a mask, a condition or equality, and go through a layer of their own."""

    def __init__(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.pick = nn.Linear(16, 16), nn.Linear(16, 64), pick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        return self.second(y[self.pick(y)]).exp().mean() + y.square().mean()


@pytest.mark.parametrize(
    "pick",
    [
        lambda y: y[:, 0] > 0,
        lambda y: torch.where(y[:, 0] > 0)[0],
        lambda y: (y[:, 0] > 0).nonzero().squeeze(1),
        lambda y: torch.unique((y[:, 0] > 0).long()),
        lambda y: (y[:, :1] * 0 + y[None, :, 0] * 0).long().masked_select(y[:, :1] > 0),
    ],
    ids=["mask", "where", "nonzero", "unique", "select"],
)
@pytest.mark.quick_every(2)
def test_sizes_of_data_are_bounded_by_symbolic_sizes(pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A count of rows is planned with at most as many rows as there are, whether their number is a symbol or not."""

    def planned(dynamic: bool) -> int:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = roundpipe_fx.compile(_Routed(pick), memory_budget=1.0, dynamic=dynamic)
        return model.trace(torch.randn(12, 16)).peak_bytes

    assert planned(True) == planned(False)
