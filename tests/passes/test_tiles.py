from __future__ import annotations

import dataclasses

import expecttest
import pytest
import torch
from torch import nn

from roundpipe_fx.analysis.cost import cost_model
from roundpipe_fx.analysis.tiling import KINDS, BodyCosts, TileRegions
from roundpipe_fx.analysis.tiling.region_kind import DIGITS
from roundpipe_fx.codegen.loop_text import list_loops, loop_text
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.text import joint_text
from roundpipe_fx.ir.verifier import snapshot, verify
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.tiles import tile_regions
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.graph_text import CPU, joint_of

COSTS = BodyCosts(model=CPU, device=None, granularity=1, eager=True, rewrite=lambda graph: graph)


def tiled(text: str, tiles: int) -> str:
    """The graph after its regions became loops, and the loops."""
    joint = joint_of(text)
    before = snapshot(joint)
    regions = TileRegions(joint).find_wide_regions(0)
    made: JointGraph = tile_regions(joint, [(region, tiles) for region in regions], COSTS)
    verify(made, "tiles", before, {"tiles"})
    return "\n\n".join([joint_text(made), *map(loop_text, list_loops(made.graph))])


MLP = """
def joint(
    primals_1: float32[6, 8],
    primals_2: float32[8, 64],  # parameter
    primals_3: float32[64, 8],  # parameter
    tangents_1: float32[6, 8],
):
    # forward
    mm: float32[6, 64] = aten.mm.default(primals_1, primals_2)
    tanh: float32[6, 64] = aten.tanh.default(mm)
    mm_1: float32[6, 8] = aten.mm.default(tanh, primals_3)
    # backward
    t: float32[64, 6].strides(1, 64) = aten.t.default(tanh)
    mm_2: float32[64, 8] = aten.mm.default(t, tangents_1)
    t_1: float32[8, 64].strides(1, 8) = aten.t.default(primals_3)
    mm_3: float32[6, 64] = aten.mm.default(tangents_1, t_1)
    tanh_backward: float32[6, 64] = aten.tanh_backward.default(mm_3, tanh)
    t_2: float32[8, 6].strides(1, 8) = aten.t.default(primals_1)
    mm_4: float32[8, 64] = aten.mm.default(t_2, tanh_backward)
    return (mm_1,), (None, mm_4, mm_2)
"""

HEAD = """
def joint(
    primals_1: float32[6, 8],
    primals_2: float32[8, 64],  # parameter
    primals_3: int64[6],
    tangents_1: float32[],
):
    # forward
    mm: float32[6, 64] = aten.mm.default(primals_1, primals_2)
    scores: float32[6, 64] = aten._log_softmax.default(mm, 1, False)
    nll: (float32[], float32[]) = aten.nll_loss_forward.default(scores, primals_3, None, 2, -100)
    loss: float32[] = nll[0]
    # backward
    ones: float32[] = aten.full.default([], 1.0)
    nll_loss_backward: float32[6, 64] = aten.nll_loss_backward.default(tangents_1, scores, primals_3, None, 2, -100, ones)
    back: float32[6, 64] = aten._log_softmax_backward_data.default(nll_loss_backward, scores, 1, torch.float32)
    t: float32[8, 6].strides(1, 8) = aten.t.default(primals_1)
    mm_1: float32[8, 64] = aten.mm.default(t, back)
    t_1: float32[64, 8].strides(1, 64) = aten.t.default(primals_2)
    mm_2: float32[6, 8] = aten.mm.default(back, t_1)
    return (loss,), (mm_2, mm_1, None)
"""


