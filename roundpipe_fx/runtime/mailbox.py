"""Mailboxes: where what other devices send to a device arrives."""

from __future__ import annotations

import threading

from roundpipe_fx.runtime.device_streams import Message
from roundpipe_fx.schedules import StageAction

__all__ = ["Mailbox", "Stopped"]


class Stopped(Exception):
    """Somebody else has failed."""


class Mailbox:
    """Where messages for one device arrive; whoever waits in it can be stopped."""

    def __init__(self) -> None:
        self._messages: dict[tuple[StageAction, int], Message] = {}
        self._arrived = threading.Condition()
        self._stopped = False

    def put(self, step: StageAction, microbatch: int, messages: list[Message]) -> None:
        """Leave the last of some messages, a step's for a microbatch.

        It is taken off the list: were the sender to hold it for a moment longer, its values would not die when their
        last reader lets them go.
        """
        with self._arrived:
            self._messages[step, microbatch] = messages.pop()
            self._arrived.notify()

    def take(self, step: StageAction, microbatch: int) -> Message:
        """The message, once it is there.

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
        """Let nobody wait any more."""
        with self._arrived:
            self._stopped = True
            self._arrived.notify_all()
