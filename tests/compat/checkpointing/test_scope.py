"""Gradient checkpoint scopes, eager: what they save and recompute."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from roundpipe_fx import gradient_checkpoint_scope
from roundpipe_fx.report.peak_memory import measure_peak
from tests.compat.checkpointing.scopes import BYTES, SIZE, assert_same, leaves, nothing_is_left  # noqa: F401
from tests.counting import count_operations


def test_a_value_read_outside_is_not_kept() -> None:
    a, b, c = leaves()
    with gradient_checkpoint_scope():
        x = a + b
    y = x * c
    storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    del x
    assert storage.expired()
    with count_operations() as ran:
        y.sum().backward()
    assert ran[torch.ops.aten.add.Tensor] == 1  # recomputed, once
    assert torch.equal(c.grad, (a + b).detach())
    assert torch.equal(a.grad, c.detach())


def test_live_bytes() -> None:
    a, b, c = leaves()

    def step(scope: Any) -> int:
        with measure_peak("cpu") as forward:
            with scope():
                x = (a + b).sin().exp()
            loss = (x * c).sum()
            del x
            held = forward.current
        loss.backward()
        return held

    # Without: the operand of the sine and the result of the exponential, which the product reads too.
    assert step(contextlib.nullcontext) - step(gradient_checkpoint_scope) == 2 * BYTES


def test_what_is_recomputed_is_freed_after_its_use() -> None:
    a, b, c = leaves()
    with gradient_checkpoint_scope():
        x = (a + b).sin()
    first = x * c
    second = first * x
    del x
    loss = (second * second.detach()).sum()
    loss.backward(retain_graph=True)
    handles = [handle for handle in gc.get_objects() if type(handle).__name__ == "_Handle"]
    assert len(handles) == 3  # two of x, one of the sum
    assert all(handle.value is None for handle in handles)
    before = a.grad.clone()
    loss.backward()  # again
    assert torch.equal(a.grad, 2 * before)


def test_partial_backwards_free_what_nobody_asked_for() -> None:
    a, b, c = leaves()
    with gradient_checkpoint_scope():
        x = (a + b).sin()
    left, right = x * c, x * x
    del x
    (first,) = torch.autograd.grad(left.sum(), c, retain_graph=True)
    assert torch.equal(first, (a + b).sin().detach())
    handles = [handle for handle in gc.get_objects() if type(handle).__name__ == "_Handle"]
    assert handles and all(handle.value is None for handle in handles)
    right.sum().backward()
    assert torch.equal(a.grad, (2 * (a + b).sin() * (a + b).cos()).detach())


def test_random_numbers_and_the_surrounding_generator() -> None:
    def function(scope: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with scope():
            noisy = a + torch.randn_like(a)
            dropped = F.dropout(noisy.exp(), 0.3)
            other = torch.rand(SIZE, generator=torch.Generator().manual_seed(5)) * noisy
        torch.randn(3)
        return dropped * b * other

    assert_same(function, leaves(2))
    a, b = leaves(2)
    loss = function(gradient_checkpoint_scope, a, b).sum()
    torch.manual_seed(99)
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast() -> None:
    model = nn.Linear(32, 32)

    def function(scope: Any, x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            with scope():
                hidden = model(x.view(-1, 32)).relu()
            assert hidden.dtype is torch.bfloat16
            return hidden @ hidden.T

    assert_same(function, leaves(1, 1024))
    x = leaves(1, 1024)[0]
    out = function(gradient_checkpoint_scope, x)
    expected = function(contextlib.nullcontext, x)
    with torch.autocast("cpu", torch.float16):  # not the one that was in force
        (left,) = torch.autograd.grad(out.float().sum(), x)
        (right,) = torch.autograd.grad(expected.float().sum(), x)
    assert torch.equal(left, right)


def test_nested_scopes() -> None:
    def function(scope: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        with scope():
            x = a.sin()
            with scope():
                y = x * b
            z = y.exp()
        with scope():
            w = z * y
        return (w * c) * x

    assert_same(function, leaves())
    held: list[Any] = []

    def noted(scope: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        with scope():
            x = a.sin()
            with scope():
                y = x * b
        with scope():
            z = x * y
        held.extend(torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage()) for t in (x, y, z))
        return z * c

    loss = noted(gradient_checkpoint_scope, *leaves()).sum()
    assert all(storage.expired() for storage in held)
    loss.backward()


def test_views_and_several_results() -> None:
    def function(scope: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with scope():
            first, second = (a.view(128, -1) * 2).split(64)
            values, _ = second.sort(dim=-1)
        return (first.T * b.view(128, -1)[:64].T).sum(0) * values.flip(0).sum(-1) * first[:, 3]

    assert_same(function, leaves(2))


def test_host_syncs_are_not_repeated() -> None:
    a = torch.randn(256, requires_grad=True)
    with gradient_checkpoint_scope():
        rows = (a > 0).nonzero()[:, 0]
        x = a[rows] * float(a.detach().max().item())
        positive = a[a > 0]
    y = x * x + positive * positive
    del x, rows, positive
    with count_operations() as ran:
        y.sum().backward()
    asked = [op for op in ran if torch.Tag.data_dependent_output in op.tags or "nonzero" in str(op)]
    assert not asked
    scale = float(a.detach().max())
    assert torch.allclose(a.grad, torch.where(a > 0, 2 * a * scale**2 + 2 * a, 0).detach())


def test_without_gradients_nothing_is_held() -> None:
    a = torch.randn(SIZE)
    with torch.no_grad(), gradient_checkpoint_scope():
        x = a.sin()
    y = x * x
    assert not y.requires_grad
    del x


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "sine": lambda x, y: x.sin(),
    "dropout": lambda x, y: F.dropout(x, 0.4),
    "noise": lambda x, y: x + torch.randn_like(x),
    "product": lambda x, y: (x.view(4, 4) @ y.view(4, 4)).flatten(),
    "softmax": lambda x, y: x.view(4, 4).softmax(-1).flatten(),
    "reversed": lambda x, y: x.flip(0),
    "in place": lambda x, y: (x * 1).mul_(y.detach()),
    "sorted": lambda x, y: x.sort()[0],
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)),
        min_size=2,
        max_size=14,
    ),
    st.integers(0, 100),
)
def test_random_programs_have_the_same_bits(program: list[tuple[str, int, int, int]], seed: int) -> None:
    """Operations on random earlier values, in and out of scopes that open and close anywhere."""

    def function(scope: Any, *inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(seed)
        values = list(inputs)
        with contextlib.ExitStack() as stack:
            for name, left, right, what in program:
                if what == 0:
                    stack.enter_context(scope())
                if what == 1:
                    stack.pop_all().close()
                values.append(OPERATIONS[name](values[left % len(values)], values[right % len(values)]))
                if what == 2 and len(values) > 4:
                    values.pop(2)
        return torch.stack(values[2:]).sum(0)

    assert_same(function, leaves(2, 16))
