"""Embeddings, positions and tokens; and the gates of squeeze-and-excite."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind
from benchmarks.fuzz.program import Builder


@kind(0.7)
def embedding(b: Builder) -> None:
    x = b.rows()
    more = b.rng.choice(["", ", padding_idx=0", ", scale_grad_by_freq=True", ", max_norm=1.0"])
    table_ = b.module(f"nn.Embedding(6, {b.size(4, 8)}{more})")
    b.out(f"{table_}(({x}.detach() * 2).long().clamp(0, 5))")


@kind(0.6)
def embedding_bag(b: Builder) -> None:
    x = b.rows()
    mode = b.rng.choice(["sum", "mean", "max"])
    bag = b.module(f'nn.EmbeddingBag(6, {b.size(4, 8)}, mode="{mode}")')
    b.out(f"{bag}(({x}.detach() * 2).long().clamp(0, 5))")


@kind(0.4)
def embedding_bag_weights(b: Builder) -> None:
    x = b.rows()
    bag = b.module('nn.EmbeddingBag(6, 4, mode="sum")')
    b.out(f"{bag}(({x}.detach() * 2).long().clamp(0, 5), per_sample_weights={x}.sigmoid())")


@kind(0.4)
def embedding_bag_offsets(b: Builder) -> None:
    x = b.rows()
    bag = b.module('nn.EmbeddingBag(6, 4, mode="mean")')
    ids = b.let(f"({x}.detach() * 2).long().clamp(0, 5).flatten()")
    b.out(f"{bag}({ids}, torch.arange({x}.shape[0]) * {x}.shape[1])")


@kind(0.5)
def tied_embedding(b: Builder) -> None:
    """A language model's table, at both ends."""
    x = b.rows()
    table_ = b.module("nn.Embedding(6, 4)")
    b.out(f"F.linear(torch.tanh({table_}(({x}.detach() * 2).long().clamp(0, 5))), {table_}.weight)")


@kind(0.4)
def positions(b: Builder) -> None:
    x = b.sequence()
    table_ = b.module(f"nn.Embedding({x.shape[1]}, {x.shape[2]})")
    b.out(f"{x} + {table_}(torch.arange({x}.shape[1]))")


@kind(0.4)
def position_parameter(b: Builder) -> None:
    x = b.sequence()
    b.out(f"{x} + {b.parameter(1, x.shape[1], x.shape[2])}")


@kind(0.4)
def class_token(b: Builder) -> None:
    x = b.sequence()
    b.out(f"torch.cat([{b.parameter(1, 1, x.shape[2])}.expand({x}.shape[0], -1, -1), {x}], 1)")


@kind(0.5)
def squeeze_excite(b: Builder) -> None:
    x = b.image()
    c = x.shape[1]
    b.out(f"{x} * {b.module(f'nn.Linear({c}, {c})')}({x}.mean((2, 3))).sigmoid()[:, :, None, None]")
