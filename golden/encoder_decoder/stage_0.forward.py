import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
    (
        encoder_weight,  # float32[8, 8]
        encoder_bias,  # float32[8]
        source,  # float32[2, 3, 8]
    ) = args
    args.clear()
    # encoder
    view: "float32[6, 8]" = aten.view.default(source, [6, 8]);  source = None
    t: "float32[8, 8]" = aten.t.default(encoder_weight);  encoder_weight = None
    addmm: "float32[6, 8]" = aten.addmm.default(encoder_bias, view, t);  encoder_bias = view = t = None
    view_1: "float32[2, 3, 8]" = aten.view.default(addmm, [2, 3, 8]);  addmm = None
    # model
    tanh: "float32[2, 3, 8]" = aten.tanh_.default(view_1);  view_1 = None
    return (tanh,)
