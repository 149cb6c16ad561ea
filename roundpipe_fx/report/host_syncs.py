"""Counting questions: operations that make the host wait for the device, or decide a shape or a route, as they run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundpipe_fx.analysis.host_sync import why_host_sync
from roundpipe_fx.analysis.sync_ops import registered_sync_ops

__all__ = ["count_host_syncs"]


class count_host_syncs(TorchDispatchMode):
    """Counts the operations that ask the device a question while a piece of code runs.

    ::

        with roundpipe_fx.count_host_syncs() as syncs:
            loss.backward()
        print(syncs.total, syncs.by_operator)

    Counted are operators that return a size or a number known only from data (``nonzero``, ``unique``, ``item``),
    indexing by a boolean mask, copies from an accelerator to the host, selections that return indices (``topk``,
    ``sort``, ``max`` along a dimension, ``argmax``), and operators given to :func:`roundpipe_fx.register_sync_op`: what
    a compiled model never repeats (:mod:`roundpipe_fx.analysis.host_sync`). Operations inside a kernel or a compiled
    stage (Inductor) are not seen.

    Attributes:
        by_operator: how often each operator ran, by name.
        total: the sum.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile skips frames under other modes."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """How many ran in all."""
        return self.by_operator.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and _is_host_sync(func, args, kwargs, result):
            self.by_operator[str(func.overloadpacket)] += 1
        return result


def _is_host_sync(func: torch._ops.OpOverload, args: Any, kwargs: Any, result: Any) -> bool:
    operands, results = (
        [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in ((args, kwargs), result)
    )
    return why_host_sync(func, args, operands, results, registered_sync_ops()) is not None
