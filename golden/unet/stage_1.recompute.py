import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_recompute(args):
    (
        down_1_0_weight,  # float32[8, 4, 3, 3]
        down_1_1_weight,  # float32[8]
        down_1_1_bias,  # float32[8]
        up_0_0_weight,  # float32[4, 12, 3, 3]
        up_0_1_weight,  # float32[4]
        up_0_1_bias,  # float32[4]
        head_weight,  # float32[1, 4, 1, 1]
        head_bias,  # float32[1]
        relu,  # float32[2, 4, 8, 8]
        getitem_5,  # float32[2, 4, 4, 4]
    ) = args
    args.clear()
    # down.1.0 (recomputed)
    convolution_4: "float32[2, 8, 4, 4]" = aten.convolution.default(getitem_5, down_1_0_weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1);  getitem_5 = down_1_0_weight = None
    # down.1.1 (recomputed)
    _native_batch_norm_legit_functional_3: "(float32[2, 8, 4, 4], float32[8], float32[8])" = aten._native_batch_norm_legit.no_stats(convolution_4, down_1_1_weight, down_1_1_bias, True, 0.1, 1e-05);  down_1_1_weight = down_1_1_bias = None
    getitem_38: "float32[2, 8, 4, 4]" = _native_batch_norm_legit_functional_3[0]
    getitem_39: "float32[8]" = _native_batch_norm_legit_functional_3[1]
    getitem_40: "float32[8]" = _native_batch_norm_legit_functional_3[2];  _native_batch_norm_legit_functional_3 = None
    # down.1.2 (recomputed)
    relu_3: "float32[2, 8, 4, 4]" = aten.relu_.default(getitem_38);  getitem_38 = None
    # model (recomputed)
    upsample_nearest2d_default_1: "float32[2, 8, 8, 8]" = aten.upsample_nearest2d.default(relu_3, [8, 8])
    cat_1: "float32[2, 12, 8, 8]" = aten.cat.default([upsample_nearest2d_default_1, relu], 1);  upsample_nearest2d_default_1 = relu = None
    # up.0.0 (recomputed)
    convolution_5: "float32[2, 4, 8, 8]" = aten.convolution.default(cat_1, up_0_0_weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1);  up_0_0_weight = None
    # up.0.1 (recomputed)
    _native_batch_norm_legit_functional_4: "(float32[2, 4, 8, 8], float32[4], float32[4])" = aten._native_batch_norm_legit.no_stats(convolution_5, up_0_1_weight, up_0_1_bias, True, 0.1, 1e-05);  up_0_1_weight = up_0_1_bias = None
    getitem_41: "float32[2, 4, 8, 8]" = _native_batch_norm_legit_functional_4[0]
    getitem_42: "float32[4]" = _native_batch_norm_legit_functional_4[1]
    getitem_43: "float32[4]" = _native_batch_norm_legit_functional_4[2];  _native_batch_norm_legit_functional_4 = None
    # up.0.2 (recomputed)
    relu_4: "float32[2, 4, 8, 8]" = aten.relu_.default(getitem_41);  getitem_41 = None
    # head (recomputed)
    convolution_6: "float32[2, 1, 8, 8]" = aten.convolution.default(relu_4, head_weight, head_bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1);  head_weight = head_bias = None
    # model
    pow_2: "float32[2, 1, 8, 8]" = aten.pow.Tensor_Scalar_out(convolution_6, 1.0, out=convolution_6);  convolution_6 = None
    mul_2: "float32[2, 1, 8, 8]" = aten.mul_.Scalar(pow_2, 2.0);  pow_2 = None
    return (convolution_4, getitem_39, getitem_40, relu_3, cat_1, convolution_5, getitem_42, getitem_43, relu_4, mul_2)
