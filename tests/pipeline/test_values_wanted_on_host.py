"""Values that the user wants on the host: selective policies that offload, and fairscale's ``offload_to_cpu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import roundpipe_fx
from roundpipe_fx.runtime.value_offloading import ValueOffloading
from tests.comparison import Step, assert_bitwise
from tests.compat.checkpointing.models import BATCH, WIDTH, Checkpointed, Model, Selective, Wrapped
from tests.pipeline.steps import left_behind

pytestmark = pytest.mark.usefixtures("on_the_host")

ROWS = 16  # of a microbatch


def _stepped(model: Model, **options: Any) -> tuple[Step, roundpipe_fx.Plan]:
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=4, stages=4, **options)
    torch.manual_seed(0)
    return left_behind(model, compiled.forward_backward(**BATCH)), compiled.plan


def _sizes(plan: roundpipe_fx.Plan) -> set[int]:
    return {size for own in plan.timing.offloads for _, size in own.values}


@pytest.mark.long
@pytest.mark.skipif(not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="of a later version of PyTorch")
def test_policies_that_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, plan = _stepped(Model(plain=True))
    assert not plan.timing.offloads
    for name in ("MUST_SAVE", "PREFER_CPU_OFFLOAD"):
        monkeypatch.setattr(Selective, "named", getattr(CheckpointPolicy, name))
        found, plan = _stepped(Selective())
        assert_bitwise(found, reference)
        assert not plan.timing.offloads  # there is room
    monkeypatch.setattr(Selective, "named", CheckpointPolicy.MUST_CPU_OFFLOAD)
    left: list[int] = []
    leave = ValueOffloading.leave

    def seen(self: ValueOffloading, place: int) -> None:
        left.extend(size for own in self._at(place).leaves for _, size in own.values)
        leave(self, place)

    monkeypatch.setattr(ValueOffloading, "leave", seen)
    for options in ({"recompute": "full"}, {"memory_budget": 1.0}, {"memory_budget": 0.0}):
        left.clear()
        found, plan = _stepped(Selective(), **options)
        assert_bitwise(found, reference)
        sent = [size for own in plan.timing.offloads for _, size in own.values]
        # The first linear layer's result of every layer but the last, whose backward follows at once.
        assert sorted(left) == sorted(sent) and sent.count(4 * ROWS * 2 * WIDTH) >= 3 * 4, options
        assert options.get("memory_budget") == 0.0 or _sizes(plan) == {4 * ROWS * 2 * WIDTH}
        text = plan.explain("addmm")
        assert "its checkpoint's policy must offload it" in text and "host" in text
    assert plan.pipeline.host_value_bytes > 0


def test_inputs_of_wrapped_modules() -> None:
    reference, _ = _stepped(Model(plain=True))
    found, plan = _stepped(Checkpointed())
    assert_bitwise(found, reference)
    assert not plan.timing.offloads
    found, plan = _stepped(Wrapped())
    assert_bitwise(found, reference)
    # Of the four layers, the first is wrapped without it, and the last one's backward follows at once.
    assert _sizes(plan) == {4 * ROWS * WIDTH} and len(plan.timing.offloads) == 2 * 4
