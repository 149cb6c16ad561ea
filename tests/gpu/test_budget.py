"""A byte budget on a CUDA device: the allocator's own counters stay within it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.analysis.cost import predict_workspaces, synthetic
from roundpipe_fx.analysis.cost.workspace_formulas import Gpu, workspace_by_formula
from tests.golden_models import GOLDEN, TiedTransformer
from tests.long import long_but

aten = torch.ops.aten

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _transformer() -> tuple[nn.Module, dict[str, Any]]:
    tokens = torch.randint(256, (16, 128), device="cuda")
    return TiedTransformer(width=128, depth=4, vocabulary=256), {"tokens": tokens, "targets": tokens}


def _unet() -> tuple[nn.Module, dict[str, Any]]:
    make, make_batch, _ = GOLDEN["unet"]
    return make(), {name: value.cuda() for name, value in make_batch().items()}


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("budget", long_but([0.0, 0.3, 1.0], quick={0.0, 1.0}))
@pytest.mark.parametrize("make", [_transformer, _unet])
def test_the_allocator_stays_within_the_budget(make: Any, budget: float, compiler: str) -> None:
    model, batch = make()
    model = model.cuda()
    compiled = roundpipe_fx.compile(model, memory_budget=budget, stage_compiler=compiler, fullgraph=True)
    for _ in range(3):  # the libraries' own memory, which stays, comes with the first
        model.zero_grad()
        with roundpipe_fx.measure_peak("cuda") as peak:
            compiled(**batch).backward()
    assert 0 < peak.bytes <= compiled.plan.budget


class OddSizes(nn.Module):
    """Values of 1.2 to 8.3 MiB: pieces of memory have up to 1 MiB more than they need."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(320, inner), nn.GELU(), nn.Linear(inner, 320))
                for inner in (2178, 1500, 940, 700, 1310, 1900)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("budget", [0.0, 0.2, 0.4, 1.0])
def test_what_the_allocator_does_not_split_off_is_in_the_prediction(budget: float) -> None:
    model = OddSizes().cuda()
    x = torch.randn(1000, 320, device="cuda")
    compiled = roundpipe_fx.compile(model, memory_budget=budget, stage_compiler="eager")
    for _ in range(3):
        model.zero_grad()
        with roundpipe_fx.measure_peak("cuda") as peak:
            compiled(x).backward()
    assert 0.93 * compiled.plan.peak_bytes <= peak.bytes <= compiled.plan.budget


@pytest.mark.parametrize("mebibytes", [(34,), (16, 10), (26, 28, 4, 18, 34, 33)])
def test_blocks_that_earlier_work_has_left_do_not_raise_the_peak_above_the_prediction(
    mebibytes: tuple[int, ...],
) -> None:
    model = OddSizes().cuda()
    x = torch.randn(1000, 320, device="cuda")
    compiled = roundpipe_fx.compile(model, memory_budget=0.4, stage_compiler="eager")
    compiled(x).backward()
    model.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    held = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in mebibytes]
    reserved = torch.cuda.memory_reserved()
    del held
    for _ in range(2):
        model.zero_grad()
        with roundpipe_fx.measure_peak("cuda") as peak:
            compiled(x).backward()
        assert 0.93 * compiled.plan.peak_bytes <= peak.bytes <= compiled.plan.peak_bytes
    assert torch.cuda.memory_reserved() <= reserved + 1.3 * compiled.plan.peak_bytes


def test_without_a_budget_most_of_the_free_memory_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = _transformer()
    model.cuda()
    free, total = torch.cuda.mem_get_info()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, total))  # others may use the device meanwhile
    plan = roundpipe_fx.compile(model).trace(**batch)
    assert 0.8 * free < plan.budget <= 0.9 * free + torch.cuda.memory_reserved()
    assert plan.recompute_seconds == 0


def test_measured_costs_are_of_the_device() -> None:
    model, batch = _transformer()
    plan = roundpipe_fx.compile(model.cuda(), memory_budget=0.3, cost="measured").trace(**batch)
    assert 0 < plan.recompute_seconds < plan.forward_seconds < 1


@pytest.mark.hardware
def test_what_kernels_allocate_is_seen_on_the_device() -> None:
    """The gradient of an embedding sorts the indices, in memory of its own."""
    gradient = torch.ops.aten.embedding_dense_backward.default
    arguments = (1000, -1, False)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        values = [torch.empty(65536, 16, device="cuda"), torch.empty(65536, dtype=torch.long, device="cuda")]
        result = gradient(*values, *arguments)
    graph = torch.fx.Graph()
    inputs = [graph.placeholder("gradient"), graph.placeholder("indices")]
    node = graph.call_function(gradient, (*inputs, *arguments))
    for item, value in zip((*inputs, node), (*values, result), strict=True):
        item.meta["val"] = value
    assert predict_workspaces([node], torch.device("cuda")).get(node, 0) >= 65536 * 8


def _called(target: Any, *arguments: Any) -> torch.fx.Node:
    """A node that calls an operator on fake tensors of the device, for pairs of sizes and dtype."""
    graph = torch.fx.Graph()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        values = [
            torch.empty(one[0], dtype=one[1], device="cuda") if isinstance(one, tuple) else one for one in arguments
        ]
        result = target(*values)
    operands = []
    for value in values:
        operands.append(graph.placeholder(f"x{len(operands)}") if isinstance(value, torch.Tensor) else value)
        if isinstance(value, torch.Tensor):
            operands[-1].meta["val"] = value
    node = graph.call_function(target, tuple(operands))
    node.meta["val"] = result
    return node


_ROWS = ((8192, 1024), torch.float32)
_LONG, _MEANS, _WEIGHT = (((131_072, 256), torch.float32), ((131_072, 1), torch.float32), ((256,), torch.float32))
_CALLS = (
    (aten.sum.dim_IntList, _ROWS, [0]),
    (aten.sum.dim_IntList, ((8192, 1024), torch.bfloat16), [0]),
    (aten.sum.dim_IntList, ((8192, 1023), torch.float32), [0]),
    (aten.mean.default, _LONG),
    (aten._softmax_backward_data.default, _ROWS, _ROWS, -1, torch.float32),
    (aten.native_layer_norm_backward.default, _LONG, _LONG, [256], _MEANS, _MEANS, _WEIGHT, _WEIGHT, [True] * 3),
    (aten.sort.default, ((64, 8192), torch.float32)),
    (aten.sort.default, ((256, 8192), torch.float32)),
    (aten.topk.default, ((8, 32_000), torch.float32), 5),
    (aten.embedding_dense_backward.default, ((65_536, 64), torch.bfloat16), ((65_536,), torch.int64), 1000, -1, False),
)


@pytest.mark.hardware
@pytest.mark.parametrize("call", _CALLS, ids=lambda call: str(call[0]))
def test_kernels_allocate_no_more_than_formulas_say(call: tuple[Any, ...]) -> None:
    properties = torch.cuda.get_device_properties(0)
    device = Gpu(properties.multi_processor_count, properties.max_threads_per_multi_processor)
    node = _called(*call)
    bound = workspace_by_formula(node, device)
    assert bound is not None and predict_workspaces([node], torch.device("cuda")).get(node, 0) <= bound


def test_a_formula_counts_where_the_device_has_no_memory_for_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ((8, 64), torch.float32)
    node = _called(aten._softmax_backward_data.default, values, values, -1, torch.float32)
    monkeypatch.setattr(synthetic, "available_memory", lambda device: 0)
    monkeypatch.setattr(synthetic, "_SMALL", 0)
    assert predict_workspaces([node], torch.device("cuda")) == {node: 2048}
