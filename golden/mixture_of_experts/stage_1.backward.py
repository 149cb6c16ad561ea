import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_backward(args):
    (
        layers_1_router_weight,  # float32[2, 8]
        layers_1_experts_0_weight,  # float32[8, 8]
        layers_1_experts_1_weight,  # float32[8, 8]
        tangents_1,  # float32[]
        add_50,  # float32[6, 8]
        getitem_7,  # int64[6, 1]
        nonzero_2,  # int64[u2, 2]
        sym_size_int_2,  # Sym(u2)
        nonzero_3,  # int64[u3, 2]
        sym_size_int_3,  # Sym(u3)
        _softmax_2,  # float32[6, 2]
        index_8,  # float32[u2, 8]
        relu_4,  # float32[u2, 8]
        index_9,  # float32[u2, 1]
        index_10,  # float32[u3, 8]
        relu_5,  # float32[u3, 8]
        index_11,  # float32[u3, 1]
        mul_60,  # float32[6, 8]
    ) = args
    args.clear()
    # layers.1 (recomputed)
    unbind_11: "(int64[u2], int64[u2])" = aten.unbind.int(nonzero_2, 1);  nonzero_2 = None
    getitem_27: "int64[u2]" = unbind_11[0]
    getitem_26: "int64[u2]" = unbind_11[1];  unbind_11 = None
    unbind_10: "(int64[u3], int64[u3])" = aten.unbind.int(nonzero_3, 1);  nonzero_3 = None
    getitem_25: "int64[u3]" = unbind_10[0]
    getitem_24: "int64[u3]" = unbind_10[1];  unbind_10 = None
    # model
    expand: "float32[6, 8]" = aten.expand.default(tangents_1, [6, 8]);  tangents_1 = None
    div: "float32[6, 8]" = aten.div.Scalar(expand, 48);  expand = None
    mul_61: "float32[6, 8]" = aten.mul_.Tensor(div, mul_60);  div = mul_60 = None
    # layers.1
    index_select: "float32[u3, 8]" = aten.index_select.default(mul_61, 0, getitem_25)
    expand_1: "float32[u3, 8]" = aten.expand.default(index_select, [sym_size_int_3, 8]);  index_select = sym_size_int_3 = None
    mul_62: "float32[u3, 8]" = aten.mul.Tensor(expand_1, relu_5)
    mul_63: "float32[u3, 8]" = aten.mul_.Tensor(expand_1, index_11);  expand_1 = index_11 = None
    sum_1: "float32[u3, 1]" = aten.sum.dim_IntList(mul_62, [1], True);  mul_62 = None
    new_zeros: "float32[6, 1, 1]" = aten.new_zeros.default(sum_1, [6, 1, 1], dtype=torch.float32, layout=torch.strided, device=device(type='cpu'))
    index_put: "float32[6, 1, 1]" = aten.index_put_.default(new_zeros, [getitem_25, getitem_24], sum_1, True);  new_zeros = getitem_24 = sum_1 = None
    squeeze: "float32[6, 1]" = aten.squeeze.dim(index_put, 2);  index_put = None
    threshold_backward: "float32[u3, 8]" = aten.threshold_backward.grad_input(mul_63, relu_5, 0, grad_input=mul_63);  mul_63 = relu_5 = None
    # layers.1.experts.1
    mm: "float32[u3, 8]" = aten.mm.default(threshold_backward, layers_1_experts_1_weight);  layers_1_experts_1_weight = None
    t_7: "float32[8, u3]" = aten.t.default(threshold_backward)
    mm_1: "float32[8, 8]" = aten.mm.default(t_7, index_10);  t_7 = index_10 = None
    sum_2: "float32[1, 8]" = aten.sum.dim_IntList(threshold_backward, [0], True);  threshold_backward = None
    view: "float32[8]" = aten.view.default(sum_2, [8]);  sum_2 = None
    # layers.1
    new_zeros_1: "float32[6, 8]" = aten.new_zeros.default(mm, [6, 8], dtype=torch.float32, layout=torch.strided, device=device(type='cpu'))
    index_put_1: "float32[6, 8]" = aten.index_put_.default(new_zeros_1, [getitem_25], mm, True);  new_zeros_1 = getitem_25 = mm = None
    # model
    add_102: "float32[6, 8]" = aten.add.out(mul_61, index_put_1, out=index_put_1);  index_put_1 = None
    # layers.1
    index_select_1: "float32[u2, 8]" = aten.index_select.default(mul_61, 0, getitem_27);  mul_61 = None
    expand_2: "float32[u2, 8]" = aten.expand.default(index_select_1, [sym_size_int_2, 8]);  index_select_1 = sym_size_int_2 = None
    mul_64: "float32[u2, 8]" = aten.mul.Tensor(expand_2, relu_4)
    mul_65: "float32[u2, 8]" = aten.mul_.Tensor(expand_2, index_9);  expand_2 = index_9 = None
    sum_3: "float32[u2, 1]" = aten.sum.dim_IntList(mul_64, [1], True);  mul_64 = None
    new_zeros_2: "float32[6, 1, 1]" = aten.new_zeros.default(sum_3, [6, 1, 1], dtype=torch.float32, layout=torch.strided, device=device(type='cpu'))
    index_put_2: "float32[6, 1, 1]" = aten.index_put_.default(new_zeros_2, [getitem_27, getitem_26], sum_3, True);  new_zeros_2 = getitem_26 = sum_3 = None
    squeeze_1: "float32[6, 1]" = aten.squeeze.dim(index_put_2, 2);  index_put_2 = None
    # model
    add_103: "float32[6, 1]" = aten.add_.Tensor(squeeze, squeeze_1);  squeeze = squeeze_1 = None
    # layers.1
    threshold_backward_1: "float32[u2, 8]" = aten.threshold_backward.grad_input(mul_65, relu_4, 0, grad_input=mul_65);  mul_65 = relu_4 = None
    # layers.1.experts.0
    mm_2: "float32[u2, 8]" = aten.mm.default(threshold_backward_1, layers_1_experts_0_weight);  layers_1_experts_0_weight = None
    t_11: "float32[8, u2]" = aten.t.default(threshold_backward_1)
    mm_3: "float32[8, 8]" = aten.mm.default(t_11, index_8);  t_11 = index_8 = None
    sum_4: "float32[1, 8]" = aten.sum.dim_IntList(threshold_backward_1, [0], True);  threshold_backward_1 = None
    view_1: "float32[8]" = aten.view.default(sum_4, [8]);  sum_4 = None
    # layers.1
    new_zeros_3: "float32[6, 8]" = aten.new_zeros.default(mm_2, [6, 8], dtype=torch.float32, layout=torch.strided, device=device(type='cpu'))
    index_put_3: "float32[6, 8]" = aten.index_put_.default(new_zeros_3, [getitem_27], mm_2, True);  new_zeros_3 = getitem_27 = mm_2 = None
    # model
    add_104: "float32[6, 8]" = aten.add_.Tensor(add_102, index_put_3);  add_102 = index_put_3 = None
    # layers.1
    new_zeros_4: "float32[6, 2]" = aten.new_zeros.default(add_103, [6, 2])
    scatter: "float32[6, 2]" = aten.scatter_.src(new_zeros_4, -1, getitem_7, add_103);  new_zeros_4 = getitem_7 = add_103 = None
    _softmax_backward_data: "float32[6, 2]" = aten._softmax_backward_data.out(scatter, _softmax_2, -1, torch.float32, grad_input=scatter);  scatter = _softmax_2 = None
    # layers.1.router
    mm_4: "float32[6, 8]" = aten.mm.default(_softmax_backward_data, layers_1_router_weight);  layers_1_router_weight = None
    t_15: "float32[2, 6]" = aten.t.default(_softmax_backward_data)
    mm_5: "float32[2, 8]" = aten.mm.default(t_15, add_50);  t_15 = add_50 = None
    sum_5: "float32[1, 2]" = aten.sum.dim_IntList(_softmax_backward_data, [0], True);  _softmax_backward_data = None
    view_2: "float32[2]" = aten.view.default(sum_5, [2]);  sum_5 = None
    # model
    add_105: "float32[6, 8]" = aten.add_.Tensor(add_104, mm_4);  add_104 = mm_4 = None
    return (mm_1, view, mm_3, view_1, mm_5, view_2, add_105)
