from __future__ import annotations

import expecttest

from roundpipe_fx.passes.missing_gradients import expand_missing_gradients
from tests.graph_text import after


def test_as_text_the_gradient_beside_a_loss_has_no_strides() -> None:
    """The loss's own gradient, and one whose strides matter, are left as they are."""
    before = """\
def joint(
    x: float32[8, 4],
    tangents_1: float32[],
    tangents_2: float32[8, 4],
    tangents_3: float32[8, 4],  # strides matter
):
    # captured
    mul: float32[8, 4] = aten.mul.Tensor(tangents_1, x)
    add: float32[8, 4] = aten.add.Tensor(mul, tangents_2)
    add_1: float32[8, 4] = aten.add.Tensor(add, tangents_3)
    return (), (add_1,)
"""
    made = after(expand_missing_gradients, before, name="missing_gradients")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[8, 4],
    tangents_1: float32[],
    tangents_2: float32[8, 4].strides(0, 0),
    tangents_3: float32[8, 4],  # strides matter
):
    # captured
    mul: float32[8, 4] = aten.mul.Tensor(tangents_1, x)
    add: float32[8, 4] = aten.add.Tensor(mul, tangents_2)
    add_1: float32[8, 4] = aten.add.Tensor(add, tangents_3)
    return (), (add_1,)
""",
    )


def test_as_text_without_a_loss_all_gradients_are_expected() -> None:
    before = """\
def joint(
    tangents_1: float32[8, 4],
    tangents_2: float32[8, 4],
):
    # captured
    add: float32[8, 4] = aten.add.Tensor(tangents_1, tangents_2)
    return (), (add,)
"""
    made = after(expand_missing_gradients, before, name="missing_gradients")
    assert made == before