def test_as_text_forward_and_backward_are_loops() -> None:
    """The backward recomputes what is wide for each tile; gradients of weights are sums over tiles."""
    expecttest.assert_expected_inline(
        tiled(MLP, 3),
        """\
def joint(
    primals_1: float32[6, 8],
    primals_2: float32[8, 64],  # parameter
    primals_3: float32[64, 8],  # parameter
    tangents_1: float32[6, 8],
):
    # forward
    in_tiles: (float32[6, 8]) = tiles_of_model(primals_1, primals_2, primals_3)  # 3 tiles of 6 rows; workspace: 1024
    getitem: float32[6, 8] = in_tiles[0]
    # backward
    t_1: float32[8, 64].strides(1, 8) = aten.t.default(primals_3)
    t_2: float32[8, 6].strides(1, 8) = aten.t.default(primals_1)
    in_tiles_1: (float32[64, 8], float32[8, 64]) = tiles_of_model_2(primals_1, primals_2, tangents_1, t_1, t_2)  # 3 tiles of 6 rows; workspace: 1536
    getitem_1: float32[64, 8] = in_tiles_1[0]
    getitem_2: float32[8, 64] = in_tiles_1[1]
    return (getitem,), (None, getitem_2, getitem_1)


def tiles_of_model(primals_1, primals_2, primals_3):
    mm_1_rows = torch.empty_strided((6, 8), (8, 1), dtype=torch.float32, device=primals_1.device)
    for start in range(0, 6, 2):  # 6 rows
        primals_1_tile: "float32[2, 8]" = primals_1.narrow(0, start, 2)
        # model
        mm: "float32[2, 64]" = aten.mm.default(primals_1_tile, primals_2)
        tanh: "float32[2, 64]" = aten.tanh.default(mm);  mm = None
        mm_1: "float32[2, 8]" = aten.mm.default(tanh, primals_3);  tanh = None
        mm_1_rows.narrow(0, start, 2).copy_(mm_1)
    return (mm_1_rows,)


def tiles_of_model_2(primals_1, primals_2, tangents_1, t_1, t_2):
    mm_2_sum = torch.empty_strided((64, 8), (8, 1), dtype=torch.float32, device=primals_1.device).zero_()
    mm_4_sum = torch.empty_strided((8, 64), (64, 1), dtype=torch.float32, device=primals_1.device).zero_()
    for start in range(0, 6, 2):  # 6 rows
        primals_1_tile: "float32[2, 8]" = primals_1.narrow(0, start, 2)
        tangents_1_tile: "float32[2, 8]" = tangents_1.narrow(0, start, 2)
        t_2_tile: "float32[8, 2]" = t_2.narrow(1, start, 2)
        # model
        mm: "float32[2, 64]" = aten.mm.default(primals_1_tile, primals_2)
        tanh: "float32[2, 64]" = aten.tanh.default(mm);  mm = None
        t: "float32[64, 2]" = aten.t.default(tanh)
        mm_2: "float32[64, 8]" = add_product_to(mm_2_sum, t, tangents_1_tile);  t = mm_2 = None
        mm_3: "float32[2, 64]" = aten.mm.default(tangents_1_tile, t_1)
        tanh_backward: "float32[2, 64]" = aten.tanh_backward.default(mm_3, tanh);  mm_3 = tanh = None
        mm_4: "float32[8, 64]" = add_product_to(mm_4_sum, t_2_tile, tanh_backward);  tanh_backward = mm_4 = None
    return (mm_2_sum, mm_4_sum,)
""",
    )


