"""A pipeline run: executes the instructions of all microbatches of a step on all devices.

Each worker executes the instructions of its device in order. It waits for messages of other devices, for buffers that
earlier microbatches update, and for the optimizer's updates of parameters that are read. For each instruction::

    leave, exchange, reload   values leave for the host; weights change with the residency window; values come back
    receive                   wait for the results of other devices
    call                      the argument list, which the stage empties, has the last reference to each dying value
    deliver                   pack messages, keep values, return outputs, add gradients to this device's sums
    send                      hand over the messages, once arguments and results are no longer referred to here

If an exception is raised, the other workers stop before their next action, and the caller gets the exception unchanged.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx.runtime.buffer_versions import BufferVersions
from roundpipe_fx.runtime.complete_gradients import CompleteGradients
from roundpipe_fx.runtime.device_streams import DeviceStreams
from roundpipe_fx.runtime.gradient_accumulator import GradientAccumulator
from roundpipe_fx.runtime.mailbox import Mailboxes
from roundpipe_fx.runtime.pipeline_program import Instruction, PipelineProgram, Source, last_uses
from roundpipe_fx.runtime.prefetch import PrefetchStep, prefetch_steps_of
from roundpipe_fx.runtime.random_streams import RandomStream, drawing
from roundpipe_fx.runtime.stage_updates import StageUpdates, StepUpdates
from roundpipe_fx.runtime.transport import Transport
from roundpipe_fx.runtime.value_offloading import OffloadState, OffloadSteps, ValueOffloading
from roundpipe_fx.runtime.worker import Stopped, Workers
from roundpipe_fx.schedules import Action
from roundpipe_fx.torch_private import active_dispatch_modes, dispatch_modes


@dataclass(frozen=True, slots=True)
class Span:
    """When an action ran.

    Attributes:
        base: beginning of the run: seconds on the CPU, an event on an accelerator.
        start: start of the action, likewise.
        end: end of the action, likewise.
    """

    action: Action
    base: Any
    start: Any
    end: Any

    def seconds(self) -> tuple[float, float]:
        """Start and end in seconds since the beginning of the run. On an accelerator, waits for the action's end."""
        if isinstance(self.base, float):
            return self.start - self.base, self.end - self.base
        self.end.synchronize()
        return self.base.elapsed_time(self.start) * 1e-3, self.base.elapsed_time(self.end) * 1e-3


def join_spans(before: list[list[Span]], after: list[list[Span]]) -> list[list[Span]]:
    """The spans of a forward and of its backward, which ran later, as those of one step."""
    if not before:
        return after
    return [
        # Two runs have two beginnings: spans of the second are measured from the first run's.
        [*first, *(dataclasses.replace(span, base=first[0].base) if first else span for span in then)]
        for first, then in zip(before, after, strict=True)
    ]


@dataclass(frozen=True)
class Finished:
    """The results of a run.

    Attributes:
        outputs: for each microbatch, the forward's results.
        gradients: gradients of primals, by identity of the primal.
        values: for each microbatch, the values that a later run reads, by number.
        spans: for each device, when its actions ran.
    """

    outputs: list[list[Any]]
    gradients: dict[int, torch.Tensor]
    values: list[dict[int, Any]]
    spans: list[list[Span]]


