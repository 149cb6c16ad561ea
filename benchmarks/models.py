"""Models of the benchmarks: a mixture of experts that asks by ``nonzero``, a U-Net, and a Llama of 8B parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutput, ImageClassifierOutput


class Experts(nn.Module):
    """Two of several small networks for each token, found by ``topk`` and ``nonzero``."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == index)
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, rank, None])
        return out.view_as(x)


class ExpertBlock(nn.Module):
    """Attention, then experts, each behind a norm and a dropout."""

    def __init__(self, width: int, heads: int, experts: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.experts = Experts(width, experts)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, y, need_weights=False)[0])
        return x + self.dropout(self.experts(self.norm2(x)))


class ExpertTransformer(nn.Module):
    """A language model of such blocks."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int = 4, experts: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(ExpertBlock(width, heads, experts, 0.1) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return CausalLMOutput(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


class ConvBlock(nn.Sequential):
    """Convolution, batch norm, ReLU; twice."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        layers: list[nn.Module] = []
        for source in (channels_in, channels_out):
            layers += [nn.Conv2d(source, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out)]
            layers += [nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Convolutions with batch norm down and up again, and skips from each level to its mirror."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(ConvBlock(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(ConvBlock(i + o, o) for i, o in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        x, skips = pixel_values, []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return ImageClassifierOutput(loss=(self.head(x).mean((1, 2, 3)) - labels).square().mean())


def llama_8b() -> nn.Module:
    """A Llama 3 of 8B parameters in bfloat16, on the meta device."""
    return _llama_3(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)


def llama_1b() -> nn.Module:
    """A Llama 3.2 of 1B parameters in bfloat16, on the meta device."""
    return _llama_3(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32)


def llama_70b() -> nn.Module:
    """A Llama 3 of 70B parameters in bfloat16, on the meta device."""
    return _llama_3(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)


def _llama_3(**sizes: int) -> nn.Module:
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256, use_cache=False)
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).bfloat16()
