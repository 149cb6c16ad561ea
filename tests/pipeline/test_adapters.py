"""Adapters (LoRA) of a model on the host whose own weights are frozen: in bfloat16, and quantized to 8 bits."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from tests.comparison import assert_bitwise
from tests.hugging_face import language_batch, llama
from tests.pipeline.steps import left_behind


class Linear8bit(nn.Linear):
    """A linear layer with a scale for each row of its weight, as integers of 8 bits."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__(of.in_features, of.out_features, bias=False, device="meta")
        scale = of.weight.detach().float().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((of.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


def _with_adapters(quantized: bool) -> nn.Module:
    model = llama(layers=1).bfloat16()
    for name, layer in list(model.named_modules()):
        if quantized and isinstance(layer, nn.Linear) and name != "lm_head":
            model.set_submodule(name, Linear8bit(layer))
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("quantized", [False, True])
def test_adapters_are_trained_and_nothing_else_is(
    quantized: bool, microbatches: int, request: pytest.FixtureRequest
) -> None:
    model = _with_adapters(quantized)
    frozen = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert len(trained) == 2 * 7
    assert sum(value.dtype is torch.int8 for value in frozen.values()) == (7 if quantized else 0)
    batch = language_batch(4)
    steps: list[Any] = []
    for offloaded in (False, True):
        if offloaded:
            request.getfixturevalue("on_the_host")
        own = copy.deepcopy(model)
        compiled = roundpipe_fx.compile(
            own, devices=["cpu"], num_microbatches=microbatches, stages=2, schedule="gpipe", optim_dtype=torch.float32
        )
        optimizer = torch.optim.AdamW(compiled.optim_parameters(), 0.1)
        loss = compiled.forward_backward(**batch)
        steps.append(left_behind(own, loss))
        compiled.step(optimizer)
        losses = [compiled.forward_backward(**batch, optimizer=optimizer) for _ in range(2)]
        assert losses[1] < loss
    if microbatches == 1:
        assert_bitwise(*steps)
    # A product that is added to a sum is rounded once or twice, as the processor's kernels do it.
    for name, gradient in steps[0].gradients.items():
        if gradient is not None:
            difference = (gradient - steps[1].gradients[name]).abs().max()
            assert difference <= 4 * torch.finfo(torch.float32).eps * gradient.abs().max(), name
    assert steps[1].gradients.keys() >= trained.keys()
    assert {name for name, gradient in steps[1].gradients.items() if gradient is not None} == trained.keys()
    plan = compiled.plan.pipeline
    # No other gradients leave the device; these do after each microbatch.
    assert plan.host_gradient_bytes == microbatches * sum(value.nbytes for value in trained.values())
    assert plan.host_optimizer_bytes >= 3 * 4 * sum(value.numel() for value in trained.values())
    for name, value in own.named_parameters():
        assert torch.equal(value, frozen.get(name, trained.get(name))) == (name in frozen), name
