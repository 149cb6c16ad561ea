"""Transport: how the results of an action reach other devices.

The devices of a pipeline are workers of one process (:class:`roundpipe_fx.runtime.mailbox.Mailboxes`) or processes
(:class:`roundpipe_fx.distributed.process_transport.ProcessTransport`). What a worker runs is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from roundpipe_fx.runtime.gradient_accumulator import GradientAccumulator
from roundpipe_fx.runtime.pipeline_program import Instruction
from roundpipe_fx.schedules import StageAction


class Transport(Protocol):
    """Interface of a run's transport. ``device`` is the number of the worker that calls."""

    def before(self, device: int, position: int) -> None:
        """Called before the instruction at ``position``, and after the last one.

        Raises:
            Stopped: the run has failed elsewhere.
        """

    def receive(self, device: int, step: StageAction, microbatch: int) -> dict[int, Any]:
        """Values of another device's action, by number, ready to be read.

        Raises:
            Stopped: the run was stopped.
        """

    def pack(self, device: int, instruction: Instruction, results: Sequence[Any]) -> list[Any]:
        """Messages with the results of an action, one for each of ``instruction.sends``."""

    def send(self, device: int, instruction: Instruction, messages: list[Any]) -> None:
        """Send messages. The list is emptied: a reference would keep values alive after their last reader."""

    def accumulated(self, device: int, position: int, sums: GradientAccumulator) -> None:
        """Called after the instruction at ``position``: gradients that are complete may be removed until the end."""

    def stop(self) -> None:
        """Make workers that wait, now or later, raise ``Stopped``."""

    def abandon(self, device: int, failure: BaseException | None) -> None:
        """Called by a worker that will not run its remaining instructions."""

    def end_run(self, failure: BaseException | None, outputs: Sequence[list[Any]]) -> None:
        """Called when all workers have ended, with what one of them raised, and each microbatch's outputs so far.

        Raises:
            RuntimeError: the run has failed elsewhere, and not here.
        """

    def combine(self, gradients: dict[int, torch.Tensor]) -> None:
        """Add the gradients that are elsewhere to those of tensors that are also used here, by identity."""

    def average(self, gradients: dict[int, torch.Tensor]) -> None:
        """Average all gradients over replicas, those that were removed included; called last."""
