from __future__ import annotations

import functools

import expecttest
import pytest
import torch
from torch import nn

from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.passes.redundant_views import remove_redundant_views
from roundpipe_fx.passes.tied_gradients import split_tied_gradients
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.graph_text import after


class Tied(nn.Module):
    """One matrix, used several times with another layer between."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses = uses
        self.tied = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(uses))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(torch.tanh(self.tied(x))))
        return x.square().sum()


def _joint(model: nn.Module) -> JointGraph:
    return remove_redundant_views(capture_joint(model, torch.randn(3, 4)))


@pytest.mark.parametrize("uses", [2, 3, 5])
def test_each_use_returns_what_it_adds(uses: int) -> None:
    joint = _joint(Tied(uses))
    inputs = example_inputs(joint)
    before = run_joint(joint, inputs)
    joint = split_tied_gradients(joint)
    after = run_joint(joint, inputs)
    first = joint.num_forward_outputs
    assert after[:first] == before[:first]
    assert joint.parts == (_tied(joint),) * (uses - 1)
    of_owner: dict[int, list[torch.Tensor]] = {}
    for owner, value in zip(joint.gradient_owners, after[first:], strict=True):
        assert (owner is None) == (value is None)
        if owner is not None:
            of_owner.setdefault(owner, []).append(value)
    assert sorted(of_owner) == [owner for owner, value in enumerate(before[first:]) if value is not None]
    for owner, parts in of_owner.items():
        found, wanted = functools.reduce(torch.add, parts), before[first + owner]
        if len(parts) > 2:
            assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
        else:
            assert torch.equal(found, wanted)


def _tied(joint: JointGraph) -> int:
    return next(number for number, node in enumerate(joint.primals) if "tied" in joint.label(node))


def test_what_is_cast_or_read_again_is_left_as_it_is() -> None:
    class Cast(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.tied.weight.to(torch.float64)
            for layer in self.layers:
                x = torch.tanh(layer(torch.tanh((x.double() @ weight).float())))
            return x.square().sum()

    assert split_tied_gradients(_joint(Cast(2))).parts == ()


def test_gradients_of_inputs_are_left_as_they_are() -> None:
    class Twice(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.tied(x).sum()

    joint = split_tied_gradients(capture_joint(Twice(1), torch.randn(3, 4, requires_grad=True)))
    assert [joint.label(joint.primals[owner]) for owner in joint.parts] == ["tied.weight"]


def test_as_text_parts_are_returned() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # captured
    mm: float32[4, 8] = aten.mm.default(x, w)
    mm_1: float32[4, 8] = aten.mm.default(mm, w)
    t: float32[8, 4] = aten.t.default(mm)
    mm_2: float32[8, 8] = aten.mm.default(t, tangents_1)
    t_1: float32[8, 4] = aten.t.default(x)
    mm_3: float32[8, 8] = aten.mm.default(t_1, tangents_1)
    add: float32[8, 8] = aten.add.Tensor(mm_2, mm_3)
    return (mm_1,), (None, add)
"""
    made = after(split_tied_gradients, before, name="tied_gradients")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],  # parameter
    tangents_1: float32[4, 8],
):
    # captured
    mm: float32[4, 8] = aten.mm.default(x, w)
    mm_1: float32[4, 8] = aten.mm.default(mm, w)
    t: float32[8, 4].strides(1, 8) = aten.t.default(mm)
    mm_2: float32[8, 8] = aten.mm.default(t, tangents_1)
    t_1: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_3: float32[8, 8] = aten.mm.default(t_1, tangents_1)
    return (mm_1,), (None, mm_2, mm_3)
""",
    )


def test_as_text_of_an_input_the_sum_is() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],
    tangents_1: float32[4, 8],
):
    # captured
    mm: float32[4, 8] = aten.mm.default(x, w)
    mm_1: float32[4, 8] = aten.mm.default(mm, w)
    t: float32[8, 4] = aten.t.default(mm)
    mm_2: float32[8, 8] = aten.mm.default(t, tangents_1)
    t_1: float32[8, 4] = aten.t.default(x)
    mm_3: float32[8, 8] = aten.mm.default(t_1, tangents_1)
    add: float32[8, 8] = aten.add.Tensor(mm_2, mm_3)
    return (mm_1,), (None, add)
"""
    made = after(split_tied_gradients, before, name="tied_gradients")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    w: float32[8, 8],
    tangents_1: float32[4, 8],
):
    # captured
    mm: float32[4, 8] = aten.mm.default(x, w)
    mm_1: float32[4, 8] = aten.mm.default(mm, w)
    t: float32[8, 4].strides(1, 8) = aten.t.default(mm)
    mm_2: float32[8, 8] = aten.mm.default(t, tangents_1)
    t_1: float32[8, 4].strides(1, 8) = aten.t.default(x)
    mm_3: float32[8, 8] = aten.mm.default(t_1, tangents_1)
    add: float32[8, 8] = aten.add.Tensor(mm_2, mm_3)
    return (mm_1,), (None, add)
""",
    )
