import torch


def forward(args):
    (
        down_0_0_weight,
        x,
        down_0_1_num_batches_tracked,
        down_0_1_running_mean,
        down_0_1_running_var,
        down_0_1_weight,
        down_0_1_bias,
        down_1_0_weight,
        down_1_1_num_batches_tracked,
        down_1_1_running_mean,
        down_1_1_running_var,
        down_1_1_weight,
        down_1_1_bias,
        up_0_0_weight,
        up_0_1_num_batches_tracked,
        up_0_1_running_mean,
        up_0_1_running_var,
        up_0_1_weight,
        up_0_1_bias,
        head_weight,
        head_bias,
    ) = args
    args.clear()
    # stage 0 forward: down.0.0 … down.0.2
    call = [
        down_0_0_weight, x, down_0_1_num_batches_tracked, down_0_1_running_mean, down_0_1_running_var, down_0_1_weight,
        down_0_1_bias,
    ]
    del (down_0_1_num_batches_tracked, down_0_1_running_mean, down_0_1_running_var)
    [add, getitem_3, getitem_4, relu, getitem_5] = stage_0_forward(call)
    # stage 1 forward: down.1.0 … head
    call = [
        down_1_0_weight, down_1_1_num_batches_tracked, down_1_1_running_mean, down_1_1_running_var, down_1_1_weight,
        down_1_1_bias, up_0_0_weight, up_0_1_num_batches_tracked, up_0_1_running_mean, up_0_1_running_var,
        up_0_1_weight, up_0_1_bias, head_weight, head_bias, relu, getitem_5,
    ]
    del (
        down_1_1_num_batches_tracked, down_1_1_running_mean, down_1_1_running_var, up_0_1_num_batches_tracked,
        up_0_1_running_mean, up_0_1_running_var,
    )
    [add_1, getitem_10, getitem_11, add_4, getitem_15, getitem_16, mean] = stage_1_forward(call)
    return (
        add, getitem_3, getitem_4, add_1, getitem_10, getitem_11, add_4, getitem_15, getitem_16, mean, down_0_0_weight,
        x, down_0_1_weight, down_0_1_bias, down_1_0_weight, down_1_1_weight, down_1_1_bias, up_0_0_weight,
        up_0_1_weight, up_0_1_bias, head_weight, head_bias, relu, getitem_5,
    )


def backward(args):
    (
        down_0_0_weight,
        x,
        down_0_1_weight,
        down_0_1_bias,
        down_1_0_weight,
        down_1_1_weight,
        down_1_1_bias,
        up_0_0_weight,
        up_0_1_weight,
        up_0_1_bias,
        head_weight,
        head_bias,
        relu,
        getitem_5,
        tangents_1,
    ) = args
    args.clear()
    # stage 1 recompute: down.1.0 … head
    call = [
        down_1_0_weight, down_1_1_weight, down_1_1_bias, up_0_0_weight, up_0_1_weight, up_0_1_bias, head_weight,
        head_bias, relu, getitem_5,
    ]
    del (down_1_1_bias, up_0_1_bias, head_bias)
    [
        convolution_4, getitem_39, getitem_40, relu_3, cat_1, convolution_5, getitem_42, getitem_43, relu_4, mul_2,
    ] = stage_1_recompute(call)
    streams.record_event(2, 0)
    # stage 1 backward: down.1.0 … head
    call = [
        down_1_0_weight, down_1_1_weight, up_0_0_weight, up_0_1_weight, head_weight, tangents_1, getitem_5,
        convolution_4, getitem_39, getitem_40, relu_3, cat_1, convolution_5, getitem_42, getitem_43, relu_4, mul_2,
    ]
    del (
        down_1_0_weight, down_1_1_weight, up_0_0_weight, up_0_1_weight, head_weight, tangents_1, getitem_5,
        convolution_4, getitem_39, getitem_40, relu_3, cat_1, convolution_5, getitem_42, getitem_43, relu_4, mul_2,
    )
    [
        getitem_18, getitem_19, getitem_21, getitem_22, getitem_24, slice_2, getitem_27, getitem_28, getitem_29,
        getitem_30,
    ] = stage_1_backward(call)
    streams.fork(0, 1)
    streams.wait_event(2, 1)
    # stage 0 recompute: down.0.0 … down.0.2
    call = [down_0_0_weight, x, down_0_1_weight, down_0_1_bias, relu]
    del (down_0_1_bias)
    [convolution_7, getitem_45, getitem_46, getitem_48] = stage_0_recompute(call)
    streams.record_event(3, 1)
    streams.join(1, 0)
    streams.wait_event(3, 0)
    streams.record_streams([convolution_7, getitem_45, getitem_46, getitem_48], 0)
    # stage 0 backward: down.0.0 … down.0.2
    call = [
        down_0_0_weight, x, down_0_1_weight, relu, convolution_7, getitem_45, getitem_46, getitem_48, slice_2,
        getitem_29,
    ]
    del (
        down_0_0_weight, x, down_0_1_weight, relu, convolution_7, getitem_45, getitem_46, getitem_48, slice_2,
        getitem_29,
    )
    [getitem_33, getitem_34, getitem_36] = stage_0_backward(call)
    return (
        getitem_36, None, None, None, None, getitem_33, getitem_34, getitem_30, None, None, None, getitem_27,
        getitem_28, getitem_24, None, None, None, getitem_21, getitem_22, getitem_18, getitem_19,
    )
