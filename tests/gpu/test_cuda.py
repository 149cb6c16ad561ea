"""On a CUDA device: bits, streams, no synchronization in the backward, Inductor as the default."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

import roundpipe_fx
from roundpipe_fx.compat.rotor import Checkpointable
from tests.golden_models import DropoutMLP, MixtureOfExperts, TiedTransformer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _steps(model, batch, **options):
    reference = copy.deepcopy(model)
    torch.manual_seed(0)
    torch.compile(reference, backend="aot_eager")(**batch).backward()
    torch.manual_seed(0)
    compiled = roundpipe_fx.compile(model, **options)
    compiled(**batch).backward()
    return reference, compiled


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bits(recompute: str) -> None:
    model = TiedTransformer(width=64, depth=4).cuda()
    tokens = torch.randint(16, (4, 32), device="cuda")
    batch = {"tokens": tokens, "targets": tokens}
    torch.use_deterministic_algorithms(True)
    try:
        reference, _ = _steps(model, batch, stages=4, recompute=recompute, stage_compiler="eager")
    finally:
        torch.use_deterministic_algorithms(False)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


class OnTwoDevices(torch.nn.Module):
    """Dropout on each of two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.GELU()).to(device)
            for device in ("cuda:0", "cuda:1")
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).to("cuda:1")).square().mean()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("options", [{"recompute": "full", "stages": 2}, {"memory_budget": 0.0}])
def test_dropout_is_drawn_again_on_the_device_that_it_is_on(options: dict) -> None:
    """Whichever device is current: its generator is not that of the others."""
    x = torch.randn(8, 64, device="cuda:1")
    for model, batch in ((OnTwoDevices(), {"x": x.to("cuda:0")}), (DropoutMLP(width=64).to("cuda:1"), {"x": x})):
        reference, _ = _steps(model, batch, stage_compiler="eager", **options)
        assert torch.cuda.current_device() == 0
        for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(found.grad, expected.grad)


def test_many_steps_with_forked_recomputation() -> None:
    """Were a value freed while the other stream reads it, some step would differ."""
    model = DropoutMLP(width=512, depth=8).cuda()
    compiled = roundpipe_fx.compile(model, stages=8, recompute="full", stage_compiler="eager")
    x = torch.randn(2048, 512, device="cuda")
    gradients = []
    for _ in range(20):
        model.zero_grad()
        torch.manual_seed(0)
        compiled(x).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for other in gradients[1:] for a, b in zip(gradients[0], other, strict=True))


def test_backward_never_synchronizes() -> None:
    model = MixtureOfExperts(width=64, depth=3, experts=4).cuda()
    compiled = roundpipe_fx.compile(model, stages=3, recompute="full", stage_compiler="eager")
    x = torch.randn(64, 64, device="cuda")
    compiled(x).backward()
    loss = compiled(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_inductor_is_the_default() -> None:
    model = DropoutMLP(width=64).cuda()
    reference, _ = _steps(model, {"x": torch.randn(16, 64, device="cuda")}, stages=2, recompute="full")
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-5)


def test_peak_is_the_allocators() -> None:
    with roundpipe_fx.measure_peak("cuda") as peak:
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert peak.bytes == 1 << 20


@pytest.mark.parametrize("wrap", ["checkpoint", "scope"])
def test_eager_recomputation_draws_the_same_numbers(wrap: str) -> None:
    """On CUDA the backward runs in a thread of autograd's, and dropout draws from the device's generator."""
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.3)).cuda()
    x = torch.randn(32, 64, device="cuda", requires_grad=True)

    def gradient(how: str) -> torch.Tensor:
        torch.manual_seed(0)
        if how == "checkpoint":
            y = roundpipe_fx.checkpoint(layer, x)
        elif how == "scope":
            with roundpipe_fx.gradient_checkpoint_scope():
                y = layer(x)
        else:
            y = layer(x)
        state = torch.cuda.get_rng_state()
        (found,) = torch.autograd.grad((y * y).sum(), x)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        return found

    assert torch.equal(gradient(wrap), gradient("plain"))


def test_an_asynchronous_optimizer_step_waits_for_the_gradients() -> None:
    """It runs in another thread, whose current stream is not that of the caller's, and neither is its device."""
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256).cuda().bfloat16()
    compiled = roundpipe_fx.compile(model, optim_dtype=torch.float32, stage_compiler="eager")
    optimizer = torch.optim.SGD(compiled.optim_parameters(), 0.1)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    stream = torch.Stream("cuda")
    stream.wait_stream(torch.accelerator.current_stream())
    before = model.weight.clone()
    with stream:
        for _ in range(3):
            compiled(x).float().square().mean().backward()
            compiled.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True)
        compiled.synchronize()
    torch.accelerator.current_stream().wait_stream(stream)
    assert not torch.equal(model.weight, before)


def test_checkpointable_within_its_limit() -> None:
    model = torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
            for _ in range(8)
        )
    ).cuda()
    x = torch.randn(4096, 256, device="cuda")

    def find_peak(run: torch.nn.Module) -> int:
        run.zero_grad(set_to_none=True)
        with roundpipe_fx.measure_peak("cuda") as peak:
            run(x).square().mean().backward()
        return peak.bytes

    find_peak(model)
    limit = find_peak(model) // 2
    assert find_peak(Checkpointable(model, x, mem_limit=limit)) <= limit


@pytest.mark.parametrize("offload_to_cpu", [False, True])
def test_inputs_of_a_checkpoint_wrapper_are_kept_in_host_memory(offload_to_cpu: bool) -> None:
    first, layer = (torch.nn.Linear(64, 64).cuda() for _ in range(2))
    layer = roundpipe_fx.checkpoint_wrapper(layer, offload_to_cpu=offload_to_cpu)
    value = first(torch.randn(8, 64, device="cuda"))
    storage = weakref.ref(value.untyped_storage())
    expected = torch.autograd.grad(torch.nn.functional.linear(value, layer.weight, layer.bias).sum(), layer.weight)
    loss = layer(value).sum()
    del value
    assert (storage() is None) == offload_to_cpu
    loss.backward()
    assert torch.equal(layer.weight.grad, *expected) and first.weight.grad.any()
