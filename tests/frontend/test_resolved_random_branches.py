"""Layer drop with a probability of zero: one graph, and what is drawn for it is drawn."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import roundpipe_fx
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step, train_step
from tests.golden_models import LayerDrop
from tests.hugging_face import VOCABULARY, language_batch

WAYS: dict[str, dict[str, Any]] = {
    "none": {"stages": 2, "recompute": "none"},
    "full": {"stages": 2, "recompute": "full"},
    "budget": {"memory_budget": 0.0},
    "pipeline": {"stages": 2, "devices": ["cpu"], "num_microbatches": 1, "schedule": "1f1b"},
}


@pytest.mark.parametrize("way", WAYS)
def test_it_draws_as_eager_does(way: str) -> None:
    model, batch = LayerDrop(), {"x": torch.randn(4, 8)}
    eager = copy.deepcopy(model)
    expected = train_step(eager, eager, batch)
    state = torch.get_rng_state()
    step, _ = compiled_step(model, batch, **WAYS[way])
    assert_bitwise(step, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert_bitwise(step, aot_eager_step(model, batch))


@pytest.mark.parametrize(
    ("compare", "keeps", "probability", "is_known"),
    [
        (lambda number, p: number < p, False, -0.5, True),
        (lambda number, p: number <= p, False, -0.5, True),
        (lambda number, p: number <= p, False, 0.0, False),
        (lambda number, p: p > number, False, 0.0, True),
        (lambda number, p: p >= number, False, 0.0, False),
        (lambda number, p: number >= p, True, 0, True),
        (lambda number, p: number > p, True, 0.0, False),
        (lambda number, p: p <= number, True, 0.0, True),
        (lambda number, p: number >= 1 - p, False, 0.0, True),
        (lambda number, p: number > 1 - p, False, 0.0, True),
        (lambda number, p: 1 - p > number, True, 0.0, True),
        (lambda number, p: number > 1 - p, False, 0.1, False),
        (lambda number, p: number == p, False, 0.0, False),
        (lambda number, p: number - 1 < p, False, -2.0, False),
    ],
)
def test_only_what_is_known_is_taken_as_known(
    compare: Callable[[Any, float], Any], keeps: bool, probability: float, is_known: bool
) -> None:
    model, x = LayerDrop(probability, compare, keeps=keeps), torch.randn(4, 8)
    compiled = roundpipe_fx.compile(model, fullgraph=True)
    if is_known:
        step = train_step(compiled, model, {"x": x})
        assert_bitwise(step, train_step(model, model, {"x": x}))
        assert all(gradient is not None for gradient in step.gradients.values())
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(x)


def test_a_probability_that_changes_counts() -> None:
    model, x = LayerDrop(), torch.randn(4, 8)
    compiled = roundpipe_fx.compile(model)
    compiled(x)
    model.probability = 0.5
    with pytest.warns(roundpipe_fx.GraphBreakWarning):
        compiled(x)
    dropped = set()
    for seed in range(8):
        steps = [train_step(run, model, {"x": x}, seed) for run in (compiled, model)]
        assert_bitwise(*steps)
        dropped.add(sum(gradient is None for gradient in steps[0].gradients.values()))
    assert len(dropped) > 1


def test_the_user_is_told_of_a_function_that_runs_eagerly() -> None:
    """Dynamo gives a function up whose loop breaks, and asks no backend about it."""
    model, x = LayerDrop(0.5), torch.randn(4, 8)
    compiled = roundpipe_fx.compile(model, memory_budget="1GiB")
    with pytest.warns(roundpipe_fx.GraphBreakWarning) as caught:
        compiled(x)
        compiled(torch.randn(6, 8))
    (warning,) = [w for w in caught if w.category is roundpipe_fx.GraphBreakWarning]
    line = Path(warning.filename).read_text().splitlines()[warning.lineno - 1]
    assert "if self.compare(torch.rand([]), self.probability):" in line
    for text in (f":{warning.lineno} in forward", "runs eagerly", "Data-dependent branching", "budget bounds"):
        assert text in str(warning.message)


@pytest.mark.long
def test_what_dynamo_gave_up_is_tried_again() -> None:
    x = torch.randn(4, 8)
    for _ in range(2):
        with pytest.warns(roundpipe_fx.GraphBreakWarning):
            roundpipe_fx.compile(LayerDrop(0.5))(x)
    compiled = roundpipe_fx.compile(LayerDrop(0.0))
    compiled(x)
    assert compiled.plan.stages


def test_an_error_is_no_graph_break(recwarn: pytest.WarningsRecorder) -> None:
    compiled = roundpipe_fx.compile(LayerDrop(0.5), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.randn(4, 8))
    assert not [w for w in recwarn if w.category is roundpipe_fx.GraphBreakWarning]


@pytest.mark.long
def test_compiling_logs_no_errors() -> None:
    texts = io.StringIO()
    handler = logging.StreamHandler(texts)
    handler.setLevel(logging.ERROR)
    logger = logging.getLogger("torch._dynamo")
    logger.addHandler(handler)
    try:
        roundpipe_fx.compile(LayerDrop())(torch.randn(4, 8)).backward()
    finally:
        logger.removeHandler(handler)
    assert texts.getvalue() == ""


def test_a_limit_that_depends_on_data_is_not_known() -> None:
    compiled = roundpipe_fx.compile(LayerDrop(compare=lambda number, p: number < torch.full([], p).item()))
    with pytest.warns(roundpipe_fx.GraphBreakWarning):
        compiled(torch.randn(4, 8))


def test_other_compilations_break_as_before() -> None:
    model, x = LayerDrop(), torch.randn(4, 8)
    roundpipe_fx.compile(copy.deepcopy(model))(x)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(x)


def test_what_a_checkpoint_draws_stays_with_it() -> None:
    class Checkpointed(LayerDrop):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    model, batch = Checkpointed(), {"x": torch.randn(4, 8)}
    eager = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model)
    assert_bitwise(train_step(compiled, model, batch), train_step(eager, eager, batch))


def test_no_gradients_no_difference() -> None:
    model, x = LayerDrop(), torch.randn(4, 8)
    compiled = roundpipe_fx.compile(model, fullgraph=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.manual_seed(0)
            expected = model(x)
            torch.manual_seed(0)
            assert torch.equal(compiled(x), expected)


@pytest.mark.long
@pytest.mark.parametrize("way", ["budget", "pipeline"])
def test_bart(way: str) -> None:
    """Its parts, compiled each for itself, add up gradients in another order than eager; the whole does not."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        use_cache=False,
    )
    model, batch = transformers.BartForConditionalGeneration(config).train(), language_batch()
    eager = copy.deepcopy(model)
    step, _ = compiled_step(model, batch, **WAYS[way])
    assert_bitwise(step, train_step(eager, eager, batch))
