"""Workspaces: bytes that an operator's kernel allocates and frees before it returns.

Convolutions reorder their operands, attention keeps sums for each thread, operands of another dtype are converted
first. None of this is visible in a graph. The bytes of a call come from the first source that applies::

    views, operations that only have an effect      none: they allocate nothing
    collectives                                     known: the bytes that they copy. Observed ones would differ
                                                    between processes, which must plan alike
    custom operators, those with bodies (scan)      observed as steps run: what they do may depend on data, or have
                                                    effects outside of this process
    PyTorch's operators, our log-sum-exp            measured: each distinct call is run once, alone, on synthetic
                                                    operands, and the allocator is watched
    those that cannot be measured                   a formula, for some CUDA kernels
    all others                                      0, marked as untried, and observed as steps run

A call cannot be measured if it might end the process (:mod:`roundpipe_fx.analysis.cost.operand_rules`), if there is no
memory to run it in, or if the device is not present: then formulas
(:mod:`roundpipe_fx.analysis.cost.workspace_formulas`) are all there is. What steps observe is kept in
:class:`roundpipe_fx.api.learned.Learned`, and so is the memory that compiled stages take beyond their plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost.operand_rules import RUN_ALONE, may_run_alone, reads_or_leaves_on_host
from roundpipe_fx.analysis.cost.probe import probe_alone, run_in_thread
from roundpipe_fx.analysis.cost.signature import signature_of
from roundpipe_fx.analysis.cost.workspace_formulas import LARGEST_GPU, Gpu, workspace_by_formula
from roundpipe_fx.ir.bodies import is_body
from roundpipe_fx.ir.collectives import copied_bytes, is_functional_collective
from roundpipe_fx.ir.joint_graph import Mark, has_side_effect, has_tag, input_nodes, is_view, tensor_values

aten = torch.ops.aten

COMPILED_STAGES = "compiled stages"
"""Name under which the bytes are learned that a step with compiled stages takes beyond its plan."""

_LEAST_CAPABILITY = 8
_OWN = ("aten", "prims", "streams")
_MEASURED = ("aten", "prims")
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
_FACTORIES = (
    aten.arange,
    aten.empty,
    aten.empty_strided,
    aten.eye,
    aten.full,
    aten.linspace,
    aten.ones,
    aten.rand,
    aten.randint,
    aten.randn,
    aten.scalar_tensor,
    aten.zeros,
)
"""Operators without operands that only fill the tensor that they allocate."""


def predict_workspaces(
    nodes: Iterable[fx.Node],
    device: torch.device,
    fused: bool = False,
    learned: Mapping[str, int] | None = None,
    present: bool = True,
) -> dict[fx.Node, int]:
    """Workspaces of nodes.

    PyTorch's own operators are measured, with several inputs where their workspace depends on values. Where that is not
    possible, formulas give those of some CUDA kernels. Nodes of a present device whose workspace is unknown are marked
    as untried.

    Args:
        nodes: operations on fake tensors; their ``meta`` is written.
        device: the device that kernels run on.
        fused: whether a compiler fuses pointwise operations, which then have no workspace.
        learned: measured bytes of operators that are custom or have bodies, and of compiled stages, by name.
        present: whether the device is there to measure on; if not, values may lie on any device.

    Returns:
        bytes by node; absent where a node has no workspace, or an unknown one.
    """
    gpu = _gpu(device, present)
    # A device that is not there cannot measure, and nothing was learned from steps on it.
    if not present:
        return {} if gpu is None else _by_formula(nodes, gpu)
    learned = learned or {}
    beyond_plan = learned.get(COMPILED_STAGES, 0) if fused else 0  # where in the step is not known
    by_signature: dict[str, list[fx.Node]] = {}
    workspaces: dict[fx.Node, int] = {}
    for node in nodes:
        if not _makes_something(node):
            continue
        node.meta.pop(Mark.UNTRIED, None)
        workspaces[node] = beyond_plan
        if is_functional_collective(node.target):
            workspaces[node] += copied_bytes(node)
        elif depends_on_data(node):
            # What steps have shown, since such an operator is not run on synthetic operands.
            workspaces[node] += learned.get(learned_name(node), 0)
        elif may_have_workspace(node, device) and not (fused and _is_pointwise(node)):
            # Fused pointwise operations are one kernel without temporaries. Equal calls are measured once.
            by_signature.setdefault(signature_of(node, _is_free_of_sizes(node)), []).append(node)
    # In a thread of its own, where no dispatch mode of the caller is active.
    measured = run_in_thread(lambda: {signature: _measure(same[0], device) for signature, same in by_signature.items()})
    for signature, same in by_signature.items():
        workspace = measured[signature]
        if workspace is None and gpu is not None:
            workspace = workspace_by_formula(same[0], gpu)
        for node in same:
            if workspace is None:
                node.meta[Mark.UNTRIED] = True
            workspaces[node] += learned.get(learned_name(node), 0) if workspace is None else workspace
    return {node: size for node, size in workspaces.items() if size}


def _by_formula(nodes: Iterable[fx.Node], gpu: Gpu) -> dict[fx.Node, int]:
    sizes = {node: workspace_by_formula(node, gpu) for node in nodes if _makes_something(node)}
    return {node: size for node, size in sizes.items() if size}


def _gpu(device: torch.device, present: bool) -> Gpu | None:
    """The device that formulas are evaluated for; ``None``: they are not about such a device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    # With warnings only, kernels that are not deterministic run nevertheless.
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled() and not warned
    if not present:
        return dataclasses.replace(LARGEST_GPU, deterministic=deterministic)
    properties = torch.cuda.get_device_properties(device)
    if properties.major < _LEAST_CAPABILITY:
        return None
    return Gpu(properties.multi_processor_count, properties.max_threads_per_multi_processor, deterministic)


