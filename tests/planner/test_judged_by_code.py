"""Which schedules are judged by the code of their stages, and which is taken."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import roundpipe_fx
from roundpipe_fx.planner import judged_by_code
from tests.runtime.test_compiled_memory import Words


def _least_recomputed(operations: list[int], code: list[int], limit: int, first: int) -> tuple[int | None, set[int]]:
    """The schedule that is found, and those that were judged."""
    judged: set[int] = set()

    def judge(place: int) -> int:
        judged.add(place)
        return code[place]

    place = judged_by_code.find_least_recomputed(len(operations), operations.__getitem__, judge, limit, first, {})
    return place, judged


_FALLING = st.lists(st.integers(1000, 100000), min_size=1, max_size=12).map(lambda sizes: sorted(sizes, reverse=True))


@given(data=st.data(), operations=_FALLING)
def test_a_schedule_within_the_limit_is_found_where_the_last_one_is(data: st.DataObject, operations: list[int]) -> None:
    count = len(operations)
    code = sorted(data.draw(st.lists(st.integers(1000, 100000), min_size=count, max_size=count)), reverse=True)
    limit = data.draw(st.integers(900, 100100))
    place, judged = _least_recomputed(operations, code, limit, data.draw(st.integers(0, count - 1)))
    assert len(judged) <= judged_by_code._JUDGED + 1
    if code[-1] > limit:
        assert place is None
        return
    assert place is not None and code[place] <= limit
    assert all(code[other] > limit for other in judged if other < place)


@given(data=st.data(), operations=_FALLING)
def test_the_best_schedule_is_found_where_code_needs_so_much_less_than_its_operations(
    data: st.DataObject, operations: list[int]
) -> None:
    less = data.draw(st.integers(-10000, 900))
    code = [size - less for size in operations]
    limit = data.draw(st.integers(min(code), 120000))
    place, judged = _least_recomputed(operations, code, limit, data.draw(st.integers(0, len(code) - 1)))
    assert place == next(place for place, size in enumerate(code) if size <= limit)
    assert len(judged) <= 3


@given(data=st.data(), operations=_FALLING)
def test_a_good_schedule_is_found_where_code_needs_a_share_of_its_operations(
    data: st.DataObject, operations: list[int]
) -> None:
    share = data.draw(st.sampled_from([0.5, 0.75, 1.25]))
    code = [int(size * share) for size in operations]
    limit = data.draw(st.integers(min(code), 130000))
    ends = {place: code[place] for place in (0, len(code) - 1)}
    place = judged_by_code.find_least_recomputed(
        len(code), operations.__getitem__, code.__getitem__, limit, len(code) - 1, ends
    )
    assert place is not None and code[place] <= limit
    assert all(size > limit - 2 for size in code[:place])  # estimates are not rounded


def test_a_schedule_before_a_rise_is_found() -> None:
    """A long chain that is recomputed at once may need more than holding it, so bytes do not fall in every step."""
    estimates = [226, 221, 193, 325, 325, 325, 323, 306, 305, 285, 280, 270]
    code = [325, 322, 293, *estimates[3:]]
    place, judged = _least_recomputed(estimates, code, 315, 0)
    assert place == 2 and judged == {0, 2}
    place, judged = _least_recomputed(code, code, 300, 2)
    assert place == 2 and len(judged) == 1


def test_a_budget_that_all_operations_keep_has_one_plan() -> None:
    x = torch.randn(64, 32)
    plan = roundpipe_fx.compile(Net(), memory_budget=1 << 40, stage_compiler="inductor").trace(x)
    assert not plan.recompute_seconds and plan.budget == 1 << 40


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin() * x
        return x.square().mean()


@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.long
def test_stages_are_as_long_as_compiling_gains_where_nothing_is_recomputed(repeated: bool) -> None:
    """Layers that repeat stay stages; what does not is one. A plan that recomputes has shorter ones."""
    widths = [32] * 6 if repeated else [16, 24, 32, 40, 48, 56]

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(map(nn.Linear, [8, *widths], widths))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh().sin()
            return x.square().mean()

    model, x = Layers(), torch.randn(64, 8)

    def stages(budget: float | None) -> int:
        compiled = roundpipe_fx.compile(model, memory_budget=budget, stage_compiler="inductor")
        return len(compiled.trace(x).stages)

    without, all_saved, recomputed = stages(None), stages(1.0), stages(0.0)
    # The first layer reads another width than those that repeat, and the last has the loss: six stages.
    assert without == all_saved == (6 if repeated else 1)
    assert recomputed > 1


@pytest.mark.parametrize("tiling", ["never", None])
@pytest.mark.long
def test_what_a_refusal_names_is_met(tiling: str | None) -> None:
    """In bytes: the least is met, and one byte less is refused; in tiles, too."""
    model, inputs = (Net(), torch.randn(256, 32)) if tiling else (Words(1024, 1), torch.randint(1024, (4, 64)))

    def plan(budget: int) -> roundpipe_fx.Plan:
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(model, memory_budget=budget, stage_compiler="inductor", tiling=tiling)
        return compiled.trace(inputs)

    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        plan(1)
    minimum = refused.value.minimum
    least = plan(minimum)
    assert least.peak_bytes == minimum and bool(least.tiles) == (tiling is None)
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        plan(minimum - 1)
    assert refused.value.minimum == minimum


@pytest.mark.long
def test_a_step_of_two_backwards_is_within_its_share() -> None:
    """The second plan counts values that the second backward keeps, and that the first one may not write over."""
    x = torch.randn(256, 32)
    compiled = roundpipe_fx.compile(Net(), memory_budget=0.5, stage_compiler="inductor")
    for _ in range(2):
        compiled.zero_grad()
        with warnings.catch_warnings(), roundpipe_fx.measure_peak("cpu") as peak:
            warnings.simplefilter("ignore", roundpipe_fx.StepBudgetWarning)
            loss = compiled(x)
            loss.backward(retain_graph=True)
            loss.backward()
    assert peak.bytes <= compiled.plan.peak_bytes <= compiled.plan.budget


def test_the_example_of_the_page() -> None:
    """The one that the module's docstring shows."""
    place, judged = _least_recomputed([90, 80, 70, 60, 50, 40], [71, 61, 51, 41, 33, 26], 50, 4)
    assert place == 3 and judged == {3, 4}
