"""Transfer orders: when each rank starts its sends and receives, worked out from the schedule before anything runs.

What one rank sends to another arrives in the order in which it is sent, and NCCL fills the receives in the order in
which they were started. So receives are started in the order of the sender's sends, whatever order the receiver reads
them in. Each is started just before the first action during which it can arrive: only those actions of the receiver
that the sender's action depends on are certain to be over by then (vector clocks, as in
:mod:`roundpipe_fx.schedules.action_positions`). The plan counts a received value from the same action on,
so started receives take no memory that it does not know. ::

    rank 0   F0.0 S:F0.0>1   V:B1.0<1 F0.1 S:F0.1>1   V:B1.1<1 B0.0   B0.1
    rank 1   V:F0.0<0 V:F0.1<0 F1.0   B1.0 S:B1.0>0   F1.1   B1.1 S:B1.1>0

Before an action a rank first starts receives, then waits until its earlier sends are done. The sender's action depends
on all of the receiver's actions before the one at which the receive is started, so that one is reached without waiting
for anything that is sent later, and every send is matched: :func:`check_transfers` follows the orders and proves it for
the current schedule.

Where sizes depend on data, the receiver can start a receive only when it knows them, which is when it reads the value
at the latest. A rank that waited for such a send could wait for ever. So to a rank to which anything of unknown size is
sent, sends are waited for at the end of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from roundpipe_fx.distributed.layout import ValueLayout
from roundpipe_fx.runtime.pipeline_program import Instruction, PipelineProgram
from roundpipe_fx.schedules import Action, ActionKind, InvalidScheduleError, StageAction


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """Results of an action that one other rank receives.

    Attributes:
        source: number of the rank that runs it.
        target: number of the rank that reads it.
        generator: whether the state of the microbatch's random numbers goes along, for the next action that draws.
    """

    step: StageAction
    microbatch: int
    source: int
    target: int
    numbers: tuple[int, ...]
    layouts: tuple[ValueLayout, ...]
    generator: bool

    @property
    def integers(self) -> int:
        """Number of integers that travel first."""
        return sum(layout.numbers for layout in self.layouts)


@dataclass(frozen=True)
class RankTransfers:
    """The transfers of one rank.

    Attributes:
        starts: for each instruction, the receives to start before it, in the order of the senders.
        reads: for each instruction, the parcels that it waits for.
        sends: for each instruction, by number of the receiver, what is sent after it.
        late: the receivers whose sends are waited for at the end, since sizes depend on data.
    """

    starts: tuple[tuple[Parcel, ...], ...]
    reads: tuple[tuple[Parcel, ...], ...]
    sends: tuple[Mapping[int, Parcel], ...]
    late: frozenset[int]


def transfers_of(
    instructions: Sequence[Sequence[Instruction]], programs: Sequence[PipelineProgram]
) -> list[RankTransfers]:
    """The transfers of each rank.

    Raises:
        TypeError: a value between two ranks is neither a tensor nor a number.
    """
    where = {
        (instruction.action.step, instruction.action.microbatch): rank
        for rank, rank_items in enumerate(instructions)
        for instruction in rank_items
    }
    # What each rank sends behind each instruction, by receiver.
    sends = [
        [_make_parcels(rank, instruction, programs[instruction.action.microbatch], where) for instruction in rank_items]
        for rank, rank_items in enumerate(instructions)
    ]
    # Each parcel with the position of the instruction that sends it.
    sent_parcels = {
        (rank, parcel.target, parcel.step, parcel.microbatch): (position, parcel)
        for rank, rank_items in enumerate(sends)
        for position, parcels in enumerate(rank_items)
        for parcel in parcels.values()
    }
    reads = [
        [
            tuple(
                sent_parcels[key]
                for step in order_step.receives
                if (key := (where[step, order_step.action.microbatch], rank, step, order_step.action.microbatch))
                in sent_parcels
            )
            for order_step in rank_items
        ]
        for rank, rank_items in enumerate(instructions)
    ]
    over = _count_finished_before(reads)
    # The receive is started before instruction `over[sender][position][target]` of the target: the first one that is
    # not certainly over when the sender gets there.
    starts: list[list[list[Parcel]]] = [[[] for _ in rank_items] for rank_items in instructions]
    for rank, rank_items in enumerate(sends):
        for position, parcels in enumerate(rank_items):
            for target, parcel in parcels.items():
                starts[target][over[rank][position][target]].append(parcel)
    return [
        RankTransfers(
            tuple(map(tuple, starts[rank])),
            tuple(tuple(parcel for _, parcel in step_parcels) for step_parcels in reads[rank]),
            tuple(sends[rank]),
            frozenset(peer for step_parcels in sends[rank] for peer, parcel in step_parcels.items() if parcel.integers),
        )
        for rank in range(len(instructions))
    ]


def _make_parcels(
    rank: int, instruction: Instruction, program: PipelineProgram, where: Mapping[tuple[StageAction, int], int]
) -> dict[int, Parcel]:
    """Messages that are sent after an instruction, by receiver."""
    step, batch = instruction.action.step, instruction.action.microbatch
    drawing = [drawn for drawn in program.draws if (drawn, batch) in where]
    # If the next action that draws runs on the receiver, the generator's state travels with the values.
    after = drawing[drawing.index(step) + 1 :] if step in drawing else []
    parcels = {}
    for peer, positions in instruction.sends:
        numbers = tuple(number for _, number in positions)
        generator = bool(after) and where[after[0], batch] == peer
        if numbers or generator:
            layouts = tuple(ValueLayout.of(program.values[number]) for number in numbers)
            parcels[peer] = Parcel(
                step=step,
                microbatch=batch,
                source=rank,
                target=peer,
                numbers=numbers,
                layouts=layouts,
                generator=generator,
            )
    return parcels


def _count_finished_before(reads: Sequence[Sequence[Sequence[tuple[int, Parcel]]]]) -> list[list[list[int]]]:
    """For each instruction of a rank, how many of each rank's instructions are over when it begins."""
    ranks = len(reads)
    clocks: list[list[list[int]]] = [[] for _ in reads]
    going_on = True
    # Repeated passes over the ranks: each advances as far as its sources' clocks are known. No progress in a pass is a
    # deadlock.
    while going_on:
        going_on = False
        for rank, rank_reads in enumerate(reads):
            while len(clocks[rank]) < len(rank_reads):
                position = len(clocks[rank])
                sources = rank_reads[position]
                if any(at >= len(clocks[parcel.source]) for at, parcel in sources):
                    break
                clock = list(clocks[rank][-1]) if position else [0] * ranks
                # The clock of a source, plus the source itself: an instruction at position p means that p + 1 are over.
                for at, parcel in sources:
                    clocks_there = list(clocks[parcel.source][at])
                    clocks_there[parcel.source] = at + 1
                    clock = [max(pair) for pair in zip(clock, clocks_there, strict=True)]
                clock[rank] = position
                clocks[rank].append(clock)
                going_on = True
    if any(len(clock_of_rank) < len(rank_reads) for clock_of_rank, rank_reads in zip(clocks, reads, strict=True)):
        raise InvalidScheduleError("the schedule deadlocks: ranks would wait for each other's results.")
    return clocks


