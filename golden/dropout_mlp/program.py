import torch


def forward(args):
    (
        layers_0_0_weight,
        layers_0_0_bias,
        x,
        layers_1_0_weight,
        layers_1_0_bias,
    ) = args
    args.clear()
    # stage 0 forward: layers.0.0 … layers.0.2
    call = [layers_0_0_weight, layers_0_0_bias, x]
    [bernoulli_p_rng_state, mul_tensor_1] = stage_0_forward(call)
    # stage 1 forward: layers.1.0 … layers.1.2
    call = [layers_1_0_weight, layers_1_0_bias, mul_tensor_1]
    [bernoulli_p_1_rng_state, mean] = stage_1_forward(call)
    return (
        mean, layers_0_0_weight, layers_0_0_bias, x, layers_1_0_weight, layers_1_0_bias, bernoulli_p_rng_state,
        mul_tensor_1, bernoulli_p_1_rng_state,
    )


def backward(args):
    (
        layers_0_0_weight,
        layers_0_0_bias,
        x,
        layers_1_0_weight,
        layers_1_0_bias,
        bernoulli_p_rng_state,
        mul_tensor_1,
        bernoulli_p_1_rng_state,
        tangents_1,
    ) = args
    args.clear()
    # stage 1 recompute: layers.1.0 … layers.1.2
    call = [layers_1_0_weight, layers_1_0_bias, mul_tensor_1, bernoulli_p_1_rng_state]
    del (layers_1_0_bias, bernoulli_p_1_rng_state)
    [addmm_2, run_with_rng_state, mul] = stage_1_recompute(call)
    streams.record_event(2, 0)
    # stage 1 backward: layers.1.0 … layers.1.2
    call = [layers_1_0_weight, tangents_1, mul_tensor_1, addmm_2, run_with_rng_state, mul]
    del (layers_1_0_weight, tangents_1, mul_tensor_1, addmm_2, run_with_rng_state, mul)
    [mm, mm_1, view] = stage_1_backward(call)
    streams.fork(0, 1)
    streams.wait_event(2, 1)
    streams.record_streams([bernoulli_p_rng_state], 1)
    # stage 0 recompute: layers.0.0 … layers.0.2
    call = [layers_0_0_weight, layers_0_0_bias, x, bernoulli_p_rng_state]
    del (layers_0_0_weight, layers_0_0_bias, bernoulli_p_rng_state)
    [addmm_3, run_with_rng_state_1] = stage_0_recompute(call)
    streams.record_event(3, 1)
    streams.join(1, 0)
    streams.wait_event(3, 0)
    streams.record_streams([addmm_3, run_with_rng_state_1], 0)
    # stage 0 backward: layers.0.0 … layers.0.2
    call = [x, addmm_3, run_with_rng_state_1, mm]
    del (x, addmm_3, run_with_rng_state_1, mm)
    [mm_2, view_1] = stage_0_backward(call)
    return (mm_2, view_1, None, mm_1, view)
