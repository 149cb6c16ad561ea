"""Sums: what the gradients of a step add up to so far, on one device or on all."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

__all__ = ["GradientAccumulator"]


class GradientAccumulator:
    """Sums by identity of the tensor whose gradient they are. One that is nobody else's is added to in place.

    Attributes:
        tensors: the sums.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._own: set[int] = set()

    def add(self, owner: int, gradient: torch.Tensor, own: bool = False) -> None:
        """Add a gradient.

        Args:
            owner: whose.
            gradient: it may be a view of something else, or a value that others read too.
            own: whether it is neither.
        """
        if owner not in self.tensors:
            self.give(owner, gradient, own)
        elif owner in self._own:
            self.tensors[owner].add_(gradient)
        else:
            self.give(owner, self.tensors[owner] + gradient)

    def give(self, owner: int, total: torch.Tensor, own: bool = True) -> None:
        """Set a sum."""
        self.tensors[owner] = total
        if own:
            self._own.add(owner)

    def take(self, owner: int) -> torch.Tensor | None:
        """A sum that whoever takes it may write over, and gives back; ``None``: nothing was added yet."""
        total = self.tensors.pop(owner, None)
        return total.clone() if total is not None and owner not in self._own else total

    def remove(self, owners: Collection[int]) -> dict[int, torch.Tensor]:
        """Take away all that there are of some owners; what is added later begins anew."""
        found = {owner: self.tensors.pop(owner) for owner in [*self.tensors] if owner in owners}
        self._own -= found.keys()
        return found

    def move(self, to: GradientAccumulator, home: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add all to others, so that each is gone before the next is brought.

        Args:
            to: the others.
            home: brings a tensor to the caller's device.
        """
        while self.tensors:
            owner, total = self.tensors.popitem()
            at_home = home(total)
            del total
            to.add(owner, at_home, owner in self._own)
