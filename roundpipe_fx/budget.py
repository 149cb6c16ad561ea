"""Byte budgets: what a user may write, what it means, and what a search for a plan within one returns.

A search returns what it has found, or what makes that impossible; only where the user is told it becomes an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import psutil
import torch

from roundpipe_fx.torch_private import PassedThrough, RefusedGraph

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


T = TypeVar("T", covariant=True)
B = TypeVar("B")


@dataclass(frozen=True)
class Found(Generic[T]):
    """A plan within a budget.

    Attributes:
        value: what was planned; its type depends on the search.
    """

    value: T


@dataclass(frozen=True, kw_only=True)
class Infeasible(Generic[B]):
    """No plan stays within a budget.

    Attributes:
        minimum: the least budget, in bytes, that can be met.
        bottleneck: what needs so many: as the user is told, or what a search goes on with.
        wants_sizes: whether sizes vary, so that nothing could be carried out in tiles: then the frame is traced again
            for the current sizes (:mod:`roundpipe_fx.torch_private.tracing_retries`).
    """

    minimum: int
    bottleneck: B
    wants_sizes: bool = False


Result: TypeAlias = Found[T] | Infeasible[str]
"""A plan, or what the user is told."""


def first_found(results: Iterable[Found[T] | Infeasible[B]]) -> Found[T] | Infeasible[B]:
    """The first plan that is within a budget; if none is, the one of the refusals that needs least.

    Args:
        results: at least one; those after the first plan are not asked for.
    """
    refused: list[Infeasible[B]] = []
    for result in results:
        if isinstance(result, Found):
            return result
        refused.append(result)
    # The way that nearly suffices has the message that helps most.
    return min(refused, key=lambda infeasible: infeasible.minimum)


def plan_or_error(result: Result[T]) -> T:
    """The plan; where there is none, the user is told.

    Raises:
        InfeasibleBudgetError: there is none.
    """
    if isinstance(result, Found):
        return result.value
    raise InfeasibleBudgetError(result.bottleneck, result.minimum, result.wants_sizes)


class InfeasibleBudgetError(PassedThrough, RefusedGraph, ValueError):
    """The budget is below what the step needs at the least. Raised before anything runs.

    Attributes:
        minimum: the least budget, in bytes, that can be met.
    """

    def __init__(self, message: str, minimum: int, wants_sizes: bool = False) -> None:
        super().__init__(message)
        self.minimum = minimum
        self.wants_sizes = wants_sizes


class HostMemoryError(PassedThrough, ValueError):
    """The host has less memory than a step needs there.

    Attributes:
        needed: bytes that the step needs on the host.
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


def parse_budget(budget: Any) -> int | float | None:
    """A budget as bytes (``int``), as a share of what can be saved (``float`` in [0, 1]), or ``None``.

    Args:
        budget: ``6442450944``, ``"6GiB"``, ``"512 MB"``, ``0.3`` or ``None``.

    Raises:
        ValueError: a number out of range, or a text that is no size.
        TypeError: anything else.
    """
    if budget is None:
        return None
    # ``True`` is an int in Python, and would be a budget of one byte.
    if isinstance(budget, bool):
        raise TypeError("memory_budget must be bytes, a size like '6GiB', or a float in [0, 1], not a bool.")
    if isinstance(budget, int):
        if budget <= 0:
            raise ValueError(f"memory_budget={budget}: a number of bytes must be positive.")
        return budget
    if isinstance(budget, float):
        if not (math.isfinite(budget) and 0 <= budget <= 1):
            raise ValueError(
                f"memory_budget={budget}: a float is a fraction, from 0.0 (the least memory that can be "
                "reached) to 1.0 (nothing is recomputed); for bytes give an int or a size like '6GiB'."
            )
        return budget
    if isinstance(budget, str):
        return _size(budget, "memory_budget")
    raise TypeError(
        f"memory_budget must be bytes, a size like '6GiB', a float in [0, 1], or None, not {type(budget).__name__}."
    )


def parse_host_budget(budget: Any) -> int | None:
    """A budget of the host as bytes, or ``None``.

    Args:
        budget: ``68719476736``, ``"64GiB"`` or ``None``.

    Raises:
        ValueError: a negative number, or a text that is no size.
        TypeError: anything else.
    """
    if budget is None:
        return None
    if isinstance(budget, str):
        return _size(budget, "host_budget")
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"host_budget must be bytes, a size like '64GiB', or None, not {type(budget).__name__}.")
    if budget < 0:
        raise ValueError(f"host_budget={budget}: a number of bytes must not be negative.")
    return budget


def _size(text: str, name: str) -> int:
    """The bytes of a size as text.

    Args:
        text: a number with an optional unit, such as ``"6GiB"`` or ``"80 GB"``.
        name: the option's name, for the message of an error.

    Raises:
        ValueError: it is no size.
    """
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(matched.group(2).lower()) if matched else None
    size = int(float(matched.group(1)) * unit) if matched and unit else 0
    if size <= 0:
        raise ValueError(f"{name}={text!r} is not a size; write for example '512MiB', '6GiB' or '80 GB'.")
    return size


_DEFAULT_SHARE = 0.9


def default_budget(device: torch.device, libraries: int = 0) -> int:
    """90 % of a CUDA device's free memory: what the driver has free, and what the allocator holds and does not use.

    Args:
        libraries: bytes that libraries are going to keep there, and have not allocated.
    """
    free, _ = torch.cuda.mem_get_info(device)
    # What PyTorch's allocator holds and nobody uses is free for a step, too.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_DEFAULT_SHARE * max(free + unused - libraries, 0))


def available_memory(device: torch.device) -> int:
    """90 % of the memory that is free on a device; of the CPU, of what the system has available."""
    if device.type == "cuda":
        return default_budget(device)
    return int(_DEFAULT_SHARE * psutil.virtual_memory().available)


def limit_of(budget: int | float, lowest: int, highest: int) -> int:
    """The budget in bytes.

    Args:
        budget: bytes, or a share of the way from ``lowest`` to ``highest``.
        lowest: the least peak that can be reached.
        highest: the peak with nothing recomputed.
    """
    # Linear between both ends: 0.0 is the least that can be reached, and 1.0 is what a step needs that recomputes
    # nothing.
    return budget if isinstance(budget, int) else lowest + math.floor(budget * (highest - lowest))


def share_hint(budget: int | float) -> str:
    """A hint on a refused budget that may have been meant as a share; a sentence with a space before it."""
    meant = isinstance(budget, int) and budget == 1
    return " An int is a number of bytes: the share that recomputes nothing is written 1.0." if meant else ""


def bytes_text(count: int) -> str:
    """A number of bytes for people: ``1.5 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
