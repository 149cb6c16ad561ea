"""Rank plans: the transfers and texts that ranks compute once for each schedule of a pipeline, and compare.

Each rank works out the transfers of all ranks, checks all of them, and keeps its own. So a schedule that cannot run is
an error on every rank. Ranks compare texts of batches, graphs, orders and gradients. Equal code has equal text,
whatever else a process has compiled: nodes and symbolic sizes are numbered, addresses and numbers of devices are left
out. Shortened::

    rank 0      add_12 = add(primals_1, 1)     zeros_like(add_12, device=cuda:0)     (s27, s53)
    rank 1      add_7 = add(x, 1)              zeros_like(add_7, device=cuda:1)      (s5, s31)
    both texts  %1 = add(%0, 1)                %2 = zeros_like(%1, device=cuda:)     (s:0, s:1)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from roundpipe_fx.distributed.gathering import gathers_text, plan_gathers, refuse_escapes
from roundpipe_fx.distributed.ownership import Ownership
from roundpipe_fx.distributed.transfer_orders import RankTransfers, check_transfers, make_orders, transfers_of
from roundpipe_fx.ir.collectives import collective_name, group_of, is_collective
from roundpipe_fx.pipeline.batches.structures import iterate_leaves
from roundpipe_fx.pipeline.capture.captured_calls import CapturedCalls
from roundpipe_fx.pipeline.pipelined_graph import PipelinedGraph, merge_stage_graphs
from roundpipe_fx.pipeline.step.scheduled import Scheduled
from roundpipe_fx.runtime.pipeline_program import PipelineProgram, Source
from roundpipe_fx.runtime.prefetch import PrefetchStep

# What differs between ranks though they do the same: the number of the GPU, addresses in the text of functions, names
# of nodes, and symbols of sizes (``s27`` on one rank, ``s53`` on another).
_INDEX = re.compile(r"(cuda:|index=)\d+")
_NAME = re.compile(r"%(\w+)")
_PLACEHOLDER = re.compile(r"placeholder\[target=\w+\]")
_SYMBOL = re.compile(r"\b[su]\d+\b")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def batch_text(batch: Any) -> str:
    """Structure, shapes and values of a step's inputs, except what tensors hold."""
    return ", ".join(
        f"{text}: {_tensor(leaf) if isinstance(leaf, torch.Tensor) else _value(leaf)}"
        for _, text, leaf in iterate_leaves(batch)
    )


def shapes_text(batch: Any) -> str:
    """Shapes of the tensors among a step's inputs."""
    return ", ".join(_tensor(leaf) for _, _, leaf in iterate_leaves(batch) if isinstance(leaf, torch.Tensor))


def _tensor(leaf: torch.Tensor) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


def _value(leaf: Any) -> str:
    """A text without addresses."""
    return repr(leaf) if isinstance(leaf, (int, float, bool, str, type(None))) else _name(leaf)


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", type(value).__qualname__)


def graph_text(graph: PipelinedGraph) -> str:
    """The code of all stages."""
    symbols: dict[str, str] = {}
    return "\n".join(
        f"{kind}{stage}: {_module_text(module.module, symbols)}"
        # Both variants: the last microbatch has steps of its own with ``checkpoint="except_last"``.
        for variant in (graph.pipeline.main, graph.pipeline.last)
        for (kind, stage), module in variant.steps.modules.items()
    )


def _module_text(module: fx.GraphModule, symbols: dict[str, str]) -> str:
    """A stage's code, without the number of this rank's device, and with numbers for names.

    Which names are free when a node or a symbolic size is made may depend on what else the process has compiled.

    Args:
        symbols: what stands for symbolic sizes, by name; those of this stage are added.
    """
    # `%3` stands for the third node, whatever its name: `add_12` on one rank may be `add_7` on another.
    numbers = {node.name: f"%{number}" for number, node in enumerate(module.graph.nodes)}
    lines = [f"{_node_text(node, numbers)} {_kind(node.meta.get('val'))}" for node in module.graph.nodes]
    text = _ADDRESS.sub("", _INDEX.sub(r"\1", "\n".join(lines)))
    # Symbols get numbers in the order in which they are met, and keep them in all modules of the graph: `s27*s53`
    # becomes `s:0*s:1` on every rank.
    text = _SYMBOL.sub(lambda match: symbols.setdefault(match[0], f"{match[0][0]}:{len(symbols)}"), text)
    # A hash is enough to compare; the text is printed where ranks differ, and nobody reads 100,000 characters.
    return hashlib.sha256(text.encode()).hexdigest()[:16] if len(text) > 100_000 else text


def _node_text(node: fx.Node, numbers: Mapping[str, str]) -> str:
    if node.op == "output":
        return f"return {fx.map_arg(node.args, lambda argument: numbers[argument.name])}".replace("'", "")
    text = _PLACEHOLDER.sub("placeholder", node.format_node() or "")
    if is_collective(node.target):  # each stage has groups of its own
        for argument in node.args:
            if isinstance(argument, str):
                text = text.replace(f", {argument})", f", {len(group_of(node))} ranks)")
    return _NAME.sub(lambda match: numbers.get(match[1], match[0]), text)


