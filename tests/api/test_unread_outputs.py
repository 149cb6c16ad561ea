"""Outputs that the caller drops without reading them are not made; if it reads them after all, they are right."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import roundpipe_fx
from roundpipe_fx.budget import InfeasibleBudgetError
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.planner import lower
from roundpipe_fx.remat.learned_steps import StepBudgetWarning
from tests.scoring_heads import SCORES, TOKENS, WORDS, ScoringHead, drop, least_budget, make_head, measure

_LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {},
    "gemma": {"head_dim": 16, "pad_token_id": None},
}


@functools.cache
def _least_dropped() -> int:
    """The least budget of ``make_head`` whose scores are dropped, but made as a whole."""
    return least_budget(*make_head(), outputs="dropped")


@pytest.mark.parametrize("name", _LANGUAGE_MODELS)
@pytest.mark.long
def test_a_step_never_makes_the_scores(name: str) -> None:
    """And what it is predicted to take, it takes."""
    words, shape = 4096, (2, 128)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": words, "use_cache": False} | _LANGUAGE_MODELS[name]
    torch.manual_seed(0)
    own = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **sizes)).train()
    tokens = torch.randint(words, shape)
    batch = {"input_ids": tokens, "labels": tokens}
    scores = 4 * tokens.numel() * words
    model = roundpipe_fx.compile(own, memory_budget=scores // 3)
    for _ in range(2):
        assert measure(lambda: model(**batch).loss.backward(), own) == model.plan.peak_bytes <= scores // 3
    assert model.plan.unread_bytes == model.plan.dropped_bytes == scores
    assert f"drops {scores / 2**20:.1f} MiB of outputs before the backward begins, {scores / 2**20:.1f}" in str(
        model.plan
    )
    assert len(model.plans) == 1


@pytest.mark.long
def test_the_least_budget_falls_by_the_scores() -> None:
    own, *batch = make_head()
    least = {outputs: least_budget(own, *batch, outputs=outputs) for outputs in ("held", "auto")}
    assert least["held"] - least["auto"] > SCORES
    assert _least_dropped() > least["auto"] + SCORES // 4
    assert least["auto"] < SCORES // 6


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_gradients_are_those_of_eager(compiler: Any) -> None:
    own, *batch = make_head()
    drop(own, *batch)
    expected = [parameter.grad for parameter in own.parameters()]
    own.zero_grad()
    drop(roundpipe_fx.compile(own, outputs="unread", stage_compiler=compiler), *batch)
    for parameter, gradient in zip(own.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0 if compiler == "eager" else 1e-7)


def _item(scores: torch.Tensor) -> Any:
    return scores[3, 5].item()


def _saved(scores: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(scores, file)
    return torch.load(io.BytesIO(file.getvalue()))


_READ: dict[str, Callable[[torch.Tensor], Any]] = {
    "argmax": lambda scores: scores.argmax(-1),
    "part": _item,
    "numpy": lambda scores: scores.detach().numpy(),
    "list": lambda scores: scores.tolist(),
    "text": repr,
    "detached": lambda scores: scores.detach().clone(),
    "half": lambda scores: scores.half().sum(),
    "copy": lambda scores: copy.deepcopy(scores.detach()),
    "saved": _saved,
    "in place": lambda scores: scores.detach().mul_(2),
    "stacked": lambda scores: torch.stack([scores, scores]),
}


@pytest.mark.parametrize("name", _READ)
def test_outputs_that_are_read_are_those_of_eager(name: str) -> None:
    own, *batch = make_head()
    own.requires_grad_()
    expected = _READ[name](own(*batch)[1].detach() if name in ("text", "copy", "saved") else own(*batch)[1])
    model = roundpipe_fx.compile(own, outputs="unread")
    loss, scores = model(*batch)
    assert model.plan.unread_bytes == SCORES
    read = _READ[name](scores.detach() if name in ("text", "copy", "saved") else scores)
    if isinstance(expected, (torch.Tensor, list, float)):
        torch.testing.assert_close(torch.as_tensor(read), torch.as_tensor(expected), rtol=0, atol=0)
    else:
        assert (read == expected) if isinstance(read, str) else (read == expected).all()
    loss.backward()


def _in_place(scores: torch.Tensor) -> torch.Tensor:
    converted = scores.detach().double()
    converted[0] = 5.0
    converted.detach().mul_(2)
    return converted + 0


def test_a_conversion_that_is_written_keeps_what_was_written() -> None:
    own, *batch = make_head()
    _, scores = roundpipe_fx.compile(own, outputs="unread")(*batch)
    assert torch.equal(_in_place(scores), _in_place(own(*batch)[1]))


def test_looking_at_sizes_and_conversions_read_nothing() -> None:
    own, *batch = make_head()
    model = roundpipe_fx.compile(own, outputs="unread", memory_budget="3MiB")

    def step() -> None:
        loss, scores = model(*batch)
        assert scores.shape == (TOKENS, WORDS) and scores.requires_grad and scores.dtype is torch.float32
        assert scores.detach().double().dtype is torch.float64
        del scores
        loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error", StepBudgetWarning)
        assert measure(step, own) == model.plan.peak_bytes < SCORES


def test_gradients_of_a_loss_of_outputs_that_are_read() -> None:
    own, *batch = make_head()

    def step(model: Any) -> list[Any]:
        own.zero_grad()
        loss, scores = model(*batch)
        (loss + scores.float().square().mean()).backward()
        return [parameter.grad for parameter in own.parameters()]

    expected = step(own)
    model = roundpipe_fx.compile(own, outputs="unread")
    for gradient, wanted in zip(step(model), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.long
def test_outputs_are_dropped_where_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it cannot be, no plan is searched for in which they are dropped but have been read."""
    own, *batch = make_head()
    least, searched = _least_dropped(), []
    search = lower._search_programs

    def count(joint: JointGraph, *args: Any) -> Any:
        searched.append((bool(joint.dropped), bool(joint.unread)))
        return search(joint, *args)

    monkeypatch.setattr(lower, "_search_programs", count)
    torch._dynamo.reset()
    assert not roundpipe_fx.compile(own, memory_budget=least).trace(*batch).unread_bytes
    assert searched == [(False, False), (True, False)]
    searched.clear()
    torch._dynamo.reset()
    with pytest.raises(InfeasibleBudgetError):
        roundpipe_fx.compile(own, memory_budget=1).trace(*batch)
    assert searched == [(False, False), (True, True)]


