"""Values as long as the sequence besides activations: indices and masks that a plan holds, and sums over all rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import roundpipe_fx
from benchmarks.tiling import LossOnly

LENGTH = 2**18
ROWS = 2**17


@pytest.mark.parametrize("budget", [None, "4GiB"])
@pytest.mark.quick_every(2)
def test_a_plan_keeps_the_labels_once_and_no_other_index_or_mask(budget: str | None) -> None:
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    tokens = torch.empty(1, LENGTH, dtype=torch.long, device="meta")
    plan = roundpipe_fx.plan(
        LossOnly(model), input_ids=tokens, labels=tokens, device="H100", memory_budget=budget, tiling="auto"
    )
    kept = [value for stage in plan.stages for value in (*stage.saved, *stage.hoisted)]
    assert kept
    indices = [value for value in kept if value.type.startswith(("int", "bool", "uint8"))]
    # The labels, shifted by one token.
    assert [value.type for value in indices] in ([], [f"int64[1, {LENGTH + 1}]"])
    live = [value for value in plan.peak.live if value.bytes > 8 * (LENGTH + 512)]
    assert not [value for value in live if "mask" in value.name or "arange" in value.name]


class _Head(nn.Module):
    """The loss of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(16, 512, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.scores(x), labels)


def test_the_loss_of_many_rows_in_tiles_is_as_in_float64() -> None:
    torch.manual_seed(0)
    model, x, labels = _Head(), torch.randn(ROWS, 16), torch.randint(512, (ROWS,))
    labels[::7] = -100
    compiled = roundpipe_fx.compile(model, memory_budget="16MiB", tiling="auto")
    loss = compiled(x, labels)
    loss.backward()
    assert [tiles.type for tiles in compiled.plan.tiles] == [f"float32[{ROWS}, 512]"]
    weight = model.scores.weight.detach().double().requires_grad_()
    counted, total = int((labels != -100).sum()), 0.0
    for rows, of_rows in zip(x.split(ROWS // 16), labels.split(ROWS // 16), strict=True):
        part = F.cross_entropy(rows.double() @ weight.T, of_rows, reduction="sum") / counted
        part.backward()
        total += part.item()
    assert loss.item() == pytest.approx(total, rel=2e-6)
    gradient, expected = model.scores.weight.grad, weight.grad
    assert gradient is not None and expected is not None
    assert (gradient.double() - expected).norm() <= 2e-6 * expected.norm()
