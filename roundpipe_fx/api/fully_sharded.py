"""A budget for a model that FSDP2 shards: what FSDP2 allocates to gather parameters is set aside.

FSDP2 gathers parameters in hooks around the forward and backward of a module, outside of what is compiled. The plan
gets what they leave of a budget in bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from roundpipe_fx import torch_private
from roundpipe_fx.budget import InfeasibleBudgetError, bytes_text
from roundpipe_fx.ir.options import Options
from roundpipe_fx.report.plan import Plan

__all__ = ["Gathered", "beside_gathered", "gathered_by", "parameters_gathered"]

T = TypeVar("T")


@dataclass(frozen=True)
class Gathered:
    """What FSDP2 does beside the graphs of a model.

    Attributes:
        bytes: that it allocates at one time to gather parameters and to reduce gradients.
        parts: how many graphs there are because parts of the model are sharded on their own; 0: none are.
    """

    bytes: int = 0
    parts: int = 0


def gathered_by(models: Iterable[nn.Module]) -> Gathered:
    """What FSDP2 does beside the graphs of some models."""
    size = parts = 0
    for model in models:
        size += torch_private.gathered_bytes(model)
        parts += len(torch_private.parts_sharded_alone(model))
    return Gathered(size, parts + 1 if parts else 0)


@contextlib.contextmanager
def parameters_gathered(model: nn.Module | None) -> Iterator[None]:
    """Context manager in which a model that is sharded as a whole has its parameters, as in a call of it."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def beside_gathered(
    gathered: int,
    options: Options,
    on_plan: Callable[[Plan], None],
    compile_within: Callable[[Options, Callable[[Plan], None]], T],
) -> T:
    """Compile within what gathered parameters leave of a budget.

    Args:
        gathered: bytes that FSDP2 allocates at one time; 0 for a model that is not sharded.
        options: the user's.
        on_plan: called with each plan that is made.
        compile_within: compiles with other options, and calls another ``on_plan``.

    Raises:
        InfeasibleBudgetError: the budget is below what both need at the least, which it names.
    """
    if not gathered:
        return compile_within(options, on_plan)
    budget = options.memory_budget
    if isinstance(budget, int):
        options = dataclasses.replace(options, memory_budget=max(1, budget - gathered))
    try:
        return compile_within(options, lambda plan: on_plan(dataclasses.replace(plan, gathered_bytes=gathered)))
    except InfeasibleBudgetError as error:
        if not isinstance(budget, int):
            raise
        minimum = error.minimum + gathered
        raise InfeasibleBudgetError(
            f"memory_budget of {budget} bytes ({bytes_text(budget)}) cannot be met: at least {minimum} bytes "
            f"({bytes_text(minimum)}) are needed. Of these FSDP2 needs {gathered} bytes ({bytes_text(gathered)}) to "
            f"gather parameters. What that leaves is too little for the rest: {error}",
            minimum,
        ) from None
