"""A profiled step: peak memory of compiled stages, measured as the step runs.

A compiler orders, fuses and reuses freely, so its peak is somewhat above or below that of the graph. The second run is
profiled, and later ones if sizes are larger, up to those that were planned for: in the first run kernels may be
autotuned, which takes memory that no later run needs. While a profiler of the user runs, nothing is measured. Forward
and backward are measured apart, each from its own start::

    forward     peak of the step so far = its own peak
    between     left = what it retains - results that the caller frees + what is allocated outside the programs
    backward    peak of the step        = left + incoming gradients + its own peak
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import tensor_bytes
from roundpipe_fx.codegen import Program
from roundpipe_fx.ir.joint_graph import tensor_values, viewed
from roundpipe_fx.runtime.stage_compiler import Boxed
from roundpipe_fx.torch_private import ProfiledMemory, planned_sizes, profile_memory, profiler_runs


class ProfiledStep:
    """Measures the peak memory of a step: of its forward program, then of its backward program.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        see: called after each program with the peak bytes of the step so far, beyond those allocated when it began.
        outside: bytes that are allocated between the two programs, and held until the end.
        released: numbers of the forward's results that the caller frees before the backward: it copies them into
            inputs, or drops them.
        graph: the graph that the programs were emitted from.
    """

    def __init__(
        self,
        forward: Program,
        backward: Program,
        device_type: str,
        see: Callable[[int], None],
        outside: int,
        released: Collection[int],
        graph: fx.Graph,
    ) -> None:
        results = {node for node in forward.results if isinstance(node, fx.Node)}
        self._arriving = [position for position, node in enumerate(backward.inputs) if node not in results]
        self._released = tensor_bytes(_freed(forward, released))
        self._device_type = device_type
        self._see = see
        self._outside = outside
        self._forward_sizes = planned_sizes(forward.inputs, graph)
        self._backward_sizes = planned_sizes(backward.inputs, graph)
        self._left: int | None = None

    def forward(self, run: Boxed) -> Boxed:
        """Wrap the forward program so that it is profiled."""

        def see(memory: ProfiledMemory) -> None:
            # Bytes that the forward leaves to the backward: measured, without outputs that the caller drops, with what
            # lies outside the program.
            self._left = memory.retained - self._released + self._outside
            self._see(memory.peak)

        return self._profiled(run, self._forward_sizes, lambda _: see)

    def backward(self, run: Boxed) -> Boxed:
        """Wrap the backward program so that it is profiled."""

        def seer(arguments: list[Any]) -> Callable[[ProfiledMemory], None]:
            arrived = (arguments[position] for position in self._arriving)
            arriving = sum(value.untyped_storage().nbytes() for value in arrived if isinstance(value, torch.Tensor))
            # The backward's peak is measured from its own start, so what was alive then is added.
            left = self._left
            return lambda memory: None if left is None else self._see(left + arriving + memory.peak)

        return self._profiled(run, self._backward_sizes, seer)

    def _profiled(
        self,
        run: Boxed,
        planned: Mapping[int, int],
        seer: Callable[[list[Any]], Callable[[ProfiledMemory], None]],
    ) -> Boxed:
        runs = 0
        largest: list[int] | None = None

        def call(arguments: list[Any]) -> tuple[Any, ...]:
            nonlocal runs, largest
            runs += 1
            sizes = [arguments[position] for position in planned]
            # Only steps with larger inputs than before can have a higher peak, and only up to the sizes that were
            # planned.
            grown = largest is None or any(size > known for size, known in zip(sizes, largest, strict=True))
            within = all(size <= most for size, most in zip(sizes, planned.values(), strict=True))
            if runs == 1 or not grown or not within or profiler_runs():
                return run(arguments)
            largest = sizes if largest is None else list(map(max, sizes, largest))
            return profile_memory(lambda: run(arguments), self._device_type, seer(arguments))

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def _freed(forward: Program, released: Collection[int]) -> list[torch.Tensor]:
    """Memory of results that no other result refers to; inputs stay."""
    bases = [viewed(node) if isinstance(node, fx.Node) else None for node in forward.results]
    held = {*forward.inputs, *(base for position, base in enumerate(bases) if position not in released)}
    freed = dict.fromkeys(base for position in released if (base := bases[position]) is not None and base not in held)
    return [value for base in freed for value in tensor_values(base)]
