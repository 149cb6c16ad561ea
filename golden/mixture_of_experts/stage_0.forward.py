import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
    (
        layers_0_router_weight,  # float32[2, 8]
        layers_0_router_bias,  # float32[2]
        x,  # float32[6, 8]
        layers_0_experts_0_weight,  # float32[8, 8]
        layers_0_experts_0_bias,  # float32[8]
        layers_0_experts_1_weight,  # float32[8, 8]
        layers_0_experts_1_bias,  # float32[8]
    ) = args
    args.clear()
    # layers.0.router
    t: "float32[8, 2]" = aten.t.default(layers_0_router_weight);  layers_0_router_weight = None
    addmm: "float32[6, 2]" = aten.addmm.default(layers_0_router_bias, x, t);  layers_0_router_bias = t = None
    # layers.0
    _softmax: "float32[6, 2]" = aten._softmax.out(addmm, -1, False, out=addmm);  addmm = None
    topk: "(float32[6, 1], int64[6, 1])" = aten.topk.default(_softmax, 1);  _softmax = None
    getitem: "float32[6, 1]" = topk[0]
    getitem_1: "int64[6, 1]" = topk[1];  topk = None
    zeros_like: "float32[6, 8]" = aten.zeros_like.default(x, pin_memory=False)
    eq: "bool[6, 1]" = aten.eq.Scalar(getitem_1, 0)
    nonzero: "int64[u0, 2]" = aten.nonzero.default(eq);  eq = None
    sym_size_int: "Sym(u0)" = aten.sym_size.int(nonzero, 0)
    unbind: "(int64[u0], int64[u0])" = aten.unbind.int(nonzero, 1)
    getitem_2: "int64[u0]" = unbind[0]
    getitem_3: "int64[u0]" = unbind[1];  unbind = None
    ge_1: "Sym(u0 >= 0)" = operator.ge(sym_size_int, 0)
    _assert_scalar: "NoneType" = aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge_1 = _assert_scalar = None
    le: "Sym(u0 <= 6)" = operator.le(sym_size_int, 6)
    _assert_scalar_1: "NoneType" = aten._assert_scalar.default(le, "Runtime assertion failed for expression u0 <= 6 on node 'le'");  le = _assert_scalar_1 = None
    index: "float32[u0, 8]" = aten.index.Tensor(x, [getitem_2])
    # layers.0.experts.0
    t_1: "float32[8, 8]" = aten.t.default(layers_0_experts_0_weight);  layers_0_experts_0_weight = None
    addmm_1: "float32[u0, 8]" = aten.addmm.default(layers_0_experts_0_bias, index, t_1);  layers_0_experts_0_bias = index = t_1 = None
    # layers.0
    relu: "float32[u0, 8]" = aten.relu_.default(addmm_1);  addmm_1 = None
    unsqueeze: "float32[6, 1, 1]" = aten.unsqueeze.default(getitem, 2)
    index_1: "float32[u0, 1]" = aten.index.Tensor(unsqueeze, [getitem_2, getitem_3]);  unsqueeze = getitem_3 = None
    mul_12: "float32[u0, 8]" = aten.mul_.Tensor(relu, index_1);  relu = index_1 = None
    index_add: "float32[6, 8]" = aten.index_add_.default(zeros_like, 0, getitem_2, mul_12);  zeros_like = getitem_2 = mul_12 = None
    eq_10: "bool[6, 1]" = aten.eq.Scalar(getitem_1, 1)
    nonzero_1: "int64[u1, 2]" = aten.nonzero.default(eq_10);  eq_10 = None
    sym_size_int_1: "Sym(u1)" = aten.sym_size.int(nonzero_1, 0)
    unbind_1: "(int64[u1], int64[u1])" = aten.unbind.int(nonzero_1, 1)
    getitem_4: "int64[u1]" = unbind_1[0]
    getitem_5: "int64[u1]" = unbind_1[1];  unbind_1 = None
    ge_3: "Sym(u1 >= 0)" = operator.ge(sym_size_int_1, 0)
    _assert_scalar_2: "NoneType" = aten._assert_scalar.default(ge_3, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_3 = _assert_scalar_2 = None
    le_1: "Sym(u1 <= 6)" = operator.le(sym_size_int_1, 6)
    _assert_scalar_3: "NoneType" = aten._assert_scalar.default(le_1, "Runtime assertion failed for expression u1 <= 6 on node 'le_1'");  le_1 = _assert_scalar_3 = None
    index_2: "float32[u1, 8]" = aten.index.Tensor(x, [getitem_4])
    # layers.0.experts.1
    t_2: "float32[8, 8]" = aten.t.default(layers_0_experts_1_weight);  layers_0_experts_1_weight = None
    addmm_2: "float32[u1, 8]" = aten.addmm.default(layers_0_experts_1_bias, index_2, t_2);  layers_0_experts_1_bias = index_2 = t_2 = None
    # layers.0
    relu_1: "float32[u1, 8]" = aten.relu_.default(addmm_2);  addmm_2 = None
    unsqueeze_1: "float32[6, 1, 1]" = aten.unsqueeze.default(getitem, 2);  getitem = None
    index_3: "float32[u1, 1]" = aten.index.Tensor(unsqueeze_1, [getitem_4, getitem_5]);  unsqueeze_1 = getitem_5 = None
    mul_27: "float32[u1, 8]" = aten.mul_.Tensor(relu_1, index_3);  relu_1 = index_3 = None
    index_add_1: "float32[6, 8]" = aten.index_add_.default(index_add, 0, getitem_4, mul_27);  index_add = getitem_4 = mul_27 = None
    add_50: "float32[6, 8]" = aten.add.out(x, index_add_1, out=index_add_1);  x = index_add_1 = None
    return (getitem_1, nonzero, sym_size_int, nonzero_1, sym_size_int_1, add_50)
