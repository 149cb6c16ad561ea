import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        layers_0_weight,  # float32[4, 4]
        x,  # float32[64, 4]
        layers_1_weight,  # float32[4, 4]
        layers_2_weight,  # float32[4, 4]
        layers_3_weight,  # float32[4, 4]
        tangents_1,  # float32[]
        add_2,  # float32[64, 4]
        tanh_3,  # float32[64, 4]
        add_3,  # float32[64, 4]
    ) = args
    args.clear()
    # model
    pow_2: "float32[64, 4]" = aten.pow.Tensor_Scalar(add_3, 1.0);  add_3 = None
    mul: "float32[64, 4]" = aten.mul_.Scalar(pow_2, 2.0);  pow_2 = None
    expand: "float32[64, 4]" = aten.expand.default(tangents_1, [64, 4]);  tangents_1 = None
    div: "float32[64, 4]" = aten.div.Scalar(expand, 256);  expand = None
    mul_1: "float32[64, 4]" = aten.mul_.Tensor(div, mul);  div = mul = None
    tanh_backward: "float32[64, 4]" = aten.tanh_backward.default(mul_1, tanh_3);  tanh_3 = None
    # layers.3
    mm_5: "float32[64, 4]" = aten.mm.default(tanh_backward, layers_3_weight);  layers_3_weight = None
    # model
    add_4: "float32[64, 4]" = aten.add_.Tensor(mul_1, mm_5);  mul_1 = mm_5 = None
    # layers.3
    t_4: "float32[4, 64]" = aten.t.default(tanh_backward);  tanh_backward = None
    mm_4: "float32[4, 4]" = aten.mm.default(t_4, add_2);  t_4 = add_2 = None
    # layers.0 (recomputed)
    t_17: "float32[4, 4]" = aten.t.default(layers_0_weight);  layers_0_weight = None
    mm_11: "float32[64, 4]" = aten.mm.default(x, t_17)
    # model (recomputed)
    tanh_4: "float32[64, 4]" = aten.tanh_.default(mm_11);  mm_11 = None
    add_7: "float32[64, 4]" = aten.add.out(x, tanh_4, out=tanh_4);  tanh_4 = None
    # layers.1 (recomputed)
    t_18: "float32[4, 4]" = aten.t.default(layers_1_weight)
    mm_12: "float32[64, 4]" = aten.mm.default(add_7, t_18)
    # model (recomputed)
    tanh_5: "float32[64, 4]" = aten.tanh_.default(mm_12);  mm_12 = None
    add_8: "float32[64, 4]" = aten.add_.Tensor(add_7, tanh_5);  add_7 = tanh_5 = None
    # layers.2 (recomputed)
    t_19: "float32[4, 4]" = aten.t.default(layers_2_weight)
    mm_13: "float32[64, 4]" = aten.mm.default(add_8, t_19);  t_19 = None
    # model (recomputed)
    tanh_6: "float32[64, 4]" = aten.tanh_.default(mm_13);  mm_13 = None
    # model
    tanh_backward_1: "float32[64, 4]" = aten.tanh_backward.grad_input(add_4, tanh_6, grad_input=tanh_6);  tanh_6 = None
    # layers.2
    mm_7: "float32[64, 4]" = aten.mm.default(tanh_backward_1, layers_2_weight);  layers_2_weight = None
    # model
    add_5: "float32[64, 4]" = aten.add_.Tensor(add_4, mm_7);  add_4 = mm_7 = None
    # layers.2
    t_8: "float32[4, 64]" = aten.t.default(tanh_backward_1);  tanh_backward_1 = None
    mm_6: "float32[4, 4]" = aten.mm.default(t_8, add_8);  t_8 = add_8 = None
    # layers.0 (recomputed)
    mm_14: "float32[64, 4]" = aten.mm.default(x, t_17)
    # model (recomputed)
    tanh_7: "float32[64, 4]" = aten.tanh_.default(mm_14);  mm_14 = None
    add_9: "float32[64, 4]" = aten.add.out(x, tanh_7, out=tanh_7);  tanh_7 = None
    # layers.1 (recomputed)
    mm_15: "float32[64, 4]" = aten.mm.default(add_9, t_18);  t_18 = None
    # model (recomputed)
    tanh_8: "float32[64, 4]" = aten.tanh_.default(mm_15);  mm_15 = None
    # model
    tanh_backward_2: "float32[64, 4]" = aten.tanh_backward.grad_input(add_5, tanh_8, grad_input=tanh_8);  tanh_8 = None
    # layers.1
    mm_9: "float32[64, 4]" = aten.mm.default(tanh_backward_2, layers_1_weight);  layers_1_weight = None
    # model
    add_6: "float32[64, 4]" = aten.add_.Tensor(add_5, mm_9);  add_5 = mm_9 = None
    # layers.1
    t_12: "float32[4, 64]" = aten.t.default(tanh_backward_2);  tanh_backward_2 = None
    mm_8: "float32[4, 4]" = aten.mm.default(t_12, add_9);  t_12 = add_9 = None
    # layers.0 (recomputed)
    mm_16: "float32[64, 4]" = aten.mm.default(x, t_17);  t_17 = None
    # model (recomputed)
    tanh_9: "float32[64, 4]" = aten.tanh_.default(mm_16);  mm_16 = None
    # model
    tanh_backward_3: "float32[64, 4]" = aten.tanh_backward.grad_input(add_6, tanh_9, grad_input=add_6);  add_6 = tanh_9 = None
    # layers.0
    t_16: "float32[4, 64]" = aten.t.default(tanh_backward_3);  tanh_backward_3 = None
    mm_10: "float32[4, 4]" = aten.mm.default(t_16, x);  t_16 = x = None
    return (mm_4, mm_6, mm_8, mm_10)
