"""Keys of captured graphs and devices for the plan cache: lines of text that are equal in every process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.caching_allocator import make_allocator
from roundpipe_fx.analysis.cost.probe import device_text, kernel_settings
from roundpipe_fx.ir.joint_graph import MARK_USES, JointGraph


class NotPlainError(Exception):
    """Plain values do not determine something in a graph."""


_DESCRIBED = ("partitioner_tag", "recompute", "custom", "autograd_backward", *MARK_USES)
_MODULES = ("nn_module_stack", "fwd_nn_module_stack")


def describe_graph(joint: JointGraph) -> Iterator[str]:
    """Lines that are equal for graphs with the same decisions, node names included.

    Raises:
        NotPlainError: it has symbolic sizes.
    """
    order: dict[int, int] = {}
    for node in joint.graph.nodes:
        meta = node.meta
        # Forward and backward nodes of one operation have the same number, which differs between processes.
        number = order.setdefault(meta.get("seq_nr", -1), len(order))
        marks = [(key, meta[key]) for key in _DESCRIBED if key in meta]
        modules = [path for key in _MODULES for path, _ in (meta.get(key) or {}).values()]
        target = _constant(joint.module, str(node.target)) if node.op == "get_attr" else node.target
        yield (
            f"{node.name} {node.op} {target} {node.args} {node.kwargs} {number} {marks} {modules} "
            f"{_value(meta.get('val'))} {joint.labels.get(node)} {node in joint.parameters} "
            f"{node in joint.mutated_inputs}"
        )
    yield f"{joint.num_forward_outputs} {joint.gradient_owners} {joint.updates} {sorted(joint.dropped)}"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = value.shape
        if not all(type(size) is int for size in shape):
            raise NotPlainError
        strides = value.stride() if value.layout is torch.strided else value.layout
        lazy = f"{value.is_conj()}{value.is_neg()}" if value.is_complex() else ""
        return f"{value.dtype}{tuple(shape)}{strides}{value.device}{value.requires_grad}{lazy}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_value, value))})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise NotPlainError
    return repr(value)


def _constant(module: fx.GraphModule, name: str) -> str:
    member: Any = module
    for part in name.split("."):
        member = getattr(member, part)
    if isinstance(member, fx.GraphModule):
        inner = (f"{node.format_node()} {_value(node.meta.get('val'))}" for node in member.graph.nodes)
        return f"{name} {[*inner]}"
    return f"{name} {_value(member) if isinstance(member, torch.Tensor) else repr(member)}"


def describe_device(device: torch.device) -> Iterator[str]:
    """Lines that are equal where kernels need the same memory, and the allocator counts alike."""
    yield f"{device} {device_text(device)}"
    yield f"{torch.backends.cpu.get_cpu_capability()} {kernel_settings()} {make_allocator(device) is None}"
