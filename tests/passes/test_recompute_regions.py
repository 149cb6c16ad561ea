"""What the user's regions must and must not save."""

from __future__ import annotations

import expecttest

from roundpipe_fx.passes.recompute_regions import mark_recompute_regions
from tests.graph_text import after


def test_as_text_outside_of_regions_nothing_is_marked() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward
    rand: float32[4, 8] = aten.rand_like.default(x)
    mul: float32[4, 8] = aten.mul.Tensor(x, rand)
    # backward
    mul_1: float32[4, 8] = aten.mul.Tensor(tangents_1, rand)
    return (mul,), (mul_1,)
"""
    made = after(mark_recompute_regions, before, name="recompute_regions")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward
    rand: float32[4, 8] = aten.rand_like.default(x)
    mul: float32[4, 8] = aten.mul.Tensor(x, rand)
    # backward
    mul_1: float32[4, 8] = aten.mul.Tensor(tangents_1, rand)
    return (mul,), (mul_1,)
""",
    )


def test_as_text_what_is_drawn_is_saved_where_nothing_is_replayed() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward
    rand: float32[4, 8] = aten.rand_like.default(x)
    mul: float32[4, 8] = aten.mul.Tensor(x, rand)
    # backward
    mul_1: float32[4, 8] = aten.mul.Tensor(tangents_1, rand)
    return (mul,), (mul_1,)
"""
    made = after(mark_recompute_regions, before, False, name="recompute_regions")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward
    rand: float32[4, 8] = aten.rand_like.default(x)  # must run once: drawn where preserve_rng_state=False
    mul: float32[4, 8] = aten.mul.Tensor(x, rand)
    # backward
    mul_1: float32[4, 8] = aten.mul.Tensor(tangents_1, rand)
    return (mul,), (mul_1,)
""",
    )


def test_as_text_what_is_saved_for_recompute_runs_once() -> None:
    before = """\
def joint(
    x: float32[4],
    tangents_1: float32[4],
):
    # forward
    exp: float32[4] = aten.exp.default(x)
    save: NoneType = torch.ops.roundpipe_fx.save_for_recompute.default([exp], 0)
    sin: float32[4] = aten.sin.default(exp)
    # backward
    mul: float32[4] = aten.mul.Tensor(tangents_1, exp)
    return (sin,), (mul,)
"""
    made = after(mark_recompute_regions, before, name="recompute_regions")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4],
    tangents_1: float32[4],
):
    # forward
    exp: float32[4] = aten.exp.default(x)  # must run once: given to save_for_recompute
    sin: float32[4] = aten.sin.default(exp)
    # backward
    mul: float32[4] = aten.mul.Tensor(tangents_1, exp)
    return (sin,), (mul,)
""",
    )
