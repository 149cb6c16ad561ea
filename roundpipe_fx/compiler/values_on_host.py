"""Offloaded values of programs: candidates, the choice among them, and the stage calls that overlap with their copies.

A value is a candidate if no other value shares its memory and if a call runs between its two copies: values of the last
stage stay, since its backward follows at once. For a value that the user marked, each copy overlaps with one stage
call. Other values are offloaded only if their copies are hidden (:mod:`roundpipe_fx.compiler.hidden_copies`).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import fx

from roundpipe_fx.analysis.stage_calls import simulate_calls
from roundpipe_fx.codegen import Program, StageModule, value_name
from roundpipe_fx.compiler.hidden_copies import OffloadCandidate, choose_hidden_copies
from roundpipe_fx.ir.decisions import ValueOnHost
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, viewed
from roundpipe_fx.torch_private import data_dependent_symbol, offload_operators, row_major

_SMALLEST = 2**16
"""Bytes of a value that leaves unasked: of smaller ones, starting the copy takes longer than the copy."""
Seconds: TypeAlias = Mapping[tuple[int, Phase], float]
"""By stage and phase."""

log = logging.getLogger(__name__)


def find_offload_candidates(
    joint: JointGraph,
    forward: Program,
    backward: Program,
    tangents: Collection[fx.Node],
    device: str,
    granularity: int,
) -> list[OffloadCandidate]:
    """Find the values that may be on the host between forward and backward.

    Args:
        tangents: incoming gradients that the step is expected to get.
        device: type of the device on which the graph's values are.
        granularity: bytes that the device's allocator rounds sizes up to.

    Returns:
        none, with a warning, if PyTorch has no operators that copy.
    """
    if offload_operators() is None:
        log.warning(
            "this version of PyTorch has no operators that copy to the host: values that were to be offloaded stay on "
            "the device."
        )
        return []
    _, held = simulate_calls(forward, backward, joint.gradient_owners, tangents, granularity)
    modules = {module.name: module for module in forward.calls}
    # Only values that modules return may leave: inputs are the caller's, and a value inside a module has no name
    # outside.
    values = []
    for value in held:
        module = modules.get(value.maker)
        if module is None or value.result is None or value.lasts:
            continue
        node = module.outputs[value.result]
        if may_be_on_host(node, device) and _keeps_strides(node.meta["val"]):
            values.append(
                OffloadCandidate(
                    value=node.name,
                    name=value_name(joint, node),
                    bytes=value.bytes,
                    maker=value.maker,
                    readers=value.readers,
                    requested=is_requested_on_host(node),
                )
            )
    return values


def schedule_requested_copies(
    values: Sequence[OffloadCandidate], forward: Program, backward: Program
) -> list[ValueOnHost]:
    """Values that the user wants on the host, and when they are copied."""
    return [
        copy for value in values if value.requested for copy in _schedule_copies(value, forward.calls, backward.calls)
    ]


def schedule_hidden_copies(
    values: Sequence[OffloadCandidate],
    forward: Program,
    backward: Program,
    seconds: Seconds,
    byte_seconds: float,
    bytes_wanted: int,
    host_limit: int,
) -> list[ValueOnHost]:
    """Choose values to offload whose copies are hidden; the user has not marked these.

    Args:
        seconds: modelled, by stage and phase.
        byte_seconds: in which the link carries a byte.
        bytes_wanted: no more values leave once they have this number of bytes.
        host_limit: bytes that they have at most.
    """

    def list_call_seconds(program: Program) -> list[tuple[str, float]]:
        return [(call.name, seconds[call.stage, call.phase]) for call in program.calls]

    starts = [_first_of_stage(backward.calls, position) for position in range(len(backward.calls))]
    values = [value for value in values if value.bytes >= _SMALLEST]
    return choose_hidden_copies(
        values, list_call_seconds(forward), list_call_seconds(backward), starts, byte_seconds, bytes_wanted, host_limit
    )


def _schedule_copies(
    value: OffloadCandidate, forward: Sequence[StageModule], backward: Sequence[StageModule]
) -> list[ValueOnHost]:
    """The copy of a value that the user wants on the host; none if nothing would run while it is there."""
    forward_positions = {call.name: position for position, call in enumerate(forward)}
    backward_positions = {call.name: position for position, call in enumerate(backward)}
    # Its memory is freed after the last call of the forward that reads it, and one call after its maker at the
    # earliest: the copy travels meanwhile.
    freed = max(
        [
            forward_positions[value.maker] + 1,
            *(forward_positions[reader] for reader in value.readers if reader in forward_positions),
        ]
    )
    readers = [backward_positions[reader] for reader in value.readers if reader in backward_positions]
    if not readers or freed >= len(forward):
        return []
    first = _first_of_stage(backward, min(readers))
    # Loaded one stage ahead: while the stage that runs before the reader's runs, the copy travels.
    reloaded = _first_of_stage(backward, first - 1) if first else 0
    # Calls between freeing and loading: without one, the value would leave and come back at once.
    if len(forward) - 1 - freed + reloaded == 0:
        return []
    return [
        ValueOnHost(
            value=value.value,
            name=value.name,
            freed=forward[freed].name,
            reloaded=backward[reloaded].name,
            back=backward[min(readers)].name,
        )
    ]


def _first_of_stage(calls: Sequence[StageModule], position: int) -> int:
    """Place of the first call of the stage that a call is of."""
    while position and calls[position - 1].stage == calls[position].stage:
        position -= 1
    return position


def is_host_requested(joint: JointGraph, device: str) -> bool:
    """Return whether the user wants some value on the host, and the device is not the host.

    Args:
        device: type of the device.
    """
    return device != "cpu" and any(Mark.ON_HOST in node.meta for node in joint.graph.nodes)


def _keeps_strides(value: torch.Tensor) -> bool:
    """Test for a value whose strides a copy by PyTorch's operators has: those of a symbolic size are not given to them.

    Nor may it be empty: the operators know a copy by its address.
    """
    if value.numel() == 0:
        return False
    # The operators copy with ``empty_like``, which makes dense strides: a value with gaps would come back with others.
    if all(type(size) is int for size in (*value.shape, *value.stride())):
        copied = torch.empty_strided(value.shape, value.stride(), device="meta")
        return torch.empty_like(copied).stride() == copied.stride()
    return row_major(value)


def may_be_on_host(node: fx.Node, device: str) -> bool:
    """Return whether a value that alone refers to its memory may be copied to the host and back.

    Values of host synchronizations and discrete decisions stay unless the user wants them there; sizes that depend on
    data stay. So do single numbers, with which nothing is gained: the seed and the offset of memory-efficient attention
    are on the host already, whatever its fake kernel says, and a kernel that reads them there must not find them on the
    device.

    Args:
        device: type of the device.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type != device:
        return False
    if value.dim() == 0:
        return False
    if any(Mark.MUST_SAVE in source.meta for source in (node, _find_operation(node))) and not is_requested_on_host(
        node
    ):
        return False
    sized = all(data_dependent_symbol(size) is None for size in (*value.shape, *value.stride()))
    return sized and not value.dtype.is_complex and not value.is_neg()


def is_requested_on_host(node: fx.Node) -> bool:
    """Return whether the user wants a value on the host, what it is a view of, or the operation that computes it."""
    base = viewed(node)
    return Mark.ON_HOST in base.meta or Mark.ON_HOST in _find_operation(base).meta


def _find_operation(node: fx.Node) -> fx.Node:
    """Find the operation of which a node is one of several results; else the node."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node
