import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_forward(args):
    (
        layers_1_weight,  # float32[8, 8]
        layers_1_bias,  # float32[8]
        last_weight,  # float32[1, 8]
        last_bias,  # float32[1]
        mul_tensor_1,  # float32[4, 8]
    ) = args
    args.clear()
    # layers.1
    t_1: "float32[8, 8]" = aten.t.default(layers_1_weight);  layers_1_weight = None
    addmm_1: "float32[4, 8]" = aten.addmm.default(layers_1_bias, mul_tensor_1, t_1);  layers_1_bias = mul_tensor_1 = t_1 = None
    # model
    tanh_1: "float32[4, 8]" = aten.tanh_.default(addmm_1);  addmm_1 = None
    full_default_1: "bool[]" = aten.full.default([], False, dtype=torch.bool, device=device(type='cpu'))
    expand_default_1: "bool[4, 8]" = aten.expand.default(full_default_1, [4, 8]);  full_default_1 = None
    run_and_save_rng_state: "(uint8[5056], bool[4, 8])" = torch.ops.higher_order.run_and_save_rng_state(aten.bernoulli.p, expand_default_1, 0.5);  expand_default_1 = None
    bernoulli_p_1_rng_state: "uint8[5056]" = run_and_save_rng_state[0]
    getitem_4: "bool[4, 8]" = run_and_save_rng_state[1];  run_and_save_rng_state = None
    mul_tensor_2: "float32[4, 8]" = aten.mul_.Tensor(tanh_1, getitem_4);  tanh_1 = getitem_4 = None
    mul_tensor_3: "float32[4, 8]" = aten.mul_.Tensor(mul_tensor_2, 2.0);  mul_tensor_2 = None
    # last
    t_2: "float32[8, 1]" = aten.t.default(last_weight);  last_weight = None
    addmm_2: "float32[4, 1]" = aten.addmm.default(last_bias, mul_tensor_3, t_2);  last_bias = mul_tensor_3 = t_2 = None
    # model
    pow_1: "float32[4, 1]" = aten.pow.Tensor_Scalar_out(addmm_2, 2, out=addmm_2);  addmm_2 = None
    sum_1: "float32[]" = aten.sum.default(pow_1);  pow_1 = None
    return (bernoulli_p_1_rng_state, sum_1)
