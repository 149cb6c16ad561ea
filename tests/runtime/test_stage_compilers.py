from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from roundpipe_fx import torch_private
from roundpipe_fx.ir.joint_graph import Phase
from roundpipe_fx.torch_private import InductorError, ProfiledMemory, profile_memory
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step, train_step
from tests.golden_models import DropoutMLP, MixtureOfExperts, TiedTransformer


class Masks(nn.Module):
    """Reads and writes by masks: their sizes are unknown, their host syncs moved and shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        y = torch.zeros_like(x).masked_scatter(x > 0, x * 2)
        y = y.index_put((x[:, 0] > 0,), torch.tensor(1.5))
        return self.second(y).square().sum() + x[x > 0].sum()


def experts() -> nn.Module:
    return MixtureOfExperts(depth=1)


@pytest.mark.parametrize(
    ("make", "recompute"),
    [(DropoutMLP, "none"), pytest.param(experts, "full", marks=pytest.mark.long), (Masks, "full")],
)
@pytest.mark.long
def test_inductor_agrees_within_rounding(make: Callable[[], nn.Module], recompute: str) -> None:
    model = make()
    batch = {"x": torch.randn(6, 8)}
    reference = aot_eager_step(model, batch)
    step, _ = compiled_step(model, batch, stages=2, recompute=recompute, stage_compiler="inductor")
    torch.testing.assert_close(step.loss, reference.loss, rtol=1e-5, atol=1e-6)
    for parameter, gradient in step.gradients.items():
        torch.testing.assert_close(gradient, reference.gradients[parameter], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_inductor_keeps_to_a_budget() -> None:
    """It fuses, orders and reuses as it likes; what it holds beyond the plan, if it does, is planned for."""
    model = TiedTransformer(width=32, depth=1, vocabulary=64)
    tokens = torch.randint(64, (4, 32))
    batch = {"tokens": tokens, "targets": tokens}
    reference = aot_eager_step(model, batch)
    first = roundpipe_fx.compile(model, memory_budget=0.4, stage_compiler="inductor").trace(**batch)
    compiled = roundpipe_fx.compile(model, memory_budget=first.peak_bytes, stage_compiler="inductor", fullgraph=True)
    for _ in range(4):  # the second step with each plan is watched
        step = train_step(compiled, model, batch)
        torch.testing.assert_close(step.loss, reference.loss, rtol=1e-5, atol=1e-6)
        for parameter, gradient in step.gradients.items():
            torch.testing.assert_close(gradient, reference.gradients[parameter], rtol=1e-4, atol=1e-6)
    model.zero_grad()
    seen: list[ProfiledMemory] = []
    profile_memory(lambda: compiled(**batch).backward(), "cpu", seen.append)
    assert 0 < seen[-1].peak <= first.peak_bytes
    assert compiled.plan.recompute_seconds >= first.recompute_seconds > 0


_BESIDE = 2**16


def wasteful(module: torch.fx.GraphModule, _: list) -> Callable[..., object]:
    """A stage compiler whose stages hold more than their graphs say."""

    def run(arguments: list) -> tuple:
        beside = torch.empty(_BESIDE, dtype=torch.uint8)
        return torch.fx.Interpreter(module).boxed_run(arguments), beside.zero_()

    def call(arguments: list) -> object:
        return run(arguments)[0]

    call._boxed_call = True
    return call


@pytest.mark.long
def test_what_compiled_stages_hold_beyond_their_plan_is_planned_for() -> None:
    model = TiedTransformer(width=32, vocabulary=64)
    tokens = torch.randint(64, (4, 32))
    batch = {"tokens": tokens, "targets": tokens}
    budget = roundpipe_fx.compile(model, memory_budget=1.0).trace(**batch).peak_bytes + _BESIDE // 2
    compiled = roundpipe_fx.compile(model, memory_budget=budget, stage_compiler=wasteful)
    reference = aot_eager_step(model, batch)
    for _ in range(2):
        assert_bitwise(train_step(compiled, model, batch), reference)
        assert not compiled.plan.assumed
        assert compiled.plan.recompute_seconds == 0
    assert_bitwise(train_step(compiled, model, batch), reference)
    assert compiled.plan.assumed["workspace of compiled stages"] >= _BESIDE
    assert "workspace of compiled stages" in str(compiled.plan)
    assert compiled.plan.recompute_seconds > 0
    model.zero_grad()
    seen: list[ProfiledMemory] = []
    profile_memory(lambda: compiled(**batch).backward(), "cpu", seen.append)
    assert budget - _BESIDE < seen[-1].peak <= compiled.plan.peak_bytes <= budget


def _wasted() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(3))), (
        torch.randn(64, 32)
    )


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_bytes_of_a_share_are_those_that_compiled_stages_hold(share: float) -> None:
    model, x = _wasted()
    compiled = roundpipe_fx.compile(model, memory_budget=share, stage_compiler=wasteful)
    for step in range(5):
        model.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled(x).square().mean().backward()
        assert step < 2 or peak.bytes <= compiled.plan.budget
    first, last = compiled.plans  # it settles
    assert last.assumed["workspace of compiled stages"] >= last.budget - first.budget > 0
    assert last.recompute_seconds == first.recompute_seconds > 0


def test_torch_compile_tells_once_that_compiled_stages_exceed_a_budget() -> None:
    model, x = _wasted()
    options = {"memory_budget": 0.3, "stage_compiler": wasteful}
    step = torch.compile(lambda x: model(x).square().mean(), backend="roundpipe_fx", options=options)
    with pytest.warns(roundpipe_fx.StepBudgetWarning, match=r"compiled stages hold.* memory_budget is \d+") as told:
        for _ in range(4):
            step(x).backward()
    assert len(told) == 1


@pytest.mark.long
def test_profiled_steps_may_have_buffers_and_a_loss_outside() -> None:
    layers = [nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)]
    model, x, y = nn.Sequential(*layers), torch.randn(256, 16), torch.randn(256, 16)
    whole = roundpipe_fx.compile(model, memory_budget=1.0, stage_compiler=wasteful).trace(x)
    budget = whole.peak_bytes + _BESIDE // 2
    compiled = roundpipe_fx.compile(model, memory_budget=budget, stage_compiler=wasteful)

    def step() -> None:
        model.zero_grad()
        (compiled(x) - y).square().mean().backward()

    for _ in range(4):
        step()
    # What is learned is what the compiler wastes, not what updates and the loss hold: those are planned for anyway.
    assert _BESIDE <= compiled.plan.assumed["workspace of compiled stages"] < 1.1 * _BESIDE
    model.zero_grad()
    seen: list[ProfiledMemory] = []
    profile_memory(step, "cpu", seen.append)
    assert 0 < seen[-1].peak <= budget


@pytest.mark.long
def test_a_budget_that_compiled_stages_cannot_keep_is_refused_once_that_is_seen() -> None:
    model = TiedTransformer(width=32, vocabulary=64)
    tokens = torch.randint(64, (4, 32))
    lowest = roundpipe_fx.compile(model, memory_budget=0.0, stage_compiler=wasteful)
    budget = lowest.trace(tokens, tokens).peak_bytes
    compiled = roundpipe_fx.compile(model, memory_budget=budget, stage_compiler=wasteful, tiling="never")
    for _ in range(2):
        compiled(tokens, tokens).backward()
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as caught:
        compiled(tokens, tokens)
    assert caught.value.minimum >= budget + _BESIDE


@pytest.mark.long
def test_inductor_with_dynamic_shapes() -> None:
    model = TiedTransformer(depth=1)
    compiled = roundpipe_fx.compile(
        model, stages=2, recompute="full", dynamic=True, stage_compiler="inductor", fullgraph=True
    )
    for length in (5, 7):
        tokens = torch.randint(16, (2, length))
        batch = {"tokens": tokens, "targets": tokens}
        step, reference = train_step(compiled, model, batch), aot_eager_step(model, batch)
        for parameter, gradient in step.gradients.items():
            torch.testing.assert_close(gradient, reference.gradients[parameter], rtol=1e-4, atol=1e-6)
    assert len(compiled.plans) == 1


class _Weighed(nn.Module):
    """Computes a size and a number in its first stage that its second one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = 2 * x.shape[0]
        weight = 1 / (rows + 3)
        y = self.first(x).tanh() * weight
        return (self.second(y).view(rows, 4) * weight).square().sum() / rows


