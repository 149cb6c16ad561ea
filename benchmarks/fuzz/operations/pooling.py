"""Pooling and sampling: pools, interpolation, grids."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind
from benchmarks.fuzz.program import Builder


@kind(0.7)
def max_pool2d(b: Builder) -> None:
    b.out(f"F.max_pool2d({b.image()}, 2, {b.size(1, 2)}, {b.size(0, 1)})")


@kind(0.5)
def max_pool_indices(b: Builder) -> None:
    x = b.image()
    pooled, where = (
        b.let(f"F.max_pool2d({x}, 2, return_indices=True)[0]"),
        b.let(f"F.max_pool2d({x}, 2, return_indices=True)[1]"),
    )
    b.out(f"F.max_unpool2d({pooled} * 2, {where}, 2, output_size={x}.shape[-2:])")


@kind(0.4)
def max_pool1d(b: Builder) -> None:
    b.out(f"F.max_pool1d({b.sequence()}, 2, 1)")


@kind(0.6)
def avg_pool2d(b: Builder) -> None:
    b.out(f"F.avg_pool2d({b.image()}, 2, 1, {b.size(0, 1)}, count_include_pad={b.rng.choice(['True', 'False'])})")


@kind(0.6)
def adaptive_avg_pool2d(b: Builder) -> None:
    b.out(f"F.adaptive_avg_pool2d({b.image()}, ({b.size(1, 2, 3)}, {b.size(1, 2)}))")


@kind(0.5)
def adaptive_max_pool2d(b: Builder) -> None:
    b.out(f"F.adaptive_max_pool2d({b.image()}, {b.size(1, 2)})")


@kind(0.4)
def adaptive_pool1d(b: Builder) -> None:
    b.out(f"F.adaptive_{b.rng.choice(['avg', 'max'])}_pool1d({b.sequence()}, 2)")


@kind(0.4)
def lp_pool(b: Builder) -> None:
    b.out(f"F.lp_pool2d({b.image()}.abs() + 0.1, 2, 2)")


@kind(0.4)
def avg_pool3d(b: Builder) -> None:
    b.out(f"F.{b.rng.choice(['avg', 'max'])}_pool3d({b.image()}.unsqueeze(1), (2, 1, 2), 1).squeeze(1)")


@kind(0.8)
def interpolate(b: Builder) -> None:
    x = b.image()
    mode = b.rng.choice(["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
    how = b.rng.choice(["scale_factor=2.0", "size=(3, 5)", "scale_factor=0.5"])
    corners = ", align_corners=True" if mode in ("bilinear", "bicubic") and b.rng.random() < 0.5 else ""
    b.out(f'F.interpolate({x}, {how}, mode="{mode}"{corners})')


@kind(0.4)
def interpolate1d(b: Builder) -> None:
    mode = b.rng.choice(["nearest", "linear"])
    b.out(f'F.interpolate({b.sequence()}, scale_factor=2.0, mode="{mode}")')


@kind(0.5)
def grid_sample(b: Builder) -> None:
    x = b.image()
    theta = b.let(f"torch.eye(2, 3, dtype={x}.dtype).expand({x}.shape[0], 2, 3) * (1 + {x}.mean().tanh())")
    mode = b.rng.choice(["bilinear", "nearest", "bicubic"])
    b.out(
        f"F.grid_sample({x}, F.affine_grid({theta}, [{x}.shape[0], {x}.shape[1], 3, 4], align_corners=False), "
        f'mode="{mode}", align_corners=False)'
    )
