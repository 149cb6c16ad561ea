import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
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
        blocks_0_mlp_2_weight,  # float32[8, 16]
        blocks_0_mlp_2_bias,  # float32[8]
    ) = args
    args.clear()
    # embedding
    embedding: "float32[2, 4, 8]" = aten.embedding.default(embedding_weight, tokens);  embedding_weight = tokens = None
    # blocks.0.norm1
    native_layer_norm: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(embedding, [8], blocks_0_norm1_weight, blocks_0_norm1_bias, 1e-05);  blocks_0_norm1_weight = blocks_0_norm1_bias = None
    getitem: "float32[2, 4, 8]" = native_layer_norm[0];  native_layer_norm = None
    # blocks.0.attention.key_value
    view: "float32[8, 8]" = aten.view.default(getitem, [8, 8])
    t: "float32[8, 16]" = aten.t.default(blocks_0_attention_key_value_weight);  blocks_0_attention_key_value_weight = None
    addmm: "float32[8, 16]" = aten.addmm.default(blocks_0_attention_key_value_bias, view, t);  blocks_0_attention_key_value_bias = view = t = None
    view_1: "float32[2, 4, 16]" = aten.view.default(addmm, [2, 4, 16]);  addmm = None
    # blocks.0.attention
    split: "(float32[2, 4, 8], float32[2, 4, 8])" = aten.split.Tensor(view_1, 8, -1);  view_1 = None
    getitem_3: "float32[2, 4, 8]" = split[0]
    getitem_4: "float32[2, 4, 8]" = split[1];  split = None
    # blocks.0.attention.query
    view_2: "float32[8, 8]" = aten.view.default(getitem, [8, 8]);  getitem = None
    t_1: "float32[8, 8]" = aten.t.default(blocks_0_attention_query_weight);  blocks_0_attention_query_weight = None
    addmm_1: "float32[8, 8]" = aten.addmm.default(blocks_0_attention_query_bias, view_2, t_1);  blocks_0_attention_query_bias = view_2 = t_1 = None
    view_3: "float32[2, 4, 8]" = aten.view.default(addmm_1, [2, 4, 8]);  addmm_1 = None
    # blocks.0.attention
    view_4: "float32[2, 4, 2, 4]" = aten.view.default(view_3, [2, 4, 2, 4]);  view_3 = None
    transpose: "float32[2, 2, 4, 4]" = aten.transpose.int(view_4, 1, 2);  view_4 = None
    view_5: "float32[2, 4, 2, 4]" = aten.view.default(getitem_3, [2, 4, 2, 4]);  getitem_3 = None
    transpose_1: "float32[2, 2, 4, 4]" = aten.transpose.int(view_5, 1, 2);  view_5 = None
    view_6: "float32[2, 4, 2, 4]" = aten.view.default(getitem_4, [2, 4, 2, 4]);  getitem_4 = None
    transpose_2: "float32[2, 2, 4, 4]" = aten.transpose.int(view_6, 1, 2);  view_6 = None
    run_and_save_rng_state_3: "(uint8[5056], (float32[2, 2, 4, 4], float32[2, 2, 4]))" = torch.ops.higher_order.run_and_save_rng_state(aten._scaled_dot_product_flash_attention_for_cpu.default, transpose, transpose_1, transpose_2, 0.0, True);  transpose = transpose_1 = transpose_2 = None
    _scaled_dot_product_flash_attention_for_cpu_rng_state: "uint8[5056]" = run_and_save_rng_state_3[0]
    getitem_86: "(float32[2, 2, 4, 4], float32[2, 2, 4])" = run_and_save_rng_state_3[1];  run_and_save_rng_state_3 = None
    getitem_5: "float32[2, 2, 4, 4]" = getitem_86[0];  getitem_86 = None
    transpose_3: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_5, 1, 2);  getitem_5 = None
    view_7: "float32[2, 4, 8]" = aten.view.default(transpose_3, [2, 4, 8]);  transpose_3 = None
    # blocks.0.attention.out
    view_8: "float32[8, 8]" = aten.view.default(view_7, [8, 8]);  view_7 = None
    t_2: "float32[8, 8]" = aten.t.default(blocks_0_attention_out_weight);  blocks_0_attention_out_weight = None
    addmm_2: "float32[8, 8]" = aten.addmm.default(blocks_0_attention_out_bias, view_8, t_2);  blocks_0_attention_out_bias = view_8 = t_2 = None
    view_9: "float32[2, 4, 8]" = aten.view.default(addmm_2, [2, 4, 8]);  addmm_2 = None
    # blocks.0.dropout
    full_default: "bool[]" = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default: "bool[2, 4, 8]" = aten.expand.default(full_default, [2, 4, 8]);  full_default = None
    run_and_save_rng_state_4: "(uint8[5056], bool[2, 4, 8])" = torch.ops.higher_order.run_and_save_rng_state(aten.bernoulli.p, expand_default, 0.9);  expand_default = None
    bernoulli_p_rng_state: "uint8[5056]" = run_and_save_rng_state_4[0]
    getitem_87: "bool[2, 4, 8]" = run_and_save_rng_state_4[1];  run_and_save_rng_state_4 = None
    mul_tensor: "float32[2, 4, 8]" = aten.mul_.Tensor(view_9, getitem_87);  view_9 = getitem_87 = None
    mul_tensor_1: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor, 1.1111111640930176);  mul_tensor = None
    # blocks.0
    add: "float32[2, 4, 8]" = aten.add_.Tensor(embedding, mul_tensor_1);  embedding = mul_tensor_1 = None
    # blocks.0.norm2
    native_layer_norm_1: "(float32[2, 4, 8], float32[2, 4, 1], float32[2, 4, 1])" = aten.native_layer_norm.default(add, [8], blocks_0_norm2_weight, blocks_0_norm2_bias, 1e-05);  blocks_0_norm2_weight = blocks_0_norm2_bias = None
    getitem_9: "float32[2, 4, 8]" = native_layer_norm_1[0];  native_layer_norm_1 = None
    # blocks.0.mlp.0
    view_10: "float32[8, 8]" = aten.view.default(getitem_9, [8, 8]);  getitem_9 = None
    t_3: "float32[8, 16]" = aten.t.default(blocks_0_mlp_0_weight);  blocks_0_mlp_0_weight = None
    addmm_3: "float32[8, 16]" = aten.addmm.default(blocks_0_mlp_0_bias, view_10, t_3);  blocks_0_mlp_0_bias = view_10 = t_3 = None
    view_11: "float32[2, 4, 16]" = aten.view.default(addmm_3, [2, 4, 16]);  addmm_3 = None
    # blocks.0.mlp.1
    gelu: "float32[2, 4, 16]" = aten.gelu_.default(view_11);  view_11 = None
    # blocks.0.mlp.2
    view_12: "float32[8, 16]" = aten.view.default(gelu, [8, 16]);  gelu = None
    t_4: "float32[16, 8]" = aten.t.default(blocks_0_mlp_2_weight);  blocks_0_mlp_2_weight = None
    addmm_4: "float32[8, 8]" = aten.addmm.default(blocks_0_mlp_2_bias, view_12, t_4);  blocks_0_mlp_2_bias = view_12 = t_4 = None
    view_13: "float32[2, 4, 8]" = aten.view.default(addmm_4, [2, 4, 8]);  addmm_4 = None
    # blocks.0.dropout
    full_default_1: "bool[]" = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default_1: "bool[2, 4, 8]" = aten.expand.default(full_default_1, [2, 4, 8]);  full_default_1 = None
    run_and_save_rng_state_5: "(uint8[5056], bool[2, 4, 8])" = torch.ops.higher_order.run_and_save_rng_state(aten.bernoulli.p, expand_default_1, 0.9);  expand_default_1 = None
    bernoulli_p_1_rng_state: "uint8[5056]" = run_and_save_rng_state_5[0]
    getitem_88: "bool[2, 4, 8]" = run_and_save_rng_state_5[1];  run_and_save_rng_state_5 = None
    mul_tensor_2: "float32[2, 4, 8]" = aten.mul_.Tensor(view_13, getitem_88);  view_13 = getitem_88 = None
    mul_tensor_3: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor_2, 1.1111111640930176);  mul_tensor_2 = None
    # blocks.0
    add_1: "float32[2, 4, 8]" = aten.add_.Tensor(add, mul_tensor_3);  add = mul_tensor_3 = None
    return (_scaled_dot_product_flash_attention_for_cpu_rng_state, bernoulli_p_rng_state, bernoulli_p_1_rng_state, add_1)
