import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        embedding_weight,  # float32[16, 8]
        tokens,  # int64[2, 4]
        blocks_0_norm1_weight,  # float32[8]
        blocks_0_norm1_bias,  # float32[8]
        blocks_0_attention_key_value_weight,  # float32[16, 8]
        blocks_0_attention_query_weight,  # float32[8, 8]
        blocks_0_attention_out_weight,  # float32[8, 8]
        blocks_0_norm2_weight,  # float32[8]
        blocks_0_norm2_bias,  # float32[8]
        blocks_0_mlp_0_weight,  # float32[16, 8]
        blocks_0_mlp_0_bias,  # float32[16]
        blocks_0_mlp_2_weight,  # float32[8, 16]
        norm_weight,  # float32[8]
        norm_bias,  # float32[8]
        targets,  # int64[2, 4]
        tangents_1,  # float32[]
        embedding,  # float32[2, 4, 8]
        getitem,  # float32[2, 4, 8]
        getitem_1,  # float32[2, 4, 1]
        getitem_2,  # float32[2, 4, 1]
        addmm,  # float32[8, 16]
        addmm_1,  # float32[8, 8]
        getitem_5,  # float32[2, 2, 4, 4]
        getitem_6,  # float32[2, 2, 4]
        bernoulli_p,  # bool[2, 4, 8]
        add,  # float32[2, 4, 8]
        getitem_9,  # float32[2, 4, 8]
        getitem_10,  # float32[2, 4, 1]
        getitem_11,  # float32[2, 4, 1]
        gelu,  # float32[2, 4, 16]
        bernoulli_p_1,  # bool[2, 4, 8]
        add_1,  # float32[2, 4, 8]
        getitem_14,  # float32[2, 4, 8]
        getitem_15,  # float32[2, 4, 1]
        getitem_16,  # float32[2, 4, 1]
        _log_softmax,  # float32[8, 16]
        getitem_18,  # float32[]
    ) = args
    args.clear()
    # model (again)
    view_39: "int64[8]" = aten.view.default(targets, [8]);  targets = None
    # model
    nll_loss_backward: "float32[8, 16]" = aten.nll_loss_backward.default(tangents_1, _log_softmax, view_39, None, 1, -100, getitem_18);  tangents_1 = view_39 = getitem_18 = None
    _log_softmax_backward_data: "float32[8, 16]" = aten._log_softmax_backward_data.out(nll_loss_backward, _log_softmax, 1, torch.float32, out=nll_loss_backward);  nll_loss_backward = _log_softmax = None
    t_6: "float32[16, 8]" = aten.t.default(_log_softmax_backward_data)
    # model (again)
    view_40: "float32[8, 8]" = aten.view.default(getitem_14, [8, 8]);  getitem_14 = None
    # model
    mm_1: "float32[16, 8]" = aten.mm.default(t_6, view_40);  t_6 = view_40 = None
    mm_2: "float32[8, 8]" = aten.mm.default(_log_softmax_backward_data, embedding_weight);  _log_softmax_backward_data = embedding_weight = None
    view_19: "float32[2, 4, 8]" = aten.view.default(mm_2, [2, 4, 8]);  mm_2 = None
    # norm
    native_layer_norm_backward: "(float32[2, 4, 8], float32[8], float32[8])" = aten.native_layer_norm_backward.default(view_19, add_1, [8], getitem_15, getitem_16, norm_weight, norm_bias, [True, True, True]);  view_19 = add_1 = getitem_15 = getitem_16 = norm_weight = norm_bias = None
    getitem_19: "float32[2, 4, 8]" = native_layer_norm_backward[0]
    getitem_20: "float32[8]" = native_layer_norm_backward[1]
    getitem_21: "float32[8]" = native_layer_norm_backward[2];  native_layer_norm_backward = None
    # blocks.0.dropout
    mul_tensor_4: "float32[2, 4, 8]" = aten.mul.Tensor(getitem_19, bernoulli_p_1);  bernoulli_p_1 = None
    mul_tensor_5: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor_4, 1.1111111111111112);  mul_tensor_4 = None
    # blocks.0.mlp.2
    view_20: "float32[8, 8]" = aten.view.default(mul_tensor_5, [8, 8]);  mul_tensor_5 = None
    mm_3: "float32[8, 16]" = aten.mm.default(view_20, blocks_0_mlp_2_weight);  blocks_0_mlp_2_weight = None
    t_11: "float32[8, 8]" = aten.t.default(view_20)
    # blocks.0.mlp.2 (again)
    view_41: "float32[8, 16]" = aten.view.default(gelu, [8, 16]);  gelu = None
    # blocks.0.mlp.2
    mm_4: "float32[8, 16]" = aten.mm.default(t_11, view_41);  t_11 = view_41 = None
    sum_1: "float32[1, 8]" = aten.sum.dim_IntList(view_20, [0], True);  view_20 = None
    view_21: "float32[8]" = aten.view.default(sum_1, [8]);  sum_1 = None
    # blocks.0.mlp.0 (again)
    view_42: "float32[8, 8]" = aten.view.default(getitem_9, [8, 8]);  getitem_9 = None
    t_28: "float32[8, 16]" = aten.t.default(blocks_0_mlp_0_weight)
    addmm_5: "float32[8, 16]" = aten.addmm.default(blocks_0_mlp_0_bias, view_42, t_28);  blocks_0_mlp_0_bias = t_28 = None
    # blocks.0.mlp.2
    view_22: "float32[2, 4, 16]" = aten.view.default(mm_3, [2, 4, 16]);  mm_3 = None
    # blocks.0.mlp.0 (again)
    view_43: "float32[2, 4, 16]" = aten.view.default(addmm_5, [2, 4, 16]);  addmm_5 = None
    # blocks.0.mlp.1
    gelu_backward: "float32[2, 4, 16]" = aten.gelu_backward.grad_input(view_22, view_43, grad_input=view_22);  view_22 = view_43 = None
    # blocks.0.mlp.0
    view_23: "float32[8, 16]" = aten.view.default(gelu_backward, [8, 16]);  gelu_backward = None
    t_15: "float32[16, 8]" = aten.t.default(view_23)
    mm_6: "float32[16, 8]" = aten.mm.default(t_15, view_42);  t_15 = view_42 = None
    sum_2: "float32[1, 16]" = aten.sum.dim_IntList(view_23, [0], True)
    mm_5: "float32[8, 8]" = aten.mm.default(view_23, blocks_0_mlp_0_weight);  view_23 = blocks_0_mlp_0_weight = None
    view_25: "float32[2, 4, 8]" = aten.view.default(mm_5, [2, 4, 8]);  mm_5 = None
    # blocks.0.norm2
    native_layer_norm_backward_1: "(float32[2, 4, 8], float32[8], float32[8])" = aten.native_layer_norm_backward.default(view_25, add, [8], getitem_10, getitem_11, blocks_0_norm2_weight, blocks_0_norm2_bias, [True, True, True]);  view_25 = add = getitem_10 = getitem_11 = blocks_0_norm2_weight = blocks_0_norm2_bias = None
    getitem_22: "float32[2, 4, 8]" = native_layer_norm_backward_1[0]
    getitem_23: "float32[8]" = native_layer_norm_backward_1[1]
    getitem_24: "float32[8]" = native_layer_norm_backward_1[2];  native_layer_norm_backward_1 = None
    # model
    add_2: "float32[2, 4, 8]" = aten.add_.Tensor(getitem_19, getitem_22);  getitem_19 = getitem_22 = None
    # blocks.0.mlp.0
    view_24: "float32[16]" = aten.view.default(sum_2, [16]);  sum_2 = None
    # blocks.0.dropout
    mul_tensor_6: "float32[2, 4, 8]" = aten.mul.Tensor(add_2, bernoulli_p);  bernoulli_p = None
    mul_tensor_7: "float32[2, 4, 8]" = aten.mul_.Tensor(mul_tensor_6, 1.1111111111111112);  mul_tensor_6 = None
    # blocks.0.attention.out
    view_26: "float32[8, 8]" = aten.view.default(mul_tensor_7, [8, 8]);  mul_tensor_7 = None
    mm_7: "float32[8, 8]" = aten.mm.default(view_26, blocks_0_attention_out_weight);  blocks_0_attention_out_weight = None
    t_19: "float32[8, 8]" = aten.t.default(view_26)
    # blocks.0.attention (again)
    transpose_8: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_5, 1, 2)
    view_44: "float32[2, 4, 8]" = aten.view.default(transpose_8, [2, 4, 8]);  transpose_8 = None
    # blocks.0.attention.out (again)
    view_45: "float32[8, 8]" = aten.view.default(view_44, [8, 8]);  view_44 = None
    # blocks.0.attention.out
    mm_8: "float32[8, 8]" = aten.mm.default(t_19, view_45);  t_19 = view_45 = None
    sum_3: "float32[1, 8]" = aten.sum.dim_IntList(view_26, [0], True);  view_26 = None
    view_27: "float32[8]" = aten.view.default(sum_3, [8]);  sum_3 = None
    view_28: "float32[2, 4, 8]" = aten.view.default(mm_7, [2, 4, 8]);  mm_7 = None
    # blocks.0.attention
    view_29: "float32[2, 4, 2, 4]" = aten.view.default(view_28, [2, 4, 2, 4]);  view_28 = None
    transpose_4: "float32[2, 2, 4, 4]" = aten.transpose.int(view_29, 1, 2);  view_29 = None
    # blocks.0.attention.query (again)
    view_46: "float32[2, 4, 8]" = aten.view.default(addmm_1, [2, 4, 8]);  addmm_1 = None
    # blocks.0.attention (again)
    view_47: "float32[2, 4, 2, 4]" = aten.view.default(view_46, [2, 4, 2, 4]);  view_46 = None
    transpose_9: "float32[2, 2, 4, 4]" = aten.transpose.int(view_47, 1, 2);  view_47 = None
    # blocks.0.attention.key_value (again)
    view_48: "float32[2, 4, 16]" = aten.view.default(addmm, [2, 4, 16]);  addmm = None
    # blocks.0.attention (again)
    split_1: "(float32[2, 4, 8], float32[2, 4, 8])" = aten.split.Tensor(view_48, 8, -1);  view_48 = None
    getitem_31: "float32[2, 4, 8]" = split_1[0]
    view_49: "float32[2, 4, 2, 4]" = aten.view.default(getitem_31, [2, 4, 2, 4]);  getitem_31 = None
    transpose_10: "float32[2, 2, 4, 4]" = aten.transpose.int(view_49, 1, 2);  view_49 = None
    getitem_32: "float32[2, 4, 8]" = split_1[1];  split_1 = None
    view_50: "float32[2, 4, 2, 4]" = aten.view.default(getitem_32, [2, 4, 2, 4]);  getitem_32 = None
    transpose_11: "float32[2, 2, 4, 4]" = aten.transpose.int(view_50, 1, 2);  view_50 = None
    # blocks.0.attention
    _scaled_dot_product_flash_attention_for_cpu_backward: "(float32[2, 2, 4, 4], float32[2, 2, 4, 4], float32[2, 2, 4, 4])" = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(transpose_4, transpose_9, transpose_10, transpose_11, getitem_5, getitem_6, 0.0, True);  transpose_4 = transpose_9 = transpose_10 = transpose_11 = getitem_5 = getitem_6 = None
    getitem_25: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward[0]
    getitem_26: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward[1]
    getitem_27: "float32[2, 2, 4, 4]" = _scaled_dot_product_flash_attention_for_cpu_backward[2];  _scaled_dot_product_flash_attention_for_cpu_backward = None
    transpose_7: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_25, 1, 2);  getitem_25 = None
    view_32: "float32[2, 4, 8]" = aten.view.default(transpose_7, [2, 4, 8]);  transpose_7 = None
    # blocks.0.attention.query
    view_33: "float32[8, 8]" = aten.view.default(view_32, [8, 8]);  view_32 = None
    mm_9: "float32[8, 8]" = aten.mm.default(view_33, blocks_0_attention_query_weight);  blocks_0_attention_query_weight = None
    t_23: "float32[8, 8]" = aten.t.default(view_33)
    # blocks.0.attention.query (again)
    view_51: "float32[8, 8]" = aten.view.default(getitem, [8, 8])
    # blocks.0.attention.query
    mm_10: "float32[8, 8]" = aten.mm.default(t_23, view_51);  t_23 = view_51 = None
    sum_4: "float32[1, 8]" = aten.sum.dim_IntList(view_33, [0], True);  view_33 = None
    # blocks.0.attention
    transpose_6: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_26, 1, 2);  getitem_26 = None
    view_31: "float32[2, 4, 8]" = aten.view.default(transpose_6, [2, 4, 8]);  transpose_6 = None
    transpose_5: "float32[2, 4, 2, 4]" = aten.transpose.int(getitem_27, 1, 2);  getitem_27 = None
    view_30: "float32[2, 4, 8]" = aten.view.default(transpose_5, [2, 4, 8]);  transpose_5 = None
    cat: "float32[2, 4, 16]" = aten.cat.default([view_31, view_30], 2);  view_31 = view_30 = None
    # blocks.0.attention.key_value
    view_36: "float32[8, 16]" = aten.view.default(cat, [8, 16]);  cat = None
    mm_11: "float32[8, 8]" = aten.mm.default(view_36, blocks_0_attention_key_value_weight);  blocks_0_attention_key_value_weight = None
    t_27: "float32[16, 8]" = aten.t.default(view_36)
    # blocks.0.attention.key_value (again)
    view_52: "float32[8, 8]" = aten.view.default(getitem, [8, 8]);  getitem = None
    # blocks.0.attention.key_value
    mm_12: "float32[16, 8]" = aten.mm.default(t_27, view_52);  t_27 = view_52 = None
    sum_5: "float32[1, 16]" = aten.sum.dim_IntList(view_36, [0], True);  view_36 = None
    # blocks.0.attention.query
    view_35: "float32[2, 4, 8]" = aten.view.default(mm_9, [2, 4, 8]);  mm_9 = None
    # blocks.0.attention.key_value
    view_38: "float32[2, 4, 8]" = aten.view.default(mm_11, [2, 4, 8]);  mm_11 = None
    # model
    add_3: "float32[2, 4, 8]" = aten.add_.Tensor(view_35, view_38);  view_35 = view_38 = None
    # blocks.0.norm1
    native_layer_norm_backward_2: "(float32[2, 4, 8], float32[8], float32[8])" = aten.native_layer_norm_backward.default(add_3, embedding, [8], getitem_1, getitem_2, blocks_0_norm1_weight, blocks_0_norm1_bias, [True, True, True]);  add_3 = embedding = getitem_1 = getitem_2 = blocks_0_norm1_weight = blocks_0_norm1_bias = None
    getitem_28: "float32[2, 4, 8]" = native_layer_norm_backward_2[0]
    getitem_29: "float32[8]" = native_layer_norm_backward_2[1]
    getitem_30: "float32[8]" = native_layer_norm_backward_2[2];  native_layer_norm_backward_2 = None
    # model
    add_4: "float32[2, 4, 8]" = aten.add_.Tensor(add_2, getitem_28);  add_2 = getitem_28 = None
    # embedding
    embedding_dense_backward: "float32[16, 8]" = aten.embedding_dense_backward.default(add_4, tokens, 16, -1, False);  add_4 = tokens = None
    # model
    add_5: "float32[16, 8]" = aten.add_.Tensor(mm_1, embedding_dense_backward);  mm_1 = embedding_dense_backward = None
    # blocks.0.attention.query
    view_34: "float32[8]" = aten.view.default(sum_4, [8]);  sum_4 = None
    # blocks.0.attention.key_value
    view_37: "float32[16]" = aten.view.default(sum_5, [16]);  sum_5 = None
    return (getitem_20, getitem_21, mm_4, view_21, mm_6, getitem_23, getitem_24, view_24, mm_8, view_27, mm_10, mm_12, getitem_29, getitem_30, add_5, view_34, view_37)
