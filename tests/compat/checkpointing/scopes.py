"""Functions with scopes and without, for tests."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from roundpipe_fx import gradient_checkpoint_scope, torch_private
from roundpipe_fx.compat.checkpointing.scope import _local as scopes

__all__ = ["BYTES", "SIZE", "assert_same", "gradients", "leaves", "nothing_is_left"]

SIZE = 1 << 14
BYTES = 4 * SIZE


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A module that imports it checks after each test that no scope is left."""
    yield
    if scopes.scopes or _hooks() is not None:
        gc.collect()
    assert not scopes.scopes
    assert _hooks() is None


def _hooks() -> object:
    torch.ones(1, requires_grad=True) * torch.ones(1)  # hooks that are over go when they are asked
    return torch_private.top_saved_tensor_hooks()


def leaves(count: int = 3, size: int = SIZE) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, requires_grad=True) for _ in range(count)]


def gradients(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    for tensor in tensors:
        tensor.grad = None
    torch.manual_seed(1)
    function(*tensors).sum().backward()
    return [tensor.grad for tensor in tensors]


def assert_same(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """``function(scope, *tensors)`` has the same gradients with scopes and without."""
    expected = gradients(lambda *inputs: function(contextlib.nullcontext, *inputs), tensors)
    found = gradients(lambda *inputs: function(gradient_checkpoint_scope, *inputs), tensors)
    for left, right in zip(found, expected, strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)
