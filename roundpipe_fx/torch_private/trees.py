"""Trees of Python containers: PyTorch has functions on them, in a private module only."""

from __future__ import annotations

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
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
