import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_forward(args):
    (
        tied_weight,  # float32[4, 4]
        tanh_1,  # float32[2, 4]
    ) = args
    args.clear()
    # tied
    t_2: "float32[4, 4]" = aten.t.default(tied_weight);  tied_weight = None
    mm_2: "float32[2, 4]" = aten.mm.default(tanh_1, t_2);  tanh_1 = t_2 = None
    # model
    pow_1: "float32[2, 4]" = aten.pow.Tensor_Scalar(mm_2, 2)
    mean: "float32[]" = aten.mean.default(pow_1);  pow_1 = None
    return (mm_2, mean)
