import operator

import torch
from torch import device, inf, nan

from roundpipe_fx.operators.gradient_sums import add_product_to

aten = torch.ops.aten


def stage_4_backward(args):
    (
        kwargs_x,  # float32[2, 4]
        layers_1_weight,  # float32[4, 4]
        layers_2_weight,  # float32[4, 4]
        sum_layers_2_weight,  # float32[4, 4]
        sum_layers_1_weight,  # float32[4, 4]
        sum_layers_0_weight,  # float32[4, 4]
        tanh_4,  # float32[2, 4]
        add_7,  # float32[2, 4]
        tanh_5,  # float32[2, 4]
        add_8,  # float32[2, 4]
        tanh_6,  # float32[2, 4]
        add_4,  # float32[2, 4]
    ) = args
    args.clear()
    # model
    tanh_backward_1: "float32[2, 4]" = aten.tanh_backward.default(add_4, tanh_6);  tanh_6 = None
    # layers.2
    t_8: "float32[4, 2]" = aten.t.default(tanh_backward_1)
    added_1: "float32[4, 4]" = add_product_to(sum_layers_2_weight, t_8, add_8);  sum_layers_2_weight = t_8 = add_8 = None
    mm_7: "float32[2, 4]" = aten.mm.default(tanh_backward_1, layers_2_weight);  tanh_backward_1 = layers_2_weight = None
    # model
    add_5: "float32[2, 4]" = aten.add.out(add_4, mm_7, out=mm_7);  add_4 = mm_7 = None
    tanh_backward_2: "float32[2, 4]" = aten.tanh_backward.default(add_5, tanh_5);  tanh_5 = None
    # layers.1
    t_12: "float32[4, 2]" = aten.t.default(tanh_backward_2)
    added_2: "float32[4, 4]" = add_product_to(sum_layers_1_weight, t_12, add_7);  sum_layers_1_weight = t_12 = add_7 = None
    mm_9: "float32[2, 4]" = aten.mm.default(tanh_backward_2, layers_1_weight);  tanh_backward_2 = layers_1_weight = None
    # model
    add_6: "float32[2, 4]" = aten.add_.Tensor(add_5, mm_9);  add_5 = mm_9 = None
    tanh_backward_3: "float32[2, 4]" = aten.tanh_backward.grad_input(add_6, tanh_4, grad_input=add_6);  add_6 = tanh_4 = None
    # layers.0
    t_16: "float32[4, 2]" = aten.t.default(tanh_backward_3);  tanh_backward_3 = None
    added_3: "float32[4, 4]" = add_product_to(sum_layers_0_weight, t_16, kwargs_x);  sum_layers_0_weight = t_16 = kwargs_x = None
    return (added_1, added_2, added_3)