def _kind(value: Any) -> str:
    return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}" if isinstance(value, torch.Tensor) else ""


def collectives_text(graph: PipelinedGraph) -> str:
    """The collectives of each stage action, in their order, with the shapes of their results."""
    return "\n".join(
        f"{kind}{stage}: {collective_name(node)} {_kind(node.meta.get('val'))}"
        for variant in (graph.pipeline.main, graph.pipeline.last)
        for (kind, stage), module in variant.steps.modules.items()
        for node in module.module.graph.nodes
        if is_collective(node.target)
    )


def gradients_text(
    programs: Sequence[PipelineProgram], primals: Sequence[Sequence[Any]], names: Mapping[int, str]
) -> str:
    """Which stage actions compute the gradients of the model's tensors.

    Args:
        primals: for each microbatch, the inputs.
        names: of the model's tensors, by identity.
    """
    parts: dict[str, set[str]] = {}
    # Microbatches of one shape have one program: it is compared once.
    once = {id(program): (program, arguments) for program, arguments in zip(programs, primals, strict=True)}
    for compared, inputs in once.values():
        makers = {number: f"{step[0]}{step[1]}" for step, code in compared.steps.items() for number in code.outputs}
        for gradient in compared.gradients:
            # Two tensors may be one parameter under two names; `names` gives the first.
            name = names.get(id(inputs[gradient.primal])) if gradient.source is not None else None
            if name is not None:
                parts.setdefault(name, set()).add(_origin(gradient.source, makers))
    return "\n".join(f"{name}: {sorted(origins)}" for name, origins in sorted(parts.items()))


def _origin(source: Source | None, makers: Mapping[int, str]) -> str:
    assert source is not None
    return makers[source.index] if source.kind == "value" else source.kind


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """Facts that are worked out once for a schedule. Texts are compared by the ranks.

    Attributes:
        graphs: the code of all stages.
        digest: of all ranks' orders.
        gradients: which stage actions compute those of the model's tensors.
        collectives: of each stage, in order.
        gathers: the parameters that are gathered from replicas, in order; ``None``: they are not sharded.
    """

    transfers: RankTransfers
    graphs: str
    digest: str
    gradients: str
    collectives: str
    gathers: str | None = None


class RankPlans:
    """The plans of a rank.

    Args:
        rank: its number in the pipeline.
        ownership: the model's tensors on it.
    """

    def __init__(self, rank: int, ownership: Ownership) -> None:
        self._rank, self._ownership = rank, ownership
        self._plans: dict[Any, RankPlan] = {}
        self._graphs: dict[int, tuple[PipelinedGraph, str]] = {}

    def of(self, captured: CapturedCalls, scheduled: Scheduled, kinds: Any) -> RankPlan:
        """The plan of a step, or of a part of it.

        Args:
            scheduled: what all ranks run.
            kinds: which kinds of actions the run consists of; ``None``: all.
        """
        instructions = scheduled.instructions
        # A program's id is enough: `_plans` is looked up by the programs that `captured` keeps alive.
        key = (kinds, *(id(program) for program in captured.programs))
        if key not in self._plans:
            transfers = transfers_of(instructions, captured.programs)
            orders = make_orders(instructions, transfers)
            reads = merge_stage_graphs([program.graph for program in captured.programs]).reads
            # Every rank checks all ranks' orders, so that all raise, and none waits for one that did not start.
            check_transfers(orders, reads, [transfer.late for transfer in transfers])
            names = {id(value): name for name, value in self._ownership.named()}
            gathers = None
            if self._ownership.shards.mesh is not None:
                refuse_escapes(instructions, captured.programs, captured.primals, names)
                ranks = range(len(instructions))
                gathers = "\n\n".join(gathers_text(self.gathers(captured, scheduled, rank), names) for rank in ranks)
            self._plans[key] = RankPlan(
                transfers=transfers[self._rank],
                graphs="\n\n".join(dict.fromkeys(self._text_of(graph) for graph in captured.graphs)),
                digest="\n".join(f"{rank}: {' '.join(map(str, order))}" for rank, order in enumerate(orders)),
                gradients=gradients_text(captured.programs, captured.primals, names),
                collectives="\n".join(map(collectives_text, captured.graphs)),
                gathers=gathers,
            )
        return self._plans[key]

    def gathers(self, captured: CapturedCalls, scheduled: Scheduled, rank: int) -> Mapping[int, PrefetchStep]:
        """Tensors that a rank gathers and drops, by position of the instruction."""
        sharded = {id(v) for _, v in self._ownership.named() if isinstance(v, nn.Parameter) and v.dim()}
        return plan_gathers(scheduled.instructions[rank], captured.primals, sharded, scheduled.kept[rank])

    def _text_of(self, graph: PipelinedGraph) -> str:
        # The graph is kept with its text, so that its id is not given to another.
        if id(graph) not in self._graphs:
            self._graphs[id(graph)] = graph, graph_text(graph)
        return self._graphs[id(graph)][1]
