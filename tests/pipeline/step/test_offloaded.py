"""Offloaded models. The host is a device of its own here, so that all but the copies is what runs with an accelerator;
tests/gpu/test_offloaded.py has those."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import roundpipe_fx
from roundpipe_fx.pipeline.step import step
from roundpipe_fx.pipeline.step.local import Local
from roundpipe_fx.pipeline.step.offloaded import Offloaded, make_mode
from roundpipe_fx.runtime.device_streams import HostDeviceStreams
from tests.comparison import Step, assert_bitwise, loss_of
from tests.golden_models import GOLDEN
from tests.pipeline.steps import CPUS, SCHEDULES, Blocks, assert_close, batch_of, left_behind, squares

CPU = torch.device("cpu")


def _trained(name: str, devices: Sequence[str], microbatches: int, **options) -> Step:
    make, make_batch, _ = GOLDEN[name]
    torch.manual_seed(0)
    model = make()
    inputs = {key: torch.cat([value] * microbatches) for key, value in make_batch().items()}
    compiled = roundpipe_fx.compile(model, devices=devices, num_microbatches=microbatches, **options)
    for _ in range(2):
        loss = compiled.forward_backward(**inputs)
    plan = compiled.plan.pipeline
    assert plan is not None and (plan.host_to_device_bytes > 0) == (step.make_mode is not make_mode)
    return left_behind(model, loss)


# Dynamo looks at the values of numbers that lie on the CPU, as batch norm's count of batches, which have none here.
@pytest.mark.parametrize("name", sorted(set(GOLDEN) - {"unet"}))
@pytest.mark.quick_every(3)
def test_it_has_the_bits_of_a_model_on_the_device(name: str, request: pytest.FixtureRequest) -> None:
    options = {"stages": 2, "schedule": "gpipe", "recompute": "full"}
    reference = _trained(name, ["cpu"], 1, **options)
    request.getfixturevalue("on_the_host")
    assert_bitwise(_trained(name, ["cpu"], 1, **options), reference)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.quick_every(6)
def test_microbatches_under_every_schedule(schedule: str, request: pytest.FixtureRequest) -> None:
    reference = _trained("tied_transformer", CPUS, 4, schedule=schedule)
    request.getfixturevalue("on_the_host")
    assert_close(_trained("tied_transformer", CPUS, 4, schedule=schedule), reference)


@pytest.mark.usefixtures("on_the_host")
def test_workers_have_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    present: dict[int, torch.Tensor] = {}
    most = brought = 0

    def exchange(self: HostDeviceStreams, drops: Sequence[torch.Tensor], brings: Sequence[torch.Tensor]) -> None:
        nonlocal most, brought
        for value in drops:
            del present[id(value)]
        for value in brings:
            assert id(value) not in present
            present[id(value)] = value
            brought += value.nbytes
        most = max(most, sum(value.nbytes for value in present.values()))

    monkeypatch.setattr(HostDeviceStreams, "exchange", exchange)
    model = Blocks(32, 8)
    x, y = batch_of(16, 32)
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=2, memory_budget=0.0)
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert not present and brought == compiled.plan.pipeline.host_to_device_bytes
    assert most < sum(parameter.nbytes for parameter in model.parameters()) * 0.6
    assert "the model is on the host: a step copies" in str(compiled.plan)
    assert roundpipe_fx.Plan.from_json(compiled.plan.to_json()).pipeline == compiled.plan.pipeline


@pytest.mark.usefixtures("on_the_host")
def test_stages_begin_where_they_are_asked_to() -> None:
    model = Blocks(8, 6)
    x, y = batch_of(8, 8)
    compiled = roundpipe_fx.compile(
        model, devices=["cpu"], num_microbatches=2, loss_reduction="sum", stages=["layers.2", "layers.4"]
    )
    reference = copy.deepcopy(model)
    squares(reference(x), y).backward()
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    plan = compiled.plan
    assert plan.pipeline.schedule == "roundpipe" and len(plan.stages) == 5  # two ahead, the last one, two back


@pytest.mark.usefixtures("on_the_host")
def test_called_and_differentiated_and_without_autograd() -> None:
    make, make_batch, _ = GOLDEN["encoder_decoder"]
    model, batch = make(), make_batch()
    reference = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=1, loss_reduction="sum", stages=2)
    torch.manual_seed(0)
    loss_of(compiled(**batch)).sum().backward()
    torch.manual_seed(0)
    loss_of(torch.compile(reference, backend="aot_eager")(**batch)).sum().backward()
    assert_bitwise(left_behind(model, torch.zeros(())), left_behind(reference, torch.zeros(())))
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(compiled(**batch)), loss_of(model(**batch)))


class Averaging(nn.Module):
    """Its buffer is updated by every microbatch, from what the one before has made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(0.5).add_(x.mean(0))
        return (self.layer(x) * self.seen).sum()