def test_as_text_a_loss_head_is_one_loop() -> None:
    """Its backward waits for a scalar only, by which the gradients are multiplied when it arrives."""
    expecttest.assert_expected_inline(
        tiled(HEAD, 3),
        """\
def joint(
    primals_1: float32[6, 8],
    primals_2: float32[8, 64],  # parameter
    primals_3: int64[6],
    tangents_1: float32[],
):
    # forward
    full_default_1: float32[] = aten.full.default([], 1.0, dtype=torch.float32, device=device(type='cpu'))
    t_1: float32[64, 8].strides(1, 64) = aten.t.default(primals_2)
    t: float32[8, 6].strides(1, 8) = aten.t.default(primals_1)
    ones: float32[] = aten.full.default([], 1.0)
    in_tiles: (float32[], float32[8, 64], float32[6, 8]) = tiles_of_model(primals_1, primals_2, primals_3, full_default_1, ones, t, t_1)  # 3 tiles of 6 rows; workspace: 1536
    getitem_1: float32[] = in_tiles[0]
    getitem_2: float32[8, 64] = in_tiles[1]
    getitem_3: float32[6, 8] = in_tiles[2]
    # backward
    mul_tensor: float32[8, 64] = aten.mul.Tensor(getitem_2, tangents_1)
    mul_tensor_1: float32[6, 8] = aten.mul.Tensor(getitem_3, tangents_1)
    return (getitem_1,), (mul_tensor_1, mul_tensor, None)


def tiles_of_model(primals_1, primals_2, primals_3, full_default_1, ones, t, t_1):
    loss_sum = torch.empty_strided((), (), dtype=torch.float32, device=primals_1.device).zero_()
    mm_1_sum = torch.empty_strided((8, 64), (64, 1), dtype=torch.float32, device=primals_1.device).zero_()
    mm_2_rows = torch.empty_strided((6, 8), (8, 1), dtype=torch.float32, device=primals_1.device)
    for start in range(0, 6, 2):  # 6 rows
        primals_1_tile: "float32[2, 8]" = primals_1.narrow(0, start, 2)
        primals_3_tile: "int64[2]" = primals_3.narrow(0, start, 2)
        t_tile: "float32[8, 2]" = t.narrow(1, start, 2)
        # model
        mm: "float32[2, 64]" = aten.mm.default(primals_1_tile, primals_2)
        scores: "float32[2, 64]" = aten._log_softmax.default(mm, 1, False);  mm = None
        nll: "(float32[], float32[])" = aten.nll_loss_forward.default(scores, primals_3_tile, None, 2, -100)
        loss: "float32[]" = nll[0];  nll = None
        loss_1: "float32[]" = add_to(loss_sum, loss);  loss = loss_1 = None
        nll_loss_backward: "float32[2, 64]" = aten.nll_loss_backward.default(full_default_1, scores, primals_3_tile, None, 2, -100, ones)
        back: "float32[2, 64]" = aten._log_softmax_backward_data.default(nll_loss_backward, scores, 1, torch.float32);  nll_loss_backward = scores = None
        mm_1: "float32[8, 64]" = add_product_to(mm_1_sum, t_tile, back);  mm_1 = None
        mm_2: "float32[2, 8]" = aten.mm.default(back, t_1);  back = None
        mm_2_rows.narrow(0, start, 2).copy_(mm_2)
    return (loss_sum, mm_1_sum, mm_2_rows,)
""",
    )


