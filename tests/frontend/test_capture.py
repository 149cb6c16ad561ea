"""Capture: graph breaks, Dynamo's flags, and when a model is recompiled."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import roundpipe_fx
from roundpipe_fx.api import backend
from roundpipe_fx.frontend.capture import joint_graph_of
from roundpipe_fx.torch_private import dynamo_flags, flags
from tests.comparison import assert_bitwise, train_step
from tests.golden_models import DropoutMLP, MixtureOfExperts, TiedTransformer


class Branching(nn.Module):
    """Cannot be one graph: Python decides by a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum() > 0:  # the line that breaks
            x = x + 1
        return self.second(x).sum()


def test_untraceable_model_with_fullgraph_names_the_line() -> None:
    compiled = roundpipe_fx.compile(Branching(), fullgraph=True)
    with pytest.raises(Exception, match=r"test_capture\.py") as raised:
        compiled(torch.randn(2, 4))
    assert "if x.sum() > 0:  # the line that breaks" in str(raised.value)


def test_graph_break_warns_once_and_stays_right() -> None:
    model = Branching()
    reference = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model, recompute="full")
    x = torch.randn(2, 4)
    with pytest.warns(roundpipe_fx.GraphBreakWarning, match=r"test_capture.py:\d+ in forward") as caught:
        compiled(x).backward()
        model.zero_grad()
        compiled(x).backward()
    assert len([w for w in caught if w.category is roundpipe_fx.GraphBreakWarning]) == 1
    reference(x).backward()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    assert len(compiled.plans) == 2


