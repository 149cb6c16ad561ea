"""Expanded zeros: the representation of incoming gradients that are not expected to arrive.

Only one element is allocated. Kernels that cannot read expanded operands copy them first, so their workspaces are
measured with such operands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx

from roundpipe_fx.analysis.fake_results import run_fake_kernel
from roundpipe_fx.ir.joint_graph import JointGraph, is_tensor, is_view


def make_expanded_zeros(joint: JointGraph) -> dict[fx.Node, torch.Tensor]:
    """Make an expanded scalar for each incoming gradient that is not expected."""
    expected = set(joint.expected_tangents)
    values = {}
    for tangent in joint.tangents:
        if tangent in expected or not is_tensor(tangent) or not tangent.meta["val"].dim():
            continue
        value = tangent.meta["val"]
        with value.fake_mode:
            values[tangent] = value.new_zeros(()).expand(value.shape)
    return values


@contextlib.contextmanager
def record_as_expanded_zeros(joint: JointGraph) -> Iterator[None]:
    """Meanwhile, incoming gradients that are not expected, and views of them, are recorded as expanded scalars."""
    values = make_expanded_zeros(joint)
    for node in joint.computed() if values else ():
        source = next((source for source in node.all_input_nodes if source in values), None)
        if source is not None and is_view(node) and is_tensor(node):
            value = run_fake_kernel(node, source, values[source])
            if isinstance(value, torch.Tensor):
                values[node] = value
    recorded = {node: node.meta["val"] for node in values}
    for node, value in values.items():
        node.meta["val"] = value
    try:
        yield
    finally:
        for node, value in recorded.items():
            node.meta["val"] = value
