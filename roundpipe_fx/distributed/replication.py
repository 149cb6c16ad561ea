"""Replication: what the replicas of a pipeline have in common, as with DistributedDataParallel.

=================  ====================================================================================================
parameters         the first replica's once stages are given to ranks, and after loading or initializing
buffers            those that stages update: the first replica's after each step
gradients          the mean over replicas, once a step (:mod:`roundpipe_fx.distributed.averaging`)
random numbers     replicas whose generators have the same state draw as further microbatches of one pipeline, and
                   are left in the same state
=================  ====================================================================================================

Two replicas of a pipeline over two ranks, with two microbatches each; ``s0`` to ``s3`` are the streams of random
numbers if the replicas' generators have the same state::

                 stages 0         stages 1
    replica 0    rank 0 ────────▶ rank 1         microbatches 0, 1 draw from s0, s1
                   │ mean of        │ mean of
                   │ gradients      │ gradients
    replica 1    rank 2 ────────▶ rank 3         microbatches 0, 1 draw from s2, s3
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from roundpipe_fx.distributed.averaging import Averaging, buckets_of, find_late_gradients, reductions_of
from roundpipe_fx.distributed.group import PipelineGroup
from roundpipe_fx.distributed.layout import ValueLayout, as_dense_row, as_strided_tensor
from roundpipe_fx.distributed.ownership import Ownership
from roundpipe_fx.runtime.pipeline_program import Instruction, PipelineProgram
from roundpipe_fx.schedules.data_parallel import SMALL_BYTES


class Replication:
    """Tensors that a rank has in common with those of other replicas. With one replica nothing is done.

    Args:
        ownership: the model's tensors on this rank.
        budgeted: whether the memory of a step has a bound.

    Attributes:
        synchronizing: whether steps average gradients.
        first_stream: number of the stream of the first microbatch's random numbers.
        alike: for each pipeline that runs with this one, that of the same part of the layers in the first replica whose
            generator has the same state. A step leaves them in the same state again.
    """

    def __init__(self, ownership: Ownership, group: PipelineGroup, budgeted: bool = False) -> None:
        self._ownership, self._group, self._budgeted = ownership, group, budgeted
        self.synchronizing = True
        self.first_stream = 0
        self.alike = [*range(group.parts)]
        self._unsynchronized: set[int] = set()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which steps add their gradients without averaging them."""
        if self._ownership.shards.mesh is not None and self._budgeted:
            raise RuntimeError(
                "no_sync() with shard='dp' holds the whole gradients of all parameters, which a memory_budget does not "
                "count: give more microbatches, num_microbatches=, instead; or add the gradients of several steps, "
                "which are averaged in each; or compile without memory_budget."
            )
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before

    def share_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors of the model that this rank owns and that have values with the first replica's."""
        replicas, ownership = self._group.replicas, self._ownership
        if replicas is None:
            return
        # Unloaded tensors have no values, sharded ones are distributed by their own rows.
        apart = ownership.unloaded | ownership.shards.by_traced.keys()
        once = {id(value): value for value in tensors if ownership.owns(value) and id(value) not in apart}
        values = [value.detach() for value in once.values() if value.numel()]
        # As bytes, so tensors of all dtypes travel as one message.
        flat = [as_dense_row(value, value.shape, value.stride()).view(torch.uint8) for value in values]
        small: dict[torch.device, list[torch.Tensor]] = {}
        for part in flat:
            if part.numel() < SMALL_BYTES:  # a batch norm has three of a few bytes
                small.setdefault(part.device, []).append(part)
            else:
                replicas.share_tensor(part)
        for parts in small.values():
            together = torch.cat(parts)
            replicas.share_tensor(together)
            for part, received in zip(parts, together.split([part.numel() for part in parts]), strict=True):
                part.copy_(received)
        for value, part in zip(values, flat, strict=True):
            if part.data_ptr() != value.data_ptr():  # not dense, so a copy
                value.copy_(as_strided_tensor(part.view(value.dtype), value.shape, value.stride()))

    def number_streams(self, generators: Sequence[object] | None, microbatches: int) -> None:
        """Decide of which streams a step draws.

        Args:
            generators: digests of the states of each replica's generator; ``None``: of this replica's alone.
            microbatches: into how many a batch is split at most.
        """
        states: list[object] = [None] if generators is None else list(generators)
        number = 0 if generators is None else self._group.replica
        # Pipelines whose generators began equally draw as one pipeline with more microbatches: stream numbers continue
        # from replica to replica.
        first = [states.index(state) for state in states]
        self.first_stream = first[:number].count(first[number]) * microbatches
        parts = self._group.parts
        self.alike = [replica * parts + part for replica in first for part in range(parts)]

    def averaging(
        self,
        instructions: Sequence[Sequence[Instruction]],
        programs: Sequence[PipelineProgram],
        primals: Sequence[Sequence[Any]],
        shared: Sequence[tuple[int, dict[int, ValueLayout], frozenset[int]]],
    ) -> Averaging | None:
        """The reductions of a step.

        Args:
            instructions: of each rank, of this run.
            primals: for each microbatch, the inputs.
            shared: the gradients that are summed over the ranks of the pipeline.
        """
        if self._group.replicas is None:
            return None
        ran = {
            (instruction.action.step, instruction.action.microbatch)
            for rank_instructions in instructions
            for instruction in rank_instructions
        }
        at_end = find_late_gradients(programs, primals, ran)
        parameters = self._parameters()
        over_ranks = {key: computed for key, computed, _ in shared}
        buckets = buckets_of(instructions[self._group.rank], programs, primals, parameters, at_end | over_ranks.keys())
        owners = self._ownership.owners or {}
        return Averaging(
            replicas=self._group.replicas,
            reductions=reductions_of(buckets, parameters, self._ownership.shards.by_traced),
            parameters=parameters,
            over_ranks=frozenset(
                key
                for key, computed in over_ranks.items()
                if key in parameters and key not in at_end and min(computed) in owners.get(key, ())
            ),
            unsynchronized=frozenset(self._unsynchronized),
            sharded=self._ownership.shards.by_traced,
            receivers=self._ownership.receivers(),
        )

    def _parameters(self) -> dict[int, torch.Tensor]:
        """The model's, as they are traced, by identity."""
        return {id(value): value for _, value in self._ownership.traced_parameters()}

    def note_unsynchronized(self, keys: Collection[int]) -> None:
        """A step has added gradients of some tensors, by identity, that were not averaged."""
        if self._group.replicas is not None:
            self._unsynchronized.update(self._parameters().keys() & set(keys))

    def replace_unsynchronized(self) -> None:
        """A step's gradients include what ``.grad`` has of steps without averaging: they replace it."""
        for key, value in {**self._parameters(), **self._ownership.receivers()}.items():
            if key in self._unsynchronized:
                value.grad = None
        self._unsynchronized.clear()