def test_dynamo_flags_are_restored() -> None:
    config = torch._dynamo.config
    before = {name: getattr(config, name) for name in ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")}
    assert before == {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False}
    roundpipe_fx.compile(MixtureOfExperts(), fullgraph=True)(torch.randn(6, 8)).backward()
    assert before == {name: getattr(config, name) for name in before}
    with pytest.raises(torch._dynamo.exc.Unsupported):
        roundpipe_fx.compile(Branching(), fullgraph=True)(torch.randn(2, 4))
    assert before == {name: getattr(config, name) for name in before}


def test_dynamo_flags_may_be_nested() -> None:
    config = torch._dynamo.config
    with dynamo_flags():
        with dynamo_flags():
            assert config.capture_scalar_outputs
        assert config.capture_scalar_outputs, "the inner end is not the outer's"
        with pytest.raises(ZeroDivisionError), dynamo_flags():
            _ = 1 / 0
        assert config.capture_scalar_outputs
    assert not config.capture_scalar_outputs
    with pytest.raises(ZeroDivisionError), dynamo_flags():
        _ = 1 / 0
    assert not config.capture_scalar_outputs
    with dynamo_flags():
        assert config.capture_scalar_outputs


class Swept(nn.Module):
    """Its class is compiled again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh().sum()


@pytest.mark.long
def test_a_class_may_be_compiled_any_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo counts compilations by function, and runs it eagerly from some number on."""
    monkeypatch.setattr(flags, "_MOST_COMPILATIONS", 24)
    x = torch.randn(2, 4)
    used = [roundpipe_fx.compile(Swept(), memory_budget=1.0) for _ in range(2)]
    for _ in range(20):
        compiled = roundpipe_fx.compile(Swept(), memory_budget=1.0)
        for model in (compiled, *used):
            model(x).backward()
        assert len(compiled.plans) == 1
        roundpipe_fx.plan(Swept(), x, memory_budget=1.0, device="cpu")
    assert all(len(model.plans) < 5 for model in used), "models in use are seldom compiled again"


def test_a_compiled_model_ends_with_its_last_reference() -> None:
    compiled = roundpipe_fx.compile(Swept())
    compiled(torch.randn(2, 4)).backward()
    alive = weakref.ref(compiled)
    gc.disable()
    try:
        del compiled
        assert alive() is None
    finally:
        gc.enable()


def test_forward_may_be_replaced() -> None:
    """As accelerate does for mixed precision."""
    model, x = Swept(), torch.randn(2, 4)
    compiled = roundpipe_fx.compile(model)
    own = compiled.forward
    compiled.forward = lambda x: 2 * own(x)
    assert torch.equal(compiled(x), 2 * model(x))
    assert inspect.signature(own) == inspect.signature(model.forward)


def test_recompiling_a_model_leaves_others_of_its_class_alone() -> None:
    x = torch.randn(2, 4)
    first, second = (roundpipe_fx.compile(Swept(), memory_budget=1.0) for _ in range(2))
    for _ in range(3):
        for model in (first, second):
            model(x).backward()
        second._state_of_roundpipe_fx.learned.stale = True
    assert (len(first.plans), len(second.plans)) == (1, 3)


def _counting() -> nn.Module:
    """A model that does as much more in each call as it counts, none of which Dynamo has given up."""
    torch._dynamo.reset()

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.count = nn.Linear(4, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            for _ in range(self.count):
                x = self.layer(x)
            return x.square().mean()

    return Counting()


class _Annealed(nn.Module):
    """A model that counts its steps and weighs its loss by them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.steps, self.factor = 0, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        weight = min(1.0, self.steps / 100)
        return (self.second(self.first(x).tanh() * weight) * self.factor).square().mean() * self.steps


@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.0}, {"stages": 2, "stage_compiler": "inductor"}])
@pytest.mark.long
def test_a_number_that_changes_is_compiled_once_more(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model, x = _Annealed(), torch.randn(4, 8)
    expected = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model, **options)
    for step in range(6):
        model.factor = expected.factor = 0.5 + step / 10
        for run in (compiled, expected):
            run.zero_grad()
            run(x).backward()
        for parameter, own in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, own.grad)
    assert model.steps == expected.steps == 6
    assert len(compiled.plans) <= 3


@pytest.mark.parametrize("front_door", ["compile", "in place", "torch.compile"])
@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
def test_the_recompile_limit_is_told_of_once_with_what_is_not_kept(
    front_door: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flags, "_MOST_COMPILATIONS", 1)
    monkeypatch.setattr(backend, "_warned", set())
    model = run = _counting()
    if front_door == "compile":
        run = roundpipe_fx.compile(model, memory_budget=300)
    elif front_door == "in place":
        model.compile(backend="roundpipe_fx", options={"memory_budget": 300})
    else:
        run = torch.compile(model, backend="roundpipe_fx", options={"memory_budget": 300})
    x = torch.randn(2, 4)
    with torch._dynamo.config.patch({limit: 2}), pytest.warns(roundpipe_fx.GraphBreakWarning) as told:
        for _ in range(6):
            run(x).backward()
    (text,) = [str(warning.message) for warning in told]
    kept = "the memory_budget of 300 bytes (300 B) is not kept from now on"
    assert text.startswith(f"roundpipe_fx: the recompile limit was reached, so {kept}")
    assert f"Counting.forward ({__file__}" in text and f"torch._dynamo.config.{limit} (2)" in text
    assert "self.count == 1" in text and "keep self.count as a tensor" in text
    assert len(roundpipe_fx.plans(model) or run.plans) == 2
    expected = copy.deepcopy(model)
    assert torch.equal(run(x), expected(x))  # eagerly


def test_the_recompile_limit_as_an_error_has_the_reason() -> None:
    model = roundpipe_fx.compile(_counting(), memory_budget=300, fullgraph=True)
    with (
        torch._dynamo.config.patch(accumulated_recompile_limit=1),
        pytest.raises(Exception, match=r"the recompile limit was reached.*Counting\.forward.*self\.count == 0"),
    ):
        for _ in range(2):
            model(torch.randn(2, 4)).backward()


def test_a_model_of_a_class_that_reached_the_limit_is_compiled() -> None:
    model = _counting()
    fresh = copy.deepcopy(model)
    compiled, x = roundpipe_fx.compile(model, memory_budget=300), torch.randn(2, 4)
    with torch._dynamo.config.patch(accumulated_recompile_limit=1), pytest.warns(roundpipe_fx.GraphBreakWarning):
        for _ in range(3):
            compiled(x).backward()
    other = roundpipe_fx.compile(fresh, memory_budget=300)
    other(x).backward()
    assert len(other.plans) == 1


def test_shape_changes_recompile() -> None:
    model = DropoutMLP()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full", fullgraph=True)
    for batch in (4, 6, 9, 4):
        x = torch.randn(batch, 8)
        reference = copy.deepcopy(model)
        expected = train_step(torch.compile(reference, backend="aot_eager"), reference, {"x": x})
        assert_bitwise(train_step(compiled, model, {"x": x}), expected)
    assert 2 <= len(compiled.plans) <= 3


@pytest.mark.long
def test_dynamic_shapes() -> None:
    model = TiedTransformer()
    compiled = roundpipe_fx.compile(model, stages=3, recompute="full", fullgraph=True, dynamic=True)
    reference = copy.deepcopy(model)
    run = torch.compile(reference, backend="aot_eager", dynamic=True)
    for length in (3, 5, 7):
        tokens = torch.randint(16, (2, length))
        batch = {"tokens": tokens, "targets": tokens}
        assert_bitwise(train_step(compiled, model, batch), train_step(run, reference, batch))
    assert len(compiled.plans) == 1


class _Named(nn.Module):
    """Inputs called like what emitted text calls its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, args: torch.Tensor, streams: torch.Tensor, torch: torch.Tensor) -> torch.Tensor:
        return (self.layer(args).sin() * streams + torch).square().sum()


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"memory_budget": 0.0}, {"num_microbatches": 1}])
def test_inputs_may_be_called_anything(options: dict) -> None:
    model, inputs = _Named(), [torch.randn(2, 4) for _ in range(3)]
    expected = torch.autograd.grad(model(*inputs), list(model.parameters()))
    compiled = roundpipe_fx.compile(model, stages=1, **options)
    found = torch.autograd.grad(compiled(*inputs), list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    texts = {name: text for name, text in compiled.plan.sources().items() if name.endswith(".py")}
    assert texts
    for name, text in texts.items():
        compile(text, name, "exec")


def test_a_forward_returns_objects_of_its_own() -> None:
    """AOTAutograd takes equal meshes for the one of the incoming gradient."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        graph = fx.Graph()
        tensor, own, tangent, other = map(graph.placeholder, ("primals_1", "primals_2", "tangents_1", "tangents_2"))
        for node in (tensor, tangent):
            node.meta["val"] = torch.ones(2)
        for node in (own, other):
            node.meta["val"] = copy.copy(mesh)
        graph.output((tensor, other, tangent, other))
        joint = joint_graph_of(fx.GraphModule(nn.Module(), graph), 2, [])
        assert joint.forward_outputs == [tensor, own] and joint.gradients == [tangent, other]
    finally:
        dist.destroy_process_group()
