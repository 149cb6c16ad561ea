import operator

import torch
from torch import device, inf, nan

from roundpipe_fx.operators.gradient_sums import add_product_to

aten = torch.ops.aten


def stage_3_backward(args):
    (
        layers_3_weight,  # float32[4, 4]
        tangents_1,  # float32[]
        sum_layers_3_weight,  # float32[4, 4]
        add_2,  # float32[2, 4]
        tanh_3,  # float32[2, 4]
        mul,  # float32[2, 4]
    ) = args
    args.clear()
    # model
    expand: "float32[2, 4]" = aten.expand.default(tangents_1, [2, 4]);  tangents_1 = None
    div: "float32[2, 4]" = aten.div.Scalar(expand, 8);  expand = None
    mul_1: "float32[2, 4]" = aten.mul_.Tensor(div, mul);  div = mul = None
    tanh_backward: "float32[2, 4]" = aten.tanh_backward.default(mul_1, tanh_3);  tanh_3 = None
    # layers.3
    t_4: "float32[4, 2]" = aten.t.default(tanh_backward)
    added: "float32[4, 4]" = add_product_to(sum_layers_3_weight, t_4, add_2);  sum_layers_3_weight = t_4 = add_2 = None
    mm_5: "float32[2, 4]" = aten.mm.default(tanh_backward, layers_3_weight);  tanh_backward = layers_3_weight = None
    # model
    add_4: "float32[2, 4]" = aten.add_.Tensor(mul_1, mm_5);  mul_1 = mm_5 = None
    return (added, add_4)
