import operator

import torch
from torch import device, inf, nan

from roundpipe_fx.operators.gradient_sums import add_product_to

aten = torch.ops.aten


def stage_1_weight(args):
    (
        sum_layers_3_weight,  # float32[4, 4]
        add_2,  # float32[2, 4]
        tanh_backward,  # float32[2, 4]
    ) = args
    args.clear()
    # layers.3
    t_4: "float32[4, 2]" = aten.t.default(tanh_backward);  tanh_backward = None
    added: "float32[4, 4]" = add_product_to(sum_layers_3_weight, t_4, add_2);  sum_layers_3_weight = t_4 = add_2 = None
    return (added,)