def make_orders(
    instructions: Sequence[Sequence[Instruction]], transfers: Sequence[RankTransfers]
) -> list[list[Action]]:
    """The actions, sends and receives of each rank, in the order in which it issues them."""
    return [
        [
            item
            for step, starts, sends in zip(rank_instructions, ranks.starts, ranks.sends, strict=True)
            for item in (
                *(_transfer(ActionKind.RECEIVE, parcel) for parcel in starts),
                step.action,
                *(_transfer(ActionKind.SEND, sends[peer]) for peer, _ in step.sends if peer in sends),
            )
        ]
        for rank_instructions, ranks in zip(instructions, transfers, strict=True)
    ]


def _transfer(kind: ActionKind, parcel: Parcel) -> Action:
    peer = parcel.target if kind is ActionKind.SEND else parcel.source
    return Action(kind, parcel.step[1], parcel.microbatch, parcel.step[0], peer)


def check_transfers(
    orders: Sequence[Sequence[Action]],
    reads: Mapping[StageAction, Sequence[StageAction]],
    late: Sequence[Collection[int]] = (),
) -> None:
    """Check that sends and receives match and cannot deadlock where each direction of a pair has one stream.

    A send is over when the receive at the same place of its stream was started. An action runs when the receives that
    it reads are over, and all that its rank has sent before, except to ranks for which it waits at the end.

    Args:
        orders: what each rank issues, in order; receives where they are started.
        reads: which stage action reads which.
        late: for each rank, the receivers whose sends it waits for at the end.

    Raises:
        InvalidScheduleError: another order of receives than of sends, a receive that is started after its reader, or a
            deadlock. The message names the transfer.
    """
    streams = _streams(orders)
    where = {
        (order_step.step, order_step.microbatch): rank
        for rank, order in enumerate(orders)
        for order_step in order
        if order_step.of is None
    }
    sent, started = dict.fromkeys(streams, 0), dict.fromkeys(streams, 0)

    def can_run(rank: int, action: Action) -> bool:
        for source in reads.get(action.step, ()):
            peer = where.get((source, action.microbatch), rank)
            position = streams.get((peer, rank), {}).get((source, action.microbatch))
            if position is None:
                continue
            if position >= started[peer, rank]:
                raise InvalidScheduleError(
                    f"rank {rank}: {action} reads {source[0]}{source[1]}.{action.microbatch} of rank {peer} before the "
                    "receive is started."
                    # The receive may be started while the send is not: then this rank waits, and another one may go on.
                )
            if position >= sent[peer, rank]:
                return False
        at_end = late[rank] if late else ()
        # Before an action a rank waits for its earlier sends, and these for the receives of their readers.
        awaited = (pair for pair in streams if pair[0] == rank and pair[1] not in at_end)
        return all(started[pair] >= sent[pair] for pair in awaited)

    positions = [0] * len(orders)
    going_on = True
    while going_on:
        going_on = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                action = order[positions[rank]]
                if action.of is None:
                    if not can_run(rank, action):
                        break
                elif action.kind is ActionKind.SEND:
                    sent[rank, _peer(action)] += 1
                else:
                    started[_peer(action), rank] += 1
                positions[rank] += 1
                going_on = True
    for rank, order in enumerate(orders):
        if positions[rank] < len(order):
            raise InvalidScheduleError(
                f"rank {rank} waits at {order[positions[rank]]} for ever: the transfers deadlock."
            )


