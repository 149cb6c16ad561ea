import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_backward(args):
    (
        decoder_0_norm1_weight,  # float32[8]
        decoder_0_norm1_bias,  # float32[8]
        target,  # float32[2, 4, 8]
        decoder_0_attention_key_value_weight,  # float32[16, 8]
        decoder_0_attention_query_weight,  # float32[8, 8]
        decoder_0_attention_out_weight,  # float32[8, 8]
        decoder_0_norm2_weight,  # float32[8]
        decoder_0_norm2_bias,  # float32[8]
        decoder_0_mlp_0_weight,  # float32[16, 8]
        decoder_0_mlp_2_weight,  # float32[8, 16]
        cross_0_key_value_weight,  # float32[16, 8]
        cross_0_query_weight,  # float32[8, 8]
        cross_0_out_weight,  # float32[8, 8]
        tangents_1,  # float32[]
        add_1,  # float32[2, 3, 8]
        getitem_45,  # float32[2, 4, 8]
        getitem_46,  # float32[2, 4, 1]
        getitem_47,  # float32[2, 4, 1]
        addmm_13,  # float32[8, 16]
        addmm_14,  # float32[8, 8]
        getitem_50,  # float32[2, 2, 4, 4]
        getitem_51,  # float32[2, 2, 4]
        add_9,  # float32[2, 4, 8]
        getitem_52,  # float32[2, 4, 8]
        getitem_53,  # float32[2, 4, 1]
        getitem_54,  # float32[2, 4, 1]
        addmm_16,  # float32[8, 16]
        gelu_2,  # float32[2, 4, 16]
        add_10,  # float32[2, 4, 8]
        addmm_18,  # float32[6, 16]
        addmm_19,  # float32[8, 8]
        getitem_57,  # float32[2, 2, 4, 4]
        getitem_58,  # float32[2, 2, 4]
        mul,  # float32[2, 4, 8]
    ) = args
    args.clear()
    # decoder.0.attention.key_value (again)
    view_157: "float32[8, 8]" = aten.view.default(getitem_45, [8, 8])
    view_156: "float32[2, 4, 16]" = aten.view.default(addmm_13, [2, 4, 16]);  addmm_13 = None
    # decoder.0.attention (again)
    split_8: "(float32[2, 4, 8], float32[2, 4, 8])" = aten.split.Tensor(view_156, 8, -1);  view_156 = None
    getitem_74: "float32[2, 4, 8]" = split_8[0]
    getitem_73: "float32[2, 4, 8]" = split_8[1];  split_8 = None
    # decoder.0.attention.query (again)
    view_155: "float32[8, 8]" = aten.view.default(getitem_45, [8, 8]);  getitem_45 = None
    view_154: "float32[2, 4, 8]" = aten.view.default(addmm_14, [2, 4, 8]);  addmm_14 = None
    # decoder.0.attention (again)
    view_153: "float32[2, 4, 2, 4]" = aten.view.default(view_154, [2, 4, 2, 4]);  view_154 = None
    transpose_47: "float32[2, 2, 4, 4]" = aten.transpose.int(view_153, 1, 2);  view_153 = None
    view_152: "float32[2, 4, 2, 4]" = aten.view.default(getitem_74, [2, 4, 2, 4]);  getitem_74 = None
    transpose_46: "float32[2, 2, 4, 4]" = aten.transpose.int(view_152, 1, 2);  view_152 = None
    view_151: "float32[2, 4, 2, 4]" = aten.view.default(getitem_73, [2, 4, 2, 4]);  getitem_73 = None
    transpose_45: "float32[2, 2, 4, 4]" = aten.transpose.int(view_151, 1, 2);  view_151 = None
    transpose_44: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_50, 1, 2)
    view_150: "float32[2, 4, 8]" = aten.view.default(transpose_44, [2, 4, 8]);  transpose_44 = None
    # decoder.0.attention.out (again)
    view_149: "float32[8, 8]" = aten.view.default(view_150, [8, 8]);  view_150 = None
    # decoder.0.mlp.0 (again)
    view_148: "float32[8, 8]" = aten.view.default(getitem_52, [8, 8]);  getitem_52 = None
    view_147: "float32[2, 4, 16]" = aten.view.default(addmm_16, [2, 4, 16]);  addmm_16 = None
    # decoder.0.mlp.2 (again)
    view_146: "float32[8, 16]" = aten.view.default(gelu_2, [8, 16]);  gelu_2 = None
    # cross.0.key_value (again)
    view_145: "float32[6, 8]" = aten.view.default(add_1, [6, 8]);  add_1 = None
    view_144: "float32[2, 3, 16]" = aten.view.default(addmm_18, [2, 3, 16]);  addmm_18 = None
    # cross.0 (again)
    split_7: "(float32[2, 3, 8], float32[2, 3, 8])" = aten.split.Tensor(view_144, 8, -1);  view_144 = None
    getitem_72: "float32[2, 3, 8]" = split_7[0]
    getitem_71: "float32[2, 3, 8]" = split_7[1];  split_7 = None
    # cross.0.query (again)
    view_143: "float32[8, 8]" = aten.view.default(add_10, [8, 8]);  add_10 = None
    view_142: "float32[2, 4, 8]" = aten.view.default(addmm_19, [2, 4, 8]);  addmm_19 = None
    # cross.0 (again)
    view_141: "float32[2, 4, 2, 4]" = aten.view.default(view_142, [2, 4, 2, 4]);  view_142 = None
    transpose_43: "float32[2, 2, 4, 4]" = aten.transpose.int(view_141, 1, 2);  view_141 = None
    view_140: "float32[2, 3, 2, 4]" = aten.view.default(getitem_72, [2, 3, 2, 4]);  getitem_72 = None
    transpose_42: "float32[2, 2, 3, 4]" = aten.transpose.int(view_140, 1, 2);  view_140 = None
    view_139: "float32[2, 3, 2, 4]" = aten.view.default(getitem_71, [2, 3, 2, 4]);  getitem_71 = None
    transpose_41: "float32[2, 2, 3, 4]" = aten.transpose.int(view_139, 1, 2);  view_139 = None
    transpose_40: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_57, 1, 2)
    view_138: "float32[2, 4, 8]" = aten.view.default(transpose_40, [2, 4, 8]);  transpose_40 = None
    # cross.0.out (again)
    view_137: "float32[8, 8]" = aten.view.default(view_138, [8, 8]);  view_138 = None
    # model
    expand: "float32[2, 4, 8]" = aten.expand.default(tangents_1, [2, 4, 8]);  tangents_1 = None
    div: "float32[2, 4, 8]" = aten.div.Scalar(expand, 64);  expand = None
    mul_1: "float32[2, 4, 8]" = aten.mul_.Tensor(div, mul);  div = mul = None
    # cross.0.out
    view_38: "float32[8, 8]" = aten.view.default(mul_1, [8, 8]);  mul_1 = None
    mm: "float32[8, 8]" = aten.mm.default(view_38, cross_0_out_weight);  cross_0_out_weight = None
    t_14: "float32[8, 8]" = aten.t.default(view_38)
    mm_1: "float32[8, 8]" = aten.mm.default(t_14, view_137);  t_14 = view_137 = None
    sum_1: "float32[1, 8]" = aten.sum.dim_IntList(view_38, [0], True);  view_38 = None
    view_39: "float32[8]" = aten.view.default(sum_1, [8]);  sum_1 = None
    view_40: "float32[2, 4, 8]" = aten.view.default(mm, [2, 4, 8]);  mm = None
    # cross.0
    view_41: "float32[2, 4, 2, 4]" = aten.view.default(view_40, [2, 4, 2, 4]);  view_40 = None
    transpose_12: "float32[2, 2, 4, 4]" = aten.transpose.int(view_41, 1, 2);  view_41 = None
    _scaled_dot_product_flash_attention_for_cpu_backward: "(float32[2, 2, 4, 4], float32[2, 2, 3, 4], float32[2, 2, 3, 4])" = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(transpose_12, transpose_43, transpose_42, transpose_41, getitem_57, getitem_58, 0.0, False);  transpose_12 = transpose_43 = transpose_42 = transpose_41 = getitem_57 = getitem_58 = None
    getitem_24: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward[0]
    getitem_25: "float32[2, 2, 3, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward[1]
    getitem_26: "float32[2, 2, 3, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward[2];  _scaled_dot_product_flash_attention_for_cpu_backward = None
    transpose_13: "float32[2, 3, 2, 4]" = aten.transpose.int(getitem_26, 1, 2);  getitem_26 = None
    view_42: "float32[2, 3, 8]" = aten.view.default(transpose_13, [2, 3, 8]);  transpose_13 = None
    transpose_14: "float32[2, 3, 2, 4]" = aten.transpose.int(getitem_25, 1, 2);  getitem_25 = None
    view_43: "float32[2, 3, 8]" = aten.view.default(transpose_14, [2, 3, 8]);  transpose_14 = None
    transpose_15: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_24, 1, 2);  getitem_24 = None
    view_44: "float32[2, 4, 8]" = aten.view.default(transpose_15, [2, 4, 8]);  transpose_15 = None
    # cross.0.query
    view_45: "float32[8, 8]" = aten.view.default(view_44, [8, 8]);  view_44 = None
    mm_2: "float32[8, 8]" = aten.mm.default(view_45, cross_0_query_weight);  cross_0_query_weight = None
    t_18: "float32[8, 8]" = aten.t.default(view_45)
    mm_3: "float32[8, 8]" = aten.mm.default(t_18, view_143);  t_18 = view_143 = None
    sum_2: "float32[1, 8]" = aten.sum.dim_IntList(view_45, [0], True);  view_45 = None
    view_46: "float32[8]" = aten.view.default(sum_2, [8]);  sum_2 = None
    view_47: "float32[2, 4, 8]" = aten.view.default(mm_2, [2, 4, 8])
    # cross.0
    cat: "float32[2, 3, 16]" = aten.cat.default([view_43, view_42], 2);  view_43 = view_42 = None
    # cross.0.key_value
    view_48: "float32[6, 16]" = aten.view.default(cat, [6, 16]);  cat = None
    mm_4: "float32[6, 8]" = aten.mm.default(view_48, cross_0_key_value_weight);  cross_0_key_value_weight = None
    t_22: "float32[16, 6]" = aten.t.default(view_48)
    mm_5: "float32[16, 8]" = aten.mm.default(t_22, view_145);  t_22 = view_145 = None
    sum_3: "float32[1, 16]" = aten.sum.dim_IntList(view_48, [0], True);  view_48 = None
    view_49: "float32[16]" = aten.view.default(sum_3, [16]);  sum_3 = None
    view_50: "float32[2, 3, 8]" = aten.view.default(mm_4, [2, 3, 8])
    # decoder.0.mlp.2
    mm_6: "float32[8, 16]" = aten.mm.default(mm_2, decoder_0_mlp_2_weight);  decoder_0_mlp_2_weight = None
    t_26: "float32[8, 8]" = aten.t.default(mm_2)
    mm_7: "float32[8, 16]" = aten.mm.default(t_26, view_146);  t_26 = view_146 = None
    sum_4: "float32[1, 8]" = aten.sum.dim_IntList(mm_2, [0], True);  mm_2 = None
    view_52: "float32[8]" = aten.view.default(sum_4, [8]);  sum_4 = None
    view_53: "float32[2, 4, 16]" = aten.view.default(mm_6, [2, 4, 16]);  mm_6 = None
    # decoder.0.mlp.1
    gelu_backward: "float32[2, 4, 16]" = aten.gelu_backward.grad_input(view_53, view_147, grad_input=view_53);  view_53 = view_147 = None
    # decoder.0.mlp.0
    view_54: "float32[8, 16]" = aten.view.default(gelu_backward, [8, 16]);  gelu_backward = None
    mm_8: "float32[8, 8]" = aten.mm.default(view_54, decoder_0_mlp_0_weight);  decoder_0_mlp_0_weight = None
    t_30: "float32[16, 8]" = aten.t.default(view_54)
    mm_9: "float32[16, 8]" = aten.mm.default(t_30, view_148);  t_30 = view_148 = None
    sum_5: "float32[1, 16]" = aten.sum.dim_IntList(view_54, [0], True);  view_54 = None
    view_55: "float32[16]" = aten.view.default(sum_5, [16]);  sum_5 = None
    view_56: "float32[2, 4, 8]" = aten.view.default(mm_8, [2, 4, 8]);  mm_8 = None
    # decoder.0.norm2
    native_layer_norm_backward: "(float32[2, 4, 8], float32[8], float32[8])" = aten.native_layer_norm_backward.default(view_56, add_9, [8], getitem_53, getitem_54, decoder_0_norm2_weight, decoder_0_norm2_bias, [True, True, True]);  view_56 = add_9 = getitem_53 = getitem_54 = decoder_0_norm2_weight = decoder_0_norm2_bias = None
    getitem_27: "float32[2, 4, 8]" = native_layer_norm_backward[0]
    getitem_28: "float32[8]" = native_layer_norm_backward[1]
    getitem_29: "float32[8]" = native_layer_norm_backward[2];  native_layer_norm_backward = None
    # model
    add_5: "float32[2, 4, 8]" = aten.add_.Tensor(view_47, getitem_27);  view_47 = getitem_27 = None
    # decoder.0.attention.out
    view_57: "float32[8, 8]" = aten.view.default(add_5, [8, 8]);  add_5 = None
    mm_10: "float32[8, 8]" = aten.mm.default(view_57, decoder_0_attention_out_weight);  decoder_0_attention_out_weight = None
    t_34: "float32[8, 8]" = aten.t.default(view_57)
    mm_11: "float32[8, 8]" = aten.mm.default(t_34, view_149);  t_34 = view_149 = None
    sum_6: "float32[1, 8]" = aten.sum.dim_IntList(view_57, [0], True);  view_57 = None
    view_58: "float32[8]" = aten.view.default(sum_6, [8]);  sum_6 = None
    view_59: "float32[2, 4, 8]" = aten.view.default(mm_10, [2, 4, 8]);  mm_10 = None
    # decoder.0.attention
    view_60: "float32[2, 4, 2, 4]" = aten.view.default(view_59, [2, 4, 2, 4]);  view_59 = None
    transpose_16: "float32[2, 2, 4, 4]" = aten.transpose.int(view_60, 1, 2);  view_60 = None
    _scaled_dot_product_flash_attention_for_cpu_backward_1: "(float32[2, 2, 4, 4], float32[2, 2, 4, 4], float32[2, 2, 4, 4])" = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(transpose_16, transpose_47, transpose_46, transpose_45, getitem_50, getitem_51, 0.0, True);  transpose_16 = transpose_47 = transpose_46 = transpose_45 = getitem_50 = getitem_51 = None
    getitem_30: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward_1[0]
    getitem_31: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward_1[1]
    getitem_32: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward_1[2];  _scaled_dot_product_flash_attention_for_cpu_backward_1 = None
    transpose_17: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_32, 1, 2);  getitem_32 = None
    view_61: "float32[2, 4, 8]" = aten.view.default(transpose_17, [2, 4, 8]);  transpose_17 = None
    transpose_18: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_31, 1, 2);  getitem_31 = None
    view_62: "float32[2, 4, 8]" = aten.view.default(transpose_18, [2, 4, 8]);  transpose_18 = None
    transpose_19: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_30, 1, 2);  getitem_30 = None
    view_63: "float32[2, 4, 8]" = aten.view.default(transpose_19, [2, 4, 8]);  transpose_19 = None
    # decoder.0.attention.query
    view_64: "float32[8, 8]" = aten.view.default(view_63, [8, 8]);  view_63 = None
    mm_12: "float32[8, 8]" = aten.mm.default(view_64, decoder_0_attention_query_weight);  decoder_0_attention_query_weight = None
    t_38: "float32[8, 8]" = aten.t.default(view_64)
    mm_13: "float32[8, 8]" = aten.mm.default(t_38, view_155);  t_38 = view_155 = None
    sum_7: "float32[1, 8]" = aten.sum.dim_IntList(view_64, [0], True);  view_64 = None
    view_65: "float32[8]" = aten.view.default(sum_7, [8]);  sum_7 = None
    view_66: "float32[2, 4, 8]" = aten.view.default(mm_12, [2, 4, 8]);  mm_12 = None
    # decoder.0.attention
    cat_1: "float32[2, 4, 16]" = aten.cat.default([view_62, view_61], 2);  view_62 = view_61 = None
    # decoder.0.attention.key_value
    view_67: "float32[8, 16]" = aten.view.default(cat_1, [8, 16]);  cat_1 = None
    mm_14: "float32[8, 8]" = aten.mm.default(view_67, decoder_0_attention_key_value_weight);  decoder_0_attention_key_value_weight = None
    t_42: "float32[16, 8]" = aten.t.default(view_67)
    mm_15: "float32[16, 8]" = aten.mm.default(t_42, view_157);  t_42 = view_157 = None
    sum_8: "float32[1, 16]" = aten.sum.dim_IntList(view_67, [0], True);  view_67 = None
    view_68: "float32[16]" = aten.view.default(sum_8, [16]);  sum_8 = None
    view_69: "float32[2, 4, 8]" = aten.view.default(mm_14, [2, 4, 8]);  mm_14 = None
    # model
    add_6: "float32[2, 4, 8]" = aten.add_.Tensor(view_66, view_69);  view_66 = view_69 = None
    # decoder.0.norm1
    native_layer_norm_backward_1: "(NoneType, float32[8], float32[8])" = aten.native_layer_norm_backward.default(add_6, target, [8], getitem_46, getitem_47, decoder_0_norm1_weight, decoder_0_norm1_bias, [False, True, True]);  add_6 = target = getitem_46 = getitem_47 = decoder_0_norm1_weight = decoder_0_norm1_bias = None
    getitem_34: "float32[8]" = native_layer_norm_backward_1[1]
    getitem_35: "float32[8]" = native_layer_norm_backward_1[2];  native_layer_norm_backward_1 = None
    return (mm_1, view_39, mm_3, view_46, mm_4, mm_5, view_49, view_50, mm_7, view_52, mm_9, view_55, getitem_28, getitem_29, mm_11, view_58, mm_13, view_65, mm_15, view_68, getitem_34, getitem_35)
