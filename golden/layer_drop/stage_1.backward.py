import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_backward(args):
    (
        layers_1_weight,  # float32[8, 8]
        last_weight,  # float32[1, 8]
        tangents_1,  # float32[]
        mul_tensor_1,  # float32[4, 8]
        tanh_2,  # float32[4, 8]
        run_with_rng_state,  # bool[4, 8]
        mul_tensor_9,  # float32[4, 8]
        mul,  # float32[4, 1]
    ) = args
    args.clear()
    # model
    expand: "float32[4, 1]" = aten.expand.default(tangents_1, [4, 1]);  tangents_1 = None
    mul_1: "float32[4, 1]" = aten.mul.Tensor(expand, mul);  expand = mul = None
    # last
    mm: "float32[4, 8]" = aten.mm.default(mul_1, last_weight);  last_weight = None
    t_4: "float32[1, 4]" = aten.t.default(mul_1)
    mm_1: "float32[1, 8]" = aten.mm.default(t_4, mul_tensor_9);  t_4 = mul_tensor_9 = None
    sum_2: "float32[1, 1]" = aten.sum.dim_IntList(mul_1, [0], True);  mul_1 = None
    view: "float32[1]" = aten.view.default(sum_2, [1]);  sum_2 = None
    # model
    mul_tensor_4: "float32[4, 8]" = aten.mul_.Tensor(mm, run_with_rng_state);  mm = run_with_rng_state = None
    mul_tensor_5: "float32[4, 8]" = aten.mul_.Tensor(mul_tensor_4, 2.0);  mul_tensor_4 = None
    tanh_backward: "float32[4, 8]" = aten.tanh_backward.grad_input(mul_tensor_5, tanh_2, grad_input=mul_tensor_5);  mul_tensor_5 = tanh_2 = None
    # layers.1
    mm_2: "float32[4, 8]" = aten.mm.default(tanh_backward, layers_1_weight);  layers_1_weight = None
    t_8: "float32[8, 4]" = aten.t.default(tanh_backward)
    mm_3: "float32[8, 8]" = aten.mm.default(t_8, mul_tensor_1);  t_8 = mul_tensor_1 = None
    sum_3: "float32[1, 8]" = aten.sum.dim_IntList(tanh_backward, [0], True);  tanh_backward = None
    view_1: "float32[8]" = aten.view.default(sum_3, [8]);  sum_3 = None
    return (mm_1, view, mm_2, mm_3, view_1)
