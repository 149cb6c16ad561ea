import operator

import torch
from torch import device, inf, nan

from roundpipe_fx.operators.gradient_sums import add_product_to

aten = torch.ops.aten


def tiles_of_head_2(primals_4, tanh, _log_softmax_arange, _log_softmax_reshape_2, _log_softmax_masked_fill_3, _log_softmax__to_copy, _log_softmax__to_copy_1):
    mm_1_rows = torch.empty_strided((256, 8), (8, 1), dtype=torch.float32, device=primals_4.device)
    mm_2_sum = torch.empty_strided((4, 8), (8, 1), dtype=torch.float32, device=primals_4.device).zero_()
    for start in range(0, 256, 32):  # 256 rows
        primals_4_tile: "float32[32, 8]" = primals_4.narrow(0, start, 32)
        _log_softmax_arange_tile: "int32[32]" = _log_softmax_arange.narrow(0, start, 32)
        # head
        t_1: "float32[8, 32]" = aten.t.default(primals_4_tile)
        mm: "float32[4, 32]" = aten.mm.default(tanh, t_1);  t_1 = None
        # model
        _log_softmax_ne: "bool[4, 32]" = aten.ne.Tensor(_log_softmax_arange_tile, _log_softmax_reshape_2)
        _log_softmax_expand: "float32[4, 32]" = aten.expand.default(_log_softmax_masked_fill_3, [4, 32])
        _log_softmax_masked_fill_4: "float32[4, 32]" = aten.masked_fill.Scalar(_log_softmax_expand, _log_softmax_ne, 0.0);  _log_softmax_expand = _log_softmax_ne = None
        _log_softmax_sub_2: "float32[4, 32]" = aten.sub_.Tensor(mm, _log_softmax__to_copy);  mm = None
        _log_softmax_sub_3: "float32[4, 32]" = aten.sub_.Tensor(_log_softmax_sub_2, _log_softmax__to_copy_1);  _log_softmax_sub_2 = None
        _log_softmax_exp: "float32[4, 32]" = aten.exp_.default(_log_softmax_sub_3);  _log_softmax_sub_3 = None
        _log_softmax_mul: "float32[4, 32]" = aten.mul_.Tensor(_log_softmax_exp, _log_softmax_masked_fill_3);  _log_softmax_exp = None
        _log_softmax_sub_4: "float32[4, 32]" = aten.sub_.Tensor(_log_softmax_masked_fill_4, _log_softmax_mul);  _log_softmax_masked_fill_4 = _log_softmax_mul = None
        # head
        t_2: "float32[32, 4]" = aten.t.default(_log_softmax_sub_4)
        mm_1: "float32[32, 8]" = aten.mm.default(t_2, tanh);  t_2 = None
        mm_2: "float32[4, 8]" = add_product_to(mm_2_sum, _log_softmax_sub_4, primals_4_tile);  _log_softmax_sub_4 = mm_2 = None
        mm_1_rows.narrow(0, start, 32).copy_(mm_1)
    return (mm_1_rows, mm_2_sum,)


def stage_0_backward(args):
    (
        x,  # float32[4, 8]
        head_weight,  # float32[256, 8]
        tangents_1,  # float32[]
        tanh,  # float32[4, 8]
        _log_softmax_eq,  # bool[4, 1]
        _log_softmax_arange,  # int32[256]
        _log_softmax_index_select,  # int32[4]
        _log_softmax__to_copy,  # float32[4, 1]
        _log_softmax__to_copy_1,  # float32[4, 1]
        sum_dim_int_list,  # float32[]
    ) = args
    args.clear()
    # model
    _log_softmax_div: "float32[]" = aten.div.Tensor(tangents_1, sum_dim_int_list);  tangents_1 = sum_dim_int_list = None
    _log_softmax_neg_1: "float32[]" = aten.neg_.default(_log_softmax_div);  _log_softmax_div = None
    _log_softmax_masked_fill_3: "float32[4, 1]" = aten.masked_fill.Scalar(_log_softmax_neg_1, _log_softmax_eq, 0.0);  _log_softmax_neg_1 = _log_softmax_eq = None
    # model (recomputed)
    _log_softmax_reshape_3: "int32[4, 1]" = aten.reshape.default(_log_softmax_index_select, [4, 1]);  _log_softmax_index_select = None
    # head
    in_tiles_1: "(float32[256, 8], float32[4, 8])" = tiles_of_head_2(head_weight, tanh, _log_softmax_arange, _log_softmax_reshape_3, _log_softmax_masked_fill_3, _log_softmax__to_copy, _log_softmax__to_copy_1);  head_weight = _log_softmax_arange = _log_softmax_reshape_3 = _log_softmax_masked_fill_3 = _log_softmax__to_copy = _log_softmax__to_copy_1 = None
    getitem_4: "float32[256, 8]" = in_tiles_1[0]
    getitem_5: "float32[4, 8]" = in_tiles_1[1];  in_tiles_1 = None
    # model
    tanh_backward: "float32[4, 8]" = aten.tanh_backward.grad_input(getitem_5, tanh, grad_input=getitem_5);  getitem_5 = tanh = None
    # body
    t_6: "float32[8, 4]" = aten.t.default(tanh_backward)
    mm_3: "float32[8, 8]" = aten.mm.default(t_6, x);  t_6 = x = None
    sum_1: "float32[1, 8]" = aten.sum.dim_IntList(tanh_backward, [0], True);  tanh_backward = None
    view: "float32[8]" = aten.view.default(sum_1, [8]);  sum_1 = None
    return (getitem_4, mm_3, view)
