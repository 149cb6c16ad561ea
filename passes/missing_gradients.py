"""missing_gradients: expand zeros in compiled stages for incoming gradients that are not expected.

A compiled stage reads its inputs in the strides for which it was compiled. An output that no loss reads, such as the
logits beside a loss, has a gradient of zeros; with strides of 0 one element is all that is allocated::

    tangents_2: f32[4, 256, 32768]  strides (8388608, 32768, 1)   →   strides (0, 0, 0)

Stages that run eagerly take either, and what is recorded of a gradient is how it comes in when a loss reads its output
after all.
"""

from __future__ import annotations

from roundpipe_fx.analysis.expanded_zeros import make_expanded_zeros
from roundpipe_fx.ir.joint_graph import JointGraph


def expand_missing_gradients(joint: JointGraph) -> JointGraph:
    """Give incoming gradients that are not expected the strides of an expanded scalar, after ``strided_gradients``.

    Args:
        joint: the graph; its tangents' ``meta`` is written.

    Returns:
        The same graph.
    """
    for tangent, zeros in make_expanded_zeros(joint).items():
        tangent.meta["val"] = zeros
    return joint
