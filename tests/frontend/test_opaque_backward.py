from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn

import roundpipe_fx
from roundpipe_fx.frontend import opaque_backward
from roundpipe_fx.frontend.call_template import empty_template, fill_template, is_same_template
from roundpipe_fx.torch_private import registered_backwards
from tests.comparison import assert_bitwise, train_step


@torch.library.custom_op("roundpipe_fx_tests::scale_rows", mutates_args=())
def scale_rows(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.cat(
        [row * weight * factor for row, n in zip(x.split(1), counts.tolist(), strict=True) if n] or [x * 0]
    )


@scale_rows.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.counts, ctx.factor = inputs[2], inputs[3]


def _backward(ctx, gradient):
    x, weight = ctx.saved_tensors
    assert ctx.needs_input_grad[2] is False
    for n in ctx.counts.tolist():
        if n == 0:
            raise ValueError("no rows")
    return gradient * weight * ctx.factor, (gradient * x).sum(0) * ctx.factor, None, None


scale_rows.register_autograd(_backward, setup_context=_setup)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return scale_rows(torch.tanh(self.first(x)), self.weight, counts, 1.5).square().sum()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_untraceable_backward_becomes_one_operator(recompute: str) -> None:
    model, batch = Model(), {"x": torch.randn(3, 4), "counts": torch.tensor([1, 2, 3])}
    expected = train_step(model, model, batch)
    compiled = roundpipe_fx.compile(model, stages=2, recompute=recompute, fullgraph=True)
    assert_bitwise(train_step(compiled, model, batch), expected)
    assert "torch.ops.roundpipe_fx.opaque_backward" in "".join(compiled.plan.sources().values())
    (definition,) = registered_backwards([torch.ops.roundpipe_fx_tests.scale_rows.default])
    assert definition._backward_fn is _backward  # restored


def test_error_of_the_backward_reaches_the_user() -> None:
    model = Model()
    loss = roundpipe_fx.compile(model)(torch.randn(3, 4), torch.tensor([1, 2, 3]))
    loss.backward()
    with pytest.raises(ValueError, match="no rows"):
        roundpipe_fx.compile(model)(torch.randn(1, 4), torch.tensor([0])).backward()


def test_a_traceable_backward_is_traced() -> None:
    @torch.library.custom_op("roundpipe_fx_tests::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)
    double.register_autograd(lambda ctx, gradient: gradient * 2)

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return double(self.layer(x)).sum()

    model, batch = Doubling(), {"x": torch.randn(3, 4)}
    expected = train_step(model, model, batch)
    compiled = roundpipe_fx.compile(model, fullgraph=True)
    assert_bitwise(train_step(compiled, model, batch), expected)
    assert "opaque_backward" not in "".join(compiled.plan.sources().values())


class Turned(Model):
    """Gives the operator a transposed input, whose gradient the backward lays out otherwise."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        rows = torch.tanh(self.first(x.t())).t()
        return scale_rows(rows, self.weight, counts, 1.5).square().sum()


def test_gradients_lie_as_they_were_traced() -> None:
    model, batch = Turned(), {"x": torch.randn(4, 4), "counts": torch.tensor([1, 2, 3, 1])}
    expected = train_step(model, model, batch)
    seen = []

    def compiler(module: fx.GraphModule, examples: list[torch.Tensor]) -> object:
        class Watch(fx.Interpreter):
            def run_node(self, node: fx.Node) -> object:
                result = super().run_node(node)
                if "opaque" in str(node.target):
                    seen.extend(zip(result, node.meta["val"], strict=True))
                return result

        return Watch(module).run

    compiled = roundpipe_fx.compile(model, stage_compiler=compiler, fullgraph=True)
    found = train_step(compiled, model, batch)
    for name, gradient in found.gradients.items():  # products of turned matrices round otherwise when traced
        torch.testing.assert_close(gradient, expected.gradients[name])
    assert len(seen) == 2
    assert all(real.stride() == noted.stride() for real, noted in seen)
    assert seen[0][1].stride() == (1, 4)


def _operator(name: str, setup: Callable[..., Any], backward: Callable[..., Any], outputs: int = 1) -> Any:
    """An operator that doubles ``x``, as often as asked, and whose backward asks for data."""
    returned = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"

    def forward(x: torch.Tensor, asked: torch.Tensor) -> Any:
        return x * 2 if outputs == 1 else tuple(x * 2 for _ in range(outputs))

    def asking(ctx: Any, *gradients: Any) -> Any:
        if not all(ctx.saved_tensors[0].tolist()):
            raise ValueError("nothing was asked")
        return backward(ctx, *gradients)

    made = torch.library.custom_op(
        f"roundpipe_fx_tests::{name}", forward, mutates_args=(), schema=f"(Tensor x, Tensor asked) -> {returned}"
    )
    made.register_fake(lambda x, asked: torch.empty_like(x) if outputs == 1 else tuple(map(torch.empty_like, [x] * 2)))

    def set_up(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], None)
        setup(ctx, *inputs)

    made.register_autograd(asking, setup_context=set_up)
    return made


class Calling(nn.Module):
    def __init__(self, *operators: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in operators)
        self.operators = operators

    def forward(self, x: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        for layer, operator in zip(self.layers, self.operators, strict=True):
            results = operator(torch.tanh(layer(x)), asked)
            x = results if isinstance(results, torch.Tensor) else results[0]
        return x.square().sum()


def _assert_as_eager(model: nn.Module, rows: tuple[int, ...] = (3,), **options: Any) -> roundpipe_fx.CompiledModule:
    compiled = roundpipe_fx.compile(model, fullgraph=True, **options)
    for count in rows:
        batch = {"x": torch.randn(count, 4), "asked": torch.tensor([1, 2])}
        assert_bitwise(train_step(compiled, model, batch), train_step(model, model, batch))
    return compiled


def _opaque_lines(compiled: roundpipe_fx.CompiledModule) -> list[str]:
    return [
        line for text in compiled.plan.sources().values() for line in text.splitlines() if "opaque_backward." in line
    ]


def test_sizes_that_vary_are_those_of_the_step() -> None:
    def setup(ctx: Any, x: torch.Tensor, asked: torch.Tensor) -> None:
        ctx._rows, ctx.shape, ctx.nested = x.shape[0], x.shape, {"half": [x.shape[0] / 2]}

    operator = _operator(
        "varying", setup, lambda ctx, g: (g * ctx._rows * ctx.shape.numel() * ctx.nested["half"][0], None)
    )
    compiled = _assert_as_eager(Calling(operator), rows=(3, 5, 7), dynamic=True)
    assert len(compiled.plans) == 1 and len(_opaque_lines(compiled)) == 1


def test_tensors_inside_of_what_is_set_are_those_of_the_step() -> None:
    def setup(ctx: Any, x: torch.Tensor, asked: torch.Tensor) -> None:
        ctx.pair = (x, [asked])

    operator = _operator("nested", setup, lambda ctx, g: (g * ctx.pair[0] * ctx.pair[1][0][1], None))
    assert len(_opaque_lines(_assert_as_eager(Calling(operator)))) == 1


def test_constants_of_one_repr_are_told_apart() -> None:
    tables = [np.zeros(5000), np.zeros(5000)]
    tables[1][2500] = 3.0
    assert repr(tables[0]) == repr(tables[1])
    given = itertools.cycle(tables)  # layer by layer, however often the model is traced

    def setup(ctx: Any, x: torch.Tensor, asked: torch.Tensor) -> None:
        ctx.table = next(given)

    operator = _operator("tabled", setup, lambda ctx, g: (g * (1 + ctx.table[2500]), None))
    lines = _opaque_lines(_assert_as_eager(Calling(operator, operator)))
    assert len({line.split("'")[1] for line in lines}) == 2


def test_layers_that_are_alike_share_a_stage_and_functions_do_not() -> None:
    def setup(ctx: Any, x: torch.Tensor, asked: torch.Tensor) -> None:
        ctx.factor, ctx.table = 0.5, np.arange(3)

    once = _operator("once", setup, lambda ctx, g: (g * ctx.factor, None))
    compiled = _assert_as_eager(Calling(once, once))
    assert len(_opaque_lines(compiled)) == 2
    assert len({line.split("'")[1] for line in _opaque_lines(compiled)}) == 1
    again = _operator("once", setup, lambda ctx, g: (g * ctx.factor * 3, None))
    torch._dynamo.reset()
    _assert_as_eager(Calling(again))


def test_results_that_nobody_used_and_one_gradient_for_two() -> None:
    operator = _operator("two", lambda ctx, x, asked: None, lambda ctx, g, h: (g + (0 if h is None else h), None), 2)
    assert len(_opaque_lines(_assert_as_eager(Calling(operator)))) == 1

    @torch.library.custom_op("roundpipe_fx_tests::joined", mutates_args=())
    def joined(parts: list[torch.Tensor], asked: torch.Tensor) -> torch.Tensor:
        return parts[0] + parts[1]

    joined.register_fake(lambda parts, asked: torch.empty_like(parts[0]))

    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if not all(ctx.asked.tolist()):
            raise ValueError("nothing was asked")
        one = gradient * 2
        return [one, one], None  # the same memory for both

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.asked = inputs[1]

    joined.register_autograd(backward, setup_context=setup)

    def run(x: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        return joined([torch.sin(x), torch.cos(x * 3)], asked)

    assert len(_opaque_lines(_assert_as_eager(Calling(run)))) == 1


@pytest.mark.long
def test_what_is_kept_for_calls_goes_with_them() -> None:
    operator = _operator("passing", lambda ctx, x, asked: None, lambda ctx, g: (g * 2, None))
    before = set(opaque_backward._calls)
    model = Calling(operator)
    loss = roundpipe_fx.compile(model, fullgraph=True)(torch.randn(3, 4), torch.tensor([1]))
    torch._dynamo.reset()
    gc.collect()
    loss.backward()  # what is compiled lives as long as somebody may run it
    assert set(opaque_backward._calls) - before
    del loss
    gc.collect()
    assert not set(opaque_backward._calls) - before


def test_templates() -> None:
    tensors: list[torch.Tensor] = []
    tree = {"a": [torch.ones(1), 3], "b": torch.Size([2, 3]), "c": (None, float("nan"), np.arange(2))}
    template = empty_template(tree, tensors, [])
    back = fill_template(template, [torch.zeros(1)], [])
    assert len(tensors) == 1 and back["a"][0].item() == 0 and back["b"] == torch.Size([2, 3])
    assert isinstance(back["b"], torch.Size)
    assert is_same_template(template, empty_template({**tree, "c": (None, float("nan"), np.arange(2))}, [], []))
    for other in ((None, 0.0, np.arange(2)), (None, float("nan"), np.arange(2.0)), [None, float("nan"), np.arange(2)]):
        assert not is_same_template(template, empty_template({**tree, "c": other}, [], []))
    assert (
        not is_same_template(0.0, -0.0) and not is_same_template(1, True) and not is_same_template(object(), object())
    )
