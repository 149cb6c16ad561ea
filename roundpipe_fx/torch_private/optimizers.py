"""Optimizers: what hooks or replaces their ``step``, which documented interfaces only write."""

from __future__ import annotations

import torch

__all__ = ["note_optimizer_step", "step_is_watched"]


def step_is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run around an optimizer's ``step``, or something else than a learning rate scheduler has wrapped
    it: it must then be called once, for all parameters."""
    fields = vars(optimizer)
    hooks = (fields["_optimizer_step_pre_hooks"], fields["_optimizer_step_post_hooks"])
    replaced = fields.get("step")
    return any(hooks) or (replaced is not None and not getattr(replaced, "_wrapped_by_lr_sched", False))


def note_optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that an optimizer has made a step, for a learning rate scheduler, which warns if its own comes first."""
    if "step" in vars(optimizer):
        vars(optimizer)["_opt_called"] = True
