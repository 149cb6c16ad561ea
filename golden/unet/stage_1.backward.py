import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_backward(args):
    (
        down_1_0_weight,  # float32[8, 4, 3, 3]
        down_1_1_weight,  # float32[8]
        up_0_0_weight,  # float32[4, 12, 3, 3]
        up_0_1_weight,  # float32[4]
        head_weight,  # float32[1, 4, 1, 1]
        tangents_1,  # float32[]
        getitem_5,  # float32[2, 4, 4, 4]
        convolution_4,  # float32[2, 8, 4, 4]
        getitem_39,  # float32[8]
        getitem_40,  # float32[8]
        relu_3,  # float32[2, 8, 4, 4]
        cat_1,  # float32[2, 12, 8, 8]
        convolution_5,  # float32[2, 4, 8, 8]
        getitem_42,  # float32[4]
        getitem_43,  # float32[4]
        relu_4,  # float32[2, 4, 8, 8]
        mul_2,  # float32[2, 1, 8, 8]
    ) = args
    args.clear()
    # model
    expand: "float32[2, 1, 8, 8]" = aten.expand.default(tangents_1, [2, 1, 8, 8]);  tangents_1 = None
    div: "float32[2, 1, 8, 8]" = aten.div.Scalar(expand, 128);  expand = None
    mul_3: "float32[2, 1, 8, 8]" = aten.mul_.Tensor(div, mul_2);  div = mul_2 = None
    # head
    convolution_backward: "(float32[2, 4, 8, 8], float32[1, 4, 1, 1], float32[1])" = aten.convolution_backward.default(mul_3, relu_4, head_weight, [1], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]);  mul_3 = head_weight = None
    getitem_17: "float32[2, 4, 8, 8]" = convolution_backward[0]
    getitem_18: "float32[1, 4, 1, 1]" = convolution_backward[1]
    getitem_19: "float32[1]" = convolution_backward[2];  convolution_backward = None
    # up.0.2
    threshold_backward: "float32[2, 4, 8, 8]" = aten.threshold_backward.grad_input(getitem_17, relu_4, 0, grad_input=getitem_17);  getitem_17 = relu_4 = None
    # up.0.1
    native_batch_norm_backward: "(float32[2, 4, 8, 8], float32[4], float32[4])" = aten.native_batch_norm_backward.default(threshold_backward, convolution_5, up_0_1_weight, None, None, getitem_42, getitem_43, True, 1e-05, [True, True, True]);  threshold_backward = convolution_5 = up_0_1_weight = getitem_42 = getitem_43 = None
    getitem_20: "float32[2, 4, 8, 8]" = native_batch_norm_backward[0]
    getitem_21: "float32[4]" = native_batch_norm_backward[1]
    getitem_22: "float32[4]" = native_batch_norm_backward[2];  native_batch_norm_backward = None
    # up.0.0
    convolution_backward_1: "(float32[2, 12, 8, 8], float32[4, 12, 3, 3], NoneType)" = aten.convolution_backward.default(getitem_20, cat_1, up_0_0_weight, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]);  getitem_20 = cat_1 = up_0_0_weight = None
    getitem_23: "float32[2, 12, 8, 8]" = convolution_backward_1[0]
    getitem_24: "float32[4, 12, 3, 3]" = convolution_backward_1[1];  convolution_backward_1 = None
    # model
    slice_1: "float32[2, 8, 8, 8]" = aten.slice.Tensor(getitem_23, 1, 0, 8)
    slice_2: "float32[2, 4, 8, 8]" = aten.slice.Tensor(getitem_23, 1, 8, 12);  getitem_23 = None
    upsample_nearest2d_backward_default: "float32[2, 8, 4, 4]" = aten.upsample_nearest2d_backward.default(slice_1, [8, 8], [2, 8, 4, 4]);  slice_1 = None
    # down.1.2
    threshold_backward_1: "float32[2, 8, 4, 4]" = aten.threshold_backward.grad_input(upsample_nearest2d_backward_default, relu_3, 0, grad_input=upsample_nearest2d_backward_default);  upsample_nearest2d_backward_default = relu_3 = None
    # down.1.1
    native_batch_norm_backward_1: "(float32[2, 8, 4, 4], float32[8], float32[8])" = aten.native_batch_norm_backward.default(threshold_backward_1, convolution_4, down_1_1_weight, None, None, getitem_39, getitem_40, True, 1e-05, [True, True, True]);  threshold_backward_1 = convolution_4 = down_1_1_weight = getitem_39 = getitem_40 = None
    getitem_26: "float32[2, 8, 4, 4]" = native_batch_norm_backward_1[0]
    getitem_27: "float32[8]" = native_batch_norm_backward_1[1]
    getitem_28: "float32[8]" = native_batch_norm_backward_1[2];  native_batch_norm_backward_1 = None
    # down.1.0
    convolution_backward_2: "(float32[2, 4, 4, 4], float32[8, 4, 3, 3], NoneType)" = aten.convolution_backward.default(getitem_26, getitem_5, down_1_0_weight, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]);  getitem_26 = getitem_5 = down_1_0_weight = None
    getitem_29: "float32[2, 4, 4, 4]" = convolution_backward_2[0]
    getitem_30: "float32[8, 4, 3, 3]" = convolution_backward_2[1];  convolution_backward_2 = None
    return (getitem_18, getitem_19, getitem_21, getitem_22, getitem_24, slice_2, getitem_27, getitem_28, getitem_29, getitem_30)
