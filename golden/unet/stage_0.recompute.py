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
        relu,  # float32[2, 4, 8, 8]
    ) = args
    args.clear()
    # down.0.0 (recomputed)
    convolution_7: "float32[2, 4, 8, 8]" = aten.convolution.default(x, down_0_0_weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1);  x = down_0_0_weight = None
    # down.0.1 (recomputed)
    _native_batch_norm_legit_functional_5: "(float32[2, 4, 8, 8], float32[4], float32[4])" = aten._native_batch_norm_legit.no_stats(convolution_7, down_0_1_weight, down_0_1_bias, True, 0.1, 1e-05);  down_0_1_weight = down_0_1_bias = None
    getitem_45: "float32[4]" = _native_batch_norm_legit_functional_5[1]
    getitem_46: "float32[4]" = _native_batch_norm_legit_functional_5[2];  _native_batch_norm_legit_functional_5 = None
    # model (recomputed)
    max_pool2d_with_indices_1: "(float32[2, 4, 4, 4], int64[2, 4, 4, 4])" = aten.max_pool2d_with_indices.default(relu, [2, 2]);  relu = None
    getitem_48: "int64[2, 4, 4, 4]" = max_pool2d_with_indices_1[1];  max_pool2d_with_indices_1 = None
    return (convolution_7, getitem_45, getitem_46, getitem_48)
