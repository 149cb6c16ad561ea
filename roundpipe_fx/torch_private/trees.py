"""Trees of Python containers: PyTorch has functions on them, in a private module only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import (
    TreeSpec,
    key_get,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "TreeSpec",
    "key_get",
    "keystr",
    "one_level",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]


def one_level(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], Callable[[Sequence[Any]], Any]] | None:
    """Keys and parts of a value of a registered type, and what makes a value from others; ``None`` for a leaf.

    PyTorch's functions refer to themselves, and to ``is_leaf``, until garbage is collected, so that is not to refer to
    the value.
    """
    itself = id(value)
    is_part = lambda item: id(item) != itself  # noqa: E731
    parts, tree = tree_flatten(value, is_leaf=is_part)
    if len(parts) == 1 and parts[0] is value:
        return None
    try:
        paths = [path for path, _ in tree_flatten_with_path(value, is_leaf=is_part)[0]]
    except ValueError:  # registered without keys
        keys: tuple[Any, ...] = tuple(range(len(parts)))
    else:
        keys = tuple(_key_of(path[0]) for path in paths)
    return keys, tuple(parts), lambda new_parts: tree_unflatten(list(new_parts), tree)


def _key_of(key: Any) -> Any:
    """The key, index or name of an entry of a path."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return key
