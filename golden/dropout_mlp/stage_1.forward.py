import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_forward(args):
    (
        layers_1_0_weight,  # float32[8, 8]
        layers_1_0_bias,  # float32[8]
        getitem,  # float32[4, 8]
    ) = args
    args.clear()
    # layers.1.0
    t_1: "float32[8, 8]" = aten.t.default(layers_1_0_weight);  layers_1_0_weight = None
    addmm_1: "float32[4, 8]" = aten.addmm.default(layers_1_0_bias, getitem, t_1);  layers_1_0_bias = getitem = t_1 = None
    # layers.1.1
    gelu_1: "float32[4, 8]" = aten.gelu_.default(addmm_1);  addmm_1 = None
    # layers.1.2
    run_and_save_rng_state: "(uint8[5056], (float32[4, 8], bool[4, 8]))" = torch.ops.higher_order.run_and_save_rng_state(aten.native_dropout.default, gelu_1, 0.2, True);  gelu_1 = None
    native_dropout_1_rng_state: "uint8[5056]" = run_and_save_rng_state[0]
    getitem_7: "(float32[4, 8], bool[4, 8])" = run_and_save_rng_state[1];  run_and_save_rng_state = None
    getitem_2: "float32[4, 8]" = getitem_7[0];  getitem_7 = None
    # model
    pow_1: "float32[4, 8]" = aten.pow.Tensor_Scalar_out(getitem_2, 2, out=getitem_2);  getitem_2 = None
    mean: "float32[]" = aten.mean.default(pow_1);  pow_1 = None
    return (native_dropout_1_rng_state, mean)
