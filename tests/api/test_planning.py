from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import roundpipe_fx
from roundpipe_fx.analysis.cost import DEVICES
from roundpipe_fx.budget import InfeasibleBudgetError, bytes_text
from roundpipe_fx.report.plan import Plan
from tests.golden_models import TiedTransformer
from tests.hugging_face import gpt2


def _llama(layers: int, width: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).bfloat16().train()


@pytest.mark.long
def test_a_model_without_storage_is_planned_for_a_device_that_is_not_there() -> None:
    model = _llama(layers=2, width=1024)
    tokens = torch.empty(8, 2048, dtype=torch.long, device="meta")
    with roundpipe_fx.measure_peak("cpu") as peak:
        plan = roundpipe_fx.plan(model, input_ids=tokens, labels=tokens, device="RTX 4090", memory_budget="1.5GiB")
    assert peak.bytes < 2**20  # nothing of the step's size was allocated
    assert plan.peak_bytes <= 1.5 * 2**30 and plan.recompute_seconds > 0
    backward = [operation.node.name for block in plan.operations.backward.values() for operation in block]
    assert "nll_loss_backward" in backward  # which PyTorch leaves out on the meta device
    roomy = roundpipe_fx.plan(model, input_ids=tokens, labels=tokens, device="H200")
    assert roomy.budget > 100 * 2**30 and roomy.recompute_seconds == 0
    assert roomy.forward_seconds < plan.forward_seconds  # a faster device


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 3 * 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(2).square().mean()


def _backward_workspaces(plan: roundpipe_fx.Plan) -> dict[str, int]:
    operations = [operation for block in plan.operations.backward.values() for operation in block]
    return {str(operation.node.target): operation.workspace for operation in operations}


def test_a_plan_for_a_gpu_that_is_not_there_counts_what_attention_allocates() -> None:
    with torch.device("meta"):
        model, x = _Attention().bfloat16(), torch.empty(2, 256, 64, dtype=torch.bfloat16)
    backward = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    plan = roundpipe_fx.plan(model, x, device="H100", memory_budget=1.0)
    # As flash attention: 2 * 4 heads of 256 rows, their sums and a gradient of 32 floats for each row.
    assert _backward_workspaces(plan)[backward] == 4 * 2 * 4 * 256 * (1 + 32)
    assert not any(_backward_workspaces(roundpipe_fx.plan(model, x, device="cpu", memory_budget=1.0)).values())
    # A causal mask, which Hugging Face builds while a model is traced, is left out.
    llama, tokens = _llama(layers=1, width=256), torch.empty(2, 256, dtype=torch.long, device="meta")
    batch = {"input_ids": tokens, "labels": tokens, "device": "H100", "memory_budget": 1.0}
    assert _backward_workspaces(roundpipe_fx.plan(llama, **batch))[backward] == 4 * 2 * 8 * 256 * (1 + 32)
    # With another mask: as efficient attention, 2 * 8 heads of 4 blocks of 64 by 64.
    plan = roundpipe_fx.plan(llama, **batch, attention_mask=torch.ones_like(tokens))
    assert _backward_workspaces(plan)[backward] == 4 * 2 * 8 * (256 + 4 * (64 * 64 + 4))


@pytest.mark.long
def test_what_cannot_fit_is_an_error_that_says_what_it_takes() -> None:
    model = _llama(layers=2, width=1024)
    tokens = torch.empty(128, 8192, dtype=torch.long, device="meta")
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError, match="needs at least") as info:
        roundpipe_fx.plan(model, input_ids=tokens, labels=tokens, device="RTX 3090", tiling="never")
    assert info.value.minimum > 24 * 2**30


def test_weights_that_do_not_fit_alone() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(10**5, 10**5)
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError, match=r"parameters and buffers alone take 37\.3 GiB"):
        roundpipe_fx.plan(model, torch.empty(1, 10**5), device="RTX 4090")


