import operator

import torch
from torch import device, inf, nan

from roundpipe_fx.operators.gradient_sums import add_exponential_to, add_to

aten = torch.ops.aten


def tiles_of_head(primals_4, tanh, _log_softmax_arange, _log_softmax_reshape_2):
    _log_softmax_log_sum_exp_sum = torch.empty_strided((4, 1), (1, 1), dtype=torch.float64, device=primals_4.device).fill_(-inf)
    _log_softmax_sum_sum = torch.empty_strided((4, 1), (1, 1), dtype=torch.float32, device=primals_4.device).zero_()
    for start in range(0, 256, 32):  # 256 rows
        primals_4_tile: "float32[32, 8]" = primals_4.narrow(0, start, 32)
        _log_softmax_arange_tile: "int32[32]" = _log_softmax_arange.narrow(0, start, 32)
        # head
        t_1: "float32[8, 32]" = aten.t.default(primals_4_tile)
        mm: "float32[4, 32]" = aten.mm.default(tanh, t_1);  t_1 = None
        # model
        _log_softmax_log_sum_exp: "float64[4, 1]" = torch.ops.roundpipe_fx.log_sum_exp.default(mm, [1])
        _log_softmax_log_sum_exp_1: "float64[4, 1]" = add_exponential_to(_log_softmax_log_sum_exp_sum, _log_softmax_log_sum_exp);  _log_softmax_log_sum_exp = _log_softmax_log_sum_exp_1 = None
        _log_softmax_ne: "bool[4, 32]" = aten.ne.Tensor(_log_softmax_arange_tile, _log_softmax_reshape_2)
        _log_softmax_masked_fill_1: "float32[4, 32]" = aten.masked_fill_.Scalar(mm, _log_softmax_ne, 0.0);  mm = _log_softmax_ne = None
        _log_softmax_sum: "float32[4, 1]" = aten.sum.dim_IntList(_log_softmax_masked_fill_1, [1], True);  _log_softmax_masked_fill_1 = None
        _log_softmax_sum_1: "float32[4, 1]" = add_to(_log_softmax_sum_sum, _log_softmax_sum);  _log_softmax_sum = _log_softmax_sum_1 = None
    return (_log_softmax_log_sum_exp_sum, _log_softmax_sum_sum,)


def stage_0_forward(args):
    (
        body_weight,  # float32[8, 8]
        body_bias,  # float32[8]
        x,  # float32[4, 8]
        head_weight,  # float32[256, 8]
        targets,  # int64[4]
    ) = args
    args.clear()
    # body
    t: "float32[8, 8]" = aten.t.default(body_weight);  body_weight = None
    addmm: "float32[4, 8]" = aten.addmm.default(body_bias, x, t);  body_bias = x = t = None
    # model
    tanh: "float32[4, 8]" = aten.tanh_.default(addmm);  addmm = None
    _log_softmax_reshape: "int64[4, 1]" = aten.reshape.default(targets, [4, 1])
    _log_softmax_eq: "bool[4, 1]" = aten.eq.Scalar(_log_softmax_reshape, -100)
    _log_softmax_masked_fill: "int64[4, 1]" = aten.masked_fill.Scalar(_log_softmax_reshape, _log_softmax_eq, 0);  _log_softmax_reshape = None
    _log_softmax_reshape_1: "int64[4]" = aten.reshape.default(_log_softmax_masked_fill, [-1]);  _log_softmax_masked_fill = None
    _log_softmax_arange: "int32[256]" = aten.arange.default(256, dtype=torch.int32, device=device(type='cpu'), pin_memory=False)
    _log_softmax_index_select: "int32[4]" = aten.index_select.default(_log_softmax_arange, 0, _log_softmax_reshape_1);  _log_softmax_reshape_1 = None
    _log_softmax_reshape_2: "int32[4, 1]" = aten.reshape.default(_log_softmax_index_select, [4, 1])
    # head
    in_tiles: "(float64[4, 1], float32[4, 1])" = tiles_of_head(head_weight, tanh, _log_softmax_arange, _log_softmax_reshape_2);  head_weight = _log_softmax_reshape_2 = None
    getitem: "float64[4, 1]" = in_tiles[0]
    # model
    _log_softmax__to_copy: "float32[4, 1]" = aten._to_copy.default(getitem, dtype=torch.float32)
    _log_softmax_sub: "float64[4, 1]" = aten.sub.Tensor(getitem, _log_softmax__to_copy)
    _log_softmax__to_copy_1: "float32[4, 1]" = aten._to_copy.default(_log_softmax_sub, dtype=torch.float32);  _log_softmax_sub = None
    ne_scalar: "bool[4]" = aten.ne.Scalar(targets, -100);  targets = None
    sum_dim_int_list: "float32[]" = aten.sum.dim_IntList(ne_scalar, None, dtype=torch.float32);  ne_scalar = None
    # head
    getitem_3: "float32[4, 1]" = in_tiles[1];  in_tiles = None
    # model
    _log_softmax_sub_1: "float64[4, 1]" = aten.sub.out(getitem_3, getitem, out=getitem);  getitem_3 = getitem = None
    _log_softmax__to_copy_2: "float32[4, 1]" = aten._to_copy.default(_log_softmax_sub_1, dtype=torch.float32);  _log_softmax_sub_1 = None
    _log_softmax_neg: "float32[4, 1]" = aten.neg_.default(_log_softmax__to_copy_2);  _log_softmax__to_copy_2 = None
    _log_softmax_masked_fill_2: "float32[4, 1]" = aten.masked_fill_.Scalar(_log_softmax_neg, _log_softmax_eq, 0.0);  _log_softmax_neg = None
    _log_softmax_sum_1: "float32[]" = aten.sum.default(_log_softmax_masked_fill_2);  _log_softmax_masked_fill_2 = None
    div_tensor: "float32[]" = aten.div_.Tensor(_log_softmax_sum_1, sum_dim_int_list);  _log_softmax_sum_1 = None
    return (tanh, _log_softmax_eq, _log_softmax_arange, _log_softmax_index_select, _log_softmax__to_copy, _log_softmax__to_copy_1, sum_dim_int_list, div_tensor)
