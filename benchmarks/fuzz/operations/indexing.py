"""Indexing, masks, routing: what depends on numbers."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind, table
from benchmarks.fuzz.program import Builder

_INDEX = {
    "gather": "{x}.gather(1, {x}.argsort(1)[:, :2])",
    "take_along_dim": "torch.take_along_dim({x}, {x}.argsort(1), 1)",
    "index_select": "{x}.index_select(1, torch.tensor([1, 0, 1]))",
    "index_list": "{x}[:, [1, 0]]",
    "index_batch": "{x}[torch.randperm({x}.shape[0], generator=torch.Generator().manual_seed(3))] if False else {x}[torch.arange({x}.shape[0]).flip(0)]",
    "index_pairs": "{x}[torch.arange({x}.shape[0]), {x}.flatten(1).argmax(1) % {x}.shape[1]]",
    "take": "{x}.take(torch.tensor([0, 2, 1, 2]))",
    "index_add": "{x}.index_add(1, torch.tensor([0, 1, 0]), {x}[:, [1, 0, 1]])",
    "index_copy": "{x}.index_copy(1, torch.tensor([1, 0]), {x}[:, :2].tanh())",
    "index_fill": "{x}.index_fill(1, torch.tensor([1]), 0.5)",
    "index_put": "{x}.index_put((torch.arange({x}.shape[0]), torch.zeros({x}.shape[0], dtype=torch.long)), {x}[:, 1])",
    "index_put_add": "{x}.index_put((torch.tensor([0, 0, 1]),), {x}[:1].expand(3, *{x}.shape[1:]), accumulate=True)",
    "scatter": "torch.zeros_like({x}).scatter(1, {x}.argsort(1), {x})",
    "scatter_add": "{x}.scatter_add(1, ({x} > 0).long(), {x} * 0.5)",
    "scatter_mean": "{x}.scatter_reduce(1, ({x} > 0).long(), {x}, 'mean')",
    "scatter_amax": "{x}.scatter_reduce(1, ({x} > 0).long(), {x} * 2, 'amax', include_self=True)",
    "index_reduce": "{x}.index_reduce(0, torch.tensor([0, 0]), {x}[:2], 'mean')",
    "slice_scatter": "torch.slice_scatter({x}, {x}[:, :1] * 2, 1, 0, 1)",
    "select_scatter": "torch.select_scatter({x}, {x}[:, 1], 1, 0)",
    "diagonal_scatter": "torch.diagonal_scatter({x}, {x}.diagonal(0, 0, 1) * 2, 0, 0, 1)",
    "masked_scatter": "{x}.masked_scatter({x} > 0.5, {x}.tanh())",
    "boolean_mean": "{x} - {x}[{x} > {x}.median()].mean()",
    "boolean_sum": "{x} * (1 + {x}[{x} > 0].sum() * 0.01)",
    "boolean_write": "{x}.index_put(({x} > 0.5,), {x}.new_tensor(0.3))",
    "boolean_rows": "{x} + {x}[{x}.flatten(1).sum(1) >= {x}.flatten(1).sum(1).min()].mean(0)",
    "masked_select": "{x} + torch.masked_select({x}, {x} > {x}.mean()).square().mean()",
    "nonzero_gather": "{x} + {x}.flatten()[({x} > 0).flatten().nonzero().squeeze(1)].sum() * 0.01",
    "where_indices": "{x} * (1 + torch.where({x}[:, 0] > -9)[0].sum() * 0.01)",
    "one_hot": "F.one_hot({x}.flatten(1).argmax(1) % 4, 4).to({x}.dtype) * {x}.flatten(1)[:, :1]",
    "bucketize": "{x} * torch.bucketize({x}.detach(), torch.tensor([-0.5, 0.0, 0.7], dtype={x}.dtype))",
    "searchsorted": "{x} + torch.searchsorted(torch.linspace(-1, 1, 5, dtype={x}.dtype), {x}.detach().contiguous()) * 0.1",
    "unique": "{x} + torch.unique(({x}.detach() * 2).round(), return_inverse=True)[1] * 0.01",
    "unique_count": "{x} * torch.unique(({x} > 0).long()).numel()",
    "isin": "{x} * torch.isin(({x}.detach() * 2).long(), torch.tensor([0, 1]))",
    "item_scale": "{x} * (1 + (({x}.detach() > 0).sum().item() % 3) * 0.1)",
    "argwhere": "{x} + torch.argwhere({x}.detach() > 0).sum() * 1e-3",
    "gather_grad": "{x}.gather(-1, {x}.argmax(-1, keepdim=True)) + {x}",
    "route_mask": "torch.where(({x}.argmax(-1, keepdim=True) == 0), {x}.tanh(), {x} * 0.5)",
    "cumulative_mask": "{x} * (({x} > 0).cumsum(1) < 3)",
    "segment_sum": "torch.zeros({x}.shape[0], 3, dtype={x}.dtype).scatter_add(1, ({x}.flatten(1).detach() * 2).long().clamp(0, 2), {x}.flatten(1))",
    "topk_mask": "{x} * torch.zeros_like({x}).scatter(-1, {x}.topk(1, -1).indices, 1.0)",
    "kth_threshold": "F.relu({x} - {x}.flatten(1).kthvalue(2, 1).values.view(-1, *[1] * ({x}.dim() - 1)))",
    "tensor_index_slice": "{x}[torch.tensor([0, 1]), 1:]",
    "ellipsis_index": "{x}[..., torch.tensor([0, 0, 1])]",
    "negative_index": "{x}[:, torch.tensor([-1, -2])]",
}


def _index(b: Builder, text: str) -> None:
    x = b.float(at_least=2, batched=True, fits=lambda v: all(s > 1 for s in v.shape))
    b.out(text.format(x=x))


table(_INDEX, _index, 0.5)


@kind(0.5)
def experts(b: Builder) -> None:
    """A mixture of experts: rows go where ``topk`` sends them."""
    x = b.rows()
    d = x.shape[1]
    router = b.module(f"nn.Linear({d}, 3)")
    items = b.module(f"nn.ModuleList(nn.Linear({d}, {d}) for _ in range(3))")
    weights = b.let(f"{router}({x}).softmax(-1)")
    chosen = b.let(f"{weights}.topk(2, -1).indices")
    total = b.let(f"torch.zeros_like({x})")
    for i in range(3):
        b.line(f"token, rank = torch.where({chosen} == {i})")
        b.line(
            f"{total} = {total}.index_add(0, token, torch.relu({items}[{i}]({x}[token])) "
            f"* {weights}[token, {chosen}[token, rank], None])"
        )
    b.out(str(total))


@kind(0.5)
def route_one(b: Builder) -> None:
    x = b.rows()
    best = b.let(f"{x}.topk(2, dim=-1)")
    b.out(f"{best}.values.softmax(-1) @ {b.parameter(2, 4)} + {best}.indices[:, :1] * 0.1")


@kind(0.4)
def permute_by_sort(b: Builder) -> None:
    x = b.rows()
    order = b.let(f"{x}[:, 0].argsort()")
    back = b.let(f"torch.empty_like({order}).scatter_(0, {order}, torch.arange({x}.shape[0]))")
    b.out(f"({x}[{order}].cumsum(0))[{back}]")


@kind(0.4)
def integer_values(b: Builder) -> None:
    """Integers that others return or read."""
    x = b.float(at_least=2, batched=True)
    b.out(f"{x}.argmax(-1)")


@kind(0.4)
def boolean_values(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.out(f"{x} > 0.2")


@kind(0.5)
def read_integers(b: Builder) -> None:
    import torch

    i = b.pick(lambda v: v.dtype is torch.int64 and v.batched)
    b.out(f"{i}.to(x0.dtype) * {b.parameter(1)}")


@kind(0.5)
def read_booleans(b: Builder) -> None:
    import torch

    i = b.pick(lambda v: v.dtype is torch.bool and v.batched)
    b.out(f"torch.where({i}, {b.parameter(1)}, 0.5)")


@kind(0.4)
def complex_values(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.out(f"torch.complex({x}, {x}.cos())")


@kind(0.6)
def read_complex(b: Builder) -> None:
    z = b.pick(lambda v: v.dtype.is_complex)
    text = b.rng.choice(
        ["({z} * {z}.conj()).real", "{z}.abs()", "({z} * 1j).real", "torch.view_as_real({z}).sum(-1)", "{z}.imag"]
    )
    b.out(text.format(z=z))


@kind(0.3)
def complex_weight(b: Builder) -> None:
    z = b.pick(lambda v: v.dtype.is_complex and v.batched)
    w = b.let(f"torch.view_as_complex({b.parameter(z.shape[-1], 2)})")
    b.out(f"{z} * {w}")
