"""Attempts: pipelines that were lowered to simulate their time and memory, of which one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.schedules import Timing

__all__ = ["Attempt"]


@dataclass(frozen=True, eq=False)
class Attempt:
    """A pipeline, and its simulated schedule.

    Attributes:
        pipeline: the pipeline.
        timing: of its schedule.
        chosen: the plan; ``None``: a save policy's.
        emit: emits the same once more, with stage modules of its own. To be simulated, an attempt takes those of
            others that do the same, in which values have other names. ``None``: it has its own.
    """

    pipeline: LoweredPipeline
    timing: Timing
    chosen: Chosen | None = None
    emit: Callable[[], Lowered] | None = None

    @property
    def peak(self) -> int:
        """Bytes of the device that needs most."""
        return max(self.timing.peak_bytes)

    @property
    def seconds(self) -> float:
        """Modelled seconds of recomputation, for a microbatch."""
        return self.pipeline.main.lowered.recompute_seconds
