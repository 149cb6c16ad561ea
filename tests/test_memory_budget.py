"""A byte budget is a physical bound, at unchanged bits."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import roundpipe_fx
from roundpipe_fx.budget import parse_budget
from roundpipe_fx.ir.joint_graph import Phase
from tests.comparison import Step, aot_eager_step, assert_bitwise, train_step
from tests.golden_models import GOLDEN, MixtureOfExperts, TiedTransformer
from tests.hugging_face import MODELS, reference_step
from tests.long import long_but
from tests.remat.graphs import mlp
from tests.remat.test_save_policy import RandomModel, operations, relaxed


def _peak(run: Any, model: nn.Module, batch: dict[str, Any]) -> int:
    """Peak of a step whose caller holds the outputs; the first steps compile."""
    for _ in range(3):
        model.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            output = run(**batch)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            loss.backward()
        del output, loss
    return peak.bytes


def _check(
    model: nn.Module, batch: dict[str, Any], budgets: list[Any], reference: Step | None = None
) -> list[tuple[int, float]]:
    reference = reference or aot_eager_step(model, batch)
    found = []
    for budget in budgets:
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        compiled = roundpipe_fx.compile(own, memory_budget=budget, fullgraph=True)
        assert_bitwise(train_step(compiled, own, batch), reference)
        peak = _peak(compiled, own, batch)
        plan = compiled.plan
        assert peak <= plan.peak_bytes <= plan.budget
        # Sizes that depend on data are rounded up, which shows where an expert gets three tokens.
        assert peak >= (0.8 if plan.assumed else 0.97) * plan.peak_bytes
        found.append((peak, plan.recompute_seconds))
    for (low, much), (high, little) in itertools.pairwise(found):
        assert low <= high and much >= little
    return found


@pytest.mark.parametrize("name", long_but(GOLDEN, quick={"unet", "dropout_mlp", "layer_drop"}))
def test_golden_models(name: str) -> None:
    make, make_batch, _ = GOLDEN[name]
    _check(make(), make_batch(), [0.0, 0.5])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.long
def test_hugging_face_models(name: str) -> None:
    make, make_batch = MODELS[name]
    model, batch = make().train(), make_batch()
    found = _check(model, batch, [0.0, 0.3], reference_step(name, model, batch))
    assert found[0][0] < found[-1][0] and found[0][1] > found[-1][1]


class Mixed(nn.Module):
    """Layers with statistics, dropout, and rows that are chosen by their numbers."""

    def __init__(self, depth: int = 3, width: int = 16, inner: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x), 0.2, self.training)
            rows = torch.nonzero(x.detach().sum(dim=1) > 0).flatten()
            x = x.index_add(0, rows, torch.tanh(x[rows]))
        return x.square().mean()


@pytest.mark.long
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.floats(0, 1), st.integers(1, 4))
def test_early_recomputation_at_any_budget_and_number_of_stages(budget: float, stages: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = Mixed(), {"x": torch.randn(64, 16)}
    reference = aot_eager_step(model, batch)
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, memory_budget=budget, stages=stages, fullgraph=True)
    assert_bitwise(train_step(compiled, own, batch), reference)
    for _ in range(2):  # sizes that depend on data are known then
        peak = _peak(compiled, own, batch)
    plan = compiled.plan
    assert peak <= plan.peak_bytes <= plan.budget
    early = [module for module in plan.modules if module.phase is Phase.RECOMPUTE]
    assert bool(early) == any(stage.early_seconds for stage in plan.stages)
    assert all(stage.early_seconds <= stage.recompute_seconds + stage.backward_seconds for stage in plan.stages)


@pytest.mark.long
@relaxed
@given(operations, st.floats(0, 1), st.integers(0, 3))
def test_random_models(chain: list, budget: float, seed: int) -> None:
    torch.manual_seed(seed)
    model, batch = RandomModel([("linear", 0), *chain]), {"x": torch.randn(64, 4)}
    torch._dynamo.reset()
    reference = aot_eager_step(model, batch, seed=seed)
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, memory_budget=budget, fullgraph=True)
    assert_bitwise(train_step(compiled, own, batch, seed=seed), reference)
    assert _peak(compiled, own, batch) <= compiled.plan.budget


def test_a_budget_in_bytes_is_kept_and_used() -> None:
    model, x = mlp(depth=8), torch.randn(512, 16)
    whole = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=1.0).trace(x).peak_bytes
    costs = []
    for share in (0.9, 0.5):
        own = copy.deepcopy(model)
        compiled = roundpipe_fx.compile(own, memory_budget=int(whole * share))
        assert _peak(compiled, own, {"x": x}) <= whole * share
        assert compiled.plan.peak_bytes > whole * (share - 0.12)
        costs.append(compiled.plan.recompute_seconds)
    assert 0 < costs[0] < costs[1]


def test_nothing_is_recomputed_where_everything_fits() -> None:
    model, x = mlp(), torch.randn(32, 16)
    compiled = roundpipe_fx.compile(model, memory_budget="1 GiB")
    assert compiled.trace(x).recompute_seconds == 0
    assert len(compiled.plan.frontier()) > 3  # all the same there is a trade-off to see


def test_a_budget_that_cannot_be_met_is_refused_before_anything_runs() -> None:
    model, x = mlp(), torch.randn(256, 16)
    compiled = roundpipe_fx.compile(model, memory_budget="10 kB", fullgraph=True, tiling="never")
    state = torch.get_rng_state()
    with pytest.raises(
        roundpipe_fx.InfeasibleBudgetError, match=r"cannot be met.*at least \d+ bytes.*stage \d+"
    ) as info:
        compiled(x)
    assert isinstance(info.value, ValueError)
    assert torch.equal(state, torch.get_rng_state())
    lowest = roundpipe_fx.compile(mlp(), memory_budget=0.0).trace(x).peak_bytes
    assert info.value.minimum == lowest
    again = roundpipe_fx.compile(model, memory_budget=info.value.minimum, tiling="never")
    again(x).backward()
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError):
        roundpipe_fx.compile(model, memory_budget=info.value.minimum - 1, tiling="never")(x)


def test_through_the_front_door_of_torch_compile() -> None:
    model, x = mlp(), torch.randn(64, 16)
    reference = aot_eager_step(model, {"x": x})
    options = {"memory_budget": 0.2}
    assert_bitwise(
        train_step(torch.compile(model, backend="roundpipe_fx", options=options), model, {"x": x}), reference
    )
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError):
        torch.compile(model, backend="roundpipe_fx", options={"memory_budget": 1000})(x)


def test_a_gradient_of_an_output_beside_no_loss_is_counted() -> None:
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh())
    compiled = roundpipe_fx.compile(model, memory_budget=0.0)
    x = torch.randn(64, 16)
    for _ in range(2):
        model.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            out = compiled(x)
            out.backward(torch.ones_like(out))
        del out
    assert peak.bytes <= compiled.plan.peak_bytes


@pytest.mark.long
def test_hoisted_values_are_kept_at_every_budget() -> None:
    for budget in (0.0, 0.5):
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(MixtureOfExperts(depth=3), memory_budget=budget)
        loss = compiled(torch.randn(64, 8))
        with roundpipe_fx.count_host_syncs() as syncs:
            loss.backward()
        assert syncs.total == 0


@pytest.mark.parametrize(
    ("budget", "expected"),
    [("6GiB", 6 * 2**30), ("512 MB", 512 * 10**6), ("1.5KiB", 1536), ("100", 100), (7, 7), (0.25, 0.25), (None, None)],
)
def test_budgets_as_users_write_them(budget: Any, expected: Any) -> None:
    assert parse_budget(budget) == expected


@pytest.mark.parametrize("budget", ["6 apples", "", "-3MB", 0, -5, 1.5, -0.1, float("nan"), "0 GiB"])
def test_budgets_that_are_none(budget: Any) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        roundpipe_fx.compile(nn.Linear(2, 2), memory_budget=budget)


@pytest.mark.parametrize("budget", [True, [1], object()])
def test_budgets_of_a_wrong_type(budget: Any) -> None:
    with pytest.raises(TypeError, match="memory_budget"):
        roundpipe_fx.compile(nn.Linear(2, 2), memory_budget=budget)


def test_recompute_and_a_budget_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="contradict"):
        roundpipe_fx.compile(nn.Linear(2, 2), memory_budget=0.5, recompute="full")


@pytest.mark.long
def test_sizes_that_depend_on_data_are_those_of_the_first_batch_with_headroom() -> None:
    model = MixtureOfExperts(depth=2, experts=4)
    torch.manual_seed(0)
    compiled = roundpipe_fx.compile(model, memory_budget=0.2, fullgraph=True)
    x = torch.randn(64, 8)
    compiled(x).backward()
    bounded = compiled.plan
    assert not bounded.assumed
    compiled(x).backward()  # replanned with what was seen
    assert compiled.plan.assumed and max(compiled.plan.assumed.values()) < 64
    assert compiled.plan.peak_bytes < bounded.peak_bytes
    assert "as seen plus headroom" in str(compiled.plan)
    plans = len(compiled.plans)
    compiled(x).backward()
    assert len(compiled.plans) == plans
    with torch.no_grad():  # all tokens go to one expert now: more than was assumed
        for layer in model.layers:
            layer.router.bias[0] += 100
    reference = aot_eager_step(model, {"x": x})
    assert_bitwise(train_step(compiled, model, {"x": x}), reference)
    assert_bitwise(train_step(compiled, model, {"x": x}), reference)
    assert len(compiled.plans) == plans + 1
    assert max(compiled.plan.assumed.values()) == 67  # 64 tokens with 4 % of headroom, twice that of the plan before


class _Scarce(nn.Module):
    """Runs out of memory so many times."""

    failures = 0


@torch.library.custom_op("roundpipe_fx_tests::scarce", mutates_args=())
def _scarce(x: torch.Tensor) -> torch.Tensor:
    if _Scarce.failures:
        _Scarce.failures -= 1
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")
    return x.clone()


@_scarce.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_scarce.register_autograd(lambda ctx, gradient: gradient)


class _Wanting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(depth=6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(_scarce(x))


def test_running_out_of_memory_plans_once_more_with_less() -> None:
    model, x = _Wanting(), torch.randn(512, 16)
    reference = aot_eager_step(model, {"x": x})
    compiled = roundpipe_fx.compile(model, memory_budget=0.8)
    _Scarce.failures = 1
    with pytest.warns(UserWarning, match="ran out of memory.*80% of the budget"):
        step = train_step(compiled, model, {"x": x})
    assert_bitwise(step, reference)
    first, second = compiled.plans
    assert second.budget < first.budget and second.recompute_seconds > first.recompute_seconds


def test_running_out_of_memory_again_is_the_original_error() -> None:
    compiled = roundpipe_fx.compile(_Wanting(), memory_budget=0.8)
    _Scarce.failures = 2
    with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError, match="1 TiB"):
        warnings.simplefilter("ignore")
        compiled(torch.randn(512, 16))
    _Scarce.failures = 0


def test_no_grad_and_eval_run_without_a_plan_for_the_backward() -> None:
    tokens = torch.randint(16, (2, 4))
    compiled = roundpipe_fx.compile(TiedTransformer(), memory_budget=0.1)
    with torch.no_grad():
        compiled(tokens, tokens)
    assert not compiled.plan.training and compiled.plan.peak_bytes > 0


def test_no_budget_on_the_cpu_is_no_limit() -> None:
    plan = roundpipe_fx.compile(mlp()).trace(torch.randn(8, 16))
    assert plan.budget is None and plan.recompute_seconds == 0
    with pytest.raises(RuntimeError, match="without a budget"):
        plan.frontier()


def test_a_cuda_devices_free_memory_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundpipe_fx.budget import default_budget

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 600)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 400)
    assert default_budget(torch.device("cuda")) == 1080