def run_pipeline(
    workers: Workers,
    instructions: Sequence[Sequence[Instruction]],
    programs: Sequence[PipelineProgram],
    primals: Sequence[Sequence[Any]],
    tangents: Sequence[Sequence[Any]],
    streams: Sequence[RandomStream],
    inherited: Sequence[dict[int, Any]] = (),
    on_host: Collection[int] = (),
    transport: Transport | None = None,
    offloads: Sequence[Mapping[int, OffloadSteps]] = (),
    updates: StageUpdates | None = None,
    updating: StepUpdates | None = None,
) -> Finished:
    """Run instructions and wait until they are done.

    Args:
        workers: at least as many as there are lists of instructions.
        instructions: instructions of each device.
        programs: program of each microbatch.
        primals: for each microbatch, the inputs of the forward.
        tangents: for each microbatch, the incoming gradients; empty if the backward is a later run.
        streams: stream of random numbers of each microbatch.
        inherited: for each microbatch, the values that an earlier run has left, by number. Cleared, so that they
            are freed once they have been read.
        on_host: identities of primals that stay on the host while the workers are on accelerators. Workers hold copies
            during residency windows, and gradients are copied to the host.
        transport: carries messages between devices; ``None``: the devices are these workers.
        offloads: for each device, which values leave for the host and come back; empty: none.
        updates: updates of an earlier step that may still run. Who reads a parameter waits for its update.
        updating: the updates of this step, which begin once gradients are complete; ``None``: it has none.

    Returns:
        outputs, gradients that were not applied, values for a later run, and times.

    Raises:
        BaseException: raised by a stage, with its traceback. No gradient has been handed out then.
    """
    run = _PipelineRun(
        workers=workers,
        instructions=instructions,
        programs=programs,
        primals=primals,
        tangents=tangents,
        streams=streams,
        inherited=inherited,
        on_host=on_host,
        transport=transport or Mailboxes(workers.all_device_streams),
        offloads=offloads,
        updates=updates,
        updating=updating,
    )
    # What the caller has issued (its inputs, the optimizer's update) precedes what workers issue.
    for device_streams in workers.all_device_streams:
        device_streams.prepare(run.caller_device, workers.devices)
    workers.submit(run.work)
    interrupted = True
    try:
        run.wait()
        interrupted = False
    except BaseException:
        # An interrupt of the caller: workers may still refer to its tensors, so they are waited for.
        run.stop()
        run.wait()
        raise
    finally:
        for device_streams in workers.all_device_streams:
            # After a failure too: work that was issued may still read what the caller is about to free.
            device_streams.finish()
            broken_off = interrupted or run.failure is not None
            if on_host or (offloads and broken_off):  # else a step waits for its copies by itself
                device_streams.synchronize_copies()
    try:
        # Peers learn of the failure from the transport, or they would wait for messages for ever.
        run.transport.end_run(run.failure, run.outputs)
        if run.failure is not None:
            raise run.failure
    finally:
        run.failure = None  # its traceback holds this frame
    return run.finished()


