import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        x,  # float32[4, 8]
        tanh_3,  # float32[4, 8]
        run_with_rng_state_1,  # bool[4, 8]
        mm_2,  # float32[4, 8]
    ) = args
    args.clear()
    # model
    mul_tensor_6: "float32[4, 8]" = aten.mul.Tensor(mm_2, run_with_rng_state_1);  mm_2 = run_with_rng_state_1 = None
    mul_tensor_7: "float32[4, 8]" = aten.mul_.Tensor(mul_tensor_6, 2.0);  mul_tensor_6 = None
    tanh_backward_1: "float32[4, 8]" = aten.tanh_backward.grad_input(mul_tensor_7, tanh_3, grad_input=mul_tensor_7);  mul_tensor_7 = tanh_3 = None
    # layers.0
    t_11: "float32[8, 4]" = aten.t.default(tanh_backward_1)
    mm_4: "float32[8, 8]" = aten.mm.default(t_11, x);  t_11 = x = None
    sum_4: "float32[1, 8]" = aten.sum.dim_IntList(tanh_backward_1, [0], True);  tanh_backward_1 = None
    view_2: "float32[8]" = aten.view.default(sum_4, [8]);  sum_4 = None
    return (mm_4, view_2)
