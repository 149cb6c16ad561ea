import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
    (
        layers_0_0_weight,  # float32[8, 8]
        layers_0_0_bias,  # float32[8]
        x,  # float32[4, 8]
    ) = args
    args.clear()
    # layers.0.0
    t: "float32[8, 8]" = aten.t.default(layers_0_0_weight);  layers_0_0_weight = None
    addmm: "float32[4, 8]" = aten.addmm.default(layers_0_0_bias, x, t);  layers_0_0_bias = x = t = None
    # layers.0.1
    gelu: "float32[4, 8]" = aten.gelu_.default(addmm);  addmm = None
    # layers.0.2
    run_and_save_rng_state_1: "(uint8[5056], (float32[4, 8], bool[4, 8]))" = torch.ops.higher_order.run_and_save_rng_state(aten.native_dropout.default, gelu, 0.2, True);  gelu = None
    native_dropout_rng_state: "uint8[5056]" = run_and_save_rng_state_1[0]
    getitem_8: "(float32[4, 8], bool[4, 8])" = run_and_save_rng_state_1[1];  run_and_save_rng_state_1 = None
    getitem: "float32[4, 8]" = getitem_8[0];  getitem_8 = None
    return (native_dropout_rng_state, getitem)
