import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
    (
        layers_0_weight,  # float32[4, 4]
        kwargs_x,  # float32[2, 4]
        layers_1_weight,  # float32[4, 4]
        layers_2_weight,  # float32[4, 4]
    ) = args
    args.clear()
    # layers.0
    t: "float32[4, 4]" = aten.t.default(layers_0_weight);  layers_0_weight = None
    mm: "float32[2, 4]" = aten.mm.default(kwargs_x, t);  t = None
    # model
    tanh: "float32[2, 4]" = aten.tanh_.default(mm);  mm = None
    add: "float32[2, 4]" = aten.add.out(kwargs_x, tanh, out=tanh);  kwargs_x = tanh = None
    # layers.1
    t_1: "float32[4, 4]" = aten.t.default(layers_1_weight);  layers_1_weight = None
    mm_1: "float32[2, 4]" = aten.mm.default(add, t_1);  t_1 = None
    # model
    tanh_1: "float32[2, 4]" = aten.tanh_.default(mm_1);  mm_1 = None
    add_1: "float32[2, 4]" = aten.add_.Tensor(add, tanh_1);  add = tanh_1 = None
    # layers.2
    t_2: "float32[4, 4]" = aten.t.default(layers_2_weight);  layers_2_weight = None
    mm_2: "float32[2, 4]" = aten.mm.default(add_1, t_2);  t_2 = None
    # model
    tanh_2: "float32[2, 4]" = aten.tanh_.default(mm_2);  mm_2 = None
    add_2: "float32[2, 4]" = aten.add_.Tensor(add_1, tanh_2);  add_1 = tanh_2 = None
    return (add_2,)
