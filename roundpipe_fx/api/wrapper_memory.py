"""Memory that FSDP2 and DistributedDataParallel allocate beside the compiled graphs of a model.

FSDP2 gathers parameters in hooks around the forward and backward of a module: this is set aside, and the plan gets what
it leaves of a budget in bytes. DDP allocates its buckets when it is made, and replaces them by others of the same size
in the second step or the third: plans only tell how large they are.
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

T = TypeVar("T")


@dataclass(frozen=True)
class WrapperMemory:
    """Allocations of FSDP2 and DDP beside the graphs of a model.

    Attributes:
        gathered: bytes that FSDP2 allocates at one time to gather parameters and to reduce gradients.
        parts: how many graphs there are because parts of the model are sharded on their own; 0: none are.
        buckets: bytes of DDP's buckets.
    """

    gathered: int = 0
    parts: int = 0
    buckets: int = 0


def wrapper_memory_of(models: Iterable[nn.Module]) -> WrapperMemory:
    """Find the memory that FSDP2 and DDP allocate outside compiled graphs, and the DDP whose forward is running."""
    gathered = parts = buckets = 0
    for model in models:
        gathered += torch_private.gathered_bytes(model)
        parts += len(torch_private.parts_sharded_alone(model))
        parallel = torch_private.as_data_parallel(model)
        buckets += torch_private.bucket_bytes(parallel) if parallel is not None else 0
    return WrapperMemory(gathered, parts + 1 if parts else 0, buckets or torch_private.active_bucket_bytes())


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


def compile_within_remaining_budget(
    wrapper_memory: WrapperMemory,
    options: Options,
    on_plan: Callable[[Plan], None],
    compile_within: Callable[[Options, Callable[[Plan], None]], T],
) -> T:
    """Compile within what others leave of a budget.

    Args:
        on_plan: called with each plan that is made.
        compile_within: compiles with other options, and calls another ``on_plan``.

    Raises:
        InfeasibleBudgetError: the budget is below what both need at the least, which it names.
    """
    gathered, budget = wrapper_memory.gathered, options.memory_budget
    if isinstance(budget, int):
        options = dataclasses.replace(options, memory_budget=max(1, budget - gathered))

    def tell(plan: Plan) -> None:
        on_plan(dataclasses.replace(plan, gathered_bytes=gathered, bucket_bytes=wrapper_memory.buckets))

    try:
        return compile_within(options, tell if gathered or wrapper_memory.buckets else on_plan)
    except InfeasibleBudgetError as error:
        if not gathered or not isinstance(budget, int):
            raise
        minimum = error.minimum + gathered
        raise InfeasibleBudgetError(
            f"memory_budget of {budget} bytes ({bytes_text(budget)}) cannot be met: at least {minimum} bytes "
            f"({bytes_text(minimum)}) are needed. Of these FSDP2 needs {gathered} bytes ({bytes_text(gathered)}) to "
            f"gather parameters. What that leaves is too little for the rest: {error}",
            minimum,
        ) from None
