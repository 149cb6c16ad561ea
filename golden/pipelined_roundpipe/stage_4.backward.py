import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_4_backward(args):
    (
        kwargs_x,  # float32[2, 4]
        layers_1_weight,  # float32[4, 4]
        layers_2_weight,  # float32[4, 4]
        tanh_4,  # float32[2, 4]
        add_7,  # float32[2, 4]
        tanh_5,  # float32[2, 4]
        add_8,  # float32[2, 4]
        tanh_6,  # float32[2, 4]
        add_4,  # float32[2, 4]
    ) = args
    args.clear()
    # model (again)
    detach_8: "float32[2, 4]" = aten.detach.default(tanh_4);  tanh_4 = None
    # layers.1 (again)
    t_24: "float32[4, 4]" = aten.t.default(layers_1_weight);  layers_1_weight = None
    # model (again)
    detach_9: "float32[2, 4]" = aten.detach.default(tanh_5);  tanh_5 = None
    # layers.2 (again)
    t_23: "float32[4, 4]" = aten.t.default(layers_2_weight);  layers_2_weight = None
    # model (again)
    detach_10: "float32[2, 4]" = aten.detach.default(tanh_6);  tanh_6 = None
    # model
    detach_5: "float32[2, 4]" = aten.detach.default(detach_10);  detach_10 = None
    tanh_backward_1: "float32[2, 4]" = aten.tanh_backward.default(add_4, detach_5);  detach_5 = None
    # layers.2
    t_8: "float32[4, 2]" = aten.t.default(tanh_backward_1)
    mm_6: "float32[4, 4]" = aten.mm.default(t_8, add_8);  t_8 = add_8 = None
    t_9: "float32[4, 4]" = aten.t.default(mm_6);  mm_6 = None
    t_10: "float32[4, 4]" = aten.t.default(t_23);  t_23 = None
    mm_7: "float32[2, 4]" = aten.mm.default(tanh_backward_1, t_10);  tanh_backward_1 = t_10 = None
    # model
    add_5: "float32[2, 4]" = aten.add.out(add_4, mm_7, out=mm_7);  add_4 = mm_7 = None
    # layers.2
    t_11: "float32[4, 4]" = aten.t.default(t_9);  t_9 = None
    # model
    detach_6: "float32[2, 4]" = aten.detach.default(detach_9);  detach_9 = None
    tanh_backward_2: "float32[2, 4]" = aten.tanh_backward.default(add_5, detach_6);  detach_6 = None
    # layers.1
    t_12: "float32[4, 2]" = aten.t.default(tanh_backward_2)
    mm_8: "float32[4, 4]" = aten.mm.default(t_12, add_7);  t_12 = add_7 = None
    t_13: "float32[4, 4]" = aten.t.default(mm_8);  mm_8 = None
    t_14: "float32[4, 4]" = aten.t.default(t_24);  t_24 = None
    mm_9: "float32[2, 4]" = aten.mm.default(tanh_backward_2, t_14);  tanh_backward_2 = t_14 = None
    # model
    add_6: "float32[2, 4]" = aten.add_.Tensor(add_5, mm_9);  add_5 = mm_9 = None
    # layers.1
    t_15: "float32[4, 4]" = aten.t.default(t_13);  t_13 = None
    # model
    detach_7: "float32[2, 4]" = aten.detach.default(detach_8);  detach_8 = None
    tanh_backward_3: "float32[2, 4]" = aten.tanh_backward.grad_input(add_6, detach_7, grad_input=add_6);  add_6 = detach_7 = None
    # layers.0
    t_16: "float32[4, 2]" = aten.t.default(tanh_backward_3);  tanh_backward_3 = None
    mm_10: "float32[4, 4]" = aten.mm.default(t_16, kwargs_x);  t_16 = kwargs_x = None
    t_17: "float32[4, 4]" = aten.t.default(mm_10);  mm_10 = None
    t_18: "float32[4, 4]" = aten.t.default(t_17);  t_17 = None
    return (t_11, t_15, t_18)
