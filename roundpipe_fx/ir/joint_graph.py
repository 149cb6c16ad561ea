"""The joint graph: one functional ATen FX graph that holds a model's forward and its backward.

This is what every pass reads and writes: AOTAutograd's joint graph (its inputs are *primals*, then *tangents*; its
outputs are the forward's outputs, then gradients), with the facts that a pass needs about it. Because the graph is
functional (no operation mutates its inputs), it can be cut anywhere.

Decisions of passes about a node are stored in ``node.meta`` under the keys of :class:`Mark`; codegen reads nothing
else. An inference graph is a joint graph without tangents and gradients.
"""

from __future__ import annotations

import copy
import enum
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.segment import Segment, StageCut
from roundpipe_fx.ir.unread_output import UnreadOutput
from roundpipe_fx.torch_private import gradient_inputs, graph_module, input_mutations, returned_outputs


class Phase(enum.StrEnum):
    """When a node runs in a training step."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    """In the backward, but independent of the incoming gradients, so it may start before they arrive."""
    BACKWARD = "backward"
    WEIGHT = "weight"
    """In the backward, and contributes to gradients of parameters only, so it may run later (split_backward)."""


class Mark:
    """Keys of ``node.meta`` that passes write. :data:`MARK_USES` says who writes and who reads each."""

    PHASE = "rpfx_phase"
    """:class:`Phase`."""
    BYTES = "rpfx_bytes"
    """Bytes of new storage the node allocates; views and aliases have 0."""
    WORKSPACE = "rpfx_workspace"
    """Bytes that the node's kernel allocates and frees before it returns; absent if there are none."""
    UNTRIED = "rpfx_untried"
    """True on a node whose operator may need a workspace and was not run alone to measure it; steps show it."""
    SECONDS = "rpfx_seconds"
    """Modelled seconds of running the node once."""
    FLOPS = "rpfx_flops"
    """Floating-point operations of the node."""
    MUST_SAVE = "rpfx_must_save"
    """Why the node must not run twice, as text; absent if it may."""
    MUST_RECOMPUTE = "rpfx_must_recompute"
    """Why the value must not be saved from forward to backward, as text; absent if it may."""
    ON_HOST = "rpfx_on_host"
    """True on a value that the user wants to be on the host between forward and backward, if it is saved at all."""
    SEGMENT = "rpfx_segment"
    """Index of the segment the node belongs to."""
    STAGE = "rpfx_stage"
    """Index of the stage the node belongs to."""
    ORIGIN = "rpfx_origin"
    """Name of the forward node that a recomputed node repeats."""
    REMADE = "rpfx_remade"
    """True on a value that is computed anew for its readers, though an equal one could serve them and others."""
    STRIDED = "rpfx_strided"
    """True on an incoming gradient whose strides matter even if it is missing and replaced by zeros."""
    OBSERVED_TANGENT = "rpfx_observed_tangent"
    """True on an incoming gradient that a step has passed although the model also returns a scalar."""
    LOSS_TIMES = "rpfx_loss_times"
    """On an incoming gradient, as multiples of the output's bytes: the peak of a loss outside the model, and the part
    of it that stays allocated until the backward is over."""
    REPLAYED = "rpfx_replayed"
    """True on a seeded operation that is recomputed from its saved generator state."""


@dataclass(frozen=True, kw_only=True)
class MarkUse:
    """Who writes and who reads a mark; the verifier and a test check that it is true.

    Attributes:
        written_by: passes that set the mark or change it; none: it is set before the first pass
            (``analysis/outside_loss.py``). On nodes that they add, those of :data:`ADDING_NODES` write it too.
        read_by: passes, and folders of the package, that read it.
        on_all_after: from these passes on every computing node has the mark; none: nodes may lack it.
    """

    written_by: frozenset[str]
    read_by: frozenset[str]
    on_all_after: frozenset[str] = frozenset()


def _use(written_by: str, read_by: str, on_all_after: str = "") -> MarkUse:
    return MarkUse(
        written_by=frozenset(written_by.split()),
        read_by=frozenset(read_by.split()),
        on_all_after=frozenset(on_all_after.split()),
    )


