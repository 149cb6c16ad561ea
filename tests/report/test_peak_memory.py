from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe_fx
from roundpipe_fx.report.peak_memory import _CompiledCall, _LiveStorages
from roundpipe_fx.torch_private import (
    Allocation,
    ProfiledMemory,
    active_dispatch_modes,
    dispatch_modes,
    profile_memory,
)
from tests.golden_models import TiedTransformer


def test_peak_counts_each_live_storage_once() -> None:
    x = torch.ones(256)  # 1,024 bytes, made before
    with roundpipe_fx.measure_peak("cpu") as peak:
        y = x * 2
        view = y.view(16, 16).t()
        y.add_(1)
        assert peak.current == 1024
        z = view.contiguous()
        assert peak.current == 2048
        del y, view
        assert peak.current == 1024
        del z
        assert peak.current == 0
    assert peak.bytes == 2048


def test_results_of_higher_order_operators_are_seen() -> None:
    from roundpipe_fx.torch_private import run_and_save_rng_state

    with roundpipe_fx.measure_peak("cpu") as peak:
        kept = run_and_save_rng_state(torch.ops.aten.rand.default, [256], device=torch.device("cpu"))
    assert peak.bytes >= 1024 + 5056 and kept


def test_gradients_count_and_the_peak_survives_an_exception() -> None:
    model = nn.Linear(64, 64, bias=False)
    with pytest.raises(KeyError), roundpipe_fx.measure_peak("cpu") as peak:
        model(torch.ones(1, 64)).sum().backward()
        raise KeyError
    assert 64 * 64 * 4 <= peak.bytes <= 64 * 64 * 4 + 4096


def _peak(run, model: nn.Module, batch: dict) -> int:
    for _ in range(2):  # the first compiles
        model.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            run(**batch).backward()
    return peak.bytes


@pytest.mark.long
def test_full_recompute_peaks_no_higher_than_checkpoint_at_the_same_places() -> None:
    depth = 6
    model = TiedTransformer(width=64, depth=depth, vocabulary=64)
    tokens = torch.randint(64, (8, 64))
    batch = {"tokens": tokens, "targets": tokens}
    names = [f"blocks.{i}" for i in range(depth)]
    ours, everything = copy.deepcopy(model), copy.deepcopy(model)
    full = _peak(roundpipe_fx.compile(ours, stages=[*names, "norm"], recompute="full"), ours, batch)
    none = _peak(roundpipe_fx.compile(everything, stages=2), everything, batch)
    eager = _peak(model, model, batch)
    for block in model.blocks:
        block.forward = _checkpointed(block.forward)
    checkpointed = _peak(model, model, batch)
    assert full <= checkpointed < eager
    assert full < none / 2


