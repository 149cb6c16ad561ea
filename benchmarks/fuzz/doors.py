"""Front doors: the ways in which a user has a model compiled, behind all of which a step is to be the same."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import roundpipe_fx

__all__ = ["DOORS", "Compiled", "compile_by", "is_told"]

DOORS = ("compile", "in place", "torch.compile")
"""``roundpipe_fx.compile(net)``, ``net.compile(backend=…)``, ``torch.compile(net, backend=…)``."""

_OF_TORCH = ("dynamic", "fullgraph")


@dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
        run: takes inputs as the program does.
        module: what was compiled.
        replans: whether what a step shows is planned for in the next one.
    """

    run: Callable[..., Any]
    module: nn.Module
    replans: bool = True

    @property
    def plans(self) -> tuple[Any, ...]:
        """All plans so far."""
        return self.run.plans if self.replans else roundpipe_fx.plans(self.module)  # type: ignore[attr-defined]

    @property
    def plan(self) -> Any:
        """The latest plan for training; ``None`` for a program without parameters, by which PyTorch's doors find it.

        Raises:
            AssertionError: there is none otherwise.
        """
        if self.replans:
            return self.run.plan  # type: ignore[attr-defined]
        trained = [plan for plan in self.plans if plan.training]
        assert trained or not any(True for _ in self.module.parameters()), "the compiled model has no plan"
        return trained[-1] if trained else None

    @property
    def is_stale(self) -> bool:
        """Whether the next step is planned again."""
        return self.replans and self.run._state_of_roundpipe_fx.learned.stale  # type: ignore[attr-defined]

    @property
    def is_tiled(self) -> bool:
        """Whether a plan has tiles, so that sums are rounded otherwise."""
        return any(plan.tiles for plan in self.plans)


def compile_by(door: str, net: nn.Module, **options: Any) -> Compiled:
    """Compile a program; ``options``: of ``roundpipe_fx.compile``."""
    if door == "compile":
        return Compiled(roundpipe_fx.compile(net, **options), net)
    outer = {name: options.pop(name) for name in _OF_TORCH if name in options}
    if door == "in place":
        net.compile(backend="roundpipe_fx", options=options, **outer)
        return Compiled(net, net, replans=False)
    return Compiled(torch.compile(net, backend="roundpipe_fx", options=options, **outer), net, replans=False)


def is_told(told: Sequence[warnings.WarningMessage]) -> bool:
    """Whether a warning says, with figures, that a step may take more than its budget."""
    texts = [str(warning.message) for warning in told]
    return any("roundpipe_fx" in text and "budget" in text and re.search(r"\d+ bytes", text) for text in texts)
