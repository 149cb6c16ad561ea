"""Norms: with and without running statistics, over any dimensions."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind
from benchmarks.fuzz.program import Builder


@kind()
def batch_norm2d(b: Builder) -> None:
    x = b.image()
    more = b.rng.choice(["", "", ", momentum=None", ", affine=False", ", track_running_stats=False", ", momentum=0.3"])
    b.out(f"{b.module(f'nn.BatchNorm2d({x.shape[1]}{more})')}({x})")


@kind(0.7)
def batch_norm1d(b: Builder) -> None:
    x = b.rows() if b.rng.random() < 0.5 else b.sequence()
    more = b.rng.choice(["", "", ", momentum=None", ", affine=False", ", track_running_stats=False"])
    b.out(f"{b.module(f'nn.BatchNorm1d({x.shape[1]}{more})')}({x})")


@kind(0.5)
def batch_norm_eval(b: Builder) -> None:
    x = b.image()
    b.out(f"{b.module(f'nn.BatchNorm2d({x.shape[1]}).eval()')}({x})")


@kind(0.5)
def batch_norm_functional(b: Builder) -> None:
    x = b.rows()
    mean = b.buffer(f"torch.zeros({x.shape[1]})")
    var = b.buffer(f"torch.ones({x.shape[1]})")
    b.out(f"F.batch_norm({x}, {mean}, {var}, training={b.rng.choice(['True', 'True', 'False'])}, momentum=0.2)")


@kind(0.6)
def batch_norm_relu(b: Builder) -> None:
    x = b.image()
    c = x.shape[1]
    bn = b.module(f"nn.BatchNorm2d({c})")
    b.out(f"F.relu({bn}({b.module(f'nn.Conv2d({c}, {c}, 3, padding=1, bias=False)')}({x})), inplace=True)")


@kind(0.5)
def batch_norm_channels_last(b: Builder) -> None:
    x = b.image()
    bn = b.module(f"nn.BatchNorm2d({x.shape[1]})")
    b.out(f"{bn}({x}.contiguous(memory_format=torch.channels_last))")


@kind(0.4)
def batch_norm_twice(b: Builder) -> None:
    """One layer, called twice: its statistics are updated twice."""
    x = b.rows()
    bn = b.module(f"nn.BatchNorm1d({x.shape[1]})")
    b.out(f"{bn}({bn}({x}).tanh())")


@kind(0.6)
def instance_norm(b: Builder) -> None:
    x = b.image()
    more = b.rng.choice(["", ", affine=True", ", affine=True, track_running_stats=True"])
    b.out(f"{b.module(f'nn.InstanceNorm2d({x.shape[1]}{more})')}({x})")


@kind(0.7)
def group_norm(b: Builder) -> None:
    x = b.image()
    c = x.shape[1]
    groups = b.rng.choice([g for g in (1, 2, 4) if c % g == 0])
    b.out(f"{b.module(f'nn.GroupNorm({groups}, {c})')}({x})")


@kind()
def layer_norm(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    more = b.rng.choice(["", "", ", elementwise_affine=False", ", bias=False"])
    b.out(f"{b.module(f'nn.LayerNorm({x.shape[-1]}{more})')}({x})")


@kind(0.5)
def layer_norm_transposed(b: Builder) -> None:
    x = b.sequence()
    b.out(f"{b.module(f'nn.LayerNorm({x.shape[1]})')}({x}.transpose(1, 2))")


@kind(0.5)
def layer_norm_image(b: Builder) -> None:
    x = b.image()
    b.out(f"{b.module(f'nn.LayerNorm([{x.shape[2]}, {x.shape[3]}])')}({x})")


@kind(0.7)
def rms_norm(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.out(f"{b.module(f'nn.RMSNorm({x.shape[-1]})')}({x})")


@kind(0.5)
def rms_norm_by_hand(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    weight = b.parameter(x.shape[-1])
    b.out(f"{weight} * ({x}.float() * torch.rsqrt({x}.float().pow(2).mean(-1, keepdim=True) + 1e-3)).to({x}.dtype)")


@kind(0.4)
def local_response_norm(b: Builder) -> None:
    b.out(f"F.local_response_norm({b.image()}, 2)")