def test_a_device_has_the_model_and_its_optimizer_beside_the_step() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 1, bias=False))
    x = torch.empty(8, 64, device="meta")
    size = 4 * (64 * 64 + 64)
    adam = torch.optim.AdamW(model.parameters())
    plan = roundpipe_fx.plan(model, x, device="H100", optimizer=adam)
    assert plan.model is not None
    assert (plan.model.parameters, plan.model.optimizer, plan.model.optimizer_name) == (size, 2 * size, "AdamW")
    alone = roundpipe_fx.plan(model, x, device="H100")
    assert alone.budget - plan.budget == 2 * size
    total = bytes_text(3 * size + plan.peak_bytes)
    assert f"with the model {total} of 80.0 GiB: parameters 16.2 KiB, AdamW's state 32.5 KiB, gradients" in str(plan)
    assert "without an optimizer's state" in str(alone)
    assert Plan.from_json(plan.to_json()).model == plan.model
    with pytest.raises(InfeasibleBudgetError, match="the optimizer's state"):
        with torch.device("meta"):
            large = nn.Linear(1 << 17, 1 << 16)  # 32 GiB, and twice as much
        roundpipe_fx.plan(
            large,
            torch.empty(1, 1 << 17, device="meta"),
            device="H100",
            optimizer=torch.optim.AdamW(large.parameters()),
        )


def _uneven(width: int) -> torch.nn.Module:
    """Two layers, of which the second has three times the weights of the first."""
    with torch.device("meta"):
        return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 3 * width))


def test_a_device_of_several_has_the_weights_of_its_own_stages() -> None:
    width = 40_000  # 6.4 GB and 19.2 GB in float32: not both on one RTX 4090
    model, x = _uneven(width), torch.empty(4, width)
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError, match="Or use more devices"):
        roundpipe_fx.plan(model, x, device="RTX 4090")
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError, match=r"needs at least"):  # gradients are of that size too
        roundpipe_fx.plan(model, x, device="RTX 4090", devices=2, stages=["1"])
    heaviest = sum(parameter.nbytes for parameter in model[1].parameters())
    plan = roundpipe_fx.plan(model, x, device="H100", devices=2, stages=["1"])
    memory = DEVICES["H100"].memory
    assert memory is not None and plan.budget is not None
    assert 0 <= int(0.9 * memory) - heaviest - plan.budget < 1024  # sizes are rounded up, as CUDA's allocator does
    assert plan.pipeline.microbatches == 4 and len(plan.pipeline.peak_bytes) == 2
    same = roundpipe_fx.plan(model, x, device="H100", devices=2, stages=["1"], memory_budget=plan.budget)
    assert (same.pipeline, same.peak_bytes) == (plan.pipeline, plan.peak_bytes)


def test_weights_of_one_of_several_devices_that_do_not_fit() -> None:
    model = _uneven(46_000)
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError, match=r"one of 2 devices alone take 23\.6 GiB, and 21"):
        roundpipe_fx.plan(model, torch.empty(4, 46_000), device="RTX 4090", devices=2, stages=["1"])


def test_an_offloaded_model_on_several_devices_is_dispatched_by_roundpipe() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    plan = roundpipe_fx.plan(model, torch.empty(8, 64), device="RTX 4090", devices=2, offloaded=True)
    assert (plan.pipeline.schedule, plan.pipeline.microbatches) == ("roundpipe", 4)
    assert len(plan.pipeline.peak_bytes) == 2 and plan.pipeline.host_to_device_bytes > 0


@pytest.mark.parametrize("devices", [0, True, ["cuda:0"]])
def test_devices_are_a_number(devices: Any) -> None:
    with pytest.raises(ValueError, match=r"devices=.*a number of devices"):
        roundpipe_fx.plan(TiedTransformer(), torch.ones(2, 4).long(), device="cpu", devices=devices)