def _streams(orders: Sequence[Sequence[Action]]) -> dict[tuple[int, int], dict[tuple[StageAction, int], int]]:
    """For each ordered pair of ranks with transfers, the place of each on the pair's stream.

    Raises:
        InvalidScheduleError: the receiver starts receives in another order than the sender sends.
    """
    sends: dict[tuple[int, int], list[tuple[StageAction, int]]] = {}
    receives: dict[tuple[int, int], list[tuple[StageAction, int]]] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if action.kind is ActionKind.SEND:
                sends.setdefault((rank, _peer(action)), []).append((action.step, action.microbatch))
            elif action.kind is ActionKind.RECEIVE:
                receives.setdefault((_peer(action), rank), []).append((action.step, action.microbatch))
    for source, target in sorted(sends.keys() | receives.keys()):
        mine, others = sends.get((source, target), []), receives.get((source, target), [])
        for position, (sent, received) in enumerate(zip_longest(mine, others)):
            if sent != received:
                raise InvalidScheduleError(
                    f"transfer {position} from rank {source} to rank {target}: {_text(sent)} is sent, and "
                    f"{_text(received)} is received."
                )
    return {pair: {key: position for position, key in enumerate(keys)} for pair, keys in sends.items()}


def _text(transfer: tuple[StageAction, int] | None) -> str:
    return "nothing" if transfer is None else f"{transfer[0][0]}{transfer[0][1]}.{transfer[1]}"


def _peer(action: Action) -> int:
    assert action.peer is not None
    return action.peer