@pytest.mark.long
def test_a_caller_that_reads_is_planned_for() -> None:
    own, *batch = make_head()
    budget = _least_dropped() - 1
    model = roundpipe_fx.compile(own, memory_budget=budget)
    drop(model, *batch)
    assert model.plan.unread_bytes == SCORES

    def read(model: Any) -> None:
        loss, scores = model(*batch)
        scores.sum()
        del scores
        loss.backward()

    with pytest.warns(StepBudgetWarning, match=f"reads an output of {SCORES} bytes .* The next step is planned"):
        read(model)
    with pytest.raises(InfeasibleBudgetError, match=f"The caller reads {SCORES} bytes"):
        read(model)
    roomy = roundpipe_fx.compile(own, memory_budget=budget + SCORES)
    for _ in range(3):
        measured = measure(read, own, roomy)
    assert measured <= roomy.plan.peak_bytes <= budget + SCORES
    assert roomy.plan.unread_bytes == 0


@pytest.mark.long
def test_a_caller_that_holds_is_planned_for() -> None:
    own, *batch = make_head()
    expected = own(*batch)[1]
    budget = _least_dropped() - 1
    model = roundpipe_fx.compile(own, memory_budget=budget)
    loss, scores = model(*batch)
    with pytest.warns(StepBudgetWarning, match=f"holds {SCORES} bytes"):
        loss.backward()
    with torch.no_grad():
        own.head.weight.zero_()
    torch.testing.assert_close(scores, expected, rtol=0, atol=0)
    with pytest.raises(InfeasibleBudgetError, match=f"The caller holds {SCORES} bytes"):
        drop(model, *batch)


