"""Plans of models whose layers several devices share out: local shapes, collectives on the links, pipelines, meshes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import roundpipe_fx
from roundpipe_fx.analysis.cost import DEVICES

RANKS, WIDTH, WORDS = 4, 64, 256
ROWS, TOKENS = 8, 32


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Net(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(_Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _net(mesh: dist.DeviceMesh | None, layers: int = 4) -> nn.Module:
    """A model on the meta device, with all-reduces after each block if it is parallelized."""
    with torch.device("meta"):
        net = _Net(layers)
    if mesh is None:
        return net
    return parallelize_module(net, mesh, {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})


def _sequence_parallel(mesh: dist.DeviceMesh, layers: int = 4) -> nn.Module:
    """The same with rows of tokens between blocks, and the vocabulary shared out."""
    with torch.device("meta"):
        net = _Net(layers)
    rows = Shard(1)
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows, use_local_output=False),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=rows),
        "layers.*.down": RowwiseParallel(output_layouts=rows, use_local_output=False),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(net, mesh, plan)


@pytest.fixture(scope="module")
def mesh() -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2 * RANKS)
    yield dist.init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("dp", "tp"))["tp"]
    dist.destroy_process_group()


def _planned(net: nn.Module, **options: Any) -> roundpipe_fx.Plan:
    tokens = torch.empty(ROWS, TOKENS, dtype=torch.long, device="meta")
    return roundpipe_fx.plan(net, tokens, labels=tokens, **({"device": "H100"} | options))


def test_one_rank_of_four(mesh: dist.DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    # The host launches so small a model's operations more slowly than the device runs them.
    monkeypatch.setitem(DEVICES, "H100", dataclasses.replace(DEVICES["H100"], launch=0.0))
    whole, part = _planned(_net(None)), _planned(_net(mesh))
    assert part.budget is not None and whole.budget is not None
    size = 4 * 2 * 4 * WIDTH**2 * 4  # of all blocks' linear layers
    assert part.budget - whole.budget == size - size // RANKS
    # One all-reduce a block in the forward; in the backward too, but for what no gradient is asked of.
    ring = DEVICES["H100"].network.ring(RANKS, 1)
    reduced = ring.all_reduce_seconds(ROWS * TOKENS * WIDTH * 4)
    assert part.forward_seconds - whole.forward_seconds == pytest.approx(4 * reduced, rel=0.3)
    text = "".join(part.sources().values())
    assert "_c10d_functional.all_reduce" in text


def test_pipelines_on_a_mesh(mesh: dist.DeviceMesh) -> None:
    common: dict[str, Any] = {"num_microbatches": 4, "stages": 2}
    whole = _planned(_net(None), mesh_shape=(2, 2), **common).pipeline
    planned = _planned(_net(mesh), mesh_shape=(2, 2, RANKS), **common)
    part = planned.pipeline
    assert whole is not None and whole.mesh is not None and part is not None and part.mesh is not None
    linear = 2 * 2 * 4 * WIDTH**2 * 4
    assert [all_of - own for all_of, own in zip(whole.mesh.weight_bytes, part.mesh.weight_bytes, strict=True)] == [
        linear - linear // RANKS
    ] * 2
    assert part.mesh.tensor_parallel == RANKS and len(part.devices) == 2
    ring = DEVICES["H100"].network.ring(RANKS, 1)
    rows = ROWS * TOKENS * WIDTH * 4 // 4
    each = 2 * ring.all_reduce_seconds(rows)  # of two blocks, in the forward
    assert part.mesh.tensor_parallel_seconds == pytest.approx(4 * 2 * each, rel=1e-6)
    assert part.tokens_per_second == pytest.approx(ROWS * TOKENS / part.makespan / (2 * RANKS))
    text = str(planned)
    assert "2 replicas, groups of 4 devices for tensor parallelism, 16 devices in all" in text
    assert "tensor parallelism communicates for" in text
    assert roundpipe_fx.Plan.from_json(planned.to_json()) == planned


def test_replicas_of_groups_reduce_over_their_own_links(mesh: dist.DeviceMesh) -> None:
    """With groups of four on nodes of eight, two ranks of each ring are on a node."""
    network = DEVICES["H100"].network.between_groups(4)
    assert network.node == 2 and network.ring(64, 1).bandwidth == 2 * 50e9
    assert network.ring(2, 1).bandwidth == 450e9 and network.leaves(1, 2, 4, 1) and not network.leaves(0, 1, 4, 1)
    assert DEVICES["H100"].network.between_groups(8).leaves(0, 1, 2, 1)
    assert DEVICES["H100"].network.make_ring(range(8)) == DEVICES["H100"].network.ring(8, 1)
    assert DEVICES["H100"].network.make_ring(range(0, 64, 8)) == DEVICES["H100"].network.ring(8, 8)


def test_sequence_parallelism_and_the_loss_shared_out(mesh: dist.DeviceMesh) -> None:
    with loss_parallel():
        planned = _planned(_sequence_parallel(mesh), mesh_shape=(4, 2, RANKS), shard="dp", num_microbatches=2, stages=4)
    assert planned.pipeline is not None and planned.pipeline.mesh is not None
    text = "".join(planned.sources().values())
    assert "all_gather_into_tensor" in text and "reduce_scatter_tensor" in text
    # Every parameter is shared out by replicas too, those of norms are on all ranks.
    total = (2 * WORDS * WIDTH + 4 * 8 * WIDTH**2) // RANKS + 4 * 2 * WIDTH
    assert sum(planned.pipeline.mesh.weight_bytes) == pytest.approx(4 * total // 4, rel=0.01)


def test_only_one_plan_for_all_ranks_communicates_again(mesh: dist.DeviceMesh) -> None:
    def gathers(**options: Any) -> int:
        with loss_parallel():
            planned = _planned(_sequence_parallel(mesh, 1), memory_budget=0.0, num_microbatches=2, **options)
        return "".join(planned.sources().values()).count("all_gather_into_tensor.default(")

    assert gathers(mesh_shape=(1, 1, RANKS)) > gathers()


def test_devices_are_divided_in_groups(mesh: dist.DeviceMesh) -> None:
    planned = _planned(_net(mesh, 2), mesh_shape=2 * RANKS, schedule="1f1b")
    assert planned.pipeline is not None and planned.pipeline.mesh is not None
    own = planned.pipeline.mesh
    assert own.replicas * len(planned.pipeline.devices) == 2 and own.tensor_parallel == RANKS
    assert "ways to divide 2 groups of 4 devices" in str(planned)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh_shape": (2, 2)}, r"mesh_shape=\(2, 2\): .* DTensors over 4 devices.*mesh_shape=\(dp, pp, 4\)"),
        ({"mesh_shape": (2, 2, 2)}, "DTensors over 4 devices"),
        ({"mesh_shape": 6}, "no whole number of such groups"),
        ({"devices": 2}, r"devices=2 is for models whose layers are whole.*mesh_shape=\(dp, pp, 4\)"),
        ({"offloaded": True}, "offloaded=True is for models whose layers are whole"),
    ],
)
def test_what_contradicts_the_model(mesh: dist.DeviceMesh, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _planned(_net(mesh, 1), **given)


def test_a_mesh_of_several_dimensions_is_refused(mesh: dist.DeviceMesh) -> None:
    both = dist.init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("dp", "tp"))
    net = nn.Linear(8, 8, bias=False, device="meta")
    net.weight = nn.Parameter(DTensor.from_local(net.weight.detach(), both, [Replicate(), Shard(0)], run_check=False))
    with pytest.raises(ValueError, match=r"on meshes of the shapes \(2, 4\).*mesh\['tp'\]"):
        roundpipe_fx.plan(net, torch.empty(2, 8), device="H100", mesh_shape=(1, 1, 8))
