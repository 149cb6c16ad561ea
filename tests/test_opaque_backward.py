from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import roundpipe_fx
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
