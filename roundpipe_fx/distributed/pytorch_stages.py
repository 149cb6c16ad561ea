"""Export to torch.distributed.pipelining: this rank's stages as PipelineStage objects of PyTorch's own runtime.

::

    trace ──▶ graph with stages ──▶ forward of each stage ──▶ nn.Module with its tensors ──▶ PipelineStage

The modules are differentiated by autograd, and know nothing of schedules: cut points are the plan's, everything else
(microbatches, the order of actions, the loss) is PyTorch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage

from roundpipe_fx.codegen.forward_stages import ForwardStage, forward_stages
from roundpipe_fx.distributed.agreement import all_or_none
from roundpipe_fx.distributed.layout import ValueLayout
from roundpipe_fx.distributed.process_pipeline import ProcessPipeline
from roundpipe_fx.distributed.results import broadcast_value
from roundpipe_fx.pipeline.capture.captured_calls import TracedStep
from roundpipe_fx.runtime.pipeline_program import Instruction
from roundpipe_fx.schedules import ActionKind
from roundpipe_fx.torch_private import key_get, keystr, tree_flatten_with_path


class _InputSource(NamedTuple):
    """Where a stage gets an input of its graph from.

    Attributes:
        tensor: the name of a parameter or buffer; empty: it is the batch's.
        argument: the name of an argument of the model.
        path: to a tensor in the argument.
    """

    tensor: str = ""
    argument: str = ""
    path: tuple[Any, ...] = ()


class _TensorHolder(nn.Module):
    """Holds parameters, buffers and others of its kind, under the names that they have in the model."""


class _Stage(_TensorHolder):
    """The forward of one stage.

    Args:
        sources: of the graph's inputs after what it receives.
        signature: of the model's forward.
        last: whether it returns the model's results.
        training: the model's mode in which it was traced.
    """

    def __init__(
        self,
        *,
        stage: ForwardStage,
        number: int,
        sources: Sequence[_InputSource],
        signature: inspect.Signature,
        last: bool,
        training: bool,
    ) -> None:
        super().__init__()
        self.train(training)
        # Buffers that the stage writes (batch norm's running statistics): the exported graph returns their new values.
        updated = [sources[stage.primals.index(node)].tensor for node in stage.updated]
        # Not as attributes: `nn.Module` would register the graph as a submodule, and its tensors would stand in
        # `state_dict`.
        self.__dict__["_of_stage"] = (stage.module, len(stage.sent), tuple(sources), tuple(updated))
        self.__dict__["_how"] = (number, signature, last, training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Args: what it receives; of the first stage, those of the model. By keyword: arguments of the model."""
        graph, sent, sources, updated = self.__dict__["_of_stage"]
        number, signature, last, training = self.__dict__["_how"]
        if self.training != training:
            raise RuntimeError(
                f"the stages were exported in {'training' if training else 'evaluation'} mode, and stage {number} is "
                "in the other one: set the model's mode, and call model.pytorch_stages again."
            )
        # `labels` is an argument of the loss, not of the model, unless the model has one of that name itself.
        labels = {"labels": kwargs.pop("labels")} if "labels" in kwargs.keys() - signature.parameters.keys() else {}
        # PyTorch gives positional arguments to the first stage only; later stages get what the stage before sent, and
        # the batch's other arguments by keyword.
        bound = signature.bind_partial(*(args if number == 0 else ()), **kwargs).arguments | labels
        inputs = [*(args if number else ())]
        for source in sources:
            if source.tensor:
                value = _named(self, source.tensor)
                # A buffer that is updated is read as a copy: autograd keeps what the forward pass read, and `copy_`
                # below would change it.
                inputs.append(value.clone() if source.tensor in updated else value)
            elif source.argument in bound:
                inputs.append(key_get(bound[source.argument], source.path))
            else:
                raise TypeError(
                    f"stage {number} reads the model's argument {source.argument!r}: give it by keyword on every rank, "
                    f"schedule.step(…, {source.argument}=…)."
                )
        results = graph(*inputs)
        with torch.no_grad():
            for name, value in zip(updated, results[sent:], strict=True):
                _named(self, name).copy_(value)
        # PyTorch concatenates what microbatches return, which single numbers do not allow.
        outputs = tuple(value.contiguous() if not last else torch.atleast_1d(value) for value in results[:sent])
        return outputs[0] if len(outputs) == 1 else outputs


def _named(module: nn.Module, name: str) -> torch.Tensor:
    member: Any = module
    for part in name.split("."):
        member = getattr(member, part)
    value: torch.Tensor = member
    return value


