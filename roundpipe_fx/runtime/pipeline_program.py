"""Pipeline programs: stage modules with the sources of their arguments and the destinations of their results.

They are to several microbatches on several devices what the executor is to one microbatch on one device. For a schedule
it is determined in advance, for each device, what each action reads, which values die with it, and what it sends to
which device. Running is then a loop over instructions::

    action F1.0 of device 1, which reads v of F0.0 and computes h and the loss
    receives    F0.0: its message has arrived before the action runs
    code        inputs (value v, primal w1), outputs (h, loss)
    dying       no; v is read again by B1.0 on this device
    kept        h, which B1.0 reads
    sends       to nobody; F0.0's instruction sends v to device 1
    results     the loss, which is output 0 of the forward
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe_fx.runtime.stage_collectives import Collective
from roundpipe_fx.runtime.stage_compiler import Boxed
from roundpipe_fx.schedules import Action, Schedule, StageAction, StageGraph


@dataclass(frozen=True, slots=True)
class Source:
    """The source of an argument.

    Attributes:
        kind: ``"primal"`` (input of the forward), ``"tangent"`` (incoming gradient), ``"value"`` (result of a stage
            action), ``"sum"`` (accumulated gradient) or ``"token"`` (``None``, the first token of a chain of effects).
        index: number of the primal, tangent or value in the program; for a sum, number of the gradient.
    """

    kind: str
    index: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient, or one contribution to it.

    Attributes:
        primal: number of the input that it is the gradient of; -1 if there is none.
        source: its source; ``None`` if there is no gradient.
    """

    primal: int
    source: Source | None


