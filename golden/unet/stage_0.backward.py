import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        down_0_0_weight,  # float32[4, 3, 3, 3]
        x,  # float32[2, 3, 8, 8]
        down_0_1_weight,  # float32[4]
        down_1_0_weight,  # float32[8, 4, 3, 3]
        down_1_1_weight,  # float32[8]
        convolution_6,  # float32[2, 4, 8, 8]
        getitem_42,  # float32[4]
        getitem_43,  # float32[4]
        relu_4,  # float32[2, 4, 8, 8]
        getitem_44,  # float32[2, 4, 4, 4]
        getitem_45,  # int64[2, 4, 4, 4]
        convolution_7,  # float32[2, 8, 4, 4]
        getitem_47,  # float32[8]
        getitem_48,  # float32[8]
        relu_5,  # float32[2, 8, 4, 4]
        getitem_23,  # float32[2, 12, 8, 8]
    ) = args
    args.clear()
    # model
    slice_1: "float32[2, 8, 8, 8]" = aten.slice.Tensor(getitem_23, 1, 0, 8)
    slice_2: "float32[2, 4, 8, 8]" = aten.slice.Tensor(getitem_23, 1, 8, 12);  getitem_23 = None
    upsample_nearest2d_backward_default: "float32[2, 8, 4, 4]" = aten.upsample_nearest2d_backward.default(slice_1, [8, 8], [2, 8, 4, 4]);  slice_1 = None
    # down.1.2
    threshold_backward_1: "float32[2, 8, 4, 4]" = aten.threshold_backward.grad_input(upsample_nearest2d_backward_default, relu_5, 0, grad_input=upsample_nearest2d_backward_default);  upsample_nearest2d_backward_default = relu_5 = None
    # down.1.1
    native_batch_norm_backward_1: "(float32[2, 8, 4, 4], float32[8], float32[8])" = aten.native_batch_norm_backward.default(threshold_backward_1, convolution_7, down_1_1_weight, None, None, getitem_47, getitem_48, True, 1e-05, [True, True, True]);  threshold_backward_1 = convolution_7 = down_1_1_weight = getitem_47 = getitem_48 = None
    getitem_26: "float32[2, 8, 4, 4]" = native_batch_norm_backward_1[0]
    getitem_27: "float32[8]" = native_batch_norm_backward_1[1]
    getitem_28: "float32[8]" = native_batch_norm_backward_1[2];  native_batch_norm_backward_1 = None
    # down.1.0
    convolution_backward_2: "(float32[2, 4, 4, 4], float32[8, 4, 3, 3], NoneType)" = aten.convolution_backward.default(getitem_26, getitem_44, down_1_0_weight, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]);  getitem_26 = getitem_44 = down_1_0_weight = None
    getitem_29: "float32[2, 4, 4, 4]" = convolution_backward_2[0]
    getitem_30: "float32[8, 4, 3, 3]" = convolution_backward_2[1];  convolution_backward_2 = None
    # model
    max_pool2d_with_indices_backward: "float32[2, 4, 8, 8]" = aten.max_pool2d_with_indices_backward.default(getitem_29, relu_4, [2, 2], [], [0, 0], [1, 1], False, getitem_45);  getitem_29 = getitem_45 = None
    add_5: "float32[2, 4, 8, 8]" = aten.add.out(slice_2, max_pool2d_with_indices_backward, out=max_pool2d_with_indices_backward);  slice_2 = max_pool2d_with_indices_backward = None
    # down.0.2
    threshold_backward_2: "float32[2, 4, 8, 8]" = aten.threshold_backward.grad_input(add_5, relu_4, 0, grad_input=add_5);  add_5 = relu_4 = None
    # down.0.1
    native_batch_norm_backward_2: "(float32[2, 4, 8, 8], float32[4], float32[4])" = aten.native_batch_norm_backward.default(threshold_backward_2, convolution_6, down_0_1_weight, None, None, getitem_42, getitem_43, True, 1e-05, [True, True, True]);  threshold_backward_2 = convolution_6 = down_0_1_weight = getitem_42 = getitem_43 = None
    getitem_32: "float32[2, 4, 8, 8]" = native_batch_norm_backward_2[0]
    getitem_33: "float32[4]" = native_batch_norm_backward_2[1]
    getitem_34: "float32[4]" = native_batch_norm_backward_2[2];  native_batch_norm_backward_2 = None
    # down.0.0
    convolution_backward_3: "(NoneType, float32[4, 3, 3, 3], NoneType)" = aten.convolution_backward.default(getitem_32, x, down_0_0_weight, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]);  getitem_32 = x = down_0_0_weight = None
    getitem_36: "float32[4, 3, 3, 3]" = convolution_backward_3[1];  convolution_backward_3 = None
    return (getitem_27, getitem_28, getitem_30, getitem_33, getitem_34, getitem_36)