ADDING_NODES = frozenset(
    {
        "mean_losses",
        "row_slices",
        "online_softmax",
        "tiles",
        "apply_remat_schedule",
        "statistics",
        "fused_recompute",
        "early_recompute",
        "rng",
        "accumulate_gradients",
    }
)
"""Passes that add nodes to an annotated graph, with the marks of what these stand for."""

MARK_USES: Mapping[str, MarkUse] = {
    Mark.PHASE: _use(
        "annotate hoist_host_syncs tiles apply_remat_schedule fused_recompute early_recompute split_backward",
        "annotate apply_remat_schedule cse early_recompute fused_recompute hoist_host_syncs overlap_recompute "
        "recompute_regions roundpipe_slots segments split_backward statistics accumulate_gradients analysis codegen "
        "compiler report",
        "annotate",
    ),
    Mark.BYTES: _use("annotate row_slices", "early_recompute accumulate_gradients analysis compiler", "annotate"),
    Mark.WORKSPACE: _use("workspaces row_slices", "rng accumulate_gradients analysis codegen runtime compiler report"),
    Mark.UNTRIED: _use("workspaces row_slices", "analysis codegen compiler"),
    Mark.SECONDS: _use(
        "annotate fuse_costs row_slices",
        "fuse_costs segments accumulate_gradients analysis compiler planner report",
        "annotate",
    ),
    Mark.FLOPS: _use(
        "annotate row_slices",
        "recompute_regions segments accumulate_gradients analysis compiler planner",
        "annotate",
    ),
    Mark.MUST_SAVE: _use(
        "hoist_host_syncs recompute_regions", "recompute_regions unread_outputs analysis compiler remat"
    ),
    Mark.MUST_RECOMPUTE: _use("recompute_regions", "analysis compiler planner remat"),
    Mark.ON_HOST: _use("recompute_regions", "compiler"),
    Mark.SEGMENT: _use(
        "segments apply_remat_schedule",
        "apply_remat_schedule roundpipe_slots split_backward stages accumulate_gradients analysis compiler pipeline "
        "planner remat",
        "segments",
    ),
    Mark.STAGE: _use(
        "stages roundpipe_slots apply_remat_schedule",
        "early_recompute split_backward accumulate_gradients analysis codegen compiler remat report",
        "stages roundpipe_slots",
    ),
    Mark.ORIGIN: _use("apply_remat_schedule", "rng analysis codegen compiler report"),
    Mark.REMADE: _use("wide_values", "cse"),
    Mark.STRIDED: _use("strided_gradients", "api pipeline runtime"),
    Mark.OBSERVED_TANGENT: _use("", "analysis"),
    Mark.LOSS_TIMES: _use("", "analysis"),
    Mark.REPLAYED: _use("rng", "compiler report"),
}


