import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_3_backward(args):
    (
        layers_3_weight,  # float32[4, 4]
        tangents_1,  # float32[]
        add_2,  # float32[2, 4]
        tanh_3,  # float32[2, 4]
        mul,  # float32[2, 4]
    ) = args
    args.clear()
    # layers.3 (again)
    t_22: "float32[4, 4]" = aten.t.default(layers_3_weight);  layers_3_weight = None
    # model (again)
    detach_11: "float32[2, 4]" = aten.detach.default(tanh_3);  tanh_3 = None
    # model
    expand: "float32[2, 4]" = aten.expand.default(tangents_1, [2, 4]);  tangents_1 = None
    div: "float32[2, 4]" = aten.div.Scalar(expand, 8);  expand = None
    mul_1: "float32[2, 4]" = aten.mul_.Tensor(div, mul);  div = mul = None
    detach_4: "float32[2, 4]" = aten.detach.default(detach_11);  detach_11 = None
    tanh_backward: "float32[2, 4]" = aten.tanh_backward.default(mul_1, detach_4);  detach_4 = None
    # layers.3
    t_4: "float32[4, 2]" = aten.t.default(tanh_backward)
    mm_4: "float32[4, 4]" = aten.mm.default(t_4, add_2);  t_4 = add_2 = None
    t_5: "float32[4, 4]" = aten.t.default(mm_4);  mm_4 = None
    t_6: "float32[4, 4]" = aten.t.default(t_22);  t_22 = None
    mm_5: "float32[2, 4]" = aten.mm.default(tanh_backward, t_6);  tanh_backward = t_6 = None
    # model
    add_4: "float32[2, 4]" = aten.add_.Tensor(mul_1, mm_5);  mul_1 = mm_5 = None
    # layers.3
    t_7: "float32[4, 4]" = aten.t.default(t_5);  t_5 = None
    return (add_4, t_7)
