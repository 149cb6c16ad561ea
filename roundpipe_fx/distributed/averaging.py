"""Averaging: the mean of gradients over the replicas of a pipeline, once a step.

The gradients of a stage are a *bucket*. Its reduction is started right after the action that adds the last of them, and
runs beside what the rank still computes. Replicas may have planned differently, for batches of different shapes, so all
start their buckets in one order: stages from the last to the first, each not before those in front of it::

    stage 2, 0 on this rank   … B2.3 ──▶ bucket of 2   B0.2   B0.3 ──▶ bucket of 0      end of the step: wait
                                        └────────────── all-reduce ──────────────────────┘

A gradient is divided by the number of replicas and then added in place, as DistributedDataParallel does. Most of a
bucket are put together in tensors of a few megabytes, in which they stay: with ``gradient_as_bucket_view=True``
DistributedDataParallel's are parts of its buckets likewise. Gradients are reduced in the layout of their parameters,
which replicas have in common, whatever strides a graph gives them.

Of a sharded parameter each replica gets its own rows of the mean. A bucket is then waited for before the next one is
started, as in FSDP2, so that no more than two of them are there as a whole.

Not in a bucket are gradients that are known only at the end: of tied weights of several ranks, which are added over the
ranks first, and those that are an input of the backward or were computed in the forward. They are reduced one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from roundpipe_fx.distributed.group import Replicas
from roundpipe_fx.distributed.layout import as_dense_row
from roundpipe_fx.distributed.sharded_parameters import ShardedParameter
from roundpipe_fx.runtime.gradient_accumulator import GradientAccumulator
from roundpipe_fx.runtime.pipeline_program import Instruction, PipelineProgram
from roundpipe_fx.schedules.data_parallel import aligned_bytes, bucketize


@dataclass(frozen=True)
class GradientBucket:
    """Gradients of a stage.

    Attributes:
        position: number of the instruction after which they are complete, and those of the buckets in front too.
        keys: identities of the parameters.
    """

    position: int
    keys: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """Gradients that are reduced as one tensor.

    Attributes:
        position: number of the instruction after which they are complete.
        keys: identities of the parameters.
        waits: whether it waits for all reductions before it.
    """

    position: int
    keys: tuple[int, ...]
    waits: bool = False


def find_late_gradients(
    programs: Sequence[PipelineProgram], primals: Sequence[Sequence[Any]], ran: Collection[Any]
) -> set[int]:
    """Identities of the tensors of whose gradient some part is not computed by an action of this run.

    Args:
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
        primals: for each microbatch, the inputs.
        parameters: the model's, by identity, in its order.
        late: identities of those that are in no bucket.
    """
    last: dict[int, int] = {}
    stage: dict[int, int] = {}
    for position, rank_instructions in enumerate(instructions):
        batch = rank_instructions.action.microbatch
        for _, number in (*rank_instructions.gradients, *rank_instructions.sums):
            key = id(primals[batch][programs[batch].gradients[number].primal])
            last[key] = position
            stage[key] = min(stage.get(key, rank_instructions.action.stage), rank_instructions.action.stage)
    buckets: list[GradientBucket] = []
    # From the last stage, whose backward is over first. A bucket starts no earlier than the one in front of it, so all
    # replicas have one order.
    for own_stage in sorted(set(stage.values()), reverse=True):
        keys = tuple(key for key in parameters if stage.get(key) == own_stage and key not in late)
        if keys:
            before = buckets[-1].position if buckets else 0
            buckets.append(GradientBucket(max(before, *(last[key] for key in keys)), keys))
    return buckets


def reductions_of(
    buckets: Sequence[GradientBucket], parameters: Mapping[int, torch.Tensor], sharded: Collection[int]
) -> list[GradientReduction]:
    """Groups of gradients that are reduced as one tensor, in the order of starting: the same for all replicas.

    Args:
        buckets: of the rank, in order.
        parameters: the model's, by identity.
        sharded: identities of those of which each replica has some rows.
    """
    reductions = []
    for bucket in buckets:
        # Only gradients of one dtype, and of one kind (sharded or not), can travel as one tensor.
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for key in bucket.keys:
            kinds.setdefault((parameters[key].dtype, key in sharded), []).append(key)
        groups = [
            tuple(keys[position] for position in positions)
            for (dtype, is_sharded), keys in kinds.items()
            for positions in bucketize([parameters[key].numel() * dtype.itemsize for key in keys], is_sharded)
        ]
        reductions += [
            GradientReduction(position=bucket.position, keys=keys, waits=bool(sharded) and keys is groups[0])
            for keys in groups
        ]
    return reductions


@dataclass(kw_only=True)
class Averaging:
    """The reductions of one step on one rank.

    Attributes:
        replicas: the ranks with the same stages.
        reductions: those that are not started yet, in order.
        parameters: the model's, by identity, in its order.
        over_ranks: identities of the parameters that several ranks of the pipeline use, whose sum one of them averages
            before the others get it.
        unsynchronized: identities of the parameters whose ``.grad`` has the sums of steps without averaging. It is
            averaged too, with the step's own gradient, which then replaces it.
        sharded: the parameters of which each replica has some rows, by identity.
        receivers: the DTensors that have the gradients of some parameters in their place, by identity.
    """

    replicas: Replicas
    reductions: list[GradientReduction]
    parameters: Mapping[int, torch.Tensor]
    over_ranks: Collection[int] = ()
    unsynchronized: Collection[int] = ()
    sharded: Mapping[int, ShardedParameter] = field(default_factory=dict)
    receivers: Mapping[int, torch.Tensor] = field(default_factory=dict)
    _averaged: dict[int, torch.Tensor] = field(default_factory=dict)
    _started: list[tuple[Any, Callable[[], None]]] = field(default_factory=list)
    """Operations, and what is to be done once each of them is over."""

    def after(self, position: int, sums: GradientAccumulator) -> None:
        """Start the reductions of what is complete after an instruction.

        Args:
            position: number of the instruction.
            sums: the rank's gradients, from which those that are reduced are removed.
        """
        while self.reductions and self.reductions[0].position <= position:
            if self.reductions[0].waits:
                self.wait()
            self._start(self.reductions[0].keys, sums.release)
            # Popped after the start: if this rank fails in between, `go_without_values` starts it with zeros.
            self.reductions.pop(0)  # now: one that could not be started is still to be, with zeros

    def reduce_zeros(self) -> None:
        """Start the remaining reductions with zeros, so that other replicas do not wait for them."""
        while self.reductions:
            keys = self.reductions.pop(0).keys
            self._start(keys, lambda key: (torch.zeros_like(self._empty_like(key)), True))

    def wait(self) -> None:
        """Wait for what was started."""
        while self._started:
            work, finish = self._started.pop(0)
            work.wait()
            finish()

    def mean(self, key: int, total: torch.Tensor) -> torch.Tensor:
        """The mean of one gradient, which is not written to."""
        self._start((key,), lambda _: (total, False))
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
                averaged[key] = self.mean(key, torch.zeros_like(self._empty_like(key)))
        gradients.update(averaged)

    def _empty_like(self, key: int) -> torch.Tensor:
        """A tensor of the shape and strides in which a gradient is reduced: a parameter may have repeated elements."""
        return torch.empty_like(self.parameters[key].detach())

    def _unsynchronized_sum(self, key: int) -> torch.Tensor | None:
        """The sum of a gradient that steps without averaging have left."""
        gradient = self.receivers.get(key, self.parameters[key]).grad if key in self.unsynchronized else None
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def _start(self, keys: Sequence[int], release: Callable[[int], tuple[torch.Tensor, bool]]) -> None:
        """Start reducing gradients as one tensor.

        Args:
            keys: identities of the parameters.
            release: returns a gradient and whether it may be written to; called once for each, one after another.
        """
        if keys[0] in self.sharded:
            rows = [self.sharded[key].padded_gradient(self._share(key, *release(key))) for key in keys]
            # A matrix of replicas × elements: row r is what replica r gets of each parameter, so one reduce-scatter
            # serves all of them.
            if len(rows) > 1:
                rows = [torch.cat([whole.view(self.replicas.size, -1) for whole in rows], 1).view(-1)]
            self._start_parts(rows.pop(), keys)
            return
        if len(keys) > 1:
            whole = self._bucketize(keys, release)
        else:
            value = self._averaged[keys[0]] = self._share(keys[0], *release(keys[0]))
            whole = as_dense_row(value, value.shape, value.stride())
        if whole.numel():
            self._started.append((self.replicas.start_sum(whole), lambda: None))

    def _share(self, key: int, total: torch.Tensor, owned: bool) -> torch.Tensor:
        """This rank's share of a mean, in the layout of its parameter and in memory of its own."""
        parameter = self.parameters[key]
        # A gradient that is shared, in another layout or a view gets memory of its own before it is divided in place.
        if not owned or total.stride() != parameter.stride() or total.untyped_storage().nbytes() != total.nbytes:
            total = self._empty_like(key).copy_(total)
        before = self._unsynchronized_sum(key)
        if before is not None:
            total.add_(before)
        return total.div_(self.replicas.size)

    def _bucketize(self, keys: Sequence[int], release: Callable[[int], tuple[torch.Tensor, bool]]) -> torch.Tensor:
        """One tensor with this rank's shares of means, each in the layout of its parameter."""
        parameters = [self.parameters[key].detach() for key in keys]
        lengths = [aligned_bytes(value.numel() * value.itemsize) // value.itemsize for value in parameters]
        whole = torch.empty(sum(lengths), dtype=parameters[0].dtype, device=parameters[0].device)
        # Slices of one buffer: parameters' gradients stay views of it after the reduction.
        for key, value, slot in zip(keys, parameters, whole.split(lengths), strict=True):
            share = slot[: value.numel()].as_strided(value.shape, torch.empty_like(value, device="meta").stride())
            # The rest of a slice is padding for alignment; it is reduced as well, so it must not be garbage.
            slot[value.numel() :].zero_()
            total, before = release(key)[0], self._unsynchronized_sum(key)
            if before is not None:
                total = torch.add(total, before, out=share)
            torch.div(total, self.replicas.size, out=share)
            self._averaged[key] = share
            del total
        return whole

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
