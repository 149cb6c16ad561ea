"""Attention in tiles of its heads: a tile has some heads of keys, with all heads of queries that read these."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe_fx.analysis.cost import cost_model
from roundpipe_fx.analysis.tiling import KINDS, NARROW, BodyCosts, TileRegion, TileRegions
from roundpipe_fx.analysis.tiling.region_kind import ATTENTION
from roundpipe_fx.codegen.loop_text import list_loops, loop_text
from roundpipe_fx.ir.joint_graph import JointGraph, Mark
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.tiles import tile_regions
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.graph_text import CPU

COSTS = BodyCosts(model=CPU, device=None, granularity=1, eager=True, rewrite=lambda graph: graph)
WIDTH = 8
"""Of a head."""
ROWS = 32


@dataclass(frozen=True)
class Shape:
    """Attention in a layer.

    Attributes:
        copied: whether keys and values are copied for each head of queries, as ``repeat_kv`` does.
        normed: whether queries and keys are normalized by head.
        joined: whether one projection makes queries, keys and values, as in a GPT-2.
        rows: how often the region is expected to divide.
    """

    queries: int
    keys: int
    batch: int = 1
    causal: bool = True
    copied: bool = False
    normed: bool = False
    adapters: bool = False
    joined: bool = False
    rows: int = field(kw_only=True)


class Attention(nn.Module):
    """A layer as of a Llama: projections to heads, rotary positions, attention, a projection back."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, hidden = shape, shape.queries * WIDTH
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, shape.keys * WIDTH, bias=False) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False) if shape.joined else None
        self.norm = nn.RMSNorm(WIDTH)
        if shape.adapters:
            for layer in (self.q, self.k, self.v, self.o):
                layer.requires_grad_(False)
            self.down, self.up = nn.Linear(hidden, 2, bias=False), nn.Linear(2, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        queries = self.q(x) + self.up(self.down(x)) * 0.5 if self.shape.adapters else self.q(x)
        parts = (queries, self.k(x), self.v(x)) if self.qkv is None else self.qkv(x).chunk(3, -1)
        q, k, v = (
            part.view(batch, length, heads, WIDTH).transpose(1, 2)
            for part, heads in zip(parts, (self.shape.queries, self.shape.keys, self.shape.keys), strict=True)
        )
        if self.qkv is not None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal)
            return self.o(out.transpose(1, 2).reshape(batch, length, -1))
        if self.shape.normed:
            q, k = self.norm(q), self.norm(k)
        angles = torch.arange(length, dtype=x.dtype)[:, None] * torch.linspace(0.1, 1, WIDTH, dtype=x.dtype)
        q, k = (_rotate(part, angles.cos(), angles.sin()) for part in (q, k))
        if self.shape.copied:
            k, v = (_repeat(part, self.shape.queries // self.shape.keys) for part in (k, v))
        grouped = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal, enable_gqa=grouped)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def _repeat(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


class Layers(nn.Module):
    """Two layers, so that there is a gradient of what each reads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(shape) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x.roll(1, 0))  # no region divides the batch
        return x.square().sum()


SHAPES = {
    "as many heads of keys": Shape(4, 4, rows=4),
    "groups": Shape(8, 2, rows=2),
    "groups of two": Shape(6, 3, rows=3),
    "one head of keys": Shape(4, 1, rows=4),
    "not causal": Shape(8, 2, causal=False, rows=2),
    "a batch": Shape(8, 2, batch=3, rows=2),
    "copied keys": Shape(8, 2, copied=True, rows=2),
    "normalized heads": Shape(8, 4, normed=True, rows=4),
    "adapters": Shape(8, 4, adapters=True, rows=4),
}


def captured(shape: Shape, dtype: torch.dtype = torch.float64) -> JointGraph:
    torch.manual_seed(0)
    model = Layers(shape).to(dtype)
    x = torch.randn(shape.batch, ROWS, shape.queries * WIDTH, dtype=dtype)
    joint = capture_joint(model, x)
    annotate(joint, cost_model("roofline", torch.device("cpu")))
    return joint


def attention_regions(joint: JointGraph) -> list[TileRegion]:
    """Select the regions that have both attention's forward and its backward."""

    def attends(region: TileRegion) -> bool:
        return sum("attention" in str(node.target) for node in region.members) == 2

    return [region for region in TileRegions(joint, KINDS).find_wide_regions(0) if attends(region)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.quick_every(7)
def test_heads_are_divided_in_each_layer(shape: Shape, dtype: torch.dtype) -> None:
    regions = attention_regions(captured(shape, dtype))
    assert [region.rows for region in regions] == [shape.rows] * 2


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.quick_every(6)
def test_results_are_those_of_the_whole(shape: Shape) -> None:
    joint = captured(shape)
    inputs = [0.1 * value for value in example_inputs(joint)]
    expected = run_joint(joint, inputs)
    for tiles in range(1, shape.rows + 1):
        copy = joint.copy()
        made = tile_regions(copy, [(region, tiles) for region in attention_regions(joint)], COSTS)
        assert len(list_loops(made.graph)) >= 2
        for one, other in zip(run_joint(made, inputs), expected, strict=True):
            assert other is None or (one - other).norm() <= 1e-12 * other.norm()


def test_as_text_a_row_is_a_head_of_keys_and_the_heads_of_queries_that_read_it() -> None:
    """Three heads of keys and six of queries, in tiles of two rows and of one."""
    joint = captured(SHAPES["groups of two"])
    made = tile_regions(joint.copy(), [(region, 2) for region in attention_regions(joint)], COSTS)
    lines = "\n".join(map(loop_text, list_loops(made.graph))).splitlines()

    def tiles_of(size: str) -> set[str]:
        cut = (line for line in lines if f'"float64[{size}]"' in line and ".narrow" in line)
        return {line.split(".narrow")[1] for line in cut}

    assert tiles_of(f"1, 2, {ROWS}, {WIDTH}") == {"(1, start, 2)"}
    assert tiles_of(f"1, 1, {ROWS}, {WIDTH}") == {"(1, 2, 1)"}
    hidden = 6 * WIDTH
    # A row is the 16 columns of two heads.
    assert tiles_of(f"{hidden}, 32") == {"(1, start * 16, 32)"}
    assert tiles_of(f"{hidden}, 16") == {"(1, 32, 16)"}
    results = {line.strip() for line in lines if ".copy_(view_" in line}
    assert {line.split(".narrow")[1].split(".copy_")[0] for line in results} == {"(1, start * 16, 32)", "(1, 32, 16)"}


def test_regions_between_narrow_values_alone_are_found_if_no_others_are_asked_for() -> None:
    joint = captured(SHAPES["groups"])
    assert {region.kind for region in TileRegions(joint).find_wide_regions(0)} <= {NARROW}
    assert ATTENTION in {region.kind for region in TileRegions(joint, KINDS).find_wide_regions(0)}


def test_a_workspace_is_worth_tiles_of_attention_alone() -> None:
    """Heads that one projection makes for queries, keys and values are cut from it, and exist as a whole."""
    joint = captured(Shape(4, 4, joined=True, rows=4))
    assert not attention_regions(joint)
    for node in joint.graph.nodes:
        if "attention" in str(node.target) and "backward" in str(node.target):
            node.meta[Mark.WORKSPACE] = 1 << 20
    assert [region.rows for region in attention_regions(joint)] == [4, 4]
    inputs = [0.1 * value for value in example_inputs(joint)]
    made = tile_regions(joint.copy(), [(region, 2) for region in attention_regions(joint)], COSTS)
    for one, other in zip(run_joint(made, inputs), run_joint(joint, inputs), strict=True):
        assert other is None or torch.equal(one, other)
