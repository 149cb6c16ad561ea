"""Operations that are added to an annotated graph, or changed in it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from roundpipe_fx.analysis.cost.model import CostModel, annotate_node
from roundpipe_fx.analysis.cost.real_layout import note_real_values
from roundpipe_fx.analysis.cost.workspace import predict_workspaces
from roundpipe_fx.ir.joint_graph import Mark


def annotate_added(
    nodes: Iterable[fx.Node], costs: CostModel, device: torch.device | None, eager: bool, present: bool = True
) -> None:
    """Annotate operations as those that have been there, and note how their results lie in memory.

    Args:
        nodes: in graph order.
        costs: of operations.
        device: where they run; ``None``: not known, as are their workspaces.
        eager: whether they run as they are.
        present: whether the device is there.
    """
    added = list(nodes)
    for node in added:
        if device is not None and present and eager:
            note_real_values(node, device)
        node.meta.pop(Mark.WORKSPACE, None)
        annotate_node(node, costs)
    if device is not None:
        for node, size in predict_workspaces(added, device, fused=not eager, present=present).items():
            node.meta[Mark.WORKSPACE] = size
