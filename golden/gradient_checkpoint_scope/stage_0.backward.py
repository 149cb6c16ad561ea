import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        x,  # float32[8, 4]
        tangents_1,  # float32[]
        addmm,  # float32[8, 4]
        mul,  # float32[8, 4]
        add_1,  # float32[4, 4]
    ) = args
    args.clear()
    # model
    expand: "float32[8, 4]" = aten.expand.default(tangents_1, [8, 4]);  tangents_1 = None
    div: "float32[8, 4]" = aten.div.Scalar(expand, 32);  expand = None
    mul_1: "float32[8, 4]" = aten.mul_.Tensor(div, mul);  div = mul = None
    mm: "float32[8, 4]" = aten.mm.default(mul_1, add_1);  add_1 = None
    t_3: "float32[4, 8]" = aten.t.default(mul_1)
    mm_1: "float32[4, 4]" = aten.mm.default(t_3, addmm);  t_3 = addmm = None
    sum_1: "float32[1, 4]" = aten.sum.dim_IntList(mul_1, [0], True);  mul_1 = None
    # first
    t_6: "float32[4, 8]" = aten.t.default(mm)
    mm_2: "float32[4, 4]" = aten.mm.default(t_6, x);  t_6 = x = None
    sum_2: "float32[1, 4]" = aten.sum.dim_IntList(mm, [0], True);  mm = None
    # model
    view: "float32[4]" = aten.view.default(sum_1, [4]);  sum_1 = None
    # first
    view_1: "float32[4]" = aten.view.default(sum_2, [4]);  sum_2 = None
    return (mm_1, mm_2, view, view_1)
