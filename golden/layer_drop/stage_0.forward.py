import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
    (
        layers_0_weight,  # float32[8, 8]
        layers_0_bias,  # float32[8]
        x,  # float32[4, 8]
    ) = args
    args.clear()
    # model
    rand: "float32[]" = aten.rand.default([], device=device(type='cpu'), pin_memory=False);  rand = None
    # layers.0
    t: "float32[8, 8]" = aten.t.default(layers_0_weight);  layers_0_weight = None
    addmm: "float32[4, 8]" = aten.addmm.default(layers_0_bias, x, t);  layers_0_bias = x = t = None
    # model
    tanh: "float32[4, 8]" = aten.tanh_.default(addmm);  addmm = None
    full_default: "bool[]" = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default: "bool[4, 8]" = aten.expand.default(full_default, [4, 8]);  full_default = None
    run_and_save_rng_state_1: "(uint8[5056], bool[4, 8])" = torch.ops.higher_order.run_and_save_rng_state(aten.bernoulli.p, expand_default, 0.5);  expand_default = None
    bernoulli_p_rng_state: "uint8[5056]" = run_and_save_rng_state_1[0]
    getitem_5: "bool[4, 8]" = run_and_save_rng_state_1[1];  run_and_save_rng_state_1 = None
    mul_tensor: "float32[4, 8]" = aten.mul_.Tensor(tanh, getitem_5);  tanh = getitem_5 = None
    mul_tensor_1: "float32[4, 8]" = aten.mul_.Tensor(mul_tensor, 2.0);  mul_tensor = None
    rand_1: "float32[]" = aten.rand.default([], device=device(type='cpu'), pin_memory=False);  rand_1 = None
    return (bernoulli_p_rng_state, mul_tensor_1)
