"""Outputs that the caller drops without reading them are not made; if it reads them after all, they are right."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import roundpipe_fx
from roundpipe_fx.budget import InfeasibleBudgetError
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.planner import lower
from roundpipe_fx.remat.learned_steps import StepBudgetWarning
from tests.long import long_but

_WORDS, _TOKENS, _WIDTH = 4096, 256, 32
_SCORES = 4 * _WORDS * _TOKENS


class _Head(nn.Module):
    """A few layers, and a loss over many classes, whose scores are returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = 30 * torch.tanh(self.head(self.layers(x)) / 30)
        return F.cross_entropy(scores, y), scores


def _made() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return _Head(), torch.randn(_TOKENS, _WIDTH), torch.randint(_WORDS, (_TOKENS,))


def _drop(model: Any, *batch: Any, **named: Any) -> None:
    model(*batch, **named)[0].backward()


def _peak(step: Callable[..., Any], own: nn.Module, *call: Any, **named: Any) -> int:
    own.zero_grad(set_to_none=True)
    with roundpipe_fx.measure_peak("cpu") as peak:
        step(*call, **named)
    return peak.bytes


def _least(own: nn.Module, *batch: Any, **options: Any) -> int:
    """The least budget that the error names."""
    named = batch[0] if isinstance(batch[0], dict) else {}
    with pytest.raises(InfeasibleBudgetError) as refused:
        roundpipe_fx.compile(own, memory_budget=1, **options)(*(() if named else batch), **named)
    return refused.value.minimum


_LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {},
    "gemma": {"head_dim": 32, "pad_token_id": None},
}


@pytest.mark.parametrize("name", long_but(_LANGUAGE_MODELS, quick={"llama"}))
def test_the_least_budget_falls_by_the_scores(name: str) -> None:
    """And what a step is predicted to take, it takes."""
    words, shape = 32768, (2, 128)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": words, "use_cache": False} | _LANGUAGE_MODELS[name]
    torch.manual_seed(0)
    own = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **sizes)).train()
    tokens = torch.randint(words, shape)
    batch = {"input_ids": tokens, "labels": tokens}
    scores = 4 * tokens.numel() * words
    least = {outputs: _least(own, batch, outputs=outputs) for outputs in ("held", "dropped", "auto")}
    assert least["held"] - least["auto"] == scores
    assert least["dropped"] > least["auto"] + scores // 4
    model = roundpipe_fx.compile(own, memory_budget=least["auto"])
    for _ in range(2):
        assert _peak(lambda: model(**batch).loss.backward(), own) == model.plan.peak_bytes == least["auto"]
    assert model.plan.unread_bytes == model.plan.dropped_bytes == scores
    assert f"drops {scores / 2**20:.1f} MiB of outputs before the backward begins, {scores / 2**20:.1f}" in str(
        model.plan
    )
    assert len(model.plans) == 1


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_gradients_are_those_of_eager(compiler: Any) -> None:
    own, *batch = _made()
    _drop(own, *batch)
    expected = [parameter.grad for parameter in own.parameters()]
    own.zero_grad()
    _drop(roundpipe_fx.compile(own, outputs="unread", stage_compiler=compiler), *batch)
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
    own, *batch = _made()
    own.requires_grad_()
    expected = _READ[name](own(*batch)[1].detach() if name in ("text", "copy", "saved") else own(*batch)[1])
    model = roundpipe_fx.compile(own, outputs="unread")
    loss, scores = model(*batch)
    assert model.plan.unread_bytes == _SCORES
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
    own, *batch = _made()
    _, scores = roundpipe_fx.compile(own, outputs="unread")(*batch)
    assert torch.equal(_in_place(scores), _in_place(own(*batch)[1]))


def test_looking_at_sizes_and_conversions_read_nothing() -> None:
    own, *batch = _made()
    model = roundpipe_fx.compile(own, outputs="unread", memory_budget="3MiB")

    def step() -> None:
        loss, scores = model(*batch)
        assert scores.shape == (_TOKENS, _WORDS) and scores.requires_grad and scores.dtype is torch.float32
        assert scores.detach().double().dtype is torch.float64
        del scores
        loss.backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error", StepBudgetWarning)
        assert _peak(step, own) == model.plan.peak_bytes < _SCORES


