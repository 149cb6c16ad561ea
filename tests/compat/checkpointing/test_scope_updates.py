"""Updates in place inside and outside of gradient checkpoint scopes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_fx import gradient_checkpoint_scope
from tests.compat.checkpointing.scopes import SIZE, assert_same, leaves, nothing_is_left  # noqa: F401


def test_updates_in_place_inside() -> None:
    def function(scope: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with scope():
            x = a * 2
            x.add_(b)
            y = x.exp()
            x[: SIZE // 2].mul_(3)
        return x * b + y * y

    assert_same(function, leaves(2))


def test_updates_in_place_outside_of_what_was_made_inside() -> None:
    def function(scope: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with scope():
            x = a * 2
        x.add_(b)
        return x * b

    assert_same(function, leaves(2))


def test_an_update_after_saving_is_an_error() -> None:
    a, b = leaves(2)
    with gradient_checkpoint_scope():
        x = a * 2
        y = x * b
        x.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*after it was saved"):
        y.sum().backward()
    a = torch.randn(8, requires_grad=True)
    scale = torch.ones(8)
    with gradient_checkpoint_scope():
        x = a + scale
    y = x * a
    del x
    scale.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(8,\) that a gradient_checkpoint_scope reads is at version 1"):
        y.sum().backward()
    with gradient_checkpoint_scope():
        outside = torch.ones(8)
    other = outside.mul(2)
    z = a * other  # `other` is none of the scope's
    other.add_(1)
    with pytest.raises(RuntimeError, match="at version 1; expected version 0"):
        z.sum().backward()
    del outside


def test_what_is_updated_from_outside_is_updated_once() -> None:
    norm = nn.BatchNorm1d(16)
    reference = nn.BatchNorm1d(16)

    def function(scope: Any, a: torch.Tensor) -> torch.Tensor:
        module = norm if scope is gradient_checkpoint_scope else reference
        with scope():
            x = module(a.view(-1, 16)).relu()
        return x * x

    assert_same(function, leaves(1))
    assert torch.equal(norm.running_mean, reference.running_mean)
    assert norm.num_batches_tracked == 1

    def counting(scope: Any, a: torch.Tensor) -> torch.Tensor:
        counter = torch.zeros(SIZE)
        with scope():
            before = a + counter
            counter.add_(1)
            after = (a + counter).exp() + before
        return after * after

    assert_same(counting, leaves(1))
