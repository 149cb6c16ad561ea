"""Mailboxes: the transport between the workers of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from roundpipe_fx.runtime.device_streams import DeviceStreams, Message
from roundpipe_fx.runtime.gradient_accumulator import GradientAccumulator
from roundpipe_fx.runtime.pipeline_program import Instruction
from roundpipe_fx.runtime.worker import Stopped
from roundpipe_fx.schedules import StageAction


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


class Mailboxes:
    """The transport between workers that are threads of one process: a mailbox for each.

    Args:
        all_device_streams: the streams of each worker.
    """

    def __init__(self, all_device_streams: Sequence[DeviceStreams]) -> None:
        self._all_device_streams = all_device_streams
        self._mailboxes = [Mailbox() for _ in all_device_streams]

    def before(self, device: int, position: int) -> None:
        """Nothing to start: messages arrive by themselves."""

    def receive(self, device: int, step: StageAction, microbatch: int) -> dict[int, Any]:
        """Block until a message was sent; on an accelerator its values may still be on their way."""
        message = self._mailboxes[device].take(step, microbatch)
        return dict(zip(message.numbers, self._all_device_streams[device].receive(message), strict=True))

    def pack(self, device: int, instruction: Instruction, results: Sequence[Any]) -> list[Message]:
        """Start copying results to the devices that read them."""
        device_streams = self._all_device_streams[device]
        return [
            device_streams.send(
                tuple(number for _, number in positions),
                [results[position] for position, _ in positions],
                self._all_device_streams[peer],
            )
            for peer, positions in instruction.sends
        ]

    def send(self, device: int, instruction: Instruction, messages: list[Any]) -> None:
        """Wake the workers that wait for the messages."""
        # In reverse, since `put` pops the last message: the list stays aligned with the sends.
        for peer, _ in reversed(instruction.sends):
            self._mailboxes[peer].put(instruction.action.step, instruction.action.microbatch, messages)

    def stop(self) -> None:
        """Make every worker that waits, now or later, raise :class:`Stopped`."""
        for mailbox in self._mailboxes:
            mailbox.stop()

    def abandon(self, device: int, failure: BaseException | None) -> None:
        """Nothing to do: no worker waits any more."""

    def end_run(self, failure: BaseException | None, outputs: Sequence[list[Any]]) -> None:
        """Nothing to ask: all workers are in this process."""

    def accumulated(self, device: int, position: int, sums: GradientAccumulator) -> None:
        """Nothing to remove."""

    def combine(self, gradients: dict[int, torch.Tensor]) -> None:
        """Nothing to add: all gradients are in this process."""

    def average(self, gradients: dict[int, torch.Tensor]) -> None:
        """Nothing to average: there are no replicas."""