def test_outputs_that_are_held_while_a_graph_is_kept_are_computed_in_time() -> None:
    own, *batch = make_head()
    expected = own(*batch)[1]
    loss, scores = roundpipe_fx.compile(own, outputs="unread")(*batch)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        own.head.weight.zero_()
    torch.testing.assert_close(scores, expected, rtol=0, atol=0)


def test_outputs_whose_weights_have_changed_cannot_be_read() -> None:
    own, *batch = make_head()
    loss, scores = roundpipe_fx.compile(own, outputs="unread")(*batch)
    with torch.no_grad():
        own.head.weight.zero_()
    with pytest.raises(RuntimeError, match="the weights that it is computed from have changed"):
        scores.sum()
    del loss


def test_a_step_that_drops_is_planned_without_scores() -> None:
    own, *batch = make_head()
    budget = least_budget(own, *batch, outputs="held") + SCORES // 8
    model = roundpipe_fx.compile(own, memory_budget=budget)
    for _ in range(2):
        assert measure(drop, own, model, *batch) <= budget
    first, second = model.plans
    assert first.dropped_bytes == first.unread_bytes == 0
    assert second.dropped_bytes == second.unread_bytes == SCORES
    assert second.tiles[0].tiles < first.tiles[0].tiles


@pytest.mark.long
def test_behind_torch_compile_the_option_says_it() -> None:
    own, *batch = make_head()
    options = {"memory_budget": least_budget(own, *batch, outputs="unread"), "outputs": "unread"}
    torch._dynamo.reset()
    compiled = torch.compile(own, backend="roundpipe_fx", options=options)
    assert measure(drop, own, compiled, *batch) == options["memory_budget"] < SCORES


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.long
def test_sizes_that_vary(compiler: Any) -> None:
    own, x, y = make_head()
    model = roundpipe_fx.compile(own, outputs="unread", dynamic=True, stage_compiler=compiler)
    for rows in (TOKENS, TOKENS // 2, TOKENS // 2 - 1):
        loss, scores = model(x[:rows], y[:rows])
        assert scores.shape == (rows, WORDS)
        torch.testing.assert_close(scores, own(x[:rows], y[:rows])[1])
        loss.backward()


def test_cached_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_CACHE", str(tmp_path))
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "1")
    own, *batch = make_head()
    expected = own(*batch)[1]
    budget = least_budget(own, *batch, outputs="unread", tiling="never")
    searched = []
    for _ in range(2):
        torch._dynamo.reset()
        model = roundpipe_fx.compile(own, memory_budget=budget, outputs="unread", tiling="never")
        assert measure(drop, own, model, *batch) == budget
        assert model.plan.unread_bytes == SCORES
        torch.testing.assert_close(model(*batch)[1], expected, rtol=0, atol=0)
        searched.append(model.plan)
    assert searched[0].details() == searched[1].details()


def test_models_whose_outputs_cannot_be_left_out() -> None:
    class Random(ScoringHead):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores = F.dropout(self.head(self.layers(x)))
            return F.cross_entropy(scores, y), scores

    class Halves(ScoringHead):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores = self.head(self.layers(x))
            return F.cross_entropy(scores, y), scores[:, : WORDS // 2], scores[:, WORDS // 2 :]

    for kind in (Random, Halves):
        torch.manual_seed(0)
        own, (_, *batch) = kind(), make_head()
        torch.manual_seed(1)
        expected = own(*batch)
        model = roundpipe_fx.compile(own, outputs="unread")
        torch.manual_seed(1)
        for result, wanted in zip(model(*batch), expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0)
        assert model.plan.unread_bytes == 0


@pytest.mark.long
def test_an_unmodified_training_loop(tmp_path: Path) -> None:
    """Accelerate converts outputs to float32, which is no reading."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_layer=1, n_embd=32, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    own = transformers.GPT2LMHeadModel(config)
    tokens = torch.arange(64) % WORDS
    model = roundpipe_fx.compile(own, memory_budget="1.25MiB")
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        bf16=True,
        eval_strategy="steps",
        eval_steps=1,
    )
    data = [{"input_ids": tokens, "labels": tokens}] * 8
    with warnings.catch_warnings():
        warnings.simplefilter("error", StepBudgetWarning)
        transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:2]).train()
    assert model.plans[0].unread_bytes > 0
