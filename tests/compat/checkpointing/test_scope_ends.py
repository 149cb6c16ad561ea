"""How gradient checkpoint scopes end: exceptions, other hooks, threads, misuse."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from roundpipe_fx import gradient_checkpoint_scope, torch_private
from tests.compat.checkpointing.scopes import SIZE, gradients, leaves, nothing_is_left  # noqa: F401


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
        y = a.sin() * a
        results[seed] = torch.equal(a.grad, torch.autograd.grad((y * y).sum(), a)[0])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)
