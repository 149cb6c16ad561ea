import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_recompute(args):
    (
        embedding_weight,  # float32[16, 8]
        tokens,  # int64[2, 4]
        blocks_0_norm1_weight,  # float32[8]
        blocks_0_norm1_bias,  # float32[8]
        blocks_0_attention_key_value_weight,  # float32[16, 8]
        blocks_0_attention_key_value_bias,  # float32[16]
        blocks_0_attention_query_weight,  # float32[8, 8]
        blocks_0_attention_query_bias,  # float32[8]
        blocks_0_attention_out_weight,  # float32[8, 8]
        blocks_0_attention_out_bias,  # float32[8]
        blocks_0_norm2_weight,  # float32[8]
        blocks_0_norm2_bias,  # float32[8]
        blocks_0_mlp_0_weight,  # float32[16, 8]
        blocks_0_mlp_0_bias,  # float32[16]
        _scaled_dot_product_flash_attention_for_cpu_rng_state,  # uint8[5056]
        bernoulli_p_rng_state,  # uint8[5056]
        bernoulli_p_1_rng_state,  # uint8[5056]
    ) = args
    args.clear()
    # embedding (again)
    embedding_1: "float32[2, 4, 8]" = aten.embedding.default(embedding_weight, tokens);  embedding_weight = tokens = None
    # blocks.0.norm1 (again)
    native_layer_norm_8: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(embedding_1, [8], blocks_0_norm1_weight, blocks_0_norm1_bias, 1e-05);  blocks_0_norm1_weight = blocks_0_norm1_bias = None
    getitem_69: "float32[2, 4, 8]" = native_layer_norm_8[0]
    getitem_70: "float32[2, 4, 1]" = native_layer_norm_8[1]
    getitem_71: "float32[2, 4, 1]" = native_layer_norm_8[2];  native_layer_norm_8 = None
    # blocks.0.attention.key_value (again)
    view_88: "float32[8, 8]" = aten.view.default(getitem_69, [8, 8])
    t_61: "float32[8, 16]" = aten.t.default(blocks_0_attention_key_value_weight);  blocks_0_attention_key_value_weight = None
    addmm_15: "float32[8, 16]" = aten.addmm.default(blocks_0_attention_key_value_bias, view_88, t_61);  blocks_0_attention_key_value_bias = view_88 = t_61 = None
    view_89: "float32[2, 4, 16]" = aten.view.default(addmm_15, [2, 4, 16])
    # blocks.0.attention (again)
    split_3: "(float32[2, 4, 8], float32[2, 4, 8])" = aten.split.Tensor(view_89, 8, -1);  view_89 = None
    getitem_72: "float32[2, 4, 8]" = split_3[0]
    getitem_73: "float32[2, 4, 8]" = split_3[1];  split_3 = None
    # blocks.0.attention.query (again)
    view_90: "float32[8, 8]" = aten.view.default(getitem_69, [8, 8])
    t_62: "float32[8, 8]" = aten.t.default(blocks_0_attention_query_weight);  blocks_0_attention_query_weight = None
    addmm_16: "float32[8, 8]" = aten.addmm.default(blocks_0_attention_query_bias, view_90, t_62);  blocks_0_attention_query_bias = view_90 = t_62 = None
    view_91: "float32[2, 4, 8]" = aten.view.default(addmm_16, [2, 4, 8])
    # blocks.0.attention (again)
    view_92: "float32[2, 4, 2, 4]" = aten.view.default(view_91, [2, 4, 2, 4]);  view_91 = None
    transpose_20: "float32[2, 2, 4, 4]" = aten.transpose.int(view_92, 1, 2);  view_92 = None
    view_93: "float32[2, 4, 2, 4]" = aten.view.default(getitem_72, [2, 4, 2, 4]);  getitem_72 = None
    transpose_21: "float32[2, 2, 4, 4]" = aten.transpose.int(view_93, 1, 2);  view_93 = None
    view_94: "float32[2, 4, 2, 4]" = aten.view.default(getitem_73, [2, 4, 2, 4]);  getitem_73 = None
    transpose_22: "float32[2, 2, 4, 4]" = aten.transpose.int(view_94, 1, 2);  view_94 = None
    run_with_rng_state_3: "(float32[2, 2, 4, 4], float32[2, 2, 4])" = torch.ops.higher_order.run_with_rng_state(_scaled_dot_product_flash_attention_for_cpu_rng_state, aten._scaled_dot_product_flash_attention_for_cpu.default, transpose_20, transpose_21, transpose_22, 0.0, True);  _scaled_dot_product_flash_attention_for_cpu_rng_state = transpose_20 = transpose_21 = transpose_22 = None
    getitem_74: "float32[2, 2, 4, 4]" = run_with_rng_state_3[0]
    getitem_75: "float32[2, 2, 4]" = run_with_rng_state_3[1];  run_with_rng_state_3 = None
    transpose_23: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_74, 1, 2)
    view_95: "float32[2, 4, 8]" = aten.view.default(transpose_23, [2, 4, 8]);  transpose_23 = None
    # blocks.0.attention.out (again)
    view_96: "float32[8, 8]" = aten.view.default(view_95, [8, 8]);  view_95 = None
    t_63: "float32[8, 8]" = aten.t.default(blocks_0_attention_out_weight);  blocks_0_attention_out_weight = None
    addmm_17: "float32[8, 8]" = aten.addmm.default(blocks_0_attention_out_bias, view_96, t_63);  blocks_0_attention_out_bias = view_96 = t_63 = None
    view_97: "float32[2, 4, 8]" = aten.view.default(addmm_17, [2, 4, 8]);  addmm_17 = None
    # blocks.0.dropout (again)
    full_default_6: "bool[]" = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default_6: "bool[2, 4, 8]" = aten.expand.default(full_default_6, [2, 4, 8]);  full_default_6 = None
    run_with_rng_state_4: "bool[2, 4, 8]" = torch.ops.higher_order.run_with_rng_state(bernoulli_p_rng_state, aten.bernoulli.p, expand_default_6, 0.9);  bernoulli_p_rng_state = expand_default_6 = None
    mul_tensor_20: "float32[2, 4, 8]" = aten.mul_.Tensor(view_97, run_with_rng_state_4);  view_97 = None
    mul_tensor_21: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor_20, 1.1111111640930176);  mul_tensor_20 = None
    # blocks.0 (again)
    add_13: "float32[2, 4, 8]" = aten.add.out(embedding_1, mul_tensor_21, out=mul_tensor_21);  mul_tensor_21 = None
    # blocks.0.norm2 (again)
    native_layer_norm_9: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(add_13, [8], blocks_0_norm2_weight, blocks_0_norm2_bias, 1e-05);  blocks_0_norm2_weight = blocks_0_norm2_bias = None
    getitem_76: "float32[2, 4, 8]" = native_layer_norm_9[0]
    getitem_77: "float32[2, 4, 1]" = native_layer_norm_9[1]
    getitem_78: "float32[2, 4, 1]" = native_layer_norm_9[2];  native_layer_norm_9 = None
    # blocks.0.mlp.0 (again)
    view_98: "float32[8, 8]" = aten.view.default(getitem_76, [8, 8])
    t_64: "float32[8, 16]" = aten.t.default(blocks_0_mlp_0_weight);  blocks_0_mlp_0_weight = None
    addmm_18: "float32[8, 16]" = aten.addmm.default(blocks_0_mlp_0_bias, view_98, t_64);  blocks_0_mlp_0_bias = view_98 = t_64 = None
    view_99: "float32[2, 4, 16]" = aten.view.default(addmm_18, [2, 4, 16])
    # blocks.0.mlp.1 (again)
    gelu_3: "float32[2, 4, 16]" = aten.gelu.default(view_99);  view_99 = None
    # blocks.0.dropout (again)
    full_default_7: "bool[]" = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default_7: "bool[2, 4, 8]" = aten.expand.default(full_default_7, [2, 4, 8]);  full_default_7 = None
    run_with_rng_state_5: "bool[2, 4, 8]" = torch.ops.higher_order.run_with_rng_state(bernoulli_p_1_rng_state, aten.bernoulli.p, expand_default_7, 0.9);  bernoulli_p_1_rng_state = expand_default_7 = None
    return (embedding_1, getitem_69, getitem_70, getitem_71, addmm_15, addmm_16, getitem_74, getitem_75, run_with_rng_state_4, add_13, getitem_76, getitem_77, getitem_78, addmm_18, gelu_3, run_with_rng_state_5)
