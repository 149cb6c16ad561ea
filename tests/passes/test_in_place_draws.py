from __future__ import annotations

import expecttest
import torch
from torch import nn

from roundpipe_fx.passes.in_place_draws import draw_in_memory_order
from tests.capturing import capture_joint
from tests.graph_text import after

aten = torch.ops.aten


def test_as_text_new_memory_in_another_order_is_turned() -> None:
    before = """\
def joint(
    x: float32[2, 3, 4].strides(12, 1, 3),
):
    # captured
    empty: float32[2, 3, 4].strides(12, 1, 3) = aten.empty_like.default(x)
    drawn: float32[2, 3, 4] = aten.bernoulli.p(empty, 0.5)
    product: float32[2, 3, 4].strides(12, 1, 3) = aten.mul.Tensor(x, drawn)
    return (product,), ()
"""
    made = after(draw_in_memory_order, before, name="in_place_draws")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[2, 3, 4].strides(12, 1, 3),
):
    # captured
    empty: float32[2, 3, 4].strides(12, 1, 3) = aten.empty_like.default(x)
    permute_default: float32[2, 4, 3] = aten.permute.default(empty, [0, 2, 1])
    bernoulli_p_1: float32[2, 4, 3] = aten.bernoulli.p(permute_default, 0.5)
    permute_default_1: float32[2, 3, 4].strides(12, 1, 3) = aten.permute.default(bernoulli_p_1, [0, 2, 1])
    clone_default: float32[2, 3, 4] = aten.clone.default(permute_default_1, memory_format=torch.contiguous_format)
    product: float32[2, 3, 4].strides(12, 1, 3) = aten.mul.Tensor(x, clone_default)
    return (product,), ()
""",
    )


def test_as_text_a_draw_for_given_values_stays() -> None:
    before = """\
def joint(
    x: float32[2, 3, 4].strides(12, 1, 3),
):
    # captured
    drawn: float32[2, 3, 4] = aten.bernoulli.p(x, 0.5)
    return (drawn,), ()
"""
    made = after(draw_in_memory_order, before, name="in_place_draws")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[2, 3, 4].strides(12, 1, 3),
):
    # captured
    drawn: float32[2, 3, 4] = aten.bernoulli.p(x, 0.5)
    return (drawn,), ()
""",
    )


def test_as_text_what_lies_in_order_stays() -> None:
    before = """\
def joint(
    x: float32[2, 1, 4],
):
    # captured
    empty: float32[2, 1, 4] = aten.empty_like.default(x)
    drawn: float32[2, 1, 4] = aten.bernoulli.p(empty, 0.5)
    return (drawn,), ()
"""
    made = after(draw_in_memory_order, before, name="in_place_draws")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[2, 1, 4],
):
    # captured
    empty: float32[2, 1, 4] = aten.empty_like.default(x)
    drawn: float32[2, 1, 4] = aten.bernoulli.p(empty, 0.5)
    return (drawn,), ()
""",
    )


def test_as_text_normal_numbers_for_a_part_with_gaps_are_drawn_turned() -> None:
    before = """\
def joint(
    x: float32[3, 20],
):
    # captured
    part: float32[3, 10].strides(20, 2) = aten.slice.Tensor(x, 1, 0, 20, 2)
    drawn: float32[3, 10] = aten.normal_functional.default(part, 0.0, 2.0)
    return (drawn,), ()
"""
    made = after(draw_in_memory_order, before, name="in_place_draws")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[3, 20],
):
    # captured
    part: float32[3, 10].strides(20, 2) = aten.slice.Tensor(x, 1, 0, 20, 2)
    permute_default: float32[10, 3].strides(2, 20) = aten.permute.default(part, [1, 0])
    normal_functional_default_1: float32[10, 3].strides(1, 10) = aten.normal_functional.default(permute_default, 0.0, 2.0)
    permute_default_1: float32[3, 10] = aten.permute.default(normal_functional_default_1, [1, 0])
    return (permute_default_1,), ()
""",
    )


def test_as_text_normal_numbers_for_a_column_are_drawn_in_pairs() -> None:
    before = """\
def joint(
    x: float32[17, 2],
):
    # captured
    column: float32[17].strides(2) = aten.select.int(x, 1, 0)
    drawn: float32[17] = aten.normal_functional.default(column)
    return (drawn,), ()
"""
    made = after(draw_in_memory_order, before, name="in_place_draws")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[17, 2],
):
    # captured
    column: float32[17].strides(2) = aten.select.int(x, 1, 0)
    unfold_default: float32[8, 2].strides(4, 2) = aten.unfold.default(column, 0, 2, 2)
    permute_default: float32[2, 8].strides(2, 4) = aten.permute.default(unfold_default, [1, 0])
    normal_functional_default_1: float32[2, 8].strides(1, 2) = aten.normal_functional.default(permute_default)
    permute_default_1: float32[8, 2] = aten.permute.default(normal_functional_default_1, [1, 0])
    reshape_default: float32[16] = aten.reshape.default(permute_default_1, [-1])
    slice_tensor: float32[1].strides(2) = aten.slice.Tensor(column, 0, 16, 17)
    normal_functional_default_2: float32[1].strides(2) = aten.normal_functional.default(slice_tensor)
    cat_default: float32[17] = aten.cat.default([reshape_default, normal_functional_default_2])
    reshape_default_1: float32[17] = aten.reshape.default(cat_default, [17])
    return (reshape_default_1,), ()
""",
    )


def test_few_normal_numbers_and_those_without_gaps_stay() -> None:
    before = """\
def joint(
    x: float32[17, 2],
    y: float32[4, 2],
):
    # captured
    drawn: float32[17, 2] = aten.normal_functional.default(x)
    column: float32[4].strides(2) = aten.select.int(y, 1, 0)
    few: float32[4] = aten.normal_functional.default(column)
    return (drawn, few), ()
"""
    made = after(draw_in_memory_order, before, name="in_place_draws")
    assert "permute" not in made
    assert made.count("normal_functional") == 2


class Overwritten(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = (x * 2).detach()
        return x * (values.bernoulli_(0.5) if self.in_place else torch.bernoulli(values, 0.5))


def test_the_users_own_call_tells_whether_values_are_overwritten() -> None:
    x = torch.randn(4, 3, 5, 6, requires_grad=True).to(memory_format=torch.channels_last)
    for in_place in (True, False):
        joint = draw_in_memory_order(capture_joint(Overwritten(in_place), x))
        (drawn,) = joint.graph.find_nodes(op="call_function", target=aten.bernoulli.p)
        assert (drawn.args[0].target is aten.permute.default) == in_place
