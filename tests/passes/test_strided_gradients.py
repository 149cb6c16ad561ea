from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

import roundpipe_fx
from roundpipe_fx.ir.joint_graph import Mark
from roundpipe_fx.passes.strided_gradients import mark_strided_gradients
from tests.capturing import capture_joint
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step
from tests.graph_text import after


class _LogitsBeside(nn.Module):
    """Returns its loss, and logits whose gradient meets one that lies otherwise."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.turned = turned

    def forward(self, tokens: torch.Tensor) -> Any:
        logits = self.head(self.embed(tokens))
        flat = (logits.transpose(0, 1) if self.turned else logits).reshape(-1, 12)
        labels = tokens.t().reshape(-1) if self.turned else tokens.reshape(-1)
        return CausalLMOutput(loss=nn.functional.cross_entropy(flat, labels), logits=logits)


@pytest.mark.parametrize("options", [{"recompute": "none"}, {"memory_budget": 0.0}], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_logits_that_nobody_differentiates(turned: bool, options: dict[str, Any]) -> None:
    model, batch = _LogitsBeside(turned), {"tokens": torch.randint(12, (3, 5))}
    step, compiled = compiled_step(model, batch, stages=1, **options)
    assert_bitwise(step, aot_eager_step(model, batch))
    programs = {program.name: program for program in compiled.plan.programs}
    marked = [node for node in programs["backward"].module.graph.nodes if Mark.STRIDED in node.meta]
    assert len(marked) == turned


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_logits_that_nobody_differentiates_in_a_pipeline(schedule: str) -> None:
    model, batch = _LogitsBeside(turned=True), {"tokens": torch.randint(12, (3, 5))}
    step, _ = compiled_step(model, batch, stages=2, devices=["cpu"], num_microbatches=1, schedule=schedule)
    assert_bitwise(step, aot_eager_step(model, batch))


@torch.library.custom_op("roundpipe_fx_tests::halved_in_memory_order", mutates_args=())
def _halved(x: torch.Tensor) -> torch.Tensor:
    """Half of a tensor, read as it would lie in memory if it were contiguous."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()) * 0.5


@_halved.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_halved.register_autograd(lambda ctx, gradient: _halved(gradient.contiguous()))


class _WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v, self.g = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.rand(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._weight_norm(self.v + x.mean(), self.g, 0)


class _Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return _halved(x)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", [lambda: nn.GroupNorm(2, 4), _WeightNorm, _Halved], ids=["group", "weight", "own"])
def test_kernels_that_read_in_memory_order_get_zeros_in_full(kind: Callable[[], nn.Module], flat: bool) -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), kind()

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.first(x)
            beside = self.second(hidden)
            return CausalLMOutput(loss=hidden.square().mean(), logits=beside.view(-1) if flat else beside)

    model, batch = Beside(), {"x": torch.randn(6, 4)}
    step, compiled = compiled_step(model, batch, stages=1, recompute="none")
    assert_bitwise(step, aot_eager_step(model, batch))
    programs = {program.name: program for program in compiled.plan.programs}
    assert sum(Mark.STRIDED in node.meta for node in programs["backward"].module.graph.nodes) == 1


class _Turned(nn.Module):
    """Returns a turned value beside its mean square, and adds up the gradient of both over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(300))

    def forward(self, x: torch.Tensor) -> Any:
        turned = (x + self.bias).t().tanh()
        return CausalLMOutput(loss=turned.square().mean(), logits=turned)


def test_sums_of_what_zeros_were_added_to_round_alike() -> None:
    model, batch = _Turned(), {"x": torch.randn(300, 300)}
    step, _ = compiled_step(model, batch, stages=1, recompute="none")
    assert_bitwise(step, aot_eager_step(model, batch))


def test_peak_of_zeros_made_in_full_is_planned() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(400, 8), nn.Linear(8, 400)

        def forward(self, tokens: torch.Tensor) -> Any:
            logits = self.head(self.embed(tokens))
            flat = logits.transpose(0, 1).reshape(-1, 400)
            return CausalLMOutput(loss=nn.functional.cross_entropy(flat, tokens.t().reshape(-1)), logits=logits)

    compiled = roundpipe_fx.compile(Wide(), stages=1, memory_budget=1.0, fullgraph=True)
    tokens = torch.randint(400, (8, 32))
    for _ in range(2):
        compiled.zero_grad()
        with roundpipe_fx.measure_peak() as peak:
            output = compiled(tokens)
            output.loss.backward()
    assert peak.bytes <= compiled.plan.peak_bytes <= 1.03 * peak.bytes


def test_gradients_of_one_dimension_are_left_alone() -> None:
    joint = capture_joint(_LogitsBeside(turned=False), torch.randint(12, (3, 5)))
    assert not any(Mark.STRIDED in node.meta for node in mark_strided_gradients(joint).tangents)


def test_as_text_a_view_of_a_product_depends_on_the_strides() -> None:
    """The product of an expanded zero and ``t`` has the strides of ``t``, on which the view fails."""
    before = """\
def joint(
    x: float32[8, 4],
    tangents_1: float32[4, 8],
):
    # captured
    t: float32[4, 8].strides(1, 4) = aten.t.default(x)
    mul: float32[4, 8].strides(8, 1) = aten.mul.Tensor(tangents_1, t)
    view: float32[32] = aten.view.default(mul, [32])
    return (), (view,)
"""
    made = after(mark_strided_gradients, before, name="strided_gradients")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[8, 4],
    tangents_1: float32[4, 8],  # strides matter
):
    # captured
    t: float32[4, 8].strides(1, 4) = aten.t.default(x)
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, t)
    view: float32[32] = aten.view.default(mul, [32])
    return (), (view,)
""",
    )


def test_as_text_a_sum_does_not_depend_on_the_strides() -> None:
    before = """\
def joint(
    tangents_1: float32[4, 8],
):
    # captured
    sum_1: float32[8] = aten.sum.dim_IntList(tangents_1, [0])
    view: float32[2, 4] = aten.view.default(sum_1, [2, 4])
    return (), (view,)
"""
    made = after(mark_strided_gradients, before, name="strided_gradients")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    tangents_1: float32[4, 8],
):
    # captured
    sum_1: float32[8] = aten.sum.dim_IntList(tangents_1, [0])
    view: float32[2, 4] = aten.view.default(sum_1, [2, 4])
    return (), (view,)
""",
    )