@pytest.mark.long
def test_a_model_on_the_cpu_is_planned_as_it_would_be_compiled(no_workspaces: None) -> None:
    model = gpt2().train()
    tokens = torch.randint(128, (2, 16))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    planned = roundpipe_fx.plan(model, input_ids=tokens, labels=tokens, memory_budget=0.3, device="cpu")
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=0.3).trace(input_ids=tokens, labels=tokens)
    assert (planned.budget, planned.peak_bytes) == (compiled.budget, compiled.peak_bytes)
    assert planned.forward_seconds == compiled.forward_seconds
    assert planned.frontier() == compiled.frontier()
    assert [m.fingerprint for m in planned.modules] == [m.fingerprint for m in compiled.modules]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_names_of_devices() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"'RTX 4091'. Did you mean 'RTX 4090'\? Known: .*H100"):
        roundpipe_fx.plan(TiedTransformer(), tokens, tokens, device="RTX 4091")
    assert roundpipe_fx.plan(TiedTransformer(), tokens, tokens).recompute_seconds == 0  # on the CPU no limit


def test_a_frontier_is_drawn(tmp_path: Path) -> None:
    tokens = torch.zeros(2, 4, dtype=torch.long)
    plan = roundpipe_fx.plan(TiedTransformer(), tokens, tokens, memory_budget=0.3, device="cpu")
    path = roundpipe_fx.plot_frontier(plan, tmp_path / "frontier.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    unbudgeted = roundpipe_fx.compile(TiedTransformer()).trace(tokens, tokens)
    with pytest.raises(RuntimeError, match="without a budget"):
        roundpipe_fx.plot_frontier(unbudgeted, tmp_path / "none.png")


def test_a_plan_is_for_the_sizes_that_are_asked_whatever_was_planned_before() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))

    def planned(rows: int) -> roundpipe_fx.Plan:
        return roundpipe_fx.plan(model, torch.empty(rows, 8), device="cpu", memory_budget=0.5)

    planned(4)
    after_another = planned(6)
    torch._dynamo.reset()
    alone = planned(6)
    assert after_another.sources() == alone.sources()
    assert (after_another.peak_bytes, after_another.budget) == (alone.peak_bytes, alone.budget)


@pytest.mark.parametrize("microbatches", [0, -1])
def test_there_is_at_least_one_microbatch(microbatches: int) -> None:
    with pytest.raises(ValueError, match=f"num_microbatches={microbatches}: there must be at least one"):
        roundpipe_fx.plan(TiedTransformer(), torch.ones(2, 4).long(), device="cpu", num_microbatches=microbatches)


def test_an_option_misspelt_for_a_model_that_takes_everything() -> None:
    class Everything(torch.nn.Module):
        def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
            return x.exp().sum()

    x = torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match=r"gives 'memory_bugdet' to the model.*Did you mean 'memory_budget'\?"):
        roundpipe_fx.plan(Everything(), x, device="cpu", memory_bugdet=1)


_NETWORK = roundpipe_fx.Network(
    node=8, within_bandwidth=450e9, within_latency=3.4e-6, between_bandwidth=1e9, between_latency=9.6e-6
)
"""Slow between nodes."""


def _layers(count: int, width: int) -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(count)))


def test_replicas_of_a_pipeline_are_planned_once() -> None:
    width, replicas = 1024, 64
    model, x = _layers(4, width), torch.empty(8, width)
    size = 4 * width**2  # of a layer
    adam = torch.optim.AdamW(model.parameters())
    common: dict[str, Any] = {"device": "H100", "num_microbatches": 4, "stages": 4}
    one = roundpipe_fx.plan(model, x, mesh_shape=(1, 4), optimizer=adam, **common)
    assert one.pipeline.mesh.collective_seconds == 0 and one.pipeline.mesh.weight_bytes == (size,) * 4
    assert one.pipeline.mesh.optimizer_bytes == (2 * size,) * 4
    assert one.budget == int(0.9 * DEVICES["H100"].memory) - 3 * size
    many = roundpipe_fx.plan(model, x, mesh_shape=(replicas, 4), optimizer=adam, **common)
    # Two ranks of a ring are on each node, so two network adapters of 50 GB/s are used.
    hops = 2 * (31 * 9.6e-6 + 32 * 3.4e-6)
    assert many.pipeline.mesh.collective_seconds == pytest.approx(hops + 2 * 63 / 64 * size / 100e9)
    assert one.pipeline.makespan < many.pipeline.makespan
    slower = roundpipe_fx.plan(model, x, mesh_shape=(replicas, 4), network=_NETWORK, **common)
    assert slower.pipeline.makespan > many.pipeline.makespan
    assert slower.pipeline.mesh.unhidden_seconds > many.pipeline.mesh.unhidden_seconds
    text = str(many)
    assert "mesh: 64 replicas, 256 devices in all; the fullest has" in text and "optimizer 8.0 MiB" in text
    assert "without any communication a step would be" in text and "tokens/s" not in text
    assert roundpipe_fx.Plan.from_json(many.to_json()) == many


