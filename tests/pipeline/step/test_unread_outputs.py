"""Outputs of pipelined calls that the caller drops without reading them are not made; those that it reads are right."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import roundpipe_fx
from roundpipe_fx.budget import InfeasibleBudgetError
from roundpipe_fx.remat.learned_steps import StepBudgetWarning
from roundpipe_fx.runtime.unread_outputs import UnreadTensor

_WORDS, _TOKENS, _WIDTH = 4096, 256, 32
_SCORES = 4 * _WORDS * _TOKENS


class _Head(nn.Module):
    """A few layers, and a loss over many classes, whose scores are returned too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = 30 * torch.tanh(self.head(self.layers(x)) / 30)
        return {"loss": F.cross_entropy(scores, y), "scores": scores}


def _made() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return _Head(), torch.randn(_TOKENS, _WIDTH), torch.randint(_WORDS, (_TOKENS,))


def _drop(model: Any, *batch: Any) -> None:
    model(*batch)["loss"].backward()


def _read(model: Any, *batch: Any) -> None:
    outputs = model(*batch)
    outputs["scores"].argmax(-1)
    outputs["loss"].backward()


def _hold(model: Any, *batch: Any) -> None:
    outputs = model(*batch)
    outputs["loss"].backward()


def _peak(step: Any, own: nn.Module, *call: Any) -> int:
    own.zero_grad(set_to_none=True)
    gc.collect()
    with roundpipe_fx.measure_peak("cpu") as peak:
        step(*call)
    return peak.bytes


def _least(own: nn.Module, *batch: Any, **options: Any) -> int:
    """The least budget that the error names."""
    with pytest.raises(InfeasibleBudgetError) as refused:
        roundpipe_fx.compile(own, memory_budget=1, **options)(*batch)
    return refused.value.minimum


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_gradients_are_those_with_outputs(microbatches: int, compiler: Any) -> None:
    own, *batch = _made()
    steps = []
    for outputs in ("held", "unread"):
        own.zero_grad()
        model = roundpipe_fx.compile(own, num_microbatches=microbatches, outputs=outputs, stage_compiler=compiler)
        loss = model(*batch)["loss"]
        loss.backward()
        steps.append([loss.detach(), *(parameter.grad for parameter in own.parameters())])
        assert model.plan.unread_bytes == (_SCORES if outputs == "unread" else 0)
    for first, second in zip(*steps, strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=0 if compiler == "eager" else 1e-8)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_outputs_that_are_read_are_those_of_eager(microbatches: int) -> None:
    own, *batch = _made()
    expected = own(*batch)["scores"]
    model = roundpipe_fx.compile(own, num_microbatches=microbatches, outputs="unread")
    outputs = model(*batch)
    scores = outputs["scores"]
    assert type(scores) is UnreadTensor and scores.shape == expected.shape and scores.requires_grad
    assert torch.equal(scores, expected) and torch.equal(scores.double(), expected.double())
    outputs["loss"].backward()
    assert torch.equal(scores, expected)
    for parameter in own.parameters():
        parameter.data.mul_(2)
    assert torch.equal(scores, expected)  # it was computed before


def test_outputs_that_are_held_are_computed_before_the_weights_change() -> None:
    own, *batch = _made()
    expected = own(*batch)["scores"].clone()
    model = roundpipe_fx.compile(own, num_microbatches=2, outputs="unread")
    outputs = model(*batch)
    outputs["loss"].backward()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.mul_(2)
    assert torch.equal(outputs["scores"], expected)


