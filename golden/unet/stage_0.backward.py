import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        down_0_0_weight,  # float32[4, 3, 3, 3]
        x,  # float32[2, 3, 8, 8]
        down_0_1_weight,  # float32[4]
        relu,  # float32[2, 4, 8, 8]
        convolution_7,  # float32[2, 4, 8, 8]
        getitem_45,  # float32[4]
        getitem_46,  # float32[4]
        getitem_48,  # int64[2, 4, 4, 4]
        slice_2,  # float32[2, 4, 8, 8]
        getitem_29,  # float32[2, 4, 4, 4]
    ) = args
    args.clear()
    # model
    max_pool2d_with_indices_backward: "float32[2, 4, 8, 8]" = aten.max_pool2d_with_indices_backward.default(getitem_29, relu, [2, 2], [], [0, 0], [1, 1], False, getitem_48);  getitem_29 = getitem_48 = None
    add_5: "float32[2, 4, 8, 8]" = aten.add.out(slice_2, max_pool2d_with_indices_backward, out=max_pool2d_with_indices_backward);  slice_2 = max_pool2d_with_indices_backward = None
    # down.0.2
    threshold_backward_2: "float32[2, 4, 8, 8]" = aten.threshold_backward.grad_input(add_5, relu, 0, grad_input=add_5);  add_5 = relu = None
    # down.0.1
    native_batch_norm_backward_2: "(float32[2, 4, 8, 8], float32[4], float32[4])" = aten.native_batch_norm_backward.default(threshold_backward_2, convolution_7, down_0_1_weight, None, None, getitem_45, getitem_46, True, 1e-05, [True, True, True]);  threshold_backward_2 = convolution_7 = down_0_1_weight = getitem_45 = getitem_46 = None
    getitem_32: "float32[2, 4, 8, 8]" = native_batch_norm_backward_2[0]
    getitem_33: "float32[4]" = native_batch_norm_backward_2[1]
    getitem_34: "float32[4]" = native_batch_norm_backward_2[2];  native_batch_norm_backward_2 = None
    # down.0.0
    convolution_backward_3: "(NoneType, float32[4, 3, 3, 3], NoneType)" = aten.convolution_backward.default(getitem_32, x, down_0_0_weight, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]);  getitem_32 = x = down_0_0_weight = None
    getitem_36: "float32[4, 3, 3, 3]" = convolution_backward_3[1];  convolution_backward_3 = None
    return (getitem_33, getitem_34, getitem_36)
