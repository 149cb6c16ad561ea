"""Locks and functions in a process that was forked."""

from __future__ import annotations

import threading

from roundpipe_fx.torch_private import ForkedLock, when_forked
from tests.forked import in_forked_child


def test_a_lock_of_another_thread_is_free_in_a_child_and_ones_own_stays() -> None:
    lock, is_held, may_end = ForkedLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait()

    def take() -> None:
        with lock, lock:
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        in_forked_child(take)
    finally:
        may_end.set()
        thread.join()
    with lock:
        in_forked_child(take)
    take()


class _Owner:
    def __init__(self) -> None:
        self.called: list[str] = []


def test_functions_are_called_as_long_as_their_owner_is_there() -> None:
    owner, gone = _Owner(), _Owner()
    for one in (owner, gone):
        when_forked(one, lambda own: own.called.append("child"), before=lambda own: own.called.append("before"))
    called = gone.called
    del gone, one

    def look() -> None:
        assert owner.called == ["before", "child"] and not called

    in_forked_child(look)
    assert owner.called == ["before"] and not called
