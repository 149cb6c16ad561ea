"""Counts host synchronizations: operations that make the host wait for the device, or decide a shape or a route."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from roundpipe_fx.analysis.host_sync import registered_sync_ops, why_host_sync
from roundpipe_fx.torch_private import TorchDispatchMode, conjugates_resolved, tree_leaves

__all__ = ["count_host_syncs"]


class count_host_syncs(TorchDispatchMode):
    """Context manager that counts host synchronizations.

    ::

        with roundpipe_fx.count_host_syncs() as syncs:
            loss.backward()
        print(syncs.total, syncs.by_operator)

    It counts the operations that a compiled model never repeats (:mod:`roundpipe_fx.analysis.host_sync`): operators
    whose result has a data-dependent size or is read by the host (``nonzero``, ``unique``, ``item``), indexing by a
    boolean mask, copies from an accelerator to the host, selections that return indices (``topk``, ``sort``, ``max``
    along a dimension, ``argmax``), and operators declared with :func:`roundpipe_fx.register_sync_op`. Operations inside
    a kernel or a stage compiled by Inductor are not counted.

    Attributes:
        by_operator: number of calls, by name of the operator.
        total: number of calls of all operators.
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
        """Number of calls of all operators."""
        return self.by_operator.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with conjugates_resolved():
            result = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and _is_host_sync(func, args, kwargs, result):
            self.by_operator[str(func.overloadpacket)] += 1
        return result


def _is_host_sync(func: torch._ops.OpOverload, args: Any, kwargs: Any, result: Any) -> bool:
    operands, results = (
        [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in ((args, kwargs), result)
    )
    return why_host_sync(func, args, operands, results, registered_sync_ops()) is not None
