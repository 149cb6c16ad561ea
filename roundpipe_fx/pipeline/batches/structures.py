"""Structures: Python values that hold tensors, taken apart and put together again with their types.

Understood are lists, tuples, dictionaries and other mappings (``BatchEncoding``), named tuples, dataclasses,
``SimpleNamespace``, caches of Hugging Face and what is registered with ``torch.utils._pytree``. Any other object is a
leaf: :func:`holds_tensors` tells whether tensors are hidden in it. A leaf has a path, and the text by which a program
would refer to it::

    {"x": t, "pair": [1, Pair(x=2, y=t)], "ns": SimpleNamespace(a=3)}

    ("x",)          ['x']
    ("pair", 0)     ['pair'][0]
    ("pair", 1, "x")    ['pair'][1].x         a named tuple's parts have names
    ("pair", 1, "y")    ['pair'][1].y
    ("ns", "a")     ['ns'].a

Specifications of how values are split or merged, as those of ``torch.distributed.pipelining``, are trees like the
value's, or a prefix of it, of ``TensorChunkSpec(dim)`` (or just the ``int``) and ``_Replicate`` (or just ``None``); in
outputs also a reducer like ``sum_reducer``. Fields of records are specified by name, in a dict. Above,
``{"x": 0, "pair": None}`` splits x along dimension 0, and every microbatch gets the whole pair.
"""

from __future__ import annotations

import copy
import types
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from roundpipe_fx.torch_private import is_replicate_spec, one_level

Path = tuple[Any, ...]
"""The keys, indices and names of attributes that lead to a part of a value."""


@dataclass(frozen=True)
class Container:
    """One level of a value.

    Attributes:
        keys: key, index or name of each part.
        parts: in the order of ``keys``.
        rebuild: makes a value of the same type from other parts; of a sequence, from any number of them.
        is_sequence: whether it is a list, a tuple or a deque, which may have an item for each sample.
        has_attributes: whether keys are names of attributes.
    """

    keys: tuple[Any, ...]
    parts: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    is_sequence: bool = False
    has_attributes: bool = False

    def text_of(self, key: Any) -> str:
        """The expression by which a program would refer to a part."""
        return f".{key}" if self.has_attributes else f"[{key!r}]"


_SIMPLE = (torch.Tensor, str, bytes, int, float, complex, type(None), torch.Size, nn.Module, type, PackedSequence)


def open_container(value: Any) -> Container | None:
    """One level of a value; ``None`` for a leaf."""
    if isinstance(value, _SIMPLE):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Container(tuple(value._fields), tuple(value), type(value)._make, has_attributes=True)  # type: ignore[attr-defined]
    if type(value) in (list, tuple):
        return Container(tuple(range(len(value))), tuple(value), type(value), is_sequence=True)
    # A subclass of list may carry tensors in attributes, which `copy.copy` would share between microbatches: it is a
    # leaf then.
    if isinstance(value, (list, deque)):
        return None if _has_hidden_tensors(value, attributes_of(value)) else _open_sequence(value)
    known = one_level(value)
    if known is not None:
        return Container(*known)
    if isinstance(value, Mapping):
        return _open_mapping(value)
    if is_dataclass(value):
        # Attributes that a dataclass got after its construction belong to it too; fields come first, in their order.
        names = dict.fromkeys(field.name for field in fields(value) if hasattr(value, field.name))
        return _open_record(value, tuple(names | dict.fromkeys(attributes_of(value))))
    if isinstance(value, types.SimpleNamespace):
        return _open_record(value, tuple(vars(value)))
    return _open_cache(value)


def _open_sequence(value: Any) -> Container:
    def rebuild(parts: Sequence[Any]) -> Any:
        # Copied first, so that what a subclass keeps beside its items survives; its items are replaced.
        made = copy.copy(value)
        made.clear()
        made.extend(parts)
        return made

    return Container(tuple(range(len(value))), tuple(value), rebuild, is_sequence=True)


def _open_mapping(value: Mapping[Any, Any]) -> Container | None:
    keys = tuple(value)
    parts = tuple(value[key] for key in keys)
    if isinstance(value, types.MappingProxyType):
        return Container(keys, parts, lambda parts: types.MappingProxyType(dict(zip(keys, parts, strict=True))))
    attributes = attributes_of(value)
    # `class Batch(dict)` with `self.__dict__ = self`: attributes and items are one mapping, and have to be one in the
    # copy.
    is_its_attributes = attributes is value
    extra = {} if is_its_attributes else dict(attributes)
    if isinstance(value, UserDict):
        extra.pop("data", None)
    if not isinstance(value, MutableMapping) or _has_hidden_tensors(value, extra):
        return None

    def rebuild(parts: Sequence[Any]) -> Any:
        made = copy.copy(value)
        if is_its_attributes:
            made.__dict__ = made  # type: ignore[assignment]
        for key, part in zip(keys, parts, strict=True):
            made[key] = part
        return made

    return Container(keys, parts, rebuild)


def _open_record(value: Any, names: tuple[str, ...]) -> Container:
    def rebuild(parts: Sequence[Any]) -> Any:
        made = copy.copy(value)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(made, name, part)  # it may be frozen
        return made

    return Container(names, tuple(getattr(value, name) for name in names), rebuild, has_attributes=True)


