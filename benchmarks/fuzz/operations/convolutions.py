"""Convolutions, their transposes, and one whose weight is computed."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind
from benchmarks.fuzz.program import Builder


@kind(1.5)
def conv2d(b: Builder) -> None:
    x = b.image()
    c, out = x.shape[1], b.size(2, 4, 8)
    groups = b.rng.choice([g for g in (1, 1, 2, 4) if c % g == 0 and out % g == 0])
    k, s, p, d = b.size(1, 2, 3, 3), b.size(1, 1, 2), b.size(0, 1, 2), b.size(1, 1, 2)
    mode = (
        b.rng.choice(["", "", "", ', padding_mode="circular"', ', padding_mode="reflect"']) if p == 1 and k == 3 else ""
    )
    conv = b.module(f"nn.Conv2d({c}, {out}, {k}, {s}, {p}, {d}, {groups}{mode})")
    if b.rng.random() < 0.25:
        b.init(f"{conv}.to(memory_format=torch.channels_last)")
    b.out(f"{conv}({x})")


@kind(0.6)
def conv2d_channels_last(b: Builder) -> None:
    x = b.image()
    conv = b.module(
        f"nn.Conv2d({x.shape[1]}, {b.size(4, 8)}, 3, {b.size(1, 2)}, 1).to(memory_format=torch.channels_last)"
    )
    b.out(f"{conv}({x}.contiguous(memory_format=torch.channels_last))")


@kind(0.6)
def depthwise(b: Builder) -> None:
    x = b.image()
    c = x.shape[1]
    b.out(f"{b.module(f'nn.Conv2d({c}, {c}, 3, padding=1, groups={c})')}({x})")


@kind(0.6)
def conv1d(b: Builder) -> None:
    x = b.sequence()
    b.out(f"{b.module(f'nn.Conv1d({x.shape[1]}, {b.size(3, 4, 8)}, {b.size(1, 2, 3)}, padding={b.size(0, 1)})')}({x})")


@kind(0.5)
def causal_conv1d(b: Builder) -> None:
    x = b.sequence()
    d = x.shape[2]
    conv = b.module(f"nn.Conv1d({d}, {d}, 3, groups={d})")
    b.out(f"{conv}(F.pad({x}.transpose(1, 2), (2, 0))).transpose(1, 2)")


@kind(0.4)
def conv3d(b: Builder) -> None:
    x = b.image()
    b.out(f"{b.module('nn.Conv3d(1, 2, (1, 2, 2), padding=(0, 1, 0))')}({x}.unsqueeze(1)).flatten(1, 2)")


@kind(0.7)
def conv_transpose2d(b: Builder) -> None:
    x = b.image()
    k, s = b.rng.choice([(2, 2), (3, 2), (3, 1), (4, 2)])
    extra = ", output_padding=1" if (k, s) == (3, 2) and b.rng.random() < 0.5 else ""
    groups = b.rng.choice([g for g in (1, 1, 2) if x.shape[1] % g == 0])
    b.out(f"{b.module(f'nn.ConvTranspose2d({x.shape[1]}, 4, {k}, {s}, {b.size(0, 1)}, groups={groups}{extra})')}({x})")


@kind(0.4)
def conv_transpose1d(b: Builder) -> None:
    x = b.sequence()
    b.out(f"{b.module(f'nn.ConvTranspose1d({x.shape[1]}, 3, 3, 2)')}({x})")


@kind(0.4)
def conv_by_input(b: Builder) -> None:
    """The weight is computed."""
    x = b.image()
    c = x.shape[1]
    b.out(f"F.conv2d({x}, torch.tanh({b.parameter(4, c, 1, 1)}) * {x}.mean(), padding=0)")
