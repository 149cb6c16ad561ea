"""Snapshots of memory: the planned memory of a step in the format of PyTorch's memory visualizer,
https://pytorch.org/memory_viz, which draws allocations over time and shows the frames of each.

A snapshot is the dictionary that ``torch.cuda.memory._snapshot()`` returns: a trace of events for each device, and the
segments of memory as they are when the last event is over. The visualizer goes back from there. ::

    segment_alloc  alloc  alloc  free_requested  free_completed  alloc  …    events of one device
    └─ all of it   └─ a value that is alive from here to its last reader ─┘

What an allocator has recorded is put behind the planned traces, and the numbers of its devices rise by as many.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from roundpipe_fx.analysis.memory_timeline import Lifetime, Moment
from roundpipe_fx.ir.decisions import PlannedStage
from roundpipe_fx.report.plan_details import EmittedStep
from roundpipe_fx.report.timeline import Timeline

_PROTOCOL = 4
"""The newest pickle protocol that the visualizer reads, whatever Python's default is."""
_ALIGNED_TO = 512
_FIRST_ADDRESS = 1 << 40
"""Of the first planned device; those of others are as far apart. Addresses of CUDA's are above them."""

_Frames = list[dict[str, Any]]


class _Change(NamedTuple):
    """An allocation, or that it is freed.

    Attributes:
        number: number of the allocation.
        bytes: bytes of an allocation; 0: it is freed.
        frames: where in the program it is allocated, innermost first.
    """

    number: int
    bytes: int
    frames: _Frames
    microseconds: int


def write_snapshot(
    path: str | Path,
    planned: Sequence[Sequence[_Change]],
    recorded: Mapping[str, Any] | None,
) -> Path:
    """Write a snapshot.

    Args:
        path: the file to write.
        planned: changes of each planned device, in order.
        recorded: what ``torch.cuda.memory._snapshot()`` has returned; ``None``: nothing is recorded.
    """
    target = Path(path)
    target.write_bytes(pickle.dumps(_snapshot(planned, recorded), protocol=_PROTOCOL))
    return target


def _snapshot(planned: Sequence[Sequence[_Change]], recorded: Mapping[str, Any] | None) -> dict[str, Any]:
    laid_out = [_lay_out(changes, device) for device, changes in enumerate(planned)]
    allocator_fields = recorded or {}
    segments = [
        {**segment, "device": segment["device"] + len(planned)} for segment in allocator_fields.get("segments", ())
    ]
    return {
        "allocator_settings": {},
        "external_annotations": [],
        **allocator_fields,
        "segments": [*(segment for _, segment in laid_out if segment["total_size"]), *segments],
        "device_traces": [*(trace for trace, _ in laid_out), *allocator_fields.get("device_traces", ())],
    }


def changes_of_step(step: EmittedStep) -> list[_Change]:
    """The planned course of a step's memory, as changes.

    Beside the values there are the workspaces of kernels, and what the device's caching allocator counts beyond the
    sizes of what is allocated. Times are numbers of operations.

    Returns:
        the changes; they end while the last operation runs.
    """
    moments, values = step.memory.moments, step.memory.values
    born: list[list[int]] = [[] for _ in moments]
    dying: list[list[int]] = [[] for _ in moments]
    for number, value in enumerate(values):
        born[value.first].append(number)
        dying[value.last].append(number)
    changes: list[_Change] = []
    alive = beyond = 0
    beyond_number, free_number = -1, len(values)
    # Order within a moment as the simulator has it: values are made, the workspace exists for the moment, values die.
    for at, moment in enumerate(moments):
        alive += sum(values[number].bytes for number in born[at])
        # What the allocator counts beyond the sizes is one allocation of its own, replaced whenever it changes.
        beyond_now = max(moment.bytes - moment.workspace - alive, 0)
        if beyond and beyond_now != beyond:
            changes.append(_Change(beyond_number, 0, [], at))
        changes += (
            _Change(number, values[number].bytes, _frames_of_value(step, values[number], moment), at)
            for number in born[at]
        )
        if beyond_now and beyond_now != beyond:
            beyond_number, free_number = free_number, free_number + 1
            changes.append(_Change(beyond_number, beyond_now, [_frame("the caching allocator", 0, _BEYOND)], at))
        beyond = beyond_now
        if moment.workspace:
            frames = _frames_of_operation(step, moment)
            changes += (_Change(free_number, moment.workspace, frames, at), _Change(free_number, 0, frames, at))
            free_number += 1
        if at < len(moments) - 1:  # what is alive in the last operation may be the caller's
            changes += (_Change(number, 0, [], at) for number in dying[at])
            alive -= sum(values[number].bytes for number in dying[at])
    return changes


_BEYOND = "bytes of blocks beyond the sizes requested"


def changes_of_pipeline(timeline: Timeline, stages: Sequence[PlannedStage]) -> list[list[_Change]]:
    """The planned course of the memory of a pipeline's devices, as changes: the predicted bytes during each action.

    Args:
        timeline: when each device runs which action.

    Returns:
        changes by device.
    """
    # An action of a pipeline is one allocation from its start to its end, of the most bytes that the device has then.
    modules = {stage.index: stage.modules for stage in stages}
    changes: list[list[_Change]] = [[] for _ in range(1 + max(bar.device for bar in timeline.predicted))]
    for bar in timeline.predicted:
        action = bar.action
        frames = [
            # The second line of that file is the order of the first device's actions.
            _frame("schedule.txt", 2 + bar.device, f"{action} on device {bar.device}"),
            _frame(f"stage_{action.stage}", 0, modules.get(action.stage, "")),
        ]
        device_changes = changes[bar.device]
        number = len(device_changes) // 2
        if bar.bytes:
            device_changes.append(_Change(number, bar.bytes, frames, round(bar.start * 1e6)))
            device_changes.append(_Change(number, 0, frames, round(bar.end * 1e6)))
    return changes


