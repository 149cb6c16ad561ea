import torch


def forward(args):
    (
        encoder_weight,
        encoder_bias,
        source,
        decoder_0_weight,
        decoder_0_bias,
        target,
        decoder_1_weight,
        decoder_1_bias,
    ) = args
    args.clear()
    # stage 0 forward: encoder
    call = [encoder_weight, encoder_bias, source]
    del (encoder_weight, encoder_bias)
    [tanh] = stage_0_forward(call)
    # stage 1 forward: decoder.0
    call = [decoder_0_weight, decoder_0_bias, target, tanh]
    [add] = stage_1_forward(call)
    # stage 2 forward: decoder.1
    call = [decoder_1_weight, decoder_1_bias, tanh, add]
    [mean] = stage_2_forward(call)
    return (mean, source, decoder_0_weight, decoder_0_bias, target, decoder_1_weight, decoder_1_bias, tanh, add)


def backward(args):
    (
        source,
        decoder_0_weight,
        decoder_0_bias,
        target,
        decoder_1_weight,
        decoder_1_bias,
        tanh,
        add,
        tangents_1,
    ) = args
    args.clear()
    # stage 2 recompute: decoder.1
    call = [decoder_1_weight, decoder_1_bias, tanh, add]
    del (decoder_1_bias)
    [mul_10, mul_11, _safe_softmax_2, mul_4] = stage_2_recompute(call)
    streams.record_event(2, 0)
    # stage 2 backward: decoder.1
    call = [decoder_1_weight, tangents_1, tanh, add, mul_10, mul_11, _safe_softmax_2, mul_4]
    del (decoder_1_weight, tangents_1, add, mul_10, mul_11, _safe_softmax_2, mul_4)
    [add_2, mm_1, view_25, add_3] = stage_2_backward(call)
    streams.fork(0, 1)
    streams.wait_event(2, 1)
    # stage 1 recompute: decoder.0
    call = [decoder_0_weight, decoder_0_bias, target, tanh]
    del (decoder_0_weight, decoder_0_bias)
    [mul_12, mul_13, _safe_softmax_3] = stage_1_recompute(call)
    streams.record_event(3, 1)
    streams.join(1, 0)
    streams.wait_event(3, 0)
    streams.record_streams([mul_12, mul_13, _safe_softmax_3], 0)
    # stage 1 backward: decoder.0
    call = [target, tanh, mul_12, mul_13, _safe_softmax_3, add_2, add_3]
    del (target, tanh, mul_12, mul_13, _safe_softmax_3, add_2, add_3)
    [mm_2, view_34, tanh_backward] = stage_1_backward(call)
    # stage 0 backward: encoder
    call = [source, tanh_backward]
    del (source, tanh_backward)
    [mm_3, view_36] = stage_0_backward(call)
    return (mm_3, view_36, None, mm_2, view_34, None, mm_1, view_25)
