"""Models that lie on the host while CUDA devices train them: same bits, and a stage's tensors only while it runs."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from collections import Counter

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.runtime.value_offloading import ValueOffloading
from roundpipe_fx.torch_private import dynamo_flags
from tests import hugging_face
from tests.comparison import Step, assert_bitwise, loss_of
from tests.golden_models import GOLDEN, TiedTransformer
from tests.long import long_but
from tests.pipeline.steps import SCHEDULES, Blocks, assert_close, left_behind, squares
from tests.pipeline.test_buffer_versions import Halved

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]


def _devices() -> list[list[str]]:
    return [["cuda:0"], *([["cuda:0", "cuda:1"]] if torch.cuda.device_count() > 1 else [])]


def _on_host(step: Step) -> Step:
    return Step(*(_moved(own) for own in vars(step).values()))


def _moved(value):
    if isinstance(value, dict):
        return {name: _moved(own) for name, own in value.items()}
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _steps(name: str, devices: list[str], microbatches: int, **options) -> tuple[Step, Step]:
    """What two training steps leave behind: with the model on the device, and on the host."""
    make, make_batch, _ = GOLDEN[name]
    model = make()
    inputs = {key: torch.cat([value] * microbatches) for key, value in make_batch().items()}
    steps = []
    for place in ("cuda", "cpu"):
        own = copy.deepcopy(model).to(place)
        compiled = roundpipe_fx.compile(
            own, devices=devices, num_microbatches=microbatches, stage_compiler="eager", **options
        )
        torch.manual_seed(0)
        for _ in range(2):
            loss = compiled.forward_backward(**{key: value.to(place) for key, value in inputs.items()})
        step = left_behind(own, loss)
        assert all(value.device.type == place for value in (loss, *step.gradients.values(), *own.parameters()))
        steps.append(_on_host(step))
    return steps[0], steps[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_what_others_send_to_a_worker_that_failed_overwrites_nothing_that_it_still_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are told of the failure later. On emulated devices a race would be reported."""
    torch.manual_seed(0)
    model, x = Blocks(32, 8), torch.randn(768, 32)
    devices = ["cuda:1", "cuda:0", "cuda:1"]
    compiled = roundpipe_fx.compile(
        model, devices=devices, num_microbatches=3, schedule="1f1b", stage_compiler="eager", dynamic=False
    )

    def step() -> Step:
        compiled.zero_grad()
        loss = squares(compiled(x), x)
        loss.backward()
        return left_behind(model, loss)

    step()
    expected = step()
    reload, left = ValueOffloading.reload, [0]

    def failing(self: ValueOffloading, place: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError("a device was lost")
        reload(self, place)

    for actions in range(1, 21):
        left[0] = actions
        with monkeypatch.context() as patched:
            patched.setattr(ValueOffloading, "reload", failing)
            with pytest.raises(OSError, match="a device was lost"):
                step()
        assert_bitwise(step(), expected)


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_it_has_the_bits_of_a_model_on_the_device(name: str) -> None:
    for devices in _devices():
        for recompute in ("none", "full"):
            assert_bitwise(*_steps(name, devices, 1, recompute=recompute))


@pytest.mark.parametrize("schedule", long_but(SCHEDULES, quick={"1f1b", "zbv", "roundpipe"}))
@pytest.mark.parametrize("name", ["tied_transformer", "unet"])
def test_microbatches_under_every_schedule(name: str, schedule: str) -> None:
    for devices in _devices():
        assert_close(*_steps(name, devices, 4, schedule=schedule))


@pytest.mark.parametrize("name", ["dropout_mlp", "unet", "encoder_decoder"])
def test_the_model_called_and_its_outputs_differentiated(name: str) -> None:
    make, make_batch, _ = GOLDEN[name]
    model, batch = make(), make_batch()
    for devices in _devices():
        steps = []
        for place in ("cuda", "cpu"):
            own = copy.deepcopy(model).to(place)
            compiled = roundpipe_fx.compile(
                own, devices=devices, num_microbatches=1, stage_compiler="eager", recompute="full"
            )
            torch.manual_seed(0)
            loss = loss_of(compiled(**{key: value.to(place) for key, value in batch.items()})).sum()
            assert loss.device.type == place
            loss.backward()
            own.eval()
            with torch.no_grad():
                evaluated = loss_of(compiled(**{key: value.to(place) for key, value in batch.items()}))
            steps.append((_on_host(left_behind(own, loss)), evaluated.cpu()))
        assert_bitwise(steps[0][0], steps[1][0])
        assert torch.equal(steps[0][1], steps[1][1])


@pytest.mark.parametrize("budget", long_but([0.0, 0.5, 1.0, "24MiB", "13MiB"], quick={0.0, "24MiB"}))
def test_a_budget_counts_weights_and_gradients_that_come_and_go(budget: float | str) -> None:
    tokens = torch.randint(512, (8, 64))
    for devices in _devices():
        model = TiedTransformer(width=256, depth=8, vocabulary=512)
        everything = 2 * sum(parameter.nbytes for parameter in model.parameters())
        compiled = roundpipe_fx.compile(
            model, devices=devices, num_microbatches=4, stage_compiler="eager", memory_budget=budget, tiling="never"
        )
        compiled.forward_backward(tokens=tokens, targets=tokens)
        gc.collect()  # what earlier tests have left is freed now, and not during a step
        before = [torch.cuda.memory_allocated(device) for device in devices]
        for _ in range(3):
            model.zero_grad()
            with contextlib.ExitStack() as stack:
                peaks = [stack.enter_context(roundpipe_fx.measure_peak(device)) for device in devices]
                compiled.forward_backward(tokens=tokens, targets=tokens)
            gc.collect()
            assert [torch.cuda.memory_allocated(device) for device in devices] == before
        planned = compiled.plan.pipeline.peak_bytes
        assert all(0 < peak.bytes <= own for peak, own in zip(peaks, planned, strict=True))
        assert max(planned) <= compiled.plan.budget
        assert len(devices) > 1 or planned[0] <= 1.03 * peaks[0].bytes
        assert budget not in (0.0, "13MiB") or max(planned) < 0.4 * everything


def test_values_leave_for_the_host_and_come_back_with_the_same_bits_within_the_plan() -> None:
    torch.manual_seed(0)
    model, x, y = Blocks(64, 8, dropout=0.1), torch.randn(4096, 64), torch.randn(4096, 64)
    for devices in _devices():
        steps, sent, beyond = [], [], []
        for budget in (1.0, 0.2, 0.0):
            own = copy.deepcopy(model)
            compiled = roundpipe_fx.compile(
                own, devices=devices, num_microbatches=8, stage_compiler="eager", memory_budget=budget, tiling="never"
            )
            for _ in range(3):
                own.zero_grad()
                torch.manual_seed(0)
                with contextlib.ExitStack() as stack:
                    peaks = [stack.enter_context(roundpipe_fx.measure_peak(device)) for device in devices]
                    loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
            planned = compiled.plan.pipeline.peak_bytes
            assert all(0 < peak.bytes <= size for peak, size in zip(peaks, planned, strict=True))
            beyond.append(planned[0] - peaks[0].bytes)  # workspaces that are planned for
            steps.append(left_behind(own, loss))
            sent.append(compiled.plan.pipeline.sent_bytes)
        assert sent[0] == 0
        assert len(devices) > 1 or (sent[1] > 0 and max(beyond) <= beyond[0] + 2**16)
        for found in steps[1:]:
            assert_bitwise(found, steps[0])


@pytest.mark.parametrize("name", ["gpt2", "vit", "resnet"])
def test_hugging_face_models_have_the_bits_of_aot_eager_within_the_plan(name: str) -> None:
    """Gradients of the ViT's patches are a slice: a bias's gradient has other bits if it is sent in another layout."""
    make = {"gpt2": hugging_face.gpt2, "vit": hugging_face.vit, "resnet": hugging_face.resnet}[name]
    batch = hugging_face.language_batch() if name == "gpt2" else hugging_face.image_batch()
    model = make()
    reference = copy.deepcopy(model).cuda()
    torch.manual_seed(0)
    with dynamo_flags():
        loss = torch.compile(reference, backend="aot_eager")(**{key: own.cuda() for key, own in batch.items()}).loss
        loss.backward()
    for devices in _devices():
        own = copy.deepcopy(model)
        compiled = roundpipe_fx.compile(
            own, devices=devices, num_microbatches=1, stage_compiler="eager", memory_budget=0.0
        )
        torch.manual_seed(0)
        found = left_behind(own, compiled.forward_backward(**batch))
        assert_bitwise(found, _on_host(left_behind(reference, loss)))
        for _ in range(3):
            own.zero_grad()
            with contextlib.ExitStack() as stack:
                peaks = [stack.enter_context(roundpipe_fx.measure_peak(device)) for device in devices]
                compiled.forward_backward(**batch)
            planned = compiled.plan.pipeline.peak_bytes
            assert all(0 < peak.bytes <= size for peak, size in zip(peaks, planned, strict=True)), (peaks, planned)


def test_it_may_be_moved_between_steps() -> None:
    torch.manual_seed(0)
    model, moving = Blocks(width=32), Blocks(width=32)
    moving.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 32), torch.randn(8, 32)
    options = {"devices": ["cuda:0"], "num_microbatches": 2, "stage_compiler": "eager", "checkpoint": "always"}
    here, there = roundpipe_fx.compile(model, **options), roundpipe_fx.compile(moving, **options)
    for place in ("cuda", "cpu", "cuda"):
        moving.to(place)
        there.forward_backward(x.to(place), labels=y.to(place), loss_fn=squares)
        here.forward_backward(x, labels=y, loss_fn=squares)
        assert_close(_on_host(left_behind(moving, torch.zeros(()))), left_behind(model, torch.zeros(())))


