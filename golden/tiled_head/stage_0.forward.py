import operator

import torch
from torch import device, inf, nan

from roundpipe_fx.operators.gradient_sums import add_product_to, add_to

aten = torch.ops.aten


def tiles_of_model(view, t, view_2, full_default, sum_dim_int_list, primals_1):
    getitem_2_sum = torch.empty_strided((), (), dtype=torch.float32, device=view.device).zero_()
    mm_1_sum = torch.empty_strided((64, 4), (4, 1), dtype=torch.float32, device=view.device).zero_()
    mm_2_rows = torch.empty_strided((16, 4), (4, 1), dtype=torch.float32, device=view.device)
    for start in range(0, 16, 8):  # 16 rows
        view_tile: "float32[8, 4]" = view.narrow(0, start, 8)
        view_2_tile: "int64[8]" = view_2.narrow(0, start, 8)
        # model
        mm: "float32[8, 64]" = aten.mm.default(view_tile, t)
        _log_softmax: "float32[8, 64]" = aten._log_softmax.out(mm, 1, False, out=mm);  mm = None
        nll_loss_forward_default: "(float32[], float32[])" = aten.nll_loss_forward.default(_log_softmax, view_2_tile, None, 2, -100)
        getitem_2: "float32[]" = nll_loss_forward_default[0];  nll_loss_forward_default = None
        getitem_3: "float32[]" = add_to(getitem_2_sum, getitem_2);  getitem_2 = getitem_3 = None
        nll_loss_backward: "float32[8, 64]" = aten.nll_loss_backward.default(full_default, _log_softmax, view_2_tile, None, 1, -100, sum_dim_int_list)
        _log_softmax_backward_data: "float32[8, 64]" = aten._log_softmax_backward_data.out(nll_loss_backward, _log_softmax, 1, torch.float32, out=nll_loss_backward);  nll_loss_backward = _log_softmax = None
        t_1: "float32[64, 8]" = aten.t.default(_log_softmax_backward_data)
        mm_1: "float32[64, 4]" = add_product_to(mm_1_sum, t_1, view_tile);  t_1 = mm_1 = None
        mm_2: "float32[8, 4]" = aten.mm.default(_log_softmax_backward_data, primals_1);  _log_softmax_backward_data = None
        mm_2_rows.narrow(0, start, 8).copy_(mm_2)
    return (getitem_2_sum, mm_1_sum, mm_2_rows,)


def stage_0_forward(args):
    (
        embedding_weight,  # float32[64, 4]
        tokens,  # int64[2, 8]
        targets,  # int64[2, 8]
    ) = args
    args.clear()
    # embedding
    embedding: "float32[2, 8, 4]" = aten.embedding.default(embedding_weight, tokens);  tokens = None
    # model
    tanh: "float32[2, 8, 4]" = aten.tanh_.default(embedding);  embedding = None
    t: "float32[4, 64]" = aten.t.default(embedding_weight)
    view: "float32[16, 4]" = aten.view.default(tanh, [16, 4])
    view_2: "int64[16]" = aten.view.default(targets, [16]);  targets = None
    ne_scalar: "bool[16]" = aten.ne.Scalar(view_2, -100)
    sum_dim_int_list: "float32[]" = aten.sum.dim_IntList(ne_scalar, None, dtype=torch.float32);  ne_scalar = None
    full_default: "float32[]" = aten.full.default([], 1.0, dtype=torch.float32, device=device(type='cpu'))
    in_tiles: "(float32[], float32[64, 4], float32[16, 4])" = tiles_of_model(view, t, view_2, full_default, sum_dim_int_list, embedding_weight);  view = t = view_2 = full_default = embedding_weight = None
    getitem: "float32[]" = in_tiles[0]
    getitem_3: "float32[64, 4]" = in_tiles[1]
    getitem_4: "float32[16, 4]" = in_tiles[2];  in_tiles = None
    div_tensor: "float32[]" = aten.div_.Tensor(getitem, sum_dim_int_list);  getitem = sum_dim_int_list = None
    return (tanh, getitem_3, getitem_4, div_tensor)
