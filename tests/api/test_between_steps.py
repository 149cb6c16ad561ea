"""Between the steps and around the model: generation with a cache, and contrastive losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import roundpipe_fx


def _llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def _compiled(model: nn.Module) -> nn.Module:
    return roundpipe_fx.compile(model, memory_budget=0.5)


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="roundpipe_fx", options={"memory_budget": 0.5})
    return model


DOORS: dict[str, Callable[[nn.Module], Any]] = {"compile": _compiled, "in place": _in_place}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.long
def test_generation_between_steps(door: str, training: bool) -> None:
    """With a cache, whose length changes with each token, and with padding on the left; plans are not made for each."""
    torch._dynamo.reset()
    own, model = _llama(), DOORS[door](_llama())
    tokens = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    padded = torch.ones(2, 5, dtype=torch.long)
    padded[0, :2] = 0
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (own, model)]
    counts = []
    for _ in range(3):
        texts = []
        for one, optimizer in zip((own, model), optimizers, strict=True):
            one.train()
            one(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            one.train(training)
            prompt = {"input_ids": tokens[:, :5], "max_new_tokens": 4, "do_sample": False}
            texts.append([one.generate(**prompt), one.generate(**prompt, attention_mask=padded, num_beams=2)])
        for text, expected in zip(*texts, strict=True):
            assert torch.equal(text, expected)
        counts.append(len(roundpipe_fx.plans(model)))
    assert counts[1] == counts[2]


def test_a_contrastive_loss_in_microbatches_has_the_gradients_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)).double()
    x = torch.randn(16, 16, dtype=torch.float64)
    pairs = torch.cat([x, x + 0.1])

    def loss_of(encode: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        embeddings = F.normalize(encode(pairs), dim=1)
        return F.cross_entropy(embeddings[:16] @ embeddings[16:].T / 0.07, torch.arange(16))

    def gradients(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(loss_of(own), own)
    # A call for each microbatch, whose backwards follow the loss of all of them; and one call for all microbatches.
    single = roundpipe_fx.compile(copy.deepcopy(own), memory_budget=0.0)
    several = roundpipe_fx.compile(copy.deepcopy(own), memory_budget=0.0, num_microbatches=4)
    for model, encode in (
        (single, lambda rows: torch.cat([single(part) for part in rows.chunk(4)])),
        (several, several),
    ):
        for _ in range(2):  # the second step is planned for what the first has shown
            torch.testing.assert_close(gradients(loss_of(encode), model), expected)
