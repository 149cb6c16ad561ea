"""The compiled model as the module that it was: hooks, state, copies, modes."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings

import pytest
import torch

import roundpipe_fx
from tests.golden_models import DropoutMLP, TiedTransformer, UNet
from tests.linear_chain import linear_chain


def test_grad_scaler() -> None:
    model = DropoutMLP()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(torch.randn(4, 8))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_hooks() -> None:
    model = linear_chain()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    x = torch.randn(2, 4)
    plain = compiled(x)
    seen: list[str] = []
    compiled.register_forward_pre_hook(lambda *_: seen.append("pre"))
    compiled.register_forward_hook(lambda *_: seen.append("post"))
    model[1].register_forward_hook(lambda module, args, out: out * 2)
    doubled = compiled(x)
    assert seen == ["pre", "post"]
    assert not torch.equal(doubled, plain) and torch.equal(doubled, model(x))
    model[0].weight.register_hook(lambda grad: grad * 3)
    compiled(x).sum().backward()
    found = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(found, model[0].weight.grad)


def test_full_backward_hook() -> None:
    model = linear_chain()
    seen: list[torch.Size] = []
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0].shape))
    x = torch.randn(2, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        roundpipe_fx.compile(model, stages=2, recompute="full")(x).sum().backward()
    assert seen == [torch.Size([2, 4])]


def test_state_dict_round_trip() -> None:
    model = UNet()
    compiled = roundpipe_fx.compile(model)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in model.parameters()]
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in model.named_parameters()]
    buffer = io.BytesIO()
    torch.save(compiled.state_dict(), buffer)
    buffer.seek(0)
    other = roundpipe_fx.compile(UNet())
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert not torch.equal(other.eval()(x), compiled.eval()(x))
        other.load_state_dict(torch.load(buffer))
        assert torch.equal(other(x), compiled(x))


def test_deepcopy_and_pickle() -> None:
    compiled = roundpipe_fx.compile(DropoutMLP(), stages=2, recompute="full")
    x = torch.randn(4, 8)
    compiled(x).backward()
    for twin in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert not set(map(id, twin.parameters())) & set(map(id, compiled.parameters()))
        for both in (twin, compiled):
            both.zero_grad()
            torch.manual_seed(1)
            both(x).backward()
        for left, right in zip(twin.parameters(), compiled.parameters(), strict=True):
            assert torch.equal(left.grad, right.grad)
        assert len(twin.plan.stages) == 2


def test_modes_devices_and_signature() -> None:
    model = DropoutMLP()
    compiled = roundpipe_fx.compile(model, stages=2)
    x = torch.randn(4, 8)
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert compiled.training and model.training
    assert compiled.eval() is compiled and not model.training and not model.layers[0][2].training
    assert torch.equal(compiled(x), model(x)) and not compiled.train().eval().training
    compiled.double()
    assert model.layers[0][0].weight.dtype is torch.float64 and compiled(x.double()).dtype is torch.float64
    compiled.train()
    assert model.training
    compiled.extra = 3
    assert model.extra == 3 and compiled.extra == 3
    with pytest.raises(AttributeError, match="absent"):
        _ = compiled.absent


def test_trace_runs_nothing() -> None:
    model = UNet()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"model.trace"):
        _ = compiled.plan
    plan = compiled.trace(torch.randn(2, 3, 8, 8))
    assert plan is compiled.plan and len(plan.stages) == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(compiled.plans) == 1
    torch.set_rng_state(state)
    compiled(torch.randn(2, 3, 8, 8))
    assert len(compiled.plans) == 1


def test_optimizer_trains() -> None:
    model = TiedTransformer()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    tokens = torch.randint(16, (4, 6))
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = compiled(tokens, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
