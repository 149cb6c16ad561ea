import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        x,  # float32[8, 4]
        first_weight,  # float32[4, 4]
        second_weight,  # float32[4, 4]
        tangents_1,  # float32[]
        linalg_vector_norm,  # float32[]
        tanh_1,  # float32[8, 4]
    ) = args
    args.clear()
    # model
    expand: "float32[8, 4]" = aten.expand.default(tangents_1, [8, 4]);  tangents_1 = None
    div_1: "float32[8, 4]" = aten.div.Scalar(expand, 32);  expand = None
    pow_2: "float32[8, 4]" = aten.pow.Tensor_Scalar(tanh_1, 1.0)
    mul: "float32[8, 4]" = aten.mul_.Scalar(pow_2, 2.0);  pow_2 = None
    mul_1: "float32[8, 4]" = aten.mul_.Tensor(div_1, mul);  div_1 = mul = None
    # model (recomputed)
    div_2: "float32[8, 4]" = aten.div.Tensor(x, linalg_vector_norm);  x = linalg_vector_norm = None
    # first (recomputed)
    t_7: "float32[4, 4]" = aten.t.default(first_weight);  first_weight = None
    mm_5: "float32[8, 4]" = aten.mm.default(div_2, t_7);  t_7 = None
    # model (recomputed)
    tanh_2: "float32[8, 4]" = aten.tanh_.default(mm_5);  mm_5 = None
    sin_1: "float32[8, 4]" = aten.sin.default(tanh_2)
    # model
    tanh_backward: "float32[8, 4]" = aten.tanh_backward.grad_input(mul_1, tanh_1, grad_input=mul_1);  mul_1 = tanh_1 = None
    # second
    t_2: "float32[4, 8]" = aten.t.default(tanh_backward)
    mm_2: "float32[4, 4]" = aten.mm.default(t_2, sin_1);  t_2 = sin_1 = None
    mm_3: "float32[8, 4]" = aten.mm.default(tanh_backward, second_weight);  tanh_backward = second_weight = None
    # model
    cos: "float32[8, 4]" = aten.cos.default(tanh_2)
    mul_2: "float32[8, 4]" = aten.mul_.Tensor(mm_3, cos);  mm_3 = cos = None
    tanh_backward_1: "float32[8, 4]" = aten.tanh_backward.grad_input(mul_2, tanh_2, grad_input=mul_2);  mul_2 = tanh_2 = None
    # first
    t_6: "float32[4, 8]" = aten.t.default(tanh_backward_1);  tanh_backward_1 = None
    mm_4: "float32[4, 4]" = aten.mm.default(t_6, div_2);  t_6 = div_2 = None
    return (mm_2, mm_4)