@pytest.mark.usefixtures("on_the_host")
def test_buffers_are_updated() -> None:
    model = Averaging()
    reference, x = copy.deepcopy(model), torch.randn(6, 4)
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=3, loss_reduction="sum")
    for _ in range(2):
        compiled.forward_backward(x)
        for microbatch in x.chunk(3):
            reference(microbatch).backward()
    assert torch.equal(model.seen, reference.seen)
    torch.testing.assert_close(model.layer.weight.grad, reference.layer.weight.grad)


def test_looking_moved_a_model_has_no_memory_and_comes_back_whole() -> None:
    model = nn.BatchNorm1d(4)
    model.weight.grad = torch.ones(4)
    before, pointers = copy.deepcopy(model.state_dict()), [value.data_ptr() for value in model.state_dict().values()]
    found = Offloaded([CPU])
    found.tensors = {id(value): value for value in (*model.parameters(), *model.buffers())}
    with pytest.raises(KeyError), found.calling({id(model.running_mean)}):
        assert model.weight.untyped_storage().nbytes() == 0 and model.weight.grad is None
        assert model.weight.requires_grad and model.weight.shape == (4,)
        model.running_mean.add_(1)
        raise KeyError
    assert [value.data_ptr() for value in model.state_dict().values()] == pointers
    assert torch.equal(model.weight.grad, torch.ones(4))
    assert torch.equal(model.running_mean, before.pop("running_mean") + 1)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_what_cannot_be_moved_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.BatchNorm1d(4)
    before = copy.deepcopy(model.state_dict())
    found = Offloaded([CPU])
    found.tensors = {id(value): value for value in (*model.parameters(), *model.buffers())}

    resize = torch.UntypedStorage.resize_

    def no_room(storage: torch.UntypedStorage, size: int) -> None:
        if size:
            raise torch.OutOfMemoryError
        resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", no_room)
        with pytest.raises(torch.OutOfMemoryError), found.calling({id(model.running_mean)}):
            pass
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_models_where_their_workers_are_are_not_offloaded() -> None:
    assert not make_mode(Local([CPU]), [nn.Linear(2, 2)]).offloaded
    assert not make_mode(Local([]), [nn.Linear(2, 2)]).offloaded
    cuda, meta = torch.device("cuda", 0), nn.Linear(2, 2, device="meta")
    assert not make_mode(Local([cuda]), [meta]).offloaded
    assert make_mode(Local([cuda]), [nn.Linear(2, 2)]).device == cuda
    with FakeTensorMode(), pytest.raises(ValueError, match=r"lies on 'cuda:0', but devices=\['cpu'\]"):
        make_mode(Local([CPU]), [nn.ParameterList([torch.empty(2, device=cuda)])])
    with pytest.raises(ValueError, match=r"'0.weight' lies on the CPU and '1.weight' does not"):
        make_mode(Local([cuda]), [nn.Sequential(nn.Linear(2, 2), meta)])
