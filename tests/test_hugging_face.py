"""Real models: loss and gradients have the bits of ``aot_eager``."""

from __future__ import annotations

import pytest
import torch

from tests import hugging_face
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", hugging_face.MODELS)
def test_bitwise_as_aot_eager(name: str, autocast: bool) -> None:
    make, make_batch = hugging_face.MODELS[name]
    torch.manual_seed(0)
    model, batch = make(), make_batch()
    reference = aot_eager_step(model, batch, autocast=autocast)
    for recompute in ("none", "full"):
        step, compiled = compiled_step(model, batch, autocast=autocast, stages=3, recompute=recompute)
        assert_bitwise(step, reference)
        assert len(compiled.plan.stages) == 3
        again = any(stage.recomputed for stage in compiled.plan.stages)
        assert again == (recompute == "full")
