"""Memory of the host that is registered for an offloaded model: no more than the plan counts, and not for longer than
it is used."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

import roundpipe_fx
from tests.pipeline.steps import Blocks, squares

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Registered:
    """CUDA's runtime, which notes what is registered."""

    def __init__(self) -> None:
        self.cudart = torch.cuda.cudart()
        self.sizes: dict[int, int] = {}
        self.calls = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.cudart, name)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> object:
        self.calls += 1
        self.sizes[address] = size
        return self.cudart.cudaHostRegister(address, size, flags)

    def cudaHostUnregister(self, address: int) -> object:
        del self.sizes[address]
        return self.cudart.cudaHostUnregister(address)


def _trained(registered: Registered, budget: float) -> torch.Tensor:
    """The gradient of a weight of a model that is gone."""
    model = Blocks(36, 6)  # a weight of 10,368 bytes takes three pages; a power of two would be four
    x, y = torch.randn(2, 1024, 36)
    compiled = roundpipe_fx.compile(
        model,
        devices=["cuda:0"],
        num_microbatches=4,
        loss_reduction="sum",
        memory_budget=budget,
        stage_compiler="eager",
    )
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    calls = registered.calls
    for _ in range(2):
        model.zero_grad()
        compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert registered.calls == calls  # a second step has what it needs
    assert (compiled.plan.pipeline.sent_values > 0) == (budget == 0.0)
    assert sum(registered.sizes.values()) == compiled.plan.host_bytes
    assert all(parameter.data_ptr() in registered.sizes for parameter in model.parameters())
    return model.layers[0][0].weight.grad


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_what_is_registered_is_what_the_plan_counts_until_its_last_tensor_is_gone(
    budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = Registered()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: registered)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # records would hold parameters
    gradient = _trained(registered, budget)
    torch._dynamo.reset()
    gc.collect()
    assert set(registered.sizes) == {gradient.data_ptr()}
    del gradient
    assert not registered.sizes
