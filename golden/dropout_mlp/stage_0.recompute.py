import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_recompute(args):
    (
        layers_0_0_weight,  # float32[8, 8]
        layers_0_0_bias,  # float32[8]
        x,  # float32[4, 8]
        native_dropout_rng_state,  # uint8[5056]
    ) = args
    args.clear()
    # layers.0.0 (again)
    t_10: "float32[8, 8]" = aten.t.default(layers_0_0_weight);  layers_0_0_weight = None
    addmm_3: "float32[4, 8]" = aten.addmm.default(layers_0_0_bias, x, t_10);  layers_0_0_bias = x = t_10 = None
    # layers.0.1 (again)
    gelu_3: "float32[4, 8]" = aten.gelu.default(addmm_3)
    # layers.0.2 (again)
    run_with_rng_state_1: "(float32[4, 8], bool[4, 8])" = torch.ops.higher_order.run_with_rng_state(native_dropout_rng_state, aten.native_dropout.default, gelu_3, 0.2, True);  native_dropout_rng_state = gelu_3 = None
    getitem_6: "bool[4, 8]" = run_with_rng_state_1[1];  run_with_rng_state_1 = None
    return (addmm_3, getitem_6)
