"""Tiling as users of other libraries write it: a loss over tiles of rows, and an MLP over tiles of the sequence.

The three ways to a loss differ in what its forward leaves to the backward: everything, so that each tile runs again
(``torch.utils.checkpoint``); the gradients of rows, where those of parameters have been added to ``.grad`` (Arctic Long
Sequence Training's ``TiledFusedLogitsLoss``); or the gradients of rows and of the head's parameters (Liger's fused
linear cross-entropy).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["WAYS", "Head", "tile_mlps"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class Head:
    """From rows of hidden values to rows of logits.

    Attributes:
        linear: the last module.
        before: runs before it.
        cap: the logits' soft cap.
    """

    linear: nn.Linear
    before: nn.Module | None = None
    cap: float | None = None

    def hidden(self, rows: Tensor) -> Tensor:
        """What the last module reads."""
        return rows if self.before is None else self.before(rows)

    def __call__(self, rows: Tensor) -> Tensor:
        logits = self.linear(self.hidden(rows))
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def _summed_loss(head: Head, rows: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(rows), labels, reduction="sum")


def _under_checkpoint(head: Head, rows: Tensor, labels: Tensor, tiles: int) -> Tensor:
    losses = [
        checkpoint(_summed_loss, head, tile, of_tile, use_reentrant=False)
        for tile, of_tile in zip(rows.chunk(tiles), labels.chunk(tiles), strict=True)
    ]
    return torch.stack(losses).sum() / (labels != -100).sum()


class _GradientsInForward(torch.autograd.Function):
    """Arctic's: each tile's backward follows its forward, as if the incoming gradient were one."""

    @staticmethod
    def forward(ctx: Any, head: Head, rows: Tensor, labels: Tensor, tiles: int) -> Tensor:
        gradient, count, losses = torch.empty_like(rows), (labels != -100).sum(), []
        parts = zip(rows.detach().chunk(tiles), labels.chunk(tiles), gradient.chunk(tiles), strict=True)
        for tile, of_tile, its_gradient in parts:
            leaf = tile.detach().requires_grad_()
            with torch.enable_grad():
                loss = _summed_loss(head, leaf, of_tile) / count
            loss.backward()
            its_gradient.copy_(leaf.grad)
            losses.append(loss.detach())
        ctx.save_for_backward(gradient)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return None, gradient.mul_(incoming), None, None


def _with_gradients_in_forward(head: Head, rows: Tensor, labels: Tensor, tiles: int) -> Tensor:
    return _GradientsInForward.apply(head, rows, labels, tiles)


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Liger's: a tile's logits are overwritten by their gradients, and products are added to the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cap: float | None, tiles: int
    ) -> Tensor:
        by_rows, by_weight = torch.empty_like(rows), torch.zeros_like(weight)
        by_bias = None if bias is None else torch.zeros_like(bias)
        counted = labels != -100
        shares = counted / counted.sum()
        total = rows.new_zeros(())
        for tile, of_tile, share, tile_by_rows in zip(
            *(value.chunk(tiles) for value in (rows, torch.where(counted, labels, 0), shares, by_rows)), strict=True
        ):
            logits = F.linear(tile, weight, bias)
            slope = None
            if cap is not None:
                logits.div_(cap).tanh_()
                slope = 1 - logits.square()
                logits.mul_(cap)
            normalizer = logits.logsumexp(1, keepdim=True)
            total += ((normalizer - logits.gather(1, of_tile[:, None]))[:, 0] * share).sum()
            gradient = logits.sub_(normalizer).exp_()
            gradient.scatter_add_(1, of_tile[:, None], gradient.new_full((len(of_tile), 1), -1.0))
            gradient.mul_(share[:, None])
            if slope is not None:
                gradient.mul_(slope)
            torch.mm(gradient, weight, out=tile_by_rows)
            by_weight.addmm_(gradient.t(), tile)
            if by_bias is not None:
                by_bias += gradient.sum(0)
        ctx.save_for_backward(by_rows, by_weight, by_bias)
        return total

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Any:
        by_rows, by_weight, by_bias = ctx.saved_tensors
        if incoming != 1.0:
            for value in (by_rows, by_weight, *(() if by_bias is None else (by_bias,))):
                value.mul_(incoming)
        return by_rows, by_weight, by_bias, None, None, None


def _fused(head: Head, rows: Tensor, labels: Tensor, tiles: int) -> Tensor:
    """Liger's; what comes before the linear module runs on all rows."""
    linear = head.linear
    return _FusedLinearCrossEntropy.apply(head.hidden(rows), linear.weight, linear.bias, labels, head.cap, tiles)


WAYS: dict[str, Callable[[Head, Tensor, Tensor, int], Tensor]] = {
    "checkpoint": _under_checkpoint,
    "Arctic": _with_gradients_in_forward,
    "Liger": _fused,
}
"""By name: the mean cross-entropy of rows, in tiles; labels of -100 do not count."""


class _TiledMLP(torch.autograd.Function):
    """Arctic's: the input is saved, and each tile of the sequence runs again before its backward."""

    @staticmethod
    def forward(ctx: Any, mlp: Callable[[Tensor], Tensor], x: Tensor, tiles: int) -> Tensor:
        ctx.mlp, ctx.tiles = mlp, tiles
        ctx.save_for_backward(x)
        return torch.cat([mlp(tile) for tile in x.chunk(tiles, dim=-2)], dim=-2)

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gradient = torch.empty_like(x)
        parts = zip(*(value.chunk(ctx.tiles, dim=-2) for value in (x, incoming, gradient)), strict=True)
        for tile, its_incoming, its_gradient in parts:
            leaf = tile.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.mlp(leaf)
            torch.autograd.backward(out, its_incoming)
            its_gradient.copy_(leaf.grad)
        return None, gradient, None


def tile_mlps(mlps: Sequence[nn.Module], tiles: int, way: str) -> None:
    """Replace the forward of MLPs by one over tiles of the sequence, as Arctic's users patch Hugging Face's.

    Args:
        mlps: whose only input has the shape (batch, sequence, width).
        tiles: how many.
        way: ``"checkpoint"``: each tile under ``torch.utils.checkpoint``; else Arctic's ``TiledMLP``.
    """
    for mlp in mlps:
        mlp.forward = _tiled(mlp.forward, tiles, way)


def _tiled(mlp: Callable[[Tensor], Tensor], tiles: int, way: str) -> Callable[[Tensor], Tensor]:
    def under_checkpoint(x: Tensor) -> Tensor:
        return torch.cat([checkpoint(mlp, tile, use_reentrant=False) for tile in x.chunk(tiles, dim=-2)], dim=-2)

    def arctic(x: Tensor) -> Tensor:
        return _TiledMLP.apply(mlp, x, tiles)

    return under_checkpoint if way == "checkpoint" else arctic
