"""The streams of accelerator lanes, without an accelerator: what is read has always been made before.

Streams, events and copies are stand-ins that keep vector clocks; values are fake tensors that say which device they are
on. Whatever a stage reads must be on its device, and made by something that the compute stream has waited for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from roundpipe_fx.operators.gradient_sums import add_to
from roundpipe_fx.runtime import device_streams, streams, worker
from roundpipe_fx.runtime.pipeline_program import (
    Gradient,
    PipelineProgram,
    Source,
    StepCode,
    instructions_of,
    last_uses,
)
from roundpipe_fx.runtime.pipeline_run import run_pipeline
from roundpipe_fx.runtime.random_streams import RandomStream
from roundpipe_fx.schedules import ActionKind, Schedule, StageAction, StageGraph, one_f_one_b, with_recompute

MODE = FakeTensorMode()
_lock = threading.RLock()


class Stream:
    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)
        self.clock: dict[Stream, int] = {self: 0}

    def tick(self) -> int:
        with _lock:
            self.clock[self] += 1
            return self.clock[self]

    def merge(self, clock: dict[Stream, int]) -> None:
        with _lock:
            for stream, time in dict(clock).items():
                self.clock[stream] = max(self.clock.get(stream, 0), time)

    def record_event(self, event: Any = None) -> Event:
        event = event or Event()
        self.tick()
        event.clock = dict(self.clock)
        return event

    def wait_event(self, event: Event) -> None:
        self.merge(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.merge(other.clock)


class Event:
    def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
        self.clock: dict[Stream, int] = {}

    def record(self, stream: Stream) -> None:
        stream.record_event(self)


class Accelerator:
    """``torch.accelerator`` of two devices; the current streams and the current device belong to a thread."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.default = {torch.device("cuda", index): Stream(f"cuda:{index}") for index in range(2)}

    def _current(self) -> dict[torch.device, Stream]:
        if not hasattr(self.local, "streams"):
            self.local.streams = dict(self.default)
        return self.local.streams

    def current_stream(self, device: torch.device) -> Stream:
        return self._current()[torch.device(device)]

    def set_stream(self, stream: Stream) -> None:
        self._current()[stream.device] = stream
        self.local.index = stream.device.index

    def current_device_index(self) -> int:
        return getattr(self.local, "index", 0)

    def set_device_index(self, index: int) -> None:
        self.local.index = index

    @contextlib.contextmanager
    def device_index(self, index: int) -> Iterator[None]:
        before = self.current_device_index()
        self.local.index = index
        yield
        self.local.index = before


class Ledger:
    """Who made each tensor, and which streams the allocator was told of."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.made: dict[int, tuple[Stream, int, torch.Tensor]] = {}
        self.told: dict[int, set[Stream]] = {}
        self.copies = 0
        self.reads = 0

    def make(self, device: torch.device, stream: Stream) -> torch.Tensor:
        with _lock, MODE:
            value = torch.empty(4, device=device)
            self.made[id(value)] = (stream, stream.tick(), value)
            return value

    def read(self, value: torch.Tensor, stream: Stream) -> None:
        with _lock:
            maker, time, _ = self.made[id(value)]
            self.reads += 1
            assert value.device == stream.device
            assert stream.clock.get(maker, 0) >= time, "read before it is there"
            # Workers wait for the caller's streams when a step begins, so what he frees is not written over too early.
            callers = self.accelerator.default.values()
            if maker is not stream and maker not in callers and stream not in callers:
                assert stream in self.told.get(id(value), set()), "the allocator was not told"

    def to(self, value: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        source, target = (self.accelerator.current_stream(d) for d in (value.device, device))
        assert non_blocking
        with _lock:
            self.read(value, source)
            self.copies += 1
            target.merge(source.clock)
            copy = self.make(device, target)
            source.merge(target.clock)
            return copy

    def add(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        stream = self.accelerator.current_stream(left.device)
        with _lock:
            self.read(left, stream)
            self.read(right, stream)
            if out is None:
                return self.make(left.device, stream)
            self.made[id(out)] = (stream, stream.tick(), out)
            return out

    def record_stream(self, value: torch.Tensor, stream: Stream) -> None:
        with _lock:
            self.told.setdefault(id(value), set()).add(stream)


class _Torch:
    """The module ``torch`` with stand-ins."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.Stream, self.Event = accelerator, Stream, Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    accelerator = Accelerator()
    found = Ledger(accelerator)
    for module in (device_streams, streams, worker):
        monkeypatch.setattr(module, "torch", _Torch(accelerator))
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, non_blocking=False: found.to(self, device, non_blocking)
    )
    monkeypatch.setattr(device_streams, "touch_libraries", lambda *streams: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: found.record_stream(self, stream))
    monkeypatch.setattr(torch.Tensor, "detach", lambda self: self)
    # Fake tensors are not made for several threads.
    monkeypatch.setattr(torch.Tensor, "__add__", lambda self, other: found.add(self, other))
    monkeypatch.setattr(torch.Tensor, "add_", lambda self, other: found.add(self, other, self))
    yield found


