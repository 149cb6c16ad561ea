import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_forward(args):
    (
        down_1_0_weight,  # float32[8, 4, 3, 3]
        down_1_1_num_batches_tracked,  # int64[]
        down_1_1_running_mean,  # float32[8]
        down_1_1_running_var,  # float32[8]
        down_1_1_weight,  # float32[8]
        down_1_1_bias,  # float32[8]
        up_0_0_weight,  # float32[4, 12, 3, 3]
        up_0_1_num_batches_tracked,  # int64[]
        up_0_1_running_mean,  # float32[4]
        up_0_1_running_var,  # float32[4]
        up_0_1_weight,  # float32[4]
        up_0_1_bias,  # float32[4]
        head_weight,  # float32[1, 4, 1, 1]
        head_bias,  # float32[1]
        relu,  # float32[2, 4, 8, 8]
        getitem_5,  # float32[2, 4, 4, 4]
    ) = args
    args.clear()
    # down.1.0
    convolution_1: "float32[2, 8, 4, 4]" = aten.convolution.default(getitem_5, down_1_0_weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1);  getitem_5 = down_1_0_weight = None
    # down.1.1
    add_1: "int64[]" = aten.add.Tensor(down_1_1_num_batches_tracked, 1);  down_1_1_num_batches_tracked = None
    _native_batch_norm_legit_functional_1: "(float32[2, 8, 4, 4], float32[8], float32[8], float32[8], float32[8])" = aten._native_batch_norm_legit_functional.default(convolution_1, down_1_1_weight, down_1_1_bias, down_1_1_running_mean, down_1_1_running_var, True, 0.1, 1e-05);  convolution_1 = down_1_1_weight = down_1_1_bias = down_1_1_running_mean = down_1_1_running_var = None
    getitem_7: "float32[2, 8, 4, 4]" = _native_batch_norm_legit_functional_1[0]
    getitem_10: "float32[8]" = _native_batch_norm_legit_functional_1[3]
    getitem_11: "float32[8]" = _native_batch_norm_legit_functional_1[4];  _native_batch_norm_legit_functional_1 = None
    # down.1.2
    relu_1: "float32[2, 8, 4, 4]" = aten.relu_.default(getitem_7);  getitem_7 = None
    # model
    upsample_nearest2d_default: "float32[2, 8, 8, 8]" = aten.upsample_nearest2d.default(relu_1, [8, 8]);  relu_1 = None
    cat: "float32[2, 12, 8, 8]" = aten.cat.default([upsample_nearest2d_default, relu], 1);  upsample_nearest2d_default = relu = None
    # up.0.0
    convolution_2: "float32[2, 4, 8, 8]" = aten.convolution.default(cat, up_0_0_weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1);  cat = up_0_0_weight = None
    # up.0.1
    add_4: "int64[]" = aten.add.Tensor(up_0_1_num_batches_tracked, 1);  up_0_1_num_batches_tracked = None
    _native_batch_norm_legit_functional_2: "(float32[2, 4, 8, 8], float32[4], float32[4], float32[4], float32[4])" = aten._native_batch_norm_legit_functional.default(convolution_2, up_0_1_weight, up_0_1_bias, up_0_1_running_mean, up_0_1_running_var, True, 0.1, 1e-05);  convolution_2 = up_0_1_weight = up_0_1_bias = up_0_1_running_mean = up_0_1_running_var = None
    getitem_12: "float32[2, 4, 8, 8]" = _native_batch_norm_legit_functional_2[0]
    getitem_15: "float32[4]" = _native_batch_norm_legit_functional_2[3]
    getitem_16: "float32[4]" = _native_batch_norm_legit_functional_2[4];  _native_batch_norm_legit_functional_2 = None
    # up.0.2
    relu_2: "float32[2, 4, 8, 8]" = aten.relu_.default(getitem_12);  getitem_12 = None
    # head
    convolution_3: "float32[2, 1, 8, 8]" = aten.convolution.default(relu_2, head_weight, head_bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1);  relu_2 = head_weight = head_bias = None
    # model
    pow_1: "float32[2, 1, 8, 8]" = aten.pow.Tensor_Scalar_out(convolution_3, 2, out=convolution_3);  convolution_3 = None
    mean: "float32[]" = aten.mean.default(pow_1);  pow_1 = None
    return (add_1, getitem_10, getitem_11, add_4, getitem_15, getitem_16, mean)
