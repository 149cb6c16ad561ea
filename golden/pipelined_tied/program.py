import torch


def forward(args):
    (
        tied_weight,
        kwargs_x,
        layer_weight,
    ) = args
    args.clear()
    # stage 0 forward: tied … layer
    call = [tied_weight, kwargs_x, layer_weight]
    [tanh, tanh_1] = stage_0_forward(call)
    # stage 1 forward: tied
    call = [tied_weight, tanh_1]
    [mm_2, mean] = stage_1_forward(call)
    return (mean, tied_weight, kwargs_x, layer_weight, tanh, tanh_1, mm_2)


def backward(args):
    (
        tied_weight,
        kwargs_x,
        layer_weight,
        tanh,
        tanh_1,
        mm_2,
        tangents_1,
        sum_tied_weight,
        sum_layer_weight,
        sum_tied_weight_1,
    ) = args
    args.clear()
    # stage 1 recompute: tied
    call = [mm_2]
    del (mm_2)
    [mul] = stage_1_recompute(call)
    # stage 1 backward: tied
    call = [tied_weight, tangents_1, sum_tied_weight, tanh_1, mul]
    del (tied_weight, tangents_1, sum_tied_weight, mul)
    [added, mm_4] = stage_1_backward(call)
    # stage 0 backward: tied … layer
    call = [kwargs_x, layer_weight, sum_layer_weight, sum_tied_weight_1, tanh, tanh_1, mm_4]
    del (kwargs_x, layer_weight, sum_layer_weight, sum_tied_weight_1, tanh, tanh_1, mm_4)
    [added_1, added_2] = stage_0_backward(call)
    return (added, None, added_1, added_2)
