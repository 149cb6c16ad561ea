"""A sequence: the operations of one training step of a chain, in order."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterator
from dataclasses import dataclass, field

from roundpipe_fx.remat.sequences.layer_costs import Chain


@dataclass(frozen=True)
class ForwardEnable:
    """Run layer ``index`` and keep its input and all that its backward needs.

    Attributes:
        index: number of the layer, from 0.
    """

    index: int

    def __str__(self) -> str:
        return f"Fe_{self.index}"


@dataclass(frozen=True)
class ForwardNograd:
    """Run layer ``index``, keep its result, drop its input.

    Attributes:
        index: number of the layer, from 0.
    """

    index: int

    def __str__(self) -> str:
        return f"Fn_{self.index}"


@dataclass(frozen=True)
class ForwardCheck:
    """Run layer ``index``, keep its input and its result.

    Attributes:
        index: number of the layer, from 0.
    """

    index: int

    def __str__(self) -> str:
        return f"Fc_{self.index}"


@dataclass(frozen=True)
class Loss:
    """The loss, which gives the gradient of the chain's result."""

    def __str__(self) -> str:
        return "L"


@dataclass(frozen=True)
class Backward:
    """Differentiate layer ``index``; what it needed is dropped.

    Attributes:
        index: number of the layer, from 0.
    """

    index: int

    def __str__(self) -> str:
        return f"B_{self.index}"


SequenceOperation = ForwardEnable | ForwardNograd | ForwardCheck | Loss | Backward

_SHOWN = 400


@dataclass(frozen=True)
class Sequence(collections.abc.Sequence[SequenceOperation]):
    """Operations in order. Prints; is counted, sliced and iterated like a tuple.

    Attributes:
        limit: bytes that it was made for; ``None``: no limit.
    """

    operations: tuple[SequenceOperation, ...]
    algorithm: str = field(default="", compare=False)
    limit: int | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.operations)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.operations[index]

    def __iter__(self) -> Iterator[SequenceOperation]:
        return iter(self.operations)

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" for {self.limit} bytes"
        origin = f" ({self.algorithm}{limit})" if self.algorithm else ""
        shown = " ".join(map(str, self.operations[:_SHOWN]))
        rest = f" … and {len(self) - _SHOWN} more" if len(self) > _SHOWN else ""
        return f"{len(self)} operations{origin}: {shown}{rest}"

    def seconds(self, chain: Chain) -> float:
        """Seconds on a chain.

        Args:
            chain: the chain, with the seconds of each layer.

        Returns:
            seconds of all operations, one after the other.
        """
        total = 0.0
        for operation in self.operations:
            if isinstance(operation, Backward):
                total += chain.backward[operation.index]
            elif isinstance(operation, Loss):
                total += chain.backward[chain.length]
            else:
                total += chain.forward[operation.index]
        return total

    def peak(self, chain: Chain) -> int:
        """The most bytes that live at one time on a chain, the chain's input included.

        Operation by operation: ``ForwardCheck(i)`` adds ``x_{i+1}``; ``ForwardNograd(i)`` adds it and then drops the
        input; ``ForwardEnable(i)`` adds ``x̄_{i+1}``; ``Loss`` adds ``y_n``; ``Backward(i)`` adds ``y_i`` and then drops
        ``x̄_{i+1}``, ``y_{i+1}`` and, where that is no part of ``x̄_i``, its input. While an operation runs its temporary
        counts too.

        Args:
            chain: the chain, with the bytes of each value.

        Returns:
            bytes.

        Raises:
            ValueError: an operation finds that something it needs is not there, or the chain's gradient is not what
                is left in the end; names the operation.
        """
        # A small interpreter: `live` holds what exists, by name (x, x̄, y) and layer.
        live = {("x", 0): chain.boundary[0]}
        most = live["x", 0]
        for position, operation in enumerate(self.operations):
            temporary, dropped = _apply(operation, chain, live, f"operation {position}, {operation}")
            most = max(most, sum(live.values()) + temporary)
            for item in dropped:
                del live[item]
        # A correct sequence frees everything but the gradient of the chain's input.
        if set(live) != {("y", 0)}:
            raise ValueError(
                f"the sequence does not end with the gradient of its input alone, but with {sorted(live)}."
            )
        return most


_Item = tuple[str, int]


def _apply(
    operation: SequenceOperation, chain: Chain, live: dict[_Item, int], description: str
) -> tuple[int, list[_Item]]:
    """Add what an operation makes; its temporary, and what it drops afterwards."""
    n = chain.length
    index = n if isinstance(operation, Loss) else operation.index
    if not 0 <= index < n + isinstance(operation, Loss):
        raise ValueError(f"{description}: the chain has layers 0 to {n - 1}.")
    # A layer's input is x_i, or inside x̄_i if the layer before it kept everything.
    entering = next((item for item in (("x", index), ("x̄", index)) if item in live), None)
    if entering is None:
        raise ValueError(f"{description}: its input x_{index} is not there.")
    if isinstance(operation, Loss):
        live["y", n] = chain.boundary[n]
        return chain.backward_temporary[n], [("x", n)] if ("x", n) in live else []
    if isinstance(operation, Backward):
        needed = [("x̄", index + 1), ("y", index + 1)]
        for name, number in needed:
            if (name, number) not in live:
                raise ValueError(f"{description}: {name}_{number} is not there.")
        live["y", index] = chain.boundary[index]
        return chain.backward_temporary[index], [*needed, *([("x", index)] if ("x", index) in live else [])]
    if isinstance(operation, ForwardEnable):
        live["x̄", index + 1] = chain.saved[index + 1]
    else:
        live["x", index + 1] = chain.boundary[index + 1]
    return chain.forward_temporary[index], [entering] if isinstance(operation, ForwardNograd) else []
