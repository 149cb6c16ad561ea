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
    # model
    tanh_backward_1: "float32[2, 4]" = aten.tanh_backward.default(add_4, tanh_7);  tanh_7 = None
    # layers.2
    mm_7: "float32[2, 4]" = aten.mm.default(tanh_backward_1, layers_2_weight);  layers_2_weight = None
    # model
    add_5: "float32[2, 4]" = aten.add.out(add_4, mm_7, out=mm_7);  add_4 = mm_7 = None
    tanh_backward_2: "float32[2, 4]" = aten.tanh_backward.default(add_5, tanh_6);  tanh_6 = None
    # layers.1
    mm_9: "float32[2, 4]" = aten.mm.default(tanh_backward_2, layers_1_weight);  layers_1_weight = None
    # model
    add_6: "float32[2, 4]" = aten.add_.Tensor(add_5, mm_9);  add_5 = mm_9 = None
    return (tanh_backward_1, tanh_backward_2, add_6)
