"""Values are taken apart and put together with their types; objects that hide tensors are found."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from roundpipe_fx.pipeline.batches.structures import holds_tensors, iterate_leaves, map_leaves, open_container


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    scale: float = 2.0


@dataclasses.dataclass
class Made:
    """Its constructor takes less than it has."""

    x: torch.Tensor
    double: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.double = 2 * self.x
        self.mask = self.x > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


class Pair(NamedTuple):
    x: torch.Tensor
    rest: Any


class ItsAttributes(dict):  # type: ignore[type-arg]
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Items(list):  # type: ignore[type-arg]
    pass


VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": Made,
    "frozen": Frozen,
    "slots": Slotted,
    "named tuple": lambda x: Pair(x, {"y": x}),
    "BatchEncoding": lambda x: transformers.BatchEncoding({"input_ids": x, "mask": x}),
    "ModelOutput": lambda x: transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x),
    "UserDict": lambda x: collections.UserDict(x=x),
    "mappingproxy": lambda x: types.MappingProxyType({"x": x}),
    "ordered": lambda x: collections.OrderedDict(x=x, y=[x]),
    "dict with attributes": lambda x: ItsAttributes(x=x),
    "list of a class": lambda x: Items([x, x]),
    "deque": lambda x: collections.deque([x, x], maxlen=2),
    "namespace": lambda x: types.SimpleNamespace(x=x, name="a"),
    "topk": lambda x: x.topk(1, 0),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_keep_their_type(name: str) -> None:
    value = VALUES[name](torch.ones(4))
    halves = map_leaves(lambda _, leaf: leaf[:2] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, value)
    assert type(halves) is type(value)
    tensors = [leaf for _, _, leaf in iterate_leaves(halves) if isinstance(leaf, torch.Tensor)]
    assert tensors and all(len(tensor) <= 2 for tensor in tensors)
    before = [leaf for _, _, leaf in iterate_leaves(value) if isinstance(leaf, torch.Tensor)]
    assert [text for _, text, _ in iterate_leaves(halves)] == [text for _, text, _ in iterate_leaves(value)]
    assert name == "topk" or all(len(tensor) == 4 for tensor in before)  # the value itself is as it was


def test_attributes_beside_items_stay() -> None:
    halves = map_leaves(lambda _, leaf: leaf[:1], ItsAttributes(x=torch.ones(2)))
    assert halves.x is halves["x"] and len(halves.x) == 1
    made = map_leaves(lambda _, leaf: leaf[:1], Made(torch.ones(2)))
    assert len(made.mask) == len(made.double) == 1


def test_a_value_that_does_not_change_is_the_same() -> None:
    value = {"a": [1, Pair(torch.ones(2), None)]}
    assert map_leaves(lambda _, leaf: leaf, value) is value


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class SlotHolder:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class ListWithTensor(list):  # type: ignore[type-arg]
    pass


def test_objects_that_hold_tensors() -> None:
    x = torch.ones(2)
    beside = ListWithTensor([x])
    beside.extra = x  # type: ignore[attr-defined]
    hiding = [Holder(x), SlotHolder([x]), Holder({"a": Holder(x)}), {x}, np.ones(2), pack_sequence([x]), beside]
    for value in [*hiding, torch.distributions.Normal(x, x)]:
        assert holds_tensors(value) and open_container(value) is None, value
    circle = Holder(None)
    circle.value = circle
    for value in (Holder("text"), 3, None, "x", nn.Linear(2, 2), print, torch.float32, np.float64(3), circle, Holder):
        assert not holds_tensors(value), value


def test_caches_of_hugging_face() -> None:
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(torch.ones(4, 2, 3, 5), torch.ones(4, 2, 3, 5), layer)
    halves = map_leaves(lambda _, leaf: leaf[:2], cache)
    assert type(halves) is transformers.DynamicCache and halves.layers[1].keys.shape == (2, 2, 3, 5)
    assert cache.layers[1].keys.shape == (4, 2, 3, 5) and halves.get_seq_length() == 3
