"""Models with parallel layers, as their users write them: small Llamas whose blocks may raise or pick rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

__all__ = [
    "WORDS",
    "Armed",
    "BreakingNet",
    "Net",
    "PickingNet",
    "picking_parallel",
    "sequence_parallel",
    "tensor_parallel",
    "vocabulary_parallel",
]

WIDTH, WORDS, DEPTH = 16, 32, 2


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.norm_of_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [own(y).unflatten(-1, (-1, 4)).transpose(1, 2) for own in (self.query, self.key, self.value)]
        x = x + self.dropout(
            self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2))
        )
        y = self.norm_of_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """A small Llama."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(DEPTH))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Armed:
    """In which of the calls that follow a block of this process raises; ``None``: in none."""

    call: int | None = None


@torch.library.custom_op("roundpipe_fx_tests::may_raise", mutates_args=())
def may_raise(x: torch.Tensor) -> torch.Tensor:
    if Armed.call is not None:
        Armed.call -= 1
        if Armed.call < 0:
            raise ValueError("the stage of this rank is broken")
    return x.clone()


may_raise.register_fake(torch.empty_like)
may_raise.register_autograd(lambda ctx, gradient: may_raise(gradient))


class BreakingBlock(Block):
    """A block that may raise between its collectives, in the forward and in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(may_raise(x))


class BreakingNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BreakingBlock(0.0) for _ in range(4))  # so that each stage has some


class PickingBlock(nn.Module):
    """The number of rows that its collectives read depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        rows = (y[..., 0] > 0).nonzero(as_tuple=True)
        return x.index_put(rows, self.down(F.silu(self.up(may_raise(y[rows])))), accumulate=True)


class PickingNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PickingBlock() for _ in range(DEPTH))


def picking_parallel(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tensor_parallel(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.layers:
        columns = {name: ColwiseParallel() for name in ("query", "key", "value", "gate", "up")}
        parallelize_module(layer, mesh, {**columns, "out": RowwiseParallel(), "down": RowwiseParallel()})
    return model


def sequence_parallel(model: Any, mesh: DeviceMesh) -> Any:
    rows = Shard(1)
    for layer in model.layers:
        plan: dict[str, Any] = {name: SequenceParallel() for name in ("norm", "norm_of_mlp")}
        plan |= {name: ColwiseParallel(input_layouts=rows) for name in ("query", "key", "value", "gate", "up")}
        plan |= {name: RowwiseParallel(output_layouts=rows, use_local_output=False) for name in ("out", "down")}
        parallelize_module(layer, mesh, plan)
    first = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=rows, use_local_output=False)
    head = ColwiseParallel(input_layouts=rows, output_layouts=Replicate())
    return parallelize_module(model, mesh, {"layers.0": first, "norm": SequenceParallel(), "head": head})


def vocabulary_parallel(model: Any, mesh: DeviceMesh) -> Any:
    """The embedding too, of which each rank has some rows."""
    return parallelize_module(
        tensor_parallel(model, mesh),
        mesh,
        {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())},
    )
