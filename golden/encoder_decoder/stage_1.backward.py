import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_backward(args):
    (
        target,  # float32[2, 4, 8]
        tanh,  # float32[2, 3, 8]
        mul_12,  # float32[2, 4, 8]
        mul_13,  # float32[2, 8, 3]
        _safe_softmax_3,  # float32[2, 4, 3]
        add_2,  # float32[2, 3, 8]
        add_3,  # float32[2, 4, 8]
    ) = args
    args.clear()
    # decoder.0 (recomputed)
    view_42: "float32[8, 8]" = aten.view.default(target, [8, 8]);  target = None
    # model
    transpose_7: "float32[2, 3, 4]" = aten.transpose.int(_safe_softmax_3, 1, 2)
    bmm_8: "float32[2, 3, 8]" = aten.bmm.default(transpose_7, add_3);  transpose_7 = None
    transpose_8: "float32[2, 8, 3]" = aten.transpose.int(tanh, 1, 2)
    bmm_9: "float32[2, 4, 3]" = aten.bmm.default(add_3, transpose_8);  add_3 = transpose_8 = None
    add_4: "float32[2, 3, 8]" = aten.add.out(add_2, bmm_8, out=bmm_8);  add_2 = bmm_8 = None
    _softmax_backward_data_1: "float32[2, 4, 3]" = aten._softmax_backward_data.out(bmm_9, _safe_softmax_3, -1, torch.float32, grad_input=bmm_9);  bmm_9 = _safe_softmax_3 = None
    transpose_9: "float32[2, 8, 4]" = aten.transpose.int(mul_12, 1, 2);  mul_12 = None
    bmm_10: "float32[2, 8, 3]" = aten.bmm.default(transpose_9, _softmax_backward_data_1);  transpose_9 = None
    transpose_10: "float32[2, 3, 8]" = aten.transpose.int(mul_13, 1, 2);  mul_13 = None
    bmm_11: "float32[2, 4, 8]" = aten.bmm.default(_softmax_backward_data_1, transpose_10);  _softmax_backward_data_1 = transpose_10 = None
    mul_8: "float32[2, 8, 3]" = aten.mul_.Scalar(bmm_10, 0.5946035575013605);  bmm_10 = None
    transpose_11: "float32[2, 3, 8]" = aten.transpose.int(mul_8, -2, -1);  mul_8 = None
    add_5: "float32[2, 3, 8]" = aten.add_.Tensor(add_4, transpose_11);  add_4 = transpose_11 = None
    mul_9: "float32[2, 4, 8]" = aten.mul_.Scalar(bmm_11, 0.5946035575013605);  bmm_11 = None
    # decoder.0
    view_33: "float32[8, 8]" = aten.view.default(mul_9, [8, 8]);  mul_9 = None
    t_7: "float32[8, 8]" = aten.t.default(view_33)
    mm_2: "float32[8, 8]" = aten.mm.default(t_7, view_42);  t_7 = view_42 = None
    sum_2: "float32[1, 8]" = aten.sum.dim_IntList(view_33, [0], True);  view_33 = None
    view_34: "float32[8]" = aten.view.default(sum_2, [8]);  sum_2 = None
    # model
    tanh_backward: "float32[2, 3, 8]" = aten.tanh_backward.grad_input(add_5, tanh, grad_input=add_5);  add_5 = tanh = None
    return (mm_2, view_34, tanh_backward)
