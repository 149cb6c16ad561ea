import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_forward(args):
    (
        layers_1_0_weight,  # float32[8, 8]
        layers_1_0_bias,  # float32[8]
        mul_tensor_1,  # float32[4, 8]
    ) = args
    args.clear()
    # layers.1.0
    t_1: "float32[8, 8]" = aten.t.default(layers_1_0_weight);  layers_1_0_weight = None
    addmm_1: "float32[4, 8]" = aten.addmm.default(layers_1_0_bias, mul_tensor_1, t_1);  layers_1_0_bias = mul_tensor_1 = t_1 = None
    # layers.1.1
    gelu_1: "float32[4, 8]" = aten.gelu_.default(addmm_1);  addmm_1 = None
    # layers.1.2
    full_default_1: "bool[]" = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default_1: "bool[4, 8]" = aten.expand.default(full_default_1, [4, 8]);  full_default_1 = None
    run_and_save_rng_state: "(uint8[5056], bool[4, 8])" = torch.ops.higher_order.run_and_save_rng_state(aten.bernoulli.p, expand_default_1, 0.8);  expand_default_1 = None
    bernoulli_p_1_rng_state: "uint8[5056]" = run_and_save_rng_state[0]
    getitem_4: "bool[4, 8]" = run_and_save_rng_state[1];  run_and_save_rng_state = None
    mul_tensor_2: "float32[4, 8]" = aten.mul_.Tensor(gelu_1, getitem_4);  gelu_1 = getitem_4 = None
    mul_tensor_3: "float32[4, 8]" = aten.mul_.Tensor(mul_tensor_2, 1.25);  mul_tensor_2 = None
    # model
    pow_1: "float32[4, 8]" = aten.pow.Tensor_Scalar_out(mul_tensor_3, 2, out=mul_tensor_3);  mul_tensor_3 = None
    mean: "float32[]" = aten.mean.default(pow_1);  pow_1 = None
    return (bernoulli_p_1_rng_state, mean)
