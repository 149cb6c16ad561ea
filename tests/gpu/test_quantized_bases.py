"""Models on the host with quantized weights, trained by a CUDA device: those of tests, and of two libraries where they
are installed."""

from __future__ import annotations

import pytest
import torch

import roundpipe_fx
from tests.hugging_face import language_batch
from tests.pipeline.quantized import with_adapters
from tests.pipeline.test_quantized_bases import trained

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]


@pytest.mark.parametrize("kind", ["tensor", "state"])
def test_they_have_the_bits_of_weights_that_are_not(kind: str) -> None:
    expected, _, _ = trained(None, "cuda:0")
    found, plan, _ = trained(kind, "cuda:0")
    assert all(map(torch.equal, found, expected))
    assert plan.pipeline.host_to_device_bytes > 0


@pytest.mark.parametrize("library", ["torchao", pytest.param("bitsandbytes", marks=pytest.mark.hardware)])
def test_adapters_of_quantized_models(library: str) -> None:
    batch = language_batch(4)
    made = []
    for place in ("cuda", "cpu"):
        own = with_adapters(library).to(place)
        compiled = roundpipe_fx.compile(
            own, devices=["cuda:0"] if place == "cpu" else None, num_microbatches=2, stages=2, stage_compiler="eager"
        )
        for _ in range(2):
            own.zero_grad()
            loss = compiled.forward_backward(**{name: value.to(place) for name, value in batch.items()})
        made.append([loss.cpu(), *(value.grad.cpu() for value in own.parameters() if value.requires_grad)])
    assert len(made[0]) == 1 + 2 * 7
    assert all(map(torch.equal, *made))