def test_gradients_of_a_loss_of_outputs_that_are_read() -> None:
    own, *batch = _made()

    def step(model: Any) -> list[Any]:
        own.zero_grad()
        loss, scores = model(*batch)
        (loss + scores.float().square().mean()).backward()
        return [parameter.grad for parameter in own.parameters()]

    expected = step(own)
    model = roundpipe_fx.compile(own, outputs="unread")
    for gradient, wanted in zip(step(model), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_outputs_are_dropped_where_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it cannot be, no plan is searched for in which they are dropped but have been read."""
    own, *batch = _made()
    least, searched = _least(own, *batch, outputs="dropped"), []
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


def test_a_caller_that_reads_is_planned_for() -> None:
    own, *batch = _made()
    budget = _least(own, *batch, outputs="dropped") - 1
    model = roundpipe_fx.compile(own, memory_budget=budget)
    _drop(model, *batch)
    assert model.plan.unread_bytes == _SCORES

    def read(model: Any) -> None:
        loss, scores = model(*batch)
        scores.sum()
        del scores
        loss.backward()

    with pytest.warns(StepBudgetWarning, match=f"reads an output of {_SCORES} bytes .* The next step is planned"):
        read(model)
    with pytest.raises(InfeasibleBudgetError, match=f"The caller reads {_SCORES} bytes"):
        read(model)
    roomy = roundpipe_fx.compile(own, memory_budget=budget + _SCORES)
    for _ in range(3):
        measured = _peak(read, own, roomy)
    assert measured <= roomy.plan.peak_bytes <= budget + _SCORES
    assert roomy.plan.unread_bytes == 0


def test_a_caller_that_holds_is_planned_for() -> None:
    own, *batch = _made()
    expected = own(*batch)[1]
    budget = _least(own, *batch, outputs="dropped") - 1
    model = roundpipe_fx.compile(own, memory_budget=budget)
    loss, scores = model(*batch)
    with pytest.warns(StepBudgetWarning, match=f"holds {_SCORES} bytes"):
        loss.backward()
    with torch.no_grad():
        own.head.weight.zero_()
    torch.testing.assert_close(scores, expected, rtol=0, atol=0)
    with pytest.raises(InfeasibleBudgetError, match=f"The caller holds {_SCORES} bytes"):
        _drop(model, *batch)


def test_outputs_that_are_held_while_a_graph_is_kept_are_computed_in_time() -> None:
    own, *batch = _made()
    expected = own(*batch)[1]
    loss, scores = roundpipe_fx.compile(own, outputs="unread")(*batch)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        own.head.weight.zero_()
    torch.testing.assert_close(scores, expected, rtol=0, atol=0)


def test_outputs_whose_weights_have_changed_cannot_be_read() -> None:
    own, *batch = _made()
    loss, scores = roundpipe_fx.compile(own, outputs="unread")(*batch)
    with torch.no_grad():
        own.head.weight.zero_()
    with pytest.raises(RuntimeError, match="the weights that it is computed from have changed"):
        scores.sum()
    del loss


def test_a_step_that_drops_is_planned_without_scores() -> None:
    own, *batch = _made()
    budget = _least(own, *batch, outputs="held") + _SCORES // 8
    model = roundpipe_fx.compile(own, memory_budget=budget)
    for _ in range(2):
        assert _peak(_drop, own, model, *batch) <= budget
    first, second = model.plans
    assert first.dropped_bytes == first.unread_bytes == 0
    assert second.dropped_bytes == second.unread_bytes == _SCORES
    assert second.tiles[0].tiles < first.tiles[0].tiles


def test_behind_torch_compile_the_option_says_it() -> None:
    own, *batch = _made()
    options = {"memory_budget": _least(own, *batch, outputs="unread"), "outputs": "unread"}
    torch._dynamo.reset()
    compiled = torch.compile(own, backend="roundpipe_fx", options=options)
    assert _peak(_drop, own, compiled, *batch) == options["memory_budget"] < _SCORES


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_sizes_that_vary(compiler: Any) -> None:
    own, x, y = _made()
    model = roundpipe_fx.compile(own, outputs="unread", dynamic=True, stage_compiler=compiler)
    for rows in (_TOKENS, _TOKENS // 2, _TOKENS // 2 - 1):
        loss, scores = model(x[:rows], y[:rows])
        assert scores.shape == (rows, _WORDS)
        torch.testing.assert_close(scores, own(x[:rows], y[:rows])[1])
        loss.backward()


def test_cached_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_CACHE", str(tmp_path))
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "1")
    own, *batch = _made()
    expected = own(*batch)[1]
    budget = _least(own, *batch, outputs="unread", tiling="never")
    searched = []
    for _ in range(2):
        torch._dynamo.reset()
        model = roundpipe_fx.compile(own, memory_budget=budget, outputs="unread", tiling="never")
        assert _peak(_drop, own, model, *batch) == budget
        assert model.plan.unread_bytes == _SCORES
        torch.testing.assert_close(model(*batch)[1], expected, rtol=0, atol=0)
        searched.append(model.plan)
    assert searched[0].details() == searched[1].details()


def test_models_whose_outputs_cannot_be_left_out() -> None:
    class Random(_Head):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores = F.dropout(self.head(self.layers(x)))
            return F.cross_entropy(scores, y), scores

    class Halves(_Head):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores = self.head(self.layers(x))
            return F.cross_entropy(scores, y), scores[:, : _WORDS // 2], scores[:, _WORDS // 2 :]

    for kind in (Random, Halves):
        torch.manual_seed(0)
        own, (_, *batch) = kind(), _made()
        torch.manual_seed(1)
        expected = own(*batch)
        model = roundpipe_fx.compile(own, outputs="unread")
        torch.manual_seed(1)
        for result, wanted in zip(model(*batch), expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0)
        assert model.plan.unread_bytes == 0


def test_an_unmodified_training_loop(tmp_path: Path) -> None:
    """Accelerate converts outputs to float32, which is no reading."""
    config = transformers.GPT2Config(
        vocab_size=_WORDS, n_layer=1, n_embd=32, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    own = transformers.GPT2LMHeadModel(config)
    tokens = torch.arange(64) % _WORDS
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
