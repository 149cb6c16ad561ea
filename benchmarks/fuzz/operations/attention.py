"""Attention: fused, by hand, and in layers of transformers."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind
from benchmarks.fuzz.program import Builder


@kind()
def attention(b: Builder) -> None:
    x = b.sequence()
    d = x.shape[2]
    qkv = b.module(f"nn.Linear({d}, {3 * d})")
    heads_ = b._divisor(d)
    parts = b.let(f"{qkv}({x}).unflatten(-1, (3, {heads_}, -1)).permute(2, 0, 3, 1, 4)")
    how = b.rng.choice(
        ["", ", is_causal=True", ", scale=0.3", f", attn_mask=torch.ones({x.shape[1]}, {x.shape[1]}).tril().bool()"]
    )
    b.out(f"F.scaled_dot_product_attention(*{parts}.unbind(0){how}).transpose(1, 2).flatten(2)")


@kind(0.6)
def attention_by_hand(b: Builder) -> None:
    x = b.sequence()
    mask = b.let(f"torch.ones({x}.shape[1], {x}.shape[1], dtype=torch.bool).triu(1)")
    scores = b.let(f"({x} @ {x}.transpose(1, 2) / {x}.shape[-1] ** 0.5).masked_fill({mask}, float('-inf'))")
    b.out(f"{scores}.softmax(-1) @ {x}")


@kind(0.5)
def attention_bias(b: Builder) -> None:
    x = b.sequence()
    bias = b.parameter(x.shape[1], x.shape[1])
    q = b.let(f"{x}.unsqueeze(1)")
    b.out(f"F.scaled_dot_product_attention({q}, {q} * 0.5, {q}.sin(), attn_mask={bias}).squeeze(1)")


@kind(0.4)
def attention_gqa(b: Builder) -> None:
    x = b.sequence()
    d = x.shape[2]
    q = b.let(f"{b.module(f'nn.Linear({d}, 16)')}({x}).unflatten(-1, (4, 4)).transpose(1, 2)")
    k = b.let(f"{b.module(f'nn.Linear({d}, 8)')}({x}).unflatten(-1, (2, 4)).transpose(1, 2)")
    b.out(f"F.scaled_dot_product_attention({q}, {k}, {k}.tanh(), enable_gqa=True).transpose(1, 2).flatten(2)")


@kind(0.6)
def multihead_attention(b: Builder) -> None:
    x = b.sequence()
    d = x.shape[2]
    need = b.rng.choice(["True", "False"])
    attn = b.module(f"nn.MultiheadAttention({d}, {b._divisor(d)}, batch_first=True)")
    b.out(f"{attn}({x}, {x}, {x}, need_weights={need})[0]")


@kind(0.5)
def encoder_layer(b: Builder) -> None:
    x = b.sequence()
    d, p = x.shape[2], b.rng.choice([0.0, 0.1])
    first = b.rng.choice(["True", "False"])
    text = f"nn.TransformerEncoderLayer({d}, {b._divisor(d)}, {2 * d}, {p}, batch_first=True, norm_first={first})"
    b.out(f"{b.module(text)}({x})")


@kind(0.4)
def decoder_layer(b: Builder) -> None:
    x = b.sequence()
    d = x.shape[2]
    text = f"nn.TransformerDecoderLayer({d}, {b._divisor(d)}, {2 * d}, 0.0, batch_first=True)"
    b.out(f"{b.module(text)}({x}, {x}.roll(1, 1))")


@kind(0.5)
def rotary(b: Builder) -> None:
    x = b.sequence()
    if x.shape[2] % 2:
        x = b.let(f"F.pad({x}, (0, 1))")
    angle = b.let(
        f"torch.arange({x}.shape[1], dtype={x}.dtype)[:, None] * torch.arange({x}.shape[2] // 2, dtype={x}.dtype)"
    )
    first, second = b.let(f"{x}[..., ::2]"), b.let(f"{x}[..., 1::2]")
    b.out(
        f"torch.cat([{first} * {angle}.cos() - {second} * {angle}.sin(), "
        f"{first} * {angle}.sin() + {second} * {angle}.cos()], -1)"
    )
