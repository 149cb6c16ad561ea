import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_recompute(args):
    (
        layers_0_router_weight,  # float32[2, 8]
        layers_0_router_bias,  # float32[2]
        x,  # float32[6, 8]
        layers_0_experts_0_weight,  # float32[8, 8]
        layers_0_experts_0_bias,  # float32[8]
        layers_0_experts_1_weight,  # float32[8, 8]
        layers_0_experts_1_bias,  # float32[8]
        getitem_1,  # int64[6, 1]
        nonzero,  # int64[u0, 2]
        nonzero_1,  # int64[u1, 2]
    ) = args
    args.clear()
    # layers.0.router (recomputed)
    t_30: "float32[8, 2]" = aten.t.default(layers_0_router_weight);  layers_0_router_weight = None
    addmm_9: "float32[6, 2]" = aten.addmm.default(layers_0_router_bias, x, t_30);  layers_0_router_bias = t_30 = None
    # layers.0 (recomputed)
    _softmax_3: "float32[6, 2]" = aten._softmax.out(addmm_9, -1, False, out=addmm_9);  addmm_9 = None
    gather_default_1: "float32[6, 1]" = aten.gather.default(_softmax_3, -1, getitem_1);  getitem_1 = None
    unbind_6: "(int64[u0], int64[u0])" = aten.unbind.int(nonzero, 1);  nonzero = None
    getitem_16: "int64[u0]" = unbind_6[0]
    getitem_17: "int64[u0]" = unbind_6[1];  unbind_6 = None
    index_12: "float32[u0, 8]" = aten.index.Tensor(x, [getitem_16])
    # layers.0.experts.0 (recomputed)
    t_31: "float32[8, 8]" = aten.t.default(layers_0_experts_0_weight);  layers_0_experts_0_weight = None
    addmm_10: "float32[u0, 8]" = aten.addmm.default(layers_0_experts_0_bias, index_12, t_31);  layers_0_experts_0_bias = t_31 = None
    # layers.0 (recomputed)
    relu_6: "float32[u0, 8]" = aten.relu_.default(addmm_10);  addmm_10 = None
    unsqueeze_6: "float32[6, 1, 1]" = aten.unsqueeze.default(gather_default_1, 2)
    index_13: "float32[u0, 1]" = aten.index.Tensor(unsqueeze_6, [getitem_16, getitem_17]);  unsqueeze_6 = getitem_16 = getitem_17 = None
    unbind_7: "(int64[u1], int64[u1])" = aten.unbind.int(nonzero_1, 1);  nonzero_1 = None
    getitem_18: "int64[u1]" = unbind_7[0]
    getitem_19: "int64[u1]" = unbind_7[1];  unbind_7 = None
    index_14: "float32[u1, 8]" = aten.index.Tensor(x, [getitem_18]);  x = None
    # layers.0.experts.1 (recomputed)
    t_32: "float32[8, 8]" = aten.t.default(layers_0_experts_1_weight);  layers_0_experts_1_weight = None
    addmm_11: "float32[u1, 8]" = aten.addmm.default(layers_0_experts_1_bias, index_14, t_32);  layers_0_experts_1_bias = t_32 = None
    # layers.0 (recomputed)
    relu_7: "float32[u1, 8]" = aten.relu_.default(addmm_11);  addmm_11 = None
    unsqueeze_7: "float32[6, 1, 1]" = aten.unsqueeze.default(gather_default_1, 2);  gather_default_1 = None
    index_15: "float32[u1, 1]" = aten.index.Tensor(unsqueeze_7, [getitem_18, getitem_19]);  unsqueeze_7 = getitem_18 = getitem_19 = None
    return (_softmax_3, index_12, relu_6, index_13, index_14, relu_7, index_15)
