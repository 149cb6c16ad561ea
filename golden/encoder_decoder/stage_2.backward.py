import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_2_backward(args):
    (
        decoder_1_weight,  # float32[8, 8]
        tangents_1,  # float32[]
        tanh,  # float32[2, 3, 8]
        add,  # float32[2, 4, 8]
        mul_10,  # float32[2, 4, 8]
        mul_11,  # float32[2, 8, 3]
        _safe_softmax_2,  # float32[2, 4, 3]
        mul_4,  # float32[2, 4, 8]
    ) = args
    args.clear()
    # decoder.1 (recomputed)
    view_43: "float32[8, 8]" = aten.view.default(add, [8, 8]);  add = None
    # model
    expand_8: "float32[2, 4, 8]" = aten.expand.default(tangents_1, [2, 4, 8]);  tangents_1 = None
    div: "float32[2, 4, 8]" = aten.div.Scalar(expand_8, 64);  expand_8 = None
    mul_5: "float32[2, 4, 8]" = aten.mul_.Tensor(div, mul_4);  div = mul_4 = None
    transpose_2: "float32[2, 3, 4]" = aten.transpose.int(_safe_softmax_2, 1, 2)
    bmm_4: "float32[2, 3, 8]" = aten.bmm.default(transpose_2, mul_5);  transpose_2 = None
    transpose_3: "float32[2, 8, 3]" = aten.transpose.int(tanh, 1, 2);  tanh = None
    bmm_5: "float32[2, 4, 3]" = aten.bmm.default(mul_5, transpose_3);  transpose_3 = None
    _softmax_backward_data: "float32[2, 4, 3]" = aten._softmax_backward_data.out(bmm_5, _safe_softmax_2, -1, torch.float32, grad_input=bmm_5);  bmm_5 = _safe_softmax_2 = None
    transpose_4: "float32[2, 8, 4]" = aten.transpose.int(mul_10, 1, 2);  mul_10 = None
    bmm_6: "float32[2, 8, 3]" = aten.bmm.default(transpose_4, _softmax_backward_data);  transpose_4 = None
    transpose_5: "float32[2, 3, 8]" = aten.transpose.int(mul_11, 1, 2);  mul_11 = None
    bmm_7: "float32[2, 4, 8]" = aten.bmm.default(_softmax_backward_data, transpose_5);  _softmax_backward_data = transpose_5 = None
    mul_6: "float32[2, 8, 3]" = aten.mul_.Scalar(bmm_6, 0.5946035575013605);  bmm_6 = None
    transpose_6: "float32[2, 3, 8]" = aten.transpose.int(mul_6, -2, -1);  mul_6 = None
    add_2: "float32[2, 3, 8]" = aten.add_.Tensor(bmm_4, transpose_6);  bmm_4 = transpose_6 = None
    mul_7: "float32[2, 4, 8]" = aten.mul_.Scalar(bmm_7, 0.5946035575013605);  bmm_7 = None
    # decoder.1
    view_24: "float32[8, 8]" = aten.view.default(mul_7, [8, 8]);  mul_7 = None
    mm: "float32[8, 8]" = aten.mm.default(view_24, decoder_1_weight);  decoder_1_weight = None
    t_4: "float32[8, 8]" = aten.t.default(view_24)
    mm_1: "float32[8, 8]" = aten.mm.default(t_4, view_43);  t_4 = view_43 = None
    sum_1: "float32[1, 8]" = aten.sum.dim_IntList(view_24, [0], True);  view_24 = None
    view_25: "float32[8]" = aten.view.default(sum_1, [8]);  sum_1 = None
    view_26: "float32[2, 4, 8]" = aten.view.default(mm, [2, 4, 8]);  mm = None
    # model
    add_3: "float32[2, 4, 8]" = aten.add_.Tensor(mul_5, view_26);  mul_5 = view_26 = None
    return (add_2, mm_1, view_25, add_3)
