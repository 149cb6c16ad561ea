"""rotor's interface: optimal checkpointing of a chain under a memory limit.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory", 2019, and its program rotor.

===============  ======================================================================================
chain            what the layers of a chain cost: seconds and bytes
sequence         operations in order; what they peak at and take
algorithms       the optimal persistent sequence, and baselines
nesting          a sequence as checkpoints inside of checkpoints, and running it so
measuring        the chain of an ``nn.Sequential``, by running its layers
checkpointable   ``Checkpointable``: a module that runs by a sequence
===============  ======================================================================================
"""

from roundpipe_fx.rotor.algorithms import ALGORITHMS
from roundpipe_fx.rotor.chain import Chain
from roundpipe_fx.rotor.sequence import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Sequence

__all__ = [
    "ALGORITHMS",
    "Backward",
    "Chain",
    "ForwardCheck",
    "ForwardEnable",
    "ForwardNograd",
    "Loss",
    "Sequence",
]
