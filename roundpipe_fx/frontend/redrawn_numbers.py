"""Redrawn numbers: bodies of ``torch.cond`` and ``map`` that draw random numbers, and draw others in the backward.

PyTorch differentiates such a body by running it once more, without the state that its generator had: eagerly, too, the
gradient of a dropout inside has another mask than the dropout. (Seen with PyTorch 2.13.)
"""

from __future__ import annotations

import warnings

from roundpipe_fx.ir.bodies import draws_inside
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.source import line_of

__all__ = ["warn_of_redrawn_numbers"]


def warn_of_redrawn_numbers(joint: JointGraph) -> None:
    """Warn of operators that draw random numbers in the backward, where they differentiate a body.

    Args:
        joint: a captured graph.
    """
    dependent = joint.dependent_on_tangents()
    redrawing = [node for node in joint.computed() if node in dependent and draws_inside(node, joint.module)]
    lines = {line_of(node): str(node.target) for node in redrawing}
    for line, operator in lines.items():
        where = f" at {line}" if line else ""
        warnings.warn(
            f"roundpipe_fx: the body of an operator ({operator}){where} draws random numbers, as a dropout does, and "
            "draws others when PyTorch differentiates it, without a compiler too, so its gradients are not those of "
            "what was computed. Draw outside of the body and pass it what was drawn.",
            stacklevel=2,
        )
