import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_backward(args):
    (
        embedding_weight,  # float32[16, 8]
        blocks_1_norm1_weight,  # float32[8]
        blocks_1_norm1_bias,  # float32[8]
        blocks_1_attention_key_value_weight,  # float32[16, 8]
        blocks_1_attention_query_weight,  # float32[8, 8]
        blocks_1_attention_out_weight,  # float32[8, 8]
        blocks_1_norm2_weight,  # float32[8]
        blocks_1_norm2_bias,  # float32[8]
        blocks_1_mlp_0_weight,  # float32[16, 8]
        blocks_1_mlp_2_weight,  # float32[8, 16]
        norm_weight,  # float32[8]
        norm_bias,  # float32[8]
        targets,  # int64[2, 4]
        tangents_1,  # float32[]
        add_1,  # float32[2, 4, 8]
        getitem_54,  # float32[2, 4, 8]
        getitem_55,  # float32[2, 4, 1]
        getitem_56,  # float32[2, 4, 1]
        addmm_10,  # float32[8, 16]
        addmm_11,  # float32[8, 8]
        getitem_59,  # float32[2, 2, 4, 4]
        getitem_60,  # float32[2, 2, 4]
        run_with_rng_state_1,  # bool[2, 4, 8]
        add_11,  # float32[2, 4, 8]
        getitem_61,  # float32[2, 4, 8]
        getitem_62,  # float32[2, 4, 1]
        getitem_63,  # float32[2, 4, 1]
        addmm_13,  # float32[8, 16]
        gelu_2,  # float32[2, 4, 16]
        run_with_rng_state_2,  # bool[2, 4, 8]
        add_12,  # float32[2, 4, 8]
        getitem_64,  # float32[2, 4, 8]
        getitem_65,  # float32[2, 4, 1]
        getitem_66,  # float32[2, 4, 1]
        _log_softmax_1,  # float32[8, 16]
        getitem_68,  # float32[]
    ) = args
    args.clear()
    # blocks.1.attention.key_value (again)
    view_125: "float32[8, 8]" = aten.view.default(getitem_54, [8, 8])
    view_124: "float32[2, 4, 16]" = aten.view.default(addmm_10, [2, 4, 16]);  addmm_10 = None
    # blocks.1.attention (again)
    split_5: "(float32[2, 4, 8], float32[2, 4, 8])" = aten.split.Tensor(view_124, 8, -1);  view_124 = None
    getitem_82: "float32[2, 4, 8]" = split_5[0]
    getitem_81: "float32[2, 4, 8]" = split_5[1];  split_5 = None
    # blocks.1.attention.query (again)
    view_123: "float32[8, 8]" = aten.view.default(getitem_54, [8, 8]);  getitem_54 = None
    view_122: "float32[2, 4, 8]" = aten.view.default(addmm_11, [2, 4, 8]);  addmm_11 = None
    # blocks.1.attention (again)
    view_121: "float32[2, 4, 2, 4]" = aten.view.default(view_122, [2, 4, 2, 4]);  view_122 = None
    transpose_31: "float32[2, 2, 4, 4]" = aten.transpose.int(view_121, 1, 2);  view_121 = None
    view_120: "float32[2, 4, 2, 4]" = aten.view.default(getitem_82, [2, 4, 2, 4]);  getitem_82 = None
    transpose_30: "float32[2, 2, 4, 4]" = aten.transpose.int(view_120, 1, 2);  view_120 = None
    view_119: "float32[2, 4, 2, 4]" = aten.view.default(getitem_81, [2, 4, 2, 4]);  getitem_81 = None
    transpose_29: "float32[2, 2, 4, 4]" = aten.transpose.int(view_119, 1, 2);  view_119 = None
    transpose_28: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_59, 1, 2)
    view_118: "float32[2, 4, 8]" = aten.view.default(transpose_28, [2, 4, 8]);  transpose_28 = None
    # blocks.1.attention.out (again)
    view_117: "float32[8, 8]" = aten.view.default(view_118, [8, 8]);  view_118 = None
    # blocks.1.mlp.0 (again)
    view_116: "float32[8, 8]" = aten.view.default(getitem_61, [8, 8]);  getitem_61 = None
    view_115: "float32[2, 4, 16]" = aten.view.default(addmm_13, [2, 4, 16]);  addmm_13 = None
    # blocks.1.mlp.2 (again)
    view_114: "float32[8, 16]" = aten.view.default(gelu_2, [8, 16]);  gelu_2 = None
    # model (again)
    view_113: "float32[8, 8]" = aten.view.default(getitem_64, [8, 8]);  getitem_64 = None
    view_112: "int64[8]" = aten.view.default(targets, [8]);  targets = None
    # model
    nll_loss_backward: "float32[8, 16]" = aten.nll_loss_backward.default(tangents_1, _log_softmax_1, view_112, None, 1, -100, getitem_68);  tangents_1 = view_112 = getitem_68 = None
    _log_softmax_backward_data: "float32[8, 16]" = aten._log_softmax_backward_data.out(nll_loss_backward, _log_softmax_1, 1, torch.float32, out=nll_loss_backward);  nll_loss_backward = _log_softmax_1 = None
    t_11: "float32[16, 8]" = aten.t.default(_log_softmax_backward_data)
    mm_1: "float32[16, 8]" = aten.mm.default(t_11, view_113);  t_11 = view_113 = None
    mm_2: "float32[8, 8]" = aten.mm.default(_log_softmax_backward_data, embedding_weight);  _log_softmax_backward_data = embedding_weight = None
    view_33: "float32[2, 4, 8]" = aten.view.default(mm_2, [2, 4, 8]);  mm_2 = None
    # norm
    native_layer_norm_backward: "(float32[2, 4, 8], float32[8], float32[8])" = aten.native_layer_norm_backward.default(view_33, add_12, [8], getitem_65, getitem_66, norm_weight, norm_bias, [True, True, True]);  view_33 = add_12 = getitem_65 = getitem_66 = norm_weight = norm_bias = None
    getitem_33: "float32[2, 4, 8]" = native_layer_norm_backward[0]
    getitem_34: "float32[8]" = native_layer_norm_backward[1]
    getitem_35: "float32[8]" = native_layer_norm_backward[2];  native_layer_norm_backward = None
    # blocks.1.dropout
    mul_tensor_8: "float32[2, 4, 8]" = aten.mul.Tensor(getitem_33, run_with_rng_state_2);  run_with_rng_state_2 = None
    mul_tensor_9: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor_8, 1.1111111111111112);  mul_tensor_8 = None
    # blocks.1.mlp.2
    view_34: "float32[8, 8]" = aten.view.default(mul_tensor_9, [8, 8]);  mul_tensor_9 = None
    mm_3: "float32[8, 16]" = aten.mm.default(view_34, blocks_1_mlp_2_weight);  blocks_1_mlp_2_weight = None
    t_16: "float32[8, 8]" = aten.t.default(view_34)
    mm_4: "float32[8, 16]" = aten.mm.default(t_16, view_114);  t_16 = view_114 = None
    sum_1: "float32[1, 8]" = aten.sum.dim_IntList(view_34, [0], True);  view_34 = None
    view_35: "float32[8]" = aten.view.default(sum_1, [8]);  sum_1 = None
    view_36: "float32[2, 4, 16]" = aten.view.default(mm_3, [2, 4, 16]);  mm_3 = None
    # blocks.1.mlp.1
    gelu_backward: "float32[2, 4, 16]" = aten.gelu_backward.grad_input(view_36, view_115, grad_input=view_36);  view_36 = view_115 = None
    # blocks.1.mlp.0
    view_37: "float32[8, 16]" = aten.view.default(gelu_backward, [8, 16]);  gelu_backward = None
    mm_5: "float32[8, 8]" = aten.mm.default(view_37, blocks_1_mlp_0_weight);  blocks_1_mlp_0_weight = None
    t_20: "float32[16, 8]" = aten.t.default(view_37)
    mm_6: "float32[16, 8]" = aten.mm.default(t_20, view_116);  t_20 = view_116 = None
    sum_2: "float32[1, 16]" = aten.sum.dim_IntList(view_37, [0], True);  view_37 = None
    view_38: "float32[16]" = aten.view.default(sum_2, [16]);  sum_2 = None
    view_39: "float32[2, 4, 8]" = aten.view.default(mm_5, [2, 4, 8]);  mm_5 = None
    # blocks.1.norm2
    native_layer_norm_backward_1: "(float32[2, 4, 8], float32[8], float32[8])" = aten.native_layer_norm_backward.default(view_39, add_11, [8], getitem_62, getitem_63, blocks_1_norm2_weight, blocks_1_norm2_bias, [True, True, True]);  view_39 = add_11 = getitem_62 = getitem_63 = blocks_1_norm2_weight = blocks_1_norm2_bias = None
    getitem_36: "float32[2, 4, 8]" = native_layer_norm_backward_1[0]
    getitem_37: "float32[8]" = native_layer_norm_backward_1[1]
    getitem_38: "float32[8]" = native_layer_norm_backward_1[2];  native_layer_norm_backward_1 = None
    # model
    add_4: "float32[2, 4, 8]" = aten.add_.Tensor(getitem_33, getitem_36);  getitem_33 = getitem_36 = None
    # blocks.1.dropout
    mul_tensor_10: "float32[2, 4, 8]" = aten.mul.Tensor(add_4, run_with_rng_state_1);  run_with_rng_state_1 = None
    mul_tensor_11: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor_10, 1.1111111111111112);  mul_tensor_10 = None
    # blocks.1.attention.out
    view_40: "float32[8, 8]" = aten.view.default(mul_tensor_11, [8, 8]);  mul_tensor_11 = None
    mm_7: "float32[8, 8]" = aten.mm.default(view_40, blocks_1_attention_out_weight);  blocks_1_attention_out_weight = None
    t_24: "float32[8, 8]" = aten.t.default(view_40)
    mm_8: "float32[8, 8]" = aten.mm.default(t_24, view_117);  t_24 = view_117 = None
    sum_3: "float32[1, 8]" = aten.sum.dim_IntList(view_40, [0], True);  view_40 = None
    view_41: "float32[8]" = aten.view.default(sum_3, [8]);  sum_3 = None
    view_42: "float32[2, 4, 8]" = aten.view.default(mm_7, [2, 4, 8]);  mm_7 = None
    # blocks.1.attention
    view_43: "float32[2, 4, 2, 4]" = aten.view.default(view_42, [2, 4, 2, 4]);  view_42 = None
    transpose_8: "float32[2, 2, 4, 4]" = aten.transpose.int(view_43, 1, 2);  view_43 = None
    _scaled_dot_product_flash_attention_for_cpu_backward: "(float32[2, 2, 4, 4], float32[2, 2, 4, 4], float32[2, 2, 4, 4])" = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(transpose_8, transpose_31, transpose_30, transpose_29, getitem_59, getitem_60, 0.0, True);  transpose_8 = transpose_31 = transpose_30 = transpose_29 = getitem_59 = getitem_60 = None
    getitem_39: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward[0]
    getitem_40: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward[1]
    getitem_41: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward[2];  _scaled_dot_product_flash_attention_for_cpu_backward = None
    transpose_9: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_41, 1, 2);  getitem_41 = None
    view_44: "float32[2, 4, 8]" = aten.view.default(transpose_9, [2, 4, 8]);  transpose_9 = None
    transpose_10: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_40, 1, 2);  getitem_40 = None
    view_45: "float32[2, 4, 8]" = aten.view.default(transpose_10, [2, 4, 8]);  transpose_10 = None
    transpose_11: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_39, 1, 2);  getitem_39 = None
    view_46: "float32[2, 4, 8]" = aten.view.default(transpose_11, [2, 4, 8]);  transpose_11 = None
    # blocks.1.attention.query
    view_47: "float32[8, 8]" = aten.view.default(view_46, [8, 8]);  view_46 = None
    mm_9: "float32[8, 8]" = aten.mm.default(view_47, blocks_1_attention_query_weight);  blocks_1_attention_query_weight = None
    t_28: "float32[8, 8]" = aten.t.default(view_47)
    mm_10: "float32[8, 8]" = aten.mm.default(t_28, view_123);  t_28 = view_123 = None
    sum_4: "float32[1, 8]" = aten.sum.dim_IntList(view_47, [0], True);  view_47 = None
    view_48: "float32[8]" = aten.view.default(sum_4, [8]);  sum_4 = None
    view_49: "float32[2, 4, 8]" = aten.view.default(mm_9, [2, 4, 8]);  mm_9 = None
    # blocks.1.attention
    cat: "float32[2, 4, 16]" = aten.cat.default([view_45, view_44], 2);  view_45 = view_44 = None
    # blocks.1.attention.key_value
    view_50: "float32[8, 16]" = aten.view.default(cat, [8, 16]);  cat = None
    mm_11: "float32[8, 8]" = aten.mm.default(view_50, blocks_1_attention_key_value_weight);  blocks_1_attention_key_value_weight = None
    t_32: "float32[16, 8]" = aten.t.default(view_50)
    mm_12: "float32[16, 8]" = aten.mm.default(t_32, view_125);  t_32 = view_125 = None
    sum_5: "float32[1, 16]" = aten.sum.dim_IntList(view_50, [0], True);  view_50 = None
    view_51: "float32[16]" = aten.view.default(sum_5, [16]);  sum_5 = None
    view_52: "float32[2, 4, 8]" = aten.view.default(mm_11, [2, 4, 8]);  mm_11 = None
    # model
    add_5: "float32[2, 4, 8]" = aten.add_.Tensor(view_49, view_52);  view_49 = view_52 = None
    # blocks.1.norm1
    native_layer_norm_backward_2: "(float32[2, 4, 8], float32[8], float32[8])" = aten.native_layer_norm_backward.default(add_5, add_1, [8], getitem_55, getitem_56, blocks_1_norm1_weight, blocks_1_norm1_bias, [True, True, True]);  add_5 = add_1 = getitem_55 = getitem_56 = blocks_1_norm1_weight = blocks_1_norm1_bias = None
    getitem_42: "float32[2, 4, 8]" = native_layer_norm_backward_2[0]
    getitem_43: "float32[8]" = native_layer_norm_backward_2[1]
    getitem_44: "float32[8]" = native_layer_norm_backward_2[2];  native_layer_norm_backward_2 = None
    # model
    add_6: "float32[2, 4, 8]" = aten.add_.Tensor(add_4, getitem_42);  add_4 = getitem_42 = None
    return (mm_1, getitem_34, getitem_35, mm_4, view_35, mm_6, view_38, getitem_37, getitem_38, mm_8, view_41, mm_10, view_48, mm_12, view_51, getitem_43, getitem_44, add_6)
