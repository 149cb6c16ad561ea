"""Process transport: messages between the ranks of a pipeline, by point-to-point operations of torch.distributed.

Sends and receives are started in the orders of :mod:`roundpipe_fx.distributed.transfer_orders` and run beside what the
rank computes. What is in flight costs memory at both ends: received values from the action at which their receive is
started, as the plan counts them; sent ones until they were waited for::

    with a budget       F0.0  send v0  wait for v0  F0.1  send v1  wait for v1  F0.2
    without             F0.0  send v0               F0.1  send v1  wait for v0  F0.2

With a budget, sends are waited for before the next action, since the plan lets a value die with the action that
computes it. Without one they are waited for an action later, so that sending overlaps with it, and what one action has
sent lives for one action more. Sends to a rank that also gets values of unknown size are waited for at the end, and
what was sent lives until then, which no plan counts.

If a stage raises, its rank reports that and goes through its remaining transfers with zeros, which nobody uses. So no
operation of another rank is left without its counterpart: every rank comes to its next action, sees the report, and
does the same. The group can then be used for the next step. So it is with the collectives of stages that several ranks
share (:mod:`roundpipe_fx.runtime.stage_collectives`).
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe_fx.distributed.averaging import Averaging
from roundpipe_fx.distributed.gathering import Gathering
from roundpipe_fx.distributed.group import PipelineGroup
from roundpipe_fx.distributed.layout import as_dense_row, as_strided_tensor, count, numbers_of, split_numbers
from roundpipe_fx.distributed.ranks import Ranks, RemoteError, note_lost_rank
from roundpipe_fx.distributed.run_end import RunEnd
from roundpipe_fx.distributed.transfer_orders import Parcel, RankTransfers
from roundpipe_fx.runtime.gradient_accumulator import GradientAccumulator
from roundpipe_fx.runtime.pipeline_program import Instruction
from roundpipe_fx.runtime.random_streams import RandomStream
from roundpipe_fx.runtime.stage_collectives import Collective, begin_stage, count_started
from roundpipe_fx.runtime.worker import Stopped
from roundpipe_fx.schedules import StageAction

# Channels (process groups of their own) keep apart what could overtake each other: a body may be sent with NCCL from
# the GPU while integers of the next parcel travel with gloo from the CPU.
_TENSORS, _INTEGERS, _GENERATORS = 0, 1, 2
"""Channels: tensors, the integers that travel before them, and states of generators."""

# Seconds. A look at the store costs a round trip to the rank that keeps it, so not every action makes one.
_LOOK = 0.2
"""Seconds between two looks at whether another rank has failed."""


@dataclass
class _Arriving:
    """A parcel whose receive was started.

    Attributes:
        integers: what travels first, and its operation.
        state: of the generator, and its operation.
        bodies: the dense elements of its tensors and their operations; ``None`` until their sizes are known.
        values: numbers, and (shape, stride) of tensors; known with ``bodies``.
    """

    parcel: Parcel
    integers: tuple[torch.Tensor, Any] | None = None
    state: tuple[torch.Tensor, Any] | None = None
    bodies: list[tuple[torch.Tensor, Any]] | None = None
    values: list[Any] = field(default_factory=list)


class ProcessTransport:
    """The transport of one run on one rank.

    Args:
        group: the ranks of the pipeline.
        streams: of the microbatches' random numbers.
        end: what the ranks that run together, those of the pipeline or of its replicas too, tell each other at the end.
        overlap: whether what an action has sent may be in flight during the next one.
        collectives: of each instruction of this rank.

    Attributes:
        gathering: gathers the parameters that actions read; ``None``: they are not sharded.
    """

    def __init__(
        self,
        group: PipelineGroup,
        transfers: RankTransfers,
        streams: Sequence[RandomStream],
        end: RunEnd,
        overlap: bool,
        collectives: Sequence[Sequence[Collective]],
    ) -> None:
        self._group, self._transfers, self._end, self._collectives = group, transfers, end, collectives
        together = self._together = end.ranks
        # Reports of an earlier run must not stop this one, and the store is never emptied: each run has a number of its
        # own.
        self._run = together.next_run()
        self._streams = streams
        self._lag = 1 if overlap else 0
        self._combine: Callable[[dict[int, torch.Tensor]], None] = lambda gradients: None
        self._averaging: Averaging | None = None
        self.gathering: Gathering | None = None
        self._arriving: dict[tuple[StageAction, int], _Arriving] = {}
        # Per sender, in the order of starting: receives whose bodies have not been started. A pair of ranks matches
        # operations of a channel by order alone, so bodies are started in the order of parcels even where a later one's
        # sizes are known first.
        self._unsized: dict[int, deque[_Arriving]] = {}
        """By sender, in order, parcels whose tensors are not being received yet."""
        self._leaving: deque[tuple[int, list[Any]]] = deque()
        # What was sent to ranks to which values of unknown size travel. Such a rank starts to receive a body once it
        # asks for it, so ``wait`` could block until then, and that rank may be waiting for this one's next sends.
        self._late: list[Any] = []
        # `_sent`: the sends of the action at `_position` were started, so that a failure does not start them once more.
        self._position, self._sent = -1, True
        self._looked = time.monotonic()
        self._stopped, self._follows = False, False

    def combining(
        self, combine: Callable[[dict[int, torch.Tensor]], None], averaging: Averaging | None = None
    ) -> ProcessTransport:
        """Set what adds the gradients of tensors that several ranks use, and what averages them over replicas."""
        self._combine, self._averaging = combine, averaging
        return self

    def before(self, device: int, position: int) -> None:
        """Start receives, and wait for what was sent earlier."""
        # Another rank's failure shows in the store first. Without this look its zeros would be computed with until the
        # end.
        if time.monotonic() - self._looked > _LOOK:
            self._looked = time.monotonic()
            if self._together.read_report(self._run) is not None:
                raise Stopped
        if self._stopped:
            raise Stopped
        self._begin_instruction(position)

    def _begin_instruction(self, position: int) -> None:
        self._position, self._sent = position, False
        begin_stage()
        whole = position == len(self._transfers.starts)
        if self.gathering is not None:
            self.gathering.drop(position)  # what is received now is counted beside what stays
        # First receives are started: other ranks may wait for them before they start those that this one waits for.
        for parcel in () if whole else self._transfers.starts[position]:
            self._start(parcel)
        # Operations leave in the order of positions, so the loop ends at the first that may still run. With `overlap`,
        # before action p those of p - 2 and earlier are waited for; otherwise those of p - 1, too.
        while self._leaving and (whole or self._leaving[0][0] < position - self._lag):
            for work, _ in self._leaving.popleft()[1]:
                work.wait()
        while whole and self._late:
            work, _ = self._late.pop(0)
            work.wait()
        if self.gathering is not None:
            self.gathering.before(position)

    def _start(self, parcel: Parcel) -> None:
        arriving = _Arriving(parcel)
        if parcel.integers:
            integers = torch.empty(parcel.integers, dtype=torch.int64)
            arriving.integers = integers, self._group.start_receive(integers, parcel.source, _INTEGERS)
        # The generator travels too where a step draws random numbers: the next stage goes on drawing where this one
        # ended.
        if parcel.generator:
            state = torch.empty_like(self._streams[parcel.microbatch].state)
            arriving.state = state, self._group.start_receive(state, parcel.source, _GENERATORS)
        self._arriving[parcel.step, parcel.microbatch] = arriving
        waiting = self._unsized.setdefault(parcel.source, deque())
        waiting.append(arriving)
        # Parcels of known sizes start their bodies at once, as long as no parcel before them still waits for its sizes.
        while waiting and not waiting[0].parcel.integers:
            self._start_bodies(waiting.popleft())

    def _start_bodies(self, arriving: _Arriving) -> None:
        """Receive the tensors of a parcel; waits for its integers."""
        integers: list[int] = []
        if arriving.integers is not None:
            arriving.integers[1].wait()
            integers = arriving.integers[0].tolist()
        layouts = arriving.parcel.layouts
        arriving.values, arriving.bodies = split_numbers(layouts, integers), []
        # Only tensors have bodies: integers are in the first message, and a generator's state in a message of its own.
        for layout, value in zip(layouts, arriving.values, strict=True):
            if layout.kind == "tensor":
                device = self._group.device if layout.device != "cpu" else "cpu"
                body = torch.empty(count(*value), dtype=layout.dtype, device=device)
                # An empty tensor is not sent: its counterpart in `_start_sending` leaves it out by the same rule.
                work = self._group.start_receive(body, arriving.parcel.source, _TENSORS) if body.numel() else None
                arriving.bodies.append((body, work))

    def receive(self, device: int, step: StageAction, microbatch: int) -> dict[int, Any]:
        """Wait for a parcel. On an accelerator the stream waits, and the host does not."""
        arriving = self._arriving.pop((step, microbatch), None)
        if arriving is None:
            return {}  # the action only had to run before
        waiting = self._unsized[arriving.parcel.source]
        # The parcel's own bodies wait for those of earlier parcels from this rank, whose sizes are waited for first.
        while arriving.bodies is None:
            self._start_bodies(waiting.popleft())
        # Now parcels of known sizes behind it may start, too.
        while waiting and not waiting[0].parcel.integers:
            self._start_bodies(waiting.popleft())
        if arriving.state is not None:
            arriving.state[1].wait()
            self._streams[microbatch].state = arriving.state[0]
        bodies = iter(arriving.bodies)
        received: dict[int, Any] = {}
        parts = zip(arriving.parcel.numbers, arriving.parcel.layouts, arriving.values, strict=True)
        for number, layout, value in parts:
            if layout.kind == "tensor":
                body, work = next(bodies)
                if work is not None:
                    work.wait()
                value = as_strided_tensor(body, *value)
            received[number] = value
        return received

    def pack(self, device: int, instruction: Instruction, results: Sequence[Any]) -> list[Any]:
        """The results that each receiver reads."""
        return [[results[position] for position, _ in positions] for _, positions in instruction.sends]

    def send(self, device: int, instruction: Instruction, messages: list[Any]) -> None:
        """Start sending to each receiver."""
        parcels = self._transfers.sends[self._position]
        # All values are packed before any send is started: packing may raise (out of memory), and a rank that has sent
        # half of its parcels could not go on with zeros.
        packed = [
            (parcels[peer], _packed(parcels[peer], values))
            for (peer, _), values in zip(instruction.sends, messages, strict=True)
            if peer in parcels
        ]
        messages.clear()
        self._sent = True
        for parcel, (integers, bodies) in packed:
            self._start_sending(parcel, integers, bodies)

    def _start_sending(self, parcel: Parcel, integers: list[int], bodies: Sequence[torch.Tensor]) -> None:
        works = []

        def start(value: torch.Tensor, channel: int) -> None:
            works.append((self._group.start_send(value, parcel.target, channel), value))

        if integers:
            start(torch.tensor(integers), _INTEGERS)
        if parcel.generator:
            start(self._streams[parcel.microbatch].state, _GENERATORS)
        for body in bodies:
            if body.numel():
                start(body, _TENSORS)
        # Tensors stay in `works` beside their operations: an operation does not keep what it sends alive.
        if parcel.target in self._transfers.late:
            self._late += works
        else:
            self._leaving.append((self._position, works))

    def accumulated(self, device: int, position: int, sums: GradientAccumulator) -> None:
        """Start averaging the gradients that are complete."""
        if self._averaging is not None:
            self._averaging.after(position, sums)

    def stop(self) -> None:
        """Make the worker stop before its next action."""
        self._stopped = True

    def abandon(self, device: int, failure: BaseException | None) -> None:
        """Report a failure, and go through the remaining transfers and collectives with zeros."""
        # A failure after another rank's may come from the zeros that it sends, which are empty where sizes are unknown.
        self._follows = self._together.read_report(self._run) is not None
        if not self._follows:
            self._together.report(self._run, _text(self._together, failure))
        try:
            if self._averaging is not None:
                self._averaging.reduce_zeros()
            self._exchange_zeros(device)
            # Each position is passed through as if it had run: receives are started in the same order, and every
            # operation of another rank finds its counterpart.
            while self._position < len(self._transfers.starts):
                self._begin_instruction(self._position + 1)
                self._exchange_zeros(device)
        except RuntimeError:
            note_lost_rank()  # the other end is gone too; what it left behind ends with its process

    def _exchange_zeros(self, device: int) -> None:
        """Receive what the current instruction reads, and run collectives and send with zeros."""
        if not 0 <= self._position < len(self._transfers.starts):
            return
        for parcel in self._transfers.reads[self._position]:
            self.receive(device, parcel.step, parcel.microbatch)
        # Collectives that the failed action had started have their counterparts already; the others follow with zeros.
        for run in () if self._sent else self._collectives[self._position][count_started() :]:
            run()
        for parcel in () if self._sent else self._transfers.sends[self._position].values():
            self._start_sending(parcel, *_zeros(parcel, self._group.device))
        self._sent = True

    def end_run(self, failure: BaseException | None, outputs: Sequence[list[Any]]) -> None:
        """Wait until all ranks have ended the run, and put in small outputs of others.

        Raises:
            RemoteError: another rank has failed, and this one has not, or only after it.
        """
        try:
            failed = self._end.exchange(failure is not None or self._stopped, outputs)
            report = self._together.read_report(self._run)
            if self._averaging is not None and (failed or report is not None):
                self._averaging.wait()  # of the next step's reductions none must meet one of these
        except RuntimeError as lost:
            note_lost_rank()
            if failure is not None:
                return
            raise RemoteError(f"a rank of {self._together.name} is lost: {lost}") from lost
        if (failure is None and (failed or report is not None)) or self._follows:
            raise RemoteError(report or f"another rank of {self._together.name} has failed.") from failure

    def combine(self, gradients: dict[int, torch.Tensor]) -> None:
        """Add the gradients of tensors that several ranks use."""
        self._combine(gradients)

    def average(self, gradients: dict[int, torch.Tensor]) -> None:
        """Put mean gradients in."""
        if self._averaging is not None:
            self._averaging.finish(gradients)


def _packed(parcel: Parcel, values: Sequence[Any]) -> tuple[list[int], list[torch.Tensor]]:
    """The integers of a parcel, and the dense elements of its tensors."""
    bodies = [
        as_dense_row(value, layout.shape or value.shape, layout.stride or value.stride())
        for value, layout in zip(values, parcel.layouts, strict=True)
        if layout.kind == "tensor"
    ]
    return numbers_of(values, parcel.layouts), bodies


def _zeros(parcel: Parcel, device: torch.device) -> tuple[list[int], list[torch.Tensor]]:
    """Zeros instead of a parcel; tensors of unknown size are empty. An index of zero is always valid."""
    # Where sizes are unknown, `integers` of zeros say that they are empty, so there are no bodies to send.
    bodies = [
        torch.zeros(
            count(layout.shape, layout.stride), dtype=layout.dtype, device=device if layout.device != "cpu" else "cpu"
        )
        for layout in parcel.layouts
        if layout.kind == "tensor" and layout.shape is not None and layout.stride is not None
    ]
    return [0] * parcel.integers, bodies


def _text(ranks: Ranks, failure: BaseException | None) -> str:
    rank = ranks.ranks[ranks.rank]
    if failure is None:
        return f"rank {rank} of {ranks.name} was stopped in its step."
    lines = "".join(traceback.format_exception(failure)).rstrip()
    return f"rank {rank} of {ranks.name} raised {type(failure).__name__}: {failure}\n\nOn rank {rank}:\n{lines}"
