import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_recompute(args):
    (
        layers_1_router_weight,  # float32[2, 8]
        layers_1_router_bias,  # float32[2]
        layers_1_experts_0_weight,  # float32[8, 8]
        layers_1_experts_0_bias,  # float32[8]
        layers_1_experts_1_weight,  # float32[8, 8]
        layers_1_experts_1_bias,  # float32[8]
        add_50,  # float32[6, 8]
        getitem_7,  # int64[6, 1]
        nonzero_2,  # int64[u2, 2]
        nonzero_3,  # int64[u3, 2]
    ) = args
    args.clear()
    # layers.1.router (recomputed)
    t_27: "float32[8, 2]" = aten.t.default(layers_1_router_weight);  layers_1_router_weight = None
    addmm_6: "float32[6, 2]" = aten.addmm.default(layers_1_router_bias, add_50, t_27);  layers_1_router_bias = t_27 = None
    # layers.1 (recomputed)
    _softmax_2: "float32[6, 2]" = aten._softmax.out(addmm_6, -1, False, out=addmm_6);  addmm_6 = None
    gather_default: "float32[6, 1]" = aten.gather.default(_softmax_2, -1, getitem_7);  getitem_7 = None
    zeros_like_2: "float32[6, 8]" = aten.zeros_like.default(add_50, pin_memory=False)
    unbind_4: "(int64[u2], int64[u2])" = aten.unbind.int(nonzero_2, 1);  nonzero_2 = None
    getitem_12: "int64[u2]" = unbind_4[0]
    getitem_13: "int64[u2]" = unbind_4[1];  unbind_4 = None
    index_8: "float32[u2, 8]" = aten.index.Tensor(add_50, [getitem_12])
    # layers.1.experts.0 (recomputed)
    t_28: "float32[8, 8]" = aten.t.default(layers_1_experts_0_weight);  layers_1_experts_0_weight = None
    addmm_7: "float32[u2, 8]" = aten.addmm.default(layers_1_experts_0_bias, index_8, t_28);  layers_1_experts_0_bias = t_28 = None
    # layers.1 (recomputed)
    relu_4: "float32[u2, 8]" = aten.relu_.default(addmm_7);  addmm_7 = None
    unsqueeze_4: "float32[6, 1, 1]" = aten.unsqueeze.default(gather_default, 2)
    index_9: "float32[u2, 1]" = aten.index.Tensor(unsqueeze_4, [getitem_12, getitem_13]);  unsqueeze_4 = getitem_13 = None
    mul_70: "float32[u2, 8]" = aten.mul.Tensor(relu_4, index_9)
    index_add_4: "float32[6, 8]" = aten.index_add_.default(zeros_like_2, 0, getitem_12, mul_70);  zeros_like_2 = getitem_12 = mul_70 = None
    unbind_5: "(int64[u3], int64[u3])" = aten.unbind.int(nonzero_3, 1);  nonzero_3 = None
    getitem_14: "int64[u3]" = unbind_5[0]
    getitem_15: "int64[u3]" = unbind_5[1];  unbind_5 = None
    index_10: "float32[u3, 8]" = aten.index.Tensor(add_50, [getitem_14])
    # layers.1.experts.1 (recomputed)
    t_29: "float32[8, 8]" = aten.t.default(layers_1_experts_1_weight);  layers_1_experts_1_weight = None
    addmm_8: "float32[u3, 8]" = aten.addmm.default(layers_1_experts_1_bias, index_10, t_29);  layers_1_experts_1_bias = t_29 = None
    # layers.1 (recomputed)
    relu_5: "float32[u3, 8]" = aten.relu_.default(addmm_8);  addmm_8 = None
    unsqueeze_5: "float32[6, 1, 1]" = aten.unsqueeze.default(gather_default, 2);  gather_default = None
    index_11: "float32[u3, 1]" = aten.index.Tensor(unsqueeze_5, [getitem_14, getitem_15]);  unsqueeze_5 = getitem_15 = None
    mul_71: "float32[u3, 8]" = aten.mul.Tensor(relu_5, index_11)
    index_add_5: "float32[6, 8]" = aten.index_add_.default(index_add_4, 0, getitem_14, mul_71);  index_add_4 = getitem_14 = mul_71 = None
    add_107: "float32[6, 8]" = aten.add.out(add_50, index_add_5, out=index_add_5);  add_50 = index_add_5 = None
    # model
    pow_2: "float32[6, 8]" = aten.pow.Tensor_Scalar_out(add_107, 1.0, out=add_107);  add_107 = None
    mul_60: "float32[6, 8]" = aten.mul_.Scalar(pow_2, 2.0);  pow_2 = None
    return (_softmax_2, index_8, relu_4, index_9, index_10, relu_5, index_11, mul_60)
