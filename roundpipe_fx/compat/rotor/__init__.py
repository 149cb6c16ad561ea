"""rotor's interface: optimal checkpointing of a chain under a memory limit.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory", 2019, and its program rotor.

===============  ======================================================================================
nesting          a sequence as nested checkpoints, and running it
measuring        the chain of an ``nn.Sequential``, by running its layers
checkpointable   ``Checkpointable``: a module that runs by a sequence
===============  ======================================================================================

Chains, sequences and the algorithms that compute them are in :mod:`roundpipe_fx.remat.sequences`.
"""

from roundpipe_fx.compat.rotor.checkpointable import Checkpointable
from roundpipe_fx.remat.sequences.layer_costs import Chain
from roundpipe_fx.remat.sequences.sequence import Backward, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Sequence

__all__ = ["Backward", "Chain", "Checkpointable", "ForwardCheck", "ForwardEnable", "ForwardNograd", "Loss", "Sequence"]
