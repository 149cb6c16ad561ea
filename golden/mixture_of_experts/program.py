import torch


def forward(args):
    (
        layers_0_router_weight,
        layers_0_router_bias,
        x,
        layers_0_experts_0_weight,
        layers_0_experts_0_bias,
        layers_0_experts_1_weight,
        layers_0_experts_1_bias,
        layers_1_router_weight,
        layers_1_router_bias,
        layers_1_experts_0_weight,
        layers_1_experts_0_bias,
        layers_1_experts_1_weight,
        layers_1_experts_1_bias,
    ) = args
    args.clear()
    # stage 0 forward: layers.0.router … layers.0
    call = [
        layers_0_router_weight, layers_0_router_bias, x, layers_0_experts_0_weight, layers_0_experts_0_bias,
        layers_0_experts_1_weight, layers_0_experts_1_bias,
    ]
    [getitem_1, nonzero, sym_size_int, nonzero_1, sym_size_int_1, add_50] = stage_0_forward(call)
    # stage 1 forward: layers.1.router … layers.1
    call = [
        layers_1_router_weight, layers_1_router_bias, layers_1_experts_0_weight, layers_1_experts_0_bias,
        layers_1_experts_1_weight, layers_1_experts_1_bias, add_50,
    ]
    [getitem_7, nonzero_2, sym_size_int_2, nonzero_3, sym_size_int_3, mean] = stage_1_forward(call)
    return (
        mean, layers_0_router_weight, layers_0_router_bias, x, layers_0_experts_0_weight, layers_0_experts_0_bias,
        layers_0_experts_1_weight, layers_0_experts_1_bias, layers_1_router_weight, layers_1_router_bias,
        layers_1_experts_0_weight, layers_1_experts_0_bias, layers_1_experts_1_weight, layers_1_experts_1_bias,
        getitem_1, nonzero, nonzero_1, add_50, getitem_7, nonzero_2, nonzero_3, sym_size_int, sym_size_int_1,
        sym_size_int_2, sym_size_int_3,
    )


def backward(args):
    (
        sym_size_int,
        sym_size_int_1,
        sym_size_int_2,
        sym_size_int_3,
        layers_0_router_weight,
        layers_0_router_bias,
        x,
        layers_0_experts_0_weight,
        layers_0_experts_0_bias,
        layers_0_experts_1_weight,
        layers_0_experts_1_bias,
        layers_1_router_weight,
        layers_1_router_bias,
        layers_1_experts_0_weight,
        layers_1_experts_0_bias,
        layers_1_experts_1_weight,
        layers_1_experts_1_bias,
        getitem_1,
        nonzero,
        nonzero_1,
        add_50,
        getitem_7,
        nonzero_2,
        nonzero_3,
        tangents_1,
    ) = args
    args.clear()
    # stage 1 recompute: layers.1.router … layers.1
    call = [
        layers_1_router_weight, layers_1_router_bias, layers_1_experts_0_weight, layers_1_experts_0_bias,
        layers_1_experts_1_weight, layers_1_experts_1_bias, add_50, getitem_7, nonzero_2, nonzero_3,
    ]
    del (layers_1_router_bias, layers_1_experts_0_bias, layers_1_experts_1_bias)
    [_softmax_2, index_8, relu_4, index_9, index_10, relu_5, index_11, mul_60] = stage_1_recompute(call)
    streams.record_event(2, 0)
    # stage 1 backward: layers.1.router … layers.1
    call = [
        layers_1_router_weight, layers_1_experts_0_weight, layers_1_experts_1_weight, tangents_1, add_50, getitem_7,
        nonzero_2, sym_size_int_2, nonzero_3, sym_size_int_3, _softmax_2, index_8, relu_4, index_9, index_10, relu_5,
        index_11, mul_60,
    ]
    del (
        layers_1_router_weight, layers_1_experts_0_weight, layers_1_experts_1_weight, tangents_1, add_50, getitem_7,
        nonzero_2, sym_size_int_2, nonzero_3, sym_size_int_3, _softmax_2, index_8, relu_4, index_9, index_10, relu_5,
        index_11, mul_60,
    )
    [mm_1, view, mm_3, view_1, mm_5, view_2, add_105] = stage_1_backward(call)
    streams.fork(0, 1)
    streams.wait_event(2, 1)
    # stage 0 recompute: layers.0.router … layers.0
    call = [
        layers_0_router_weight, layers_0_router_bias, x, layers_0_experts_0_weight, layers_0_experts_0_bias,
        layers_0_experts_1_weight, layers_0_experts_1_bias, getitem_1, nonzero, nonzero_1,
    ]
    del (
        layers_0_router_weight, layers_0_router_bias, layers_0_experts_0_weight, layers_0_experts_0_bias,
        layers_0_experts_1_weight, layers_0_experts_1_bias,
    )
    [_softmax_3, index_12, relu_6, index_13, index_14, relu_7, index_15] = stage_0_recompute(call)
    streams.record_event(3, 1)
    streams.join(1, 0)
    streams.wait_event(3, 0)
    streams.record_streams([_softmax_3, index_12, relu_6, index_13, index_14, relu_7, index_15], 0)
    # stage 0 backward: layers.0.router … layers.0
    call = [
        x, getitem_1, nonzero, sym_size_int, nonzero_1, sym_size_int_1, _softmax_3, index_12, relu_6, index_13,
        index_14, relu_7, index_15, add_105,
    ]
    del (
        x, getitem_1, nonzero, sym_size_int, nonzero_1, sym_size_int_1, _softmax_3, index_12, relu_6, index_13,
        index_14, relu_7, index_15, add_105,
    )
    [mm_6, view_3, mm_7, view_4, mm_8, view_5] = stage_0_backward(call)
    return (mm_8, view_5, None, mm_7, view_4, mm_6, view_3, mm_5, view_2, mm_3, view_1, mm_1, view)
