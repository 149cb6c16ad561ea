import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_backward(args):
    (
        tokens,  # int64[2, 4]
        layer_weight,  # float32[8, 8]
        tanh,  # float32[2, 4, 8]
        embedding_1,  # float32[2, 4, 8]
        mm_1,  # float32[16, 8]
        view_7,  # float32[2, 4, 8]
    ) = args
    args.clear()
    # layer (recomputed)
    view_13: "float32[8, 8]" = aten.view.default(embedding_1, [8, 8]);  embedding_1 = None
    # model
    tanh_backward: "float32[2, 4, 8]" = aten.tanh_backward.default(view_7, tanh);  view_7 = tanh = None
    # layer
    view_8: "float32[8, 8]" = aten.view.default(tanh_backward, [8, 8]);  tanh_backward = None
    mm_3: "float32[8, 8]" = aten.mm.default(view_8, layer_weight);  layer_weight = None
    t_7: "float32[8, 8]" = aten.t.default(view_8)
    mm_4: "float32[8, 8]" = aten.mm.default(t_7, view_13);  t_7 = view_13 = None
    sum_1: "float32[1, 8]" = aten.sum.dim_IntList(view_8, [0], True);  view_8 = None
    view_9: "float32[8]" = aten.view.default(sum_1, [8]);  sum_1 = None
    view_10: "float32[2, 4, 8]" = aten.view.default(mm_3, [2, 4, 8]);  mm_3 = None
    # embedding
    embedding_dense_backward: "float32[16, 8]" = aten.embedding_dense_backward.default(view_10, tokens, 16, -1, False);  view_10 = tokens = None
    # model
    add: "float32[16, 8]" = aten.add.out(mm_1, embedding_dense_backward, out=embedding_dense_backward);  mm_1 = embedding_dense_backward = None
    return (mm_4, view_9, add)
