import operator

import torch
from torch import device, inf, nan

from roundpipe_fx.operators.gradient_sums import add_product_to

aten = torch.ops.aten


def stage_0_weight(args):
    (
        kwargs_x,  # float32[2, 4]
        sum_layers_2_weight,  # float32[4, 4]
        sum_layers_1_weight,  # float32[4, 4]
        sum_layers_0_weight,  # float32[4, 4]
        tanh_5,  # float32[2, 4]
        add_8,  # float32[2, 4]
        add_9,  # float32[2, 4]
        tanh_backward_1,  # float32[2, 4]
        tanh_backward_2,  # float32[2, 4]
        add_6,  # float32[2, 4]
    ) = args
    args.clear()
    # layers.2
    t_8: "float32[4, 2]" = aten.t.default(tanh_backward_1);  tanh_backward_1 = None
    added_1: "float32[4, 4]" = add_product_to(sum_layers_2_weight, t_8, add_9);  sum_layers_2_weight = t_8 = add_9 = None
    # layers.1
    t_12: "float32[4, 2]" = aten.t.default(tanh_backward_2);  tanh_backward_2 = None
    added_2: "float32[4, 4]" = add_product_to(sum_layers_1_weight, t_12, add_8);  sum_layers_1_weight = t_12 = add_8 = None
    # model
    tanh_backward_3: "float32[2, 4]" = aten.tanh_backward.default(add_6, tanh_5);  add_6 = tanh_5 = None
    # layers.0
    t_16: "float32[4, 2]" = aten.t.default(tanh_backward_3);  tanh_backward_3 = None
    added_3: "float32[4, 4]" = add_product_to(sum_layers_0_weight, t_16, kwargs_x);  sum_layers_0_weight = t_16 = kwargs_x = None
    return (added_1, added_2, added_3)
