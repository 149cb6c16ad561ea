import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
    (
        encoder_0_norm1_weight,  # float32[8]
        encoder_0_norm1_bias,  # float32[8]
        source,  # float32[2, 3, 8]
        encoder_0_attention_key_value_weight,  # float32[16, 8]
        encoder_0_attention_key_value_bias,  # float32[16]
        encoder_0_attention_query_weight,  # float32[8, 8]
        encoder_0_attention_query_bias,  # float32[8]
        encoder_0_attention_out_weight,  # float32[8, 8]
        encoder_0_attention_out_bias,  # float32[8]
        encoder_0_norm2_weight,  # float32[8]
        encoder_0_norm2_bias,  # float32[8]
        encoder_0_mlp_0_weight,  # float32[16, 8]
        encoder_0_mlp_0_bias,  # float32[16]
        encoder_0_mlp_2_weight,  # float32[8, 16]
        encoder_0_mlp_2_bias,  # float32[8]
    ) = args
    args.clear()
    # encoder.0.norm1
    native_layer_norm: "(float32[2, 3, 8], float32[2, 3, 1], float32[2, 3, 1])" = aten.native_layer_norm.default(source, [8], encoder_0_norm1_weight, encoder_0_norm1_bias, 1e-05);  encoder_0_norm1_weight = encoder_0_norm1_bias = None
    getitem: "float32[2, 3, 8]" = native_layer_norm[0];  native_layer_norm = None
    # encoder.0.attention.key_value
    view: "float32[6, 8]" = aten.view.default(getitem, [6, 8])
    t: "float32[8, 16]" = aten.t.default(encoder_0_attention_key_value_weight);  encoder_0_attention_key_value_weight = None
    addmm: "float32[6, 16]" = aten.addmm.default(encoder_0_attention_key_value_bias, view, t);  encoder_0_attention_key_value_bias = view = t = None
    view_1: "float32[2, 3, 16]" = aten.view.default(addmm, [2, 3, 16]);  addmm = None
    # encoder.0.attention
    split: "(float32[2, 3, 8], float32[2, 3, 8])" = aten.split.Tensor(view_1, 8, -1);  view_1 = None
    getitem_3: "float32[2, 3, 8]" = split[0]
    getitem_4: "float32[2, 3, 8]" = split[1];  split = None
    # encoder.0.attention.query
    view_2: "float32[6, 8]" = aten.view.default(getitem, [6, 8]);  getitem = None
    t_1: "float32[8, 8]" = aten.t.default(encoder_0_attention_query_weight);  encoder_0_attention_query_weight = None
    addmm_1: "float32[6, 8]" = aten.addmm.default(encoder_0_attention_query_bias, view_2, t_1);  encoder_0_attention_query_bias = view_2 = t_1 = None
    view_3: "float32[2, 3, 8]" = aten.view.default(addmm_1, [2, 3, 8]);  addmm_1 = None
    # encoder.0.attention
    view_4: "float32[2, 3, 2, 4]" = aten.view.default(view_3, [2, 3, 2, 4]);  view_3 = None
    transpose: "float32[2, 2, 3, 4]" = aten.transpose.int(view_4, 1, 2);  view_4 = None
    view_5: "float32[2, 3, 2, 4]" = aten.view.default(getitem_3, [2, 3, 2, 4]);  getitem_3 = None
    transpose_1: "float32[2, 2, 3, 4]" = aten.transpose.int(view_5, 1, 2);  view_5 = None
    view_6: "float32[2, 3, 2, 4]" = aten.view.default(getitem_4, [2, 3, 2, 4]);  getitem_4 = None
    transpose_2: "float32[2, 2, 3, 4]" = aten.transpose.int(view_6, 1, 2);  view_6 = None
    run_and_save_rng_state_2: "(uint8[5056], (float32[2, 2, 3, 4], float32[2, 2, 3]))" = torch.ops.higher_order.run_and_save_rng_state(aten._scaled_dot_product_flash_attention_for_cpu.default, transpose, transpose_1, transpose_2, 0.0, True);  transpose = transpose_1 = transpose_2 = None
    _scaled_dot_product_flash_attention_for_cpu_rng_state: "uint8[5056]" = run_and_save_rng_state_2[0]
    getitem_77: "(float32[2, 2, 3, 4], float32[2, 2, 3])" = run_and_save_rng_state_2[1];  run_and_save_rng_state_2 = None
    getitem_5: "float32[2, 2, 3, 4]" = getitem_77[0];  getitem_77 = None
    transpose_3: "float32[2, 3, 2, 4]" = aten.transpose.int(getitem_5, 1, 2);  getitem_5 = None
    view_7: "float32[2, 3, 8]" = aten.view.default(transpose_3, [2, 3, 8]);  transpose_3 = None
    # encoder.0.attention.out
    view_8: "float32[6, 8]" = aten.view.default(view_7, [6, 8]);  view_7 = None
    t_2: "float32[8, 8]" = aten.t.default(encoder_0_attention_out_weight);  encoder_0_attention_out_weight = None
    addmm_2: "float32[6, 8]" = aten.addmm.default(encoder_0_attention_out_bias, view_8, t_2);  encoder_0_attention_out_bias = view_8 = t_2 = None
    view_9: "float32[2, 3, 8]" = aten.view.default(addmm_2, [2, 3, 8]);  addmm_2 = None
    # encoder.0.dropout
    clone: "float32[2, 3, 8]" = aten.clone.default(view_9);  view_9 = None
    # encoder.0
    add: "float32[2, 3, 8]" = aten.add.out(source, clone, out=clone);  source = clone = None
    # encoder.0.norm2
    native_layer_norm_1: "(float32[2, 3, 8], float32[2, 3, 1], float32[2, 3, 1])" = aten.native_layer_norm.default(add, [8], encoder_0_norm2_weight, encoder_0_norm2_bias, 1e-05);  encoder_0_norm2_weight = encoder_0_norm2_bias = None
    getitem_7: "float32[2, 3, 8]" = native_layer_norm_1[0];  native_layer_norm_1 = None
    # encoder.0.mlp.0
    view_10: "float32[6, 8]" = aten.view.default(getitem_7, [6, 8]);  getitem_7 = None
    t_3: "float32[8, 16]" = aten.t.default(encoder_0_mlp_0_weight);  encoder_0_mlp_0_weight = None
    addmm_3: "float32[6, 16]" = aten.addmm.default(encoder_0_mlp_0_bias, view_10, t_3);  encoder_0_mlp_0_bias = view_10 = t_3 = None
    view_11: "float32[2, 3, 16]" = aten.view.default(addmm_3, [2, 3, 16]);  addmm_3 = None
    # encoder.0.mlp.1
    gelu: "float32[2, 3, 16]" = aten.gelu_.default(view_11);  view_11 = None
    # encoder.0.mlp.2
    view_12: "float32[6, 16]" = aten.view.default(gelu, [6, 16]);  gelu = None
    t_4: "float32[16, 8]" = aten.t.default(encoder_0_mlp_2_weight);  encoder_0_mlp_2_weight = None
    addmm_4: "float32[6, 8]" = aten.addmm.default(encoder_0_mlp_2_bias, view_12, t_4);  encoder_0_mlp_2_bias = view_12 = t_4 = None
    view_13: "float32[2, 3, 8]" = aten.view.default(addmm_4, [2, 3, 8]);  addmm_4 = None
    # encoder.0.dropout
    clone_1: "float32[2, 3, 8]" = aten.clone.default(view_13);  view_13 = None
    # encoder.0
    add_1: "float32[2, 3, 8]" = aten.add_.Tensor(add, clone_1);  add = clone_1 = None
    return (_scaled_dot_product_flash_attention_for_cpu_rng_state, add_1)