def test_the_host_of_another_machine_is_assumed_to_have_128_gib() -> None:
    """Of an offloaded model too, whose weights and gradients of 4 GiB a layer are there."""

    def planned(layers: int, **options: Any) -> Plan:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(2**15, 2**15, bias=False) for _ in range(layers)))
        x = torch.empty(64, 2**15, device="meta")
        return roundpipe_fx.plan(model, x, device="H100", offloaded=True, num_microbatches=1, **options)

    plan = planned(8)
    assert plan.host_bytes == 64 << 30 and "assumed: a host with 128.0 GiB of memory" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(roundpipe_fx.HostMemoryError, match=r"160.0 GiB.*the host is assumed to have .* \(128.0 GiB\)"):
        planned(20)
    asked = planned(20, host_budget="160GiB")
    assert asked.host_bytes == 160 << 30 and "assumed: a host" not in str(asked)


@pytest.mark.long
def test_a_plan_says_where_the_link_to_the_host_is_its_bottleneck(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = DEVICES["H100"]
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(2048, 2048), nn.GELU())))
    x = torch.empty(2**14, 2048, device="meta")

    def planned(link: float) -> Plan:
        monkeypatch.setitem(DEVICES, "H100", dataclasses.replace(rates, host=link))
        return roundpipe_fx.plan(model, x, device="H100", memory_budget="800MiB", offloaded=True, num_microbatches=1)

    slow, fast = planned(5e9), planned(2e12)
    assert slow.host_wait > 0.2 and "the link to the host is the bottleneck: the device waits" in str(slow)
    assert not fast.is_bound_by_host_link and "bottleneck" not in str(fast)
    busy = dataclasses.replace(fast, host_link_share=0.95)
    assert not busy.is_bound_by_host_link  # nothing is recomputed
    stages = tuple(dataclasses.replace(stage, recompute_seconds=stage.forward_seconds) for stage in busy.stages)
    busy = dataclasses.replace(busy, stages=stages)
    assert "and it carries values to the host during 95% of the forward" in str(busy)


def test_a_mesh_has_two_microbatches_per_device_of_a_replica_by_default() -> None:
    plan = roundpipe_fx.plan(_layers(2, 4), torch.empty(8, 4), device="H100", mesh_shape=(2, 2))
    assert plan.pipeline.microbatches == 4


@pytest.mark.parametrize(
    ("mesh", "stages"),
    [
        ({"mesh_shape": (4, 1), "num_microbatches": 1}, 2),
        ({"mesh_shape": (4, 1), "num_microbatches": 2}, 2),
        ({"mesh_shape": (4, 1), "num_microbatches": 1, "shard": "dp"}, 8),
        ({"mesh_shape": (4, 1), "num_microbatches": 2, "shard": "dp"}, 1),
        ({"mesh_shape": (1, 1), "num_microbatches": 2}, 1),
        ({"mesh_shape": (4, 1), "num_microbatches": 2, "stages": 1}, 1),
    ],
)
def test_replicas_of_one_device_average_beside_the_backward(mesh: dict[str, Any], stages: int) -> None:
    """Each stage's gradients are averaged while those before it run; shards are gathered once a microbatch."""
    model, x = _layers(8, 1024), torch.empty(256, 1024)
    plan = roundpipe_fx.plan(model, x, device="H100", **mesh)
    assert len(plan.stages) == stages
    if stages > 1:
        one = roundpipe_fx.plan(model, x, device="H100", **mesh, stages=1)
        assert plan.pipeline.mesh.unhidden_seconds < one.pipeline.mesh.unhidden_seconds


