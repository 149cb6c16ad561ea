"""Ownership: which of a model's tensors a rank keeps, and how the others stay without their memory.

Every rank has the whole model as objects, so that each traces it: names, shapes, hooks and guards are those of the
model. A rank owns the parameters and buffers that its stages read or update; of the others the storage is resized to
nothing, as FSDP does with parameters that are sharded. A model that was built on the meta device gets tensors without
memory on the rank's device first; what a rank owns gets memory when it is loaded or initialized::

    tensor                           stages that read it    on rank 0              on rank 1
    embedding                        of rank 0              its memory             resized to nothing
    weight of a later block          of rank 1              resized to nothing     its memory
    weight that is tied to both      of both                its memory             its memory
    tensor that no stage reads       —                      its memory             resized to nothing
    single number (a counter)        —                      its few bytes          its few bytes

Single numbers keep their bytes everywhere since Dynamo reads them when it traces. What no stage reads belongs to the
first rank, so that the ranks together have all of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from roundpipe_fx.distributed.layout import ValueLayout
from roundpipe_fx.distributed.ranks import RanksDifferError
from roundpipe_fx.distributed.sharded_parameters import ShardedParameters, check_shardable
from roundpipe_fx.runtime.pipeline_program import Instruction, PipelineProgram
from roundpipe_fx.schedules import StageAction
from roundpipe_fx.torch_private import local_part


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers with all their names; a tied one occurs under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def readers_of(
    instructions: Sequence[Sequence[Instruction]],
    programs: Sequence[PipelineProgram],
    primals: Sequence[Sequence[object]],
) -> dict[int, frozenset[int]]:
    """The ranks that read or update each input, by its identity.

    Args:
        primals: for each microbatch, the inputs.
    """
    ranks_reading: dict[int, set[int]] = {}
    where: dict[tuple[StageAction, int], int] = {}
    for rank, rank_instructions in enumerate(instructions):
        for instruction in rank_instructions:
            # Who runs which stage action, and which inputs its stages read.
            batch = instruction.action.microbatch
            where[instruction.action.step, batch] = rank
            for source in instruction.code.inputs:
                if source.kind == "primal":
                    ranks_reading.setdefault(id(primals[batch][source.index]), set()).add(rank)
    for batch, program in enumerate(programs):
        makers = {number: step for step, code in program.steps.items() for number in code.outputs}
        # The rank that computes a buffer's new value owns the buffer, read or not.
        for output, primal in program.mutations.items():
            result = program.outputs[output]
            if result is not None and result.kind == "value" and (makers[result.index], batch) in where:
                ranks_reading.setdefault(id(primals[batch][primal]), set()).add(where[makers[result.index], batch])
        # The gradient of a parameter may be an input itself (of a reshaped view, say): then both are needed in one
        # place.
        for gradient in program.gradients:
            if gradient.source is not None and gradient.source.kind == "primal":
                owners = ranks_reading.get(id(primals[batch][gradient.primal]), ())
                ranks_reading.setdefault(id(primals[batch][gradient.source.index]), set()).update(owners)
    return {key: frozenset(ranks) for key, ranks in ranks_reading.items()}


class Ownership:
    """The tensors of a model on one rank.

    Args:
        model: the model. What lies on the meta device is replaced by tensors without memory on ``device``.
        rank: number of this rank.
        shard_mesh: of the replicas across which its tensors are sharded; ``None``: each has all of it.

    Attributes:
        owners: by identity, the ranks that own a tensor; ``None`` until the model is planned.
        unloaded: identities of the tensors that have no values yet.
        shards: the parameters that are sharded; none until the model is planned.
        parallel: parameters that are DTensors by themselves, since the layers are distributed (tensor parallelism).
    """

    def __init__(self, model: nn.Module, rank: int, device: torch.device, shard_mesh: DeviceMesh | None = None) -> None:
        self.model, self.rank = model, rank
        self.shards = ShardedParameters(shard_mesh)
        if shard_mesh is not None:
            for name, value in model.named_parameters():
                check_shardable(name, value)
        self.parallel: list[DTensor] = [value for value in model.parameters() if isinstance(value, DTensor)]
        self.owners: Mapping[int, frozenset[int]] | None = None
        self.unloaded: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._replace_meta(device)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, as they are traced, and buffers with all their names."""
        for name, value in named_tensors(self.model):
            yield name, self.traced(value)

    def traced(self, value: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that stages read: of a DTensor that is sharded over replicas the whole parameter, of one
        of the model's own this rank's part; other tensors themselves."""
        traced = self.shards.traced_of(value)
        return local_part(traced) if isinstance(traced, DTensor) else traced

    def traced_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, as they are traced, with all their names."""
        for name, value in self.model.named_parameters(remove_duplicate=False):
            yield name, self.traced(value)

    def receivers(self) -> Mapping[int, torch.Tensor]:
        """The DTensors that have the gradients of what is traced in its place, by identity."""
        parallel = {id(local_part(value)): value for value in self.parallel}
        return {**parallel, **self.shards.receivers}

    def distribute(self, gradients: dict[int, torch.Tensor]) -> None:
        """Make gradients of parts of layers DTensors, as their parameters are, in place."""
        for value in self.parallel:
            gradient = gradients.get(id(local_part(value)))
            if gradient is not None:
                gradients[id(local_part(value))] = DTensor.from_local(
                    gradient,
                    value.device_mesh,
                    value.placements,
                    run_check=False,
                    shape=value.shape,
                    stride=value.stride(),
                )

    def shard(self) -> None:
        """Shard the parameters that this rank owns over the replicas, if they are to be."""
        owned = [(name, value) for name, value in self.named() if self.owns(value)]
        self.shards.shard(self.model, owned, self.unloaded)

    def _replace_meta(self, device: torch.device) -> None:
        replacements: dict[int, torch.Tensor] = {}
        for module in self.model.modules():
            # `made` keeps tied parameters tied: one replacement for each object.
            for registered in (module._parameters, module._buffers):
                for name, value in registered.items():
                    if value is None or value.device.type != "meta":
                        continue
                    if id(value) not in replacements:
                        replacements[id(value)] = self._without_memory(value, device)
                    registered[name] = replacements[id(value)]  # type: ignore[assignment]

    def _without_memory(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        replacement: torch.Tensor = empty
        if isinstance(value, nn.Parameter):
            replacement = nn.Parameter(empty, value.requires_grad)
            # Attributes that users or libraries have set on the parameter.
            replacement.__dict__.update(value.__dict__)
        self.unloaded.add(id(replacement))
        self._free(replacement)
        return replacement

    def _free(self, value: torch.Tensor) -> None:
        if not value.dim():
            # Numbers are read by guards when Dynamo traces, so they keep their (zero) value.
            value.data.zero_()
            return
        storage = value.untyped_storage()
        self._sizes[id(value)] = storage.nbytes()
        storage.resize_(0)

    def refuse_shared_updates(self, updated: Iterable[object], readers: Mapping[int, frozenset[int]]) -> None:
        """Refuse buffers that a microbatch updates on one rank and the next one reads on another.

        Args:
            updated: tensors that stages update.
            readers: the ranks that read or update each input, by identity.

        Raises:
            ValueError: there is one; the message names it.
        """
        names = {id(value): name for name, value in self.named()}
        for value in updated:
            if self.shards.mesh is not None and isinstance(value, nn.Parameter):
                raise ValueError(
                    f"the parameter {names.get(id(value))!r} is updated in the forward, and with shard='dp' it is "
                    "there only while a stage reads it: make it a buffer, or compile without shard."
                )
            ranks = sorted(readers.get(id(value), ()))
            if len(ranks) > 1:
                raise ValueError(
                    f"{names.get(id(value), 'a tensor')!r} is updated by stages, and ranks {ranks} have stages "
                    "that read it: begin stages at modules of your choice, stages=[…], so that one has all of them. "
                    "With schedule='roundpipe' all ranks have them: use another schedule."
                )

    def assign_owners(self, readers: Mapping[int, frozenset[int]]) -> None:
        """Free what other ranks own. When another shape is planned, check that the owners have what it reads.

        Args:
            readers: the ranks that read each input, by identity.

        Raises:
            RanksDifferError: a stage of another rank than before reads a tensor.
        """
        tensors = {id(value): (name, value) for name, value in self.named()}
        if self.owners is not None:
            # Owners are fixed by the first plan: tensors were freed on other ranks.
            for key, ranks in readers.items():
                if key in tensors and not ranks <= self.owners.get(key, frozenset((0,))):
                    raise RanksDifferError(
                        f"{tensors[key][0]!r} is read by rank {max(ranks - self.owners[key])} for this batch, and is "
                        f"owned by rank {min(self.owners[key])} since the first one was planned. Inputs of such "
                        "different shapes need stages that begin at modules of your choice: stages=[…]."
                    )
            return
        self.owners = {key: readers.get(key) or frozenset((0,)) for key in tensors}
        # Memory that an owned tensor shares must not be freed with one that is not owned.
        kept = {v.untyped_storage()._cdata for _, v in tensors.values() if self.owns(v)}
        for key, (_, value) in tensors.items():
            if not self.owns(value) and key not in self._sizes:
                if value.untyped_storage()._cdata in kept or not value.untyped_storage().resizable():
                    value.data = torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device=value.device
                    )
                self._free(value)

    def owns(self, value: torch.Tensor) -> bool:
        """Return whether a tensor of the model is owned by this rank."""
        assert self.owners is not None
        return self.rank in self.owners.get(id(self.traced(value)), ())

    def names(self) -> list[str]:
        """The names of what this rank owns, in the model's order."""
        return [name for name, value in self.named() if self.owns(value)]

    def fill(self, value: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None:
        """Give a tensor that this rank owns memory, if it has none, and write its values.

        Args:
            value: a tensor of the model.
            write: called with it, under ``no_grad``.
        """
        if id(value) in self.shards.by_traced:
            self.shards.fill(self.shards.by_traced[id(value)], write)
            self.unloaded.discard(id(value))
            return
        size = self._sizes.pop(id(value), None)
        if size is not None:
            value.untyped_storage().resize_(size)
        with torch.no_grad():
            write(value.data)
        self.unloaded.discard(id(value))

    def missing_names(self) -> list[str]:
        """The names of what this rank owns and has no values of."""
        return [name for name, value in self.named() if self.owns(value) and id(value) in self.unloaded]

    def make_writable(self, updated: Iterable[torch.Tensor]) -> _Writable:
        """Context manager in which tensors that other ranks own can be written to, to no effect."""
        return _Writable([(value, self._sizes[id(value)]) for value in updated if id(value) in self._sizes])


class _Writable:
    def __init__(self, tensors: Sequence[tuple[torch.Tensor, int]]) -> None:
        self._tensors = tensors

    def __enter__(self) -> None:
        for value, size in self._tensors:
            value.untyped_storage().resize_(size)

    def __exit__(self, *exc: object) -> None:
        for value, _ in self._tensors:
            value.untyped_storage().resize_(0)


def find_remote_gradients(
    instructions: Sequence[Sequence[Instruction]],
    programs: Sequence[PipelineProgram],
    primals: Sequence[Sequence[object]],
    owners: Callable[[int], frozenset[int]],
) -> list[tuple[int, dict[int, ValueLayout], frozenset[int]]]:
    """Tensors whose gradients are to be summed over ranks, or sent to others: see :func:`sum_gradients`.

    Args:
        primals: for each microbatch, the inputs.
        owners: the ranks that get the gradient of a tensor, by its identity.
    """
    where = {
        (instruction.action.step, instruction.action.microbatch): rank
        for rank, rank_instructions in enumerate(instructions)
        for instruction in rank_instructions
    }
    computed: dict[int, dict[int, ValueLayout]] = {}
    for batch, program in enumerate(programs):
        makers = {number: step for step, code in program.steps.items() for number in code.outputs}
        for gradient in program.gradients:
            # Gradients that are inputs need no sum: every rank has them.
            if gradient.source is None or gradient.source.kind != "value":
                continue
            rank = where.get((makers[gradient.source.index], batch))
            if rank is not None:
                layouts = computed.setdefault(id(primals[batch][gradient.primal]), {})
                layouts.setdefault(rank, ValueLayout.of(program.values[gradient.source.index]))
    return [
        (key, layouts, owners(key))
        for key, layouts in computed.items()
        if len(layouts) > 1 or frozenset(layouts) != owners(key)
    ]
