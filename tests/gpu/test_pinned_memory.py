"""Memory of the host that is registered for an offloaded model: no more than the plan counts, and not for longer than
it is used."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

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
        self.sizes.pop(address, None)  # an earlier test's pages are none of these
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


@pytest.fixture
def registered() -> Iterator[Registered]:
    """A stand-in for CUDA's runtime, while no memory of other tests is there and no logger keeps records."""
    gc.collect()
    made = Registered()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: made)
        logging.disable(logging.CRITICAL)  # records would hold parameters
        yield made
        gc.collect()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_what_is_registered_is_what_the_plan_counts_until_its_last_tensor_is_gone(
    budget: float, registered: Registered
) -> None:
    gradient = _trained(registered, budget)
    torch._dynamo.reset()
    torch.cuda.synchronize()  # pages are kept while a device may read them
    gc.collect()
    assert set(registered.sizes) == {gradient.data_ptr()}
    del gradient
    assert not registered.sizes
