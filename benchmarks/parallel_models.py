"""Language models whose layers several devices share out: a Llama and a GPT, with PyTorch's tensor parallelism.

Between blocks each rank has a part of the tokens (sequence parallelism), and each has a part of the vocabulary. The
models are on the meta device, in bfloat16, and for plans: no other process is needed. ::

    with loss_parallel():
        roundpipe_fx.plan(llama(layers=80, width=8192, …), tokens, labels=tokens, mesh_shape=(32, 1, RANKS), …)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

RANKS = 8
"""Devices that share out a layer: those of a node."""

_HEAD = 128
_VOCABULARY_OF_LLAMA, _VOCABULARY_OF_GPT = 128_256, 51_200


class _Attention(nn.Module):
    """Causal attention, with fewer heads of keys and values if asked for, and rotary positions."""

    def __init__(self, width: int, heads: int, kv_heads: int, bias: bool) -> None:
        super().__init__()
        self.head = width // heads
        self.repeats = heads // kv_heads
        self.query = nn.Linear(width, width, bias=bias)
        self.key, self.value = (nn.Linear(width, kv_heads * self.head, bias=bias) for _ in range(2))
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        split = lambda own: own(x).unflatten(-1, (-1, self.head)).transpose(1, 2)  # noqa: E731
        query, key, value = split(self.query), split(self.key), split(self.value)
        if turns is not None:
            query, key = _turned(query, *turns), _turned(key, *turns)
        if self.repeats > 1:
            key, value = key.repeat_interleave(self.repeats, 1), value.repeat_interleave(self.repeats, 1)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(-2))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class _LlamaMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _GPTMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class _Block(nn.Module):
    def __init__(self, norms: list[nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor, turns: Any) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.mlp(self.mlp_norm(x))


class _Decoder(nn.Module):
    """Words, positions if they are learned, blocks, and the loss."""

    def __init__(self, vocabulary: int, width: int, positions: int, blocks: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width) if positions else None
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = norm, nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, turns = self.words(tokens), None
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if self.positions is not None:
            x = x + self.positions(places[None])
        else:
            steps = torch.arange(0, _HEAD, 2, device=tokens.device) / _HEAD
            angles = places[:, None] * 500_000.0**-steps
            angles = torch.cat((angles, angles), -1)
            turns = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, turns)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels.flatten())
        return loss.to_local() if isinstance(loss, DTensor) else loss


def llama(layers: int, width: int, inner: int, heads: int) -> nn.Module:
    """A Llama 3 over eight devices.

    Args:
        layers: how many blocks.
        width: of the residual stream.
        inner: width of the MLPs.
        heads: of the queries; there are eight of keys and values.
    """
    with torch.device("meta"):
        norm = lambda: nn.RMSNorm(width, eps=1e-5)  # noqa: E731
        blocks: list[nn.Module] = [
            _Block([norm(), norm()], _Attention(width, heads, 8, False), _LlamaMLP(width, inner)) for _ in range(layers)
        ]
        return _parallelized(_Decoder(_VOCABULARY_OF_LLAMA, width, 0, blocks, norm()), gated=True)


def gpt(layers: int, width: int, heads: int) -> nn.Module:
    """A GPT as Megatron trains it, over eight devices, without dropout.

    Args:
        layers: how many blocks.
        width: of the residual stream.
        heads: of the attention.
    """
    with torch.device("meta"):
        norm = lambda: nn.LayerNorm(width)  # noqa: E731
        blocks: list[nn.Module] = [
            _Block([norm(), norm()], _Attention(width, heads, heads, True), _GPTMLP(width, 4 * width))
            for _ in range(layers)
        ]
        return _parallelized(_Decoder(_VOCABULARY_OF_GPT, width, 2048, blocks, norm()), gated=False)


def _parallelized(model: nn.Module, gated: bool) -> nn.Module:
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    rows = Shard(1)
    plan: dict[str, Any] = {"norm": SequenceParallel()}
    for name in ("words", *(() if gated else ("positions",))):
        plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows, use_local_output=False)
    for name in ("attention_norm", "mlp_norm"):
        plan[f"blocks.*.{name}"] = SequenceParallel()
    whole = Replicate()
    for name, others in (("attention", (None,)), ("mlp", ())):  # gathered once for all projections of it
        plan[f"blocks.*.{name}"] = PrepareModuleInput(
            input_layouts=(rows, *others), desired_input_layouts=(whole, *others)
        )
    for name in ("attention.query", "attention.key", "attention.value", "mlp.up", *(("mlp.gate",) if gated else ())):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("attention.out", "mlp.down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel(output_layouts=rows, use_local_output=False)
    plan["head"] = ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(model.bfloat16(), mesh, plan)
