import torch


def forward(args):
    (
        layers_0_weight,
        kwargs_x,
        layers_1_weight,
        layers_2_weight,
        layers_3_weight,
    ) = args
    args.clear()
    # stage 0 forward: layers.0 … layers.2
    call = [layers_0_weight, kwargs_x, layers_1_weight, layers_2_weight]
    [add_2] = stage_0_forward(call)
    # stage 1 forward: layers.3
    call = [layers_3_weight, add_2]
    [mean] = stage_1_forward(call)
    return (mean, layers_0_weight, kwargs_x, layers_1_weight, layers_2_weight, layers_3_weight, add_2)


def backward(args):
    (
        layers_0_weight,
        kwargs_x,
        layers_1_weight,
        layers_2_weight,
        layers_3_weight,
        add_2,
        tangents_1,
        sum_layers_3_weight,
        sum_layers_2_weight,
        sum_layers_1_weight,
        sum_layers_0_weight,
    ) = args
    args.clear()
    # stage 1 recompute: layers.3
    call = [layers_3_weight, add_2]
    [tanh_4, mul] = stage_1_recompute(call)
    # stage 1 backward: layers.3
    call = [layers_3_weight, tangents_1, tanh_4, mul]
    del (layers_3_weight, tangents_1, tanh_4, mul)
    [tanh_backward, add_4] = stage_1_backward(call)
    streams.record_event(2, 0)
    # stage 1 weight: layers.3
    call = [sum_layers_3_weight, add_2, tanh_backward]
    del (sum_layers_3_weight, add_2, tanh_backward)
    [added] = stage_1_weight(call)
    streams.fork(0, 1)
    streams.wait_event(2, 1)
    # stage 0 recompute: layers.0 … layers.2
    call = [layers_0_weight, kwargs_x, layers_1_weight, layers_2_weight]
    del (layers_0_weight)
    [tanh_5, add_8, tanh_6, add_9, tanh_7] = stage_0_recompute(call)
    streams.record_event(3, 1)
    streams.join(1, 0)
    streams.wait_event(3, 0)
    streams.record_streams([tanh_5, add_8, tanh_6, add_9, tanh_7], 0)
    # stage 0 backward: layers.0 … layers.2
    call = [layers_1_weight, layers_2_weight, tanh_6, tanh_7, add_4]
    del (layers_1_weight, layers_2_weight, tanh_6, tanh_7, add_4)
    [tanh_backward_1, tanh_backward_2, add_6] = stage_0_backward(call)
    # stage 0 weight: layers.0 … layers.2
    call = [
        kwargs_x, sum_layers_2_weight, sum_layers_1_weight, sum_layers_0_weight, tanh_5, add_8, add_9, tanh_backward_1,
        tanh_backward_2, add_6,
    ]
    del (
        kwargs_x, sum_layers_2_weight, sum_layers_1_weight, sum_layers_0_weight, tanh_5, add_8, add_9, tanh_backward_1,
        tanh_backward_2, add_6,
    )
    [added_1, added_2, added_3] = stage_0_weight(call)
    return (added_3, None, added_2, added_1, added)
