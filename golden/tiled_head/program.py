import torch


def forward(args):
    (
        embedding_weight,
        tokens,
        targets,
    ) = args
    args.clear()
    # stage 0 forward: embedding
    call = [embedding_weight, tokens, targets]
    del (embedding_weight, targets)
    [tanh, getitem_3, getitem_4, div_tensor] = stage_0_forward(call)
    return (div_tensor, tokens, tanh, getitem_3, getitem_4)


def backward(args):
    (
        tokens,
        tanh,
        getitem_3,
        getitem_4,
        tangents_1,
    ) = args
    args.clear()
    # stage 0 backward: embedding
    call = [tokens, tangents_1, tanh, getitem_3, getitem_4]
    del (tokens, tangents_1, tanh, getitem_3, getitem_4)
    [add] = stage_0_backward(call)
    return (add, None, None)
