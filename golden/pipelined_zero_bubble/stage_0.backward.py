import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        layers_1_weight,  # float32[4, 4]
        layers_2_weight,  # float32[4, 4]
        tanh_6,  # float32[2, 4]
        tanh_7,  # float32[2, 4]
        add_4,  # float32[2, 4]
    ) = args
    args.clear()
    # layers.1 (again)
    t_24: "float32[4, 4]" = aten.t.default(layers_1_weight);  layers_1_weight = None
    # model (again)
    detach_10: "float32[2, 4]" = aten.detach.default(tanh_6);  tanh_6 = None
    # layers.2 (again)
    t_23: "float32[4, 4]" = aten.t.default(layers_2_weight);  layers_2_weight = None
    # model (again)
    detach_11: "float32[2, 4]" = aten.detach.default(tanh_7);  tanh_7 = None
    # model
    detach_5: "float32[2, 4]" = aten.detach.default(detach_11);  detach_11 = None
    tanh_backward_1: "float32[2, 4]" = aten.tanh_backward.default(add_4, detach_5);  detach_5 = None
    # layers.2
    t_10: "float32[4, 4]" = aten.t.default(t_23);  t_23 = None
    mm_7: "float32[2, 4]" = aten.mm.default(tanh_backward_1, t_10);  t_10 = None
    # model
    add_5: "float32[2, 4]" = aten.add.out(add_4, mm_7, out=mm_7);  add_4 = mm_7 = None
    detach_6: "float32[2, 4]" = aten.detach.default(detach_10);  detach_10 = None
    tanh_backward_2: "float32[2, 4]" = aten.tanh_backward.default(add_5, detach_6);  detach_6 = None
    # layers.1
    t_14: "float32[4, 4]" = aten.t.default(t_24);  t_24 = None
    mm_9: "float32[2, 4]" = aten.mm.default(tanh_backward_2, t_14);  t_14 = None
    # model
    add_6: "float32[2, 4]" = aten.add_.Tensor(add_5, mm_9);  add_5 = mm_9 = None
    return (tanh_backward_1, tanh_backward_2, add_6)
