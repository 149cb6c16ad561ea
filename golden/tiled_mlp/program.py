import torch


def forward(args):
    (
        wide_weight,
        x,
        narrow_weight,
    ) = args
    args.clear()
    # stage 0 forward: wide … narrow
    call = [wide_weight, x, narrow_weight]
    [add, div_tensor] = stage_0_forward(call)
    return (div_tensor, wide_weight, x, narrow_weight, add)


def backward(args):
    (
        wide_weight,
        x,
        narrow_weight,
        add,
        tangents_1,
    ) = args
    args.clear()
    # stage 0 backward: wide … narrow
    call = [wide_weight, x, narrow_weight, tangents_1, add]
    del (wide_weight, x, narrow_weight, tangents_1, add)
    [getitem_1, getitem_2] = stage_0_backward(call)
    return (getitem_2, None, getitem_1)
