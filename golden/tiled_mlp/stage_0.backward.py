import operator

import torch
from torch import device, inf, nan

from roundpipe_fx.operators.gradient_sums import add_product_to

aten = torch.ops.aten


def tiles_of_wide_2(view, t, t_2, view_2, primals_3):
    mm_2_sum = torch.empty_strided((8, 64), (64, 1), dtype=torch.float32, device=view.device).zero_()
    mm_4_sum = torch.empty_strided((64, 8), (8, 1), dtype=torch.float32, device=view.device).zero_()
    for start in range(0, 96, 24):  # 96 rows
        view_tile: "float32[24, 8]" = view.narrow(0, start, 24)
        t_2_tile: "float32[8, 24]" = t_2.narrow(1, start, 24)
        view_2_tile: "float32[24, 8]" = view_2.narrow(0, start, 24)
        # wide
        mm: "float32[24, 64]" = aten.mm.default(view_tile, t)
        _unsafe_view: "float32[1, 24, 64]" = aten.reshape.default(mm, [1, 24, 64]);  mm = None
        # model
        silu: "float32[1, 24, 64]" = aten.silu.default(_unsafe_view)
        # narrow
        view_1: "float32[24, 64]" = aten.reshape.default(silu, [24, 64]);  silu = None
        mm_2: "float32[8, 64]" = add_product_to(mm_2_sum, t_2_tile, view_1);  view_1 = mm_2 = None
        mm_3: "float32[24, 64]" = aten.mm.default(view_2_tile, primals_3)
        view_3: "float32[1, 24, 64]" = aten.reshape.default(mm_3, [1, 24, 64]);  mm_3 = None
        # model
        silu_backward: "float32[1, 24, 64]" = aten.silu_backward.grad_input(view_3, _unsafe_view, grad_input=view_3);  view_3 = _unsafe_view = None
        # wide
        view_4: "float32[24, 64]" = aten.reshape.default(silu_backward, [24, 64]);  silu_backward = None
        t_6: "float32[64, 24]" = aten.t.default(view_4);  view_4 = None
        mm_4: "float32[64, 8]" = add_product_to(mm_4_sum, t_6, view_tile);  t_6 = mm_4 = None
    return (mm_2_sum, mm_4_sum,)


def stage_0_backward(args):
    (
        wide_weight,  # float32[64, 8]
        x,  # float32[2, 48, 8]
        narrow_weight,  # float32[8, 64]
        tangents_1,  # float32[]
        add,  # float32[2, 48, 8]
    ) = args
    args.clear()
    # model
    expand: "float32[2, 48, 8]" = aten.expand.default(tangents_1, [2, 48, 8]);  tangents_1 = None
    div: "float32[2, 48, 8]" = aten.div.Scalar(expand, 768);  expand = None
    pow_2: "float32[2, 48, 8]" = aten.pow.Tensor_Scalar(add, 1.0);  add = None
    mul: "float32[2, 48, 8]" = aten.mul_.Scalar(pow_2, 2.0);  pow_2 = None
    mul_1: "float32[2, 48, 8]" = aten.mul_.Tensor(div, mul);  div = mul = None
    # wide (recomputed)
    view_3: "float32[96, 8]" = aten.view.default(x, [96, 8]);  x = None
    t_3: "float32[8, 64]" = aten.t.default(wide_weight);  wide_weight = None
    # narrow
    view_2: "float32[96, 8]" = aten.view.default(mul_1, [96, 8]);  mul_1 = None
    t_2: "float32[8, 96]" = aten.t.default(view_2)
    # wide
    in_tiles_1: "(float32[8, 64], float32[64, 8])" = tiles_of_wide_2(view_3, t_3, t_2, view_2, narrow_weight);  view_3 = t_3 = t_2 = view_2 = narrow_weight = None
    getitem_1: "float32[8, 64]" = in_tiles_1[0]
    getitem_2: "float32[64, 8]" = in_tiles_1[1];  in_tiles_1 = None
    return (getitem_1, getitem_2)
