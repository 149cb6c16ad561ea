"""The mode of a step: where its workers and the model are, and whose steps go with it.

Here the model is where its workers are, and all of them are threads of this process. The other modes do some of it
otherwise: :class:`roundpipe_fx.pipeline.step.offloaded.Offloaded` and
:class:`roundpipe_fx.distributed.process_pipeline.ProcessPipeline`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from roundpipe_fx.pipeline.capture.captured_calls import CapturedCalls
from roundpipe_fx.pipeline.settings import Structure
from roundpipe_fx.pipeline.step.scheduled import Scheduled
from roundpipe_fx.runtime.pipeline_run import Finished, run_pipeline
from roundpipe_fx.runtime.random_streams import RandomStream
from roundpipe_fx.runtime.stage_updates import StageUpdates, StepUpdates
from roundpipe_fx.runtime.worker import Workers

ScheduledOf = Callable[[CapturedCalls, Any], Scheduled]
"""What workers run of captured microbatches, of some kinds of actions; ``None``: of all."""


class Local:
    """A step in this process, with the model where its workers are.

    Args:
        devices: of the schedule; empty: one, where the model is.

    Attributes:
        offloaded: whether the model lies on the host.
        structure: how every graph is cut, where the parameters of stages cannot move; ``None``: they can.
    """

    offloaded = False
    structure: Structure | None = None

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)

    @property
    def worker_devices(self) -> tuple[torch.device, ...]:
        """Of this process's workers; empty: one worker, where the model is."""
        return self.devices

    @property
    def first_stream(self) -> int:
        """Number of the first microbatch's stream of random numbers."""
        return 0

    @property
    def updatable(self) -> Collection[int] | None:
        """Identities of tensors that an optimizer may update within the step; ``None``: all that are on the host."""
        return None

    def generator_device(self, captured: CapturedCalls) -> torch.device:
        """The device of whose generator a step draws."""
        kind = self.devices[0].type if self.devices else None
        # The first input on an accelerator tells which generator eager PyTorch would draw from.
        for value in (value for primals in captured.primals for value in primals):
            # On the meta device nothing is drawn, and it has no streams: such a step runs as on the CPU.
            if isinstance(value, torch.Tensor) and value.device.type != "meta" and kind in (None, value.device.type):
                return value.device
        return torch.device("cpu")

    def to_device(self, inputs: Any) -> Any:
        """Inputs where the graph is to run."""
        return inputs

    def to_model(self, outputs: Any) -> Any:
        """Outputs where the model is."""
        return outputs

    def calling(self, updated: Mapping[int, torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Context manager in which the model is called, to capture microbatches or to return their results.

        Args:
            updated: tensors that the calls write to, by identity.
        """
        return contextlib.nullcontext()

    def receivers(self) -> Mapping[int, torch.Tensor]:
        """Tensors that get the gradients of others in their place, by identity of those."""
        return {}

    def agreed(
        self,
        batch: Any,
        capture: Callable[[], CapturedCalls],
        scheduled_of: ScheduledOf,
        runs: bool,
        microbatches: int,
    ) -> CapturedCalls:
        """Capture the microbatches of a step, the same on all ranks.

        Args:
            batch: the step's inputs, any tree.
            scheduled_of: returns what all workers run.
            runs: whether the step is to run.
            microbatches: into how many a batch is split at most.
        """
        return capture()

    def refuse_backward_elsewhere(self, captured: CapturedCalls, scheduled_of: ScheduledOf) -> None:
        """Refuse to differentiate the outputs of a call if what its backward reads is not where it runs.

        Raises:
            RuntimeError: so it is.
        """

    def run(
        self,
        workers: Workers,
        captured: CapturedCalls,
        kinds: Any,
        scheduled_of: ScheduledOf,
        tangents: Sequence[Sequence[Any]],
        streams: list[RandomStream],
        inherited: Sequence[dict[int, Any]],
        updates: StageUpdates,
        updating: StepUpdates | None,
    ) -> Finished:
        """Run a step, or its forwards or backwards.

        Args:
            kinds: which kinds of actions the run consists of; ``None``: all.
            scheduled_of: returns what workers run, of some kinds of actions.
            tangents: for each microbatch, the incoming gradients.
            streams: of the microbatches' random numbers.
            inherited: for each microbatch, what an earlier run has left.
            updates: of the optimizer, for which stages wait.
            updating: those of this step; ``None``: there are none within it.

        Returns:
            outputs; and the gradients that belong to this process.
        """
        scheduled = scheduled_of(captured, kinds)
        return run_pipeline(
            workers,
            scheduled.instructions,
            captured.programs,
            captured.primals,
            tangents,
            streams,
            inherited,
            self.updatable or (),
            offloads=scheduled.offloads,
            updates=updates,
            updating=updating,
        )

    def before_gradients(self, captured: CapturedCalls) -> None:
        """Called before the gradients of a step are handed over."""

    def finish(self, captured: CapturedCalls) -> None:
        """Called after a step has updated buffers."""
