"""workspaces: bytes that kernels allocate internally, for the simulation of memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from roundpipe_fx.analysis.cost import predict_workspaces
from roundpipe_fx.analysis.expanded_zeros import record_as_expanded_zeros
from roundpipe_fx.ir.joint_graph import JointGraph, Mark


def mark_workspaces(
    joint: JointGraph,
    device: torch.device,
    fused: bool,
    learned: Mapping[str, int] | None = None,
    present: bool = True,
) -> JointGraph:
    """Mark every node whose kernel allocates memory besides its results with the number of bytes.

    Incoming gradients that are not expected are expanded zeros for that, which some kernels copy.

    Args:
        joint: the graph; its nodes' ``meta`` is written.
        device: where the kernels run.
        fused: whether a compiler compiles the stages: fused pointwise operations need no workspace.
        learned: bytes that operators with data-dependent needs, and compiled stages, have been seen to need, by name.
        present: whether kernels can be measured on the device; otherwise those are marked that a formula is known for.
    """
    with record_as_expanded_zeros(joint):
        workspaces = predict_workspaces(joint.computed(), device, fused, learned, present)
    for node, size in workspaces.items():
        node.meta[Mark.WORKSPACE] = size
    return joint
