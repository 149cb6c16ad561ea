"""Real models: loss and gradients are bitwise equal to ``aot_eager``, or to eager where that copies no heads."""

from __future__ import annotations

import pytest
import torch

from tests import hugging_face
from tests.comparison import assert_bitwise, compiled_step, train_step


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", hugging_face.MODELS)
@pytest.mark.long
def test_bits(name: str, autocast: bool) -> None:
    make, make_batch = hugging_face.MODELS[name]
    model, batch = make(), make_batch()
    reference = hugging_face.reference_step(name, model, batch, autocast)
    for recompute in ("full",) if autocast else ("none", "full"):
        step, compiled = compiled_step(model, batch, autocast=autocast, stages=3, recompute=recompute)
        assert_bitwise(step, reference)
        assert len(compiled.plan.stages) == 3
        again = any(stage.recomputed for stage in compiled.plan.stages)
        assert again == (recompute == "full")


@pytest.mark.long
def test_fp32_mixture_of_experts_trains() -> None:
    """Its custom operator reads data on the host in the backward, so it is compared with eager, not ``aot_eager``."""
    model, batch = hugging_face.qwen3_moe(dtype=torch.float32), hugging_face.language_batch()
    eager = train_step(model, model, batch)
    for recompute in ("none", "full"):
        torch._dynamo.reset()
        step, _ = compiled_step(model, batch, stages=3, recompute=recompute)
        assert_bitwise(step, eager)
