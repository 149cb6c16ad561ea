"""Modules whose forward is checkpointed, as fairscale's ``checkpoint_wrapper`` makes them."""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from torch import nn

from roundpipe_fx import checkpoint_wrapper
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step, train_step
from tests.counting import count_operations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.norm(self.linear(x).tanh()) * scale


class Model(nn.Module):
    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.block = checkpoint_wrapper(Block()) if wrapped else Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, scale=2.0).square().mean()


BATCH = {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(0))}


def test_recomputes_and_updates_running_statistics_once() -> None:
    plain, model = Model(wrapped=False), Model(wrapped=True)
    expected = train_step(plain, plain, BATCH)
    with count_operations() as counts:
        assert_bitwise(train_step(model, model, BATCH), expected)
    assert counts[torch.ops.aten.tanh.default] == 2
    assert model.block.norm.num_batches_tracked == 1


def test_stays_the_users_module() -> None:
    block = checkpoint_wrapper(Block())
    assert isinstance(block, Block) and type(block).__name__ == "Block"
    assert list(block.state_dict()) == list(Block().state_dict())
    assert inspect.signature(block.forward) == inspect.signature(Block().forward)
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    for other in (copy.deepcopy(block), torch.load(file, weights_only=False)):
        with torch.no_grad():
            other.linear.weight.zero_()
        assert type(other) is type(block) and block.linear.weight.any()
        with count_operations() as counts:
            other(BATCH["x"]).sum().backward()
        assert counts[torch.ops.aten.tanh.default] == 2 and block.linear.weight.grad is None


def test_inputs_pass_through_host_memory() -> None:
    plain, model = Model(wrapped=False), Model(wrapped=False)
    checkpoint_wrapper(model.block, offload_to_cpu=True)
    expected = train_step(plain, plain, BATCH)
    assert_bitwise(train_step(model, model, BATCH), expected)  # where the input leaves memory: tests/gpu/test_cuda.py


def test_compiled_it_is_a_recompute_region() -> None:
    reference = aot_eager_step(Model(wrapped=False), BATCH)
    step, compiled = compiled_step(Model(wrapped=True), BATCH)
    assert_bitwise(step, reference)
    _, plain = compiled_step(Model(wrapped=False), BATCH)
    assert compiled.plan.recompute_seconds > plain.plan.recompute_seconds == 0


def test_a_replaced_forward_is_refused() -> None:
    block = Block()
    block.forward = block.linear.forward
    with pytest.raises(ValueError, match="the forward of this Block has been replaced"):
        checkpoint_wrapper(block)
