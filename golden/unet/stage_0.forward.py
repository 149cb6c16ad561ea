import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
    (
        down_0_0_weight,  # float32[4, 3, 3, 3]
        x,  # float32[2, 3, 8, 8]
        down_0_1_num_batches_tracked,  # int64[]
        down_0_1_running_mean,  # float32[4]
        down_0_1_running_var,  # float32[4]
        down_0_1_weight,  # float32[4]
        down_0_1_bias,  # float32[4]
    ) = args
    args.clear()
    # down.0.0
    convolution: "float32[2, 4, 8, 8]" = aten.convolution.default(x, down_0_0_weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1);  x = down_0_0_weight = None
    # down.0.1
    add: "int64[]" = aten.add.Tensor(down_0_1_num_batches_tracked, 1);  down_0_1_num_batches_tracked = None
    _native_batch_norm_legit_functional: "(float32[2, 4, 8, 8], float32[4], float32[4], float32[4], float32[4])" = aten._native_batch_norm_legit_functional.default(convolution, down_0_1_weight, down_0_1_bias, down_0_1_running_mean, down_0_1_running_var, True, 0.1, 1e-05);  convolution = down_0_1_weight = down_0_1_bias = down_0_1_running_mean = down_0_1_running_var = None
    getitem: "float32[2, 4, 8, 8]" = _native_batch_norm_legit_functional[0]
    getitem_3: "float32[4]" = _native_batch_norm_legit_functional[3]
    getitem_4: "float32[4]" = _native_batch_norm_legit_functional[4];  _native_batch_norm_legit_functional = None
    # down.0.2
    relu: "float32[2, 4, 8, 8]" = aten.relu_.default(getitem);  getitem = None
    # model
    max_pool2d_with_indices: "(float32[2, 4, 4, 4], int64[2, 4, 4, 4])" = aten.max_pool2d_with_indices.default(relu, [2, 2])
    getitem_5: "float32[2, 4, 4, 4]" = max_pool2d_with_indices[0];  max_pool2d_with_indices = None
    return (add, getitem_3, getitem_4, relu, getitem_5)