@dataclass(frozen=True, kw_only=True)
class JointGraph:
    """A captured graph and what capture knows about it.

    Attributes:
        module: the functional ATen graph. Passes own it and rewrite it in place.
        num_forward_outputs: number of leading outputs that belong to the forward.
        labels: readable names of graph inputs, from the user's model (``transformer.h.0.ln.weight``) or call (``x``).
        parameters: graph inputs that are parameters or buffers of the model.
        mutated_inputs: graph inputs that the caller updates in place from an output after the forward (batch-norm
            statistics). In the backward their value differs from the one that the forward read.
        parts: for each gradient beyond those that were captured, the number of the input that it contributes to
            (tied_gradients, accumulate_gradients).
        segments: the segments in forward order, once the graph is cut into them (segments).
        cuts: the stages in the order in which they run, once segments are gathered in them (stages, roundpipe_slots).
        own_gradients: operations of the model whose gradients autograd would not find from the forward alone, as text.
        dropped: numbers of outputs that the caller is assumed to drop before the backward begins.
        unread: outputs that the caller is assumed not to read either, by number (unread_outputs).
    """

    module: fx.GraphModule
    num_forward_outputs: int
    labels: Mapping[fx.Node, str] = field(default_factory=dict)
    parameters: frozenset[fx.Node] = frozenset()
    mutated_inputs: frozenset[fx.Node] = frozenset()
    parts: tuple[int, ...] = ()
    segments: tuple[Segment, ...] = ()
    cuts: tuple[StageCut, ...] = ()
    own_gradients: tuple[str, ...] = ()
    dropped: frozenset[int] = frozenset()
    unread: Mapping[int, UnreadOutput] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        """The FX graph."""
        return self.module.graph

    @property
    def inputs(self) -> list[fx.Node]:
        """Graph inputs in order: primals, then tangents, then sums of gradients."""
        return self.graph.find_nodes(op="placeholder")

    @property
    def tangents(self) -> list[fx.Node]:
        """Graph inputs that carry incoming gradients."""
        return [node for node in self.inputs if str(node.target).startswith("tangents")]

    @property
    def expected_tangents(self) -> list[fx.Node]:
        """Incoming gradients that a step is expected to pass, or that are replaced by full zeros if missing.

        If a model returns a loss (a scalar that is differentiated), its other outputs are assumed not to be
        differentiated, unless steps have shown that they are.
        """
        tangents = self.tangents
        # Without a loss any output may be differentiated, so gradients of all are expected.
        losses = [node for node in tangents if is_tensor(node) and node.meta["val"].dim() == 0]
        known = {Mark.STRIDED, Mark.OBSERVED_TANGENT}
        return [node for node in tangents if node in losses or known & node.meta.keys()] if losses else tangents

    @property
    def primals(self) -> list[fx.Node]:
        """Graph inputs of the forward."""
        return [node for node in self.inputs if not str(node.target).startswith("tangents") and not is_sum(node)]

    @property
    def sums(self) -> list[fx.Node]:
        """Graph inputs that carry accumulated gradients of earlier microbatches (accumulate_gradients)."""
        return [node for node in self.inputs if is_sum(node)]

    @property
    def outputs(self) -> list[Any]:
        """All graph outputs (nodes, or constants and ``None``): the forward's, then the backward's."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def forward_outputs(self) -> list[Any]:
        """Outputs of the forward."""
        return self.outputs[: self.num_forward_outputs]

    @property
    def gradients(self) -> list[Any]:
        """Outputs of the backward: a gradient for each input, ``None`` where there is none, then further
        contributions.

        Tokens that order effects are inputs without a gradient; a backward that has effects returns them too.
        """
        return self.outputs[self.num_forward_outputs :]

    @property
    def gradient_owners(self) -> list[int | None]:
        """For each of :attr:`gradients` the number of its input; ``None`` where there is no gradient.

        The gradient of an input is the sum of all its contributions.
        """
        described = gradient_inputs(self.module, self.num_forward_outputs)
        return [*described[: len(self.gradients) - len(self.parts)], *self.parts]

    @property
    def updates(self) -> dict[int, int]:
        """Inputs that the caller updates in place: number of the input, by number of the output with its new value."""
        return input_mutations(self.module)

    @property
    def returned(self) -> list[Any]:
        """The forward's outputs that the model returns, without new values of inputs and what autograd needs
        besides."""
        return [self.outputs[position] for position in returned_outputs(self.module, self.num_forward_outputs)]

    @property
    def droppable(self) -> frozenset[int]:
        """Numbers of the outputs that a caller may drop before the backward: those beside a loss, if there is one."""
        losses = [node for node in self.tangents if is_tensor(node) and node.meta["val"].dim() == 0]
        positions = returned_outputs(self.module, self.num_forward_outputs) if losses else ()
        return frozenset(
            position
            for position in positions
            if position not in self.updates
            and isinstance(self.outputs[position], fx.Node)
            and viewed(self.outputs[position]).op != "placeholder"
            and any(value.dim() > 0 for value in tensor_values(self.outputs[position]))
        )

    def computed(self) -> Iterator[fx.Node]:
        """Nodes that compute something, in graph order.

        Returns:
            the nodes.
        """
        return (node for node in self.graph.nodes if node.op not in ("placeholder", "output"))

    def in_phase(self, phase: Phase) -> list[fx.Node]:
        """Computing nodes of one phase, in graph order.

        Args:
            phase: when in a training step they run.

        Returns:
            the nodes.
        """
        return [node for node in self.computed() if node.meta.get(Mark.PHASE) is phase]

    def find_tangent_dependents(self) -> set[fx.Node]:
        """Find the nodes that depend on incoming gradients.

        Returns:
            these, and the nodes that are computed from them.
        """
        dependent: set[fx.Node] = set(self.tangents)
        for node in self.computed():
            # Nodes are in topological order: one pass over them finds everything that depends on a gradient.
            if any(source in dependent for source in input_nodes(node)):
                dependent.add(node)
        return dependent

    def copy(self) -> JointGraph:
        """Copy the graph, so that it can be rewritten independently.

        Returns:
            the copy; nodes' annotations are copied too.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op != "output":
                copies[node] = copy_node(graph, node, copies.__getitem__)
        output = graph.output(fx.node.map_arg(self.graph.output_node().args[0], copies.__getitem__))
        output.meta = dict(self.graph.output_node().meta)
        return JointGraph(
            module=graph_module(self.module, graph),
            num_forward_outputs=self.num_forward_outputs,
            labels={copies[node]: label for node, label in self.labels.items()},
            parameters=frozenset(copies[node] for node in self.parameters),
            mutated_inputs=frozenset(copies[node] for node in self.mutated_inputs),
            parts=self.parts,
            segments=self.segments,
            cuts=self.cuts,
            own_gradients=self.own_gradients,
            dropped=self.dropped,
            unread=self.unread,
        )

    def drop_unread(self) -> None:
        """Erase nodes without users, except those that draw random numbers or have another effect."""
        # In reverse, so that a node whose only reader was erased is erased, too.
        for node in reversed(self.graph.nodes):
            if not node.users and not has_side_effect(node) and not is_seeded(node):
                self.graph.erase_node(node)

    def label(self, node: fx.Node) -> str:
        """A readable name: the model's name for a graph input, else the node's name.

        Returns:
            the name.
        """
        return self.labels.get(node, node.name)


