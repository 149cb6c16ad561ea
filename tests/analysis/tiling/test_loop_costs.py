"""What loops cost: no operation is free on tiles, sums over tiles among them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import fx

from roundpipe_fx.analysis.cost import CostModel, MeasuredCosts
from roundpipe_fx.analysis.tiling import BodyCosts, TileRegions
from roundpipe_fx.ir.joint_graph import JointGraph, Mark
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.operators.gradient_sums import SUMMING, add_product_to
from roundpipe_fx.passes.fuse_costs import fuse_costs, fuse_costs_of_body
from roundpipe_fx.passes.tiles import tile_regions
from tests.graph_text import CPU, joint_of
from tests.passes.test_tiles import HEAD, MLP


def _tiled(text: str, tiles: int, costs: CostModel = CPU, fused: bool = False) -> JointGraph:
    joint = joint_of(text)

    def rewrite(body: fx.Graph) -> fx.Graph:
        return fuse_costs_of_body(body, costs) if fused else body

    costed = BodyCosts(model=costs, device=None, granularity=1, eager=not fused, rewrite=rewrite)
    return tile_regions(joint, [(region, tiles) for region in TileRegions(joint).find_wide_regions(0)], costed)


def _total(joint: JointGraph, mark: Mark) -> float:
    return sum(node.meta.get(mark, 0) for node in joint.computed())


def _sums(joint: JointGraph) -> list[fx.Node]:
    loops = [node.target for node in joint.computed() if isinstance(node.target, TileLoop)]
    bodies = [body for loop in loops for body in loop.bodies.values()]
    return [node for body in bodies for node in body.graph.nodes if node.target in SUMMING]


@pytest.mark.parametrize("tiles", [1, 2, 4, 6])
def test_a_loss_head_has_all_its_products_on_tiles(tiles: int) -> None:
    assert _total(_tiled(HEAD, tiles), Mark.FLOPS) == _total(joint_of(HEAD), Mark.FLOPS) > 0


@pytest.mark.parametrize("tiles", [1, 2, 4, 6])
def test_elsewhere_the_first_product_is_repeated(tiles: int) -> None:
    again = 2 * 6 * 8 * 64
    assert _total(_tiled(MLP, tiles), Mark.FLOPS) == _total(joint_of(MLP), Mark.FLOPS) + again


@pytest.mark.parametrize("text", [HEAD, MLP])
def test_more_tiles_take_longer(text: str) -> None:
    free = dataclasses.replace(CPU, overhead=0.0)
    for costs in (CPU, free):
        seconds = [_total(_tiled(text, tiles, costs), Mark.SECONDS) for tiles in (1, 2, 3)]
        assert seconds == sorted(set(seconds))


def test_a_sum_is_read_and_written_on_each_tile() -> None:
    slow = dataclasses.replace(CPU, flops={torch.float32: 1e30}, overhead=0.0)
    (total,) = (node for node in _sums(_tiled(HEAD, 2, slow)) if node.target is add_product_to)
    moved = 4 * (8 * 3 + 3 * 64 + 2 * 8 * 64)
    assert total.meta[Mark.SECONDS] == pytest.approx(moved / slow.bandwidth)


def test_sums_are_measured_as_other_operations_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_CACHE", str(tmp_path))
    costs = MeasuredCosts.load(CPU, torch.device("cpu"))
    found = [node for node in _sums(_tiled(HEAD, 2, costs)) if node.target is add_product_to]
    known = {name: own for name, own in costs.seconds_by_signature.items() if "add_product_to" in name}
    assert [node.meta[Mark.SECONDS] for node in found] == list(known.values()) != []
    assert all("0x" not in name for name in known), "signatures are the same in every process"


def test_a_compiled_body_fuses_what_the_whole_graph_does() -> None:
    pair = MLP.replace(
        "    tanh: float32[6, 64] = aten.tanh.default(mm)\n",
        "    exp: float32[6, 64] = aten.exp.default(mm)\n    tanh: float32[6, 64] = aten.tanh.default(exp)\n",
    )
    fused, alone = _tiled(pair, 2, fused=True), _tiled(pair, 2)
    whole = fuse_costs(joint_of(pair), CPU)
    assert _total(whole, Mark.SECONDS) < _total(fused, Mark.SECONDS) < _total(alone, Mark.SECONDS)


GATED = """
def joint(
    primals_1: float32[6, 8],
    primals_2: float32[8, 64],  # parameter
    primals_3: float32[8, 64],  # parameter
    primals_4: float32[64, 8],  # parameter
    tangents_1: float32[6, 8],
):
    # forward
    mm: float32[6, 64] = aten.mm.default(primals_1, primals_2)
    mm_1: float32[6, 64] = aten.mm.default(primals_1, primals_3)
    gate: float32[6, 64] = aten.mul.Tensor(mm, mm_1)
    down: float32[6, 8] = aten.mm.default(gate, primals_4)
    # backward
    across: float32[64, 6].strides(1, 64) = aten.t.default(gate)
    weight: float32[64, 8] = aten.mm.default(across, tangents_1)
    t: float32[8, 64].strides(1, 8) = aten.t.default(primals_4)
    dgate: float32[6, 64] = aten.mm.default(tangents_1, t)
    d1: float32[6, 64] = aten.mul.Tensor(dgate, mm_1)
    d2: float32[6, 64] = aten.mul.Tensor(dgate, mm)
    t_1: float32[64, 8].strides(1, 64) = aten.t.default(primals_2)
    t_2: float32[64, 8].strides(1, 64) = aten.t.default(primals_3)
    dx1: float32[6, 8] = aten.mm.default(d1, t_1)
    dx2: float32[6, 8] = aten.mm.default(d2, t_2)
    dx: float32[6, 8] = aten.add.Tensor(dx1, dx2)
    return (down,), (dx, None, None, weight)
"""


def test_a_compiled_body_holds_what_is_added_to_sums_until_it_ends() -> None:
    """It returns both operands of the weight's gradient, one of which is the gate's result."""
    wide = 3 * 64 * 4  # bytes of a tile of 3 rows
    by_eager, by_compiled = (
        max(node.meta[Mark.WORKSPACE] for node in _tiled(GATED, 2, fused=fused).computed() if _is_loop(node))
        for fused in (False, True)
    )
    # While d2 is made, mm, dgate, d1 and d2 exist.
    assert (by_eager, by_compiled) == (4 * wide, 5 * wide)


def _is_loop(node: fx.Node) -> bool:
    return isinstance(node.target, TileLoop)
