"""Gathering: all-gathers the sharded parameters of a stage from the replicas while the stage runs.

Where a tensor of an offloaded model is copied from the host, that of a sharded one is gathered; when is the same
(:mod:`roundpipe_fx.runtime.prefetch`). The gathers for the next residency window are started before the current one
runs, on a process group of their own, so that they wait neither for messages of the pipeline nor for reductions::

    windows          F0      F1      F2      B2      B1      B0
    gathers     │ 0, 1  │  2    │       │  1    │  0    │
    dropped                     │  0    │       │       │  2    │  1, 0

With a budget, parameters that would be dropped stay as long as it has room for them
(:mod:`roundpipe_fx.schedules.sharding`). Every replica starts the same gathers in the same order: ranks compare
:func:`gathers_text` before a step. Small parameters
of a window travel as one tensor, each part of which has the rows of one replica.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe_fx.distributed.group import Replicas
from roundpipe_fx.distributed.sharded_parameters import ShardedParameter, ShardedParameters
from roundpipe_fx.runtime.pipeline_program import Instruction, PipelineProgram
from roundpipe_fx.runtime.prefetch import PrefetchStep, Stay, prefetch_steps_of
from roundpipe_fx.schedules.data_parallel import SMALL_BYTES
from roundpipe_fx.schedules.sharding import KeptGathered


def plan_gathers(
    instructions: Sequence[Instruction],
    primals: Sequence[Sequence[Any]],
    sharded: Collection[int],
    kept: Sequence[KeptGathered] = (),
) -> Mapping[int, PrefetchStep]:
    """Tensors that a rank gathers and drops, by position of the instruction before which it does.

    Args:
        primals: for each microbatch, the inputs.
        sharded: identities of the parameters that are sharded.
        kept: what stays gathered, by positions of instructions.
    """
    stays = [
        Stay(frozenset(id(primals[0][number]) for number in gap.parameters), gap.dropped, gap.regathered)
        for gap in kept
    ]
    return prefetch_steps_of(instructions, primals, sharded, views=True, kept=stays)


def refuse_escapes(
    instructions: Sequence[Sequence[Instruction]],
    programs: Sequence[PipelineProgram],
    primals: Sequence[Sequence[Any]],
    names: Mapping[int, str],
) -> None:
    """Refuse results of stages that are a parameter, or a view of one, whose memory the next stage no longer has.

    Args:
        primals: for each microbatch, the inputs.
        names: of the model's tensors, by identity.

    Raises:
        ValueError: there is one; the message names it.
    """
    # Only sharded parameters matter: a single number is never freed.
    parameters = {key for inputs in primals for key in map(id, inputs) if key in names}
    whole = {
        id(value) for inputs in primals for value in inputs if not isinstance(value, nn.Parameter) or not value.dim()
    }
    parameters -= whole

    def check(batch: int, primal: int | None, reader: str) -> None:
        key = id(primals[batch][primal]) if primal is not None else None
        if key in parameters and key is not None:
            raise ValueError(
                f"{reader} the parameter {names[key]!r} or a view of it, and with shard='dp' its memory is there only "
                "while a stage reads it: use a copy, as parameter.clone(), or compile without shard."
            )

    for batch, program in enumerate(programs):
        # Outputs and gradients that are handed to the caller, then messages to other ranks.
        returned = [*program.outputs, *(gradient.source for gradient in program.gradients)]
        for source in returned:
            if source is not None and source.kind in ("primal", "value"):
                primal = source.index if source.kind == "primal" else program.views.get(source.index)
                check(batch, primal, "the step returns")
    for instruction in (instruction for rank_instructions in instructions for instruction in rank_instructions):
        program, batch = programs[instruction.action.microbatch], instruction.action.microbatch
        for _, positions in instruction.sends:
            for _, number in positions:
                check(batch, program.views.get(number), f"stage {instruction.action.stage} sends another rank")


def gathers_text(steps: Mapping[int, PrefetchStep], names: Mapping[int, str]) -> str:
    """The gathers of a run in order, for comparison between replicas."""
    return "\n".join(
        " ".join(names[id(value)] for value in (*steps[position].first, *steps[position].ahead))
        for position in sorted(steps)
    )


class Gathering:
    """The gathers of one run on one rank.

    Args:
        shards: the parameters that are sharded.
        replicas: the ranks that have their parts.
        steps: what is gathered and dropped, by position.
    """

    def __init__(self, shards: ShardedParameters, replicas: Replicas, steps: Mapping[int, PrefetchStep]) -> None:
        self._shards, self._replicas, self._steps = shards, replicas, steps
        self._started: list[tuple[Any, torch.Tensor, list[ShardedParameter]]] = []
        """Operations, what each of them fills, and the small parameters that it is copied to."""

    def drop(self, position: int) -> None:
        """Called before each instruction and after the last one: what is not read soon is freed then."""
        if position in self._steps:
            for value in self._steps[position].drops:
                self._shards.by_traced[id(value)].free()

    def before(self, position: int) -> None:
        """Called after :meth:`drop`: what the instruction reads is gathered then."""
        step = self._steps.get(position)
        if step is None:
            return
        # The first window's parameters are waited for. Those of the next window travel while this one computes.
        self._start(step.first)
        self._wait()
        self._start(step.ahead)

    def _start(self, values: Sequence[torch.Tensor]) -> None:
        small: dict[torch.dtype, list[ShardedParameter]] = {}
        for value in values:
            sharded = self._shards.by_traced[id(value)]
            # Large parameters are gathered in place, into their own memory; small ones as one message, and are copied
            # out.
            if sharded.bytes < SMALL_BYTES:
                small.setdefault(value.dtype, []).append(sharded)
            else:
                whole = sharded.allocate()
                self._started.append((self._replicas.start_gather(whole, sharded.padded()), whole, []))
        for parts in small.values():
            together = torch.cat([part.padded() for part in parts])
            if together.numel():
                whole = together.new_empty(len(together) * self._replicas.size)
                self._started.append((self._replicas.start_gather(whole, together), whole, parts))

    def _wait(self) -> None:
        while self._started:
            work, whole, parts = self._started.pop(0)
            work.wait()
            # `whole` has one run of all parts for each replica; a parameter is made of its slice of each run.
            by_replica = whole.view(self._replicas.size, -1)
            start = 0
            for part in parts:
                part.allocate().view(part.parts, -1).copy_(by_replica[:, start : start + part.count])
                start += part.count