def _checkpointed(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def test_saved_values_die_in_the_backward() -> None:
    """Boxed calls: as the backward goes on, fewer saved values live; without them the peak would be their sum."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))).requires_grad_(False)
    x = torch.randn(256, 64, requires_grad=True)
    compiled = roundpipe_fx.compile(model, stages=8)
    compiled(x).sum().backward()
    value = 256 * 64 * 4
    with roundpipe_fx.measure_peak("cpu") as peak:
        loss = compiled(x).sum()
        before = peak.current
        loss.backward()
    assert 8 * value <= before <= 9.5 * value
    assert peak.bytes <= before + 2.5 * value


def test_incoming_gradients_die_at_their_last_use() -> None:
    """The first layer's gradient takes as many bytes as the last one's, which is gone by then."""
    model = nn.Sequential(nn.Linear(2048, 8), nn.Linear(8, 2048)).requires_grad_(False)
    x = torch.randn(256, 2048, requires_grad=True)
    compiled = roundpipe_fx.compile(model, stages=2)
    compiled(x).sum().backward()
    x.grad = None
    value = 256 * 2048 * 4
    with roundpipe_fx.measure_peak("cpu") as peak:
        loss = compiled(x).sum()
        before = peak.current
        loss.backward()
    assert before + value <= peak.bytes <= before + 1.1 * value


class Remembering(nn.Module):
    """Updates a buffer at its beginning, and makes much after that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("memory", torch.zeros(10_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory.mul_(0.5).add_(x.detach())
        x = x * self.weight
        return (x.exp() * x.sin()).sum()


@pytest.mark.parametrize("training", [True, False])
def test_new_values_of_buffers_live_until_the_forward_is_over(training: bool) -> None:
    model, x = Remembering(), torch.randn(10_000)
    compiled = roundpipe_fx.compile(model, memory_budget=1.0)
    for _ in range(2):
        model.zero_grad()
        with torch.set_grad_enabled(training), roundpipe_fx.measure_peak("cpu") as peak:
            loss = compiled(x)
            if training:
                loss.backward()
        del loss
    assert peak.bytes == compiled.plan.peak_bytes


def test_a_zero_that_stands_for_a_gradient_dies_at_its_last_use() -> None:
    class LossAndLogits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.layers(x)
            return logits.square().sum(), logits

    model, x = LossAndLogits(), torch.randn(32, 64)
    compiled = roundpipe_fx.compile(model, memory_budget=1.0)
    for _ in range(2):
        model.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            loss, logits = compiled(x)
            loss.backward()
        del loss, logits
    assert compiled.plan.peak.module == "layers.0" and "backward" in compiled.plan.peak.call
    assert peak.bytes == compiled.plan.peak_bytes


def test_unused_outputs_cost_nothing() -> None:
    class LossAndLogits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4096, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.layer(x)
            return logits.logsumexp(-1).sum(), logits

    model, x = LossAndLogits(), torch.randn(64, 8)
    compiled = roundpipe_fx.compile(model, stages=1)
    compiled(x)[0].backward()
    gradient, model.layer.weight.grad = model.layer.weight.grad, None
    loss = compiled(x)[0]
    with roundpipe_fx.measure_peak("cpu") as peak:
        loss.backward()
    assert torch.equal(gradient, model.layer.weight.grad)
    loss, logits = compiled(x)
    with roundpipe_fx.measure_peak("cpu") as used:
        (loss + 0 * logits.sum()).backward()
    logits_bytes, weight_bytes = 64 * 4096 * 4, 8 * 4096 * 4
    assert peak.bytes <= logits_bytes + weight_bytes + 8 < used.bytes


def test_what_kernels_allocate_for_themselves_is_seen_by_all_blocks() -> None:
    x, y = torch.ones(256), torch.ones(256, dtype=torch.bfloat16)
    with roundpipe_fx.measure_peak("cpu") as outer:
        kept = x + 1
        with roundpipe_fx.measure_peak("cpu") as inner:
            result = x + y  # converts y
        assert inner.current == 1024 and outer.current == 2048
    assert inner.bytes == 2048 and outer.bytes == 3072
    assert kept.shape == result.shape


def test_a_profiler_and_a_measurement_exclude_each_other() -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        roundpipe_fx.measure_peak("cpu"),
        pytest.raises(RuntimeError, match="profiler"),
    ):
        torch.ones(2) + 1
    with roundpipe_fx.measure_peak("cpu") as peak:  # nothing is left behind
        torch.ones(256)
    assert peak.bytes == 1024


def test_tokens_of_effects_take_no_memory() -> None:
    """``inv`` asserts that it succeeded, and a token orders that among other effects."""

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x @ x.T + 4 * torch.eye(len(x))).inverse()
            return (y * y.detach().exp()).sum()

    x = torch.randn(7, 5, requires_grad=True)
    model = roundpipe_fx.compile(Net(), memory_budget=0.0)
    model(x).backward()
    x.grad = None
    with roundpipe_fx.measure_peak("cpu") as peak:
        model(x).backward()
    assert peak.bytes == model.plan.peak_bytes


def test_storages_that_are_resized_count_with_what_they_hold() -> None:
    before = torch.empty(256)
    before.untyped_storage().resize_(0)
    with roundpipe_fx.measure_peak("cpu") as peak:
        within = torch.empty(512)
        within.untyped_storage().resize_(0)
        assert peak.current == 0
        before.untyped_storage().resize_(1024)
        with roundpipe_fx.measure_peak("cpu") as inner:
            before.untyped_storage().resize_(4096)
        assert inner.bytes == 3072 and peak.current == 4096
        del within, before
        assert peak.current == 0
    assert peak.bytes == 4096
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_resized_storage_counts_once_where_workers_enter_the_mode_too() -> None:
    before = torch.empty(256)
    before.untyped_storage().resize_(0)
    with roundpipe_fx.measure_peak("cpu") as peak, dispatch_modes(active_dispatch_modes()):
        before.untyped_storage().resize_(1024)
        assert peak.current == 1024
    assert peak.bytes == 1024


def test_what_inductor_allocates_is_seen() -> None:
    @torch.compile
    def normalized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ w, -1).sum(-1)

    x, w = torch.randn(200, 30), torch.randn(30, 500)
    normalized(x, w)
    seen: list[ProfiledMemory] = []
    with roundpipe_fx.measure_peak("cpu") as outer:
        kept = x * 2
        with roundpipe_fx.measure_peak("cpu") as inner:
            result = normalized(x, w)
            assert inner.current == 800
            del result
    product = 200 * 500 * 4
    assert product <= inner.bytes <= 1.1 * product
    assert outer.bytes == inner.bytes + 4 * kept.numel() and outer.current == 4 * kept.numel()
    with roundpipe_fx.measure_peak("cpu") as peak:
        profile_memory(lambda: normalized(x, w), "cpu", seen.append)
    assert peak.bytes == seen[-1].peak == inner.bytes


def test_calls_of_compiled_code_in_several_threads_count_together() -> None:
    storages = _LiveStorages()
    calls = [_CompiledCall([storages]) for _ in range(2)]
    for _ in calls:
        storages._open_log()
    begun = time.perf_counter()
    calls[0].see([Allocation(begun + 1e-7, 100, 0), Allocation(begun + 4e-7, -100, 0)])
    calls[1].see([Allocation(begun + 2e-7, 70, 0), Allocation(begun + 3e-7, -70, 0), Allocation(begun, -9, 0)])
    for call in calls:
        call.end()
    assert storages.peak == 170 and storages.live == 0


def test_a_measurement_inside_a_recorded_function_gets_its_own_part() -> None:
    inner: list[ProfiledMemory] = []
    outer: list[ProfiledMemory] = []

    def run() -> None:
        kept = torch.empty(1000)
        profile_memory(lambda: torch.empty(100).neg(), "cpu", inner.append)
        with pytest.raises(KeyError):
            profile_memory(lambda: {}[0], "cpu", inner.append)
        assert kept.shape == (1000,)

    profile_memory(run, "cpu", outer.append)
    assert inner == [ProfiledMemory(peak=800, retained=400)]
    assert outer == [ProfiledMemory(peak=4800, retained=0)]
