"""Prefetching: copies an offloaded model's tensors to a device for the residency windows that read them.

Residency windows are defined in :mod:`roundpipe_fx.schedules.residency`. A window's tensors are copied while the window
before it runs, and freed if neither the window that begins nor the next one reads them. For three stages of one device,
each of which reads one weight, and the order F0 F1 F2 B2 B1 B0::

    before      window      freed    copied and waited for    copied meanwhile, for the next window
    F0          F0          —        w0                       w1
    F1          F1          w0       —                        w2
    F2          F2 B2       —        —                        —: w1 stays, since the next window reads it
    B1          B1          w2       —                        w0
    B0          B0          w1       —                        —
    the end     —           w0       —                        —
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx.runtime.pipeline_program import Instruction
from roundpipe_fx.schedules.residency import resident, window_ranges


@dataclass(frozen=True, slots=True)
class PrefetchStep:
    """The copies between two residency windows.

    Attributes:
        drops: tensors whose copies are freed, because neither of the next two windows reads them.
        first: at the first window, the tensors that it reads, since no window before it has prefetched them.
        ahead: tensors that are prefetched for the window after the one that begins.
    """

    drops: tuple[torch.Tensor, ...]
    first: tuple[torch.Tensor, ...]
    ahead: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Stay:
    """Tensors that stay on a device where they would be dropped.

    Attributes:
        start: position of the instruction before which they would be dropped.
        stop: position before which they would be there again.
    """

    keys: frozenset[int]
    start: int
    stop: int


def prefetch_steps_of(
    instructions: Sequence[Instruction],
    primals: Sequence[Sequence[Any]],
    on_host: Collection[int],
    views: bool = False,
    kept: Sequence[Stay] = (),
) -> Mapping[int, PrefetchStep]:
    """The prefetch steps of a device, by position of the instruction that they precede; the last one follows all.

    Args:
        instructions: instructions of the device.
        primals: for each microbatch, the inputs of the forward.
        on_host: identities of the tensors that stay on the host, or are gathered.
        views: whether a tensor has to be there for those that read a view of it that another action has computed.
        kept: tensors that stay between windows that read them.
    """
    windows = window_ranges([instruction.action.stage for instruction in instructions])
    tensors: dict[int, torch.Tensor] = {}  # in the order in which they are read first
    reads: list[set[int]] = []
    for window in windows:
        # What a window reads: parameters, and those whose views other stages hand on.
        resident_keys: set[int] = set()
        for instruction in (instructions[position] for position in window):
            values = primals[instruction.action.microbatch]
            code = instruction.code
            for value in (values[number] for number in (*code.reads, *(code.views if views else ()))):
                if id(value) in on_host:
                    tensors[id(value)] = value
                    resident_keys.add(id(value))
        reads.append(resident_keys)
    # Tensors are copied in the order in which they are first read.
    order = {key: position for position, key in enumerate(tensors)}

    def of(keys: Collection[int]) -> tuple[torch.Tensor, ...]:
        return tuple(tensors[key] for key in sorted(keys, key=order.__getitem__))

    prefetch_steps: dict[int, PrefetchStep] = {}
    before: set[int] = set()
    for index, (window, resident_now) in enumerate(zip(windows, resident(reads), strict=True)):
        # A tensor that a plan lets stay is treated as if every window in between read it.
        resident_now.update(
            key for stay in kept if stay.start <= window.start < stay.stop for key in stay.keys & before
        )
        # Set differences between neighbouring windows: resident now but not before is copied, the reverse is freed.
        new = resident_now - before
        first = set() if index else reads[0]
        prefetch_steps[window.start] = PrefetchStep(of(before - resident_now), of(first), of(new - first))
        before = resident_now
    prefetch_steps[len(instructions)] = PrefetchStep(of(before), (), ())
    return prefetch_steps
