"""Averaging: the mean of gradients over the replicas of a pipeline, once a step.

The gradients of a stage are a *bucket*. Its reduction is started right after the action that adds the last of them, and
runs beside what the rank still computes. Replicas may have planned differently, for batches of different shapes, so all
start their buckets in one order: stages from the last to the first, each not before those in front of it::

    stage 2, 0 on this rank   … B2.3 ──▶ bucket of 2   B0.2   B0.3 ──▶ bucket of 0      end of the step: wait
                                        └────────────── all-reduce ──────────────────────┘

A gradient is divided by the number of replicas and then added in place, as DistributedDataParallel does; small ones of
a bucket are copied into one tensor, which is reduced in their place. Gradients are reduced in the layout of their
parameters, which replicas have in common, whatever strides a graph gives them.

Of a sharded parameter each replica gets its own rows of the mean. A bucket is then waited for before the next one is
started, as in FSDP2, so that no more than two of them are there as a whole.

Not in a bucket are gradients that are known only at the end: of tied weights of several ranks, which are added over the
ranks first, and those that are an input of the backward or were computed in the forward. They are reduced one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from roundpipe_fx.distributed.group import Replicas
from roundpipe_fx.distributed.layout import dense
from roundpipe_fx.distributed.sharding import ShardedParameter
from roundpipe_fx.runtime.gradient_accumulator import GradientAccumulator
from roundpipe_fx.runtime.pipeline_program import Instruction, PipelineProgram

__all__ = ["SMALL_BYTES", "Averaging", "GradientBucket", "buckets_of", "known_at_end"]

SMALL_BYTES = 1 << 16
"""Gradients below this are reduced in one tensor with the others of their bucket."""


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are reduced together.

    Attributes:
        place: number of the instruction after which they are complete, and those of the buckets in front too.
        keys: identities of the parameters.
    """

    place: int
    keys: tuple[int, ...]


def known_at_end(
    programs: Sequence[PipelineProgram], primals: Sequence[Sequence[Any]], ran: Collection[Any]
) -> set[int]:
    """Identities of the tensors of whose gradient some part is not computed by an action of this run.

    Args:
        programs: of each microbatch.
        primals: for each microbatch, the inputs.
        ran: (stage action, microbatch) of this run, on all ranks.
    """
    at_end = set()
    for batch, program in enumerate(programs):
        makers = {number: step for step, code in program.steps.items() for number in code.outputs}
        for gradient in program.gradients:
            source = gradient.source
            if source is not None and (source.kind != "value" or (makers[source.index], batch) not in ran):
                at_end.add(id(primals[batch][gradient.primal]))
    return at_end


def buckets_of(
    instructions: Sequence[Instruction],
    programs: Sequence[PipelineProgram],
    primals: Sequence[Sequence[Any]],
    parameters: Mapping[int, torch.Tensor],
    late: Collection[int],
) -> list[GradientBucket]:
    """The buckets of a rank, in the order in which they are started.

    Args:
        instructions: of the rank.
        programs: of each microbatch.
        primals: for each microbatch, the inputs.
        parameters: the model's, by identity, in its order.
        late: identities of those that are in no bucket.
    """
    last: dict[int, int] = {}
    stage: dict[int, int] = {}
    for place, of_rank in enumerate(instructions):
        batch = of_rank.action.microbatch
        for _, number in (*of_rank.gradients, *of_rank.sums):
            key = id(primals[batch][programs[batch].gradients[number].primal])
            last[key] = place
            stage[key] = min(stage.get(key, of_rank.action.stage), of_rank.action.stage)
    buckets: list[GradientBucket] = []
    for own_stage in sorted(set(stage.values()), reverse=True):
        keys = tuple(key for key in parameters if stage.get(key) == own_stage and key not in late)
        if keys:
            before = buckets[-1].place if buckets else 0
            buckets.append(GradientBucket(max(before, *(last[key] for key in keys)), keys))
    return buckets


