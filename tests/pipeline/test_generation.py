"""Text is generated without the pipeline: each call writes to a cache that has the rows of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import roundpipe_fx
from tests.pipeline.steps import CPUS

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 32, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}


def _llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


def _t5() -> Any:
    config = transformers.T5Config(d_model=16, d_ff=32, num_layers=1, num_heads=2, d_kv=8, **SIZES)
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [_llama, _t5])
@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 2}, {"do_sample": True}, {"cache_implementation": "static"}, {"use_cache": False}]
)
def test_a_pipelined_model_generates_what_the_model_does(make: Any, how: dict[str, Any]) -> None:
    original, tokens = make().eval(), torch.randint(3, 32, (3, 4))
    model = roundpipe_fx.compile(original, devices=CPUS, num_microbatches=2)

    def generated(own: Any) -> torch.Tensor:
        torch.manual_seed(0)
        mask = torch.ones_like(tokens)
        return own.generate(tokens, attention_mask=mask, max_new_tokens=3, **{"do_sample": False, **how})

    assert torch.equal(generated(model), generated(original))


@pytest.mark.long
def test_calls_with_a_cache_without_gradients() -> None:
    original, tokens = _llama().eval(), torch.randint(3, 32, (3, 4))
    model = roundpipe_fx.compile(original, devices=CPUS, num_microbatches=2)

    @torch.no_grad()
    def logits(own: Any) -> list[torch.Tensor]:
        cache = transformers.DynamicCache()
        return [own(part, past_key_values=cache).logits for part in tokens.split(2, dim=1)]

    for computed, expected in zip(logits(model), logits(original), strict=True):
        torch.testing.assert_close(computed, expected)
    model.train()
    loss = model.forward_backward(tokens, labels=tokens)
    assert torch.isfinite(loss)


def test_a_model_without_a_pipeline_generates_with_its_compiled_forward() -> None:
    model, tokens = roundpipe_fx.compile(_llama().eval()), torch.randint(3, 32, (1, 4))
    model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=1, do_sample=False)
    assert model.plans
