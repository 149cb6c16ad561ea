import torch


def forward(args):
    (
        layers_0_weight,
        layers_0_bias,
        x,
        layers_1_weight,
        layers_1_bias,
        last_weight,
        last_bias,
    ) = args
    args.clear()
    # stage 0 forward: layers.0
    call = [layers_0_weight, layers_0_bias, x]
    [bernoulli_p_rng_state, mul_tensor_1] = stage_0_forward(call)
    # stage 1 forward: layers.1 … last
    call = [layers_1_weight, layers_1_bias, last_weight, last_bias, mul_tensor_1]
    [bernoulli_p_1_rng_state, sum_1] = stage_1_forward(call)
    return (
        sum_1, layers_0_weight, layers_0_bias, x, layers_1_weight, layers_1_bias, last_weight, last_bias,
        bernoulli_p_rng_state, mul_tensor_1, bernoulli_p_1_rng_state,
    )


def backward(args):
    (
        layers_0_weight,
        layers_0_bias,
        x,
        layers_1_weight,
        layers_1_bias,
        last_weight,
        last_bias,
        bernoulli_p_rng_state,
        mul_tensor_1,
        bernoulli_p_1_rng_state,
        tangents_1,
    ) = args
    args.clear()
    # stage 1 recompute: layers.1 … last
    call = [layers_1_weight, layers_1_bias, last_weight, last_bias, mul_tensor_1, bernoulli_p_1_rng_state]
    del (layers_1_bias, last_bias, bernoulli_p_1_rng_state)
    [tanh_2, run_with_rng_state, mul_tensor_9, mul] = stage_1_recompute(call)
    streams.record_event(2, 0)
    # stage 1 backward: layers.1 … last
    call = [layers_1_weight, last_weight, tangents_1, mul_tensor_1, tanh_2, run_with_rng_state, mul_tensor_9, mul]
    del (layers_1_weight, last_weight, tangents_1, mul_tensor_1, tanh_2, run_with_rng_state, mul_tensor_9, mul)
    [mm_1, view, mm_2, mm_3, view_1] = stage_1_backward(call)
    streams.fork(0, 1)
    streams.wait_event(2, 1)
    streams.record_streams([bernoulli_p_rng_state], 1)
    # stage 0 recompute: layers.0
    call = [layers_0_weight, layers_0_bias, x, bernoulli_p_rng_state]
    del (layers_0_weight, layers_0_bias, bernoulli_p_rng_state)
    [tanh_3, run_with_rng_state_1] = stage_0_recompute(call)
    streams.record_event(3, 1)
    streams.join(1, 0)
    streams.wait_event(3, 0)
    streams.record_streams([tanh_3, run_with_rng_state_1], 0)
    # stage 0 backward: layers.0
    call = [x, tanh_3, run_with_rng_state_1, mm_2]
    del (x, tanh_3, run_with_rng_state_1, mm_2)
    [mm_4, view_2] = stage_0_backward(call)
    return (mm_4, view_2, None, mm_3, view_1, mm_1, view)
