"""Specifications of how values are split or merged, as those of ``torch.distributed.pipelining``.

A tree like the value's, or a prefix of it, of ``TensorChunkSpec(dim)`` (or just the ``int``) and ``_Replicate`` (or
just ``None``); in outputs also a reducer like ``sum_reducer``. Fields of records are specified by name, in a dict.
"""

from __future__ import annotations

from typing import Any

from roundpipe_fx.pipeline.structures import Path, leaves_of
from roundpipe_fx.torch_private import is_replicate_spec

__all__ = ["BY_CONVENTION", "dim_of", "specs_of", "spread"]

BY_CONVENTION = object()
"""Stands for a part of which no specification tells."""


def specs_of(spec: Any) -> list[tuple[Path, str, Any]]:
    """The parts of a specification, with the paths of what they are for; none: by convention."""
    if spec is None:
        return []
    return list(leaves_of(spec, lambda _, item: item is None or _is_spec(item)))


def spread(spec: Any, value: Any) -> dict[Path, Any]:
    """The spec expanded to every leaf."""
    specs = specs_of(spec)
    by_path = {}
    for path, _, _ in leaves_of(value) if specs else ():
        above = [item for place, _, item in specs if path[: len(place)] == place]
        if above:
            by_path[path] = above[0]
    return by_path


def _is_spec(item: Any) -> bool:
    return isinstance(item, int) or hasattr(item, "split_dim") or hasattr(item, "reduce_fn") or is_replicate_spec(item)


def dim_of(spec: Any) -> int | None:
    """The dimension that a specification names; ``None``: the same for every microbatch.

    Raises:
        TypeError: it names none.
    """
    if spec is None or is_replicate_spec(spec):
        return None
    dim = getattr(spec, "split_dim", spec)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(
            f"{spec!r} does not say how to split: give a dimension (int), None to replicate, or torch.distributed."
            "pipelining's TensorChunkSpec and _Replicate."
        )
    return dim
