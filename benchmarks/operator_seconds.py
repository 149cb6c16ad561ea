"""What operators take that a step dispatches: modelled seconds, and seconds by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundpipe_fx.analysis.cost.roofline import DEVICES, count_call_flops, numbers_drawn

__all__ = ["modelled_seconds", "seconds_in_operators"]

CPU = DEVICES["cpu"]

Timed = Callable[[Any, Any, Any], tuple[Any, float]]
"""Runs an operator with arguments and keyword arguments, and returns its result and what it took."""


def modelled_seconds(run: Callable[[], Any]) -> tuple[Any, float]:
    """What a run returns, and the roofline's seconds of every operation that it dispatches."""
    return _sum_of(run, _modelled)


def seconds_in_operators(run: Callable[[], Any]) -> float:
    """Seconds of a run that pass inside PyTorch's operators: what is left when nothing else costs anything."""
    return _sum_of(run, _clocked)[1]


def _sum_of(run: Callable[[], Any], timed: Timed) -> tuple[Any, float]:
    """What a run returns, and the seconds of all operations that it dispatches."""
    seconds = 0.0

    class Sum(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def is_infra_mode(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal seconds
            result, taken = timed(func, args, kwargs or {})
            seconds += taken
            return result

    with Sum():
        returned = run()
    return returned, seconds


def _clocked(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = func(*args, **kwargs)
    return result, time.perf_counter() - start


def _modelled(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    result = func(*args, **kwargs)
    if isinstance(func, torch._ops.HigherOrderOperator):  # the operator inside is another call
        inner = next(argument for argument in args if isinstance(argument, torch._ops.OpOverload))
        func, args = inner, args[args.index(inner) + 1 :]
    read = {t.untyped_storage()._cdata: t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    made = {t.untyped_storage()._cdata: t for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
    fresh_storages = made.keys() - read.keys()
    in_place = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
    if not fresh_storages and not in_place:
        return result, 0.0  # a view
    flops = count_call_flops(func, args, kwargs, result)
    traffic = sum(t.untyped_storage().nbytes() for t in (*read.values(), *(made[key] for key in fresh_storages)))
    return result, CPU.seconds(flops, traffic, draws=numbers_drawn(func, result))