class _PipelineRun:
    """State of one run, shared by the workers and the caller.

    Each worker writes only to its own entries of the lists indexed by device (values, accumulated gradients, spans);
    messages and buffer versions have locks of their own. So no other lock is needed while actions run.
    """

    def __init__(
        self,
        workers: Workers,
        instructions: Sequence[Sequence[Instruction]],
        programs: Sequence[PipelineProgram],
        primals: Sequence[Sequence[Any]],
        tangents: Sequence[Sequence[Any]],
        streams: Sequence[RandomStream],
        inherited: Sequence[dict[int, Any]],
        on_host: Collection[int],
        transport: Transport,
        offloads: Sequence[Mapping[int, OffloadSteps]],
        updates: StageUpdates | None,
        updating: StepUpdates | None,
    ) -> None:
        self._all_device_streams = workers.all_device_streams
        self._instructions = instructions
        self._programs = programs
        self._primals = primals
        self._tangents = tangents
        self._streams = streams
        self.caller_device = _caller_device_of(primals, workers)
        # In the caller's thread, since tracing and compiling are not thread-safe.
        self._calls = [
            [
                instruction.code.call
                if device_streams.device == self.caller_device
                else instruction.code.elsewhere(device_streams.device)
                for instruction in instructions_of_device
            ]
            for device_streams, instructions_of_device in zip(workers.all_device_streams, instructions, strict=False)
        ]
        self._modes = active_dispatch_modes()
        self._buffer_versions = (
            # Buffers that one microbatch updates and the next one reads: versions order the two without a global lock.
            BufferVersions(programs, primals) if any(program.mutations for program in programs) else None
        )
        self.transport = transport
        self._values: list[list[dict[int, Any]]] = [[{} for _ in programs] for _ in workers.all_device_streams]
        self._inherits = bool(inherited)
        self._offloaded: list[dict[tuple[int, int], OffloadState]] = [{} for _ in workers.all_device_streams]
        self._left_gradients = _find_inherited_gradients(inherited, programs, primals)
        if inherited:
            self._distribute_inherited(inherited)
        self.outputs: list[list[Any]] = [[None] * len(program.outputs) for program in programs]
        self._sums = [GradientAccumulator() for _ in workers.all_device_streams]
        self._on_host = on_host
        # Copies of weights to the device, if the model is offloaded, by position of the instruction that they precede.
        self._prefetch_steps: list[Mapping[int, PrefetchStep]] = [
            prefetch_steps_of(of_device, primals, on_host) for of_device in instructions if on_host
        ]
        self._offloads = offloads
        self._at_host: list[dict[int, list[torch.Tensor]]] = [{} for _ in workers.all_device_streams]
        self._updates = updates
        self._complete = CompleteGradients(instructions, programs, primals, updating) if updating is not None else None
        self._spans: list[list[Span]] = [[] for _ in workers.all_device_streams]
        self._began = time.perf_counter()
        self._running = len(workers.all_device_streams)
        self._done = threading.Condition()
        self._stopping = False
        self.failure: BaseException | None = None

    # The forwards' values were collected per microbatch; each device takes those that its own instructions read.
    def _distribute_inherited(self, inherited: Sequence[dict[int, Any]]) -> None:
        for of_device, offloaded, instructions in zip(self._values, self._offloaded, self._instructions, strict=False):
            for instruction in instructions:
                batch = instruction.action.microbatch
                for source in instruction.code.inputs:
                    if source.kind != "value" or source.index not in inherited[batch]:
                        continue
                    value = inherited[batch][source.index]
                    if isinstance(value, OffloadState):
                        offloaded[batch, source.index] = value
                    else:
                        of_device[batch][source.index] = InheritedValue(value)
        # The caller's dictionaries are emptied, so that a value dies with its last reader here.
        for values in inherited:
            values.clear()

    def wait(self) -> None:
        """Wait until every worker has finished."""
        with self._done:
            while self._running:
                self._done.wait()

    def stop(self) -> None:
        """Make the workers stop before their next action."""
        self._stopping = True
        self.transport.stop()
        if self._buffer_versions is not None:
            self._buffer_versions.stop()

    def work(self, device: int, device_streams: DeviceStreams) -> None:
        """Run one worker's instructions. Never raises: an exception is recorded for the caller."""
        try:
            with dispatch_modes(self._modes), device_streams.running():
                if device < len(self._instructions):
                    self._run_instructions(device, device_streams)
        except Stopped:
            self.stop()
        except BaseException as error:  # handed to the caller's thread
            with self._done:
                if self.failure is None:
                    self.failure = error
            self.stop()
        finally:
            # After a failure values are dropped at once: the traceback may keep this object alive for long.
            if self._stopping:
                self._values[device] = [{} for _ in self._programs]
                self.transport.abandon(device, self.failure)
            with self._done:
                self._running -= 1
                self._done.notify_all()

    def _run_instructions(self, device: int, device_streams: DeviceStreams) -> None:
        values, spans = self._values[device], self._spans[device]
        base = self._began if device_streams.device.type == "cpu" else device_streams.mark()
        instructions = self._instructions[device]
        elsewhere = device_streams.device != self.caller_device
        done_with = last_uses(instructions, self._primals) if elsewhere else [[] for _ in instructions]
        prefetch_steps = self._prefetch_steps[device] if self._prefetch_steps else {}
        offloads = self._offloads[device] if self._offloads else {}
        offloading = ValueOffloading(offloads, values, device_streams, self._offloaded[device])
        # Plans simulate exactly the order of this loop's body, which the module's docstring shows.
        for position, (instruction, call, unread) in enumerate(
            zip(instructions, self._calls[device], done_with, strict=True)
        ):
            if self._stopping:
                raise Stopped
            offloading.leave(position)
            if position in prefetch_steps:
                self._prefetch(device, device_streams, prefetch_steps[position], position)
            offloading.reload(position)
            self.transport.before(device, position)
            batch = instruction.action.microbatch
            of_batch = values[batch]
            # Block until the results of other devices have been sent; on an accelerator they may still be on their way.
            for step in instruction.receives:
                of_batch.update(self.transport.receive(device, step, batch))
            code = instruction.code
            # An optimizer may still be updating parameters of the last step, in its own thread.
            if self._updates is not None:
                self._updates.wait_for(id(self._primals[batch][number]) for number in code.reads)
            if self._inherits:
                _inherit(device_streams, of_batch, code.inputs)
            # A dying value leaves the dictionary, so that the argument list, which the stage clears, holds the last
            # reference and the value is freed inside the stage.
            arguments = [
                (of_batch.pop(source.index) if dies else of_batch[source.index])
                if source.kind == "value"
                else self._load_external(source, batch, device, device_streams)
                for source, dies in zip(code.inputs, instruction.dying, strict=True)
            ]
            start = device_streams.mark()
            # The stage runs with the generator of its microbatch, whichever worker runs it.
            if code.random:
                with drawing(self._streams[batch], device_streams.device):
                    results = call(arguments)
            else:
                results = call(arguments)
            if code.see is not None:
                code.see(results)
            # Copies of the caller's tensors are freed behind their last reader on this device, those of host tensors
            # between residency windows.
            for value in unread:
                if id(value) not in self._on_host:
                    device_streams.drop(value)
            spans.append(Span(instruction.action, base, start, device_streams.mark()))
            messages = self._deliver(device, device_streams, instruction, results)
            del arguments, results  # before peers are woken, whose planned memory assumes that these are freed
            self.transport.send(device, instruction, messages)
            self.transport.accumulated(device, position, self._sums[device])
            if self._complete is not None and not self._on_host:
                self._complete.note_finished(
                    device, position + 1, self._sums[device].parts_of, lambda: _already_on_host
                )
        # Behind the last instruction: what leaves or comes back there belongs to a later run.
        offloading.leave(len(instructions))
        offloading.reload(len(instructions))
        offloading.leave_behind()
        self.transport.before(device, len(instructions))
        if prefetch_steps:
            self._prefetch(device, device_streams, prefetch_steps[len(instructions)], len(instructions))

    def _prefetch(self, device: int, device_streams: DeviceStreams, prefetch_step: PrefetchStep, position: int) -> None:
        """Between two residency windows: offload gradients, free copies of host tensors and prefetch others."""
        # What the window behind us has accumulated leaves now, and is copied while the next window computes.
        left = self._sums[device].remove(self._on_host)
        at_host = self._at_host[device]
        for owner, part in zip(left, device_streams.offload_gradients([*left.values()]), strict=True):
            at_host.setdefault(owner, []).append(part)
        del left
        if self._complete is not None:
            self._complete.note_finished(
                device,
                position,
                lambda owner: [(part, True) for part in at_host.pop(owner, [])],
                device_streams.gradients_arrive,
            )
        if self._updates is not None:
            # Parameters that the optimizer still updates must not be copied to the device before that is over.
            self._updates.wait_for(id(value) for value in (*prefetch_step.first, *prefetch_step.ahead))
        # The first window's tensors are copied alone, since it must wait for them; the next call makes it wait.
        if prefetch_step.first:
            device_streams.exchange((), prefetch_step.first)
        device_streams.exchange(prefetch_step.drops, prefetch_step.ahead)

    def _deliver(
        self, device: int, device_streams: DeviceStreams, instruction: Instruction, results: Sequence[Any]
    ) -> list[Any]:
        """Store the results of an action. Returns the messages to other devices, in the order of the sends."""
        batch = instruction.action.microbatch
        messages = self.transport.pack(device, instruction, results)
        for position, number in instruction.kept:
            # Values are kept under their numbers until the last reader on this device pops them.
            self._values[device][batch][number] = results[position]
        program = self._programs[batch]
        for position, output in instruction.results:
            value = device_streams.to_caller(results[position])
            self.outputs[batch][output] = value
            # A buffer's new value: the next microbatch's readers, on any device, wait for this version.
            if output in program.mutations and self._buffer_versions is not None:
                self._buffer_versions.write(
                    self._primals[batch][program.mutations[output]], batch, value, device_streams.ready()
                )
        # Sums of several microbatches: the accumulator adds in place from the second one on.
        for position, number in instruction.gradients:
            self._sums[device].add(self._owner(batch, number), results[position])
        for position, number in instruction.sums:
            self._sums[device].give(self._owner(batch, number), results[position])
        return messages

    def _owner(self, batch: int, number: int) -> int:
        return id(self._primals[batch][self._programs[batch].gradients[number].primal])

    def _load_external(self, source: Source, batch: int, device: int, device_streams: DeviceStreams) -> Any:
        if source.kind == "tangent":
            return device_streams.to_device(self._tangents[batch][source.index])
        if source.kind == "token":
            return None
        if source.kind == "sum":
            # The running sum is an argument that the stage writes to, so it leaves the accumulator for that time.
            return self._sums[device].take(self._owner(batch, source.index))
        value = self._primals[batch][source.index]
        if self._buffer_versions is not None and self._buffer_versions.is_state(value):
            value, ready = self._buffer_versions.read(value, batch)
            if ready is not None:
                device_streams.after(ready, value)
        return device_streams.to_device(value)

    def finished(self) -> Finished:
        """The results, once every worker has finished."""
        # A parameter used by stages on several devices has a gradient on each of them.
        total = GradientAccumulator()
        for device_streams, sums in zip(self._all_device_streams, self._sums, strict=True):
            sums.move(total, device_streams.to_caller)
        for owner, parts in (owner_parts for at_host in self._at_host for owner_parts in at_host.items()):
            for part in parts:
                total.add(owner, part, owned=True)
        gradients = total.tensors
        for key, value in self._left_gradients:
            value = value.cpu() if key in self._on_host else self._all_device_streams[0].to_caller(value)
            gradients[key] = gradients[key] + value if key in gradients else value
        self.transport.combine(gradients)
        for batch, program in enumerate(self._programs):
            for position, source in enumerate(program.outputs):
                if source is not None and source.kind == "primal":
                    self.outputs[batch][position] = self._primals[batch][source.index]
            if len(self._tangents[batch]) < len(program.tangents):
                continue  # the backward is a later run
            for gradient in program.gradients:
                source = gradient.source
                if source is not None and source.kind != "value":
                    outside = self._tangents if source.kind == "tangent" else self._primals
                    key = id(self._primals[batch][gradient.primal])
                    value = outside[batch][source.index]
                    if not isinstance(value, torch.Tensor):
                        continue  # the mesh of a DTensor, beside its local tensor
                    value = value.cpu() if key in self._on_host else value
                    gradients[key] = gradients[key] + value if key in gradients else value
        self.transport.average(gradients)
        left: list[dict[int, Any]] = [{} for _ in self._programs]
        for batches in self._values:
            for batch, values in enumerate(batches):
                left[batch].update(values)
        return Finished(self.outputs, gradients, left, self._spans)


