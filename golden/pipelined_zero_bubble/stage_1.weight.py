import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_weight(args):
    (
        add_2,  # float32[2, 4]
        tanh_backward,  # float32[2, 4]
    ) = args
    args.clear()
    # layers.3
    t_4: "float32[4, 2]" = aten.t.default(tanh_backward);  tanh_backward = None
    mm_4: "float32[4, 4]" = aten.mm.default(t_4, add_2);  t_4 = add_2 = None
    return (mm_4,)
