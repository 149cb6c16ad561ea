"""Gradients of a step, handed to whom they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["hand_to_autograd"]


def hand_to_autograd(
    primals: Sequence[Sequence[Any]], outputs: Sequence[Sequence[Any]], gradients: dict[int, torch.Tensor]
) -> None:
    """Add gradients to ``.grad`` and to what inputs were made from. ``gradients`` is emptied.

    Autograd copies the gradient that it is given for a leaf without one, so what is the step's own becomes ``.grad`` as
    it is, unless somebody listens.
    """
    found = {id(value): value for own in primals for value in own if id(value) in gradients}
    others = [value for values in (*primals, *outputs) for value in values if isinstance(value, torch.Tensor)]
    shared = Counter(value.untyped_storage()._cdata for value in gradients.values())
    shared.update({storage: 1 for storage in {value.untyped_storage()._cdata for value in others}})
    leaves, rest = [], []
    for key, value in found.items():
        if not value.requires_grad:
            continue
        gradient = gradients.pop(key)
        storage = gradient.untyped_storage()
        listens = value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None)
        own = shared[storage._cdata] == 1 and storage.nbytes() == gradient.numel() * gradient.element_size()
        if value.is_leaf and value.grad is None and not listens and own and gradient.stride() == value.stride():
            value.grad = gradient
        else:
            leaves.append(value)
            rest.append(gradient)
    if leaves:
        torch.autograd.backward(leaves, rest)