def _find_inherited_gradients(
    inherited: Sequence[Mapping[int, Any]], programs: Sequence[PipelineProgram], primals: Sequence[Sequence[Any]]
) -> list[tuple[int, torch.Tensor]]:
    """Gradients that an earlier forward run has left, each keyed by the input it belongs to."""
    return [
        (id(of_batch[gradient.primal]), values[gradient.source.index])
        for values, program, of_batch in zip(inherited, programs, primals, strict=False)
        for gradient in program.gradients
        if gradient.source is not None and gradient.source.kind == "value" and gradient.source.index in values
    ]


def _inherit(device_streams: DeviceStreams, values: dict[int, Any], sources: Sequence[Source]) -> None:
    """Make the values that an earlier run has left, and that are read now, available on this device."""
    read = {source.index: values[source.index] for source in sources if source.kind == "value"}
    left = {number: value.value for number, value in read.items() if isinstance(value, InheritedValue)}
    values.update(zip(left, device_streams.inherit([*left.values()]), strict=True))


@dataclass(frozen=True, slots=True)
class InheritedValue:
    """A value that an earlier run has left, until it is read. It may be on another worker's device.

    Attributes:
        value: the value, on the device of the worker that computed it.
    """

    value: Any


def _already_on_host() -> None:
    """Waits for gradients that are on the host."""


def _caller_device_of(primals: Sequence[Sequence[Any]], workers: Workers) -> torch.device:
    """The caller's device: that of the first primal on the workers' type of device."""
    kind = workers.devices[0].type
    for value in (value for values in primals for value in values):
        if isinstance(value, torch.Tensor) and value.device.type == kind:
            return value.device
    return workers.devices[0]
