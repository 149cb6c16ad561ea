"""workspace: bytes that an operator's kernel allocates for itself and frees before it returns.

Convolutions reorder their operands, attention keeps sums for each thread, an operand of another type is converted
first. None of this is in a graph, and all of it is in memory. It is measured: the operator is run once, alone, on
made-up operands, and what the allocator hands out meanwhile is noted. Operators that do the same on the same shapes
are run once. Operators that are not PyTorch's own are not run for this: what they do may depend on data, or reach
beyond this process. Steps show what they need (:class:`roundpipe_fx.api.learned.Learned`), and what stages hold
beyond their plan that a compiler has ordered and fused as it likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost.signature import signature_of
from roundpipe_fx.analysis.cost.trial import run_apart, try_alone
from roundpipe_fx.ir.joint_graph import Mark, has_side_effect, has_tag, input_nodes, is_view, tensor_values

__all__ = ["COMPILED_STAGES", "depends_on_data", "is_measured", "workspaces_of"]

aten = torch.ops.aten

COMPILED_STAGES = "compiled stages"
"""Under this name it is learned what a step holds at most beyond its plan because a compiler made its stages."""

_OWN = ("aten", "prims", "streams")
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
"""Of the operators without operands, those that fill the one tensor that they allocate."""


def workspaces_of(
    nodes: Iterable[fx.Node], device: torch.device, fused: bool = False, learned: Mapping[str, int] | None = None
) -> dict[fx.Node, int]:
    """Bytes that kernels need beside their operands and results, by node; absent where they need none.

    PyTorch's own operators are measured; where the numbers matter that they are given, the most that several need.

    Args:
        nodes: operations on fake tensors.
        device: where to measure.
        fused: a compiler makes the stages: pointwise operations become kernels that need none.
        learned: what other operators, and compiled stages, have been seen to need, by name.
    """
    learned = learned or {}
    beyond_plan = learned.get(COMPILED_STAGES, 0) if fused else 0  # nobody knows where in the step
    asked: dict[str, list[fx.Node]] = {}
    found: dict[fx.Node, int] = {}
    for node in nodes:
        if not _makes_something(node):
            continue
        found[node] = beyond_plan
        if depends_on_data(node):
            found[node] += learned.get(str(node.target), 0)
        elif is_measured(node, device) and not (fused and _is_pointwise(node)):
            asked.setdefault(signature_of(node, _is_free_of_sizes(node)), []).append(node)
    measured = run_apart(lambda: {signature: _measure(same[0], device) for signature, same in asked.items()})
    for signature, same in asked.items():
        for node in same:
            found[node] += measured[signature]
    return {node: size for node, size in found.items() if size}


def depends_on_data(node: fx.Node) -> bool:
    """Whether a node calls an operator that needs what the numbers say that it is given, or nobody knows what."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return (target.namespace not in _OWN or target.overloadpacket is aten._grouped_mm) and not is_view(node)


def _makes_something(node: fx.Node) -> bool:
    return node.meta[Mark.BYTES] > 0 if Mark.BYTES in node.meta else not is_view(node)


def _is_pointwise(node: fx.Node) -> bool:
    return has_tag(node.target, torch.Tag.pointwise)


def _is_free_of_sizes(node: fx.Node) -> bool:
    """Whether a pointwise operation copies no operand: beside numbers that it is given it needs nothing."""
    operands = [value for source in input_nodes(node) for value in tensor_values(source)]
    kinds = {value.dtype for value in operands}
    if not _is_pointwise(node) or len(kinds) != 1 or any(value.is_conj() or value.is_neg() for value in operands):
        return False
    if node.target is torch.ops.aten._to_copy.default:
        return True
    (kind,) = kinds
    compared = torch.bool if kind.is_floating_point and not any(isinstance(own, complex) for own in node.args) else kind
    return all(value.dtype in (kind, compared) for value in tensor_values(node))


def is_measured(node: fx.Node, device: torch.device) -> bool:
    """Whether what a node's kernel needs for itself is to be measured: it may be something, and it can be tried."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    operands = [value for source in input_nodes(node) for value in tensor_values(source)]
    if not tensor_values(node) or has_side_effect(node) or (not operands and target.overloadpacket in _FACTORIES):
        return False
    if any(value.device.type != device.type for value in (*operands, *tensor_values(node))):
        return False
    if device.type != "cpu":
        # Its kernels convert as they go. cuBLAS works in memory of the stream, which stays allocated.
        return target.overloadpacket not in _PRODUCTS and not _is_pointwise(node)
    if target.overloadpacket in _PRODUCTS:
        return not all(value.dtype in (torch.float32, torch.float64) and _is_matrix(value) for value in operands)
    return not (_is_free_of_sizes(node) and not any(map(_is_number, node.args)))


def _is_number(given: Any) -> bool:
    """Whether an argument is a number, which kernels make a tensor of; a size that is a symbol is one too."""
    value = given.meta.get("val") if isinstance(given, fx.Node) else given
    return isinstance(value, int | float | complex | torch.SymInt | torch.SymFloat)


def _is_matrix(value: torch.Tensor) -> bool:
    """Whether BLAS takes a matrix as it lies."""
    return value.dim() < 2 or 1 in (value.stride(-1), value.stride(-2))


def _measure(node: fx.Node, device: torch.device) -> int:
    trial = try_alone(node, device, _is_free_of_sizes(node))
    return trial.workspace if trial is not None else 0
