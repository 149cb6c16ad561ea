import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_weight(args):
    (
        kwargs_x,  # float32[2, 4]
        tanh_5,  # float32[2, 4]
        add_8,  # float32[2, 4]
        add_9,  # float32[2, 4]
        tanh_backward_1,  # float32[2, 4]
        tanh_backward_2,  # float32[2, 4]
        add_6,  # float32[2, 4]
    ) = args
    args.clear()
    # model (again)
    detach_9: "float32[2, 4]" = aten.detach.default(tanh_5);  tanh_5 = None
    # layers.2
    t_8: "float32[4, 2]" = aten.t.default(tanh_backward_1);  tanh_backward_1 = None
    mm_6: "float32[4, 4]" = aten.mm.default(t_8, add_9);  t_8 = add_9 = None
    t_9: "float32[4, 4]" = aten.t.default(mm_6);  mm_6 = None
    t_11: "float32[4, 4]" = aten.t.default(t_9);  t_9 = None
    # layers.1
    t_12: "float32[4, 2]" = aten.t.default(tanh_backward_2);  tanh_backward_2 = None
    mm_8: "float32[4, 4]" = aten.mm.default(t_12, add_8);  t_12 = add_8 = None
    t_13: "float32[4, 4]" = aten.t.default(mm_8);  mm_8 = None
    t_15: "float32[4, 4]" = aten.t.default(t_13);  t_13 = None
    # model
    detach_7: "float32[2, 4]" = aten.detach.default(detach_9);  detach_9 = None
    tanh_backward_3: "float32[2, 4]" = aten.tanh_backward.default(add_6, detach_7);  add_6 = detach_7 = None
    # layers.0
    t_16: "float32[4, 2]" = aten.t.default(tanh_backward_3);  tanh_backward_3 = None
    mm_10: "float32[4, 4]" = aten.mm.default(t_16, kwargs_x);  t_16 = kwargs_x = None
    t_17: "float32[4, 4]" = aten.t.default(mm_10);  mm_10 = None
    t_18: "float32[4, 4]" = aten.t.default(t_17);  t_17 = None
    return (t_11, t_15, t_18)
