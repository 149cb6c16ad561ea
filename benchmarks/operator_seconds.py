"""What operators take that a step dispatches: modelled seconds, and seconds by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundpipe_fx.cost.roofline import DEVICES, flops_of_call, numbers_drawn

__all__ = ["ModelledSeconds", "seconds_in_operators"]

CPU = DEVICES["cpu"]


class ModelledSeconds(TorchDispatchMode):
    """Adds up the roofline's seconds of every operation that is dispatched."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):  # the operator inside is another call
            inner = next(argument for argument in args if isinstance(argument, torch._ops.OpOverload))
            arguments = args[args.index(inner) + 1 :]
            self.seconds += _modelled(inner, arguments, kwargs, result)
        else:
            self.seconds += _modelled(func, args, kwargs, result)
        return result


def _modelled(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    read = {t.untyped_storage()._cdata: t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    made = {t.untyped_storage()._cdata: t for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
    fresh_storages = made.keys() - read.keys()
    in_place = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
    if not fresh_storages and not in_place:
        return 0.0  # a view
    flops = flops_of_call(func, args, kwargs, result)
    traffic = sum(t.untyped_storage().nbytes() for t in (*read.values(), *(made[key] for key in fresh_storages)))
    return CPU.seconds(flops, traffic, draws=numbers_drawn(func, result))


class _ClockedSeconds(TorchDispatchMode):
    """Adds up the seconds that operations take inside, on the CPU; what happens between them does not count."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        start = time.perf_counter()
        result = func(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        return result


def seconds_in_operators(run: Callable[[], Any]) -> float:
    """Seconds of a run that pass inside PyTorch's operators: what is left when nothing else costs anything."""
    with _ClockedSeconds() as clock:
        run()
    return clock.seconds