def depends_on_data(node: fx.Node) -> bool:
    """Return whether the workspace of a node's operator depends on values, or is not known."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return any(is_body(source) for source in input_nodes(node))
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return (Mark.UNTRIED in node.meta or _is_unknown(target)) and not is_view(node)


def _is_unknown(target: torch._ops.OpOverload) -> bool:
    """Return whether nothing is known of an operator before it runs on real data."""
    if is_functional_collective(target) or target in RUN_ALONE:
        return False
    return target.namespace not in _OWN or target.overloadpacket is aten._grouped_mm


def learned_name(node: fx.Node) -> str:
    """The name under which the workspace of a node that depends on data is learned.

    The forward and the backward of an operator with bodies are often calls of the same operator, and one of them needs
    much more; they differ in their operands.
    """
    with_bodies = isinstance(node.target, torch._ops.HigherOrderOperator)
    return signature_of(node, single=True) if with_bodies else str(node.target)


def _makes_something(node: fx.Node) -> bool:
    return node.meta[Mark.BYTES] > 0 if Mark.BYTES in node.meta else not is_view(node)


def _is_pointwise(node: fx.Node) -> bool:
    return has_tag(node.target, torch.Tag.pointwise)


def _is_one_kernel(node: fx.Node) -> bool:
    """Test for a pointwise operation that runs as one kernel; a primitive without one is made of several."""
    return _is_pointwise(node) and node.target.namespace == "aten"  # type: ignore[union-attr]


def _is_free_of_sizes(node: fx.Node) -> bool:
    """Test for a pointwise operation whose workspace does not depend on sizes, because it converts no operand."""
    operands = [value for source in input_nodes(node) for value in tensor_values(source)]
    kinds = {value.dtype for value in operands}
    # A conjugated view is resolved into a copy first, which depends on sizes.
    if not _is_one_kernel(node) or len(kinds) != 1 or any(value.is_conj() or value.is_neg() for value in operands):
        return False
    # A conversion reads one dtype and writes another, without a temporary.
    if node.target is torch.ops.aten._to_copy.default:
        return True
    (kind,) = kinds
    compared = (
        torch.bool
        if kind.is_floating_point and not any(isinstance(argument, complex) for argument in node.args)
        else kind
    )
    return all(value.dtype in (kind, compared) for value in tensor_values(node))


def is_measured(node: fx.Node, device: torch.device) -> bool:
    """Return whether the workspace of a node is measured: it may be nonzero, and the operator may be run alone."""
    return may_have_workspace(node, device) and may_run_alone(node)


def may_have_workspace(node: fx.Node, device: torch.device) -> bool:
    """Return whether a PyTorch operator on a device may allocate memory besides its results."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or (target.namespace not in _MEASURED and target not in RUN_ALONE):
        return False
    operands = [value for source in input_nodes(node) for value in tensor_values(source)]
    if not tensor_values(node) or has_side_effect(node) or (not operands and target.overloadpacket in _FACTORIES):
        return False
    values = [*operands, *tensor_values(node)]
    if reads_or_leaves_on_host(target):  # single numbers
        values = [value for value in values if value.dim() > 0]
    if any(value.device.type != device.type for value in values):
        return False
    if device.type != "cpu":
        # CUDA kernels convert operands on the fly. The workspace of cuBLAS belongs to the stream and stays allocated.
        return target.overloadpacket not in _PRODUCTS and not _is_one_kernel(node)
    if target.overloadpacket in _PRODUCTS:
        # A matrix whose rows or columns are contiguous is read as it lies; others are copied first.
        return not all(value.dtype in (torch.float32, torch.float64) and _is_matrix(value) for value in operands)
    return not (_is_free_of_sizes(node) and not any(map(_is_number, node.args)))


def _is_number(argument: Any) -> bool:
    """Return whether an argument is a number or a symbolic one, which kernels convert to a tensor."""
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    return isinstance(value, int | float | complex | torch.SymInt | torch.SymFloat)


def _is_matrix(value: torch.Tensor) -> bool:
    """Return whether BLAS accepts the strides of a matrix."""
    return value.dim() < 2 or 1 in (value.stride(-1), value.stride(-2))


def _measure(node: fx.Node, device: torch.device) -> int | None:
    """Measured bytes; ``None`` if the operator is not run alone."""
    probe = probe_alone(node, device, _is_free_of_sizes(node)) if may_run_alone(node) else None
    return None if probe is None else probe.workspace
