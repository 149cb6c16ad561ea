"""Pipelined steps on CUDA devices: bits, streams, no synchronization inside a step."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import roundpipe_fx
from tests.comparison import Step, assert_bitwise, loss_of
from tests.golden_models import GOLDEN, MixtureOfExperts, TiedTransformer
from tests.long import long_but
from tests.pipeline.steps import SCHEDULES, Blocks, assert_close, left_behind, squares

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]


def _devices() -> list[list[str]]:
    count = torch.cuda.device_count()
    several = [["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"]] if count > 1 else []
    several += [["cuda:0", "cuda:1", "cuda:2"]] if count > 2 else []
    return [["cuda:0"], ["cuda:0", "cuda:0"], *several]


def _pipelined(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, **options) -> Step:
    model = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model, stage_compiler="eager", **options)
    torch.manual_seed(0)
    return left_behind(model, compiled.forward_backward(x, labels=y, loss_fn=squares))


@pytest.mark.parametrize("schedule", long_but(SCHEDULES, quick={"1f1b", "zbv", "roundpipe"}))
def test_one_microbatch_has_the_bits_of_aot_eager(schedule: str) -> None:
    model = TiedTransformer(width=64, depth=2).cuda()
    tokens = torch.randint(16, (4, 32), device="cuda")
    own = copy.deepcopy(model)
    torch.manual_seed(0)
    loss = torch.compile(own, backend="aot_eager")(tokens=tokens, targets=tokens)
    loss.backward()
    for devices in _devices():
        found = copy.deepcopy(model)
        compiled = roundpipe_fx.compile(
            found, devices=devices, num_microbatches=1, schedule=schedule, stage_compiler="eager"
        )
        torch.manual_seed(0)
        assert_bitwise(
            left_behind(found, compiled.forward_backward(tokens=tokens, targets=tokens)), left_behind(own, loss)
        )


@pytest.mark.parametrize("schedule", long_but(SCHEDULES, quick={"1f1b", "zbv", "roundpipe"}))
def test_devices_and_recomputation_change_nothing(schedule: str) -> None:
    model = Blocks(width=128, dropout=0.1).cuda()
    x, y = torch.randn(64, 128, device="cuda"), torch.randn(64, 128, device="cuda")
    reference = _pipelined(model, x, y, devices=["cuda:0"], num_microbatches=4, schedule="gpipe")
    for devices in _devices():
        for checkpoint in ("never", "always"):
            step = _pipelined(
                model, x, y, devices=devices, num_microbatches=4, schedule=schedule, checkpoint=checkpoint
            )
            assert_close(step, reference)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "roundpipe"])
def test_updated_buffers_and_both_halves_of_a_step(schedule: str, checkpoint: str) -> None:
    """A microbatch reads the statistics that the one before has made, and a backward what its forward has left: under
    RoundPipe's dispatch both were made by other workers."""
    make, make_batch, _ = GOLDEN["unet"]
    model = make().cuda()
    batch = {name: torch.cat([value] * 4).cuda() for name, value in make_batch().items()}
    reference, first = None, [["cuda:0"]]
    for devices in (*first, *(own for own in _devices() if own not in first)):
        found = copy.deepcopy(model)
        compiled = roundpipe_fx.compile(
            found,
            devices=devices,
            num_microbatches=4,
            loss_reduction="sum",
            schedule=schedule,
            checkpoint=checkpoint,
            stage_compiler="eager",
        )
        for _ in range(2):
            compiled.forward_backward(**batch)
        found.zero_grad()
        loss = loss_of(compiled(**batch)).sum()
        loss.backward()
        step = left_behind(found, loss)
        reference = reference or step
        assert_close(step, reference)
        assert all(torch.equal(value, reference.buffers[name]) for name, value in step.buffers.items())


