import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_recompute(args):
    (
        down_0_0_weight,  # float32[4, 3, 3, 3]
        x,  # float32[2, 3, 8, 8]
        down_0_1_weight,  # float32[4]
        down_0_1_bias,  # float32[4]
        down_1_0_weight,  # float32[8, 4, 3, 3]
        down_1_1_weight,  # float32[8]
        down_1_1_bias,  # float32[8]
    ) = args
    args.clear()
    # down.0.0 (again)
    convolution_6: "float32[2, 4, 8, 8]" = aten.convolution.default(x, down_0_0_weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1);  x = down_0_0_weight = None
    # down.0.1 (again)
    _native_batch_norm_legit_functional_4: "(float32[2, 4, 8, 8], float32[4], float32[4])" = aten._native_batch_norm_legit.no_stats(convolution_6, down_0_1_weight, down_0_1_bias, True, 0.1, 1e-05);  down_0_1_weight = down_0_1_bias = None
    getitem_41: "float32[2, 4, 8, 8]" = _native_batch_norm_legit_functional_4[0]
    getitem_42: "float32[4]" = _native_batch_norm_legit_functional_4[1]
    getitem_43: "float32[4]" = _native_batch_norm_legit_functional_4[2];  _native_batch_norm_legit_functional_4 = None
    # down.0.2 (again)
    relu_4: "float32[2, 4, 8, 8]" = aten.relu_.default(getitem_41);  getitem_41 = None
    # model (again)
    max_pool2d_with_indices_1: "(float32[2, 4, 4, 4], int64[2, 4, 4, 4])" = aten.max_pool2d_with_indices.default(relu_4, [2, 2])
    getitem_44: "float32[2, 4, 4, 4]" = max_pool2d_with_indices_1[0]
    getitem_45: "int64[2, 4, 4, 4]" = max_pool2d_with_indices_1[1];  max_pool2d_with_indices_1 = None
    # down.1.0 (again)
    convolution_7: "float32[2, 8, 4, 4]" = aten.convolution.default(getitem_44, down_1_0_weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1);  down_1_0_weight = None
    # down.1.1 (again)
    _native_batch_norm_legit_functional_5: "(float32[2, 8, 4, 4], float32[8], float32[8])" = aten._native_batch_norm_legit.no_stats(convolution_7, down_1_1_weight, down_1_1_bias, True, 0.1, 1e-05);  down_1_1_weight = down_1_1_bias = None
    getitem_46: "float32[2, 8, 4, 4]" = _native_batch_norm_legit_functional_5[0]
    getitem_47: "float32[8]" = _native_batch_norm_legit_functional_5[1]
    getitem_48: "float32[8]" = _native_batch_norm_legit_functional_5[2];  _native_batch_norm_legit_functional_5 = None
    # down.1.2 (again)
    relu_5: "float32[2, 8, 4, 4]" = aten.relu_.default(getitem_46);  getitem_46 = None
    return (convolution_6, getitem_42, getitem_43, relu_4, getitem_44, getitem_45, convolution_7, getitem_47, getitem_48, relu_5)
