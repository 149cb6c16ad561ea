import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_forward(args):
    (
        embedding_weight,  # float32[16, 8]
        blocks_1_norm1_weight,  # float32[8]
        blocks_1_norm1_bias,  # float32[8]
        blocks_1_attention_key_value_weight,  # float32[16, 8]
        blocks_1_attention_key_value_bias,  # float32[16]
        blocks_1_attention_query_weight,  # float32[8, 8]
        blocks_1_attention_query_bias,  # float32[8]
        blocks_1_attention_out_weight,  # float32[8, 8]
        blocks_1_attention_out_bias,  # float32[8]
        blocks_1_norm2_weight,  # float32[8]
        blocks_1_norm2_bias,  # float32[8]
        blocks_1_mlp_0_weight,  # float32[16, 8]
        blocks_1_mlp_0_bias,  # float32[16]
        blocks_1_mlp_2_weight,  # float32[8, 16]
        blocks_1_mlp_2_bias,  # float32[8]
        norm_weight,  # float32[8]
        norm_bias,  # float32[8]
        targets,  # int64[2, 4]
        add_1,  # float32[2, 4, 8]
    ) = args
    args.clear()
    # blocks.1.norm1
    native_layer_norm_2: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(add_1, [8], blocks_1_norm1_weight, blocks_1_norm1_bias, 1e-05);  blocks_1_norm1_weight = blocks_1_norm1_bias = None
    getitem_14: "float32[2, 4, 8]" = native_layer_norm_2[0];  native_layer_norm_2 = None
    # blocks.1.attention.key_value
    view_14: "float32[8, 8]" = aten.view.default(getitem_14, [8, 8])
    t_5: "float32[8, 16]" = aten.t.default(blocks_1_attention_key_value_weight);  blocks_1_attention_key_value_weight = None
    addmm_5: "float32[8, 16]" = aten.addmm.default(blocks_1_attention_key_value_bias, view_14, t_5);  blocks_1_attention_key_value_bias = view_14 = t_5 = None
    view_15: "float32[2, 4, 16]" = aten.view.default(addmm_5, [2, 4, 16]);  addmm_5 = None
    # blocks.1.attention
    split_1: "(float32[2, 4, 8], float32[2, 4, 8])" = aten.split.Tensor(view_15, 8, -1);  view_15 = None
    getitem_17: "float32[2, 4, 8]" = split_1[0]
    getitem_18: "float32[2, 4, 8]" = split_1[1];  split_1 = None
    # blocks.1.attention.query
    view_16: "float32[8, 8]" = aten.view.default(getitem_14, [8, 8]);  getitem_14 = None
    t_6: "float32[8, 8]" = aten.t.default(blocks_1_attention_query_weight);  blocks_1_attention_query_weight = None
    addmm_6: "float32[8, 8]" = aten.addmm.default(blocks_1_attention_query_bias, view_16, t_6);  blocks_1_attention_query_bias = view_16 = t_6 = None
    view_17: "float32[2, 4, 8]" = aten.view.default(addmm_6, [2, 4, 8]);  addmm_6 = None
    # blocks.1.attention
    view_18: "float32[2, 4, 2, 4]" = aten.view.default(view_17, [2, 4, 2, 4]);  view_17 = None
    transpose_4: "float32[2, 2, 4, 4]" = aten.transpose.int(view_18, 1, 2);  view_18 = None
    view_19: "float32[2, 4, 2, 4]" = aten.view.default(getitem_17, [2, 4, 2, 4]);  getitem_17 = None
    transpose_5: "float32[2, 2, 4, 4]" = aten.transpose.int(view_19, 1, 2);  view_19 = None
    view_20: "float32[2, 4, 2, 4]" = aten.view.default(getitem_18, [2, 4, 2, 4]);  getitem_18 = None
    transpose_6: "float32[2, 2, 4, 4]" = aten.transpose.int(view_20, 1, 2);  view_20 = None
    run_and_save_rng_state: "(uint8[5056], (float32[2, 2, 4, 4], float32[2, 2, 4]))" = torch.ops.higher_order.run_and_save_rng_state(aten._scaled_dot_product_flash_attention_for_cpu.default, transpose_4, transpose_5, transpose_6, 0.0, True);  transpose_4 = transpose_5 = transpose_6 = None
    _scaled_dot_product_flash_attention_for_cpu_1_rng_state: "uint8[5056]" = run_and_save_rng_state[0]
    getitem_83: "(float32[2, 2, 4, 4], float32[2, 2, 4])" = run_and_save_rng_state[1];  run_and_save_rng_state = None
    getitem_19: "float32[2, 2, 4, 4]" = getitem_83[0];  getitem_83 = None
    transpose_7: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_19, 1, 2);  getitem_19 = None
    view_21: "float32[2, 4, 8]" = aten.view.default(transpose_7, [2, 4, 8]);  transpose_7 = None
    # blocks.1.attention.out
    view_22: "float32[8, 8]" = aten.view.default(view_21, [8, 8]);  view_21 = None
    t_7: "float32[8, 8]" = aten.t.default(blocks_1_attention_out_weight);  blocks_1_attention_out_weight = None
    addmm_7: "float32[8, 8]" = aten.addmm.default(blocks_1_attention_out_bias, view_22, t_7);  blocks_1_attention_out_bias = view_22 = t_7 = None
    view_23: "float32[2, 4, 8]" = aten.view.default(addmm_7, [2, 4, 8]);  addmm_7 = None
    # blocks.1.dropout
    full_default_2: "bool[]" = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default_2: "bool[2, 4, 8]" = aten.expand.default(full_default_2, [2, 4, 8]);  full_default_2 = None
    run_and_save_rng_state_1: "(uint8[5056], bool[2, 4, 8])" = torch.ops.higher_order.run_and_save_rng_state(aten.bernoulli.p, expand_default_2, 0.9);  expand_default_2 = None
    bernoulli_p_2_rng_state: "uint8[5056]" = run_and_save_rng_state_1[0]
    getitem_84: "bool[2, 4, 8]" = run_and_save_rng_state_1[1];  run_and_save_rng_state_1 = None
    mul_tensor_4: "float32[2, 4, 8]" = aten.mul_.Tensor(view_23, getitem_84);  view_23 = getitem_84 = None
    mul_tensor_5: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor_4, 1.1111111640930176);  mul_tensor_4 = None
    # blocks.1
    add_2: "float32[2, 4, 8]" = aten.add.out(add_1, mul_tensor_5, out=mul_tensor_5);  add_1 = mul_tensor_5 = None
    # blocks.1.norm2
    native_layer_norm_3: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(add_2, [8], blocks_1_norm2_weight, blocks_1_norm2_bias, 1e-05);  blocks_1_norm2_weight = blocks_1_norm2_bias = None
    getitem_23: "float32[2, 4, 8]" = native_layer_norm_3[0];  native_layer_norm_3 = None
    # blocks.1.mlp.0
    view_24: "float32[8, 8]" = aten.view.default(getitem_23, [8, 8]);  getitem_23 = None
    t_8: "float32[8, 16]" = aten.t.default(blocks_1_mlp_0_weight);  blocks_1_mlp_0_weight = None
    addmm_8: "float32[8, 16]" = aten.addmm.default(blocks_1_mlp_0_bias, view_24, t_8);  blocks_1_mlp_0_bias = view_24 = t_8 = None
    view_25: "float32[2, 4, 16]" = aten.view.default(addmm_8, [2, 4, 16]);  addmm_8 = None
    # blocks.1.mlp.1
    gelu_1: "float32[2, 4, 16]" = aten.gelu_.default(view_25);  view_25 = None
    # blocks.1.mlp.2
    view_26: "float32[8, 16]" = aten.view.default(gelu_1, [8, 16]);  gelu_1 = None
    t_9: "float32[16, 8]" = aten.t.default(blocks_1_mlp_2_weight);  blocks_1_mlp_2_weight = None
    addmm_9: "float32[8, 8]" = aten.addmm.default(blocks_1_mlp_2_bias, view_26, t_9);  blocks_1_mlp_2_bias = view_26 = t_9 = None
    view_27: "float32[2, 4, 8]" = aten.view.default(addmm_9, [2, 4, 8]);  addmm_9 = None
    # blocks.1.dropout
    full_default_3: "bool[]" = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default_3: "bool[2, 4, 8]" = aten.expand.default(full_default_3, [2, 4, 8]);  full_default_3 = None
    run_and_save_rng_state_2: "(uint8[5056], bool[2, 4, 8])" = torch.ops.higher_order.run_and_save_rng_state(aten.bernoulli.p, expand_default_3, 0.9);  expand_default_3 = None
    bernoulli_p_3_rng_state: "uint8[5056]" = run_and_save_rng_state_2[0]
    getitem_85: "bool[2, 4, 8]" = run_and_save_rng_state_2[1];  run_and_save_rng_state_2 = None
    mul_tensor_6: "float32[2, 4, 8]" = aten.mul_.Tensor(view_27, getitem_85);  view_27 = getitem_85 = None
    mul_tensor_7: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor_6, 1.1111111640930176);  mul_tensor_6 = None
    # blocks.1
    add_3: "float32[2, 4, 8]" = aten.add_.Tensor(add_2, mul_tensor_7);  add_2 = mul_tensor_7 = None
    # norm
    native_layer_norm_4: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(add_3, [8], norm_weight, norm_bias, 1e-05);  add_3 = norm_weight = norm_bias = None
    getitem_28: "float32[2, 4, 8]" = native_layer_norm_4[0];  native_layer_norm_4 = None
    # model
    t_10: "float32[8, 16]" = aten.t.default(embedding_weight);  embedding_weight = None
    view_28: "float32[8, 8]" = aten.view.default(getitem_28, [8, 8]);  getitem_28 = None
    mm: "float32[8, 16]" = aten.mm.default(view_28, t_10);  view_28 = t_10 = None
    view_30: "int64[8]" = aten.view.default(targets, [8]);  targets = None
    _log_softmax: "float32[8, 16]" = aten._log_softmax.out(mm, 1, False, out=mm);  mm = None
    nll_loss_forward: "(float32[], float32[])" = aten.nll_loss_forward.default(_log_softmax, view_30, None, 1, -100);  _log_softmax = view_30 = None
    getitem_31: "float32[]" = nll_loss_forward[0];  nll_loss_forward = None
    return (_scaled_dot_product_flash_attention_for_cpu_1_rng_state, bernoulli_p_2_rng_state, bernoulli_p_3_rng_state, getitem_31)