def input_nodes(node: fx.Node) -> list[fx.Node]:
    """Nodes that ``node`` reads, without repetition, in argument order."""
    return node.all_input_nodes


def tensor_values(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that ``node`` produces, flattened; empty for symbolic scalars and ``None``."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else ()


def storages(node: fx.Node) -> list[int]:
    # Tuples nest: recurrent layers return (output, (hidden, cell)).
    """Identities of the storages of a node's values; equal identities mean aliases."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):  # nearly always, and asked for more often than anything else
        return [value.untyped_storage()._cdata] if value.layout is torch.strided else []
    return [value.untyped_storage()._cdata for value in tensor_values(node) if value.layout is torch.strided]


def is_tensor(node: fx.Node) -> bool:
    """Return whether ``node`` produces exactly one tensor (not a tuple of them)."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_sum(node: fx.Node) -> bool:
    """Return whether ``node`` is a graph input that carries an accumulated gradient of earlier microbatches."""
    return node.op == "placeholder" and str(node.target).startswith("sums")


def is_symbolic_scalar(node: fx.Node) -> bool:
    """Return whether ``node`` produces a number that is known only at run time (SymInt, SymFloat, SymBool)."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_mask(node: fx.Node) -> bool:
    """Return whether ``node`` produces a boolean or byte tensor, whose use as an index is a host synchronization."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def is_view(node: fx.Node) -> bool:
    """Return whether all values of ``node`` share storages of its inputs, so that recomputing it costs nothing.

    An item of a tuple (``getitem``) is a view only if the tuple is one (``split``).
    """
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        (source,) = input_nodes(node)
        return is_view(source)
    node_storages = storages(node)
    if len(node_storages) == 1:  # nearly always
        return any(node_storages[0] in storages(source) for source in node.all_input_nodes)
    # A view of several storages (``split``) must take each of them from one of its sources.
    return bool(node_storages) and set(node_storages).issubset(
        storage for source in node.all_input_nodes for storage in storages(source)
    )


def viewed(node: fx.Node) -> fx.Node:
    """The base of a view, through any number of views; the node itself if it is not a view."""
    while is_view(node):
        node_storages = set(storages(node))
        # A view may read sizes besides the tensor; the source that has the memory is followed.
        sources = [source for source in input_nodes(node) if tensor_values(source)]
        node = next((source for source in sources if node_storages & set(storages(source))), sources[0])
    return node


def readers_behind_views(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes that read a value, directly or through views, one of them the graph's output; once for each way."""
    for user in node.users:
        if is_view(user):
            yield from readers_behind_views(user)
        else:
            yield user


def is_seeded(node: fx.Node) -> bool:
    """Return whether the node draws random numbers from a generator. Attention without dropout draws none."""
    if not has_tag(node.target, torch.Tag.nondeterministic_seeded):
        # Attention draws numbers only if its dropout is not zero.
        return False
    position = _dropout_position(node.target)
    if position is None:
        return True
    probability = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(probability != 0.0)


@functools.cache
def _dropout_position(target: Any) -> int | None:
    """The position of an attention operator's probability of dropout."""
    names = [argument.name for argument in target._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


@functools.cache
def has_tag(target: Any, tag: torch.Tag) -> bool:
    """Return whether a node's target is an operator with a tag. Cached, because reading tags is slow."""
    return isinstance(target, torch._ops.OpOverload) and tag in target.tags


def has_side_effect(node: fx.Node) -> bool:
    """Test for an effect besides a node's value (assertions, printing). Drawing random numbers does not count.

    FX's own check looks at a node's arguments too, which is slow; in a functional graph the operator decides.
    """
    if node.op in ("placeholder", "output"):
        return True
    return node.op == "call_function" and _target_has_side_effect(node.target, node)


_side_effects: dict[Any, bool] = {}


def _target_has_side_effect(target: Any, example: fx.Node) -> bool:
    if target not in _side_effects:
        _side_effects[target] = example.is_impure(impure_random=False)
    return _side_effects[target]


def node_outputs(node: fx.Node) -> list[fx.Node]:
    """The nodes of the tensors of ``node``: itself, or its ``getitem`` users if it produces a tuple."""
    if isinstance(node.meta.get("val"), (tuple, list)):
        return [user for user in node.users if user.target is operator.getitem]
    return [node]


def maker_of(value: fx.Node) -> fx.Node:
    """The operation that a value is a result of: itself, or the one that produces the tuple that it is an item of."""
    source = value.args[0] if value.target is operator.getitem else value
    assert isinstance(source, fx.Node)
    return source


def module_path(node: fx.Node, clean: Callable[[str], str]) -> str:
    """Path of the module in whose ``forward`` the node was traced; ``""`` if it is unknown or the root.

    Args:
        node: a forward or backward node.
        clean: turns the tracer's spelling of a path into the user's (``layers.0.attention``).
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        return clean(path)
    return ""


def module_paths(node: fx.Node, clean: Callable[[str], str]) -> list[str]:
    """Paths of all modules in whose ``forward`` the node was traced, outermost first."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [clean(path) for path, _ in stack.values()]


def saved_values(joint: JointGraph) -> list[fx.Node]:
    """Values that the forward must pass to the backward, in order: forward values and graph inputs that it reads."""
    # A value is saved if the forward has it (an input counts), and something later reads it, or it is returned as a
    # gradient itself.
    later = (Phase.RECOMPUTE, Phase.BACKWARD, Phase.WEIGHT)
    tangents = set(joint.tangents)
    returned = {gradient for gradient in joint.gradients if isinstance(gradient, fx.Node)}
    return [
        node
        for node in joint.graph.nodes
        if node.op != "output"
        and node not in tangents
        and not is_sum(node)
        and node.meta.get(Mark.PHASE, Phase.FORWARD) is Phase.FORWARD
        and (node in returned or any(user.meta.get(Mark.PHASE) in later for user in node.users))
    ]


def copy_node(graph: fx.Graph, node: fx.Node, find_copy: Callable[[fx.Node], Any]) -> fx.Node:
    """Copy a node to the graph's insertion point, as ``graph.node_copy(node, find_copy)`` does.

    ``create_node`` looks through all arguments for raw symbolic numbers, to warn of them; that takes as long as making
    the node, and the node that is copied has been looked at. So arguments are set afterwards.

    Args:
        graph: where the copy is made.
        node: it may be of another graph.
        find_copy: the copy of a node that is read.
    """
    copied = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    if node.args:
        copied.args = fx.node.map_arg(node.args, find_copy)
    if node.kwargs:
        copied.kwargs = fx.node.map_arg(node.kwargs, find_copy)
    copied.meta = copy.copy(node.meta)
    return copied