@pytest.mark.parametrize("schedule", long_but(["gpipe", "1f1b"], quick={"1f1b"}))
@pytest.mark.parametrize("budget", long_but([0.0, 0.5], quick={0.0}))
def test_every_device_stays_within_the_budget(schedule: str, budget: float) -> None:
    """Copies of parameters on other devices count there, and at the end all gradients where the model is."""
    torch.manual_seed(0)
    tokens = torch.randint(256, (16, 128), device="cuda")
    for devices in (own for own in _devices() if len(set(own)) == len(own)):
        model = TiedTransformer(width=128, depth=3, vocabulary=256).cuda()
        compiled = roundpipe_fx.compile(
            model,
            devices=devices,
            num_microbatches=4,
            schedule=schedule,
            memory_budget=budget,
            tiling="never",
            stage_compiler="eager",
        )
        for _ in range(3):
            model.zero_grad()
            with contextlib.ExitStack() as stack:
                peaks = [stack.enter_context(roundpipe_fx.measure_peak(device)) for device in devices]
                compiled.forward_backward(tokens=tokens, targets=tokens)
        assert all(0 < peak.bytes <= compiled.plan.budget for peak in peaks)


@pytest.mark.hardware
def test_many_steps_on_streams_of_their_own() -> None:
    """Were a value freed while another stream reads it, some step would differ."""
    model = Blocks(width=512, depth=8, dropout=0.1).cuda()
    x, y = torch.randn(2048, 512, device="cuda"), torch.randn(2048, 512, device="cuda")
    for devices in _devices():
        compiled = roundpipe_fx.compile(
            model,
            devices=devices,
            stages=4,
            num_microbatches=8,
            loss_reduction="sum",
            checkpoint="always",
            stage_compiler="eager",
        )
        gradients = []
        for _ in range(20):
            model.zero_grad()
            torch.manual_seed(0)
            compiled.forward_backward(x, labels=y, loss_fn=squares)
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        assert all(torch.equal(a, b) for other in gradients[1:] for a, b in zip(gradients[0], other, strict=True))


def test_no_synchronization_inside_a_step() -> None:
    model = Blocks(width=128, dropout=0.1).cuda()
    x, y = torch.randn(64, 128, device="cuda"), torch.randn(64, 128, device="cuda")
    for devices in _devices():
        compiled = roundpipe_fx.compile(model, devices=devices, num_microbatches=4, checkpoint="always")
        compiled.forward_backward(x, labels=y, loss_fn=squares)
        torch.cuda.set_sync_debug_mode("error")
        try:
            compiled.forward_backward(x, labels=y, loss_fn=squares)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_backward_asks_nothing_again() -> None:
    model = MixtureOfExperts(width=64, depth=3, experts=4).cuda()
    x = torch.randn(64, 64, device="cuda")
    compiled = roundpipe_fx.compile(model, devices=["cuda:0"], num_microbatches=1, checkpoint="always")
    compiled(x).backward()
    loss = compiled(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_model_on_a_gpu_is_refused_where_workers_are_the_host() -> None:
    compiled = roundpipe_fx.compile(Blocks().cuda(), devices=["cpu", "cpu"], num_microbatches=2)
    with pytest.raises(ValueError, match=r"model\.to\('cpu'\)"):
        compiled(torch.randn(4, 16, device="cuda"))


@pytest.mark.hardware
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_copies_run_beside_computation() -> None:
    model = Blocks(width=2048, depth=8).to("cuda:0")
    x, y = torch.randn(8192, 2048, device="cuda:0"), torch.randn(8192, 2048, device="cuda:0")
    compiled = roundpipe_fx.compile(model, devices=["cuda:0", "cuda:1"], num_microbatches=8)
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled.forward_backward(x, labels=y, loss_fn=squares)
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [event.time_range for event in events if "Memcpy" in event.name]
    kernels = [event.time_range for event in events if "gemm" in event.name.lower()]
    assert any(c.start < k.end and k.start < c.end for c in copies for k in kernels)