def test_outputs_that_are_differentiated_have_their_gradients() -> None:
    own, *batch = _made()

    def step(model: Any) -> list[Any]:
        own.zero_grad()
        outputs = model(*batch)
        (outputs["loss"] + outputs["scores"].square().mean()).backward()
        return [parameter.grad for parameter in own.parameters()]

    expected = step(own)
    computed = step(roundpipe_fx.compile(own, num_microbatches=1, outputs="unread"))
    for first, second in zip(expected, computed, strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=1e-8)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_budget_that_is_met_only_without_outputs_leaves_them_out(microbatches: int) -> None:
    own, *batch = _made()
    options: dict[str, Any] = {"num_microbatches": microbatches, "dynamic": False}
    least = {outputs: _least(own, *batch, outputs=outputs, **options) for outputs in ("held", "auto", "unread")}
    narrow = 4 * _TOKENS * _WIDTH  # what scores are computed from, which stays instead
    assert least["auto"] == least["unread"] <= least["held"] - _SCORES + narrow
    model = roundpipe_fx.compile(own, memory_budget=least["auto"], **options)
    for _ in range(2):
        assert _peak(_drop, own, model, *batch) <= model.plan.peak_bytes == least["auto"]
    assert len(model.plans) == 1
    assert f"drops {_SCORES / 2**20:.1f} MiB of outputs before the backward begins, {_SCORES / 2**20:.1f}" in str(
        model.plan
    )


@pytest.mark.parametrize("microbatches", [1, 2])
def test_steps_that_drop_outputs_are_planned_without_them(microbatches: int) -> None:
    """Until a step reads or holds them: then the next is planned for that."""
    own, *batch = _made()
    options: dict[str, Any] = {"num_microbatches": microbatches, "dynamic": False}
    budget = _least(own, *batch, outputs="held", **options) + 16
    model = roundpipe_fx.compile(own, memory_budget=budget, **options)
    _drop(model, *batch)
    assert model.plan.unread_bytes == 0
    for _ in range(2):
        assert _peak(_drop, own, model, *batch) <= model.plan.peak_bytes <= budget
    assert model.plan.unread_bytes == _SCORES and len(model.plans) == 2
    assert model.plan.recompute_seconds < model.plans[0].recompute_seconds
    with pytest.warns(StepBudgetWarning, match=f"reads an output of {_SCORES} bytes"):
        _read(model, *batch)
    for step in (_read, _hold, _drop):
        assert _peak(step, own, model, *batch) <= model.plan.peak_bytes <= budget
    assert model.plan.unread_bytes == 0 and len(model.plans) == 3


def test_outputs_that_are_held_stay_so() -> None:
    """Where an output's memory is what the backward reads, that alone does not count as held."""
    own, *batch = _made()
    options: dict[str, Any] = {"num_microbatches": 1, "dynamic": False}
    model = roundpipe_fx.compile(own, memory_budget=_least(own, *batch, outputs="held", **options) + 16, **options)
    for _ in range(3):
        _hold(model, *batch)
    assert model.plan.unread_bytes == 0 and len(model.plans) == 1


def test_steps_with_gradients_make_the_outputs_that_they_are_asked_for() -> None:
    own, x, y = _made()
    model = roundpipe_fx.compile(own, num_microbatches=2, outputs="unread")
    _, outputs = model.forward_backward(x, y, return_outputs=True)
    assert type(outputs["scores"]) is torch.Tensor and torch.equal(outputs["scores"], own(x, y)["scores"])


def test_outputs_that_the_model_keeps_are_right() -> None:
    class Keeping(_Head):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = super().forward(x, y)
            self.kept = outputs["scores"]
            return outputs

    _, *batch = _made()
    torch.manual_seed(0)
    own = Keeping()
    expected = own(*batch)["scores"]
    model = roundpipe_fx.compile(own, num_microbatches=1, outputs="unread")
    _drop(model, *batch)
    assert torch.equal(own.kept, expected)


def test_a_language_model_of_hugging_face() -> None:
    """With the labels in its batch; the whole batch's scores are put together when they are read."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=512,
        use_cache=False,
    )
    torch.manual_seed(0)
    own = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(512, (4, 16))
    other = copy.deepcopy(own)
    expected = other(input_ids=tokens, labels=tokens)
    expected.loss.backward()
    model = roundpipe_fx.compile(own, num_microbatches=2, outputs="unread")
    outputs = model(input_ids=tokens, labels=tokens)
    assert type(outputs.logits) is UnreadTensor
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=0, atol=1e-6)
    outputs.loss.backward()
    for first, second in zip(other.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(second.grad, first.grad, rtol=0, atol=1e-7)
