import operator

import torch
from torch import device, inf, nan

from roundpipe_fx.operators.gradient_sums import add_product_to

aten = torch.ops.aten


def stage_1_backward(args):
    (
        tied_weight,  # float32[4, 4]
        tangents_1,  # float32[]
        sum_tied_weight,  # float32[4, 4]
        tanh_1,  # float32[2, 4]
        mul,  # float32[2, 4]
    ) = args
    args.clear()
    # model
    expand: "float32[2, 4]" = aten.expand.default(tangents_1, [2, 4]);  tangents_1 = None
    div: "float32[2, 4]" = aten.div.Scalar(expand, 8);  expand = None
    mul_1: "float32[2, 4]" = aten.mul_.Tensor(div, mul);  div = mul = None
    # tied
    t_3: "float32[4, 2]" = aten.t.default(mul_1)
    added: "float32[4, 4]" = add_product_to(sum_tied_weight, t_3, tanh_1);  sum_tied_weight = t_3 = tanh_1 = None
    mm_4: "float32[2, 4]" = aten.mm.default(mul_1, tied_weight);  mul_1 = tied_weight = None
    return (added, mm_4)