def _frames_of_value(step: EmittedStep, value: Lifetime, moment: Moment) -> _Frames:
    """Frames of the operation that computes a value: its line of the emitted code, and that of the user's program."""
    name = value.name
    if value.origin != value.name:
        name += f", recomputes {value.origin}"
    elif value.gradient:
        name += ", a gradient"
    emitted = _emitted_frame(step, value.origin, value.name, name, moment.call)
    return [emitted, *_user_frames(value.line, value.module)]


def _frames_of_operation(step: EmittedStep, moment: Moment) -> _Frames:
    name = f"workspace of {moment.value or moment.call}"
    emitted = _emitted_frame(step, moment.value, moment.value, name, moment.call)
    return [emitted, *_user_frames(moment.line, moment.module)]


def _emitted_frame(step: EmittedStep, origin: str, value: str, name: str, call: str) -> dict[str, Any]:
    """The line of a stage module; where modules do the same work, of the first one, which is the one that is written.

    Args:
        origin: the value that is computed or recomputed there.
        value: the name of the result.
        name: what the frame is to say.
        call: the stage module that runs.
    """
    phase = call.rpartition("_")[2]
    lines = [line for line in step.lines.get(origin, ()) if line.file.endswith(f".{phase}.py")]
    # Lines that assign the value come first; others only mention its origin.
    lines.sort(key=lambda line: not line.text.startswith(f"{value}:"))
    return _frame(lines[0].file, lines[0].line, f"{name} in {call}") if lines else _frame(call, 0, name)


def _user_frames(line: str, module: str) -> Iterator[dict[str, Any]]:
    file, _, number = line.rpartition(":")
    if line or module:
        yield _frame(file or "model", int(number or 0), module or "model")


def _frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def _lay_out(changes: Sequence[_Change], device: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Changes as events at addresses of one segment, and the segment as they leave it.

    Each allocation gets the lowest addresses that are free for it.
    """
    base = _FIRST_ADDRESS * (device + 1)
    gaps: list[tuple[int, int]] = []
    """Begin and end of free memory below ``top``, in order."""
    top = base
    allocated: dict[int, tuple[int, _Change]] = {}
    events: list[dict[str, Any]] = []

    def event(action: str, address: int, size: int, frames: _Frames, microseconds: int) -> dict[str, Any]:
        return {
            "action": action,
            "addr": address,
            "size": size,
            "stream": 0,
            "pool_id": (0, 0),
            "time_us": microseconds,
            "compile_context": "N/A",
            "user_metadata": "",
            "frames": frames,
        }

    # First fit: addresses have no meaning but to be disjoint while values are alive.
    for change in changes:
        if change.bytes:
            size = _align(change.bytes)
            at = next((at for at, (begin, end) in enumerate(gaps) if end - begin >= size), None)
            if at is None:
                address, top = top, top + size
            else:
                address, end = gaps.pop(at)
                if end - address > size:
                    gaps.insert(at, (address + size, end))
            allocated[change.number] = address, change
            events.append(event("alloc", address, change.bytes, change.frames, change.microseconds))
        else:
            address, allocation = allocated.pop(change.number)
            _give_back(gaps, address, address + _align(allocation.bytes))
            events += (
                event(action, address, allocation.bytes, allocation.frames, change.microseconds)
                for action in ("free_requested", "free_completed")
            )
    frames = [_frame("roundpipe_fx", 0, "the planned step")]
    if events:
        events.insert(0, event("segment_alloc", base, top - base, frames, 0))
    return events, _segment(device, base, top, [*allocated.values()], frames)


def _give_back(gaps: list[tuple[int, int]], begin: int, end: int) -> None:
    """Add a gap, and merge it with its neighbours."""
    at = bisect_left(gaps, (begin, end))
    # Merge with the gap behind and the gap in front.
    if at < len(gaps) and gaps[at][0] == end:
        end = gaps.pop(at)[1]
    if at and gaps[at - 1][1] == begin:
        begin = gaps.pop(at - 1)[0]
    insort(gaps, (begin, end))


def _segment(
    device: int, base: int, top: int, allocated: Sequence[tuple[int, _Change]], frames: _Frames
) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    end = base
    for address, change in [*sorted(allocated, key=lambda item: item[0]), (top, _Change(-1, 0, [], 0))]:
        # Between two allocations that are left at the end lies a free block.
        if address > end:
            size = address - end
            blocks.append({"address": end, "size": size, "requested_size": 0, "state": "inactive", "frames": []})
        size = _align(change.bytes)
        if size:
            blocks.append(
                {
                    "address": address,
                    "size": size,
                    "requested_size": change.bytes,
                    "state": "active_allocated",
                    "frames": change.frames,
                }
            )
        end = address + size
    in_use = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": device,
        "address": base,
        "total_size": top - base,
        "allocated_size": in_use,
        "active_size": in_use,
        "requested_size": sum(change.bytes for _, change in allocated),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": frames,
        "blocks": blocks,
    }


def _align(size: int) -> int:
    return -(-size // _ALIGNED_TO) * _ALIGNED_TO
