"""A small model, written with each interface of checkpointing and without it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import roundpipe_fx
from tests.comparison import Step, train_step

WIDTH = 16
aten = torch.ops.aten


class Model(nn.Module):
    """A stack of layers; subclasses write it with an interface, ``plain`` says to leave that out."""

    def __init__(self, plain: bool = False, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain = plain
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(depth)
        )

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers[index](x)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.layers)):
            x = self.layer(index, x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


class Checkpointed(Model):
    checkpoint: Callable[..., Any] = staticmethod(roundpipe_fx.checkpoint)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.layers)):
            x = self.layer(index, x) if self.plain else self.checkpoint(self.layer, index, x)
        return x


class TorchCheckpointed(Checkpointed):
    checkpoint = staticmethod(functools.partial(torch_checkpoint.checkpoint, use_reentrant=False))


class Sequential(Model):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        layers = [functools.partial(self.layer, index) for index in range(len(self.layers))]
        if self.plain:
            return functools.reduce(lambda value, layer: layer(value), layers, x)
        return roundpipe_fx.checkpoint_sequential(layers, 2, x)


class Wrapped(Model):
    def __init__(self, plain: bool = False, depth: int = 4) -> None:
        super().__init__(plain, depth)
        for index in () if plain else range(depth):
            self.layers[index] = roundpipe_fx.checkpoint_wrapper(self.layers[index], offload_to_cpu=index > 0)


class Nested(Checkpointed):
    def half(self, start: int, x: torch.Tensor) -> torch.Tensor:
        for index in range(start, start + 2):
            x = self.layer(index, x) if self.plain else roundpipe_fx.checkpoint(self.layer, index, x)
        return x.sin()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for start in (0, 2):
            x = self.half(start, x) if self.plain else roundpipe_fx.checkpoint(self.half, start, x)
        return x


def policy(named: CheckpointPolicy, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return named if operator is aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Checkpointed):
    named = CheckpointPolicy.MUST_SAVE

    @staticmethod
    def checkpoint(*args: Any) -> Any:
        contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(policy, Selective.named))
        return roundpipe_fx.checkpoint(*args, context_fn=contexts)


class WithoutGeneratorState(Checkpointed):
    @staticmethod
    def checkpoint(*args: Any) -> Any:
        return roundpipe_fx.checkpoint(*args, preserve_rng_state=False)


class Routed(Model):
    """RoundPipe: each layer routes half of the rows, and saves the route by hand."""

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self.plain:
            rows = x.detach().sum(-1).argsort()[: len(x) // 2]
        elif roundpipe_fx.doing_recompute():
            ((rows,),) = roundpipe_fx.get_recompute_data()
        else:
            rows = x.detach().sum(-1).argsort()[: len(x) // 2]
            roundpipe_fx.save_for_recompute([rows])
        return x.index_add(0, rows, self.layers[index](x[rows]))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.layers)):
            x = self.layer(index, x) if self.plain else roundpipe_fx.checkpoint(self.layer, index, x)
        return x


class Asking(Checkpointed):
    """torchgpipe: what is done once a step is done in the first pass alone."""

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if not self.plain:
            inside = roundpipe_fx.is_checkpointing() or roundpipe_fx.is_recomputing()
            x = x if inside == torch.is_grad_enabled() else x * 1000  # never
            x = x * 1000 if torch.compiler.is_compiling() and roundpipe_fx.is_recomputing() else x  # never
        return x + self.layers[index](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1000 if roundpipe_fx.is_checkpointing() else x  # never
        return self.body(x).square().mean()


class NoisyWeights(Model):
    """RETURNN: weights with noise, which are read outside of the scope that makes them."""

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        weight = self.layers[index][0].weight
        if self.plain:
            noisy = weight + 0.1 * torch.randn_like(weight)
        else:
            with roundpipe_fx.gradient_checkpoint_scope():
                noisy = weight + 0.1 * torch.randn_like(weight)
        return x + self.layers[index][3](F.linear(x, noisy, self.layers[index][0].bias).relu())


class ScopedLayers(Model):
    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self.plain:
            return super().layer(index, x)
        scope = roundpipe_fx.gradient_checkpoint_scope()
        with scope:
            hidden = self.layers[index](x)
        hidden = hidden + x
        scope.exit_saved_tensors_hooks_scope()
        return hidden


INTERFACES = [
    Checkpointed,
    TorchCheckpointed,
    Sequential,
    Wrapped,
    Nested,
    Selective,
    WithoutGeneratorState,
    Routed,
    Asking,
    NoisyWeights,
    ScopedLayers,
]
BATCH = {"x": torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(7))}


def eager_step(model: nn.Module) -> Step:
    model = copy.deepcopy(model)
    return train_step(model, model, BATCH)
