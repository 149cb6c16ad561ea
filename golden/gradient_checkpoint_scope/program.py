import torch


def forward(args):
    (
        first_weight,
        first_bias,
        x,
        linear_weight,
        linear_bias,
    ) = args
    args.clear()
    # stage 0 forward: first
    call = [first_weight, first_bias, x, linear_weight, linear_bias]
    del (first_weight, first_bias, linear_bias)
    [addmm, randn_like_rng_state, addmm_1, mean] = stage_0_forward(call)
    return (mean, x, linear_weight, addmm, randn_like_rng_state, addmm_1)


def backward(args):
    (
        x,
        linear_weight,
        addmm,
        randn_like_rng_state,
        addmm_1,
        tangents_1,
    ) = args
    args.clear()
    # stage 0 recompute: first
    call = [linear_weight, randn_like_rng_state, addmm_1]
    del (linear_weight, randn_like_rng_state, addmm_1)
    [mul, add_1] = stage_0_recompute(call)
    # stage 0 backward: first
    call = [x, tangents_1, addmm, mul, add_1]
    del (x, tangents_1, addmm, mul, add_1)
    [mm_1, mm_2, view, view_1] = stage_0_backward(call)
    return (mm_2, view_1, None, mm_1, view)
