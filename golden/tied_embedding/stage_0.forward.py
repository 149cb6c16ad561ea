import operator

import torch
from torch import device, inf, nan

aten = torch.ops.aten


def stage_0_forward(args):
    (
        embedding_weight,  # float32[16, 8]
        tokens,  # int64[2, 4]
        layer_weight,  # float32[8, 8]
        layer_bias,  # float32[8]
    ) = args
    args.clear()
    # embedding
    embedding: "float32[2, 4, 8]" = aten.embedding.default(embedding_weight, tokens);  embedding_weight = tokens = None
    # layer
    view: "float32[8, 8]" = aten.view.default(embedding, [8, 8]);  embedding = None
    t: "float32[8, 8]" = aten.t.default(layer_weight);  layer_weight = None
    addmm: "float32[8, 8]" = aten.addmm.default(layer_bias, view, t);  layer_bias = view = t = None
    view_1: "float32[2, 4, 8]" = aten.view.default(addmm, [2, 4, 8]);  addmm = None
    # model
    tanh: "float32[2, 4, 8]" = aten.tanh_.default(view_1);  view_1 = None
    return (tanh,)
