"""Fused memory: an estimate of what a stage module allocates once its compiler has fused it.

The code that Inductor writes says it exactly (:mod:`roundpipe_fx.analysis.wrapper_memory`), but has to be written;
operations one by one overestimate it by values that never leave a kernel and by results that overwrite their operands.
Here both are found in the graph, so that many plans can be compared by bytes that are nearly those of their code::

    scores ──▶ tanh ──▶ softmax's gradient ──▶ product       allocations
    one by one: tanh, the gradient                           2 × scores
    fused: tanh is virtual; the gradient overwrites scores,
    which nothing reads later                                0

A value is *virtual*, and takes no memory, if every reader is in the kernel of a later value that waits for no product
of it. What a kernel reads is then what its virtual operands read. Orders of kernels that Inductor changes, and kernels
that it does not fuse, are what the estimate misses.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from roundpipe_fx.analysis.cost.model import tensor_bytes
from roundpipe_fx.analysis.fusion import COSTLY_ON_CPUS, WRITTEN_IN_KERNELS, is_computed_in_kernel, is_on_cpu
from roundpipe_fx.analysis.program_events import FollowedModule, FollowedOperation
from roundpipe_fx.analysis.storage_ids import OUTSIDE, StorageIds
from roundpipe_fx.codegen import StageModule
from roundpipe_fx.ir.joint_graph import Mark, Phase, is_tensor, is_view, maker_of, readers_behind_views, tensor_values
from roundpipe_fx.torch_private import size_hint

aten = torch.ops.aten


def follow_fused(call: StageModule, storages: Sequence[Sequence[int]], dying: Collection[int] = ()) -> FollowedModule:
    """Follow a stage module as if its operations were fused.

    Args:
        storages: for each input, its storages, numbered in the order in which they come in.
        dying: positions of inputs that nothing refers to but the call.
    """
    graph = call.module.graph
    virtual = find_virtual(graph)
    numbers = StorageIds()
    incoming = 1 + max((storage for leaves in storages for storage in leaves), default=OUTSIDE)
    for _ in range(incoming):
        numbers.allocate_bytes(0)
    nodes = [*graph.nodes]
    inputs = graph.find_nodes(op="placeholder")
    # First with memory for each result; then, with all last readers known, results take over what dies.
    reads: dict[fx.Node, list[int]] = {}
    allocations: dict[fx.Node, list[int]] = {}
    last: dict[int, fx.Node] = {}
    sizes: dict[int, int] = {}
    for node, leaves in zip(inputs, storages, strict=True):
        numbers.assign(node, list(leaves))
        sizes.update(zip(leaves, _count_bytes(node), strict=False))
    for node in nodes:
        if node.op == "placeholder":
            continue
        reads[node] = numbers.reads(node)
        if node in virtual:
            numbers.assign(node, reads[node])
            continue
        last.update(dict.fromkeys(reads[node], node))
        if node.op != "output":
            allocations[node] = _make(node, numbers)
            sizes.update((storage, numbers.sizes[storage]) for storage in allocations[node])
    # Only a backward's inputs are given away: the forward's belong to the user.
    free = set() if call.phase is Phase.FORWARD else {s for p in dying for s in storages[p] if len(storages[p]) == 1}
    free.update(range(incoming, len(numbers.sizes)))
    dead = {
        node: [storage for storage in reads[node] if last[storage] is node and storage in free]
        for node in allocations
        if is_computed_in_kernel(node)
    }
    overwritten = _overwrite(allocations, dead, sizes)

    def final(storage: int) -> int:
        return overwritten.get(storage, storage)

    operations = [FollowedOperation(-1, [], [], 0)]
    for position, node in enumerate(nodes):
        if node in allocations:
            allocated = [storage for storage in allocations[node] if storage not in overwritten]
            workspace = 0 if node in dead else node.meta.get(Mark.WORKSPACE, 0)
            read = list(dict.fromkeys(map(final, reads[node])))
            operations.append(FollowedOperation(position, read, allocated, workspace))
    returned = graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    leaves_of = [[final(s) for s in numbers.get(item)] if isinstance(item, fx.Node) else [] for item in returned]
    return FollowedModule(operations, numbers.sizes[incoming:], leaves_of)


def _overwrite(
    allocations: Mapping[fx.Node, Sequence[int]], dead: Mapping[fx.Node, Sequence[int]], sizes: Mapping[int, int]
) -> dict[int, int]:
    """Choose the results that are written over an operand of the same size; by storage, that of the operand.

    Args:
        allocations: by node, in order, the storages of its results.
        dead: by node that is computed in a kernel, the storages that it reads last.
        sizes: bytes of storages.
    """
    overwritten: dict[int, int] = {}
    for node, operands in dead.items():
        candidates = list(operands)
        for storage in allocations[node]:
            over = next((old for old in candidates if sizes.get(old) == sizes[storage]), None)
            if over is not None:
                candidates.remove(over)
                # The operand may itself have been written over another one.
                overwritten[storage] = overwritten.get(over, over)
    return overwritten


def find_virtual(graph: fx.Graph) -> set[fx.Node]:
    """Find the values of a stage module that no kernel writes to memory, and views of these.

    :func:`~roundpipe_fx.analysis.fusion.is_virtual` is for joint graphs, and only for values that may be repeated.

    Args:
        graph: of a stage module.
    """
    number = {node: position for position, node in enumerate(graph.nodes)}
    # Bits stand for nodes: all that a node is computed from, and the part of it that is read by another kernel between,
    # or by another loop, which a reduction ends.
    ancestors: dict[fx.Node, int] = {}
    before_kernel: dict[fx.Node, int] = {}
    before_loop: dict[fx.Node, int] = {}
    virtual: set[fx.Node] = set()
    for node in graph.nodes:
        everything = kernel = loop = 0
        for operand in node.all_input_nodes:
            everything |= ancestors[operand] | 1 << number[operand]
            kernel |= before_kernel[operand] if _is_fused(operand) else ancestors[operand]
            loop |= before_loop[operand] if _is_in_same_loop(operand) else ancestors[operand]
        ancestors[node], before_kernel[node], before_loop[node] = everything, kernel, loop
    costly: set[fx.Node] = set()
    for node in graph.nodes:
        if is_view(node):
            # A view of a virtual value is an index into what the kernel computes.
            for known in (virtual, costly):
                if node.all_input_nodes[0] in known:
                    known.add(node)
            continue
        if not _is_pointwise(node):
            continue
        if node.target in COSTLY_ON_CPUS or any(operand in costly for operand in node.all_input_nodes):
            costly.add(node)
        readers, bit = [*readers_behind_views(node)], number[node]
        in_kernels = all(_is_read_in_kernel(reader) and not before_kernel[reader] >> bit & 1 for reader in readers)
        in_loops = any(before_loop[reader] >> bit & 1 or reader.target in WRITTEN_IN_KERNELS for reader in readers)
        if in_kernels and not (in_loops and node in costly and is_on_cpu(node)):
            virtual.add(node)
            continue
        costly.discard(node)  # it is read from memory
    return virtual


def _is_read_in_kernel(reader: fx.Node) -> bool:
    return reader.op != "output" and is_computed_in_kernel(reader)


def _is_fused(node: fx.Node) -> bool:
    return node.op == "placeholder" or is_view(node) or is_computed_in_kernel(node)


def _is_in_same_loop(node: fx.Node) -> bool:
    return node.op == "placeholder" or is_view(node) or _is_pointwise(node)


def _is_pointwise(node: fx.Node) -> bool:
    """Test for a value computed in a kernel that is no reduction: those are made once, before their readers run."""
    if node.op != "call_function" or not is_computed_in_kernel(node):
        return False
    if not is_tensor(node):  # several results: each is an item
        return True
    maker = maker_of(node)
    operands = [value for operand in maker.all_input_nodes for value in tensor_values(operand)]
    return all(_count_elements(operand) <= _count_elements(node.meta["val"]) for operand in operands)


def _count_elements(value: torch.Tensor) -> int:
    return math.prod(map(size_hint, value.shape))


def _count_bytes(node: fx.Node) -> list[int]:
    """Bytes of a value's storages."""
    return [tensor_bytes([value]) for value in tensor_values(node)]


def _make(node: fx.Node, numbers: StorageIds) -> list[int]:
    """Number what a node allocates: an item of several results that a kernel computes, as a result of its own."""
    if node.target is operator.getitem and is_computed_in_kernel(node) and not is_view(node):
        numbers.assign(node, [numbers.allocate(value) for value in tensor_values(node)])
        return numbers.get(node)
    return numbers.follow(node)
