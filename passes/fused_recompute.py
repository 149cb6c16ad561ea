"""fused_recompute: recompute values inside the kernels that read them, instead of saving them for the backward.

Runs in compiled stages, after recomputation has been written into the graph. A forward value that the backward reads is
replaced by operations beside its readers, if these start from narrower values, or from such as are handed over anyway::

    forward                                    backward
    x ─▶ gelu ─▶ y ─▶ mm                       y, x ─▶ gelu_backward, mm

    x ─▶ gelu ─▶ y ─▶ mm                       x ─▶ gelu ─▶ y ─▶ gelu_backward, mm

Which values are handed over is a minimum cut, as in PyTorch's partitioner (min-cut rematerialization; its weights are
others): one vertex for "the backward reads v", one for "v is repeated there". A repeated value costs its bytes in every
module that repeats it, so sums along a chain of residual connections are handed over instead of being added up from the
first layer again in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from roundpipe_fx.analysis.cost import count_flops, tensor_bytes
from roundpipe_fx.analysis.fusion import dropped_operands, is_computed_in_kernel, is_fusible, is_virtual
from roundpipe_fx.analysis.minimum_cut import SINK, SOURCE, UNCUTTABLE, Arc, choose_unit, minimum_cut
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    input_nodes,
    is_view,
    readers_behind_views,
    tensor_values,
    viewed,
)

aten = torch.ops.aten

_REPEATED = 32
"""Price of a saved byte, in bytes of repeated results."""
_WRITTEN = 2
"""Factor on the price of a value that takes no memory unless it is saved: the forward writes it while what it is
computed from is still there.
"""
_RETURNED = 2
"""Divisor of the price of a value that the caller holds: it exists anyway."""
_ROUNDS = 4
"""Minimum cuts, at most."""

_Modules = dict[fx.Node, set[tuple[int, Phase]]]
"""For a value, stage and phase of modules."""


def recompute_in_readers(joint: JointGraph, whole_backward: bool, adds_kernels: bool) -> JointGraph:
    """Repeat fusible operations of the forward in the backward modules that read their results.

    Args:
        joint: a graph with recomputation written into it; it is rewritten.
        whole_backward: whether nothing runs before incoming gradients arrive, so that all that is recomputed joins the
            backward module of its stage.
        adds_kernels: whether bytes may be saved at the price of kernels that only repeat a value.

    Returns:
        The same graph.
    """
    if whole_backward:
        for node in joint.in_phase(Phase.RECOMPUTE):
            node.meta[Mark.PHASE] = Phase.BACKWARD
    repeated = _repeated(joint, adds_kernels)
    if repeated:
        _repeat(joint, repeated)
        joint.drop_unread()
    return joint


def _repeated(joint: JointGraph, adds_kernels: bool) -> set[fx.Node]:
    """Forward operations that are repeated in the backward."""
    needed: _Modules = {}
    for node in _later(joint):
        for base in _bases(node):
            needed.setdefault(base, set()).add((node.meta[Mark.STAGE], node.meta[Mark.PHASE]))
    saving: dict[fx.Node, int] = {}
    repeating: dict[fx.Node, int] = {}
    outputs = enumerate(joint.forward_outputs)
    returned = {
        viewed(node) for position, node in outputs if isinstance(node, fx.Node) and position not in joint.dropped
    }
    pending = list(needed)
    while pending:
        # What the backward reads, and what that could be repeated from, back to values that no kernel computes on the
        # way.
        value = pending.pop()
        if value in saving:
            continue
        size = tensor_bytes(tensor_values(value))
        # An output is written anyway, so keeping it costs half; a value that would otherwise stay inside a kernel has
        # to be written as well as read.
        saving[value] = size * _REPEATED // (_RETURNED if value in returned else 1)
        saving[value] *= _WRITTEN if is_virtual(value, Phase.FORWARD) else 1
        if not is_fusible(value) or not joint.mutated_inputs.isdisjoint(map(viewed, _operands(value))):
            continue
        if adds_kernels or not _needs_kernel(value):
            repeating[value] = size
            pending += _bases(value)
    if not repeating.keys() & needed.keys():
        return set()
    times = dict.fromkeys(repeating, 1)
    for _ in range(_ROUNDS):
        repeated = _cheapest(needed, saving, {value: size * times[value] for value, size in repeating.items()})
        # In how many modules a value is repeated follows from what is saved, so a cut is corrected by the last one.
        more = {value: len(where) for value, where in _modules(repeated, needed).items() if len(where) > times[value]}
        if not more:
            break
        times |= more
    return repeated


def _needs_kernel(value: fx.Node) -> bool:
    """Test for a value that the backward would repeat in a kernel that does nothing else.

    An operation without a kernel around it reads the value from memory. A kernel that starts from the same values can
    write it in passing, unless it waits for that operation, as it does after a convolution::

        y, grad ─▶ mm ─▶ gradient of w           y, w, grad ─▶ convolution_backward ─▶ gradients of w and y
        x, … ─▶ gelu_backward, writes y          x, gradient of y ─▶ threshold_backward

    Kernels of other stages count as well: a cut between the two costs a kernel, not the bytes of ``y``.
    """
    sources, pending = {value}, [value]
    while pending:
        bases = set(_bases(pending.pop())) - sources
        sources |= bases
        pending += filter(is_fusible, bases)
    kernels = [reader for source in sources for reader in _backward_readers(source) if is_computed_in_kernel(reader)]
    return any(
        all(_waits_for(kernel, reader) for kernel in kernels)
        for reader in _backward_readers(value)
        if count_flops(reader)
    )


def _backward_readers(value: fx.Node) -> list[fx.Node]:
    """Operations of the backward that read a value, directly or through views."""
    return [reader for reader in readers_behind_views(value) if reader.meta.get(Mark.PHASE) is Phase.BACKWARD]


def _waits_for(node: fx.Node, operation: fx.Node) -> bool:
    """Test for an operation that another one's result is computed from."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        if current is operation:
            return True
        before = {source for source in current.all_input_nodes if not source < operation} - seen
        seen |= before
        pending += before
    return False


