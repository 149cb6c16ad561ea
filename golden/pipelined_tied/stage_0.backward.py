import operator

import torch
from torch import device, inf, nan

from roundpipe_fx.operators.gradient_sums import add_product_to

aten = torch.ops.aten


def stage_0_backward(args):
    (
        kwargs_x,  # float32[2, 4]
        layer_weight,  # float32[4, 4]
        sum_layer_weight,  # float32[4, 4]
        sum_tied_weight,  # float32[4, 4]
        tanh,  # float32[2, 4]
        tanh_1,  # float32[2, 4]
        mm_4,  # float32[2, 4]
    ) = args
    args.clear()
    # model
    tanh_backward: "float32[2, 4]" = aten.tanh_backward.default(mm_4, tanh_1);  mm_4 = tanh_1 = None
    # layer
    t_7: "float32[4, 2]" = aten.t.default(tanh_backward)
    added_1: "float32[4, 4]" = add_product_to(sum_layer_weight, t_7, tanh);  sum_layer_weight = t_7 = None
    mm_6: "float32[2, 4]" = aten.mm.default(tanh_backward, layer_weight);  tanh_backward = layer_weight = None
    # model
    tanh_backward_1: "float32[2, 4]" = aten.tanh_backward.grad_input(mm_6, tanh, grad_input=mm_6);  mm_6 = tanh = None
    # tied
    t_11: "float32[4, 2]" = aten.t.default(tanh_backward_1);  tanh_backward_1 = None
    added_2: "float32[4, 4]" = add_product_to(sum_tied_weight, t_11, kwargs_x);  sum_tied_weight = t_11 = kwargs_x = None
    return (added_1, added_2)
