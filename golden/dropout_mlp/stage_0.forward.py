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
    full_default: "bool[]" = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default: "bool[4, 8]" = aten.expand.default(full_default, [4, 8]);  full_default = None
    run_and_save_rng_state_1: "(uint8[5056], bool[4, 8])" = torch.ops.higher_order.run_and_save_rng_state(aten.bernoulli.p, expand_default, 0.8);  expand_default = None
    bernoulli_p_rng_state: "uint8[5056]" = run_and_save_rng_state_1[0]
    getitem_5: "bool[4, 8]" = run_and_save_rng_state_1[1];  run_and_save_rng_state_1 = None
    mul_tensor: "float32[4, 8]" = aten.mul_.Tensor(gelu, getitem_5);  gelu = getitem_5 = None
    mul_tensor_1: "float32[4, 8]" = aten.mul_.Tensor(mul_tensor, 1.25);  mul_tensor = None
    return (bernoulli_p_rng_state, mul_tensor_1)
