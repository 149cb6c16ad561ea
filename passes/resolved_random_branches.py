"""resolved_random_branches: random numbers of branches with a known outcome stay in the graph without a reader.

In Dynamo's graph an operator without a result reads such a number, so that AOTAutograd keeps it. Passes never drop
operations that draw random numbers, so this pass removes the reader. Models that need it: those of Hugging Face
Transformers with layer drop, which is 0 by default (BART, OPT, Wav2Vec2, Whisper and more than 30 others). Without it
their graph breaks at each layer.
"""

from __future__ import annotations

from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.resolved_branches import RESOLVED_RANDOM_BRANCH


def release_resolved_random_branches(joint: JointGraph) -> JointGraph:
    """Drop the readers; from here on draws need none."""
    for node in joint.graph.find_nodes(op="call_function", target=RESOLVED_RANDOM_BRANCH):
        joint.graph.erase_node(node)
    return joint
