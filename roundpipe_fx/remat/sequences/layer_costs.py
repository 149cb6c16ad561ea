"""A chain: what its layers cost, in seconds and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Chain:
    """Layers 0 to n - 1 in a row, and the loss behind them.

    ``x_i`` is what enters layer i (``x_n`` enters the loss), ``y_i`` its gradient, ``x̄_{i+1}`` all that
    differentiating layer i needs beside its input, ``x_{i+1}`` included.

    Attributes:
        forward: seconds of each layer's forward; n of them.
        backward: seconds of each layer's backward, and those of the loss; n + 1 (n if the loss takes none).
        boundary: bytes of ``x_i`` and of ``y_i``; n + 1.
        saved: bytes of ``x̄_i``; n + 1, the first of which is not used.
        forward_temporary: bytes that each forward allocates beside its results; n, or empty for none.
        backward_temporary: the same for each backward and the loss; n + 1, or empty for none.

    Raises:
        ValueError: lengths that do not fit each other, or a negative number.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    boundary: tuple[int, ...]
    saved: tuple[int, ...]
    forward_temporary: tuple[int, ...] = ()
    backward_temporary: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.forward)
        fields = {
            "forward": (tuple(self.forward), n),
            "backward": ((*self.backward, 0.0) if len(self.backward) == n else tuple(self.backward), n + 1),
            "boundary": (tuple(self.boundary), n + 1),
            "saved": (tuple(self.saved), n + 1),
            "forward_temporary": (tuple(self.forward_temporary) or (0,) * n, n),
            "backward_temporary": (tuple(self.backward_temporary) or (0,) * (n + 1), n + 1),
        }
        for name, (values, length) in fields.items():
            if len(values) != length:
                raise ValueError(f"Chain: {name} has {len(values)} entries; for {n} layers it must have {length}.")
            if any(value < 0 for value in values):
                # The dataclass is frozen; sequences are normalized to tuples once, so that chains can be keys.
                raise ValueError(f"Chain: {name} has a negative entry.")
            object.__setattr__(self, name, values)

    @property
    def length(self) -> int:
        """Number of layers."""
        return len(self.forward)

    def in_slots(self, slot: float) -> Chain:
        """The same chain with bytes counted in slots, rounded up.

        Args:
            slot: bytes of a slot.

        Returns:
            the chain, its sizes in slots.
        """

        def count(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(math.ceil(size / slot) for size in sizes)

        return Chain(
            forward=self.forward,
            backward=self.backward,
            boundary=count(self.boundary),
            saved=count(self.saved),
            forward_temporary=count(self.forward_temporary),
            backward_temporary=count(self.backward_temporary),
        )

    def __str__(self) -> str:
        lines = ["layer  forward s  backward s  boundary  saved  forward tmp  backward tmp"]
        for i in range(self.length + 1):
            name = str(i) if i < self.length else "loss"
            forward = f"{self.forward[i]:9.3g}" if i < self.length else " " * 9
            saved = str(self.saved[i + 1]) if i < self.length else ""
            temporary = str(self.forward_temporary[i]) if i < self.length else ""
            lines.append(
                f"{name:>5}  {forward}  {self.backward[i]:10.3g}  {self.boundary[i]:>8}  {saved:>5}  {temporary:>11}  "
                f"{self.backward_temporary[i]:>12}"
            )
        return "\n".join(lines)
