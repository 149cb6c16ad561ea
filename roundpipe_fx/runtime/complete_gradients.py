"""Complete gradients: finds the moment of a step at which a parameter can be updated.

A parameter can be updated once its last gradient has been added and no later action, on any device, reads the parameter
or a view of its memory. Updates of offloaded parameters also wait until gradients have been copied to the host. The
copy of the parameter to the device has ended by then, since it precedes the computation of the gradient. For w0 of
stage 0, w1 of stage 1, and w that both stages read, with two microbatches::

    device 0    F0.0  F0.1         B0.0  B0.1 │           w0: only this device touches it, so it is updated here
    device 1          F1.0  B1.0   F1.1  B1.1 │           w1: likewise
                                              └─ w: each device leaves its part of the gradient behind its last
                                                 action that touches w; the later of the two submits both parts,
                                                 in the order of the devices
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from roundpipe_fx.runtime.pipeline_program import Instruction, PipelineProgram
from roundpipe_fx.runtime.stage_updates import StepUpdates

Parts = list[tuple[torch.Tensor, bool]]


def updatable_in_step(programs: Sequence[PipelineProgram], primals: Sequence[Sequence[Any]]) -> Collection[int]:
    """Identities of the primals that may be updated before a step ends.

    Not those whose memory outlives their last reader: because the step returns or updates it, or because another primal
    shares it. And not those whose gradient no action computes, since it is an input itself.

    Args:
        programs: program of each microbatch.
        primals: for each microbatch, the inputs of the forward.
    """
    updatable: set[int] = set()
    outside: set[int] = set()
    tensors: dict[int, torch.Tensor] = {}
    # Four reasons against an early update: a gradient from outside, an update by the step, an output that is the
    # parameter or a view of it, memory shared with another parameter.
    for program, inputs in zip(programs, primals, strict=True):
        tensors.update({id(value): value for value in inputs if isinstance(value, torch.Tensor)})
        for gradient in program.gradients:
            if gradient.source is not None:
                (updatable if gradient.source.kind == "value" else outside).add(id(inputs[gradient.primal]))
        outside.update(id(inputs[number]) for number in program.mutations.values())
        for source in program.outputs:
            if source is not None and source.kind == "primal":
                outside.add(id(inputs[source.index]))
            elif source is not None and source.index in program.views:
                outside.add(id(inputs[program.views[source.index]]))
    sharing = Counter(value.untyped_storage()._cdata for value in tensors.values())
    outside.update(key for key, value in tensors.items() if sharing[value.untyped_storage()._cdata] > 1)
    return updatable - outside


class CompleteGradients:
    """Tells the optimizer of a step which gradients are complete.

    Args:
        instructions: instructions of each device.
        programs: program of each microbatch.
        primals: for each microbatch, the inputs of the forward.
    """

    def __init__(
        self,
        instructions: Sequence[Sequence[Instruction]],
        programs: Sequence[PipelineProgram],
        primals: Sequence[Sequence[Any]],
        updates: StepUpdates,
    ) -> None:
        self._updates = updates
        self._lock = threading.Lock()
        self._parts: dict[int, list[Parts]] = {key: [[] for _ in instructions] for key in updates.keys}
        self._waits: dict[int, list[Callable[[], None]]] = {key: [] for key in updates.keys}
        self._devices: Counter[int] = Counter()
        self._last: list[list[tuple[int, int]]] = []
        # For each device, the position of the last instruction that reads a parameter or adds to its gradient.
        for device_instructions in instructions:
            last: dict[int, int] = {}
            for position, instruction in enumerate(device_instructions):
                batch = instruction.action.microbatch
                for key in _iterate_touched(instruction, programs[batch], primals[batch]):
                    if key in updates.keys:
                        last[key] = position
            self._devices.update(last.keys())
            # Sorted so that the next one to complete is at the end: `pop` is constant.
            self._last.append(sorted(((position, key) for key, position in last.items()), key=lambda item: -item[0]))

    def note_finished(
        self, device: int, position: int, take: Callable[[int], Parts], wait: Callable[[], Callable[[], None]]
    ) -> None:
        """Tell of what a device has done; called by its worker.

        Args:
            device: number of the device.
            position: position of its next instruction.
            take: removes and returns what it has of a gradient, by identity of the primal.
            wait: returns a function that waits until that has arrived on the host.
        """
        last, keys = self._last[device], []
        # All parameters whose last instruction has been passed.
        while last and last[-1][0] < position:
            keys.append(last.pop()[1])
        if not keys:
            return
        arrived = wait()
        complete = []
        # The last of the devices that touch a parameter submits it; others only leave their parts.
        with self._lock:
            for key in keys:
                self._parts[key][device] = take(key)
                self._waits[key].append(arrived)
                self._devices[key] -= 1
                if not self._devices[key]:
                    complete.append(key)
        if complete:
            waits = {id(parts_waiting): parts_waiting for key in complete for parts_waiting in self._waits[key]}
            # In the order of the devices, as without an optimizer: sums have the same bits.
            gradients = {key: [part for parts in self._parts.pop(key) for part in parts] for key in complete}
            self._updates.submit(gradients, [*waits.values()])


def _iterate_touched(instruction: Instruction, program: PipelineProgram, primals: Sequence[Any]) -> Iterator[int]:
    """Identities of the primals that an action reads, or whose gradient it adds to."""
    code = instruction.code
    for number in (*code.reads, *code.views):
        yield id(primals[number])
    added = [number for _, number in (*instruction.gradients, *instruction.sums)]
    added += [source.index for source in code.inputs if source.kind == "sum"]
    for number in added:
        yield id(primals[program.gradients[number].primal])