def _program(ledger: Ledger, stages: int) -> PipelineProgram:
    """Stages that read the one before, their parameter, and in the backward the next one's gradient; one skip.

    Every other stage adds its parameter's gradient to its sum itself; the first stage's parameter has a second part.
    """
    primal, value = (lambda index: Source("primal", index)), (lambda index: Source("value", index))
    reads: dict[StageAction, tuple[StageAction, ...]] = {}
    steps: dict[StageAction, StepCode] = {}

    def add(
        step: StageAction, inputs: list[Source], output: int, before: list[StageAction], sums: bool = False
    ) -> None:
        def call(arguments: list[Any]) -> tuple[Any, ...]:
            device = arguments[0].device
            assert ledger.accelerator.current_device_index() == device.index  # whose generator is drawn from
            stream = ledger.accelerator.current_stream(device)
            for argument in arguments:
                if argument is not None:
                    ledger.read(argument, stream)
            total = arguments[-1] if sums else None
            arguments.clear()
            results = [ledger.make(device, stream) for _ in range(1 + sums)]
            return (results[0], add_to(total, results[1])) if sums else tuple(results)

        def elsewhere(device: torch.device) -> Any:
            assert threading.current_thread() is threading.main_thread()  # compiling is not for several threads
            return call

        reads[step] = tuple(before)
        steps[step] = StepCode(
            call=call, inputs=tuple(inputs), outputs=(output, 100 + output)[: 1 + sums], elsewhere=elsewhere
        )

    for stage in range(stages):
        before = [(ActionKind.FORWARD, stage - 1)] if stage else []
        skip = [(ActionKind.FORWARD, 0)] if stage == stages - 1 and stage > 1 else []
        sources = [value(stage - 1)] if stage else [primal(0)]
        add(
            (ActionKind.FORWARD, stage),
            [*sources, primal(stage + 1), *([value(0)] if skip else [])],
            stage,
            before + skip,
        )
        add((ActionKind.RECOMPUTE, stage), [value(stage)], 100 + stage, [(ActionKind.FORWARD, stage)])
    for stage in reversed(range(stages)):
        last = stage == stages - 1
        own: list[StageAction] = [(ActionKind.RECOMPUTE, stage), *([] if last else [(ActionKind.BACKWARD, stage + 1)])]
        gradient = Source("tangent", 0) if last else value(200 + stage + 1)
        inputs = [value(100 + stage), gradient, primal(stage + 1)]
        sums = stage % 2 == 1
        add(
            (ActionKind.BACKWARD, stage),
            [*inputs, *([Source("sum", stage + 1)] if sums else [])],
            200 + stage,
            own,
            sums,
        )
    return PipelineProgram(
        steps=steps,
        graph=StageGraph(reads),
        outputs=(value(stages - 1),),
        gradients=(
            Gradient(0, None),
            *(Gradient(1 + stage, value(200 + stage + 100 * (stage % 2))) for stage in range(stages)),
            Gradient(1, value(202)),
        ),
        tangents=(0,),
        mutations={},
    )


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"], ["cuda:1", "cuda:1"]])
def test_what_is_read_has_been_made_before(ledger: Ledger, devices: list[str]) -> None:
    home = torch.device("cuda", 0)
    stages, count = 4, 3
    caller = ledger.accelerator.current_stream(home)
    program = _program(ledger, stages)
    workers = worker.Workers([torch.device(device) for device in devices])
    schedule = with_recompute(one_f_one_b(len(devices), stages, count), program.graph)
    parameters = [ledger.make(home, caller) for _ in range(stages)]
    try:
        for _ in range(3):
            primals = [[ledger.make(home, caller), *parameters] for _ in range(count)]
            tangents = [[ledger.make(home, caller)] for _ in range(count)]
            finished = run_pipeline(
                workers,
                instructions_of(schedule, [program] * count),
                [program] * count,
                primals,
                tangents,
                [RandomStream(torch.empty(0)) for _ in range(count)],
            )
            for value in (output for own in finished.outputs for output in own):
                maker, time, _ = ledger.made[id(value)]
                assert value.device == home and caller.clock[maker] >= time
            assert set(finished.gradients) == {id(parameter) for parameter in parameters}
            assert all(gradient.device == home for gradient in finished.gradients.values())
    finally:
        workers.close()
    assert ledger.reads > 100
    assert (ledger.copies > 0) == ("cuda:1" in devices)


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"]])
def test_what_a_forward_has_left_is_read_by_another_worker(ledger: Ledger, devices: list[str]) -> None:
    """The allocator is told of streams that read what the forward's have made."""
    home = torch.device("cuda", 0)
    caller = ledger.accelerator.current_stream(home)
    program = _program(ledger, 2)
    workers = worker.Workers([torch.device(device) for device in devices])
    primals = [[ledger.make(home, caller) for _ in range(3)]]
    tangents = [[ledger.make(home, caller)]]
    streams = [RandomStream(torch.empty(0))]

    def run(schedule: str, given: list[dict[int, Any]], later: Schedule | None = None) -> list[dict[int, Any]]:
        instructions = instructions_of(Schedule.parse(schedule), [program], later)
        return run_pipeline(workers, instructions, [program], primals, tangents, streams, given).values

    try:
        backward = "0:\n1: R1.0 R0.0 B1.0 B0.0"
        left = run("F0.0 F1.0\n1:", [], Schedule.parse(backward))
        made = {number: value for number, value in left[0].items()}
        assert sorted(made) == [0, 1]
        run(backward, left)
    finally:
        workers.close()
    other = workers.all_device_streams[1]
    for value in made.values():
        reader = other.compute if value.device == other.device else ledger.accelerator.default[value.device]
        assert reader in ledger.told[id(value)]


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"]])
def test_an_updated_buffer_is_read_once_it_has_been_made(ledger: Ledger, devices: list[str]) -> None:
    home, count = torch.device("cuda", 0), 4
    caller = ledger.accelerator.current_stream(home)

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        (buffer,) = arguments
        stream = ledger.accelerator.current_stream(buffer.device)
        ledger.read(buffer, stream)
        arguments.clear()
        return (ledger.make(buffer.device, stream),)

    forward: StageAction = (ActionKind.FORWARD, 0)
    code = StepCode(call=call, inputs=(Source("primal", 0),), outputs=(0,), elsewhere=lambda device: call)
    program = PipelineProgram(
        steps={forward: code},
        graph=StageGraph({forward: ()}),
        outputs=(Source("value", 0),),
        gradients=(),
        tangents=(),
        mutations={0: 0},
    )
    schedule = Schedule.parse("F0.0 F0.2\nF0.1 F0.3")
    workers = worker.Workers([torch.device(device) for device in devices])
    buffer = ledger.make(home, caller)
    try:
        finished = run_pipeline(
            workers,
            instructions_of(schedule, [program] * count),
            [program] * count,
            [[buffer]] * count,
            [[]] * count,
            [RandomStream(torch.empty(0)) for _ in range(count)],
        )
    finally:
        workers.close()
    assert all(ledger.made[id(own[0])][2].device == home for own in finished.outputs)
    assert ledger.reads >= count


