"""Recomputation written by hand: checkpointed layers, data that they save, scopes. They work eagerly and compiled.

==================  =================================================================================================
checkpoint          ``checkpoint``, ``checkpoint_sequential`` (torch.utils.checkpoint), ``is_checkpointing``,
                    ``is_recomputing`` (torchgpipe, fairscale)
wrapper             ``checkpoint_wrapper`` (fairscale)
recompute_data      ``save_for_recompute``, ``doing_recompute``, ``get_recompute_data`` (RoundPipe)
layer_pass          which pass of which checkpointed layer a thread is in
scope               ``gradient_checkpoint_scope`` (RETURNN), eager and compiled
tape                the operations of a scope, to be replayed
persistent_hooks    saved-tensor hooks that outlive their ``with`` block
==================  =================================================================================================

:mod:`roundpipe_fx.ir.recompute_marks` records all of this in a traced graph, and reads it from there.
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
