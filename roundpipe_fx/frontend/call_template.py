"""Call templates: trees of arguments in which slots replace everything that changes from call to call.

A graph can pass only tensors and sizes to an operator. All other arguments of a Python function are stored next to the
graph as a template: the tree, with a slot in place of each tensor and each symbolic number::

    (x, [2, w], {"p": 0.5})     the arguments
    x, w                        tensors, which the graph passes
    (□0, [2, □1], {"p": 0.5})   the template: □n is tensor n
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch


@dataclass(frozen=True)
class _Slot:
    """A slot for an argument of a call.

    Attributes:
        kind: a tensor, an integer, or a float that is passed as a tensor of one element.
        position: its position among the tensors or sizes.
    """

    kind: Literal["tensor", "size", "number"]
    position: int


@dataclass(frozen=True)
class _Items:
    """A sequence with slots; ``make`` constructs it from a list of items."""

    make: Callable[[list[Any]], Any]
    items: tuple[Any, ...]


def empty_template(tree: Any, tensors: list[torch.Tensor], sizes: list[Any]) -> Any:
    """Replace tensors and symbolic numbers in a tree by slots.

    Args:
        tree: nested lists, tuples, named tuples, shapes and dictionaries; all other objects are constants.
        tensors: extended by the tensors in the tree, and by its symbolic floats as tensors.
        sizes: extended by the symbolic integers in the tree.

    Returns:
        the template.
    """
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return _Slot("tensor", len(tensors) - 1)
    if isinstance(tree, torch.SymInt):
        sizes.append(tree)
        return _Slot("size", len(sizes) - 1)
    if isinstance(tree, torch.SymFloat):
        tensors.append(torch.scalar_tensor(tree, dtype=torch.float64))  # type: ignore[arg-type]
        return _Slot("number", len(tensors) - 1)
    if isinstance(tree, torch.SymBool):
        return bool(tree)
    if isinstance(tree, (list, tuple)):
        kind = type(tree)
        make: Callable[[list[Any]], Any] = getattr(kind, "_make", kind)
        return _Items(make, tuple(empty_template(item, tensors, sizes) for item in tree))
    if type(tree) is dict:
        return {key: empty_template(item, tensors, sizes) for key, item in tree.items()}
    return tree


def fill_template(template: Any, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Any:
    """Fill the slots of a template.

    Args:
        tensors: values of its tensor slots.
        sizes: values of its size slots.

    Returns:
        the tree of arguments.
    """
    if isinstance(template, _Slot):
        if template.kind == "size":
            return sizes[template.position]
        value = tensors[template.position]
        return value.item() if template.kind == "number" else value
    if isinstance(template, _Items):
        return template.make([fill_template(item, tensors, sizes) for item in template.items])
    if type(template) is dict:
        return {key: fill_template(item, tensors, sizes) for key, item in template.items()}
    return template


def is_same_template(left: Any, right: Any) -> bool:
    """Return whether two templates are equal in type and value. Objects of other types are equal only to themselves."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_same_template, left, right))
    if isinstance(left, _Items):
        return left.make == right.make and is_same_template(left.items, right.items)
    if type(left) is dict:
        return list(left) == list(right) and all(is_same_template(item, right[key]) for key, item in left.items())
    if isinstance(left, np.ndarray):
        alike = left.dtype == right.dtype and left.shape == right.shape and not left.dtype.hasobject
        return bool(alike and left.tobytes() == right.tobytes())
    if isinstance(left, float):
        return left.hex() == right.hex()  # distinguishes 0.0 and -0.0, and NaN equals itself
    return isinstance(left, _COMPARED) and bool(left == right)


_COMPARED = (int, str, bytes, complex, torch.dtype, torch.device, torch.layout, torch.memory_format, _Slot)
