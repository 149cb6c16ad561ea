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
    # stage 0 forward: layers.0
    call = [layers_0_weight, kwargs_x]
    [add] = stage_0_forward(call)
    # stage 1 forward: layers.1
    call = [layers_1_weight, add]
    del (add)
    [add_1] = stage_1_forward(call)
    # stage 2 forward: layers.2
    call = [layers_2_weight, add_1]
    del (add_1)
    [add_2] = stage_2_forward(call)
    # stage 3 forward: layers.3
    call = [layers_3_weight, add_2]
    [tanh_3, add_3, mean] = stage_3_forward(call)
    return (mean, layers_0_weight, kwargs_x, layers_1_weight, layers_2_weight, layers_3_weight, add_2, tanh_3, add_3)


def backward(args):
    (
        layers_0_weight,
        kwargs_x,
        layers_1_weight,
        layers_2_weight,
        layers_3_weight,
        add_2,
        tanh_3,
        add_3,
        tangents_1,
        sum_layers_3_weight,
        sum_layers_2_weight,
        sum_layers_1_weight,
        sum_layers_0_weight,
    ) = args
    args.clear()
    # stage 3 recompute: layers.3
    call = [add_3]
    del (add_3)
    [mul] = stage_3_recompute(call)
    streams.record_event(2, 0)
    # stage 3 backward: layers.3
    call = [layers_3_weight, tangents_1, sum_layers_3_weight, add_2, tanh_3, mul]
    del (layers_3_weight, tangents_1, sum_layers_3_weight, add_2, tanh_3, mul)
    [added, add_4] = stage_3_backward(call)
    streams.fork(0, 1)
    streams.wait_event(2, 1)
    # stage 4 recompute: layers.0
    call = [layers_0_weight, kwargs_x, layers_1_weight, layers_2_weight]
    del (layers_0_weight)
    [tanh_4, add_7, tanh_5, add_8, tanh_6] = stage_4_recompute(call)
    streams.record_event(3, 1)
    streams.join(1, 0)
    streams.wait_event(3, 0)
    streams.record_streams([tanh_4, add_7, tanh_5, add_8, tanh_6], 0)
    # stage 4 backward: layers.0
    call = [
        kwargs_x, layers_1_weight, layers_2_weight, sum_layers_2_weight, sum_layers_1_weight, sum_layers_0_weight,
        tanh_4, add_7, tanh_5, add_8, tanh_6, add_4,
    ]
    del (
        kwargs_x, layers_1_weight, layers_2_weight, sum_layers_2_weight, sum_layers_1_weight, sum_layers_0_weight,
        tanh_4, add_7, tanh_5, add_8, tanh_6, add_4,
    )
    [added_1, added_2, added_3] = stage_4_backward(call)
    return (added_3, None, added_2, added_1, added)
