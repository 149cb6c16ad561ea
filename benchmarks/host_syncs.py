"""Operations that synchronize or decide, run in the backward: roundpipe_fx beside ``torch.utils.checkpoint``.

python -m benchmarks.host_syncs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe_fx
from benchmarks.side_by_side import fresh, report


class Experts(nn.Module):
    """Tokens go to the experts that ``topk`` picks, found with ``nonzero``."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == index)
            out = out.index_add(0, token, torch.relu(expert(x[token])) * weights[token, rank, None])
        return x + out


class Masked(nn.Module):
    """Only rows that a mask selects are changed."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).relu()
        keep = y.sum(-1) > y.sum(-1).mean()
        return x.index_put((keep,), x[keep] + y[keep])


class Sized(nn.Module):
    """Python reads a number from the device."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = (x.detach() > 0).sum().item() / x.numel()
        return x + self.layer(x * scale).relu()


def chain(layer: Callable[[], nn.Module], depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(depth)))


def asked_in_backward(loss: torch.Tensor) -> str:
    with roundpipe_fx.count_host_syncs() as syncs:
        loss.backward()
    return ", ".join(f"{count} {name.removeprefix('aten.')}" for name, count in syncs.by_operator.items()) or "0"


def main() -> None:
    rows: list[dict[str, Any]] = []
    models = [("topk and nonzero", Experts), ("boolean-mask indexing", Masked), ("item", Sized)]
    for name, layer in fresh(models):
        x = torch.randn(64, 32)
        model = chain(layer)
        eager = asked_in_backward(model(x).square().mean())
        y = x
        for block in model:
            y = checkpoint(block, y, use_reentrant=False)
        checkpointed = asked_in_backward(y.square().mean())
        compiled = roundpipe_fx.compile(model, stages=3, recompute="full", fullgraph=True)
        compiled(x).square().mean().backward()
        ours = asked_in_backward(compiled(x).square().mean())
        rows.append({"3 layers with": name, "eager": eager, "checkpoint per layer": checkpointed, "roundpipe_fx": ours})
    report("host_syncs", "host synchronizations in the backward (target: 0)", rows)


if __name__ == "__main__":
    main()
