"""Outputs of pipelined calls that the caller drops without reading them are not made; those that it reads are right."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers

import roundpipe_fx
from roundpipe_fx.remat.learned_steps import StepBudgetWarning
from roundpipe_fx.runtime.unread_outputs import UnreadTensor
from tests.scoring_heads import SCORES, TOKENS, WIDTH, WORDS, ScoringHead, drop, least_budget, make_head, measure


def _read(model: Any, *batch: Any) -> None:
    outputs = model(*batch)
    outputs[1].argmax(-1)
    outputs[0].backward()


def _hold(model: Any, *batch: Any) -> None:
    outputs = model(*batch)
    outputs[0].backward()


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.long
def test_gradients_are_those_with_outputs(microbatches: int, compiler: Any) -> None:
    own, *batch = make_head()
    steps = []
    for outputs in ("held", "unread"):
        own.zero_grad()
        model = roundpipe_fx.compile(own, num_microbatches=microbatches, outputs=outputs, stage_compiler=compiler)
        loss = model(*batch)[0]
        loss.backward()
        steps.append([loss.detach(), *(parameter.grad for parameter in own.parameters())])
        assert model.plan.unread_bytes == (SCORES if outputs == "unread" else 0)
    for first, second in zip(*steps, strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=0 if compiler == "eager" else 1e-8)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_outputs_that_are_read_are_those_of_eager(microbatches: int) -> None:
    own, *batch = make_head()
    expected = own(*batch)[1]
    model = roundpipe_fx.compile(own, num_microbatches=microbatches, outputs="unread")
    outputs = model(*batch)
    scores = outputs[1]
    assert type(scores) is UnreadTensor and scores.shape == expected.shape and scores.requires_grad
    assert torch.equal(scores, expected) and torch.equal(scores.double(), expected.double())
    outputs[0].backward()
    assert torch.equal(scores, expected)


def test_outputs_that_are_held_are_computed_before_the_weights_change() -> None:
    own, *batch = make_head()
    expected = own(*batch)[1].clone()
    model = roundpipe_fx.compile(own, num_microbatches=2, outputs="unread")
    outputs = model(*batch)
    outputs[0].backward()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.mul_(2)
    assert torch.equal(outputs[1], expected)


def test_outputs_that_are_differentiated_have_their_gradients() -> None:
    own, *batch = make_head()

    def step(model: Any) -> list[Any]:
        own.zero_grad()
        outputs = model(*batch)
        (outputs[0] + outputs[1].square().mean()).backward()
        return [parameter.grad for parameter in own.parameters()]

    expected = step(own)
    computed = step(roundpipe_fx.compile(own, num_microbatches=1, outputs="unread"))
    for first, second in zip(expected, computed, strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=1e-8)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.quick_every(2)
def test_a_budget_that_is_met_only_without_outputs_leaves_them_out(microbatches: int) -> None:
    own, *batch = make_head()
    options: dict[str, Any] = {"num_microbatches": microbatches, "dynamic": False, "tiling": "never"}
    least = {outputs: least_budget(own, *batch, outputs=outputs, **options) for outputs in ("held", "auto", "unread")}
    narrow = 4 * TOKENS * WIDTH  # what scores are computed from, which stays instead
    assert least["auto"] == least["unread"] <= least["held"] - SCORES + narrow
    model = roundpipe_fx.compile(own, memory_budget=least["auto"], **options)
    for _ in range(2):
        assert measure(drop, own, model, *batch) <= model.plan.peak_bytes == least["auto"]
    assert len(model.plans) == 1
    assert f"drops {SCORES / 2**20:.1f} MiB of outputs before the backward begins, {SCORES / 2**20:.1f}" in str(
        model.plan
    )


@pytest.mark.long
def test_a_budget_that_is_met_only_in_tiles_and_without_outputs() -> None:
    own, *batch = make_head()
    model = roundpipe_fx.compile(own, num_microbatches=2, dynamic=False, memory_budget=SCORES // 2)
    for _ in range(2):
        assert measure(drop, own, model, *batch) <= model.plan.peak_bytes <= SCORES // 2
    assert model.plan.unread_bytes == SCORES and model.plan.tiles


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.quick_every(2)
def test_steps_that_drop_outputs_are_planned_without_them(microbatches: int) -> None:
    """Until a step reads or holds them: then the next is planned for that."""
    own, *batch = make_head()
    options: dict[str, Any] = {"num_microbatches": microbatches, "dynamic": False, "tiling": "never"}
    budget = least_budget(own, *batch, outputs="held", **options) + 16
    model = roundpipe_fx.compile(own, memory_budget=budget, **options)
    drop(model, *batch)
    assert model.plan.unread_bytes == 0
    for _ in range(2):
        assert measure(drop, own, model, *batch) <= model.plan.peak_bytes <= budget
    assert model.plan.unread_bytes == SCORES and len(model.plans) == 2
    assert model.plan.recompute_seconds < model.plans[0].recompute_seconds
    with pytest.warns(StepBudgetWarning, match=f"reads an output of {SCORES} bytes"):
        _read(model, *batch)
    for step in (_read, _hold, drop):
        assert measure(step, own, model, *batch) <= model.plan.peak_bytes <= budget
    assert model.plan.unread_bytes == 0 and len(model.plans) == 3


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("outputs", ["auto", "held"])
@pytest.mark.quick_every(2)
def test_outputs_that_are_held_stay_in_the_plan(outputs: Any, microbatches: int) -> None:
    """Also where the user has said so and drops them all the same."""
    own, *batch = make_head()
    options: dict[str, Any] = {
        "num_microbatches": microbatches,
        "dynamic": False,
        "tiling": "never",
        "outputs": outputs,
    }
    model = roundpipe_fx.compile(
        own, memory_budget=least_budget(own, *batch, **options | {"outputs": "held"}) + 16, **options
    )
    for _ in range(3):
        (_hold if outputs == "auto" else drop)(model, *batch)
    assert model.plan.unread_bytes == 0 and len(model.plans) == 1


def test_outputs_that_are_merged_by_the_user_are_dropped_unread_too() -> None:
    """They are not found in what the caller gets."""
    own, *batch = make_head()
    options: dict[str, Any] = {"num_microbatches": 2, "dynamic": False, "tiling": "never", "merge_output": list}
    model = roundpipe_fx.compile(own, memory_budget=least_budget(own, *batch, **options), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StepBudgetWarning)
        for _ in range(2):
            sum(loss for loss, _ in model(*batch)).backward()
    assert model.plan.unread_bytes == SCORES and len(model.plans) == 1
    expected = [scores.argmax(-1) for _, scores in model(*batch)]
    assert torch.equal(torch.cat(expected), own(*batch)[1].argmax(-1))


def test_an_output_in_two_places_is_held_if_either_is() -> None:
    class Twice(ScoringHead):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            loss, scores = super().forward(x, y)
            return loss, scores, scores[:, : WORDS // 2]

    _, *batch = make_head()
    own = Twice()
    options: dict[str, Any] = {"num_microbatches": 2, "dynamic": False, "tiling": "never"}
    budget = least_budget(own, *batch, outputs="held", **options) + 16
    model = roundpipe_fx.compile(own, memory_budget=budget, **options)
    for place in (1, 2):
        returned = model(*batch)
        loss, held = returned[0], returned[place]
        del returned
        loss.backward()
        assert held.requires_grad and model.plan.unread_bytes == 0
    assert len(model.plans) == 1


def test_steps_of_other_sizes_and_evaluation_between_them() -> None:
    own, x, y = make_head()
    model = roundpipe_fx.compile(own, num_microbatches=2, outputs="unread")
    for rows in (256, 192, 101):
        with torch.no_grad():
            assert torch.equal(model(x[:rows], y[:rows])[1], own(x[:rows], y[:rows])[1])
        scores = model(x[:rows], y[:rows])[1]
        torch.testing.assert_close(scores, own(x[:rows], y[:rows])[1], rtol=0, atol=1e-6)
        own.zero_grad()
        drop(own, x[:rows], y[:rows])
        expected = [parameter.grad for parameter in own.parameters()]
        own.zero_grad()
        drop(model, x[:rows], y[:rows])
        for parameter, gradient in zip(own.parameters(), expected, strict=True):
            assert (parameter.grad - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize("as_dict", [False, True])
def test_steps_with_gradients_make_the_outputs_that_they_are_asked_for(as_dict: bool) -> None:
    class Dict(ScoringHead):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            loss, scores = super().forward(x, y)
            return {"scores": scores, "loss": loss} if as_dict else (loss, scores)

    _, x, y = make_head()
    own = Dict()
    model = roundpipe_fx.compile(own, num_microbatches=2, outputs="unread")
    loss, outputs = model.forward_backward(x, y, return_outputs=True)
    key: Any = "loss" if as_dict else 0
    scores, expected = outputs["scores" if as_dict else 1], own(x, y)
    torch.testing.assert_close(loss, expected[key], rtol=1e-6, atol=0)
    assert type(scores) is torch.Tensor and torch.equal(scores, expected["scores" if as_dict else 1])


def test_outputs_that_the_model_keeps_are_right() -> None:
    class Keeping(ScoringHead):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            outputs = super().forward(x, y)
            self.kept = outputs[1]
            return outputs

    _, *batch = make_head()
    torch.manual_seed(0)
    own = Keeping()
    expected = own(*batch)[1]
    model = roundpipe_fx.compile(own, num_microbatches=1, outputs="unread")
    drop(model, *batch)
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
        assert (second.grad - first.grad).norm() <= 1e-5 * first.grad.norm()
