"""Linear layers: tied, frozen, with parametrizations."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind
from benchmarks.fuzz.program import Builder


@kind(2.5)
def linear(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    bias = b.rng.choice(["", "", ", bias=False"])
    b.out(f"{b.module(f'nn.Linear({x.shape[-1]}, {b.size(4, 8, 10, x.shape[-1])}{bias})')}({x})")


@kind()
def mlp(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    d, act = x.shape[-1], b.rng.choice(["ReLU", "GELU", "SiLU", "Tanh"])
    b.out(f"{x} + {b.module(f'nn.Sequential(nn.Linear({d}, {4 * d}), nn.{act}(), nn.Linear({4 * d}, {d}))')}({x})")


@kind()
def block(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    d = x.shape[-1]
    norm = b.module(f"nn.LayerNorm({d})")
    b.out(f"{x} + {b.module(f'nn.Linear({d}, {d})')}(F.gelu({norm}({x})))")


@kind(0.5)
def tied_linear(b: Builder) -> None:
    """One weight, read twice, once transposed."""
    x = b.float(at_least=2, batched=True)
    m = b.module(f"nn.Linear({x.shape[-1]}, {b.size(4, 8)}, bias=False)")
    b.out(f"F.linear(torch.tanh({m}({x})), {m}.weight.t())")


@kind(0.5)
def tied_parameter(b: Builder) -> None:
    """Two modules with one parameter."""
    x = b.float(at_least=2, batched=True)
    d = x.shape[-1]
    one, other = b.module(f"nn.Linear({d}, {d})"), b.module(f"nn.Linear({d}, {d})")
    b.init(f"{other}.weight = {one}.weight")
    b.out(f"{other}(F.silu({one}({x})))")


@kind(0.6)
def frozen_linear(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    m = b.module(f"nn.Linear({x.shape[-1]}, {b.size(4, 8)}).requires_grad_(False)")
    b.out(f"{m}({x})")


@kind(0.4)
def lora(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    d = x.shape[-1]
    m = b.module(f"nn.Linear({d}, {d}).requires_grad_(False)")
    b.out(f"{m}({x}) + {x} @ {b.parameter(d, 2)} @ {b.parameter(2, d)}")


@kind(0.5)
def bilinear(b: Builder) -> None:
    x = b.rows()
    b.out(f"{b.module(f'nn.Bilinear({x.shape[1]}, {x.shape[1]}, 4)')}({x}, {x}.sin())")


@kind(0.6)
def unused_parameter(b: Builder) -> None:
    b.module("nn.Linear(3, 3)")
    b.out(f"{b.float()} * {b.parameter(1)}")


@kind(0.6)
def weight_norm(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.out(f"{b.module(f'nn.utils.parametrizations.weight_norm(nn.Linear({x.shape[-1]}, 4))')}({x})")


@kind(0.5)
def spectral_norm(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.out(f"{b.module(f'nn.utils.parametrizations.spectral_norm(nn.Linear({x.shape[-1]}, 4))')}({x})")


@kind(0.4)
def orthogonal(b: Builder) -> None:
    x = b.float(at_least=2, batched=True, fits=lambda v: v.shape[-1] <= 16)
    d = x.shape[-1]
    b.out(f"{b.module(f'nn.utils.parametrizations.orthogonal(nn.Linear({d}, {d}))')}({x})")


@kind(0.4)
def user_parametrization(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.define(
        "Symmetric",
        "class Symmetric(nn.Module):\n    def forward(self, w):\n        return w.triu() + w.triu(1).transpose(-1, -2)\n",
    )
    d = x.shape[-1]
    m = b.module(f"nn.Linear({d}, {d})")
    b.init(f'nn.utils.parametrize.register_parametrization({m}, "weight", Symmetric())')
    b.out(f"{m}({x})")
