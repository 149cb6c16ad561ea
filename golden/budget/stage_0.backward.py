import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        norm_weight,  # float32[8]
        norm_bias,  # float32[8]
        x,  # float32[2, 4, 8]
        attention_key_value_weight,  # float32[16, 8]
        attention_query_weight,  # float32[8, 8]
        attention_out_weight,  # float32[8, 8]
        tangents_1,  # float32[]
        addmm,  # float32[8, 16]
        addmm_1,  # float32[8, 8]
        getitem_5,  # float32[2, 2, 4, 4]
        getitem_6,  # float32[2, 2, 4]
        add,  # float32[2, 4, 8]
    ) = args
    args.clear()
    # model
    expand: "float32[2, 4, 8]" = aten.expand.default(tangents_1, [2, 4, 8]);  tangents_1 = None
    div: "float32[2, 4, 8]" = aten.div.Scalar(expand, 64);  expand = None
    pow_2: "float32[2, 4, 8]" = aten.pow.Tensor_Scalar(add, 1.0);  add = None
    mul: "float32[2, 4, 8]" = aten.mul_.Scalar(pow_2, 2.0);  pow_2 = None
    mul_1: "float32[2, 4, 8]" = aten.mul_.Tensor(div, mul);  div = mul = None
    # attention.out
    view_10: "float32[8, 8]" = aten.view.default(mul_1, [8, 8]);  mul_1 = None
    mm: "float32[8, 8]" = aten.mm.default(view_10, attention_out_weight);  attention_out_weight = None
    t_4: "float32[8, 8]" = aten.t.default(view_10)
    # attention (recomputed)
    transpose_8: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_5, 1, 2)
    view_23: "float32[2, 4, 8]" = aten.view.default(transpose_8, [2, 4, 8]);  transpose_8 = None
    # attention.out (recomputed)
    view_24: "float32[8, 8]" = aten.view.default(view_23, [8, 8]);  view_23 = None
    # attention.out
    mm_1: "float32[8, 8]" = aten.mm.default(t_4, view_24);  t_4 = view_24 = None
    sum_1: "float32[1, 8]" = aten.sum.dim_IntList(view_10, [0], True);  view_10 = None
    view_11: "float32[8]" = aten.view.default(sum_1, [8]);  sum_1 = None
    view_12: "float32[2, 4, 8]" = aten.view.default(mm, [2, 4, 8]);  mm = None
    # attention
    view_13: "float32[2, 4, 2, 4]" = aten.view.default(view_12, [2, 4, 2, 4]);  view_12 = None
    transpose_4: "float32[2, 2, 4, 4]" = aten.transpose.int(view_13, 1, 2);  view_13 = None
    # attention.query (recomputed)
    view_25: "float32[2, 4, 8]" = aten.view.default(addmm_1, [2, 4, 8]);  addmm_1 = None
    # attention (recomputed)
    view_26: "float32[2, 4, 2, 4]" = aten.view.default(view_25, [2, 4, 2, 4]);  view_25 = None
    transpose_9: "float32[2, 2, 4, 4]" = aten.transpose.int(view_26, 1, 2);  view_26 = None
    # attention.key_value (recomputed)
    view_27: "float32[2, 4, 16]" = aten.view.default(addmm, [2, 4, 16]);  addmm = None
    # attention (recomputed)
    split_1: "(float32[2, 4, 8], float32[2, 4, 8])" = aten.split.Tensor(view_27, 8, -1);  view_27 = None
    getitem_13: "float32[2, 4, 8]" = split_1[0]
    view_28: "float32[2, 4, 2, 4]" = aten.view.default(getitem_13, [2, 4, 2, 4]);  getitem_13 = None
    transpose_10: "float32[2, 2, 4, 4]" = aten.transpose.int(view_28, 1, 2);  view_28 = None
    getitem_14: "float32[2, 4, 8]" = split_1[1];  split_1 = None
    view_29: "float32[2, 4, 2, 4]" = aten.view.default(getitem_14, [2, 4, 2, 4]);  getitem_14 = None
    transpose_11: "float32[2, 2, 4, 4]" = aten.transpose.int(view_29, 1, 2);  view_29 = None
    # attention
    _scaled_dot_product_flash_attention_for_cpu_backward: "(float32[2, 2, 4, 4], float32[2, 2, 4, 4], float32[2, 2, 4, 4])" = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(transpose_4, transpose_9, transpose_10, transpose_11, getitem_5, getitem_6, 0.0, True);  transpose_4 = transpose_9 = transpose_10 = transpose_11 = getitem_5 = getitem_6 = None
    getitem_7: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward[0]
    getitem_8: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward[1]
    getitem_9: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward[2];  _scaled_dot_product_flash_attention_for_cpu_backward = None
    # norm (recomputed)
    native_layer_norm_1: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(x, [8], norm_weight, norm_bias, 1e-05)
    getitem_15: "float32[2, 4, 8]" = native_layer_norm_1[0];  native_layer_norm_1 = None
    # attention
    transpose_7: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_7, 1, 2);  getitem_7 = None
    view_16: "float32[2, 4, 8]" = aten.view.default(transpose_7, [2, 4, 8]);  transpose_7 = None
    # attention.query
    view_17: "float32[8, 8]" = aten.view.default(view_16, [8, 8]);  view_16 = None
    mm_2: "float32[8, 8]" = aten.mm.default(view_17, attention_query_weight);  attention_query_weight = None
    t_8: "float32[8, 8]" = aten.t.default(view_17)
    # attention.query (recomputed)
    view_30: "float32[8, 8]" = aten.view.default(getitem_15, [8, 8]);  getitem_15 = None
    # attention.query
    mm_3: "float32[8, 8]" = aten.mm.default(t_8, view_30);  t_8 = view_30 = None
    sum_2: "float32[1, 8]" = aten.sum.dim_IntList(view_17, [0], True);  view_17 = None
    # attention
    transpose_6: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_8, 1, 2);  getitem_8 = None
    view_15: "float32[2, 4, 8]" = aten.view.default(transpose_6, [2, 4, 8]);  transpose_6 = None
    transpose_5: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_9, 1, 2);  getitem_9 = None
    view_14: "float32[2, 4, 8]" = aten.view.default(transpose_5, [2, 4, 8]);  transpose_5 = None
    cat: "float32[2, 4, 16]" = aten.cat.default([view_15, view_14], 2);  view_15 = view_14 = None
    # attention.query
    view_18: "float32[8]" = aten.view.default(sum_2, [8]);  sum_2 = None
    # attention.key_value
    view_20: "float32[8, 16]" = aten.view.default(cat, [8, 16]);  cat = None
    mm_4: "float32[8, 8]" = aten.mm.default(view_20, attention_key_value_weight);  attention_key_value_weight = None
    # attention.query
    view_19: "float32[2, 4, 8]" = aten.view.default(mm_2, [2, 4, 8]);  mm_2 = None
    # attention.key_value
    view_22: "float32[2, 4, 8]" = aten.view.default(mm_4, [2, 4, 8]);  mm_4 = None
    # model
    add_1: "float32[2, 4, 8]" = aten.add_.Tensor(view_19, view_22);  view_19 = view_22 = None
    # attention.key_value
    sum_3: "float32[1, 16]" = aten.sum.dim_IntList(view_20, [0], True)
    # norm (recomputed)
    native_layer_norm_2: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(x, [8], norm_weight, norm_bias, 1e-05)
    getitem_18: "float32[2, 4, 8]" = native_layer_norm_2[0]
    getitem_19: "float32[2, 4, 1]" = native_layer_norm_2[1]
    getitem_20: "float32[2, 4, 1]" = native_layer_norm_2[2];  native_layer_norm_2 = None
    # norm
    native_layer_norm_backward: "(NoneType, float32[8], float32[8])" = aten.native_layer_norm_backward.default(add_1, x, [8], getitem_19, getitem_20, norm_weight, norm_bias, [False, True, True]);  add_1 = x = getitem_19 = getitem_20 = norm_weight = norm_bias = None
    getitem_11: "float32[8]" = native_layer_norm_backward[1]
    getitem_12: "float32[8]" = native_layer_norm_backward[2];  native_layer_norm_backward = None
    # attention.key_value
    t_12: "float32[16, 8]" = aten.t.default(view_20);  view_20 = None
    # attention.key_value (recomputed)
    view_31: "float32[8, 8]" = aten.view.default(getitem_18, [8, 8]);  getitem_18 = None
    # attention.key_value
    mm_5: "float32[16, 8]" = aten.mm.default(t_12, view_31);  t_12 = view_31 = None
    view_21: "float32[16]" = aten.view.default(sum_3, [16]);  sum_3 = None
    return (mm_1, view_11, mm_3, view_18, getitem_11, getitem_12, mm_5, view_21)
