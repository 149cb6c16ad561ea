"""Bad input and odd use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from tests.comparison import assert_bitwise, train_step
from tests.golden_models import DropoutMLP, TiedTransformer
from tests.linear_chain import linear_chain


def test_nothing_requires_grad() -> None:
    model = linear_chain().requires_grad_(False)
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    x = torch.randn(2, 4)
    assert torch.equal(compiled(x), model(x))
    assert not compiled(x).requires_grad
    assert not compiled.plan.training


def test_only_the_input_requires_grad() -> None:
    model = linear_chain().requires_grad_(False)
    x = torch.randn(2, 4, requires_grad=True)
    roundpipe_fx.compile(model, stages=2, recompute="full")(x).sum().backward()
    found, x.grad = x.grad, None
    model(x).sum().backward()
    assert torch.equal(found, x.grad)


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_frozen_but_for_adapters(recompute: str) -> None:
    model = nn.Sequential(*(LoRA(nn.Linear(4, 4)) for _ in range(3)))
    x = torch.randn(2, 4)
    expected = train_step(lambda x: model(x).square().sum(), model, {"x": x})
    compiled = roundpipe_fx.compile(model, stages=2, recompute=recompute, fullgraph=True)
    assert_bitwise(train_step(lambda x: compiled(x).square().sum(), model, {"x": x}), expected)
    assert all(layer.base.weight.grad is None for layer in model)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("in_an_earlier_step", ["none", "once", "twice"])
def test_backward_twice(recompute: str, in_an_earlier_step: str) -> None:
    model = DropoutMLP()
    compiled = roundpipe_fx.compile(model, stages=2, recompute=recompute)
    if in_an_earlier_step != "none":
        loss = compiled(torch.randn(4, 8))
        if in_an_earlier_step == "twice":
            loss.backward(retain_graph=True)
        loss.backward()
        model.zero_grad()
    loss = compiled(torch.randn(4, 8))
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for grad, first in zip((p.grad for p in model.parameters()), once, strict=True):
        assert torch.equal(grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_is_a_clear_error() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    out = roundpipe_fx.compile(linear_chain())(x).square().sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, bad: bool = False) -> torch.Tensor:
        if bad:
            raise KeyError("the model's own error")
        return self.layer(x)


def test_exception_inside_the_model() -> None:
    compiled = roundpipe_fx.compile(Raising())
    with pytest.raises(KeyError, match="the model's own error"):
        compiled(torch.randn(2, 4), bad=True)
    assert compiled(torch.randn(2, 4)).shape == (2, 4)


def test_exception_of_an_operation_at_run_time() -> None:
    class Indexing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 4)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.table(index).sum()

    compiled = roundpipe_fx.compile(Indexing(), recompute="full")
    compiled(torch.tensor([1, 2]))
    with pytest.raises(IndexError):
        compiled(torch.tensor([1, 9]))
    compiled(torch.tensor([1, 3])).backward()


def test_inputs_on_the_wrong_device() -> None:
    compiled = roundpipe_fx.compile(linear_chain())
    compiled(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match=r"two (different )?devices,? meta"):
        compiled(torch.randn(2, 4, device="meta"))
    assert compiled(torch.randn(2, 4)).device.type == "cpu"


def test_empty_batch() -> None:
    model = linear_chain()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    out = compiled(torch.randn(0, 4))
    assert out.shape == (0, 4)
    out.sum().backward()
    assert all(not p.grad.any() for p in model.parameters())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pair: dict, *, scale: float = 1.0, flag: str = "a", more: list | None = None) -> dict:
        x, y = pair["both"]
        out = self.layer(x) * scale + self.layer(y)
        if more is not None:
            out = out + more[0]
        return {"out": out, "nested": (out.sum(), [flag, None, 3]), "input": x}


def test_nested_and_keyword_inputs_and_outputs() -> None:
    model = Nested()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    for keywords in ({}, {"scale": 2.0, "flag": "b"}, {"more": [y]}):
        found, expected = compiled({"both": (x, y)}, **keywords), model({"both": (x, y)}, **keywords)
        assert torch.equal(found["out"], expected["out"]) and torch.equal(found["nested"][0], expected["nested"][0])
        assert found["nested"][1] == expected["nested"][1] and found["input"] is x


def test_input_changed_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(x * 1.5))
            x.mul_(2)
            return self.second(hidden * x).sum()

    for recompute in ("none", "full"):
        torch._dynamo.reset()
        model = InPlace()
        x, y = torch.ones(2, 4), torch.ones(2, 4)
        step = train_step(roundpipe_fx.compile(model, stages=2, recompute=recompute, fullgraph=True), model, {"x": x})
        reference = copy.deepcopy(model)
        compiled = torch.compile(reference, backend="aot_eager")
        assert_bitwise(step, train_step(compiled, reference, {"x": y}))
        assert torch.equal(x, y) and torch.equal(x, torch.full((2, 4), 2.0))


def test_saved_input_changed_before_backward_is_an_error() -> None:
    model = linear_chain()
    for recompute in ("none", "full"):
        torch._dynamo.reset()
        x = torch.randn(2, 4)
        out = roundpipe_fx.compile(model, stages=2, recompute=recompute)(x).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_saves_nothing(context) -> None:
    model = TiedTransformer().eval()
    compiled = roundpipe_fx.compile(model, stages=2, fullgraph=True)
    tokens = torch.randint(16, (2, 4))
    with context():
        assert torch.equal(compiled(tokens, tokens), model(tokens, tokens))
    assert not compiled.plan.training and compiled.plan.saved_bytes == 0 and len(compiled.plan.stages) == 2
    assert set(compiled.plan.sources()) == {"program.py", "stage_0.forward.py", "stage_1.forward.py"}


def test_unused_dropout_draws_too() -> None:
    """Generators advance as in aot_eager even where a random result is thrown away."""

    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            F.dropout(x, 0.5)
            return F.dropout(self.layer(x), 0.5).sum()

    model, x = Wasteful(), torch.randn(4, 8)
    reference = copy.deepcopy(model)
    expected = train_step(torch.compile(reference, backend="aot_eager"), reference, {"x": x})
    assert_bitwise(train_step(roundpipe_fx.compile(model, recompute="full"), model, {"x": x}), expected)


@pytest.mark.parametrize(
    "options", [{"memory_budget": 0.0}, {"stages": 2, "num_microbatches": 2}], ids=["budget", "pipeline"]
)
def test_meta_device(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model, x = linear_chain(), torch.randn(4, 4, requires_grad=True)
    roundpipe_fx.compile(model, **options)(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
