"""Models on the host whose frozen weights are quantized: their parts come one by one, and nothing else is trained."""

from __future__ import annotations

import pytest
import torch

import roundpipe_fx
from roundpipe_fx.pipeline.step.offloaded import tensors_of
from tests.hugging_face import language_batch
from tests.pipeline.quantized import RowScaled, State, blocks, with_adapters
from tests.pipeline.steps import left_behind, squares


def trained(kind: str | None, device: str) -> tuple[list[torch.Tensor], roundpipe_fx.Plan, int]:
    """Loss and gradients of the second step, its plan, and the bytes of the model."""
    model, size = blocks(kind)
    compiled = roundpipe_fx.compile(
        model, devices=[device], num_microbatches=2, stage_compiler="eager", memory_budget=1.0, loss_reduction="sum"
    )
    x, y = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model.zero_grad()
        loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
    gradients = [value.grad for value in model.parameters() if value.requires_grad]
    assert len(gradients) == 8 and all(value.grad is None for value in model.parameters() if not value.requires_grad)
    return [loss, *gradients], compiled.plan, size


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("kind", ["tensor", "state"])
def test_they_have_the_bits_of_weights_that_are_not_and_all_their_parts_are_counted(kind: str) -> None:
    expected, _, _ = trained(None, "cpu")
    found, plan, size = trained(kind, "cpu")
    assert all(map(torch.equal, found, expected))
    assert plan.pipeline.host_weight_bytes == size


def test_parts() -> None:
    integers, scale = torch.ones(2, 3, dtype=torch.int8), torch.ones(2, 1)
    assert [*map(id, tensors_of(RowScaled(integers, scale)))] == [id(integers), id(scale)]
    value = torch.nn.Parameter(integers, requires_grad=False)
    value.quant_state = State(scale, State(torch.ones(1), None))
    parts = [value, scale, value.quant_state.inner.values]
    assert [*map(id, tensors_of(value))] == [*map(id, parts)]


@pytest.mark.long
@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_adapters_of_models_that_libraries_have_quantized(library: str, request: pytest.FixtureRequest) -> None:
    batch = language_batch(2)
    steps = []
    for how in ("aot_eager", "budget", "on the host"):
        torch._dynamo.reset()
        model = with_adapters(library)
        if how == "aot_eager":
            loss = torch.compile(model, backend="aot_eager")(**batch).loss
            loss.backward()
        elif how == "budget":
            compiled = roundpipe_fx.compile(model, memory_budget=0.0, tiling="never")
            loss = compiled(**batch).loss
            loss.backward()
            assert compiled.plan.recompute_seconds > 0
        else:
            request.getfixturevalue("on_the_host")
            compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=1, stages=2, schedule="gpipe")
            loss = compiled.forward_backward(**batch)
        steps.append(left_behind(model, loss))
    trained = [name for name, gradient in steps[0].gradients.items() if gradient is not None]
    assert len(trained) == 2 * 7
    for step in steps[1:]:
        assert torch.equal(step.loss, steps[0].loss)
        assert all(torch.equal(step.gradients[name], steps[0].gradients[name]) for name in trained)
