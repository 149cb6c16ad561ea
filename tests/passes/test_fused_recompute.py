from __future__ import annotations

import expecttest

from roundpipe_fx.passes.fused_recompute import recompute_in_readers
from tests.graph_text import after


def test_as_text_what_starts_from_a_saved_value_is_repeated_beside_its_readers() -> None:
    """Both readers of a backward module share one copy; ``exp`` has its result saved anyway, and ``mm`` is not fused."""
    before = """\
def joint(
    x: float32[8, 4],
    w: float32[4, 4],
    tangents_1: float32[8, 4],
):
    # forward, stage 0, segment 0
    mm: float32[8, 4] = aten.mm.default(x, w)
    tanh: float32[8, 4] = aten.tanh.default(mm)
    mm_1: float32[8, 4] = aten.mm.default(tanh, w)
    # backward, stage 0, segment 0
    mul: float32[8, 4] = aten.mul.Tensor(tangents_1, mm)
    mul_1: float32[8, 4] = aten.mul.Tensor(mul, tanh)
    sub: float32[8, 4] = aten.sub.Tensor(mul_1, tanh)
    return (mm_1,), (sub,)
"""
    made = after(lambda joint: recompute_in_readers(joint, False, True), before, name="fused_recompute")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[8, 4],
    w: float32[4, 4],
    tangents_1: float32[8, 4],
):
    # forward, stage 0, segment 0
    mm: float32[8, 4] = aten.mm.default(x, w)
    tanh: float32[8, 4] = aten.tanh.default(mm)
    mm_1: float32[8, 4] = aten.mm.default(tanh, w)
    # backward, stage 0, segment 0
    mul: float32[8, 4] = aten.mul.Tensor(tangents_1, mm)
    tanh_1: float32[8, 4] = aten.tanh.default(mm)  # repeats: tanh
    mul_1: float32[8, 4] = aten.mul.Tensor(mul, tanh_1)
    sub: float32[8, 4] = aten.sub.Tensor(mul_1, tanh_1)
    return (mm_1,), (sub,)
""",
    )


def test_as_text_recomputation_joins_the_backward_where_nothing_waits() -> None:
    """Of a cast the narrow operand is saved, through a view; a reduction's result is."""
    before = """\
def joint(
    x: bfloat16[8, 4],
    tangents_1: float32[8, 1],
):
    # forward, stage 0, segment 0
    sin: bfloat16[8, 4] = aten.sin.default(x)
    view: bfloat16[4, 8] = aten.view.default(sin, [4, 8])
    _to_copy: float32[4, 8] = aten._to_copy.default(view, dtype=torch.float32)
    view_1: float32[8, 4] = aten.view.default(_to_copy, [8, 4])
    sum_1: float32[8, 1] = aten.sum.dim_IntList(view_1, [1], True)
    # recompute, stage 0, segment 0
    cos: bfloat16[8, 4] = aten.cos.default(x)  # recomputes sin
    # backward, stage 0, segment 0
    mul: float32[8, 1] = aten.mul.Tensor(tangents_1, sum_1)
    mul_1: float32[8, 4] = aten.mul.Tensor(mul, view_1)
    mul_2: float32[8, 4] = aten.mul.Tensor(mul_1, cos)
    return (sum_1,), (mul_2,)
"""
    made = after(lambda joint: recompute_in_readers(joint, True, True), before, name="fused_recompute")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: bfloat16[8, 4],
    tangents_1: float32[8, 1],
):
    # forward, stage 0, segment 0
    sin: bfloat16[8, 4] = aten.sin.default(x)
    view: bfloat16[4, 8] = aten.view.default(sin, [4, 8])
    _to_copy: float32[4, 8] = aten._to_copy.default(view, dtype=torch.float32)
    view_1: float32[8, 4] = aten.view.default(_to_copy, [8, 4])
    sum_1: float32[8, 1] = aten.sum.dim_IntList(view_1, [1], True)
    # backward, stage 0, segment 0
    cos: bfloat16[8, 4] = aten.cos.default(x)
    mul: float32[8, 1] = aten.mul.Tensor(tangents_1, sum_1)
    sin_1: bfloat16[8, 4] = aten.sin.default(x)  # repeats: sin
    view_2: bfloat16[4, 8] = aten.view.default(sin_1, [4, 8])  # repeats: view
    _to_copy_1: float32[4, 8] = aten._to_copy.default(view_2, dtype=torch.float32)  # repeats: _to_copy
    view_3: float32[8, 4] = aten.view.default(_to_copy_1, [8, 4])  # repeats: view_1
    mul_1: float32[8, 4] = aten.mul.Tensor(mul, view_3)
    mul_2: float32[8, 4] = aten.mul.Tensor(mul_1, cos)
    return (sum_1,), (mul_2,)
