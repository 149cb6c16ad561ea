import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_backward(args):
    (
        embedding_weight,  # float32[16, 8]
        targets,  # int64[2, 4]
        tangents_1,  # float32[]
        tanh,  # float32[2, 4, 8]
        _log_softmax_1,  # float32[8, 16]
        getitem_3,  # float32[]
    ) = args
    args.clear()
    # model (recomputed)
    view_15: "float32[8, 8]" = aten.view.default(tanh, [8, 8]);  tanh = None
    view_14: "int64[8]" = aten.view.default(targets, [8]);  targets = None
    # model
    nll_loss_backward: "float32[8, 16]" = aten.nll_loss_backward.default(tangents_1, _log_softmax_1, view_14, None, 1, -100, getitem_3);  tangents_1 = view_14 = getitem_3 = None
    _log_softmax_backward_data: "float32[8, 16]" = aten._log_softmax_backward_data.out(nll_loss_backward, _log_softmax_1, 1, torch.float32, out=nll_loss_backward);  nll_loss_backward = _log_softmax_1 = None
    t_2: "float32[16, 8]" = aten.t.default(_log_softmax_backward_data)
    mm_1: "float32[16, 8]" = aten.mm.default(t_2, view_15);  t_2 = view_15 = None
    mm_2: "float32[8, 8]" = aten.mm.default(_log_softmax_backward_data, embedding_weight);  _log_softmax_backward_data = embedding_weight = None
    view_7: "float32[2, 4, 8]" = aten.view.default(mm_2, [2, 4, 8]);  mm_2 = None
    return (mm_1, view_7)
