import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
    (
        x,  # float32[8, 4]
        first_weight,  # float32[4, 4]
        second_weight,  # float32[4, 4]
    ) = args
    args.clear()
    # model
    linalg_vector_norm: "float32[]" = aten.linalg_vector_norm.default(x)
    div: "float32[8, 4]" = aten.div.Tensor(x, linalg_vector_norm);  x = None
    # first
    t: "float32[4, 4]" = aten.t.default(first_weight);  first_weight = None
    mm: "float32[8, 4]" = aten.mm.default(div, t);  div = t = None
    # model
    tanh: "float32[8, 4]" = aten.tanh_.default(mm);  mm = None
    sin: "float32[8, 4]" = aten.sin_.default(tanh);  tanh = None
    # second
    t_1: "float32[4, 4]" = aten.t.default(second_weight);  second_weight = None
    mm_1: "float32[8, 4]" = aten.mm.default(sin, t_1);  sin = t_1 = None
    # model
    tanh_1: "float32[8, 4]" = aten.tanh_.default(mm_1);  mm_1 = None
    pow_1: "float32[8, 4]" = aten.pow.Tensor_Scalar(tanh_1, 2)
    mean: "float32[]" = aten.mean.default(pow_1);  pow_1 = None
    return (linalg_vector_norm, tanh_1, mean)
