import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_recompute(args):
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
        _scaled_dot_product_flash_attention_for_cpu_1_rng_state,  # uint8[5056]
        bernoulli_p_2_rng_state,  # uint8[5056]
        bernoulli_p_3_rng_state,  # uint8[5056]
    ) = args
    args.clear()
    # blocks.1.norm1 (again)
    native_layer_norm_5: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(add_1, [8], blocks_1_norm1_weight, blocks_1_norm1_bias, 1e-05);  blocks_1_norm1_weight = blocks_1_norm1_bias = None
    getitem_54: "float32[2, 4, 8]" = native_layer_norm_5[0]
    getitem_55: "float32[2, 4, 1]" = native_layer_norm_5[1]
    getitem_56: "float32[2, 4, 1]" = native_layer_norm_5[2];  native_layer_norm_5 = None
    # blocks.1.attention.key_value (again)
    view_72: "float32[8, 8]" = aten.view.default(getitem_54, [8, 8])
    t_55: "float32[8, 16]" = aten.t.default(blocks_1_attention_key_value_weight);  blocks_1_attention_key_value_weight = None
    addmm_10: "float32[8, 16]" = aten.addmm.default(blocks_1_attention_key_value_bias, view_72, t_55);  blocks_1_attention_key_value_bias = view_72 = t_55 = None
    view_73: "float32[2, 4, 16]" = aten.view.default(addmm_10, [2, 4, 16])
    # blocks.1.attention (again)
    split_2: "(float32[2, 4, 8], float32[2, 4, 8])" = aten.split.Tensor(view_73, 8, -1);  view_73 = None
    getitem_57: "float32[2, 4, 8]" = split_2[0]
    getitem_58: "float32[2, 4, 8]" = split_2[1];  split_2 = None
    # blocks.1.attention.query (again)
    view_74: "float32[8, 8]" = aten.view.default(getitem_54, [8, 8])
    t_56: "float32[8, 8]" = aten.t.default(blocks_1_attention_query_weight);  blocks_1_attention_query_weight = None
    addmm_11: "float32[8, 8]" = aten.addmm.default(blocks_1_attention_query_bias, view_74, t_56);  blocks_1_attention_query_bias = view_74 = t_56 = None
    view_75: "float32[2, 4, 8]" = aten.view.default(addmm_11, [2, 4, 8])
    # blocks.1.attention (again)
    view_76: "float32[2, 4, 2, 4]" = aten.view.default(view_75, [2, 4, 2, 4]);  view_75 = None
    transpose_16: "float32[2, 2, 4, 4]" = aten.transpose.int(view_76, 1, 2);  view_76 = None
    view_77: "float32[2, 4, 2, 4]" = aten.view.default(getitem_57, [2, 4, 2, 4]);  getitem_57 = None
    transpose_17: "float32[2, 2, 4, 4]" = aten.transpose.int(view_77, 1, 2);  view_77 = None
    view_78: "float32[2, 4, 2, 4]" = aten.view.default(getitem_58, [2, 4, 2, 4]);  getitem_58 = None
    transpose_18: "float32[2, 2, 4, 4]" = aten.transpose.int(view_78, 1, 2);  view_78 = None
    run_with_rng_state: "(float32[2, 2, 4, 4], float32[2, 2, 4])" = torch.ops.higher_order.run_with_rng_state(_scaled_dot_product_flash_attention_for_cpu_1_rng_state, aten._scaled_dot_product_flash_attention_for_cpu.default, transpose_16, transpose_17, transpose_18, 0.0, True);  _scaled_dot_product_flash_attention_for_cpu_1_rng_state = transpose_16 = transpose_17 = transpose_18 = None
    getitem_59: "float32[2, 2, 4, 4]" = run_with_rng_state[0]
    getitem_60: "float32[2, 2, 4]" = run_with_rng_state[1];  run_with_rng_state = None
    transpose_19: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_59, 1, 2)
    view_79: "float32[2, 4, 8]" = aten.view.default(transpose_19, [2, 4, 8]);  transpose_19 = None
    # blocks.1.attention.out (again)
    view_80: "float32[8, 8]" = aten.view.default(view_79, [8, 8]);  view_79 = None
    t_57: "float32[8, 8]" = aten.t.default(blocks_1_attention_out_weight);  blocks_1_attention_out_weight = None
    addmm_12: "float32[8, 8]" = aten.addmm.default(blocks_1_attention_out_bias, view_80, t_57);  blocks_1_attention_out_bias = view_80 = t_57 = None
    view_81: "float32[2, 4, 8]" = aten.view.default(addmm_12, [2, 4, 8]);  addmm_12 = None
    # blocks.1.dropout (again)
    full_default_4: "bool[]" = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default_4: "bool[2, 4, 8]" = aten.expand.default(full_default_4, [2, 4, 8]);  full_default_4 = None
    run_with_rng_state_1: "bool[2, 4, 8]" = torch.ops.higher_order.run_with_rng_state(bernoulli_p_2_rng_state, aten.bernoulli.p, expand_default_4, 0.9);  bernoulli_p_2_rng_state = expand_default_4 = None
    mul_tensor_16: "float32[2, 4, 8]" = aten.mul_.Tensor(view_81, run_with_rng_state_1);  view_81 = None
    mul_tensor_17: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor_16, 1.1111111640930176);  mul_tensor_16 = None
    # blocks.1 (again)
    add_11: "float32[2, 4, 8]" = aten.add.out(add_1, mul_tensor_17, out=mul_tensor_17);  add_1 = mul_tensor_17 = None
    # blocks.1.norm2 (again)
    native_layer_norm_6: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(add_11, [8], blocks_1_norm2_weight, blocks_1_norm2_bias, 1e-05);  blocks_1_norm2_weight = blocks_1_norm2_bias = None
    getitem_61: "float32[2, 4, 8]" = native_layer_norm_6[0]
    getitem_62: "float32[2, 4, 1]" = native_layer_norm_6[1]
    getitem_63: "float32[2, 4, 1]" = native_layer_norm_6[2];  native_layer_norm_6 = None
    # blocks.1.mlp.0 (again)
    view_82: "float32[8, 8]" = aten.view.default(getitem_61, [8, 8])
    t_58: "float32[8, 16]" = aten.t.default(blocks_1_mlp_0_weight);  blocks_1_mlp_0_weight = None
    addmm_13: "float32[8, 16]" = aten.addmm.default(blocks_1_mlp_0_bias, view_82, t_58);  blocks_1_mlp_0_bias = view_82 = t_58 = None
    view_83: "float32[2, 4, 16]" = aten.view.default(addmm_13, [2, 4, 16])
    # blocks.1.mlp.1 (again)
    gelu_2: "float32[2, 4, 16]" = aten.gelu.default(view_83);  view_83 = None
    # blocks.1.mlp.2 (again)
    view_84: "float32[8, 16]" = aten.view.default(gelu_2, [8, 16])
    t_59: "float32[16, 8]" = aten.t.default(blocks_1_mlp_2_weight);  blocks_1_mlp_2_weight = None
    addmm_14: "float32[8, 8]" = aten.addmm.default(blocks_1_mlp_2_bias, view_84, t_59);  blocks_1_mlp_2_bias = view_84 = t_59 = None
    view_85: "float32[2, 4, 8]" = aten.view.default(addmm_14, [2, 4, 8]);  addmm_14 = None
    # blocks.1.dropout (again)
    full_default_5: "bool[]" = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default_5: "bool[2, 4, 8]" = aten.expand.default(full_default_5, [2, 4, 8]);  full_default_5 = None
    run_with_rng_state_2: "bool[2, 4, 8]" = torch.ops.higher_order.run_with_rng_state(bernoulli_p_3_rng_state, aten.bernoulli.p, expand_default_5, 0.9);  bernoulli_p_3_rng_state = expand_default_5 = None
    mul_tensor_18: "float32[2, 4, 8]" = aten.mul_.Tensor(view_85, run_with_rng_state_2);  view_85 = None
    mul_tensor_19: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor_18, 1.1111111640930176);  mul_tensor_18 = None
    # blocks.1 (again)
    add_12: "float32[2, 4, 8]" = aten.add.out(add_11, mul_tensor_19, out=mul_tensor_19);  mul_tensor_19 = None
    # norm (again)
    native_layer_norm_7: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(add_12, [8], norm_weight, norm_bias, 1e-05);  norm_weight = norm_bias = None
    getitem_64: "float32[2, 4, 8]" = native_layer_norm_7[0]
    getitem_65: "float32[2, 4, 1]" = native_layer_norm_7[1]
    getitem_66: "float32[2, 4, 1]" = native_layer_norm_7[2];  native_layer_norm_7 = None
    # model (again)
    t_60: "float32[8, 16]" = aten.t.default(embedding_weight);  embedding_weight = None
    view_86: "float32[8, 8]" = aten.view.default(getitem_64, [8, 8])
    mm_23: "float32[8, 16]" = aten.mm.default(view_86, t_60);  view_86 = t_60 = None
    view_87: "int64[8]" = aten.view.default(targets, [8]);  targets = None
    _log_softmax_1: "float32[8, 16]" = aten._log_softmax.out(mm_23, 1, False, out=mm_23);  mm_23 = None
    nll_loss_forward_1: "(float32[], float32[])" = aten.nll_loss_forward.default(_log_softmax_1, view_87, None, 1, -100);  view_87 = None
    getitem_68: "float32[]" = nll_loss_forward_1[1];  nll_loss_forward_1 = None
    return (getitem_54, getitem_55, getitem_56, addmm_10, addmm_11, getitem_59, getitem_60, run_with_rng_state_1, add_11, getitem_61, getitem_62, getitem_63, addmm_13, gelu_2, run_with_rng_state_2, add_12, getitem_64, getitem_65, getitem_66, _log_softmax_1, getitem_68)
