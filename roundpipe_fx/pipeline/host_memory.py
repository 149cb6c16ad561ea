"""Host memory of a step: for values that leave the devices; for an offloaded model also its weights, their gradients,
and what its optimizer has.

All but the last lie in pinned memory, so that copies overlap with the devices' work; what that takes is counted. The
optimizer is counted where it is known when a step is planned or begins.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import psutil

from roundpipe_fx.budget import HostMemoryError, bytes_text
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.runtime.pinned_memory import pinned_bytes
from roundpipe_fx.schedules import Timing
from roundpipe_fx.schedules.offloads import buffer_bytes

_SHARE = 0.8
"""Of the memory that the host has available, if no budget is given."""
ASSUMED_HOST_BYTES = 128 << 30
"""Memory of the host of another machine, if no budget is given."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the host.

    Attributes:
        gradients: the parameters' gradients, each part of one that is computed in several residency windows for itself.
        values: buffers for values that leave the devices.
        optimizer: state of the optimizer, and copies of parameters that it steps in their place.
    """

    weights: int = 0
    gradients: int = 0
    values: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.values + self.optimizer


def host_memory_of(pipeline: LoweredPipeline, timing: Timing, pipelining: Pipelining) -> HostMemory:
    """The host memory that a step needs; nothing if it is not beside the devices. Of processes: of the one that needs
    most.
    """
    costs, setting = pipeline.main.costs, pipeline.main.lowered.setting
    if costs.host_bandwidth is None:
        return HostMemory()
    # Planned on a machine without the device: memory is pinned there as on a machine that has it.
    on_paper = setting.device.type == "cpu" and setting.options.device_name not in (None, "cpu")
    taken = functools.partial(pinned_bytes, device_type="cuda" if on_paper else setting.device.type)
    sizes = {number: size for of in costs.copied_bytes.values() for number, size in of.items()}
    weights = [size for number, size in sizes.items() if number in (costs.on_host or ())]
    lengths = [len(order) for order in timing.schedule.orders]
    of_devices = buffer_bytes(timing.offloads, lengths, taken)
    # Processes have buffers each, and the budget is that of one.
    values = max(of_devices, default=0) if pipelining.over_processes else sum(of_devices)
    optimizer = 0 if costs.on_host is None else pipelining.optimizer.bytes
    return HostMemory(sum(map(taken, weights)), sum(map(taken, timing.returned_bytes)), values, optimizer)


def host_budget_of(pipeline: LoweredPipeline, pipelining: Pipelining) -> int:
    """Bytes that a step may take: as asked, or 80 % of what is available and what is there already.

    Args:
        pipeline: any lowered pipeline of the model.

    Returns:
        the bytes; those of the assumed host if the step is planned for another machine.
    """
    costs = pipeline.main.costs
    sizes = {number: size for of in costs.copied_bytes.values() for number, size in of.items()}
    weights = sum(size for number, size in sizes.items() if number in (costs.on_host or ()))
    return host_budget_for(weights, pipelining)


def host_budget_for(weights: int, pipelining: Pipelining) -> int:
    """As :func:`host_budget_of`, for a model with so many bytes of weights."""
    if pipelining.host_budget is not None:
        return pipelining.host_budget
    if pipelining.elsewhere:
        return ASSUMED_HOST_BYTES
    # Weights and the optimizer are on the host already, so they are not in what is available.
    return int(_SHARE * psutil.virtual_memory().available) + weights + pipelining.optimizer.allocated


def check_host_memory(needed: HostMemory, budget: int, assumed: bool = False) -> None:
    """Refuse a step that needs more than a budget on the host.

    Args:
        budget: bytes.
        assumed: whether they are those of a host that nobody has named.

    Raises:
        HostMemoryError: it is more.
    """
    if needed.total <= budget:
        return
    named = (
        (needed.weights, "weights"),
        (needed.gradients, "gradients"),
        (needed.values, "values that leave the devices"),
        (needed.optimizer, "the optimizer's state and copies of parameters"),
    )
    parts = [f"{bytes_text(size)} for {name}" for size, name in named if size]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    limit = f"{budget} bytes ({bytes_text(budget)})"
    has = f"the host is assumed to have {limit}" if assumed else f"the host_budget is {limit}"
    less = "a larger memory_budget, so that fewer values leave, " if needed.values else ""
    raise HostMemoryError(
        f"a step needs {needed.total} bytes ({bytes_text(needed.total)}) of memory on the host: "
        f"{listed}; {has}. Give "
        f"{less}a smaller batch, or a host_budget of at least that if the host has it.",
        needed.total,
    )
