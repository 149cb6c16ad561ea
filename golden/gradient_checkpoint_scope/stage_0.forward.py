import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
    (
        first_weight,  # float32[4, 4]
        first_bias,  # float32[4]
        x,  # float32[8, 4]
        linear_weight,  # float32[4, 4]
        linear_bias,  # float32[4]
    ) = args
    args.clear()
    # first
    t: "float32[4, 4]" = aten.t.default(first_weight);  first_weight = None
    addmm: "float32[8, 4]" = aten.addmm.default(first_bias, x, t);  first_bias = x = t = None
    # model
    run_and_save_rng_state: "(uint8[5056], float32[4, 4])" = torch.ops.higher_order.run_and_save_rng_state(aten.randn_like.default, linear_weight, pin_memory=False)
    randn_like_rng_state: "uint8[5056]" = run_and_save_rng_state[0]
    getitem: "float32[4, 4]" = run_and_save_rng_state[1];  run_and_save_rng_state = None
    add: "float32[4, 4]" = aten.add.out(linear_weight, getitem, out=getitem);  linear_weight = getitem = None
    t_1: "float32[4, 4]" = aten.t.default(add);  add = None
    addmm_1: "float32[8, 4]" = aten.addmm.default(linear_bias, addmm, t_1);  linear_bias = t_1 = None
    pow_1: "float32[8, 4]" = aten.pow.Tensor_Scalar(addmm_1, 2)
    mean: "float32[]" = aten.mean.default(pow_1);  pow_1 = None
    return (addmm, randn_like_rng_state, addmm_1, mean)
