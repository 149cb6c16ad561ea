"""TRL's fused head on CUDA devices is traced without its Triton kernels, and scores all tokens."""

from __future__ import annotations

import pytest
import torch
import transformers
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

import roundpipe_fx

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_trls_fused_head_where_there_is_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=64, use_cache=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = transformers.GPT2LMHeadModel(config).cuda()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    tokens = torch.randint(64, (2, 16), device="cuda")
    labels = tokens.clone()
    labels[:, :5] = -100

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        outputs = model(input_ids=tokens, labels=labels, fused_lm_head=True)
        (-outputs.log_probs.sum()).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return [outputs.log_probs.detach(), outputs.entropy.detach(), *(grad for grad in gradients if grad is not None)]

    with monkeypatch.context() as without:
        without.setattr(chunked_logprob, "_TRITON_AVAILABLE", False)
        expected = step()
    monkeypatch.setattr(chunked_logprob, "_TRITON_AVAILABLE", True)
    options = {"memory_budget": 0.0, "stage_compiler": "eager"}
    model.compile(backend="roundpipe_fx", fullgraph=True, options=options)
    for _ in range(2):
        found = step()
        assert len(found) == len(expected) > 10
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    (plan,) = roundpipe_fx.plans(model)
    assert plan.training