def _cheapest(needed: _Modules, saving: Mapping[fx.Node, int], repeating: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Operations that are repeated where saving and repeating cost the least together.

    Args:
        needed: values that the backward reads.
        saving: price of saving a value.
        repeating: price of repeating it, of those that can be repeated.
    """
    unit = choose_unit([*saving.values(), *repeating.values()])
    # Two vertices for each value: read by the backward, and repeated there.
    read = {value: 2 + 2 * index for index, value in enumerate(saving)}
    arcs: list[Arc] = []
    for value, price in saving.items():
        reads, repeats = read[value], read[value] + 1
        if value in needed:
            arcs.append((SOURCE, reads, UNCUTTABLE))
        barred = Mark.MUST_RECOMPUTE in value.meta and value not in needed
        arcs.append((reads, repeats, UNCUTTABLE if barred else price // unit))
        if value not in repeating:
            arcs.append((repeats, SINK, UNCUTTABLE))
            continue
        arcs.append((repeats, SINK, max(repeating[value] // unit, 1)))
        arcs += [(repeats, read[base], UNCUTTABLE) for base in _bases(value)]
    _, reached = minimum_cut(arcs, 2 + 2 * len(saving))
    return {value for value in repeating if read[value] + 1 in reached}


def _modules(repeated: set[fx.Node], needed: _Modules) -> _Modules:
    """The modules of the backward in which each operation is repeated."""
    modules = {value: set(needed.get(value, ())) for value in repeated}
    # Readers before what they read: a module that repeats a value repeats what that starts from.
    for value in sorted(repeated, reverse=True):
        for base in repeated.intersection(_bases(value)):
            modules[base] |= modules[value]
    return modules


def _later(joint: JointGraph) -> Iterable[fx.Node]:
    return (node for node in joint.computed() if node.meta[Mark.PHASE] is not Phase.FORWARD)


def _operands(node: fx.Node) -> list[fx.Node]:
    dropped = dropped_operands(node)
    return input_nodes(node) if dropped is None else [dropped[0], dropped[1]]


def _bases(node: fx.Node) -> list[fx.Node]:
    """Forward values that a node reads, behind views."""
    bases = (viewed(source) for source in _operands(node))
    return list(dict.fromkeys(base for base in bases if base.meta.get(Mark.PHASE) is Phase.FORWARD))


def _repeat(joint: JointGraph, repeated: set[fx.Node]) -> None:
    """Let the backward read copies, which stand before their first reader in each of its modules."""
    copies: dict[tuple[fx.Node, int, Phase], fx.Node] = {}

    # One copy for each stage and phase that reads it; operands are copied first.
    def copy_of(source: fx.Node, reader: fx.Node) -> fx.Node:
        if source.meta.get(Mark.PHASE) is not Phase.FORWARD or not (source in repeated or is_view(source)):
            return source
        key = source, reader.meta[Mark.STAGE], reader.meta[Mark.PHASE]
        if key not in copies:
            operands = {operand: copy_of(operand, reader) for operand in _operands(source)}
            copy = _copied(source, operands, reader)
            copy.meta = {name: value for name, value in source.meta.items() if name != "unbacked_bindings"}
            copy.meta[Mark.ORIGIN] = source.name
            copy.meta[Mark.SECONDS] = 0.0  # of the kernel that reads it
            for mark in (Mark.PHASE, Mark.STAGE, Mark.SEGMENT):
                copy.meta[mark] = reader.meta[mark]
            copies[key] = copy
        return copies[key]

    for node in list(_later(joint)):
        for source in input_nodes(node):
            if viewed(source) in repeated:
                node.replace_input_with(source, copy_of(source, node))


def _copied(source: fx.Node, operands: Mapping[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
    graph, dropped = before.graph, dropped_operands(source)
    with graph.inserting_before(before):
        if dropped is None:
            return graph.node_copy(source, operands.__getitem__)
        value, mask, factor = dropped
        return graph.call_function(aten.native_dropout_backward.default, (operands[value], operands[mask], factor))
