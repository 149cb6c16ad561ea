import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        encoder_0_norm1_weight,  # float32[8]
        encoder_0_norm1_bias,  # float32[8]
        source,  # float32[2, 3, 8]
        encoder_0_attention_key_value_weight,  # float32[16, 8]
        encoder_0_attention_query_weight,  # float32[8, 8]
        encoder_0_attention_out_weight,  # float32[8, 8]
        encoder_0_norm2_weight,  # float32[8]
        encoder_0_norm2_bias,  # float32[8]
        encoder_0_mlp_0_weight,  # float32[16, 8]
        encoder_0_mlp_2_weight,  # float32[8, 16]
        getitem_59,  # float32[2, 3, 8]
        getitem_60,  # float32[2, 3, 1]
        getitem_61,  # float32[2, 3, 1]
        addmm_21,  # float32[6, 16]
        addmm_22,  # float32[6, 8]
        getitem_64,  # float32[2, 2, 3, 4]
        getitem_65,  # float32[2, 2, 3]
        add_12,  # float32[2, 3, 8]
        getitem_66,  # float32[2, 3, 8]
        getitem_67,  # float32[2, 3, 1]
        getitem_68,  # float32[2, 3, 1]
        addmm_24,  # float32[6, 16]
        gelu_3,  # float32[2, 3, 16]
        mm_4,  # float32[6, 8]
        view_50,  # float32[2, 3, 8]
    ) = args
    args.clear()
    # encoder.0.attention.key_value (again)
    view_136: "float32[6, 8]" = aten.view.default(getitem_59, [6, 8])
    view_135: "float32[2, 3, 16]" = aten.view.default(addmm_21, [2, 3, 16]);  addmm_21 = None
    # encoder.0.attention (again)
    split_6: "(float32[2, 3, 8], float32[2, 3, 8])" = aten.split.Tensor(view_135, 8, -1);  view_135 = None
    getitem_70: "float32[2, 3, 8]" = split_6[0]
    getitem_69: "float32[2, 3, 8]" = split_6[1];  split_6 = None
    # encoder.0.attention.query (again)
    view_134: "float32[6, 8]" = aten.view.default(getitem_59, [6, 8]);  getitem_59 = None
    view_133: "float32[2, 3, 8]" = aten.view.default(addmm_22, [2, 3, 8]);  addmm_22 = None
    # encoder.0.attention (again)
    view_132: "float32[2, 3, 2, 4]" = aten.view.default(view_133, [2, 3, 2, 4]);  view_133 = None
    transpose_39: "float32[2, 2, 3, 4]" = aten.transpose.int(view_132, 1, 2);  view_132 = None
    view_131: "float32[2, 3, 2, 4]" = aten.view.default(getitem_70, [2, 3, 2, 4]);  getitem_70 = None
    transpose_38: "float32[2, 2, 3, 4]" = aten.transpose.int(view_131, 1, 2);  view_131 = None
    view_130: "float32[2, 3, 2, 4]" = aten.view.default(getitem_69, [2, 3, 2, 4]);  getitem_69 = None
    transpose_37: "float32[2, 2, 3, 4]" = aten.transpose.int(view_130, 1, 2);  view_130 = None
    transpose_36: "float32[2, 3, 2, 4]" = aten.transpose.int(getitem_64, 1, 2)
    view_129: "float32[2, 3, 8]" = aten.view.default(transpose_36, [2, 3, 8]);  transpose_36 = None
    # encoder.0.attention.out (again)
    view_128: "float32[6, 8]" = aten.view.default(view_129, [6, 8]);  view_129 = None
    # encoder.0.mlp.0 (again)
    view_127: "float32[6, 8]" = aten.view.default(getitem_66, [6, 8]);  getitem_66 = None
    view_126: "float32[2, 3, 16]" = aten.view.default(addmm_24, [2, 3, 16]);  addmm_24 = None
    # encoder.0.mlp.2 (again)
    view_125: "float32[6, 16]" = aten.view.default(gelu_3, [6, 16]);  gelu_3 = None
    # encoder.0.mlp.2
    mm_16: "float32[6, 16]" = aten.mm.default(mm_4, encoder_0_mlp_2_weight);  encoder_0_mlp_2_weight = None
    t_46: "float32[8, 6]" = aten.t.default(mm_4)
    mm_17: "float32[8, 16]" = aten.mm.default(t_46, view_125);  t_46 = view_125 = None
    sum_9: "float32[1, 8]" = aten.sum.dim_IntList(mm_4, [0], True);  mm_4 = None
    view_71: "float32[8]" = aten.view.default(sum_9, [8]);  sum_9 = None
    view_72: "float32[2, 3, 16]" = aten.view.default(mm_16, [2, 3, 16]);  mm_16 = None
    # encoder.0.mlp.1
    gelu_backward_1: "float32[2, 3, 16]" = aten.gelu_backward.grad_input(view_72, view_126, grad_input=view_72);  view_72 = view_126 = None
    # encoder.0.mlp.0
    view_73: "float32[6, 16]" = aten.view.default(gelu_backward_1, [6, 16]);  gelu_backward_1 = None
    mm_18: "float32[6, 8]" = aten.mm.default(view_73, encoder_0_mlp_0_weight);  encoder_0_mlp_0_weight = None
    t_50: "float32[16, 6]" = aten.t.default(view_73)
    mm_19: "float32[16, 8]" = aten.mm.default(t_50, view_127);  t_50 = view_127 = None
    sum_10: "float32[1, 16]" = aten.sum.dim_IntList(view_73, [0], True);  view_73 = None
    view_74: "float32[16]" = aten.view.default(sum_10, [16]);  sum_10 = None
    view_75: "float32[2, 3, 8]" = aten.view.default(mm_18, [2, 3, 8]);  mm_18 = None
    # encoder.0.norm2
    native_layer_norm_backward_2: "(float32[2, 3, 8], float32[8], float32[8])" = aten.native_layer_norm_backward.default(view_75, add_12, [8], getitem_67, getitem_68, encoder_0_norm2_weight, encoder_0_norm2_bias, [True, True, True]);  view_75 = add_12 = getitem_67 = getitem_68 = encoder_0_norm2_weight = encoder_0_norm2_bias = None
    getitem_36: "float32[2, 3, 8]" = native_layer_norm_backward_2[0]
    getitem_37: "float32[8]" = native_layer_norm_backward_2[1]
    getitem_38: "float32[8]" = native_layer_norm_backward_2[2];  native_layer_norm_backward_2 = None
    # model
    add_7: "float32[2, 3, 8]" = aten.add.out(view_50, getitem_36, out=getitem_36);  view_50 = getitem_36 = None
    # encoder.0.attention.out
    view_76: "float32[6, 8]" = aten.view.default(add_7, [6, 8]);  add_7 = None
    mm_20: "float32[6, 8]" = aten.mm.default(view_76, encoder_0_attention_out_weight);  encoder_0_attention_out_weight = None
    t_54: "float32[8, 6]" = aten.t.default(view_76)
    mm_21: "float32[8, 8]" = aten.mm.default(t_54, view_128);  t_54 = view_128 = None
    sum_11: "float32[1, 8]" = aten.sum.dim_IntList(view_76, [0], True);  view_76 = None
    view_77: "float32[8]" = aten.view.default(sum_11, [8]);  sum_11 = None
    view_78: "float32[2, 3, 8]" = aten.view.default(mm_20, [2, 3, 8]);  mm_20 = None
    # encoder.0.attention
    view_79: "float32[2, 3, 2, 4]" = aten.view.default(view_78, [2, 3, 2, 4]);  view_78 = None
    transpose_20: "float32[2, 2, 3, 4]" = aten.transpose.int(view_79, 1, 2);  view_79 = None
    _scaled_dot_product_flash_attention_for_cpu_backward_2: "(float32[2, 2, 3, 4], float32[2, 2, 3, 4], float32[2, 2, 3, 4])" = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(transpose_20, transpose_39, transpose_38, transpose_37, getitem_64, getitem_65, 0.0, True);  transpose_20 = transpose_39 = transpose_38 = transpose_37 = getitem_64 = getitem_65 = None
    getitem_39: "float32[2, 2, 3, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward_2[0]
    getitem_40: "float32[2, 2, 3, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward_2[1]
    getitem_41: "float32[2, 2, 3, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward_2[2];  _scaled_dot_product_flash_attention_for_cpu_backward_2 = None
    transpose_21: "float32[2, 3, 2, 4]" = aten.transpose.int(getitem_41, 1, 2);  getitem_41 = None
    view_80: "float32[2, 3, 8]" = aten.view.default(transpose_21, [2, 3, 8]);  transpose_21 = None
    transpose_22: "float32[2, 3, 2, 4]" = aten.transpose.int(getitem_40, 1, 2);  getitem_40 = None
    view_81: "float32[2, 3, 8]" = aten.view.default(transpose_22, [2, 3, 8]);  transpose_22 = None
    transpose_23: "float32[2, 3, 2, 4]" = aten.transpose.int(getitem_39, 1, 2);  getitem_39 = None
    view_82: "float32[2, 3, 8]" = aten.view.default(transpose_23, [2, 3, 8]);  transpose_23 = None
    # encoder.0.attention.query
    view_83: "float32[6, 8]" = aten.view.default(view_82, [6, 8]);  view_82 = None
    mm_22: "float32[6, 8]" = aten.mm.default(view_83, encoder_0_attention_query_weight);  encoder_0_attention_query_weight = None
    t_58: "float32[8, 6]" = aten.t.default(view_83)
    mm_23: "float32[8, 8]" = aten.mm.default(t_58, view_134);  t_58 = view_134 = None
    sum_12: "float32[1, 8]" = aten.sum.dim_IntList(view_83, [0], True);  view_83 = None
    view_84: "float32[8]" = aten.view.default(sum_12, [8]);  sum_12 = None
    view_85: "float32[2, 3, 8]" = aten.view.default(mm_22, [2, 3, 8]);  mm_22 = None
    # encoder.0.attention
    cat_2: "float32[2, 3, 16]" = aten.cat.default([view_81, view_80], 2);  view_81 = view_80 = None
    # encoder.0.attention.key_value
    view_86: "float32[6, 16]" = aten.view.default(cat_2, [6, 16]);  cat_2 = None
    mm_24: "float32[6, 8]" = aten.mm.default(view_86, encoder_0_attention_key_value_weight);  encoder_0_attention_key_value_weight = None
    t_62: "float32[16, 6]" = aten.t.default(view_86)
    mm_25: "float32[16, 8]" = aten.mm.default(t_62, view_136);  t_62 = view_136 = None
    sum_13: "float32[1, 16]" = aten.sum.dim_IntList(view_86, [0], True);  view_86 = None
    view_87: "float32[16]" = aten.view.default(sum_13, [16]);  sum_13 = None
    view_88: "float32[2, 3, 8]" = aten.view.default(mm_24, [2, 3, 8]);  mm_24 = None
    # model
    add_8: "float32[2, 3, 8]" = aten.add_.Tensor(view_85, view_88);  view_85 = view_88 = None
    # encoder.0.norm1
    native_layer_norm_backward_3: "(NoneType, float32[8], float32[8])" = aten.native_layer_norm_backward.default(add_8, source, [8], getitem_60, getitem_61, encoder_0_norm1_weight, encoder_0_norm1_bias, [False, True, True]);  add_8 = source = getitem_60 = getitem_61 = encoder_0_norm1_weight = encoder_0_norm1_bias = None
    getitem_43: "float32[8]" = native_layer_norm_backward_3[1]
    getitem_44: "float32[8]" = native_layer_norm_backward_3[2];  native_layer_norm_backward_3 = None
    return (mm_17, view_71, mm_19, view_74, getitem_37, getitem_38, mm_21, view_77, mm_23, view_84, mm_25, view_87, getitem_43, getitem_44)