_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


def _open_cache(value: Any) -> Container | None:
    """Keys and values of the layers of Hugging Face's cache; what else it has does not depend on the rows."""
    kind = type(value)
    if kind.__module__ != "transformers.cache_utils":
        return None
    if kind.__name__ in _LAYERS:
        return _open_record(
            value, tuple(name for name in ("keys", "values") if torch.is_tensor(getattr(value, name, None)))
        )
    if kind.__name__ == "EncoderDecoderCache":
        return _open_record(value, ("self_attention_cache", "cross_attention_cache"))
    if kind.__name__ != "DynamicCache" or any(type(layer).__name__ not in _LAYERS for layer in value.layers):
        return None
    layers = tuple(value.layers)

    def rebuild(parts: Sequence[Any]) -> Any:
        made = copy.copy(value)
        made.layers = list(parts)
        return made

    return Container(tuple(f"layers[{index}]" for index in range(len(layers))), layers, rebuild, has_attributes=True)


def attributes_of(value: Any) -> Mapping[str, Any]:
    """The attributes of an object that are its own, those in slots included."""
    attributes = getattr(value, "__dict__", None)
    slots = {
        name: getattr(value, name)
        # Slots of every base class: `__slots__` lists only those of the class itself.
        for kind in type(value).__mro__
        for name in _slots_of(kind)
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    }
    return {**(attributes or {}), **slots} if slots or attributes is None else attributes


def _slots_of(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _has_hidden_tensors(value: Any, extra: Mapping[str, Any]) -> bool:
    """Return whether attributes of a container hold tensors beside its items."""
    return bool(extra) and extra is not value and holds_tensors(dict(extra))


_WITHOUT_TENSORS = (str, bytes, int, float, complex, type(None), torch.Size, torch.dtype, torch.device, type)
_NOT_SEARCHED = (nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def holds_tensors(value: Any) -> bool:
    """Return whether tensors or arrays can be reached from a value; those of modules and functions do not count."""
    seen: set[int] = set()
    left = [value]
    # A search with a stack and the identities of what was seen: values may refer to themselves.
    while left:
        item = left.pop()
        if isinstance(item, (*_WITHOUT_TENSORS, *_NOT_SEARCHED)) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (torch.Tensor, PackedSequence)) or (isinstance(item, np.ndarray) and item.ndim):
            return True
        if isinstance(item, (dict, UserDict, types.MappingProxyType)):
            left += item.values()
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            left += item
        # Attributes of dictionaries and lists too (a subclass may have some).
        left += attributes_of(item).values()
    return False


def iterate_leaves(value: Any, stops: Callable[[Path, Any], bool] | None = None) -> Iterator[tuple[Path, str, Any]]:
    """The leaves of a value: path, how a program would refer to it, and the leaf.

    Args:
        stops: tells of a part with this path that it is a leaf.
    """
    return _iterate_leaves(value, (), "", stops)


def _iterate_leaves(
    value: Any, path: Path, text: str, stops: Callable[[Path, Any], bool] | None
) -> Iterator[tuple[Path, str, Any]]:
    structure = None if stops is not None and stops(path, value) else open_container(value)
    if structure is None:
        yield path, text, value
        return
    for key, part in zip(structure.keys, structure.parts, strict=True):
        yield from _iterate_leaves(part, (*path, key), text + structure.text_of(key), stops)


def map_leaves(
    function: Callable[[Path, Any], Any],
    value: Any,
    stops: Callable[[Path, Any], bool] | None = None,
    path: Path = (),
) -> Any:
    """A value of the same structure, with other leaves; the value itself if none changes.

    Args:
        function: called with the path and the leaf.
        path: put before each path.
    """
    structure = None if stops is not None and stops(path, value) else open_container(value)
    if structure is None:
        return function(path, value)
    parts = [
        map_leaves(function, part, stops, (*path, key))
        for key, part in zip(structure.keys, structure.parts, strict=True)
    ]
    # Unchanged values are returned as they are, so that identities survive (a cache, a tensor that is shared).
    unchanged = all(part is before for part, before in zip(parts, structure.parts, strict=True))
    return value if unchanged else structure.rebuild(parts)


BY_CONVENTION = object()
"""Stands for a part of which no specification tells."""


def parse_specs(spec: Any) -> list[tuple[Path, str, Any]]:
    """The parts of a specification, with the paths of what they are for; none: by convention."""
    if spec is None:
        return []
    return list(iterate_leaves(spec, lambda _, item: item is None or _is_spec(item)))


def broadcast_specs(spec: Any, value: Any) -> dict[Path, Any]:
    """The spec expanded to every leaf."""
    specs = parse_specs(spec)
    by_path = {}
    for path, _, _ in iterate_leaves(value) if specs else ():
        # The first specification that is a prefix of the path decides: `(0, None)` specifies all leaves below index 0
        # with 0.
        above = [item for prefix, _, item in specs if path[: len(prefix)] == prefix]
        if above:
            by_path[path] = above[0]
    return by_path


def _is_spec(item: Any) -> bool:
    return isinstance(item, int) or hasattr(item, "split_dim") or hasattr(item, "reduce_fn") or is_replicate_spec(item)


def parse_split_dim(spec: Any) -> int | None:
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
