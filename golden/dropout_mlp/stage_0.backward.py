import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        x,  # float32[4, 8]
        addmm_3,  # float32[4, 8]
        run_with_rng_state_1,  # bool[4, 8]
        mm,  # float32[4, 8]
    ) = args
    args.clear()
    # layers.0.2
    mul_tensor_6: "float32[4, 8]" = aten.mul.Tensor(mm, run_with_rng_state_1);  mm = run_with_rng_state_1 = None
    mul_tensor_7: "float32[4, 8]" = aten.mul_.Tensor(mul_tensor_6, 1.25);  mul_tensor_6 = None
    # layers.0.1
    gelu_backward_1: "float32[4, 8]" = aten.gelu_backward.grad_input(mul_tensor_7, addmm_3, grad_input=mul_tensor_7);  mul_tensor_7 = addmm_3 = None
    # layers.0.0
    t_6: "float32[8, 4]" = aten.t.default(gelu_backward_1)
    mm_2: "float32[8, 8]" = aten.mm.default(t_6, x);  t_6 = x = None
    sum_2: "float32[1, 8]" = aten.sum.dim_IntList(gelu_backward_1, [0], True);  gelu_backward_1 = None
    view_1: "float32[8]" = aten.view.default(sum_2, [8]);  sum_2 = None
    return (mm_2, view_1)
