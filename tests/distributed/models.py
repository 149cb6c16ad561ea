"""Small models of different kinds, each with a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests import hugging_face
from tests.golden_models import UNet

__all__ = ["LARGER", "MODELS", "Block", "Net", "Tied", "language_loss", "make"]

Made = tuple[nn.Module, dict[str, Any]]
"""A model and the arguments of a step."""


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Blocks with dropout, a batch norm, and a head."""

    def __init__(self, width: int = 16, depth: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        x = self.norm(x)
        for layer in self.layers[2:]:
            x = layer(x)
        return self.head(x)


class Skips(nn.Module):
    """Like a U-Net: what the first half computes is read by the second, in reverse."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block(width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer in self.up:
            x = layer(torch.cat([torch.relu(x), kept.pop()], -1))
        return x


class Experts(nn.Module):
    """A residual mixture of two experts; how many rows each gets depends on the data, and crosses stages."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, 2) for _ in range(depth))
        self.experts = nn.ModuleList(nn.ModuleList(Block(width) for _ in range(2)) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weight, route = gate(x).softmax(-1).max(-1)
            total = x
            for index, expert in enumerate(experts):
                (rows,) = torch.nonzero(route == index, as_tuple=True)
                total = total.index_add(0, rows, expert(x[rows]) * weight[rows, None])
            x = total
        return x


class Tied(nn.Module):
    """The first and the last stage read the same embedding."""

    def __init__(self, words: int = 32, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, 0.1) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _with_loss(model: nn.Module, rows: int = 24) -> Made:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(rows, 16, generator=generator) for _ in range(2))
    return model, {"x": x, "labels": y, "loss_fn": nn.functional.mse_loss}


def _tied() -> Made:
    tokens = torch.randint(32, (24, 6), generator=torch.Generator().manual_seed(1))
    return Tied(), {"tokens": tokens, "labels": tokens, "loss_fn": language_loss}


def language_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _gpt2() -> Made:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False)
    return transformers.GPT2LMHeadModel(config), _tokens(64)


def _llama() -> Made:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), _tokens(64)


def _tokens(words: int) -> dict[str, Any]:
    tokens = torch.randint(words, (8, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[[], Made]] = {
    "net": lambda: _with_loss(Net()),
    "skips": lambda: _with_loss(Skips()),
    "experts": lambda: _with_loss(Experts(), 32),
    "tied": _tied,
    "gpt2": _gpt2,
    "llama": _llama,
}


def _unet() -> Made:
    x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return UNet(channels=4, depth=2), {"x": x}


LARGER: dict[str, Callable[[], Made]] = {
    "unet": _unet,
    "t5": lambda: (hugging_face.t5(), hugging_face.language_batch(8, 12)),
    "qwen3_moe": lambda: (hugging_face.qwen3_moe(), hugging_face.language_batch(8, 12)),
    "qwen3_moe_fp32": lambda: (
        hugging_face.qwen3_moe(dtype=torch.float32),
        hugging_face.language_batch(8, 12),
    ),
}
"""Skip connections, of a U-Net and from an encoder to each layer of a decoder; sizes that depend on data, inside of
stages and between them."""


def make(name: str) -> Made:
    """A model and the arguments of a step, the same in every process."""
    torch.manual_seed(0)
    return {**MODELS, **LARGER}[name]()
