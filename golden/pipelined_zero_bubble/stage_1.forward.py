import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_forward(args):
    (
        layers_3_weight,  # float32[4, 4]
        add_2,  # float32[2, 4]
    ) = args
    args.clear()
    # layers.3
    t_3: "float32[4, 4]" = aten.t.default(layers_3_weight);  layers_3_weight = None
    mm_3: "float32[2, 4]" = aten.mm.default(add_2, t_3);  t_3 = None
    # model
    tanh_3: "float32[2, 4]" = aten.tanh_.default(mm_3);  mm_3 = None
    add_3: "float32[2, 4]" = aten.add.out(add_2, tanh_3, out=tanh_3);  add_2 = tanh_3 = None
    pow_1: "float32[2, 4]" = aten.pow.Tensor_Scalar_out(add_3, 2, out=add_3);  add_3 = None
    mean: "float32[]" = aten.mean.default(pow_1);  pow_1 = None
    return (mean,)