@dataclass(frozen=True, kw_only=True)
class StepCode:
    """A stage module, ready to run.

    Attributes:
        call: takes one list of arguments, returns a tuple of results.
        inputs: sources of the arguments.
        outputs: numbers of the values that it computes.
        elsewhere: returns ``call`` for a device other than the one that the model was traced on.
        random: whether it draws random numbers.
        see: called with the results, to record data-dependent sizes; ``None`` if there are none.
        views: numbers of the primals of which other arguments are views.
        collectives: those of the stage module, which count as started one by one while it runs; none if that is not so.
    """

    call: Boxed
    inputs: tuple[Source, ...]
    outputs: tuple[int, ...]
    elsewhere: Callable[[torch.device], Boxed]
    random: bool = False
    see: Callable[[Sequence[Any]], None] | None = None
    views: tuple[int, ...] = ()
    collectives: tuple[Collective, ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        """Numbers of the primals that are arguments."""
        return tuple(source.index for source in self.inputs if source.kind == "primal")


@dataclass(frozen=True, kw_only=True)
class PipelineProgram:
    """The code of one microbatch.

    Attributes:
        steps: the code of each stage action.
        graph: which stage action reads which.
        outputs: sources of the forward's results; ``None`` for a constant ``None``.
        gradients: the gradients of the primals.
        tangents: for each tangent, number of the forward output that it is the gradient of.
        mutations: numbers of primals that the caller updates in place, by number of the forward output that is the new
            value.
        values: fake values of what stage actions compute, by number.
        draws: the stage actions that draw random numbers, in order.
        views: for each value that is a view of a primal, that primal's number.
    """

    steps: Mapping[StageAction, StepCode]
    graph: StageGraph
    outputs: tuple[Source | None, ...]
    gradients: tuple[Gradient, ...]
    tangents: tuple[int, ...]
    mutations: Mapping[int, int]
    values: tuple[Any, ...] = ()
    draws: tuple[StageAction, ...] = ()
    views: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """An action with its inputs and outputs.

    Attributes:
        code: the stage module to run.
        receives: stage actions of other devices whose message must have arrived.
        dying: for each argument, whether it is a value that no later action of this device reads.
        kept: (position in the results, number) of values that later actions of this device read.
        sends: for each device that reads results, or must run after this action: its number, and (position, number) of
            the values.
        results: (position in the results, number of the forward output).
        gradients: (position in the results, number of the gradient) of gradients to accumulate.
        sums: the same for gradients that the stage module has accumulated itself.
    """

    action: Action
    code: StepCode
    receives: tuple[StageAction, ...]
    dying: tuple[bool, ...]
    kept: tuple[tuple[int, int], ...]
    sends: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    results: tuple[tuple[int, int], ...]
    gradients: tuple[tuple[int, int], ...]
    sums: tuple[tuple[int, int], ...]


def instructions_of(
    schedule: Schedule, programs: Sequence[PipelineProgram], later: Schedule | None = None
) -> list[list[Instruction]]:
    """The instructions of each device.

    Args:
        schedule: a valid schedule, or its forwards or backwards.
        programs: the program of each microbatch. Actions that a microbatch's program does not have are skipped.
        later: the backwards of a schedule's forwards, if they are a later run: what they read, and gradients, are left.
    """
    orders = [
        [action for action in schedule.actions(device) if action.step in programs[action.microbatch].steps]
        for device in range(schedule.devices)
    ]
    # Who runs which stage action of each microbatch, under this schedule.
    where: list[dict[StageAction, int]] = [{} for _ in programs]
    sequences: list[list[list[StageAction]]] = [[[] for _ in programs] for _ in orders]
    for device, order in enumerate(orders):
        for action in order:
            where[action.microbatch][action.step] = device
            sequences[device][action.microbatch].append(action.step)
    where_later: list[dict[StageAction, int]] = [{} for _ in programs]
    for device in range(later.devices if later is not None else 0):
        for action in later.actions(device) if later is not None else ():
            where_later[action.microbatch][action.step] = device
    # Microbatches with equal code and devices have equal instructions but for their number, so most are looked up.
    known: dict[tuple[object, ...], dict[StageAction, Instruction]] = {}
    by_device: list[list[Instruction]] = []
    for device, order in enumerate(orders):
        device_instructions = []
        for action in order:
            batch = action.microbatch
            positions = (*where[batch].items(), *where_later[batch].items())
            key = (device, id(programs[batch]), positions, tuple(sequences[device][batch]), batch)
            if key not in known:
                known[key] = _make_instructions(
                    device, batch, programs[batch], where[batch], sequences[device][batch], where_later[batch]
                )
            device_instructions.append(known[key][action.step])
        by_device.append(device_instructions)
    return by_device


@dataclass(frozen=True)
class _Readers:
    """Who reads the values of one microbatch, seen from one device.

    Attributes:
        last: by value, the stage action of this device that reads it last.
        devices: by value, the devices that read it.
        waiting: by stage action, the devices that wait for it, whether they read a value of it or not.
        later: values that the device keeps for a later run.
    """

    last: Mapping[int, StageAction]
    devices: Mapping[int, set[int]]
    waiting: Mapping[StageAction, set[int]]
    later: set[int]

    @classmethod
    def of(
        cls,
        device: int,
        program: PipelineProgram,
        where: Mapping[StageAction, int],
        sequence: Sequence[StageAction],
        where_later: Mapping[StageAction, int],
    ) -> _Readers:
        """The readers under a schedule.

        Args:
            where: by stage action of this run, its device.
            sequence: the stage actions of this device, in order.
            where_later: by stage action of a later run, its device.
        """
        # The sequence is in order, so the last assignment is the last reader.
        last: dict[int, StageAction] = {}
        for step in sequence:
            last.update(dict.fromkeys(_values(program.steps[step]), step))
        devices: dict[int, set[int]] = {}
        waiting: dict[StageAction, set[int]] = {}
        for step, reading in where.items():
            for source in program.graph.reads[step]:
                waiting.setdefault(source, set()).add(reading)
            for value in _values(program.steps[step]):
                devices.setdefault(value, set()).add(reading)
        # A later run (the backwards of a call whose forwards run now) may put a reader on another device.
        later_devices: dict[int, set[int]] = {}
        for step, reading in where_later.items():
            for value in _values(program.steps[step]) if step in program.steps else ():
                later_devices.setdefault(value, set()).add(reading)
        computed = {number for step in sequence for number in program.steps[step].outputs}
        later = {
            value
            for value, reading_later in later_devices.items()
            # Who has it and reads it again keeps it; if there is nobody, who made it does, as others get it from there.
            if device in reading_later or (value in computed and not reading_later & devices.get(value, set()))
        }
        return cls(last, devices, waiting, later)


def _values(code: StepCode) -> list[int]:
    """Numbers of the values that a stage module reads."""
    return [source.index for source in code.inputs if source.kind == "value"]


def _make_instructions(
    device: int,
    batch: int,
    program: PipelineProgram,
    where: Mapping[StageAction, int],
    sequence: Sequence[StageAction],
    where_later: Mapping[StageAction, int],
) -> dict[StageAction, Instruction]:
    """The instructions of a device for one microbatch, by stage action.

    A value dies with its last reader on the device, unless a later run reads it too; it is sent to every other device
    that reads it, right after it is computed; it is received before the first reader::

        device 0   F0.0 makes v ── sends v ── F0.1 ─────────────── B0.0 reads v, which dies
        device 1                      └─▶ receives v, F1.0 reads v ── B1.0 reads v, which dies
    """
    readers = _Readers.of(device, program, where, sequence, where_later)
    outputs = _positions(program.outputs)
    gradients = _positions([gradient.source for gradient in program.gradients])
    left = bool(where_later)
    later = readers.later | gradients.keys() if left else readers.later
    instructions: dict[StageAction, Instruction] = {}
    received: set[StageAction] = set()
    # Invariant: `received` holds what this device already got, so each message is received once, before its first
    # reader.
    for step in sequence:
        code = program.steps[step]
        results = list(enumerate(code.outputs))
        gradients_here = (
            [(i, position) for i, number in results for position in gradients.get(number, ())] if not left else []
        )
        # A stage that adds to a sum itself gets the sum as an argument; other gradients are added up by the worker.
        added = {source.index for source in code.inputs if source.kind == "sum"}
        arriving = [
            source
            for source in program.graph.reads[step]
            if where.get(source, device) != device and source not in received
        ]
        received.update(arriving)
        peers = sorted(readers.waiting.get(step, set()) - {device})
        instructions[step] = Instruction(
            action=Action(step[0], step[1], batch),
            code=code,
            receives=tuple(arriving),
            dying=tuple(
                s.kind == "value" and readers.last[s.index] == step and s.index not in later for s in code.inputs
            ),
            kept=tuple((i, number) for i, number in results if number in readers.last or number in later),
            sends=tuple(
                (peer, tuple((i, number) for i, number in results if peer in readers.devices.get(number, ())))
                for peer in peers
            ),
            results=tuple((i, position) for i, number in results for position in outputs.get(number, ())),
            gradients=tuple((i, position) for i, position in gradients_here if position not in added),
            sums=tuple((i, position) for i, position in gradients_here if position in added),
        )
    return instructions


def _positions(sources: Sequence[Source | None]) -> dict[int, list[int]]:
    positions: dict[int, list[int]] = {}
    for position, source in enumerate(sources):
        if source is not None and source.kind == "value":
            positions.setdefault(source.index, []).append(position)
    return positions


def last_uses(instructions: Sequence[Instruction], primals: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """For each instruction of a device, the primals that no later one reads, whose copies can be freed after it."""
    last: list[list[Any]] = []
    seen: set[int] = set()
    # From the end: a primal that no later instruction has read dies behind this one.
    for instruction in reversed(instructions):
        inputs = primals[instruction.action.microbatch]
        read = {id(inputs[s.index]): inputs[s.index] for s in instruction.code.inputs if s.kind == "primal"}
        last.append([value for key, value in read.items() if key not in seen])
        seen |= read.keys()
    return last[::-1]
