"""Values that the user wants on the host, where programs run: which of them leave, and beside what they are copied.

A value leaves if it alone refers to its memory, and if something runs between the copy to the host and the copy back:
those of the last stage stay, since its backward follows at once. Each copy has one call of the forward beside it, and
the backward of one stage.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from roundpipe_fx.analysis.stage_calls import HeldBytes, simulate_calls
from roundpipe_fx.codegen import Program, StageModule, value_name
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, viewed
from roundpipe_fx.ir.value_on_host import ValueOnHost
from roundpipe_fx.torch_private import data_dependent_symbol, offload_operators, row_major

__all__ = ["host_copies", "is_wanted_on_host", "may_be_on_host", "wants_host"]

log = logging.getLogger(__name__)


def host_copies(
    joint: JointGraph,
    forward: Program,
    backward: Program,
    tangents: Collection[fx.Node],
    device: str,
    granularity: int,
) -> list[ValueOnHost]:
    """What leaves, and when.

    Args:
        joint: the graph.
        forward: its forward program.
        backward: its backward program.
        tangents: incoming gradients that the step is expected to get.
        device: type of the device.
        granularity: bytes that the device's allocator rounds sizes up to.

    Returns:
        nothing on the CPU, which is the host.
    """
    if not wants_host(joint, device):
        return []
    if offload_operators() is None:
        log.warning("this version of PyTorch has no operators that copy to the host: what is to be there is not.")
        return []
    _, held = simulate_calls(forward, backward, joint.gradient_owners, tangents, granularity)
    modules = {module.name: module for module in forward.calls}
    copies = []
    for value in held:
        module = modules.get(value.maker)
        if module is None or value.result is None or value.lasts:
            continue
        node = module.outputs[value.result]
        if is_wanted_on_host(node) and may_be_on_host(node, device) and _comes_back_alike(node.meta["val"]):
            names = node.name, value_name(joint, node)
            copies += _copies(value, names, forward.calls, backward.calls)
    return copies


def _copies(
    value: HeldBytes, names: tuple[str, str], forward: Sequence[StageModule], backward: Sequence[StageModule]
) -> list[ValueOnHost]:
    """The copy of a value; none if nothing would run while it is on the host."""
    there = {call.name: place for place, call in enumerate(forward)}
    back = {call.name: place for place, call in enumerate(backward)}
    freed = max([there[value.maker] + 1, *(there[reader] for reader in value.readers if reader in there)])
    readers = [back[reader] for reader in value.readers if reader in back]
    if not readers or freed >= len(forward):
        return []
    first = _first_of_stage(backward, min(readers))
    reloaded = _first_of_stage(backward, first - 1) if first else 0
    if len(forward) - 1 - freed + reloaded == 0:
        return []
    return [
        ValueOnHost(
            value=names[0],
            name=names[1],
            freed=forward[freed].name,
            reloaded=backward[reloaded].name,
            back=backward[min(readers)].name,
        )
    ]


def _first_of_stage(calls: Sequence[StageModule], place: int) -> int:
    """Place of the first call of the stage that a call is of."""
    while place and calls[place - 1].stage == calls[place].stage:
        place -= 1
    return place


def wants_host(joint: JointGraph, device: str) -> bool:
    """Whether the user wants some value on the host, and the device is not the host.

    Args:
        joint: the graph.
        device: type of the device.
    """
    return device != "cpu" and any(Mark.ON_HOST in node.meta for node in joint.graph.nodes)


def _comes_back_alike(value: torch.Tensor) -> bool:
    """Whether a copy has the strides of a value: those of a symbolic size are not given to the operators.

    Nor may it be empty: the operators know a copy by its address.
    """
    if value.numel() == 0:
        return False
    if all(type(size) is int for size in (*value.shape, *value.stride())):
        alike = torch.empty_strided(value.shape, value.stride(), device="meta")
        return torch.empty_like(alike).stride() == alike.stride()
    return row_major(value)


def may_be_on_host(node: fx.Node, device: str) -> bool:
    """Whether a value that alone refers to its memory may be copied to the host and back.

    Values of host synchronizations and discrete decisions stay unless the user wants them there; sizes that depend on
    data stay.

    Args:
        node: the value.
        device: type of the device.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type != device:
        return False
    if any(Mark.MUST_SAVE in source.meta for source in (node, _computed(node))) and not is_wanted_on_host(node):
        return False
    sized = all(data_dependent_symbol(size) is None for size in (*value.shape, *value.stride()))
    return sized and not value.dtype.is_complex and not value.is_neg()


def is_wanted_on_host(node: fx.Node) -> bool:
    """Whether the user wants a value on the host, what it is a view of, or the operation that computes it."""
    base = viewed(node)
    return Mark.ON_HOST in base.meta or Mark.ON_HOST in _computed(base).meta


def _computed(node: fx.Node) -> fx.Node:
    """The operation of which a node is one of several results; else the node."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node
