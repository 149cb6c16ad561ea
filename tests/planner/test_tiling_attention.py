"""Steps whose attention is carried out in tiles of its heads."""

from __future__ import annotations

import pytest
import torch
import transformers

import roundpipe_fx
from benchmarks.tiling import LossOnly
from roundpipe_fx.analysis.tiling.region_kind import DIGITS, NARROW
from roundpipe_fx.planner import region_classes
from tests.long import long_but
from tests.passes.test_attention_tiles import ROWS, SHAPES, WIDTH, Layers
from tests.planner.tiled import check

LENGTH = 2**16
HEADS, KEYS = 8, 2


@pytest.mark.parametrize("compiler", long_but(["eager", "inductor"], quick=["eager"]))
@pytest.mark.long
def test_steps_at_decreasing_budgets(compiler: str) -> None:
    shape = SHAPES["adapters"]
    torch.manual_seed(0)
    model = Layers(shape).double()
    x = 0.5 * torch.randn(shape.batch, ROWS, shape.queries * WIDTH, dtype=torch.float64)
    check(model, {"x": x}, stage_compiler=compiler)


@pytest.mark.long
def test_a_long_sequence_needs_the_workspace_of_few_heads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of all heads holds their gradient of queries in float32, beside what it reads and returns."""
    config = transformers.LlamaConfig(
        hidden_size=64 * HEADS,
        intermediate_size=256 * HEADS,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        vocab_size=1024,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()

    tokens = torch.empty(1, LENGTH, dtype=torch.long, device="meta")

    def planned(budget: int) -> roundpipe_fx.Plan:
        batch = {"input_ids": tokens, "labels": tokens}
        return roundpipe_fx.plan(LossOnly(model), **batch, device="H100", memory_budget=budget)

    def least() -> roundpipe_fx.InfeasibleBudgetError:
        with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
            planned(1)
        return refused.value

    in_tiles = least()
    with monkeypatch.context() as patched:
        patched.setattr(region_classes, "KINDS", (NARROW, DIGITS))
        whole = least()
    assert "workspace of _scaled_dot_product" in str(whole)
    hidden, saved = 2 * LENGTH * 64 * HEADS, whole.minimum - in_tiles.minimum
    assert saved > hidden, f"{saved / hidden:.2f} hidden states fewer"
    heads = f"bfloat16[1, {HEADS}, {LENGTH}, 64]"
    assert heads in [tiles.type for tiles in planned(in_tiles.minimum).tiles]