def test_small_gradients_are_averaged_together() -> None:
    plan = roundpipe_fx.plan(_layers(8, 64), torch.empty(8, 64), device="H100", mesh_shape=(4, 1), num_microbatches=1)
    assert len(plan.stages) == 1


def test_sharded_parameters_are_planned_within_a_budget() -> None:
    width = 1024
    model, x = _layers(8, width), torch.empty(8, width)
    size = 4 * width**2
    common: dict[str, Any] = {"device": "H100", "num_microbatches": 1, "stages": 8, "mesh_shape": (8, 1)}
    whole, sharded = roundpipe_fx.plan(model, x, **common), roundpipe_fx.plan(model, x, shard="dp", **common)
    assert whole.pipeline.mesh.weight_bytes == (8 * size,) and sharded.pipeline.mesh.weight_bytes == (size,)
    assert sharded.pipeline.device_bytes[0] < 0.6 * whole.pipeline.device_bytes[0]
    assert "8 replicas with sharded parameters" in str(sharded)


class _WithLoss(torch.nn.Module):
    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - labels).square().mean()


@pytest.mark.long
def test_a_model_that_stays_on_the_cpu_has_the_current_stage_on_the_device() -> None:
    width = 1024
    model, x = _WithLoss(_layers(8, width)), torch.empty(256, width)
    given: dict[str, Any] = {"labels": x, "device": "RTX 4090", "num_microbatches": 4, "memory_budget": 0.0}
    offloaded, there = roundpipe_fx.plan(model, x, offloaded=True, **given), roundpipe_fx.plan(model, x, **given)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert offloaded.pipeline.host_to_device_bytes > weights and not there.pipeline.host_to_device_bytes
    # With a model on the device its parameters come on top of what a step allocates, gradients included.
    assert offloaded.pipeline.peak_bytes[0] < 0.5 * (there.pipeline.peak_bytes[0] + weights)
    assert offloaded.pipeline.peak_bytes[0] <= offloaded.budget


@pytest.mark.long
def test_values_of_a_mesh_leave_for_the_host_where_a_budget_there_is_given() -> None:
    with torch.device("meta"):
        layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024, bias=False), nn.GELU())]
        x = torch.empty(2**15, 1024)
    model, inputs = _WithLoss(nn.Sequential(*layers)), {"x": x, "labels": x}
    common: dict[str, Any] = {"device": "H100", "num_microbatches": 4, "mesh_shape": (2, 1), "schedule": "gpipe"}
    ample = roundpipe_fx.plan(model, **inputs, memory_budget=1.0, **common)
    common["memory_budget"] = max(ample.pipeline.peak_bytes) * 55 // 100
    rooms = (None, 0, "64MiB", "16GiB")
    without, none, little, much = plans = [
        roundpipe_fx.plan(model, **inputs, host_budget=room, **common) for room in rooms
    ]
    assert not without.timing.offloads and none.pipeline == without.pipeline
    assert little.host_bytes <= 2**26 and much.host_bytes <= 2**34
    seconds = [plan.pipeline.makespan for plan in plans]
    assert seconds[3] < seconds[2] < seconds[1] and "pinned on the host" in str(much)
    assert all(max(plan.pipeline.peak_bytes) <= common["memory_budget"] for plan in plans)