def test_the_caller_waits_for_what_a_failed_step_has_issued(ledger: Ledger) -> None:
    """Or he would free tensors that are read still."""
    home = torch.device("cuda", 0)
    caller = ledger.accelerator.current_stream(home)
    program = _program(ledger, 2)

    def fail(arguments: list[Any]) -> tuple[Any, ...]:
        raise ArithmeticError("in the second stage")

    step: StageAction = (ActionKind.FORWARD, 1)
    steps = {**program.steps, step: dataclasses.replace(program.steps[step], call=fail)}
    program = dataclasses.replace(program, steps=steps)
    workers = worker.Workers([home])
    try:
        with pytest.raises(ArithmeticError):
            run_pipeline(
                workers,
                instructions_of(Schedule.parse("F0.0 F1.0 R1.0 R0.0 B1.0 B0.0"), [program]),
                [program],
                [[ledger.make(home, caller) for _ in range(3)]],
                [[ledger.make(home, caller)]],
                [RandomStream(torch.empty(0))],
            )
    finally:
        workers.close()
    compute = workers.all_device_streams[0].compute
    assert compute.clock[compute] > 0
    assert caller.clock[compute] == compute.clock[compute]


def test_copies_of_parameters_are_held_until_their_last_reader(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    home, count = torch.device("cuda", 0), 2
    caller = ledger.accelerator.current_stream(home)
    program = _program(ledger, 4)
    schedule = with_recompute(one_f_one_b(2, 4, count), program.graph)
    instructions = instructions_of(schedule, [program] * count)
    parameters = [ledger.make(home, caller) for _ in range(4)]
    primals = [[ledger.make(home, caller), *parameters] for _ in range(count)]
    for own in instructions:
        dropped = [value for values in last_uses(own, primals) for value in values]
        assert len({id(value) for value in dropped}) == len(dropped)
        for place, values in enumerate(last_uses(own, primals)):
            later = {
                id(primals[after.action.microbatch][source.index])
                for after in own[place + 1 :]
                for source in after.code.inputs
                if source.kind == "primal"
            }
            assert not later & {id(value) for value in values}
    held: list[int] = []
    drop = device_streams.AcceleratorDeviceStreams.drop
    monkeypatch.setattr(
        device_streams.AcceleratorDeviceStreams,
        "drop",
        lambda device_streams, value: (drop(device_streams, value), held.append(len(device_streams._copies)))[0],
    )
    workers = worker.Workers([home, torch.device("cuda", 1)])
    try:
        tangents = [[ledger.make(home, caller)] for _ in range(count)]
        streams = [RandomStream(torch.empty(0)) for _ in range(count)]
        run_pipeline(workers, instructions, [program] * count, primals, tangents, streams)
    finally:
        workers.close()
    assert held and max(held) <= 4 and held[-1] <= count  # what is left are incoming gradients
