import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        tokens,  # int64[2, 4]
        blocks_0_norm1_weight,  # float32[8]
        blocks_0_norm1_bias,  # float32[8]
        blocks_0_attention_key_value_weight,  # float32[16, 8]
        blocks_0_attention_query_weight,  # float32[8, 8]
        blocks_0_attention_out_weight,  # float32[8, 8]
        blocks_0_norm2_weight,  # float32[8]
        blocks_0_norm2_bias,  # float32[8]
        blocks_0_mlp_0_weight,  # float32[16, 8]
        blocks_0_mlp_2_weight,  # float32[8, 16]
        embedding_1,  # float32[2, 4, 8]
        getitem_69,  # float32[2, 4, 8]
        getitem_70,  # float32[2, 4, 1]
        getitem_71,  # float32[2, 4, 1]
        addmm_15,  # float32[8, 16]
        addmm_16,  # float32[8, 8]
        getitem_74,  # float32[2, 2, 4, 4]
        getitem_75,  # float32[2, 2, 4]
        run_with_rng_state_4,  # bool[2, 4, 8]
        add_13,  # float32[2, 4, 8]
        getitem_76,  # float32[2, 4, 8]
        getitem_77,  # float32[2, 4, 1]
        getitem_78,  # float32[2, 4, 1]
        addmm_18,  # float32[8, 16]
        gelu_3,  # float32[2, 4, 16]
        run_with_rng_state_5,  # bool[2, 4, 8]
        mm_1,  # float32[16, 8]
        add_6,  # float32[2, 4, 8]
    ) = args
    args.clear()
    # blocks.0.attention.key_value (again)
    view_111: "float32[8, 8]" = aten.view.default(getitem_69, [8, 8])
    view_110: "float32[2, 4, 16]" = aten.view.default(addmm_15, [2, 4, 16]);  addmm_15 = None
    # blocks.0.attention (again)
    split_4: "(float32[2, 4, 8], float32[2, 4, 8])" = aten.split.Tensor(view_110, 8, -1);  view_110 = None
    getitem_80: "float32[2, 4, 8]" = split_4[0]
    getitem_79: "float32[2, 4, 8]" = split_4[1];  split_4 = None
    # blocks.0.attention.query (again)
    view_109: "float32[8, 8]" = aten.view.default(getitem_69, [8, 8]);  getitem_69 = None
    view_108: "float32[2, 4, 8]" = aten.view.default(addmm_16, [2, 4, 8]);  addmm_16 = None
    # blocks.0.attention (again)
    view_107: "float32[2, 4, 2, 4]" = aten.view.default(view_108, [2, 4, 2, 4]);  view_108 = None
    transpose_27: "float32[2, 2, 4, 4]" = aten.transpose.int(view_107, 1, 2);  view_107 = None
    view_106: "float32[2, 4, 2, 4]" = aten.view.default(getitem_80, [2, 4, 2, 4]);  getitem_80 = None
    transpose_26: "float32[2, 2, 4, 4]" = aten.transpose.int(view_106, 1, 2);  view_106 = None
    view_105: "float32[2, 4, 2, 4]" = aten.view.default(getitem_79, [2, 4, 2, 4]);  getitem_79 = None
    transpose_25: "float32[2, 2, 4, 4]" = aten.transpose.int(view_105, 1, 2);  view_105 = None
    transpose_24: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_74, 1, 2)
    view_104: "float32[2, 4, 8]" = aten.view.default(transpose_24, [2, 4, 8]);  transpose_24 = None
    # blocks.0.attention.out (again)
    view_103: "float32[8, 8]" = aten.view.default(view_104, [8, 8]);  view_104 = None
    # blocks.0.mlp.0 (again)
    view_102: "float32[8, 8]" = aten.view.default(getitem_76, [8, 8]);  getitem_76 = None
    view_101: "float32[2, 4, 16]" = aten.view.default(addmm_18, [2, 4, 16]);  addmm_18 = None
    # blocks.0.mlp.2 (again)
    view_100: "float32[8, 16]" = aten.view.default(gelu_3, [8, 16]);  gelu_3 = None
    # blocks.0.dropout
    mul_tensor_12: "float32[2, 4, 8]" = aten.mul.Tensor(add_6, run_with_rng_state_5);  run_with_rng_state_5 = None
    mul_tensor_13: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor_12, 1.1111111111111112);  mul_tensor_12 = None
    # blocks.0.mlp.2
    view_53: "float32[8, 8]" = aten.view.default(mul_tensor_13, [8, 8]);  mul_tensor_13 = None
    mm_13: "float32[8, 16]" = aten.mm.default(view_53, blocks_0_mlp_2_weight);  blocks_0_mlp_2_weight = None
    t_36: "float32[8, 8]" = aten.t.default(view_53)
    mm_14: "float32[8, 16]" = aten.mm.default(t_36, view_100);  t_36 = view_100 = None
    sum_6: "float32[1, 8]" = aten.sum.dim_IntList(view_53, [0], True);  view_53 = None
    view_54: "float32[8]" = aten.view.default(sum_6, [8]);  sum_6 = None
    view_55: "float32[2, 4, 16]" = aten.view.default(mm_13, [2, 4, 16]);  mm_13 = None
    # blocks.0.mlp.1
    gelu_backward_1: "float32[2, 4, 16]" = aten.gelu_backward.grad_input(view_55, view_101, grad_input=view_55);  view_55 = view_101 = None
    # blocks.0.mlp.0
    view_56: "float32[8, 16]" = aten.view.default(gelu_backward_1, [8, 16]);  gelu_backward_1 = None
    mm_15: "float32[8, 8]" = aten.mm.default(view_56, blocks_0_mlp_0_weight);  blocks_0_mlp_0_weight = None
    t_40: "float32[16, 8]" = aten.t.default(view_56)
    mm_16: "float32[16, 8]" = aten.mm.default(t_40, view_102);  t_40 = view_102 = None
    sum_7: "float32[1, 16]" = aten.sum.dim_IntList(view_56, [0], True);  view_56 = None
    view_57: "float32[16]" = aten.view.default(sum_7, [16]);  sum_7 = None
    view_58: "float32[2, 4, 8]" = aten.view.default(mm_15, [2, 4, 8]);  mm_15 = None
    # blocks.0.norm2
    native_layer_norm_backward_3: "(float32[2, 4, 8], float32[8], float32[8])" = aten.native_layer_norm_backward.default(view_58, add_13, [8], getitem_77, getitem_78, blocks_0_norm2_weight, blocks_0_norm2_bias, [True, True, True]);  view_58 = add_13 = getitem_77 = getitem_78 = blocks_0_norm2_weight = blocks_0_norm2_bias = None
    getitem_45: "float32[2, 4, 8]" = native_layer_norm_backward_3[0]
    getitem_46: "float32[8]" = native_layer_norm_backward_3[1]
    getitem_47: "float32[8]" = native_layer_norm_backward_3[2];  native_layer_norm_backward_3 = None
    # model
    add_7: "float32[2, 4, 8]" = aten.add.out(add_6, getitem_45, out=getitem_45);  add_6 = getitem_45 = None
    # blocks.0.dropout
    mul_tensor_14: "float32[2, 4, 8]" = aten.mul.Tensor(add_7, run_with_rng_state_4);  run_with_rng_state_4 = None
    mul_tensor_15: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor_14, 1.1111111111111112);  mul_tensor_14 = None
    # blocks.0.attention.out
    view_59: "float32[8, 8]" = aten.view.default(mul_tensor_15, [8, 8]);  mul_tensor_15 = None
    mm_17: "float32[8, 8]" = aten.mm.default(view_59, blocks_0_attention_out_weight);  blocks_0_attention_out_weight = None
    t_44: "float32[8, 8]" = aten.t.default(view_59)
    mm_18: "float32[8, 8]" = aten.mm.default(t_44, view_103);  t_44 = view_103 = None
    sum_8: "float32[1, 8]" = aten.sum.dim_IntList(view_59, [0], True);  view_59 = None
    view_60: "float32[8]" = aten.view.default(sum_8, [8]);  sum_8 = None
    view_61: "float32[2, 4, 8]" = aten.view.default(mm_17, [2, 4, 8]);  mm_17 = None
    # blocks.0.attention
    view_62: "float32[2, 4, 2, 4]" = aten.view.default(view_61, [2, 4, 2, 4]);  view_61 = None
    transpose_12: "float32[2, 2, 4, 4]" = aten.transpose.int(view_62, 1, 2);  view_62 = None
    _scaled_dot_product_flash_attention_for_cpu_backward_1: "(float32[2, 2, 4, 4], float32[2, 2, 4, 4], float32[2, 2, 4, 4])" = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(transpose_12, transpose_27, transpose_26, transpose_25, getitem_74, getitem_75, 0.0, True);  transpose_12 = transpose_27 = transpose_26 = transpose_25 = getitem_74 = getitem_75 = None
    getitem_48: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward_1[0]
    getitem_49: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward_1[1]
    getitem_50: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward_1[2];  _scaled_dot_product_flash_attention_for_cpu_backward_1 = None
    transpose_13: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_50, 1, 2);  getitem_50 = None
    view_63: "float32[2, 4, 8]" = aten.view.default(transpose_13, [2, 4, 8]);  transpose_13 = None
    transpose_14: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_49, 1, 2);  getitem_49 = None
    view_64: "float32[2, 4, 8]" = aten.view.default(transpose_14, [2, 4, 8]);  transpose_14 = None
    transpose_15: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_48, 1, 2);  getitem_48 = None
    view_65: "float32[2, 4, 8]" = aten.view.default(transpose_15, [2, 4, 8]);  transpose_15 = None
    # blocks.0.attention.query
    view_66: "float32[8, 8]" = aten.view.default(view_65, [8, 8]);  view_65 = None
    mm_19: "float32[8, 8]" = aten.mm.default(view_66, blocks_0_attention_query_weight);  blocks_0_attention_query_weight = None
    t_48: "float32[8, 8]" = aten.t.default(view_66)
    mm_20: "float32[8, 8]" = aten.mm.default(t_48, view_109);  t_48 = view_109 = None
    sum_9: "float32[1, 8]" = aten.sum.dim_IntList(view_66, [0], True);  view_66 = None
    view_67: "float32[8]" = aten.view.default(sum_9, [8]);  sum_9 = None
    view_68: "float32[2, 4, 8]" = aten.view.default(mm_19, [2, 4, 8]);  mm_19 = None
    # blocks.0.attention
    cat_1: "float32[2, 4, 16]" = aten.cat.default([view_64, view_63], 2);  view_64 = view_63 = None
    # blocks.0.attention.key_value
    view_69: "float32[8, 16]" = aten.view.default(cat_1, [8, 16]);  cat_1 = None
    mm_21: "float32[8, 8]" = aten.mm.default(view_69, blocks_0_attention_key_value_weight);  blocks_0_attention_key_value_weight = None
    t_52: "float32[16, 8]" = aten.t.default(view_69)
    mm_22: "float32[16, 8]" = aten.mm.default(t_52, view_111);  t_52 = view_111 = None
    sum_10: "float32[1, 16]" = aten.sum.dim_IntList(view_69, [0], True);  view_69 = None
    view_70: "float32[16]" = aten.view.default(sum_10, [16]);  sum_10 = None
    view_71: "float32[2, 4, 8]" = aten.view.default(mm_21, [2, 4, 8]);  mm_21 = None
    # model
    add_8: "float32[2, 4, 8]" = aten.add_.Tensor(view_68, view_71);  view_68 = view_71 = None
    # blocks.0.norm1
    native_layer_norm_backward_4: "(float32[2, 4, 8], float32[8], float32[8])" = aten.native_layer_norm_backward.default(add_8, embedding_1, [8], getitem_70, getitem_71, blocks_0_norm1_weight, blocks_0_norm1_bias, [True, True, True]);  add_8 = embedding_1 = getitem_70 = getitem_71 = blocks_0_norm1_weight = blocks_0_norm1_bias = None
    getitem_51: "float32[2, 4, 8]" = native_layer_norm_backward_4[0]
    getitem_52: "float32[8]" = native_layer_norm_backward_4[1]
    getitem_53: "float32[8]" = native_layer_norm_backward_4[2];  native_layer_norm_backward_4 = None
    # model
    add_9: "float32[2, 4, 8]" = aten.add_.Tensor(add_7, getitem_51);  add_7 = getitem_51 = None
    # embedding
    embedding_dense_backward: "float32[16, 8]" = aten.embedding_dense_backward.default(add_9, tokens, 16, -1, False);  add_9 = tokens = None
    # model
    add_10: "float32[16, 8]" = aten.add.out(mm_1, embedding_dense_backward, out=embedding_dense_backward);  mm_1 = embedding_dense_backward = None
    return (mm_14, view_54, mm_16, view_57, getitem_46, getitem_47, mm_18, view_60, mm_20, view_67, mm_22, view_70, getitem_52, getitem_53, add_10)
