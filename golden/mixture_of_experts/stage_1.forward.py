import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_forward(args):
    (
        layers_1_router_weight,  # float32[2, 8]
        layers_1_router_bias,  # float32[2]
        layers_1_experts_0_weight,  # float32[8, 8]
        layers_1_experts_0_bias,  # float32[8]
        layers_1_experts_1_weight,  # float32[8, 8]
        layers_1_experts_1_bias,  # float32[8]
        add_50,  # float32[6, 8]
    ) = args
    args.clear()
    # layers.1.router
    t_3: "float32[8, 2]" = aten.t.default(layers_1_router_weight);  layers_1_router_weight = None
    addmm_3: "float32[6, 2]" = aten.addmm.default(layers_1_router_bias, add_50, t_3);  layers_1_router_bias = t_3 = None
    # layers.1
    _softmax_1: "float32[6, 2]" = aten._softmax.out(addmm_3, -1, False, out=addmm_3);  addmm_3 = None
    topk_1: "(float32[6, 1], int64[6, 1])" = aten.topk.default(_softmax_1, 1);  _softmax_1 = None
    getitem_6: "float32[6, 1]" = topk_1[0]
    getitem_7: "int64[6, 1]" = topk_1[1];  topk_1 = None
    zeros_like_1: "float32[6, 8]" = aten.zeros_like.default(add_50, pin_memory=False)
    eq_20: "bool[6, 1]" = aten.eq.Scalar(getitem_7, 0)
    nonzero_2: "int64[u2, 2]" = aten.nonzero.default(eq_20);  eq_20 = None
    sym_size_int_2: "Sym(u2)" = aten.sym_size.int(nonzero_2, 0)
    unbind_2: "(int64[u2], int64[u2])" = aten.unbind.int(nonzero_2, 1)
    getitem_8: "int64[u2]" = unbind_2[0]
    getitem_9: "int64[u2]" = unbind_2[1];  unbind_2 = None
    ge_5: "Sym(u2 >= 0)" = operator.ge(sym_size_int_2, 0)
    _assert_scalar_4: "NoneType" = aten._assert_scalar.default(ge_5, "Runtime assertion failed for expression u2 >= 0 on node 'ge_2'");  ge_5 = _assert_scalar_4 = None
    le_2: "Sym(u2 <= 6)" = operator.le(sym_size_int_2, 6)
    _assert_scalar_5: "NoneType" = aten._assert_scalar.default(le_2, "Runtime assertion failed for expression u2 <= 6 on node 'le_2'");  le_2 = _assert_scalar_5 = None
    index_4: "float32[u2, 8]" = aten.index.Tensor(add_50, [getitem_8])
    # layers.1.experts.0
    t_4: "float32[8, 8]" = aten.t.default(layers_1_experts_0_weight);  layers_1_experts_0_weight = None
    addmm_4: "float32[u2, 8]" = aten.addmm.default(layers_1_experts_0_bias, index_4, t_4);  layers_1_experts_0_bias = index_4 = t_4 = None
    # layers.1
    relu_2: "float32[u2, 8]" = aten.relu_.default(addmm_4);  addmm_4 = None
    unsqueeze_2: "float32[6, 1, 1]" = aten.unsqueeze.default(getitem_6, 2)
    index_5: "float32[u2, 1]" = aten.index.Tensor(unsqueeze_2, [getitem_8, getitem_9]);  unsqueeze_2 = getitem_9 = None
    mul_42: "float32[u2, 8]" = aten.mul_.Tensor(relu_2, index_5);  relu_2 = index_5 = None
    index_add_2: "float32[6, 8]" = aten.index_add_.default(zeros_like_1, 0, getitem_8, mul_42);  zeros_like_1 = getitem_8 = mul_42 = None
    eq_30: "bool[6, 1]" = aten.eq.Scalar(getitem_7, 1)
    nonzero_3: "int64[u3, 2]" = aten.nonzero.default(eq_30);  eq_30 = None
    sym_size_int_3: "Sym(u3)" = aten.sym_size.int(nonzero_3, 0)
    unbind_3: "(int64[u3], int64[u3])" = aten.unbind.int(nonzero_3, 1)
    getitem_10: "int64[u3]" = unbind_3[0]
    getitem_11: "int64[u3]" = unbind_3[1];  unbind_3 = None
    ge_7: "Sym(u3 >= 0)" = operator.ge(sym_size_int_3, 0)
    _assert_scalar_6: "NoneType" = aten._assert_scalar.default(ge_7, "Runtime assertion failed for expression u3 >= 0 on node 'ge_3'");  ge_7 = _assert_scalar_6 = None
    le_3: "Sym(u3 <= 6)" = operator.le(sym_size_int_3, 6)
    _assert_scalar_7: "NoneType" = aten._assert_scalar.default(le_3, "Runtime assertion failed for expression u3 <= 6 on node 'le_3'");  le_3 = _assert_scalar_7 = None
    index_6: "float32[u3, 8]" = aten.index.Tensor(add_50, [getitem_10])
    # layers.1.experts.1
    t_5: "float32[8, 8]" = aten.t.default(layers_1_experts_1_weight);  layers_1_experts_1_weight = None
    addmm_5: "float32[u3, 8]" = aten.addmm.default(layers_1_experts_1_bias, index_6, t_5);  layers_1_experts_1_bias = index_6 = t_5 = None
    # layers.1
    relu_3: "float32[u3, 8]" = aten.relu_.default(addmm_5);  addmm_5 = None
    unsqueeze_3: "float32[6, 1, 1]" = aten.unsqueeze.default(getitem_6, 2);  getitem_6 = None
    index_7: "float32[u3, 1]" = aten.index.Tensor(unsqueeze_3, [getitem_10, getitem_11]);  unsqueeze_3 = getitem_11 = None
    mul_57: "float32[u3, 8]" = aten.mul_.Tensor(relu_3, index_7);  relu_3 = index_7 = None
    index_add_3: "float32[6, 8]" = aten.index_add_.default(index_add_2, 0, getitem_10, mul_57);  index_add_2 = getitem_10 = mul_57 = None
    add_101: "float32[6, 8]" = aten.add.out(add_50, index_add_3, out=index_add_3);  add_50 = index_add_3 = None
    # model
    pow_1: "float32[6, 8]" = aten.pow.Tensor_Scalar_out(add_101, 2, out=add_101);  add_101 = None
    mean: "float32[]" = aten.mean.default(pow_1);  pow_1 = None
    return (getitem_7, nonzero_2, sym_size_int_2, nonzero_3, sym_size_int_3, mean)
