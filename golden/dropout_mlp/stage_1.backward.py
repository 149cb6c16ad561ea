import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_backward(args):
    (
        layers_1_0_weight,  # float32[8, 8]
        tangents_1,  # float32[]
        mul_tensor_1,  # float32[4, 8]
        addmm_2,  # float32[4, 8]
        run_with_rng_state,  # bool[4, 8]
        mul,  # float32[4, 8]
    ) = args
    args.clear()
    # model
    expand: "float32[4, 8]" = aten.expand.default(tangents_1, [4, 8]);  tangents_1 = None
    div: "float32[4, 8]" = aten.div.Scalar(expand, 32);  expand = None
    mul_1: "float32[4, 8]" = aten.mul_.Tensor(div, mul);  div = mul = None
    # layers.1.2
    mul_tensor_4: "float32[4, 8]" = aten.mul_.Tensor(mul_1, run_with_rng_state);  mul_1 = run_with_rng_state = None
    mul_tensor_5: "float32[4, 8]" = aten.mul_.Tensor(mul_tensor_4, 1.25);  mul_tensor_4 = None
    # layers.1.1
    gelu_backward: "float32[4, 8]" = aten.gelu_backward.grad_input(mul_tensor_5, addmm_2, grad_input=mul_tensor_5);  mul_tensor_5 = addmm_2 = None
    # layers.1.0
    mm: "float32[4, 8]" = aten.mm.default(gelu_backward, layers_1_0_weight);  layers_1_0_weight = None
    t_3: "float32[8, 4]" = aten.t.default(gelu_backward)
    mm_1: "float32[8, 8]" = aten.mm.default(t_3, mul_tensor_1);  t_3 = mul_tensor_1 = None
    sum_1: "float32[1, 8]" = aten.sum.dim_IntList(gelu_backward, [0], True);  gelu_backward = None
    view: "float32[8]" = aten.view.default(sum_1, [8]);  sum_1 = None
    return (mm, mm_1, view)