""",
    )


def test_as_text_a_dropout_is_repeated_by_its_mask() -> None:
    before = """\
def joint(
    x: float32[8, 4],
    w: float32[4, 4],
    tangents_1: float32[8, 4],
):
    # forward, stage 0, segment 0
    mm: float32[8, 4] = aten.mm.default(x, w)
    native_dropout: (float32[8, 4], bool[8, 4]) = aten.native_dropout.default(mm, 0.5, True)
    getitem: float32[8, 4] = operator.getitem(native_dropout, 0)
    getitem_1: bool[8, 4] = operator.getitem(native_dropout, 1)
    mm_1: float32[8, 4] = aten.mm.default(getitem, w)
    # backward, stage 0, segment 0
    mul: float32[8, 4] = aten.mul.Tensor(tangents_1, getitem)
    mul_1: float32[8, 4] = aten.mul.Tensor(mul, mm)
    mul_2: float32[8, 4] = aten.mul.Tensor(mul_1, getitem_1)
    return (mm_1,), (mul_2,)
"""
    made = after(lambda joint: recompute_in_readers(joint, True, True), before, name="fused_recompute")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[8, 4],
    w: float32[4, 4],
    tangents_1: float32[8, 4],
):
    # forward, stage 0, segment 0
    mm: float32[8, 4] = aten.mm.default(x, w)
    native_dropout: (float32[8, 4], bool[8, 4]) = aten.native_dropout.default(mm, 0.5, True)
    getitem: float32[8, 4] = native_dropout[0]
    getitem_1: bool[8, 4] = native_dropout[1]
    mm_1: float32[8, 4] = aten.mm.default(getitem, w)
    # backward, stage 0, segment 0
    native_dropout_backward_default: float32[8, 4] = aten.native_dropout_backward.default(mm, getitem_1, 2.0)  # repeats: getitem
    mul: float32[8, 4] = aten.mul.Tensor(tangents_1, native_dropout_backward_default)
    mul_1: float32[8, 4] = aten.mul.Tensor(mul, mm)
    mul_2: float32[8, 4] = aten.mul.Tensor(mul_1, getitem_1)
    return (mm_1,), (mul_2,)
""",
    )


def test_as_text_sums_of_residual_connections_are_handed_over() -> None:
    """The last stage does not add up the layers before it again, although ``mm`` and ``add`` are as large."""
    before = """\
def joint(
    x: float32[8, 4],
    w: float32[4, 4],
    tangents_1: float32[8, 4],
):
    # forward, stage 0, segment 0
    mm: float32[8, 4] = aten.mm.default(x, w)
    add: float32[8, 4] = aten.add.Tensor(x, mm)
    # forward, stage 1, segment 1
    sin: float32[8, 4] = aten.sin.default(add)
    mm_1: float32[8, 4] = aten.mm.default(sin, w)
    add_1: float32[8, 4] = aten.add.Tensor(add, mm_1)
    # forward, stage 2, segment 2
    sin_1: float32[8, 4] = aten.sin.default(add_1)
    mm_2: float32[8, 4] = aten.mm.default(sin_1, w)
    # backward, stage 2, segment 2
    cos: float32[8, 4] = aten.cos.default(add_1)
    mul: float32[8, 4] = aten.mul.Tensor(tangents_1, cos)
    # backward, stage 1, segment 1
    cos_1: float32[8, 4] = aten.cos.default(add)
    mul_1: float32[8, 4] = aten.mul.Tensor(mul, cos_1)
    return (mm_2,), (mul_1,)
"""
    made = after(lambda joint: recompute_in_readers(joint, False, True), before, name="fused_recompute")
    assert made == before