def test_as_text_rows_that_tiles_do_not_divide() -> None:
    """What a tile does is shown again for the rows that are left."""
    text = MLP.replace("[6, ", "[7, ").replace(", 6]", ", 7]")
    expecttest.assert_expected_inline(
        tiled(text, 2),
        """\
def joint(
    primals_1: float32[7, 8],
    primals_2: float32[8, 64],  # parameter
    primals_3: float32[64, 8],  # parameter
    tangents_1: float32[7, 8],
):
    # forward
    in_tiles: (float32[7, 8]) = tiles_of_model(primals_1, primals_2, primals_3)  # 2 tiles of 7 rows; workspace: 2048
    getitem: float32[7, 8] = in_tiles[0]
    # backward
    t_1: float32[8, 64].strides(1, 8) = aten.t.default(primals_3)
    t_2: float32[8, 7].strides(1, 8) = aten.t.default(primals_1)
    in_tiles_1: (float32[64, 8], float32[8, 64]) = tiles_of_model_2(primals_1, primals_2, tangents_1, t_1, t_2)  # 2 tiles of 7 rows; workspace: 3072
    getitem_1: float32[64, 8] = in_tiles_1[0]
    getitem_2: float32[8, 64] = in_tiles_1[1]
    return (getitem,), (None, getitem_2, getitem_1)


def tiles_of_model(primals_1, primals_2, primals_3):
    mm_1_rows = torch.empty_strided((7, 8), (8, 1), dtype=torch.float32, device=primals_1.device)
    for start in range(0, 4, 4):  # 7 rows
        primals_1_tile: "float32[4, 8]" = primals_1.narrow(0, start, 4)
        # model
        mm: "float32[4, 64]" = aten.mm.default(primals_1_tile, primals_2)
        tanh: "float32[4, 64]" = aten.tanh.default(mm);  mm = None
        mm_1: "float32[4, 8]" = aten.mm.default(tanh, primals_3);  tanh = None
        mm_1_rows.narrow(0, start, 4).copy_(mm_1)
    # the last 3 rows
    primals_1_tile: "float32[3, 8]" = primals_1.narrow(0, 4, 3)
    # model
    mm: "float32[3, 64]" = aten.mm.default(primals_1_tile, primals_2)
    tanh: "float32[3, 64]" = aten.tanh.default(mm);  mm = None
    mm_1: "float32[3, 8]" = aten.mm.default(tanh, primals_3);  tanh = None
    mm_1_rows.narrow(0, 4, 3).copy_(mm_1)
    return (mm_1_rows,)


def tiles_of_model_2(primals_1, primals_2, tangents_1, t_1, t_2):
    mm_2_sum = torch.empty_strided((64, 8), (8, 1), dtype=torch.float32, device=primals_1.device).zero_()
    mm_4_sum = torch.empty_strided((8, 64), (64, 1), dtype=torch.float32, device=primals_1.device).zero_()
    for start in range(0, 4, 4):  # 7 rows
        primals_1_tile: "float32[4, 8]" = primals_1.narrow(0, start, 4)
        tangents_1_tile: "float32[4, 8]" = tangents_1.narrow(0, start, 4)
        t_2_tile: "float32[8, 4]" = t_2.narrow(1, start, 4)
        # model
        mm: "float32[4, 64]" = aten.mm.default(primals_1_tile, primals_2)
        tanh: "float32[4, 64]" = aten.tanh.default(mm);  mm = None
        t: "float32[64, 4]" = aten.t.default(tanh)
        mm_2: "float32[64, 8]" = add_product_to(mm_2_sum, t, tangents_1_tile);  t = mm_2 = None
        mm_3: "float32[4, 64]" = aten.mm.default(tangents_1_tile, t_1)
        tanh_backward: "float32[4, 64]" = aten.tanh_backward.default(mm_3, tanh);  mm_3 = tanh = None
        mm_4: "float32[8, 64]" = add_product_to(mm_4_sum, t_2_tile, tanh_backward);  tanh_backward = mm_4 = None
    # the last 3 rows
    primals_1_tile: "float32[3, 8]" = primals_1.narrow(0, 4, 3)
    tangents_1_tile: "float32[3, 8]" = tangents_1.narrow(0, 4, 3)
    t_2_tile: "float32[8, 3]" = t_2.narrow(1, 4, 3)
    # model
    mm: "float32[3, 64]" = aten.mm.default(primals_1_tile, primals_2)
    tanh: "float32[3, 64]" = aten.tanh.default(mm);  mm = None
    t: "float32[64, 3]" = aten.t.default(tanh)
    mm_2: "float32[64, 8]" = add_product_to(mm_2_sum, t, tangents_1_tile);  t = mm_2 = None
    mm_3: "float32[3, 64]" = aten.mm.default(tangents_1_tile, t_1)
    tanh_backward: "float32[3, 64]" = aten.tanh_backward.default(mm_3, tanh);  mm_3 = tanh = None
    mm_4: "float32[8, 64]" = add_product_to(mm_4_sum, t_2_tile, tanh_backward);  tanh_backward = mm_4 = None
    return (mm_2_sum, mm_4_sum,)
""",
    )


