"""Out-of-memory errors of steps: PyTorch's error reaches the user with the plan and the devices' memory in its message.

Memory may run out in a forward, in a backward that autograd calls, or in a worker of a pipeline. The error is given its
message where the step's program or run ends, while its traceback still holds what the step has allocated::

    the user's call ── replanning, which may run it again ── Dynamo, AOTAutograd ── explaining ── program or workers
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe_fx.report.out_of_memory_text import PlannedMemory, is_explained, out_of_memory_text
from roundpipe_fx.runtime.stage_compiler import Boxed
from roundpipe_fx.runtime.step_memory import allocated_bytes, device_memory


@dataclass(kw_only=True)
class StepMemory:
    """Memory of a model's steps, as far as it is noted for an error.

    Attributes:
        models: the models that are compiled, not kept alive.
        before: bytes of each CUDA device that were allocated when the current step began.
    """

    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    before: dict[torch.device, int] = field(default_factory=dict)

    def begin(self, devices: Iterable[torch.device]) -> None:
        """Note what is allocated when a step begins.

        Args:
            devices: of the step; only those of CUDA count.
        """
        self.before = {_add_index(device): allocated_bytes(device) for device in devices if device.type == "cuda"}

    @contextlib.contextmanager
    def explaining(self, phase: str, planned: Callable[[], PlannedMemory | None]) -> Iterator[None]:
        """Context manager that explains an out-of-memory error.

        Args:
            phase: ``"forward"``, ``"backward"`` or ``"step"``.
            planned: returns what to say of the plan; ``None``: there is no plan, and nothing is explained.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.explain(error, phase, planned())
            raise

    def explain(self, error: torch.OutOfMemoryError, phase: str, planned: PlannedMemory | None) -> None:
        """Put the plan and the devices' memory into the message of an error, before its own text.

        Arguments as for :meth:`explaining`.
        """
        original = str(error)
        if planned is None or is_explained(original):
            return
        models = [*self.models]
        devices = [device_memory(device, before, models) for device, before in self.before.items()]
        error.args = (out_of_memory_text(original, phase, planned, devices),)

    def explained(
        self, run: Boxed, phase: str, planned: Callable[[], PlannedMemory], begins: Callable[[], None] | None
    ) -> Boxed:
        """Wrap a program so that its out-of-memory errors are explained.

        Args:
            planned: returns what to say of the plan.
            begins: called before the program runs; ``None``: there is nothing to note.
        """

        def call(arguments: list[Any]) -> tuple[Any, ...]:
            if begins is not None:
                begins()
            try:
                return run(arguments)
            except torch.OutOfMemoryError as error:
                self.explain(error, phase, planned())
                raise

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _add_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(device.type, torch.cuda.current_device())
