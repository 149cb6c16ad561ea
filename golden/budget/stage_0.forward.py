import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
    (
        norm_weight,  # float32[8]
        norm_bias,  # float32[8]
        x,  # float32[2, 4, 8]
        attention_key_value_weight,  # float32[16, 8]
        attention_key_value_bias,  # float32[16]
        attention_query_weight,  # float32[8, 8]
        attention_query_bias,  # float32[8]
        attention_out_weight,  # float32[8, 8]
        attention_out_bias,  # float32[8]
    ) = args
    args.clear()
    # norm
    native_layer_norm: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(x, [8], norm_weight, norm_bias, 1e-05);  norm_weight = norm_bias = None
    getitem: "float32[2, 4, 8]" = native_layer_norm[0];  native_layer_norm = None
    # attention.key_value
    view: "float32[8, 8]" = aten.view.default(getitem, [8, 8])
    t: "float32[8, 16]" = aten.t.default(attention_key_value_weight);  attention_key_value_weight = None
    addmm: "float32[8, 16]" = aten.addmm.default(attention_key_value_bias, view, t);  attention_key_value_bias = view = t = None
    view_1: "float32[2, 4, 16]" = aten.view.default(addmm, [2, 4, 16])
    # attention
    split: "(float32[2, 4, 8], float32[2, 4, 8])" = aten.split.Tensor(view_1, 8, -1);  view_1 = None
    getitem_3: "float32[2, 4, 8]" = split[0]
    getitem_4: "float32[2, 4, 8]" = split[1];  split = None
    # attention.query
    view_2: "float32[8, 8]" = aten.view.default(getitem, [8, 8]);  getitem = None
    t_1: "float32[8, 8]" = aten.t.default(attention_query_weight);  attention_query_weight = None
    addmm_1: "float32[8, 8]" = aten.addmm.default(attention_query_bias, view_2, t_1);  attention_query_bias = view_2 = t_1 = None
    view_3: "float32[2, 4, 8]" = aten.view.default(addmm_1, [2, 4, 8])
    # attention
    view_4: "float32[2, 4, 2, 4]" = aten.view.default(view_3, [2, 4, 2, 4]);  view_3 = None
    transpose: "float32[2, 2, 4, 4]" = aten.transpose.int(view_4, 1, 2);  view_4 = None
    view_5: "float32[2, 4, 2, 4]" = aten.view.default(getitem_3, [2, 4, 2, 4]);  getitem_3 = None
    transpose_1: "float32[2, 2, 4, 4]" = aten.transpose.int(view_5, 1, 2);  view_5 = None
    view_6: "float32[2, 4, 2, 4]" = aten.view.default(getitem_4, [2, 4, 2, 4]);  getitem_4 = None
    transpose_2: "float32[2, 2, 4, 4]" = aten.transpose.int(view_6, 1, 2);  view_6 = None
    _scaled_dot_product_flash_attention_for_cpu: "(float32[2, 2, 4, 4], float32[2, 2, 4])" = aten._scaled_dot_product_flash_attention_for_cpu.default(transpose, transpose_1, transpose_2, 0.0, True);  transpose = transpose_1 = transpose_2 = None
    getitem_5: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu[0]
    getitem_6: "float32[2, 2, 4]" = _scaled_dot_product_flash_attention_for_cpu[1];  _scaled_dot_product_flash_attention_for_cpu = None
    transpose_3: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_5, 1, 2)
    view_7: "float32[2, 4, 8]" = aten.view.default(transpose_3, [2, 4, 8]);  transpose_3 = None
    # attention.out
    view_8: "float32[8, 8]" = aten.view.default(view_7, [8, 8]);  view_7 = None
    t_2: "float32[8, 8]" = aten.t.default(attention_out_weight);  attention_out_weight = None
    addmm_2: "float32[8, 8]" = aten.addmm.default(attention_out_bias, view_8, t_2);  attention_out_bias = view_8 = t_2 = None
    view_9: "float32[2, 4, 8]" = aten.view.default(addmm_2, [2, 4, 8]);  addmm_2 = None
    # model
    add: "float32[2, 4, 8]" = aten.add.out(x, view_9, out=view_9);  x = view_9 = None
    pow_1: "float32[2, 4, 8]" = aten.pow.Tensor_Scalar(add, 2)
    mean: "float32[]" = aten.mean.default(pow_1);  pow_1 = None
    return (addmm, addmm_1, getitem_5, getitem_6, add, mean)
