import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
    (
        tied_weight,  # float32[4, 4]
        kwargs_x,  # float32[2, 4]
        layer_weight,  # float32[4, 4]
    ) = args
    args.clear()
    # tied
    t: "float32[4, 4]" = aten.t.default(tied_weight);  tied_weight = None
    mm: "float32[2, 4]" = aten.mm.default(kwargs_x, t);  kwargs_x = t = None
    # model
    tanh: "float32[2, 4]" = aten.tanh_.default(mm);  mm = None
    # layer
    t_1: "float32[4, 4]" = aten.t.default(layer_weight);  layer_weight = None
    mm_1: "float32[2, 4]" = aten.mm.default(tanh, t_1);  t_1 = None
    # model
    tanh_1: "float32[2, 4]" = aten.tanh_.default(mm_1);  mm_1 = None
    return (tanh, tanh_1)
