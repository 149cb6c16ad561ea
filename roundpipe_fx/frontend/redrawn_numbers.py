"""Redrawn numbers: bodies of ``torch.cond`` and ``map`` that draw random numbers, and draw others in the backward.

PyTorch differentiates such a body by running it once more, without the state that its generator had: eagerly, too, the
gradient of a dropout inside has another mask than the dropout. (Seen with PyTorch 2.13.)
"""

from __future__ import annotations

import warnings

from torch import fx

from roundpipe_fx.ir.bodies import draws_inside
from roundpipe_fx.ir.joint_graph import JointGraph, input_nodes
from roundpipe_fx.ir.source import line_of

__all__ = ["warn_of_redrawn_numbers"]


def warn_of_redrawn_numbers(joint: JointGraph) -> None:
    """Warn of operators that draw random numbers in the backward, where they differentiate a body.

    Args:
        joint: a captured graph.
    """
    dependent: set[fx.Node] = set(joint.tangents)
    lines = {}
    for node in joint.computed():
        if any(source in dependent for source in input_nodes(node)):
            dependent.add(node)
            if draws_inside(node, joint.module):
                lines[line_of(node)] = str(node.target)
    for line, operator in lines.items():
        where = f" at {line}" if line else ""
        warnings.warn(
            f"roundpipe_fx: the body of an operator ({operator}){where} draws random numbers, as a dropout does, and "
            "draws others when PyTorch differentiates it, without a compiler too, so its gradients are not those of "
            "what was computed. Draw outside of the body and pass it what was drawn.",
            stacklevel=2,
        )
