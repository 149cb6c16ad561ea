"""Small Hugging Face models with random weights, and a batch for each."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tests.comparison import Step, aot_eager_step, eager_step

VOCABULARY = 128


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def gpt2(layers: int = 2, width: int = 32, heads: int = 4) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_layer=layers, n_embd=width, n_head=heads, n_positions=256, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def language_batch(batch: int = 2, length: int = 16) -> dict[str, Any]:
    tokens = _tokens(batch, length)
    return {"input_ids": tokens, "labels": tokens}


def llama(layers: int = 2, width: int = 32) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def small_model_and_data(folder: Path) -> tuple[str, str]:
    """A folder with a small Llama of bytes in bfloat16, without a tokenizer, and a file of text."""
    torch.manual_seed(0)
    config = llama().config
    config.vocab_size, config.attention_dropout = 256, 0.1
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "llama")
    (folder / "data.txt").write_text("\n".join(pydoc_data.topics.topics.values())[:20_000])
    return str(folder / "llama"), str(folder / "data.txt")


def qwen3_moe(layers: int = 2, width: int = 32, experts: int = 4, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        moe_intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        num_experts=experts,
        num_experts_per_tok=2,
        use_cache=False,
        attention_dropout=0.1,
    )
    return transformers.Qwen3MoeForCausalLM(config).to(dtype)


def bert(layers: int = 2, width: int = 32) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=256,
    )
    return transformers.BertForMaskedLM(config)


def t5(layers: int = 2, width: int = 32) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        num_layers=layers,
        d_model=width,
        d_ff=2 * width,
        d_kv=width // 4,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit(layers: int = 2, width: int = 32) -> nn.Module:
    config = transformers.ViTConfig(
        image_size=32,
        patch_size=8,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=4,
        intermediate_size=2 * width,
        num_labels=5,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


def image_batch(batch: int = 2) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(5, (batch,))}


_GROUPED = {"qwen3_moe"}
"""Traced, with a causal mask, heads of keys are copied for groups of queries. Eager leaves out the mask, and copies."""


def reference_step(name: str, model: nn.Module, batch: dict[str, Any], autocast: bool = False) -> Step:
    """The step whose bits a compiled model has: by ``aot_eager``, or by eager where tracing takes other kernels."""
    return (eager_step if name in _GROUPED else aot_eager_step)(model, batch, autocast=autocast)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "gpt2": (gpt2, language_batch),
    "qwen3_moe": (qwen3_moe, language_batch),
    "bert": (bert, language_batch),
    "t5": (t5, language_batch),
    "vit": (vit, image_batch),
    "resnet": (resnet, image_batch),
}
