"""Gradient checkpoint scopes, eager."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from roundpipe_fx import gradient_checkpoint_scope, torch_private
from roundpipe_fx.compat.checkpointing.scope import _local as scopes
from roundpipe_fx.report.peak_memory import measure_peak
from tests.counting import count_operations

SIZE = 1 << 14
BYTES = 4 * SIZE


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not scopes.scopes
    torch.ones(1, requires_grad=True) * torch.ones(1)  # hooks that are over go when they are asked
    assert torch_private.top_saved_tensor_hooks() is None


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
    assert ran[torch.ops.aten.add.Tensor] == 1  # made again, once
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


def test_what_is_made_again_is_freed_after_its_use() -> None:
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


def test_an_exception_leaves_the_scope() -> None:
    a, b = leaves(2)
    kept = None
    with pytest.raises(KeyError), gradient_checkpoint_scope():
        kept = a.sin()
        raise KeyError
    y = kept * b  # still made inside
    storage = torch.multiprocessing.reductions.StorageWeakRef(kept.untyped_storage())
    kept = None
    assert storage.expired()
    y.sum().backward()
    assert torch.equal(b.grad, a.sin().detach())


def test_exit_saved_tensors_hooks_scope() -> None:
    a, b = leaves(2)
    scope = gradient_checkpoint_scope()
    with scope:
        x = a.sin()
        scope.exit_saved_tensors_hooks_scope()  # inside: no effect
        inside = x * b
    scope.exit_saved_tensors_hooks_scope()
    scope.exit_saved_tensors_hooks_scope()
    assert torch_private.top_saved_tensor_hooks() is None
    y = x * b
    storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    del x
    assert not storage.expired()  # y stores it like any other
    (y + inside).sum().backward()
    assert torch.equal(b.grad, 2 * a.sin().detach())


class Noting:
    """Saved-tensor hooks that note sizes."""

    def __init__(self, name: str, notes: list[tuple[str, str]]) -> None:
        self.hooks = saved_tensors_hooks(self.pack, self.unpack)
        self.name, self.notes = name, notes

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.notes.append((self.name, "pack"))
        return tensor

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.notes.append((self.name, "unpack"))
        return tensor


def test_other_hooks_inside_outside_and_after_keep_their_order() -> None:
    a, b = leaves(2)
    notes: list[tuple[str, str]] = []
    around, inside, after = (Noting(name, notes) for name in ("around", "inside", "after"))
    with around.hooks:
        with gradient_checkpoint_scope():
            x = a.sin()  # a is from outside: `around` is asked
            assert notes == [("around", "pack")]
            with inside.hooks:
                y = x.exp()  # the innermost hooks are asked, as everywhere
            assert notes.pop() == ("inside", "pack")
            z = x * x
        assert len(notes) == 1
        v = x * b  # b: `around`; x: nobody
        assert notes.count(("around", "pack")) == 2 and len(notes) == 2
        with after.hooks:
            w = v * v
        assert notes[2:] == [("after", "pack")] * 2
        u = b * b
        assert notes[4:] == [("around", "pack")] * 2
    # `around` took its own hooks off, although the scope's lay above them, and those are still there
    before = len(notes)
    t = x * b
    assert len(notes) == before
    del x
    loss = (y + z + v + w + u + t).sum()
    loss.backward()
    unpacked = [name for name, what in notes if what == "unpack"]
    assert sorted(unpacked) == sorted([*["around"] * 4, *["after"] * 2, "inside"])

    def plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = a.sin()
        v = x * b
        return x.exp() + x * x + v + v * v + b * b + x * b

    exact = [tensor.detach().double().requires_grad_() for tensor in (a, b)]
    plain(*exact).sum().backward()
    for left, right in zip((a, b), exact, strict=True):
        assert torch.allclose(left.grad.double(), right.grad, rtol=1e-5, atol=1e-5)


def test_hooks_around_that_end_before_the_scopes_tensors_die() -> None:
    a, b = leaves(2)
    with torch.autograd.graph.save_on_cpu():
        with gradient_checkpoint_scope():
            x = a.sin()
        kept = b.sin()
    with torch.autograd.graph.save_on_cpu():
        y = x * kept
    z = x * y
    del x
    z.sum().backward()
    found = [a.grad, b.grad]

    def plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = a.sin()
        return x * (x * b.sin())

    for left, right in zip(found, gradients(plain, [a, b]), strict=True):
        assert torch.equal(left, right)


def test_misuse() -> None:
    scope = gradient_checkpoint_scope()
    with pytest.raises(RuntimeError, match="left before it was entered"):
        scope.exit_saved_tensors_hooks_scope()
    with scope:
        pass
    with pytest.raises(RuntimeError, match="make a new one"), scope:
        pass
    errors: list[str] = []
    scope = gradient_checkpoint_scope()

    def leave(how: Callable[[], None]) -> None:
        try:
            how()
        except RuntimeError as error:
            errors.append(str(error))

    with scope:
        threads = [
            threading.Thread(target=leave, args=(how,))
            for how in (lambda: scope.__exit__(None, None, None), scope.exit_saved_tensors_hooks_scope)
        ]
        for thread in threads:
            thread.start()
            thread.join()
    assert len(errors) == 2 and all("another thread" in error for error in errors)


def test_tensors_that_die_in_another_thread_end_the_scope() -> None:
    a, b = leaves(2)
    with gradient_checkpoint_scope():
        x = [a.sin()]
    y = x[0] * b
    thread = threading.Thread(target=x.clear)
    thread.start()
    thread.join()
    z = y * y  # autograd asks, and finds that the scope is over
    assert torch_private.top_saved_tensor_hooks() is None
    z.sum().backward()
    assert torch.equal(b.grad, gradients(lambda a, b: (a.sin() * b) * (a.sin() * b), [a, b])[1])


def test_scopes_in_two_threads() -> None:
    results = {}

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        a = torch.randn(SIZE, generator=generator, requires_grad=True)
        for _ in range(20):
            a.grad = None
            with gradient_checkpoint_scope():
                x = a.sin() * a
            (x * x).sum().backward()
        results[seed] = torch.equal(a.grad, torch.autograd.grad(((a.sin() * a) ** 2).sum(), a)[0])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) == set(range(4))


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
