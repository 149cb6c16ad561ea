import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_recompute(args):
    (
        linear_weight,  # float32[4, 4]
        randn_like_rng_state,  # uint8[5056]
        addmm_1,  # float32[8, 4]
    ) = args
    args.clear()
    # model
    pow_2: "float32[8, 4]" = aten.pow.Tensor_Scalar(addmm_1, 1.0);  addmm_1 = None
    mul: "float32[8, 4]" = aten.mul_.Scalar(pow_2, 2.0);  pow_2 = None
    # model (recomputed)
    run_with_rng_state: "float32[4, 4]" = torch.ops.higher_order.run_with_rng_state(randn_like_rng_state, aten.randn_like.default, linear_weight, pin_memory=False);  randn_like_rng_state = None
    add_1: "float32[4, 4]" = aten.add.out(linear_weight, run_with_rng_state, out=run_with_rng_state);  linear_weight = run_with_rng_state = None
    return (mul, add_1)