@dataclass(kw_only=True)
class Averaging:
    """The reductions of one step on one rank.

    Attributes:
        replicas: the ranks with the same stages.
        buckets: those that are not started yet, in order.
        parameters: the model's, by identity, in its order.
        over_ranks: identities of the parameters that several ranks of the pipeline use, whose sum one of them averages
            before the others get it.
        unsynchronized: identities of the parameters whose ``.grad`` has the sums of steps without averaging. It is
            averaged too, with the step's own gradient, which then replaces it.
        sharded: the parameters of which each replica has some rows, by identity.
        receivers: the DTensors that have the gradients of some parameters in their place, by identity.
    """

    replicas: Replicas
    buckets: list[GradientBucket]
    parameters: Mapping[int, torch.Tensor]
    over_ranks: Collection[int] = ()
    unsynchronized: Collection[int] = ()
    sharded: Mapping[int, ShardedParameter] = field(default_factory=dict)
    receivers: Mapping[int, torch.Tensor] = field(default_factory=dict)
    _averaged: dict[int, torch.Tensor] = field(default_factory=dict)
    _started: list[tuple[Any, Callable[[], None]]] = field(default_factory=list)
    """Operations, and what is to be done once each of them is over."""

    def after(self, place: int, sums: GradientAccumulator) -> None:
        """Start the buckets that are complete after an instruction.

        Args:
            place: number of the instruction.
            sums: the rank's gradients, from which those of the buckets are removed.
        """
        while self.buckets and self.buckets[0].place <= place:
            if self.sharded:
                self.wait()
            values = {}
            for key in self.buckets[0].keys:
                total, owned = sums.release(key)
                values[key] = self._prepared(key, total, owned)
                del total
            self._start(values)
            self.buckets.pop(0)  # now: one that could not be started is still to be, with zeros

    def go_without_values(self) -> None:
        """Start the remaining buckets with zeros, so that other replicas do not wait for them."""
        while self.buckets:
            keys = self.buckets.pop(0).keys
            self._start({key: torch.zeros_like(self._like(key)) for key in keys})

    def wait(self) -> None:
        """Wait for what was started."""
        while self._started:
            work, then = self._started.pop(0)
            work.wait()
            then()

    def mean(self, key: int, total: torch.Tensor) -> torch.Tensor:
        """The mean of one gradient, which is not written to."""
        self._start({key: self._prepared(key, total, owned=False)})
        self.wait()
        return self._averaged.pop(key)

    def finish(self, gradients: dict[int, torch.Tensor]) -> None:
        """Put the mean gradients of buckets in, and average those that were known only now.

        Args:
            gradients: this rank's, by identity of the tensor; changed.
        """
        self.wait()
        averaged = self._averaged
        for key in self.parameters:
            if key in averaged or key in self.over_ranks:
                continue
            if key in gradients:
                averaged[key] = self.mean(key, gradients.pop(key))
            elif self._unsynchronized_sum(key) is not None:  # this step has no gradient of it
                averaged[key] = self.mean(key, torch.zeros_like(self._like(key)))
        gradients.update(averaged)

    def _like(self, key: int) -> torch.Tensor:
        """A tensor of the shape and strides in which a gradient is reduced: a parameter may have repeated elements."""
        return torch.empty_like(self.parameters[key].detach())

    def _unsynchronized_sum(self, key: int) -> torch.Tensor | None:
        """What steps without averaging have left of a gradient."""
        gradient = self.receivers.get(key, self.parameters[key]).grad if key in self.unsynchronized else None
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def _prepared(self, key: int, total: torch.Tensor, owned: bool) -> torch.Tensor:
        """This rank's share of a mean, in the layout of its parameter and in memory of its own."""
        like = self.parameters[key]
        if not owned or total.stride() != like.stride() or total.untyped_storage().nbytes() != total.nbytes:
            total = self._like(key).copy_(total)
        before = self._unsynchronized_sum(key)
        if before is not None:
            total.add_(before)
        return total.div_(self.replicas.size)

    def _start(self, values: dict[int, torch.Tensor]) -> None:
        """Start reducing gradients, each of which is removed from ``values``: copies then replace them one by one."""
        several = len(values) > 1
        small: dict[tuple[torch.dtype, bool], dict[int, torch.Tensor]] = {}
        for key in [*values]:
            value = values.pop(key)
            sharded = self.sharded.get(key)
            if sharded is None:
                self._averaged[key] = value
            flat = dense(value, value.shape, value.stride()) if sharded is None else sharded.padded_gradient(value)
            if several and value.nbytes < SMALL_BYTES:
                small.setdefault((value.dtype, sharded is not None), {})[key] = flat
            elif sharded is not None:
                self._start_parts(flat, [key])
            elif value.numel():
                self._started.append((self.replicas.start_sum(flat), functools.partial(_split, flat, ())))
            del value, flat
        for (_, is_sharded), parts in small.items():
            if is_sharded:
                rows = [part.view(self.replicas.size, -1) for part in parts.values()]
                self._start_parts(torch.cat(rows, 1).view(-1), [*parts])
                continue
            together = torch.cat([*parts.values()])
            if together.numel():
                then = functools.partial(_split, together, [*parts.values()])
                self._started.append((self.replicas.start_sum(together), then))

    def _start_parts(self, whole: torch.Tensor, keys: Sequence[int]) -> None:
        """Start reducing gradients to the rows of each replica.

        Args:
            whole: for each replica, the elements of its part of every gradient, with padding.
            keys: identities of the parameters.
        """
        part = whole.new_empty(len(whole) // self.replicas.size)

        def take() -> None:
            start = 0
            for key in keys:
                shard = part[start : start + self.sharded[key].count]
                self._averaged[key] = self.sharded[key].rows_of(shard.clone() if len(keys) > 1 else shard)
                start += len(shard)

        if len(whole):
            self._started.append((self.replicas.start_sum_of_part(part, whole), take))
        else:
            take()


def _split(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy what was reduced as one tensor to the small gradients that it consists of."""
    start = 0
    for part in parts:
        part.copy_(whole[start : start + part.numel()])
        start += part.numel()
