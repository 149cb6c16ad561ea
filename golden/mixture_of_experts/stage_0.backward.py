import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        x,  # float32[6, 8]
        getitem_1,  # int64[6, 1]
        nonzero,  # int64[u0, 2]
        sym_size_int,  # Sym(u0)
        nonzero_1,  # int64[u1, 2]
        sym_size_int_1,  # Sym(u1)
        _softmax_3,  # float32[6, 2]
        index_12,  # float32[u0, 8]
        relu_6,  # float32[u0, 8]
        index_13,  # float32[u0, 1]
        index_14,  # float32[u1, 8]
        relu_7,  # float32[u1, 8]
        index_15,  # float32[u1, 1]
        add_105,  # float32[6, 8]
    ) = args
    args.clear()
    # layers.0 (recomputed)
    unbind_9: "(int64[u0], int64[u0])" = aten.unbind.int(nonzero, 1);  nonzero = None
    getitem_23: "int64[u0]" = unbind_9[0]
    getitem_22: "int64[u0]" = unbind_9[1];  unbind_9 = None
    unbind_8: "(int64[u1], int64[u1])" = aten.unbind.int(nonzero_1, 1);  nonzero_1 = None
    getitem_21: "int64[u1]" = unbind_8[0]
    getitem_20: "int64[u1]" = unbind_8[1];  unbind_8 = None
    # layers.0
    index_select_2: "float32[u1, 8]" = aten.index_select.default(add_105, 0, getitem_21)
    expand_3: "float32[u1, 8]" = aten.expand.default(index_select_2, [sym_size_int_1, 8]);  index_select_2 = sym_size_int_1 = None
    mul_66: "float32[u1, 8]" = aten.mul.Tensor(expand_3, relu_7)
    mul_67: "float32[u1, 8]" = aten.mul_.Tensor(expand_3, index_15);  expand_3 = index_15 = None
    sum_6: "float32[u1, 1]" = aten.sum.dim_IntList(mul_66, [1], True);  mul_66 = None
    new_zeros_5: "float32[6, 1, 1]" = aten.new_zeros.default(sum_6, [6, 1, 1], dtype=torch.float32, layout=torch.strided, device=device(type='cpu'))
    index_put_4: "float32[6, 1, 1]" = aten.index_put_.default(new_zeros_5, [getitem_21, getitem_20], sum_6, True);  new_zeros_5 = getitem_21 = getitem_20 = sum_6 = None
    squeeze_2: "float32[6, 1]" = aten.squeeze.dim(index_put_4, 2);  index_put_4 = None
    threshold_backward_2: "float32[u1, 8]" = aten.threshold_backward.grad_input(mul_67, relu_7, 0, grad_input=mul_67);  mul_67 = relu_7 = None
    # layers.0.experts.1
    t_18: "float32[8, u1]" = aten.t.default(threshold_backward_2)
    mm_6: "float32[8, 8]" = aten.mm.default(t_18, index_14);  t_18 = index_14 = None
    sum_7: "float32[1, 8]" = aten.sum.dim_IntList(threshold_backward_2, [0], True);  threshold_backward_2 = None
    view_3: "float32[8]" = aten.view.default(sum_7, [8]);  sum_7 = None
    # layers.0
    index_select_3: "float32[u0, 8]" = aten.index_select.default(add_105, 0, getitem_23);  add_105 = None
    expand_4: "float32[u0, 8]" = aten.expand.default(index_select_3, [sym_size_int, 8]);  index_select_3 = sym_size_int = None
    mul_68: "float32[u0, 8]" = aten.mul.Tensor(expand_4, relu_6)
    mul_69: "float32[u0, 8]" = aten.mul_.Tensor(expand_4, index_13);  expand_4 = index_13 = None
    sum_8: "float32[u0, 1]" = aten.sum.dim_IntList(mul_68, [1], True);  mul_68 = None
    new_zeros_6: "float32[6, 1, 1]" = aten.new_zeros.default(sum_8, [6, 1, 1], dtype=torch.float32, layout=torch.strided, device=device(type='cpu'))
    index_put_5: "float32[6, 1, 1]" = aten.index_put_.default(new_zeros_6, [getitem_23, getitem_22], sum_8, True);  new_zeros_6 = getitem_23 = getitem_22 = sum_8 = None
    squeeze_3: "float32[6, 1]" = aten.squeeze.dim(index_put_5, 2);  index_put_5 = None
    # model
    add_106: "float32[6, 1]" = aten.add_.Tensor(squeeze_2, squeeze_3);  squeeze_2 = squeeze_3 = None
    # layers.0
    threshold_backward_3: "float32[u0, 8]" = aten.threshold_backward.grad_input(mul_69, relu_6, 0, grad_input=mul_69);  mul_69 = relu_6 = None
    # layers.0.experts.0
    t_21: "float32[8, u0]" = aten.t.default(threshold_backward_3)
    mm_7: "float32[8, 8]" = aten.mm.default(t_21, index_12);  t_21 = index_12 = None
    sum_9: "float32[1, 8]" = aten.sum.dim_IntList(threshold_backward_3, [0], True);  threshold_backward_3 = None
    view_4: "float32[8]" = aten.view.default(sum_9, [8]);  sum_9 = None
    # layers.0
    new_zeros_7: "float32[6, 2]" = aten.new_zeros.default(add_106, [6, 2])
    scatter_1: "float32[6, 2]" = aten.scatter_.src(new_zeros_7, -1, getitem_1, add_106);  new_zeros_7 = getitem_1 = add_106 = None
    _softmax_backward_data_1: "float32[6, 2]" = aten._softmax_backward_data.out(scatter_1, _softmax_3, -1, torch.float32, grad_input=scatter_1);  scatter_1 = _softmax_3 = None
    # layers.0.router
    t_24: "float32[2, 6]" = aten.t.default(_softmax_backward_data_1)
    mm_8: "float32[2, 8]" = aten.mm.default(t_24, x);  t_24 = x = None
    sum_10: "float32[1, 2]" = aten.sum.dim_IntList(_softmax_backward_data_1, [0], True);  _softmax_backward_data_1 = None
    view_5: "float32[2]" = aten.view.default(sum_10, [2]);  sum_10 = None
    return (mm_6, view_3, mm_7, view_4, mm_8, view_5)