def test_what_a_budget_keeps_gathered_takes_no_time_to_gather_again() -> None:
    count, width = 8, 256
    model, x = _WithLoss(_layers(count, width)), torch.empty(8, width)
    common: dict[str, Any] = {"labels": x, "num_microbatches": 4, "stages": 8, "mesh_shape": (8, 1), "shard": "dp"}
    least, most = (roundpipe_fx.plan(model, x, device="H100", memory_budget=share, **common) for share in (0.0, 1.0))
    size, ring = 4 * width**2, DEVICES["H100"].network.ring(8, 1)
    again = least.pipeline.gathered_bytes[0] // size - count
    assert again > 0 and most.pipeline.gathered_bytes == (count * size,)
    saved = least.pipeline.mesh.collective_seconds - most.pipeline.mesh.collective_seconds
    assert saved == pytest.approx(again * ring.gather_seconds(size))
    assert most.pipeline.makespan < least.pipeline.makespan


def test_devices_of_a_mesh_have_their_weights_and_batch_before_a_step() -> None:
    """A step is not counted copies of them: on any kind of device it holds the same values."""
    width = 512
    x = torch.empty(4 * width, width)
    common: dict[str, Any] = {"labels": x, "num_microbatches": 4, "mesh_shape": (2, 2), "stages": ["layers.2"]}
    model = _WithLoss(_layers(4, width))
    peaks = [
        roundpipe_fx.plan(model, x, device=kind, memory_budget=1.0, **common).pipeline.peak_bytes
        for kind in ("H100", "cpu")
    ]
    size = 4 * width**2
    for on_gpu, on_cpu in zip(*peaks, strict=True):
        assert abs(on_gpu - on_cpu) < size // 4  # the state of the CPU's generator, and what CUDA's allocator rounds up
    assert max(peaks[0]) < 16 * size


def test_tokens_of_a_mesh() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
    tokens = torch.zeros(2, 4, dtype=torch.long)
    plan = roundpipe_fx.plan(model, tokens, device="H100", mesh_shape=(2, 1), num_microbatches=1)
    assert plan.pipeline.tokens_per_second == pytest.approx(8 / plan.pipeline.makespan)
    assert "tokens/s per device" in str(plan)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh_shape": (2, 0)}, "sizes of the dimensions 'dp' and 'pp'"),
        ({"mesh_shape": 0}, "a mesh has at least one device"),
        ({"mesh_shape": 8, "devices": 4}, "exclude each other"),
        ({"mesh_shape": (8, 1, 2)}, "no parameter of the model is a DTensor"),
        ({"mesh_shape": (8, 1, 2, 2)}, "sizes of the dimensions 'dp' and 'pp'"),
        ({"mesh_shape": (2, 2), "devices": 4}, "exclude each other"),
        ({"mesh_shape": (2, 2), "offloaded": True}, "exclude each other"),
        ({"shard": "dp"}, "are of a mesh"),
        ({"network": _NETWORK}, "are of a mesh"),
        ({"mesh_shape": (2, 1), "network": 50e9}, "give a roundpipe_fx.Network"),
        ({"mesh_shape": (2, 1), "device": "H10"}, "no roofline for a device named 'H10'"),
        ({"mesh_shape": (2, 1), "shard": "pp"}, "the only valid value is 'dp'"),
        ({"mesh_shape": (1, 2), "schedule": "2f2b"}, "valid values are"),
    ],
)
def test_what_is_no_mesh(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        roundpipe_fx.plan(torch.nn.Linear(4, 4), torch.empty(8, 4), **({"device": "cpu"} | given))


def test_plans_are_in_tiles_as_asked() -> None:
    """Where a budget needs them, wherever they pay, or never; within a share as they are where nothing is compiled."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 8192, bias=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(torch.tanh(self.body(x))), y)

    with torch.device("meta"):
        model = Head()
        given = {"x": torch.empty(512, 16), "y": torch.empty(512, dtype=torch.long)}
    options: dict[str, Any] = {**given, "device": "H100", "memory_budget": "8MiB"}
    assert roundpipe_fx.plan(model, **options).tiles and roundpipe_fx.plan(model, **options, tiling="auto").tiles
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError):
        roundpipe_fx.plan(model, **options, tiling="never")
    with pytest.raises(ValueError, match="tiling='always': valid values are"):
        roundpipe_fx.plan(model, **options, tiling="always")
