"""Loss heads in tiles of their words beside tiles of rows: the least bytes of a step, and its modelled seconds there.

python -m benchmarks.tiling_vocabulary

The last linear layer and the loss of public models, in bfloat16 with float32 logits, trained; planned for an H100 that
need not be present. The gradient of the weight exists when a step ends, and no plan is below that.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from benchmarks.side_by_side import fresh, rates_of, report
from roundpipe_fx.planner import region_classes

_DEVICE = "H100"
_HEADS = {
    "Llama 3.2 1B": (2048, 128_256),
    "Llama 3.1 8B": (4096, 128_256),
    "Gemma 2 2B": (2304, 256_000),
    "Qwen3 0.6B": (1024, 151_936),
}
"""Width and number of words."""
_ROWS = (128, 2048, 16_384)


class Head(nn.Module):
    """What a language model ends with."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(hidden)).float(), labels)


def main() -> None:
    rows = [planned(name, count) for name, count in fresh([(name, count) for name in _HEADS for count in _ROWS])]
    report("tiling_vocabulary", f"the least memory of loss heads, planned for one {_DEVICE}", rows, rates_of(_DEVICE))


def planned(name: str, count: int) -> dict[str, Any]:
    """One head with so many rows."""
    width, words = _HEADS[name]
    with torch.device("meta"):
        model = Head(width, words).bfloat16()
        hidden = torch.empty(count, width, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(count, dtype=torch.int64)
    batch = {"hidden": hidden, "labels": labels}
    with mock.patch.object(region_classes, "find_vocabulary_regions", lambda *_: []):
        by_rows, seconds_by_rows = at_least(model, batch)
    by_words, seconds_by_words = at_least(model, batch)
    return {
        "head": name,
        "rows": count,
        "gradient MB": round(model.head.weight.nbytes / 1e6, 1),
        "logits MB": round(count * words * 4 / 1e6, 1),
        "tiles of rows MB": round(by_rows / 1e6, 1),
        "and of words MB": round(by_words / 1e6, 1),
        "ratio": round(by_words / by_rows, 3),
        "tiles of rows ms": round(seconds_by_rows * 1e3, 2),
        "and of words ms": round(seconds_by_words * 1e3, 2),
    }


def at_least(model: nn.Module, batch: dict[str, Any]) -> tuple[int, float]:
    """The least budget that can be met, in bytes, and modelled seconds of the step there."""
    torch._dynamo.reset()
    try:
        plan = roundpipe_fx.plan(model, **batch, device=_DEVICE, host_budget=0, memory_budget=1)
    except roundpipe_fx.InfeasibleBudgetError as error:
        torch._dynamo.reset()
        plan = roundpipe_fx.plan(model, **batch, device=_DEVICE, host_budget=0, memory_budget=error.minimum)
    assert plan.budget is not None
    stages = plan.stages
    seconds = sum(one.forward_seconds + one.recompute_seconds + one.backward_seconds for one in stages)
    return plan.budget, seconds


if __name__ == "__main__":
    main()