@pytest.mark.parametrize("tiles", [2, 3, 12])
def test_regions_that_read_each_others_results(tiles: int) -> None:
    """With nothing between them, forward or backward, each reads what the loop of another has made."""
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4), nn.Linear(4, 96), nn.GELU(), nn.Linear(96, 4)]
    model = nn.Sequential(*layers, nn.Linear(4, 128), nn.Sigmoid(), nn.Linear(128, 4)).double()
    x = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    joint = capture_joint(lambda given: model(given).square().sum(), x)
    annotate(joint, cost_model("roofline", torch.device("cpu")))
    inputs = example_inputs(joint)
    expected = run_joint(joint, inputs)
    regions = TileRegions(joint).find_wide_regions(0)
    assert len(regions) == 3
    made = tile_regions(joint, [(region, tiles) for region in regions], COSTS)
    assert len(list_loops(made.graph)) == 6
    for one, other in zip(run_joint(made, inputs), expected, strict=True):
        assert (one - other).norm() <= 1e-12 * other.norm()


class _Norm(nn.Module):
    """A norm that computes in float32, as a Llama's, between two layers in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).cumsum(0)  # no region divides the rows of the layers
        digits = hidden.float()
        normed = digits * torch.rsqrt(digits.square().mean(-1, keepdim=True) + 1e-6)
        return self.last((self.weight * normed.to(x.dtype)).cumsum(0)).sum()


@pytest.mark.parametrize("tiles", [2, 5])
def test_a_norm_with_more_digits_than_its_border_keeps_its_bits(tiles: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(48, 32, dtype=torch.bfloat16, requires_grad=True)
    joint = capture_joint(_Norm().bfloat16(), x)
    annotate(joint, cost_model("roofline", torch.device("cpu")))
    (region,) = (region for region in TileRegions(joint, KINDS).find_wide_regions(0) if region.kind is DIGITS)
    assert region.widest.meta["val"].dtype is torch.float32 and region.rows == 48
    inputs = example_inputs(joint)
    expected = run_joint(joint, inputs)
    made = tile_regions(joint.copy(), [(region, tiles)], COSTS)
    assert len(list_loops(made.graph)) == 2
    for one, other in zip(run_joint(made, inputs), expected, strict=True):
        assert torch.equal(one, other)


VIEWED_TWICE = """
def joint(
    primals_1: float32[6, 8],
    primals_2: float32[8, 64],  # parameter
    primals_3: float32[64, 8],  # parameter
    tangents_1: float32[2, 3, 8],
):
    # forward
    mm: float32[6, 64] = aten.mm.default(primals_1, primals_2)
    tanh: float32[6, 64] = aten.tanh.default(mm)
    mm_1: float32[6, 8] = aten.mm.default(tanh, primals_3)
    view: float32[2, 3, 8] = aten.view.default(mm_1, [2, 3, 8])
    view_1: float32[2, 3, 8] = aten.view.default(mm_1, [2, 3, 8])
    flip: float32[2, 3, 8] = aten.flip.default(view, [0, 1])
    add: float32[2, 3, 8] = aten.add.Tensor(view_1, flip)
    # backward
    back: float32[2, 3, 8] = aten.neg.default(tangents_1)
    return ({returned}), (None, None, None)
"""


@pytest.mark.parametrize(("returned", "results"), [("add,", 1), ("add, view, view_1", 2)])
def test_two_equal_views_of_a_value_are_one_result(returned: str, results: int) -> None:
    """A layer and its adapter read their input each through a view of their own. Outputs are separate tensors."""
    joint = joint_of(VIEWED_TWICE.format(returned=returned))
    (region,) = TileRegions(joint).find_wide_regions(0)
    views = [node for node in joint.graph.nodes if node.target is torch.ops.aten.view.default]
    region = dataclasses.replace(
        region, members=(*region.members, *views), where={**region.where, **dict.fromkeys(views, (0, 1))}
    )
    inputs = example_inputs(joint)
    expected = run_joint(joint, inputs)
    made = tile_regions(joint, [(region, 3)], COSTS)
    (loop,) = list_loops(made.graph)
    assert len(loop.results) == results
    computed = [value for value in run_joint(made, inputs) if value is not None]
    assert len({value.data_ptr() for value in computed}) == len(computed)
    for value, plain in zip(computed, [value for value in expected if value is not None], strict=True):
        assert torch.equal(value, plain)
