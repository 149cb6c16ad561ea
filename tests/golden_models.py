"""Small models, one property each: what the golden files pin."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx


class DropoutMLP(nn.Module):
    """A chain of linear layers with dropout: replayed generator states."""

    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        memory = x if memory is None else memory
        key, value = self.key_value(memory).chunk(2, dim=-1)
        split = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.query(x), key, value)]
        mixed = F.scaled_dot_product_attention(*split, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class TiedTransformer(nn.Module):
    """A stack of transformer blocks whose first and last stage share the embedding."""

    def __init__(self, width: int = 8, depth: int = 2, vocabulary: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(TransformerBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TiedEmbedding(nn.Module):
    """The embedding is read where the model begins and where it ends, in two stages."""

    def __init__(self, width: int = 8, vocabulary: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layer = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(self.embedding(tokens)))
        return F.cross_entropy(F.linear(x, self.embedding.weight).flatten(0, 1), targets.flatten())


class ExpertLayer(nn.Module):
    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.top_k = top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k, dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == index)
            update = torch.relu(expert(x[token])) * weights[token, rank, None]
            out = out.index_add(0, token, update.to(out.dtype))
        return x + out


class MixtureOfExperts(nn.Module):
    """Experts picked by ``topk`` and ``nonzero``: host syncs that run once."""

    def __init__(self, width: int = 8, depth: int = 2, experts: int = 2, top_k: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(width, experts, top_k) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class ConvBlock(nn.Sequential):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
        )


class UNet(nn.Module):
    """Skips that pass over stages, and batch norm's buffers, which change in the forward."""

    def __init__(self, channels: int = 4, depth: int = 1) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(ConvBlock(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(ConvBlock(i + o, o) for i, o in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(channels, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.head(x).square().mean()


class EncoderDecoder(nn.Module):
    """The encoder's result is read by every decoder layer: a value that skips over stages."""

    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(TransformerBlock(width, dropout=0.0) for _ in range(depth))
        self.decoder = nn.ModuleList(TransformerBlock(width, dropout=0.0) for _ in range(depth))
        self.cross = nn.ModuleList(Attention(width, 2, causal=False) for _ in range(depth))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for block in self.encoder:
            source = block(source)
        for block, cross in zip(self.decoder, self.cross, strict=True):
            target = target + cross(block(target), source)
        return target.square().mean()


class CrossAttending(nn.Module):
    """Two layers read what an encoder made, each in a stage of its own: a value that skips over a stage."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, width)
        self.decoder = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = torch.tanh(self.encoder(source))
        for layer in self.decoder:
            target = target + F.scaled_dot_product_attention(layer(target), memory, memory)
        return target.square().mean()


class AttentionLayer(nn.Module):
    """Attention within a budget: what is recomputed is chosen value by value."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.attention(self.norm(x))).square().mean()


class ResidualChain(nn.Module):
    """A chain long enough that the plan with the lowest peak runs back and forth in it: nested recomputation."""

    def __init__(self, width: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


class TiedEnds(nn.Module):
    """The first and the last layer use one parameter: in a pipeline two stages make parts of its gradient."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.tied, self.layer = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(torch.tanh(self.layer(torch.tanh(self.tied(x))))).square().mean()


class CheckpointedMLP(nn.Module):
    """A checkpoint inside of another, of which the outer one saves a value for its recomputation by hand."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.sin(x)))

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        if roundpipe_fx.doing_recompute():
            (scale,) = roundpipe_fx.get_recompute_data()
        else:
            scale = x.detach().norm()
            roundpipe_fx.save_for_recompute(scale)
        return roundpipe_fx.checkpoint(self.inner, torch.tanh(self.first(x / scale)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return roundpipe_fx.checkpoint(self.outer, x).square().mean()


class TiedHead(nn.Module):
    """The logits of a tied head exist for one tile of tokens at a time; forward and backward are one loop."""

    def __init__(self, vocabulary: int = 64, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = F.linear(torch.tanh(self.embedding(tokens)), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class VocabularyHead(nn.Module):
    """The logits of all rows exist for a few words at a time, and the head's gradient is put together of these."""

    def __init__(self, width: int = 8, words: int = 256) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), targets)


class WideMLP(nn.Module):
    """The inner width of an MLP exists for one tile at a time; its backward makes it again, tile by tile."""

    def __init__(self, width: int = 8, inner: int = 64) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.narrow(F.silu(self.wide(x)))).square().mean()


class NoisyWeight(nn.Module):
    """A gradient checkpoint scope: the noisy weight is read outside of it, and is recomputed for the backward."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.linear = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with roundpipe_fx.gradient_checkpoint_scope():
            weight = self.linear.weight + torch.randn_like(self.linear.weight)
        return F.linear(x, weight, self.linear.bias).square().mean()


class LayerDrop(nn.Module):
    """Layers that are skipped at random, by default never: what is drawn for it is read by nobody, and drawn."""

    def __init__(
        self,
        probability: float = 0.0,
        compare: Callable[[Any, float], Any] = operator.lt,
        keeps: bool = False,
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.last = nn.Linear(8, 1)
        self.probability = probability
        self.compare = compare
        self.keeps = keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training:
                if self.compare(torch.rand([]), self.probability):
                    if not self.keeps:
                        continue
                elif self.keeps:
                    continue
            x = F.dropout(layer(x).tanh(), 0.5, self.training)
        return self.last(x).square().sum()


def _tokens(batch: int = 2, length: int = 4, vocabulary: int = 16) -> dict[str, Any]:
    tokens = torch.randint(vocabulary, (batch, length + 1))
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


# name: (model, its inputs, stages): models that many tests train.
GOLDEN: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], int | list[str]]] = {
    "dropout_mlp": (DropoutMLP, lambda: {"x": torch.randn(4, 8)}, 2),
    "tied_transformer": (TiedTransformer, _tokens, ["blocks.1"]),
    "mixture_of_experts": (MixtureOfExperts, lambda: {"x": torch.randn(6, 8)}, ["layers.1"]),
    "unet": (UNet, lambda: {"x": torch.randn(2, 3, 8, 8)}, ["down.1", "up.0"]),
    "encoder_decoder": (
        lambda: EncoderDecoder(depth=1),
        lambda: {"source": torch.randn(2, 3, 8), "target": torch.randn(2, 4, 8)},
        ["decoder.0"],
    ),
    "layer_drop": (LayerDrop, lambda: {"x": torch.randn(4, 8)}, ["layers.1"]),
}

# name: (model, its inputs, stages): whose programs are pinned as they are with all recomputed; one property each.
PINNED: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], int | list[str]]] = {
    **{name: GOLDEN[name] for name in ("dropout_mlp", "mixture_of_experts", "layer_drop")},
    "tied_embedding": (TiedEmbedding, _tokens, 2),
    "unet": (UNet, lambda: {"x": torch.randn(2, 3, 8, 8)}, ["down.1"]),
    "encoder_decoder": (
        CrossAttending,
        lambda: {"source": torch.randn(2, 3, 8), "target": torch.randn(2, 4, 8)},
        ["decoder.0", "decoder.1"],
    ),
}

# name: (model, its inputs, options): programs within a byte budget, or with recompute regions of the user's.
BUDGETED: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "nested_recomputation": (ResidualChain, lambda: {"x": torch.randn(64, 4)}, {"stages": 1, "memory_budget": 0.0}),
    "checkpoints": (CheckpointedMLP, lambda: {"x": torch.randn(8, 4)}, {"stages": 1}),
    "gradient_checkpoint_scope": (NoisyWeight, lambda: {"x": torch.randn(8, 4)}, {"stages": 1}),
    "tiled_head": (TiedHead, lambda: _tokens(2, 8, 64), {"stages": 1, "memory_budget": 6000}),
    "tiled_vocabulary": (
        VocabularyHead,
        lambda: {"x": torch.randn(4, 8), "targets": torch.randint(256, (4,))},
        {"stages": 1, "memory_budget": 12_000},
    ),
    "tiled_mlp": (WideMLP, lambda: {"x": torch.randn(2, 48, 8)}, {"stages": 1, "memory_budget": 30_000}),
    "budget": (AttentionLayer, lambda: {"x": torch.randn(2, 4, 8)}, {"stages": 1, "memory_budget": 0.3}),
}

# name: (model, its inputs, options): stages for several devices, with the schedule.
PIPELINED: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "pipelined_zero_bubble": (
        lambda: ResidualChain(depth=4),
        lambda: {"x": torch.randn(8, 4)},
        {"devices": ("cpu", "cpu"), "num_microbatches": 4, "schedule": "zero_bubble", "checkpoint": "always"},
    ),
    "pipelined_roundpipe": (
        lambda: ResidualChain(depth=4),
        lambda: {"x": torch.randn(8, 4)},
        {"devices": ("cpu", "cpu"), "num_microbatches": 4, "schedule": "roundpipe", "checkpoint": "always"},
    ),
    "pipelined_tied": (
        TiedEnds,
        lambda: {"x": torch.randn(8, 4)},
        {"devices": ("cpu", "cpu"), "num_microbatches": 4, "schedule": "1f1b"},
    ),
}
