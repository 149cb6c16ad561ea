"""The host as a second tier of an ordinary model: which plan is taken, and what it recomputes less."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import roundpipe_fx
from benchmarks.tiling import LossOnly
from roundpipe_fx.analysis.cost import tensor_bytes
from roundpipe_fx.ir.joint_graph import tensor_values
from roundpipe_fx.ir.options import Options
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.planner.lower import run_common_passes
from roundpipe_fx.planner.with_host import find_first_fitting, find_host_budget, host_tier_of_step
from roundpipe_fx.torch_private import offload_operators
from tests import hugging_face
from tests.capturing import capture_joint

has_operators = pytest.mark.skipif(
    offload_operators() is None, reason="this PyTorch has no operators that copy to the host"
)


def _plans(limit: int, *peaks: int) -> list[Any]:
    return [SimpleNamespace(limit=limit, candidate=SimpleNamespace(peak=SimpleNamespace(bytes=p))) for p in peaks]


def _emitter(most: int) -> tuple[Any, list[tuple[int, int]]]:
    """Plans from which so many bytes have the time to leave."""
    emitted = []

    def emit(candidate: Any) -> Any:
        emitted.append((candidate.saved.candidate.peak.bytes, candidate.sent))
        peak = candidate.saved.candidate.peak.bytes - min(candidate.sent, most)
        return SimpleNamespace(peak=peak, candidate=candidate)

    return emit, emitted


def test_the_least_recomputation_that_fits_is_taken_with_about_as_much_on_the_host_as_it_needs() -> None:
    emit, emitted = _emitter(300)
    plans = _plans(1000, 1500, 1400, 1300, 1200, 1100)
    found = find_first_fitting(plans, emit, 10**6)
    assert (found.candidate.saved, found.peak, found.candidate.sent) == (plans[2], 1000, 1300 // 4)
    assert len(emitted) == 4  # an eighth of 1,300 bytes is too little, whatever has the time to leave
    emit, _ = _emitter(300)
    plans = _plans(1000, 1500, 1400)
    found = find_first_fitting(plans, emit, 10**6)
    assert (found.candidate.saved, found.peak) == (plans[1], 1100)
    emit, _ = _emitter(10**6)
    plans = _plans(1000, 1500, 1200)
    assert find_first_fitting(plans, emit, 250).candidate.saved is plans[1]  # the host has no room for more
    plans = _plans(1000, 1500, 1200, 1400, 1100)  # the third may need more than the second
    emit, _ = _emitter(300)
    assert find_first_fitting(plans, emit, 10**6).candidate.saved is plans[1]


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2000)), min_size=1, max_size=6),
    st.integers(1, 4000),
    st.integers(0, 3000),
)
@example([(900, 100), (600, 0), (300, 200)], 3000, 500)
def test_a_smaller_budget_has_no_higher_peak(values: list[tuple[int, int]], budget: int, less: int) -> None:
    """Values leave one after another until so many bytes have left; of each value a part is away at the peak."""
    peak = 4000

    def emit(candidate: Any) -> Any:
        left = away = 0
        for gone, back in values:
            if left < candidate.sent:
                left += gone + back
                away += gone
        return SimpleNamespace(peak=max(peak - away, 0))

    for_budget, for_less = (
        find_first_fitting(_plans(limit, peak), emit, 10**6).peak for limit in (budget, budget - less)
    )
    assert for_less <= for_budget


def test_room_on_the_host() -> None:
    assert find_host_budget(None, on_paper=True) == 128 << 30
    assert 0 < find_host_budget(None, on_paper=False) < psutil.virtual_memory().total
    assert find_host_budget(100, on_paper=True) == 100
    assert find_host_budget(0, on_paper=False) == 0


def _planned(model: nn.Module, budget: Any, **options: Any) -> Any:
    tokens = torch.zeros(4, 1024, dtype=torch.long, device="meta")
    return roundpipe_fx.plan(model, device="H100", memory_budget=budget, **options, input_ids=tokens, labels=tokens)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=6,
        num_attention_heads=8,
        vocab_size=2048,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


@has_operators
@pytest.mark.long
def test_less_is_recomputed_where_values_leave(llama: nn.Module) -> None:
    found = []
    for host in (None, 0):
        whole = _planned(llama, 1.0, host_budget=host)
        assert not whole.on_host and not whole.recompute_seconds
        budget = whole.peak_bytes * 6 // 10
        plan = _planned(llama, budget, host_budget=host)
        assert plan.peak_bytes <= budget
        found.append(plan)
    with_host, without = found
    assert with_host.host_bytes > 0 and not without.on_host
    assert with_host.recompute_seconds < 0.7 * without.recompute_seconds
    assert "and on the host" in str(with_host)
    little = _planned(llama, budget, host_budget=with_host.host_bytes // 2)
    assert 0 < little.host_bytes <= with_host.host_bytes // 2
    assert not _planned(llama, budget, host_budget=2).on_host  # no value is so small
    assert with_host.recompute_seconds < little.recompute_seconds < without.recompute_seconds


@has_operators
@pytest.mark.long
def test_attention_of_a_long_sequence_is_not_run_twice(llama: nn.Module) -> None:
    """Its outputs leave, of all layers, while what is wide is in tiles."""
    tokens = torch.zeros(1, 2**17, dtype=torch.long, device="meta")
    budget = 8 << 30
    shares = []
    for host in ("64GiB", 0):
        plan = roundpipe_fx.plan(
            LossOnly(llama),
            device="H100",
            memory_budget=budget,
            host_budget=host,
            tiling="auto",
            input_ids=tokens,
            labels=tokens,
        )
        assert plan.peak_bytes <= budget and plan.host_bytes <= 64 << 30
        shares.append(plan.recompute_seconds / sum(own.forward_seconds + own.backward_seconds for own in plan.stages))
    with_host, without = shares
    assert with_host < 0.02 and without > 0.1


@pytest.mark.long
def test_attention_of_a_long_sequence_is_not_run_twice_where_the_model_is_on_the_host(llama: nn.Module) -> None:
    """Its outputs leave, of all layers, while what is wide is in tiles: whole, it does not fit beside them."""
    tokens = torch.zeros(1, 2**17, dtype=torch.long, device="meta")
    budget, host = 8 << 30, 64 << 30
    plan = roundpipe_fx.plan(
        LossOnly(llama),
        device="H100",
        memory_budget=budget,
        host_budget=host,
        tiling="auto",
        offloaded=True,
        num_microbatches=1,
        input_ids=tokens,
        labels=tokens,
    )
    assert plan.pipeline is not None and plan.host_bytes <= host
    assert max(plan.pipeline.peak_bytes) <= budget
    once = sum(stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
    assert plan.pipeline.makespan < 1.03 * once
    assert any(tiles.type == "float32[131072, 4096]" for tiles in plan.tiles)


def test_values_of_an_offloaded_model_have_the_host_memory_that_its_weights_leave() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), torch.randn(512, 64)
    joint, setting = run_common_passes(capture_joint(lambda: model(x).sum()), Options(), ())
    plain = Pipelining(devices=(), microbatches=2, schedule=None, checkpoint=None, host_budget=10**9)
    assert host_tier_of_step(joint, setting, plain) is None
    tier = host_tier_of_step(joint, setting, dataclasses.replace(plain, offloaded=True))
    assert tier is not None
    weights = sum(tensor_bytes(tensor_values(node)) for node in joint.parameters)
    assert weights == 4 * (64 * 64 + 64 + 64 * 8 + 8)
    assert tier.host_limit == (10**9 - 2 * weights) // 2
    full = host_tier_of_step(joint, setting, dataclasses.replace(plain, offloaded=True, host_budget=weights))
    assert full is not None and full.host_limit == 0


@has_operators
@pytest.mark.long
def test_the_least_budget_can_be_met() -> None:
    with torch.device("meta"):
        model = hugging_face.llama()
    for tiling in ("never", None):
        with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
            _planned(model, 1, tiling=tiling)
        assert _planned(model, refused.value.minimum, tiling=tiling).peak_bytes <= refused.value.minimum


def test_of_a_model_on_the_cpu_nothing_leaves() -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.randn(512, 64)
    plan = roundpipe_fx.compile(model, memory_budget=0.3, host_budget="1GiB").trace(x)
    assert not plan.on_host
    assert plan.recompute_seconds == roundpipe_fx.compile(model, memory_budget=0.3).trace(x).recompute_seconds