def pytorch_stages(processes: ProcessPipeline, traced: TracedStep) -> list[PipelineStage]:
    """This rank's stages. Every rank must call it.

    Args:
        processes: this rank's part in the pipeline.

    Raises:
        ValueError: PyTorch's runtime cannot run these stages; the message says why.
        RemoteError: another rank has failed, and this one has not.
    """
    group, ownership = processes.group, processes.ownership
    with all_or_none(group.everyone, "export its stages"):
        if ownership.shards.mesh is not None:
            raise ValueError(
                "with shard='dp' parameters are gathered by this runtime: compile without shard, and call fully_shard "
                "on the submod of each exported stage."
            )
        missing = ownership.missing_names()
        if missing:
            raise RuntimeError(
                f"{missing[0]!r} (of {len(missing)} tensors of this rank) has no values yet: call model.load(folder) "
                "or model.init_weights(fn) first."
            )
        joint = traced.captured.graphs[0].pipeline.staged
        if any(graph is not traced.captured.graphs[0] for graph in traced.captured.graphs):
            raise ValueError(
                "PyTorch's pipeline needs microbatches of one shape: give a batch that is divisible by "
                "num_microbatches."
            )
        stages = forward_stages(joint)
        # Stages in the order of the exported graph; PyTorch computes ranks from their numbers, so they must agree.
        ranks = _ranks_of(traced.instructions, len(stages))
        positions = {node: position for position, node in enumerate(joint.primals)}
        primals = traced.captured.primals[0]
        tensors = {id(value): value for _, value in ownership.named()}
        sources = _find_sources(
            traced, [primals[positions[node]] for exported in stages for node in exported.primals], processes
        )
        # What each stage reads of the model. A tensor that a stage of another rank reads (a tied embedding) is sent
        # there once: PyTorch's runtime has no means to share a parameter.
        read = [{id(primals[positions[node]]) for node in exported.primals} & tensors.keys() for exported in stages]
        foreign_reads = _find_foreign_reads(ownership.owners or {}, tensors, read, ranks)
        metas = _infer_meta_results(
            stages, [[primals[positions[node]] for node in exported.primals] for exported in stages]
        )
    owners = ownership.owners or {}
    # A collective per tensor, in the same order on every rank: all ranks run this loop, whether or not they need the
    # value.
    for key in foreign_reads:
        value = broadcast_value(group, tensors[key].detach(), ValueLayout.of(tensors[key]), min(owners[key]))
        if group.rank not in owners[key]:
            tensors[key] = nn.Parameter(value, False) if isinstance(tensors[key], nn.Parameter) else value
    # Tensors that this rank owns and no stage reads (unused parameters) are held by the first stage.
    read[0] |= {key for key in tensors if ownership.owns(tensors[key])} - set().union(*read) if ranks[0] == 0 else set()
    exported_stages = []
    for number, stage in enumerate(stages):
        if ranks[number] != group.rank:
            continue
        tensors_of_stage = [sources[id(primals[positions[node]])] for node in stage.primals]
        # The model's signature, since later stages bind keyword arguments with it.
        signature = inspect.signature(ownership.model.forward)
        module = _Stage(
            stage=stage,
            number=number,
            sources=tensors_of_stage,
            signature=signature,
            last=number == len(stages) - 1,
            training=ownership.model.training,
        )
        _register_tensors(module, ownership.model, {key: tensors[key] for key in read[number]}, ownership)
        arguments: Any = metas[number - 1] if number else _require_tensors(traced.args)
        exported_stages.append(
            PipelineStage(
                module,
                number,
                len(stages),
                group.device,
                input_args=arguments,
                output_args=metas[number],
                group=group.of_mesh(),
            )
        )
    return exported_stages


