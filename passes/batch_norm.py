"""batch_norm: drop saved running statistics, which the gradient does not read in training.

Autograd passes them to the kernel all the same. In a traced graph they are results of the forward, not the caller's
buffers, so each would needlessly be saved for the backward.
"""

from __future__ import annotations

import torch

from roundpipe_fx.ir.joint_graph import JointGraph

aten = torch.ops.aten


def release_running_statistics(joint: JointGraph) -> JointGraph:
    """Remove running statistics from the gradients of batch norms that used the batch's own."""
    for node in joint.computed():
        if node.target is aten.native_batch_norm_backward.default:
            gradient, source, weight, _, _, mean, deviation, in_training, *rest = node.args
            if in_training is True:
                node.args = (gradient, source, weight, None, None, mean, deviation, in_training, *rest)
    return joint