@pytest.mark.long
def test_sizes_that_one_stage_computes_reach_the_next_with_inductor() -> None:
    model = _Weighed()
    compiled = roundpipe_fx.compile(
        model, stages=["second"], recompute="full", dynamic=True, stage_compiler="inductor", fullgraph=True
    )
    for rows in (5, 7):
        batch = {"x": torch.randn(rows, 8)}
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # that a stage could not be compiled
            step = train_step(compiled, model, batch)
        reference = aot_eager_step(model, batch)
        for parameter, gradient in step.gradients.items():
            torch.testing.assert_close(gradient, reference.gradients[parameter], rtol=1e-4, atol=1e-6)
    assert len(compiled.plans) == 1


class _Halved(nn.Module):
    """Halves the height and the width of images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 2, stride=2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(F.silu(self.norm(self.first(images)))).square().mean()


@pytest.mark.long
def test_code_for_sizes_that_are_computed_from_no_input_is_not_looked_up_in_inductors_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward gets half of an image's height, and the height is no input."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = _Halved()
    for _ in range(2):  # the second one finds what the first one has compiled
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(model, dynamic=True, stage_compiler="inductor", fullgraph=True)
        for images in (torch.randn(3, 3, 8, 8), torch.randn(5, 3, 12, 12)):
            step = train_step(compiled, model, {"images": images})
            reference = aot_eager_step(model, {"images": images})
            for parameter, gradient in step.gradients.items():
                torch.testing.assert_close(gradient, reference.gradients[parameter], rtol=1e-4, atol=1e-6)


def test_a_callable_gets_each_different_module_once() -> None:
    seen: list[str] = []

    def compiler(module: torch.fx.GraphModule, example_inputs: list) -> object:
        placeholders = module.graph.find_nodes(op="placeholder")
        assert len(placeholders) == len(example_inputs)
        seen.append(module._get_name())
        return module.forward

    model = DropoutMLP(depth=6)
    batch = {"x": torch.randn(4, 8)}
    reference = aot_eager_step(model, batch)
    step, compiled = compiled_step(model, batch, stages=6, recompute="full", stage_compiler=compiler)
    assert_bitwise(step, reference)
    modules = compiled.plan.modules
    assert len(seen) == len({module.fingerprint for module in modules}) < len(modules)
    assert sum(name.endswith("forward") for name in seen) == 2  # the last has the loss
    inner = compiled.plan.stages[2]
    assert inner.same_as in (0, 1)
    assert compiled.plan.sources()["stage_2.forward.py"].startswith("# the same work")


def test_compilers_see_functional_graphs() -> None:
    def compiler(module: torch.fx.GraphModule, example_inputs: list) -> object:
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                assert not node.target._schema.is_mutable
        return module.forward

    tokens = torch.randint(16, (2, 4))
    compiled = roundpipe_fx.compile(TiedTransformer(), stages=2, recompute="full", stage_compiler=compiler)
    compiled(tokens, tokens).backward()
    assert {module.phase for module in compiled.plan.modules} == set(Phase) - {Phase.WEIGHT}


@pytest.mark.long
def test_settings_of_inductor_are_those_of_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold while its stages are compiled, and not outside."""
    seen = []
    inner = torch._inductor.compile_fx.compile_fx_inner

    def compile_fx_inner(*arguments: Any, **others: Any) -> Any:
        seen.append((torch._inductor.config.max_fusion_size, torch._inductor.config.fallback_random))
        return inner(*arguments, **others)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", compile_fx_inner)
    usual = torch._inductor.config.max_fusion_size
    model = DropoutMLP()
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor", inductor_options={"max_fusion_size": 3})
    compiled(torch.randn(6, 8)).sum().backward()
    assert seen and set(seen) == {(3, True)} and usual != 3 == seen[0][0]
    assert torch._inductor.config.max_fusion_size == usual


