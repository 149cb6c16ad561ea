import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_forward(args):
    (
        decoder_0_norm1_weight,  # float32[8]
        decoder_0_norm1_bias,  # float32[8]
        target,  # float32[2, 4, 8]
        decoder_0_attention_key_value_weight,  # float32[16, 8]
        decoder_0_attention_key_value_bias,  # float32[16]
        decoder_0_attention_query_weight,  # float32[8, 8]
        decoder_0_attention_query_bias,  # float32[8]
        decoder_0_attention_out_weight,  # float32[8, 8]
        decoder_0_attention_out_bias,  # float32[8]
        decoder_0_norm2_weight,  # float32[8]
        decoder_0_norm2_bias,  # float32[8]
        decoder_0_mlp_0_weight,  # float32[16, 8]
        decoder_0_mlp_0_bias,  # float32[16]
        decoder_0_mlp_2_weight,  # float32[8, 16]
        decoder_0_mlp_2_bias,  # float32[8]
        cross_0_key_value_weight,  # float32[16, 8]
        cross_0_key_value_bias,  # float32[16]
        cross_0_query_weight,  # float32[8, 8]
        cross_0_query_bias,  # float32[8]
        cross_0_out_weight,  # float32[8, 8]
        cross_0_out_bias,  # float32[8]
        add_1,  # float32[2, 3, 8]
    ) = args
    args.clear()
    # decoder.0.norm1
    native_layer_norm_2: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(target, [8], decoder_0_norm1_weight, decoder_0_norm1_bias, 1e-05);  decoder_0_norm1_weight = decoder_0_norm1_bias = None
    getitem_10: "float32[2, 4, 8]" = native_layer_norm_2[0];  native_layer_norm_2 = None
    # decoder.0.attention.key_value
    view_14: "float32[8, 8]" = aten.view.default(getitem_10, [8, 8])
    t_5: "float32[8, 16]" = aten.t.default(decoder_0_attention_key_value_weight);  decoder_0_attention_key_value_weight = None
    addmm_5: "float32[8, 16]" = aten.addmm.default(decoder_0_attention_key_value_bias, view_14, t_5);  decoder_0_attention_key_value_bias = view_14 = t_5 = None
    view_15: "float32[2, 4, 16]" = aten.view.default(addmm_5, [2, 4, 16]);  addmm_5 = None
    # decoder.0.attention
    split_1: "(float32[2, 4, 8], float32[2, 4, 8])" = aten.split.Tensor(view_15, 8, -1);  view_15 = None
    getitem_13: "float32[2, 4, 8]" = split_1[0]
    getitem_14: "float32[2, 4, 8]" = split_1[1];  split_1 = None
    # decoder.0.attention.query
    view_16: "float32[8, 8]" = aten.view.default(getitem_10, [8, 8]);  getitem_10 = None
    t_6: "float32[8, 8]" = aten.t.default(decoder_0_attention_query_weight);  decoder_0_attention_query_weight = None
    addmm_6: "float32[8, 8]" = aten.addmm.default(decoder_0_attention_query_bias, view_16, t_6);  decoder_0_attention_query_bias = view_16 = t_6 = None
    view_17: "float32[2, 4, 8]" = aten.view.default(addmm_6, [2, 4, 8]);  addmm_6 = None
    # decoder.0.attention
    view_18: "float32[2, 4, 2, 4]" = aten.view.default(view_17, [2, 4, 2, 4]);  view_17 = None
    transpose_4: "float32[2, 2, 4, 4]" = aten.transpose.int(view_18, 1, 2);  view_18 = None
    view_19: "float32[2, 4, 2, 4]" = aten.view.default(getitem_13, [2, 4, 2, 4]);  getitem_13 = None
    transpose_5: "float32[2, 2, 4, 4]" = aten.transpose.int(view_19, 1, 2);  view_19 = None
    view_20: "float32[2, 4, 2, 4]" = aten.view.default(getitem_14, [2, 4, 2, 4]);  getitem_14 = None
    transpose_6: "float32[2, 2, 4, 4]" = aten.transpose.int(view_20, 1, 2);  view_20 = None
    run_and_save_rng_state: "(uint8[5056], (float32[2, 2, 4, 4], float32[2, 2, 4]))" = torch.ops.higher_order.run_and_save_rng_state(aten._scaled_dot_product_flash_attention_for_cpu.default, transpose_4, transpose_5, transpose_6, 0.0, True);  transpose_4 = transpose_5 = transpose_6 = None
    _scaled_dot_product_flash_attention_for_cpu_1_rng_state: "uint8[5056]" = run_and_save_rng_state[0]
    getitem_75: "(float32[2, 2, 4, 4], float32[2, 2, 4])" = run_and_save_rng_state[1];  run_and_save_rng_state = None
    getitem_15: "float32[2, 2, 4, 4]" = getitem_75[0];  getitem_75 = None
    transpose_7: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_15, 1, 2);  getitem_15 = None
    view_21: "float32[2, 4, 8]" = aten.view.default(transpose_7, [2, 4, 8]);  transpose_7 = None
    # decoder.0.attention.out
    view_22: "float32[8, 8]" = aten.view.default(view_21, [8, 8]);  view_21 = None
    t_7: "float32[8, 8]" = aten.t.default(decoder_0_attention_out_weight);  decoder_0_attention_out_weight = None
    addmm_7: "float32[8, 8]" = aten.addmm.default(decoder_0_attention_out_bias, view_22, t_7);  decoder_0_attention_out_bias = view_22 = t_7 = None
    view_23: "float32[2, 4, 8]" = aten.view.default(addmm_7, [2, 4, 8]);  addmm_7 = None
    # decoder.0.dropout
    clone_2: "float32[2, 4, 8]" = aten.clone.default(view_23);  view_23 = None
    # decoder.0
    add_2: "float32[2, 4, 8]" = aten.add.out(target, clone_2, out=clone_2);  clone_2 = None
    # decoder.0.norm2
    native_layer_norm_3: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(add_2, [8], decoder_0_norm2_weight, decoder_0_norm2_bias, 1e-05);  decoder_0_norm2_weight = decoder_0_norm2_bias = None
    getitem_17: "float32[2, 4, 8]" = native_layer_norm_3[0];  native_layer_norm_3 = None
    # decoder.0.mlp.0
    view_24: "float32[8, 8]" = aten.view.default(getitem_17, [8, 8]);  getitem_17 = None
    t_8: "float32[8, 16]" = aten.t.default(decoder_0_mlp_0_weight);  decoder_0_mlp_0_weight = None
    addmm_8: "float32[8, 16]" = aten.addmm.default(decoder_0_mlp_0_bias, view_24, t_8);  decoder_0_mlp_0_bias = view_24 = t_8 = None
    view_25: "float32[2, 4, 16]" = aten.view.default(addmm_8, [2, 4, 16]);  addmm_8 = None
    # decoder.0.mlp.1
    gelu_1: "float32[2, 4, 16]" = aten.gelu_.default(view_25);  view_25 = None
    # decoder.0.mlp.2
    view_26: "float32[8, 16]" = aten.view.default(gelu_1, [8, 16]);  gelu_1 = None
    t_9: "float32[16, 8]" = aten.t.default(decoder_0_mlp_2_weight);  decoder_0_mlp_2_weight = None
    addmm_9: "float32[8, 8]" = aten.addmm.default(decoder_0_mlp_2_bias, view_26, t_9);  decoder_0_mlp_2_bias = view_26 = t_9 = None
    view_27: "float32[2, 4, 8]" = aten.view.default(addmm_9, [2, 4, 8]);  addmm_9 = None
    # decoder.0.dropout
    clone_3: "float32[2, 4, 8]" = aten.clone.default(view_27);  view_27 = None
    # decoder.0
    add_3: "float32[2, 4, 8]" = aten.add_.Tensor(add_2, clone_3);  add_2 = clone_3 = None
    # cross.0.key_value
    view_28: "float32[6, 8]" = aten.view.default(add_1, [6, 8]);  add_1 = None
    t_10: "float32[8, 16]" = aten.t.default(cross_0_key_value_weight);  cross_0_key_value_weight = None
    addmm_10: "float32[6, 16]" = aten.addmm.default(cross_0_key_value_bias, view_28, t_10);  cross_0_key_value_bias = view_28 = t_10 = None
    view_29: "float32[2, 3, 16]" = aten.view.default(addmm_10, [2, 3, 16]);  addmm_10 = None
    # cross.0
    split_2: "(float32[2, 3, 8], float32[2, 3, 8])" = aten.split.Tensor(view_29, 8, -1);  view_29 = None
    getitem_20: "float32[2, 3, 8]" = split_2[0]
    getitem_21: "float32[2, 3, 8]" = split_2[1];  split_2 = None
    # cross.0.query
    view_30: "float32[8, 8]" = aten.view.default(add_3, [8, 8]);  add_3 = None
    t_11: "float32[8, 8]" = aten.t.default(cross_0_query_weight);  cross_0_query_weight = None
    addmm_11: "float32[8, 8]" = aten.addmm.default(cross_0_query_bias, view_30, t_11);  cross_0_query_bias = view_30 = t_11 = None
    view_31: "float32[2, 4, 8]" = aten.view.default(addmm_11, [2, 4, 8]);  addmm_11 = None
    # cross.0
    view_32: "float32[2, 4, 2, 4]" = aten.view.default(view_31, [2, 4, 2, 4]);  view_31 = None
    transpose_8: "float32[2, 2, 4, 4]" = aten.transpose.int(view_32, 1, 2);  view_32 = None
    view_33: "float32[2, 3, 2, 4]" = aten.view.default(getitem_20, [2, 3, 2, 4]);  getitem_20 = None
    transpose_9: "float32[2, 2, 3, 4]" = aten.transpose.int(view_33, 1, 2);  view_33 = None
    view_34: "float32[2, 3, 2, 4]" = aten.view.default(getitem_21, [2, 3, 2, 4]);  getitem_21 = None
    transpose_10: "float32[2, 2, 3, 4]" = aten.transpose.int(view_34, 1, 2);  view_34 = None
    run_and_save_rng_state_1: "(uint8[5056], (float32[2, 2, 4, 4], float32[2, 2, 4]))" = torch.ops.higher_order.run_and_save_rng_state(aten._scaled_dot_product_flash_attention_for_cpu.default, transpose_8, transpose_9, transpose_10);  transpose_8 = transpose_9 = transpose_10 = None
    _scaled_dot_product_flash_attention_for_cpu_2_rng_state: "uint8[5056]" = run_and_save_rng_state_1[0]
    getitem_76: "(float32[2, 2, 4, 4], float32[2, 2, 4])" = run_and_save_rng_state_1[1];  run_and_save_rng_state_1 = None
    getitem_22: "float32[2, 2, 4, 4]" = getitem_76[0];  getitem_76 = None
    transpose_11: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_22, 1, 2);  getitem_22 = None
    view_35: "float32[2, 4, 8]" = aten.view.default(transpose_11, [2, 4, 8]);  transpose_11 = None
    # cross.0.out
    view_36: "float32[8, 8]" = aten.view.default(view_35, [8, 8]);  view_35 = None
    t_12: "float32[8, 8]" = aten.t.default(cross_0_out_weight);  cross_0_out_weight = None
    addmm_12: "float32[8, 8]" = aten.addmm.default(cross_0_out_bias, view_36, t_12);  cross_0_out_bias = view_36 = t_12 = None
    view_37: "float32[2, 4, 8]" = aten.view.default(addmm_12, [2, 4, 8]);  addmm_12 = None
    # model
    add_4: "float32[2, 4, 8]" = aten.add.out(target, view_37, out=view_37);  target = view_37 = None
    pow_1: "float32[2, 4, 8]" = aten.pow.Tensor_Scalar_out(add_4, 2, out=add_4);  add_4 = None
    mean: "float32[]" = aten.mean.default(pow_1);  pow_1 = None
    return (_scaled_dot_product_flash_attention_for_cpu_1_rng_state, _scaled_dot_product_flash_attention_for_cpu_2_rng_state, mean)
