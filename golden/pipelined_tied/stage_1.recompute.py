import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_recompute(args):
    (
        mm_2,  # float32[2, 4]
    ) = args
    args.clear()
    # model
    pow_2: "float32[2, 4]" = aten.pow.Tensor_Scalar(mm_2, 1.0);  mm_2 = None
    mul: "float32[2, 4]" = aten.mul_.Scalar(pow_2, 2.0);  pow_2 = None
    return (mul,)