@pytest.mark.long
def test_compiled_code_is_called_without_its_object_unless_someone_looks() -> None:
    """From the second call on, which a step of many stages saves each time."""
    from torch._inductor.output_code import CompiledFxGraph

    model, x = DropoutMLP(width=8, depth=2), torch.randn(4, 8)
    compiled = roundpipe_fx.compile(model, stages=2, stage_compiler="inductor")
    calls = 0
    call = CompiledFxGraph.__call__

    def counted(self: CompiledFxGraph, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        return call(self, inputs)

    with mock.patch.object(CompiledFxGraph, "__call__", counted):
        for expected in (4, 0, 0):
            calls = 0
            compiled(x).backward()
            assert calls == expected
        with roundpipe_fx.measure_peak("cpu") as peak:
            compiled(x).backward()
        assert (calls, peak.bytes > 0) == (4, True)
        calls = 0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            compiled(x).backward()
        assert calls == 4


def test_what_inductor_cannot_compile_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning; the next plan is made for eager stages, and is that of eager stages."""

    def fails(*_: Any, **__: Any) -> Any:
        raise InductorError(RuntimeError("no compiler here"), None)

    x = torch.randn(6, 8)
    eager = DropoutMLP()
    model = copy.deepcopy(eager)
    expected = roundpipe_fx.compile(eager, memory_budget=0.5)
    compiled = roundpipe_fx.compile(model, memory_budget=0.5, stage_compiler="inductor")
    monkeypatch.setattr(torch_private, "inductor", fails)
    for step in range(3):
        for one in (expected, compiled):
            one.zero_grad()
            torch.manual_seed(step)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                one(x).sum().backward()
        texts = [str(warning.message) for warning in told if "Inductor could not compile" in str(warning.message)]
        assert bool(texts) == (step == 0) and all("no compiler here" in text for text in texts)
        for left, right in zip(eager.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(left.grad, right.grad)
    assert len(compiled.plans) == 2 and compiled.plan.peak_bytes == expected.plan.peak_bytes
    assert compiled.plan.budget == expected.plan.budget


class Transposed(nn.Module):
    """Saves a value for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).transpose(0, 1).sin()
        return self.second((hidden * hidden.cos()).transpose(0, 1)).square().sum()


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.long
def test_saved_values_that_come_back_with_other_strides_are_refused(stages: int) -> None:
    """In any step: a user's hooks unpack what the backward reads, and may be there in one step and not in another."""
    model, x = Transposed(), torch.randn(8, 16)
    compiled = roundpipe_fx.compile(model, stages=stages, stage_compiler="inductor")
    compiled(x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value.t().contiguous().t()):
        loss = compiled(x)
    with pytest.raises(AssertionError, match="stride"):
        loss.backward()
    model.zero_grad()
    compiled(x).backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
