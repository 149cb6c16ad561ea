"""Which operations run: a count by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, ran: Counter[Any]) -> None:
        super().__init__()
        self.ran = ran

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch.compile skips frames under other modes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def count_operations() -> Iterator[Counter[Any]]:
    """How often each operator (``OpOverload``) runs inside."""
    ran: Counter[Any] = Counter()
    with _Mode(ran):
        yield ran
