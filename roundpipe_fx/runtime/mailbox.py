"""Mailboxes: where messages from other devices arrive."""

from __future__ import annotations

import threading

from roundpipe_fx.runtime.device_streams import Message
from roundpipe_fx.schedules import StageAction

__all__ = ["Mailbox", "Stopped"]


class Stopped(Exception):
    """Another worker has failed, so this one must not go on."""


class Mailbox:
    """Messages for one device. A thread that waits for one can be stopped."""

    def __init__(self) -> None:
        self._messages: dict[tuple[StageAction, int], Message] = {}
        self._arrived = threading.Condition()
        self._stopped = False

    def put(self, step: StageAction, microbatch: int, messages: list[Message]) -> None:
        """Deliver the last of some messages, with the results of a stage action for a microbatch.

        The message is removed from the list, because a reference held by the sender would keep its values alive after
        their last reader has released them.
        """
        with self._arrived:
            self._messages[step, microbatch] = messages.pop()
            self._arrived.notify()

    def take(self, step: StageAction, microbatch: int) -> Message:
        """Wait for a message and remove it.

        Raises:
            Stopped: the run was stopped.
        """
        with self._arrived:
            while (step, microbatch) not in self._messages:
                if self._stopped:
                    raise Stopped
                self._arrived.wait()
            return self._messages.pop((step, microbatch))

    def stop(self) -> None:
        """Make every :meth:`take` that waits, now or later, raise :class:`Stopped`."""
        with self._arrived:
            self._stopped = True
            self._arrived.notify_all()