def test_training_with_an_optimizer_frozen_parameters_and_hooks() -> None:
    torch.manual_seed(0)
    model = Blocks(width=32)
    next(model.parameters()).requires_grad_(False)
    reference = copy.deepcopy(model).cuda()
    x, y = torch.randn(8, 32), torch.randn(8, 32)
    seen: list[torch.device] = []
    last = [*model.parameters()][-1]
    last.register_hook(lambda gradient: seen.append(gradient.device))
    names = [name for name, _ in model.named_parameters()]
    models = []
    for own, place in ((model, "cpu"), (reference, "cuda")):
        compiled = roundpipe_fx.compile(
            own,
            devices=["cuda:0"],
            num_microbatches=2,
            loss_reduction="sum",
            stages=2,
            schedule="gpipe",
            stage_compiler="eager",
        )
        optimizer = torch.optim.AdamW([p for p in own.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            compiled.forward_backward(x.to(place), labels=y.to(place), loss_fn=squares)
            optimizer.step()
        models.append(own)
    assert seen == [torch.device("cpu")] * 3 and [name for name, _ in model.named_parameters()] == names
    assert next(model.parameters()).grad is None
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(own, other.cpu())


class _Weighted(nn.Module):
    """A loss with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(0, 1, 32))

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return ((output - label).square() * self.weight).sum()


def test_a_loss_module_comes_along_and_inputs_may_require_grad() -> None:
    torch.manual_seed(0)
    model, x, y = Blocks(width=32), torch.randn(8, 32), torch.randn(8, 32)
    steps = []
    for place in ("cuda", "cpu"):
        own, given = copy.deepcopy(model).to(place), x.clone().to(place).requires_grad_()
        compiled = roundpipe_fx.compile(
            own, devices=["cuda:0"], num_microbatches=2, loss_reduction="sum", stage_compiler="eager", stages=3
        )
        loss, outputs = compiled.forward_backward(
            given, labels=y.to(place), loss_fn=_Weighted().to(place), return_outputs=True
        )
        assert outputs.device.type == given.grad.device.type == place
        steps.append((_on_host(left_behind(own, loss)), given.grad.cpu(), outputs.cpu()))
    assert_close(steps[0][0], steps[1][0])
    torch.testing.assert_close(steps[0][1:], steps[1][1:])


def test_deferred_batch_norm() -> None:
    make, make_batch, _ = GOLDEN["unet"]
    model, batch = make(), {name: torch.cat([value] * 2) for name, value in make_batch().items()}
    for devices in _devices():
        steps = []
        for place in ("cuda", "cpu"):
            own = copy.deepcopy(model).to(place)
            compiled = roundpipe_fx.compile(
                own,
                devices=devices,
                num_microbatches=2,
                loss_reduction="sum",
                stage_compiler="eager",
                deferred_batch_norm=True,
            )
            loss = compiled.forward_backward(**{name: value.to(place) for name, value in batch.items()})
            steps.append(_on_host(left_behind(own, loss)))
        assert_close(*steps)
        for name, value in steps[0].buffers.items():
            torch.testing.assert_close(steps[1].buffers[name], value)


def test_parameters_that_the_forward_updates() -> None:
    torch.manual_seed(0)
    initial, x = Halved(), torch.randn(6, 8)
    for devices in _devices():
        for step in (lambda compiled, x: compiled.forward_backward(x), lambda compiled, x: compiled(x).backward()):
            model, there = copy.deepcopy(initial), copy.deepcopy(initial).cuda()
            for own in (model, there):
                compiled = roundpipe_fx.compile(
                    own, devices=devices, num_microbatches=3, loss_reduction="sum", stages=2, stage_compiler="eager"
                )
                step(compiled, x.to(next(own.parameters()).device))
            for own, other in zip(model.parameters(), there.parameters(), strict=True):
                torch.testing.assert_close(own, other.cpu())
                torch.testing.assert_close(own.grad, other.grad.cpu())


@torch.library.custom_op("roundpipe_fx_tests::stumble", mutates_args=())
def stumble(x: torch.Tensor) -> torch.Tensor:
    if _stumbles:
        raise RuntimeError("stumbled")
    return x.clone()


stumble.register_fake(torch.empty_like)
stumble.register_autograd(lambda ctx, gradient: gradient)
_stumbles: list[bool] = []


class Stumbling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(stumble(torch.relu(self.first(x)))).sum()


def test_a_failing_step_leaves_the_model_where_it_is_and_the_next_one_works() -> None:
    model = Stumbling()
    before, x = copy.deepcopy(model.state_dict()), torch.randn(4, 8)
    compiled = roundpipe_fx.compile(model, devices=["cuda:0"], num_microbatches=1, stage_compiler="eager", stages=2)
    compiled.trace(x, loss_fn=torch.clone)
    _stumbles.append(True)
    try:
        with pytest.raises(RuntimeError, match="stumbled"):
            compiled.forward_backward(x, loss_fn=torch.clone)
    finally:
        _stumbles.clear()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())
    compiled.forward_backward(x, loss_fn=torch.clone)
    reference = copy.deepcopy(model)
    reference.zero_grad()
    reference(x).backward()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize(
    ("name", "dtype", "synchronize"),
    [("tied_transformer", None, False), ("unet", torch.float64, True), ("encoder_decoder", torch.float64, False)],
)
def test_an_optimizer_on_the_host_within_the_step(name: str, dtype: torch.dtype | None, synchronize: bool) -> None:
    make, make_batch, _ = GOLDEN[name]
    torch.manual_seed(0)
    model = make()
    batch = {key: torch.cat([value] * 2) for key, value in make_batch().items()}
    for devices in _devices():
        trained = []
        for within in (True, False):
            own = copy.deepcopy(model)
            compiled = roundpipe_fx.compile(
                own, devices=devices, num_microbatches=2, stage_compiler="eager", optim_dtype=dtype
            )
            optimizer = torch.optim.AdamW(compiled.optim_parameters(), 0.01, fused=dtype is None)
            torch.manual_seed(0)
            for _ in range(4):
                if within:
                    compiled.forward_backward(**batch, optimizer=optimizer, synchronize=synchronize)
                else:
                    compiled.forward_backward(**batch)
                    compiled.step(optimizer)
            compiled.synchronize()
            trained.append([*own.parameters(), *compiled.optim_parameters()])
        for left, right in zip(*trained, strict=True):
            assert torch.equal(left, right) and left.grad is right.grad is None


def test_the_host_waits_for_the_inputs_and_at_the_end_of_a_step() -> None:
    emulated = sys.modules.get("tests.emulated_cuda.cuda_module")
    if emulated is None:
        pytest.skip("only emulated devices tell what the host has waited for")
    for devices in _devices():
        for microbatches in (2, 6):
            compiled = roundpipe_fx.compile(
                Blocks(32, 3), devices=devices, num_microbatches=microbatches, stage_compiler="eager", memory_budget=0.0
            )
            x, y = torch.randn(2, 192, 32)
            compiled.forward_backward(x, labels=y, loss_fn=squares)
            assert compiled.plan.pipeline.sent_values > 0
            emulated.device.synchronizations()
            compiled.forward_backward(x, labels=y, loss_fn=squares)
            waits = Counter(emulated.device.synchronizations())
            # For copies of the first step's gradients that the caller may have begun; counted for each stream.
            assert waits.pop("a device is synchronized") > 0
            ends = {"a stream is synchronized": 2 * len(devices), "copy to the host": 1}  # copies of each way, the loss
            assert waits == {"copy to the device": 2, **ends}


def test_half_of_a_model_elsewhere_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1).cuda())
    compiled = roundpipe_fx.compile(model, devices=["cuda:0"], num_microbatches=1)
    with pytest.raises(ValueError, match=r"'0.weight' lies on the CPU and '1.weight' does not"):
        compiled.forward_backward(torch.randn(4, 8), loss_fn=torch.sum)


def test_no_room_is_an_error_before_anything_runs() -> None:
    model = Blocks(width=64)
    compiled = roundpipe_fx.compile(model, devices=["cuda:0"], num_microbatches=2, memory_budget=40_000)
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as raised:
        compiled.forward_backward(torch.randn(8, 64), labels=torch.randn(8, 64), loss_fn=squares)
    assert raised.value.minimum > 40_000
    assert all(parameter.device.type == "cpu" and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("what", ["weights in pinned memory", "gradients that leave the device"])
def test_a_host_without_memory_to_be_pinned_is_told_of_and_the_next_step_works(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Blocks(64, 4)
    x, y = torch.randn(2, 8, 64)
    own, reference = copy.deepcopy(model), copy.deepcopy(model)
    compiled, other = (
        roundpipe_fx.compile(each, devices=["cuda:0"], num_microbatches=2, stage_compiler="eager")
        for each in (own, reference)
    )
    expected = other.forward_backward(x, labels=y, loss_fn=squares)
    cudart, calls = torch.cuda.cudart(), []
    fails_at = 3 if what.startswith("weights") else len([*own.parameters()]) + 3

    class OutOfMemory:
        def __getattr__(self, name: str) -> object:
            return getattr(cudart, name)

        def cudaHostRegister(self, *arguments: int) -> object:
            calls.append(None)
            return cudart.cudaError(2) if len(calls) == fails_at else cudart.cudaHostRegister(*arguments)

    monkeypatch.setattr(torch.cuda, "cudart", OutOfMemory)
    with pytest.raises(roundpipe_fx.HostMemoryError, match=what):
        compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert all(parameter.grad is None for parameter in own.parameters())
    assert all(map(torch.equal, own.parameters(), model.parameters()))
    assert torch.equal(compiled.forward_backward(x, labels=y, loss_fn=squares), expected)
    for left, right in zip(own.parameters(), reference.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
