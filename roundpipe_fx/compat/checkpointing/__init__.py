"""Recomputation as people write it by hand: checkpointed layers, what they save, scopes. The same eager and compiled.

==================  =================================================================================================
checkpoint          ``checkpoint``, ``checkpoint_sequential`` (torch.utils.checkpoint), ``is_checkpointing``,
                    ``is_recomputing`` (torchgpipe, fairscale)
wrapper             ``checkpoint_wrapper`` (fairscale)
recompute_data      ``save_for_recompute``, ``doing_recompute``, ``get_recompute_data`` (RoundPipe)
layer_pass          which pass of which checkpointed layer a thread is in
scope               ``gradient_checkpoint_scope`` (RETURNN), eager and compiled
tape                the operations of a scope, to be run again
persistent_hooks    saved-tensor hooks that outlive their ``with`` block
==================  =================================================================================================

How all of this is written into a traced graph, and read from it: :mod:`roundpipe_fx.ir.recompute_marks`.
"""

from roundpipe_fx.compat.checkpointing.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    is_checkpointing,
    is_recomputing,
)
from roundpipe_fx.compat.checkpointing.recompute_data import doing_recompute, get_recompute_data, save_for_recompute
from roundpipe_fx.compat.checkpointing.scope import gradient_checkpoint_scope
from roundpipe_fx.compat.checkpointing.wrapper import checkpoint_wrapper

__all__ = [
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "doing_recompute",
    "get_recompute_data",
    "gradient_checkpoint_scope",
    "is_checkpointing",
    "is_recomputing",
    "save_for_recompute",
]
