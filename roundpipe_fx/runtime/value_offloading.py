"""Value offloading: copies a worker's values to the host and back, as the plan decided.

:class:`roundpipe_fx.schedules.offloads.Offload` holds the positions of the copies. A value is copied with its whole
storage, so it returns with the same bits, strides and dtype, in new memory. At each of the four positions::

    leaves     taken from the worker's values; the copy of its storage into a pinned buffer begins
    freed      the compute stream waits for that copy; its memory on the device is freed
    reloads    memory is allocated; the copy back begins
    back       the compute stream waits for that copy; the value has its shape and strides again; the buffer is free

If the backwards run later than the forwards, the first run leaves the values on the host to the second: it makes the
first two of these steps, and the second run the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from roundpipe_fx.runtime.device_streams import DeviceStreams
from roundpipe_fx.runtime.pipeline_program import Instruction
from roundpipe_fx.schedules import ActionKind, Schedule
from roundpipe_fx.schedules.offloads import Offload
from roundpipe_fx.schedules.step_costs import backward_start


@dataclass(frozen=True, slots=True)
class OffloadSteps:
    """Values that leave, are freed, are reloaded and must be back before an instruction.

    Attributes:
        leaves: offloads whose copies to the host begin.
        freed: offloads whose memory on the device is freed.
        reloads: offloads whose copies to the device begin.
        back: offloads whose values are read.
    """

    leaves: tuple[Offload, ...] = ()
    freed: tuple[Offload, ...] = ()
    reloads: tuple[Offload, ...] = ()
    back: tuple[Offload, ...] = ()


def offload_steps_of(
    schedule: Schedule,
    instructions: Sequence[Sequence[Instruction]],
    offloads: Sequence[Offload],
    kinds: Collection[ActionKind] | None = None,
) -> list[Mapping[int, OffloadSteps]]:
    """For each device, what happens before which of its instructions.

    Args:
        schedule: the schedule whose positions the offloads refer to.
        instructions: of each device; actions that a microbatch does not have, or that another run has, are missing.
        kinds: of actions of the run; ``None``: all.
    """
    steps_of_devices: list[Mapping[int, OffloadSteps]] = []
    for device, device_instructions in enumerate(instructions):
        present = {str(instruction.action) for instruction in device_instructions}
        # Positions of the schedule, counted in this run's instructions: position p becomes the number of instructions
        # before p.
        positions = [0, *accumulate(int(str(action) in present) for action in schedule.actions(device))]
        at_position: dict[int, dict[str, list[Offload]]] = {}
        turn = backward_start(schedule.orders[device], schedule)
        for offload in offloads:
            if offload.device == device:
                for name in _steps_in_run(offload, turn, kinds):
                    position = positions[getattr(offload, name)]
                    at_position.setdefault(position, {}).setdefault(name, []).append(offload)
        steps_of_devices.append(
            {
                position: OffloadSteps(**{name: tuple(offloads_there) for name, offloads_there in steps.items()})
                for position, steps in at_position.items()
            }
        )
    return steps_of_devices


def _steps_in_run(offload: Offload, turn: int, kinds: Collection[ActionKind] | None) -> tuple[str, ...]:
    """The steps of an offload that belong to a run.

    Args:
        turn: position of the device's first backward, if all forwards run before all backwards.
        kinds: of actions of the run; ``None``: all.
    """
    names = "leaves", "freed", "reloads", "back"
    if kinds is None:
        return names
    forwards = ActionKind.FORWARD in kinds
    # An offload from one forward to another (or between two backwards) belongs to the run of that half; others are
    # split between the two runs.
    if offload.back < turn or offload.leaves > turn:  # within one half
        return names if forwards == (offload.back < turn) else ()
    return names[:2] if forwards else names[2:]


@dataclass(slots=True)
class OffloadState:
    """A value that is on its way to the host, there, or on its way back.

    Attributes:
        value: on the device; ``None`` while there is none.
        layout: arguments of ``set_`` beside the memory.
        size: bytes of its memory.
    """

    value: torch.Tensor | None
    layout: tuple[int, torch.Size, tuple[int, ...], torch.dtype]
    size: int
    buffer: torch.Tensor


class ValueOffloading:
    """Offloads the values of one worker during a run.

    Args:
        steps: what happens before which instruction.
        values: the worker's values: for each microbatch, by number.
        offloaded: what an earlier run has left on the host, by microbatch and number; emptied as it comes back.
    """

    def __init__(
        self,
        steps: Mapping[int, OffloadSteps],
        values: Sequence[dict[int, Any]],
        device_streams: DeviceStreams,
        offloaded: dict[tuple[int, int], OffloadState],
    ) -> None:
        self._steps = steps
        self._values = values
        self._device_streams = device_streams
        self._buffers = device_streams.host_buffers
        self._offloaded = offloaded
        self._copied: dict[Offload, Any] = {}
        """By offload, the marker of its latest copies."""
        sizes = {size for at_position in steps.values() for offload in at_position.leaves for _, size in offload.values}
        if sizes:
            self._buffers.keep(sizes)

    def leave(self, position: int) -> None:
        """Begin to copy what leaves before an instruction; called first."""
        for offload in self._at(position).leaves:
            pairs = []
            for number, size in offload.values:
                # Popped, so that the copy holds the only reference to the memory on the device.
                value = self._values[offload.microbatch].pop(number)
                memory = _memory_of(value)
                buffer = self._buffers.take(max(size, memory.numel()))
                layout = value.storage_offset(), value.shape, value.stride(), value.dtype
                self._offloaded[offload.microbatch, number] = OffloadState(memory, layout, memory.numel(), buffer)
                pairs.append((memory, buffer[: memory.numel()]))
            self._copied[offload] = self._device_streams.copy_values(pairs, to_host=True)

    def reload(self, position: int) -> None:
        """Free what has left, and bring back what is needed; called last before an instruction."""
        steps = self._at(position)
        # The compute stream waits for the copy to the host before the memory is reused.
        for offload in steps.freed:
            self._device_streams.wait_for_values(self._copied.pop(offload))
            for offloaded in self._of(offload):
                offloaded.value = None
        for offload in steps.reloads:
            pairs = []
            for offloaded in self._of(offload):
                # Memory for the whole storage, as it left; the value's shape and strides are restored below.
                offloaded.value = torch.empty(offloaded.size, dtype=torch.uint8, device=self._device_streams.device)
                pairs.append((offloaded.buffer[: offloaded.size], offloaded.value))
            self._copied[offload] = self._device_streams.copy_values(pairs, to_host=False)
        for offload in steps.back:
            self._device_streams.wait_for_values(self._copied.pop(offload))
            for number, _ in offload.values:
                offloaded = self._offloaded.pop((offload.microbatch, number))
                assert offloaded.value is not None
                offset, shape, strides, dtype = offloaded.layout
                value = torch.empty(0, dtype=dtype, device=self._device_streams.device)
                value.set_(offloaded.value.untyped_storage(), offset, shape, strides)
                self._values[offload.microbatch][number] = value
                self._buffers.give(offloaded.buffer)

    def leave_behind(self) -> None:
        """Hand what is on the host when a run ends to the one that brings it back, among the other values."""
        for (batch, number), offloaded in self._offloaded.items():
            self._values[batch][number] = offloaded

    def _at(self, position: int) -> OffloadSteps:
        return self._steps.get(position, _NOTHING)

    def _of(self, offload: Offload) -> list[OffloadState]:
        return [self._offloaded[offload.microbatch, number] for number, _ in offload.values]


_NOTHING = OffloadSteps()


def _memory_of(value: torch.Tensor) -> torch.Tensor:
    """All memory of a tensor, as bytes."""
    storage = value.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage, 0, (storage.nbytes(),), (1,))
