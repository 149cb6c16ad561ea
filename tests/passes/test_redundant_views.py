from __future__ import annotations

import expecttest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import roundpipe_fx
from roundpipe_fx.ir.joint_graph import is_view, viewed
from roundpipe_fx.passes.redundant_views import remove_redundant_views
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.graph_text import after

aten = torch.ops.aten


class Views(nn.Module):
    """Views of views, chosen by letters."""

    def __init__(self, steps: str, returned: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.steps = steps
        self.returned = returned

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [torch.tanh(x @ self.weight)]
        for step in self.steps:
            value = made[-1]
            made.append(
                {
                    "t": lambda v: v.t(),
                    "d": lambda v: v.detach(),
                    "p": lambda v: v.permute(1, 0),
                    "v": lambda v: v.reshape(4, 4),
                    "f": lambda v: v.unsqueeze(0).squeeze(0),
                    "n": lambda v: v.narrow(0, 0, 4),
                    "r": lambda v: v.relu(),
                }[step](value)
            )
        return made[self.returned % len(made)], (made[-1] * self.weight).sum()


def targets(joint) -> list:
    return [node.target for node in joint.computed()]


@settings(deadline=None, max_examples=25)
@given(st.text("tdpvfnr", max_size=6), st.integers(0, 6))
def test_results_have_the_same_bits_and_strides(steps: str, returned: int) -> None:
    joint = capture_joint(Views(steps, returned), torch.randn(4, 4))
    inputs = example_inputs(joint)
    expected = run_joint(joint, inputs)
    remove_redundant_views(joint)
    joint.graph.lint()
    for left, right in zip(run_joint(joint, inputs), expected, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            assert torch.equal(left, right) and left.stride() == right.stride()


def test_a_linear_layer_transposes_its_weight_gradient_no_more() -> None:
    joint = capture_joint(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(5, 4))
    assert aten.detach.default in targets(joint)
    remove_redundant_views(joint)
    assert aten.detach.default not in targets(joint)
    for gradient in joint.gradients:
        if gradient is not None:
            source = gradient.all_input_nodes[0]
            assert not (gradient.target == source.target == aten.t.default)


def test_what_the_forward_returns_is_left_alone() -> None:
    joint = capture_joint(Views("td", 0), torch.randn(4, 4))
    before = joint.forward_outputs
    remove_redundant_views(joint)
    assert joint.forward_outputs == before
    (backward,) = [node for node in joint.computed() if node.target is aten.tanh_backward.default]
    read = backward.args[1]
    assert read is not before[0] and is_view(read) and viewed(read) is before[0], "not the tensor that the user gets"


def test_nothing_is_left_that_nobody_reads() -> None:
    class Windows(nn.Module):
        """Cut into windows and put together again, as shifted windows are where there is only one."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                cut = torch.tanh(layer(x)).view(2, 1, 2, 1, 2, 4).transpose(2, 3)
                x = x + cut.reshape(2, 2, 2, 4).view(2, 1, 1, 2, 2, 4).transpose(2, 3).reshape(8, 4)
            return x.square().sum()

    model, x = Windows(), torch.randn(8, 4)
    joint = capture_joint(model, x)
    unread = {node for node in joint.computed() if not node.users}
    remove_redundant_views(joint)
    assert {node for node in joint.computed() if not node.users} <= unread
    model(x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    roundpipe_fx.compile(model, memory_budget=0.0)(x).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)


def test_what_writes_is_no_view() -> None:
    joint = capture_joint(Views("r", 0), torch.randn(4, 4))
    (relu,) = [node for node in joint.computed() if node.target is aten.relu.default]
    with joint.graph.inserting_after(relu):
        written = joint.graph.call_function(aten.zero_.default, (relu,))
    written.meta["val"] = relu.meta["val"]
    remove_redundant_views(joint)
    assert written in list(joint.computed())


def test_a_returned_view_stays_a_tensor_of_its_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x @ self.weight
            return y, y.t().t()

    model = Model()
    x = torch.randn(4, 4)
    first, second = roundpipe_fx.compile(model, fullgraph=True)(x)
    assert first is not second
    (first.sum() + (2 * second).sum()).backward()
    found, model.weight.grad = model.weight.grad, None
    first, second = model(x)
    (first.sum() + (2 * second).sum()).backward()
    assert torch.equal(found, model.weight.grad)


def test_as_text_a_view_of_the_same_is_dropped() -> None:
    before = """\
def joint(
    x: float32[4, 8],
):
    # captured
    t: float32[8, 4] = aten.t.default(x)
    exp: float32[8, 4] = aten.exp.default(t)
    t_1: float32[8, 4] = aten.t.default(x)
    mul: float32[8, 4] = aten.mul.Tensor(exp, t_1)
    detach: float32[8, 4] = aten.detach.default(mul)
    neg: float32[8, 4] = aten.neg.default(detach)
    return (neg,), ()
"""
    made = after(remove_redundant_views, before, name="redundant_views")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
):
    # captured
    t: float32[8, 4].strides(1, 8) = aten.t.default(x)
    exp: float32[8, 4].strides(1, 8) = aten.exp.default(t)
    t_1: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mul: float32[8, 4].strides(1, 8) = aten.mul.Tensor(exp, t_1)
    neg: float32[8, 4].strides(1, 8) = aten.neg.default(mul)
    return (neg,), ()
""",
    )


def test_as_text_another_view_stays() -> None:
    before = """\
def joint(
    x: float32[4, 8],
):
    # captured
    view: float32[32] = aten.view.default(x, [32])
    view_1: float32[8, 4] = aten.view.default(x, [8, 4])
    return (view, view_1), ()
"""
    made = after(remove_redundant_views, before, name="redundant_views")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
):
    # captured
    view: float32[32] = aten.view.default(x, [32])
    view_1: float32[8, 4] = aten.view.default(x, [8, 4])
    return (view, view_1), ()
""",
    )
