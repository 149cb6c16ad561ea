from __future__ import annotations

import expecttest

from roundpipe_fx.passes.statistics import decompose_into_statistics
from tests.graph_text import CPU, after


def test_as_text_a_log_softmax_is_written_with_two_numbers_a_row() -> None:
    """Only where the backward reads it."""
    before = """\
def joint(
    x: float32[8, 4],
    tangents_1: float32[8, 4],
):
    # forward, stage 0, segment 0
    _log_softmax: float32[8, 4] = aten._log_softmax.default(x, 1, False)
    _log_softmax_1: float32[8, 4] = aten._log_softmax.default(x, 0, False)
    add: float32[8, 4] = aten.add.Tensor(_log_softmax, _log_softmax_1)
    # backward, stage 0, segment 0
    mul: float32[8, 4] = aten.mul.Tensor(tangents_1, _log_softmax)
    return (add,), (mul,)
"""
    made = after(lambda joint: decompose_into_statistics(joint, CPU), before, name="statistics")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[8, 4],
    tangents_1: float32[8, 4],
):
    # forward, stage 0, segment 0
    amax_default: float32[8, 1] = aten.amax.default(x, [1], True)
    sub_tensor: float32[8, 4] = aten.sub.Tensor(x, amax_default)
    exp_default: float32[8, 4] = aten.exp.default(sub_tensor)
    sum_dim_int_list: float32[8, 1] = aten.sum.dim_IntList(exp_default, [1], True)
    log_default: float32[8, 1] = aten.log.default(sum_dim_int_list)
    sub_tensor_1: float32[8, 4] = aten.sub.Tensor(sub_tensor, log_default)
    _log_softmax_1: float32[8, 4] = aten._log_softmax.default(x, 0, False)
    add: float32[8, 4] = aten.add.Tensor(sub_tensor_1, _log_softmax_1)
    # backward, stage 0, segment 0
    mul: float32[8, 4] = aten.mul.Tensor(tangents_1, sub_tensor_1)
    return (add,), (mul,)
""",
    )


def test_as_text_a_norm_is_written_with_its_statistics() -> None:
    before = """\
def joint(
    x: float32[8, 4],
    w: float32[4],
    b: float32[4],
    tangents_1: float32[8, 4],
):
    # forward, stage 0, segment 0
    native_layer_norm: (float32[8, 4], float32[8, 1], float32[8, 1]) = aten.native_layer_norm.default(x, [4], w, b, 1e-05)
    getitem: float32[8, 4] = operator.getitem(native_layer_norm, 0)
    getitem_1: float32[8, 1] = operator.getitem(native_layer_norm, 1)
    view: float32[4, 8] = aten.view.default(getitem, [4, 8])
    # backward, stage 0, segment 0
    view_1: float32[8, 4] = aten.view.default(view, [8, 4])
    mul: float32[8, 4] = aten.mul.Tensor(tangents_1, view_1)
    sub: float32[8, 4] = aten.sub.Tensor(mul, getitem_1)
    return (view,), (sub,)
"""
    made = after(lambda joint: decompose_into_statistics(joint, CPU), before, name="statistics")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[8, 4],
    w: float32[4],
    b: float32[4],
    tangents_1: float32[8, 4],
):
    # forward, stage 0, segment 0
    var_mean_correction: (float32[8, 1], float32[8, 1]) = aten.var_mean.correction(x, [1], correction=0, keepdim=True)
    getitem_2: float32[8, 1] = var_mean_correction[0]
    getitem_3: float32[8, 1] = var_mean_correction[1]
    add_tensor: float32[8, 1] = aten.add.Tensor(getitem_2, 1e-05)
    rsqrt_default: float32[8, 1] = aten.rsqrt.default(add_tensor)
    sub_tensor_1: float32[8, 4] = aten.sub.Tensor(x, getitem_3)
    mul_tensor_1: float32[8, 4] = aten.mul.Tensor(sub_tensor_1, rsqrt_default)
    mul_tensor_2: float32[8, 4] = aten.mul.Tensor(mul_tensor_1, w)
    add_tensor_1: float32[8, 4] = aten.add.Tensor(mul_tensor_2, b)
    view: float32[4, 8] = aten.view.default(add_tensor_1, [4, 8])
    # backward, stage 0, segment 0
    view_1: float32[8, 4] = aten.view.default(view, [8, 4])
    mul: float32[8, 4] = aten.mul.Tensor(tangents_1, view_1)
    sub: float32[8, 4] = aten.sub.Tensor(mul, getitem_3)
    return (view,), (sub,)
""",
    )
