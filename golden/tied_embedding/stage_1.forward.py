import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_1_forward(args):
    (
        embedding_weight,  # float32[16, 8]
        targets,  # int64[2, 4]
        tanh,  # float32[2, 4, 8]
    ) = args
    args.clear()
    # model
    t_1: "float32[8, 16]" = aten.t.default(embedding_weight);  embedding_weight = None
    view_2: "float32[8, 8]" = aten.view.default(tanh, [8, 8]);  tanh = None
    mm: "float32[8, 16]" = aten.mm.default(view_2, t_1);  view_2 = t_1 = None
    view_4: "int64[8]" = aten.view.default(targets, [8]);  targets = None
    _log_softmax: "float32[8, 16]" = aten._log_softmax.out(mm, 1, False, out=mm);  mm = None
    nll_loss_forward: "(float32[], float32[])" = aten.nll_loss_forward.default(_log_softmax, view_4, None, 1, -100);  _log_softmax = view_4 = None
    getitem: "float32[]" = nll_loss_forward[0];  nll_loss_forward = None
    return (getitem,)
