"""Counting questions: operations that make the host wait for the device, or decide a shape or a route, as they run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_fx.sync_ops import registered_sync_ops

__all__ = ["count_questions"]

aten = torch.ops.aten
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


class count_questions(TorchDispatchMode):
    """Counts the operations that ask the device a question while a piece of code runs.

    ::

        with roundpipe_fx.count_questions() as asked:
            loss.backward()
        print(asked.total, asked.by_operator)

    Counted are operators that return a size or a number known only from data (``nonzero``, ``unique``, ``item``),
    indexing by a boolean mask, copies from an accelerator to the host, selections that return indices (``topk``,
    ``sort``, ``argmax``), and operators given to :func:`roundpipe_fx.register_sync_op`. Operations inside a kernel or
    a compiled stage (Inductor) are not seen.

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
        if isinstance(func, torch._ops.OpOverload) and _asks(func, args, result):
            self.by_operator[str(func.overloadpacket)] += 1
        return result


def _asks(func: torch._ops.OpOverload, args: Any, result: Any) -> bool:
    if func in _INDEXING:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return True
    if any(output.name == "indices" for output in func._schema.returns):
        return True
    if func.overloadpacket in (aten.argmax, aten.argmin, aten.multinomial):
        return True
    if func in registered_sync_ops() or func.overloadpacket in registered_sync_ops():
        return True
    return (
        isinstance(result, torch.Tensor)
        and result.device.type == "cpu"
        and any(isinstance(arg, torch.Tensor) and arg.device.type not in ("cpu", "meta") for arg in args)
    )
