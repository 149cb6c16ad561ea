"""Accumulated gradients of a step, on one device or on all of them.

The first gradient may be a view of a stage's result, or a value that others read: it is kept as it is, and not written
to. The second one makes a sum that belongs to the accumulator, to which further ones are added in place::

    add(w, view)                     the view itself
    add(w, g)                        view + g, new memory
    add(w, g)                        the same memory, added in place
    add(w, g, owned=True) first      g itself, which the next one is added to in place
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch


class GradientAccumulator:
    """Accumulated gradients, keyed by identity of the tensor that they are the gradient of.

    A gradient is accumulated in place where the accumulator holds the only reference to its memory.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._owned: set[int] = set()

    def add(self, owner: int, gradient: torch.Tensor, owned: bool = False) -> None:
        """Add a gradient.

        Args:
            owner: identity of the tensor that it is the gradient of.
            gradient: the gradient. It may be a view, or a value that others read too.
            owned: whether it is neither, so that it may be written to.
        """
        if owner not in self.tensors:
            self.give(owner, gradient, owned)
        elif owner in self._owned:
            # In place only into memory that nobody else refers to: the first gradient may be a view of a stage's
            # result.
            self.tensors[owner].add_(gradient)
        else:
            self.give(owner, self.tensors[owner] + gradient)

    def give(self, owner: int, total: torch.Tensor, owned: bool = True) -> None:
        """Set an accumulated gradient; ``owned``: whether it may be written to."""
        self.tensors[owner] = total
        if owned:
            self._owned.add(owner)

    def take(self, owner: int) -> torch.Tensor | None:
        """Remove an accumulated gradient to be written to and given back; ``None`` if there is none yet."""
        total = self.tensors.pop(owner, None)
        return total.clone() if total is not None and owner not in self._owned else total

    def release(self, owner: int) -> tuple[torch.Tensor, bool]:
        """Remove and return an accumulated gradient, and whether it may be written to."""
        is_owned = owner in self._owned
        self._owned.discard(owner)
        return self.tensors.pop(owner), is_owned

    def parts_of(self, owner: int) -> list[tuple[torch.Tensor, bool]]:
        """As :meth:`release`, in a list, which is empty if there is no gradient."""
        return [self.release(owner)] if owner in self.tensors else []

    def remove(self, owners: Collection[int]) -> dict[int, torch.Tensor]:
        """Remove and return the accumulated gradients of some owners."""
        removed = {owner: self.tensors.pop(owner) for owner in [*self.tensors] if owner in owners}
        self._owned -= removed.keys()
        return removed

    def move(self, to: GradientAccumulator, to_caller: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add all gradients to another accumulator, freeing each one before the next is copied.

        Args:
            to_caller: copies a tensor to the caller's device.
        """
        # One at a time, so no more than one gradient exists twice.
        while self.tensors:
            owner, total = self.tensors.popitem()
            moved = to_caller(total)
            del total
            to.add(owner, moved, owner in self._owned)
