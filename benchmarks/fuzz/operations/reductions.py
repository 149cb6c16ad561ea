"""Reductions, scans, and what is sorted out along a dimension."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind, table
from benchmarks.fuzz.program import Builder

_ALONG = {
    "sum_dim": "{x}.sum({d})",
    "mean_dim": "{x}.mean({d}, keepdim=True)",
    "amax": "{x}.amax({d})",
    "amin": "{x}.amin({d}, keepdim=True)",
    "max_values": "{x}.max({d}).values",
    "min_values": "{x}.min({d}, keepdim=True).values",
    "max_pair": "torch.add(*torch.max({x}, {d}))",
    "median": "{x}.median({d}).values",
    "nanmedian": "{x}.nanmedian({d}).values",
    "mode": "{x}.mode({d}).values",
    "kthvalue": "{x}.kthvalue(2, {d}).values",
    "var": "{x}.var({d}, unbiased=False)",
    "std": "({x} + torch.arange({x}.shape[{d}], dtype={x}.dtype).mean()).std({d}, unbiased=False)",
    "var_mean": "torch.add(*torch.var_mean({x}, {d}, correction=0))",
    "std_mean": "torch.mul(*torch.std_mean({x}, {d}, correction=0))",
    "aminmax": "torch.sub(*torch.aminmax({x}, dim={d}))",
    "norm": "torch.linalg.vector_norm({x} + 0.1, dim={d})",
    "norm_one": "{x}.norm(p=1, dim={d})",
    "norm_three": "{x}.norm(p=3, dim={d}, keepdim=True)",
    "norm_inf": "torch.linalg.vector_norm({x}, ord=float('inf'), dim={d})",
    "logsumexp": "torch.logsumexp({x}, {d})",
    "nansum": "{x}.nansum({d})",
    "prod": "{x}.tanh().prod({d})",
    "quantile": "torch.quantile({x}, 0.4, dim={d})",
    "softmax": "F.softmax({x}, {d}) * 3",
    "log_softmax": "F.log_softmax({x}, {d})",
    "softmin": "F.softmin({x}, {d})",
    "softmax_float": "F.softmax({x}, {d}, dtype=torch.float32).to({x}.dtype)",
    "normalize": "F.normalize({x}, dim={d}, eps=1e-3)",
    "cumsum": "{x}.cumsum({d})",
    "cumprod": "{x}.tanh().cumprod({d})",
    "logcumsumexp": "torch.logcumsumexp({x}, {d})",
    "cummax": "torch.cummax({x}, {d}).values",
    "cummin": "torch.cummin({x}, {d})[0]",
    "diff": "torch.diff({x}, dim={d})",
    "trapezoid": "torch.trapezoid({x}, dim={d})",
    "argmax_gather": "{x}.gather({d}, {x}.argmax({d}, keepdim=True))",
    "argmin_onehot": "{x} * (torch.arange({x}.shape[{d}]).view([-1 if i == {d} else 1 for i in range({x}.dim())]) == {x}.argmin({d}, keepdim=True))",
    "sort_values": "{x}.sort({d}).values",
    "sort_descending": "torch.sort({x}, dim={d}, descending=True, stable=True)[0]",
    "msort": "{x}.transpose(0, {d}).msort().transpose(0, {d})",
    "argsort": "{x}.gather({d}, (-{x}).argsort({d}))",
    "topk": "{x}.topk(2, {d}).values",
    "topk_gather": "({x} * 2).gather({d}, {x}.topk(2, {d}).indices)",
    "any": "{x} * ({x} > 1).any({d}, keepdim=True)",
    "all": "{x} + ({x} > -2).all({d}, keepdim=True).to({x}.dtype)",
    "count_nonzero": "{x} * ({x} > 0).sum({d}, keepdim=True) * 0.1",
    "renorm": "torch.renorm({x}, 2, {d}, 1.5)",
    "centre": "{x} - {x}.mean({d}, keepdim=True)",
    "standardize": "({x} - {x}.mean({d}, keepdim=True)) * torch.rsqrt({x}.var({d}, keepdim=True, correction=0) + 0.1)",
    "flip_cumsum": "{x}.flip({d}).cumsum({d}).flip({d})",
    "clamp_by_max": "{x} / ({x}.abs().amax({d}, keepdim=True) + 0.5)",
}


def _along(b: Builder, text: str) -> None:
    x = b.float(at_least=1, fits=lambda v: all(s > 1 for s in v.shape))
    b.out(text.format(x=x, d=b.axis(x)))


table(_ALONG, _along, 0.5)

_WHOLE = {
    "sum_all": "{x} + {x}.sum() * 0.01",
    "mean_all": "{x} - {x}.mean()",
    "max_all": "{x} * 0.5 + {x}.max()",
    "logsumexp_all": "{x} - {x}.logsumexp(tuple(range({x}.dim())))",
    "norm_all": "{x} / ({x}.norm() + 1)",
    "sum_to_number": "{x}.mean()",
    "median_all": "{x} - {x}.median()",
    "std_all": "{x} / ({x}.std() + 1)",
    "batch_mean": "{x} - {x}.mean(0)",
    "batch_max": "{x} - {x}.max(0).values",
    "batch_softmax": "{x}.softmax(0)",
    "batch_sort": "{x}.sort(0).values",
    "batch_cumsum": "{x}.cumsum(0) * 0.3",
    "histogram": "{x} + torch.histc({x}.detach().float(), 4, -2, 2).mean().to({x}.dtype) * 0.01",
    "bincount": "{x} * torch.bincount(({x} > 0).long().flatten(), minlength=2)[1] * 0.01",
}


def _whole(b: Builder, text: str) -> None:
    b.out(text.format(x=b.float(at_least=1, fits=lambda v: v.shape[0] > 1)))


table(_WHOLE, _whole, 0.4)


@kind(0.5)
def cosine_similarity(b: Builder) -> None:
    x = b.float(at_least=2)
    b.out(f"F.cosine_similarity({x}, {b.like(x)} + 0.1, dim=-1)")


@kind(0.5)
def pairwise_distance(b: Builder) -> None:
    x = b.rows()
    b.out(f"F.pairwise_distance({x}, {x}.tanh() + 0.3)")


@kind(0.4)
def cdist(b: Builder) -> None:
    x = b.sequence()
    p = b.size(1, 2, 2, 3)
    b.out(f"torch.cdist({x}, {x}.roll(1, 1) + 0.7, p={p}.0)")


@kind(0.4)
def pdist_like(b: Builder) -> None:
    x = b.rows()
    b.out(f"({x}[:, None] - {x}[None] + 0.3).square().sum(-1).add(0.1).sqrt().mean(1)")