def _require_tensors(args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Positional arguments of the first stage."""
    if not all(isinstance(value, torch.Tensor) for value in args):
        raise ValueError("PyTorch's pipeline takes tensors by position: give other arguments by keyword.")
    return tuple(_meta(value.shape, value.dtype, value.requires_grad) for value in args)


def _meta(shape: Sequence[int], dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta").requires_grad_(requires_grad)


def _ranks_of(instructions: Sequence[Sequence[Instruction]], count: int) -> list[int]:
    """The rank of each stage."""
    rank_of_stage = {
        instruction.action.stage: rank
        for rank, rank_instructions in enumerate(instructions)
        for instruction in rank_instructions
        if instruction.action.kind is ActionKind.FORWARD
    }
    ranks = [rank_of_stage.get(stage, -1) for stage in range(count)]
    # PyTorch asks each rank for stages rank, rank + n, …: `ScheduleInterleaved1F1B` has no other assignment.
    if ranks != [stage % len(instructions) for stage in range(count)]:
        raise ValueError(
            f"PyTorch's schedules expect stage i on rank i % {len(instructions)}, and these are on ranks {ranks}: "
            "compile with schedule='gpipe', '1f1b' or 'interleaved'."
        )
    return ranks


def _find_sources(traced: TracedStep, read: Sequence[Any], processes: ProcessPipeline) -> dict[int, _InputSource]:
    """Where each input of stages comes from, by its identity."""
    sources: dict[int, _InputSource] = {}
    # The first name of a tensor with several: tied weights stand once in the stage.
    for name, value in processes.ownership.named():
        sources.setdefault(id(value), _InputSource(tensor=name))
    signature = inspect.signature(processes.ownership.model.forward)
    arguments = dict(signature.bind_partial(*traced.args, **traced.kwargs).arguments)
    if traced.labels is not None:
        arguments["labels"] = traced.labels
    needed, twice = {id(value) for value in read}, set()
    for name, argument in arguments.items():
        for path, value in tree_flatten_with_path(argument)[0]:
            if isinstance(value, torch.Tensor):
                # A tensor that is a parameter and an argument at once, or two arguments: which of them the caller
                # changes in the next step cannot be seen.
                twice |= {id(value)} & needed & sources.keys()
                sources.setdefault(id(value), _InputSource(argument=name, path=tuple(path)))
    for value in read:
        source = sources.get(id(value))
        if not isinstance(value, torch.Tensor) or source is None or id(value) in twice:
            description = "sizes or numbers of the batch" if not isinstance(value, torch.Tensor) else "a tensor"
            where = f" ({source.argument}{keystr(source.path)})" if source is not None else ""
            raise ValueError(
                f"stages read {description}{where} that cannot be told from the arguments of the model: pass each "
                "tensor as one argument, once, and compile with dynamic=False."
            )
    return sources


def _find_foreign_reads(
    owners: Mapping[int, frozenset[int]],
    tensors: Mapping[int, torch.Tensor],
    read: Sequence[set[int]],
    ranks: Sequence[int],
) -> list[int]:
    """Tensors that a rank reads and does not own, since it computes again what another rank does."""
    return [
        key
        for key in tensors
        if any(key in names and rank not in owners[key] for names, rank in zip(read, ranks, strict=True))
    ]


def _infer_meta_results(
    stages: Sequence[ForwardStage], primals: Sequence[Sequence[torch.Tensor]]
) -> list[tuple[torch.Tensor, ...]]:
    """Results of each stage on the meta device, found by running its graph on fake tensors."""
    received: list[torch.Tensor] = []
    metas = []
    for stage, inputs in zip(stages, primals, strict=True):
        values = [*(node.meta["val"] for node in (*stage.received, *stage.primals))]
        # A stage's outputs require gradients where one of its inputs does. This is asked of autograd, not worked out:
        # the graph is run with fake tensors that carry the flags.
        flags = [value.requires_grad for value in (*received, *inputs)]
        mode = next(value.fake_mode for value in values if isinstance(value, torch.Tensor))  # type: ignore[attr-defined]
        with mode, torch.enable_grad():
            fakes = [
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                for value in values
            ]
            results = fx.Interpreter(stage.module).run(
                *(fake.requires_grad_(flag) for fake, flag in zip(fakes, flags, strict=True))
            )[: len(stage.sent)]
        # What leaves this stage enters the next, flags included.
        received = [_meta(value.shape, value.dtype, value.requires_grad) for value in results]
        metas.append(tuple(received))
    return metas


def _register_tensors(module: nn.Module, model: nn.Module, tensors: Mapping[int, torch.Tensor], ownership: Any) -> None:
    """Register tensors under the names that they have in the model."""
    # Buffers with `persistent=False` must stay out of the stage's `state_dict`, too.
    saved = model.state_dict(keep_vars=True).keys()
    for name, value in ownership.named():
        if id(value) not in tensors:
            continue
        parent, target = module, tensors[id(value)]
        *path, last = name.split(".")
        # Containers on the way are empty modules: `layers.0.weight` needs `layers` and `layers.0`, so that names are
        # those of the model.
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, _TensorHolder())
            parent = parent.get_submodule(part)
        if isinstance(target, nn.Parameter):
            parent.register_parameter(last, target)
        else:
            parent.register_buffer(last, target, persistent=name in saved)
    module.train(module.training)
