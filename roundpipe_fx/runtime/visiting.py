"""Visiting: an offloaded model's tensors, on a device for as long as its visits need them.

What a visit is says :mod:`roundpipe_fx.schedules.visits`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx.runtime.pipeline_program import Instruction
from roundpipe_fx.schedules.visits import present, visits_of

__all__ = ["Turn", "turns_of"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What happens between two visits.

    Attributes:
        drops: what is not read any more for now.
        first: what the visit that begins reads, at the first turn; no visit before it has brought that.
        ahead: what the visit after that reads.
    """

    drops: tuple[torch.Tensor, ...]
    first: tuple[torch.Tensor, ...]
    ahead: tuple[torch.Tensor, ...]


def turns_of(
    instructions: Sequence[Instruction], primals: Sequence[Sequence[Any]], on_host: Collection[int]
) -> Mapping[int, Turn]:
    """The turns of a device by the place of the instruction before which they are; the last one is after all.

    Args:
        instructions: of the device.
        primals: inputs of the forward, for each microbatch.
        on_host: identities of the tensors that are visited with.
    """
    visits = visits_of([instruction.action.stage for instruction in instructions])
    tensors: dict[int, torch.Tensor] = {}  # in the order in which they are read first
    reads: list[set[int]] = []
    for visit in visits:
        own: set[int] = set()
        for instruction in (instructions[place] for place in visit):
            values = primals[instruction.action.microbatch]
            for source in instruction.code.inputs:
                if source.kind == "primal" and id(values[source.index]) in on_host:
                    tensors[id(values[source.index])] = values[source.index]
                    own.add(id(values[source.index]))
        reads.append(own)
    order = {key: place for place, key in enumerate(tensors)}

    def of(keys: Collection[int]) -> tuple[torch.Tensor, ...]:
        return tuple(tensors[key] for key in sorted(keys, key=order.__getitem__))

    turns: dict[int, Turn] = {}
    before: set[int] = set()
    for index, (visit, there) in enumerate(zip(visits, present(reads), strict=True)):
        new = there - before
        first = set() if index else reads[0]
        turns[visit.start] = Turn(of(before - there), of(first), of(new - first))
        before = there
    turns[len(instructions)] = Turn(of(before), (), ())
    return turns