def test_as_text_values_that_would_need_kernels_of_their_own_are_handed_over() -> None:
    """The kernel of ``cos`` can write ``sin`` for ``mm_3``; that of ``tanh_backward`` waits for what reads ``tanh``."""
    before = """\
def joint(
    x: float32[4, 4],
    w: float32[4, 4],
    tangents_1: float32[4, 4],
):
    # forward, stage 0, segment 0
    mm: float32[4, 4] = aten.mm.default(x, w)
    sin: float32[4, 4] = aten.sin.default(mm)
    mm_1: float32[4, 4] = aten.mm.default(sin, w)
    tanh: float32[4, 4] = aten.tanh.default(mm_1)
    mm_2: float32[4, 4] = aten.mm.default(tanh, w)
    # backward, stage 0, segment 0
    addmm: float32[4, 4] = aten.addmm.default(tangents_1, tanh, w)
    tanh_backward: float32[4, 4] = aten.tanh_backward.default(addmm, tanh)
    sub: float32[4, 4] = aten.sub.Tensor(tanh_backward, mm_1)
    mm_3: float32[4, 4] = aten.mm.default(sin, sub)
    mm_4: float32[4, 4] = aten.mm.default(sub, w)
    cos: float32[4, 4] = aten.cos.default(mm)
    mul: float32[4, 4] = aten.mul.Tensor(mm_4, cos)
    return (mm_2,), (mm_3, mul)
"""
    made = after(lambda joint: recompute_in_readers(joint, True, False), before, name="fused_recompute")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 4],
    w: float32[4, 4],
    tangents_1: float32[4, 4],
):
    # forward, stage 0, segment 0
    mm: float32[4, 4] = aten.mm.default(x, w)
    sin: float32[4, 4] = aten.sin.default(mm)
    mm_1: float32[4, 4] = aten.mm.default(sin, w)
    tanh: float32[4, 4] = aten.tanh.default(mm_1)
    mm_2: float32[4, 4] = aten.mm.default(tanh, w)
    # backward, stage 0, segment 0
    addmm: float32[4, 4] = aten.addmm.default(tangents_1, tanh, w)
    tanh_backward: float32[4, 4] = aten.tanh_backward.default(addmm, tanh)
    sub: float32[4, 4] = aten.sub.Tensor(tanh_backward, mm_1)
    sin_1: float32[4, 4] = aten.sin.default(mm)  # repeats: sin
    mm_3: float32[4, 4] = aten.mm.default(sin_1, sub)
    mm_4: float32[4, 4] = aten.mm.default(sub, w)
    cos: float32[4, 4] = aten.cos.default(mm)
    mul: float32[4, 4] = aten.mul.Tensor(mm_4, cos)
    return (mm_2,), (mm_3, mul)
""",
    )
    made = after(lambda joint: recompute_in_readers(joint, True, True), before, name="fused_recompute")
    assert "# repeats: tanh" in made
    assert "# repeats: sin" in made
    forward, backward = before.split("    # backward, stage 0, segment 0\n")
    cut = forward.replace("    mm_1: ", "    # forward, stage 1, segment 1\n    mm_1: ")
    cut += "    # backward, stage 1, segment 1\n"
    cut += backward.replace("    cos: ", "    # backward, stage 0, segment 0\n    cos: ")
    made = after(lambda joint: recompute_in_readers(joint, True, False), cut, name="fused_recompute")
    assert "# repeats: tanh" not in made
    assert "# repeats: sin" in made, "the kernel of cos is in another stage"
