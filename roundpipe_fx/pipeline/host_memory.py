"""Host memory of an offloaded model's step: its weights, their gradients, and the values that leave its devices.

All of them lie in pinned memory, so that copies overlap with the devices' work; the allocator of pinned memory rounds
each tensor up to a power of two, which is counted. What the optimizer holds is not: it is there between steps as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from roundpipe_fx.budget import HostMemoryError, bytes_text
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.schedules import Timing
from roundpipe_fx.schedules.offloads import buffer_bytes, power_of_two

__all__ = ["HostMemory", "check_host_memory", "host_budget_of", "host_memory_of"]

_SHARE = 0.8
"""Of the memory that the host has available, if no budget is given."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the host.

    Attributes:
        weights: parameters and buffers.
        gradients: the parameters' gradients, each part of one that is computed in several residency windows for itself.
        values: buffers for values that leave the devices.
    """

    weights: int = 0
    gradients: int = 0
    values: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.values


def host_memory_of(pipeline: LoweredPipeline, timing: Timing) -> HostMemory:
    """The host memory that a step needs; nothing if the model is not offloaded.

    Args:
        pipeline: the lowered pipeline.
        timing: of its schedule.
    """
    costs, setting = pipeline.main.costs, pipeline.main.lowered.setting
    if costs.on_host is None:
        return HostMemory()
    pinned = setting.device.type != "cpu" or setting.options.device_name not in (None, "cpu")
    sizes = {number: size for of in costs.copied_bytes.values() for number, size in of.items()}
    weights = [size for number, size in sizes.items() if number in costs.on_host]
    gradients = [*timing.returned_bytes]
    if pinned:
        weights, gradients = ([power_of_two(size) for size in of] for of in (weights, gradients))
    lengths = [len(order) for order in timing.schedule.orders]
    return HostMemory(sum(weights), sum(gradients), buffer_bytes(timing.offloads, lengths, pinned))


def host_budget_of(pipeline: LoweredPipeline, pipelining: Pipelining) -> int | None:
    """Bytes that a step may pin: as asked, or 80 % of what is available and the weights, which are there already.

    Args:
        pipeline: any lowered pipeline of the model.
        pipelining: the user's.

    Returns:
        the bytes; ``None``: no limit, since the step is planned for another machine.
    """
    if pipelining.host_budget is not None or pipelining.elsewhere:
        return pipelining.host_budget
    costs = pipeline.main.costs
    sizes = {number: size for of in costs.copied_bytes.values() for number, size in of.items()}
    there = sum(size for number, size in sizes.items() if number in (costs.on_host or ()))
    return int(_SHARE * psutil.virtual_memory().available) + there


def check_host_memory(needed: HostMemory, budget: int | None) -> None:
    """Refuse a step that needs more than a budget on the host.

    Args:
        needed: what it needs.
        budget: bytes; ``None``: there is no limit.

    Raises:
        HostMemoryError: it is more.
    """
    if budget is None or needed.total <= budget:
        return
    values = f" and {bytes_text(needed.values)} for values that leave the devices" if needed.values else ""
    less = "a larger memory_budget, so that fewer values leave, " if needed.values else ""
    raise HostMemoryError(
        f"a step needs {needed.total} bytes ({bytes_text(needed.total)}) of pinned memory on the host: "
        f"{bytes_text(needed.weights)} for weights, {bytes_text(needed.gradients)} for gradients{values}; the "
        f"host_budget is {budget} bytes ({bytes_text(budget)}). Give {less}a smaller batch, or a host_budget of at "
        "least that if the host has it.",
        needed.total,
    )
