"""The chain of a row of layers, measured by running each of them forward and back, as rotor does."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from roundpipe_fx import torch_private
from roundpipe_fx.remat.sequences.layer_costs import Chain
from roundpipe_fx.report.peak_memory import measure_peak
from roundpipe_fx.torch_private import tree_leaves, tree_map


def measure_layers(layers: SequenceOf[nn.Module], value: Any, device: torch.device) -> Chain:
    """Measure layers, with a few runs of each.

    Buffers (statistics of batch norms), gradients and generators are restored afterwards.

    Args:
        layers: each takes the result of the one before.
        value: the input of the first: a tensor, or a structure of tensors.

    Returns:
        the chain; a gradient of a parameter counts as a temporary of its backward and of all later ones, since it
        stays.
    """
    forward, backward, boundary, saved, temporary, backward_temporary = [], [], [_count_bytes(value)], [0], [], []
    with _restore_state_after(layers, device):
        for layer in layers:
            # Each layer is measured alone: its input is cut off from the layers before it.
            value = _detach(value)
            with torch.enable_grad():
                # Seconds first: they run the layer several times, and what it allocates once is there when memory is
                # measured.
                forward.append(_time_call(functools.partial(layer, value), device))
                with measure_peak(device) as ran:
                    result = layer(value)
                held = ran.current
                saved.append(held)
                temporary.append(ran.bytes - held)
                boundary.append(_count_bytes(result))
                outputs = [leaf for leaf in _find_floats(result) if leaf.requires_grad]
                inputs = [leaf for leaf in _find_floats(value) if leaf.requires_grad]
                parameters = [p for p in layer.parameters() if p.requires_grad]
                # Ones as incoming gradients: their values change nothing in time or memory.
                seeds = [torch.ones_like(output) for output in outputs]
                sources = (*inputs, *parameters)
                differentiate = functools.partial(torch.autograd.grad, outputs, sources, seeds, allow_unused=True)
                differentiable = bool(outputs and sources)
                # The graph is needed once more, for the memory of a backward that frees it.
                differentiate_again = functools.partial(differentiate, retain_graph=True)
                backward.append(_time_call(differentiate_again, device) if differentiable else 0.0)
                with measure_peak(device) as ran:
                    if differentiable:
                        differentiate()
                # The gradient of the input is counted as a boundary of the chain.
                backward_temporary.append(max(ran.bytes - boundary[-2], 0))
            value = result
    gradients = [sum(p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad) for layer in layers]
    accumulated = 0
    # A parameter's gradient is made in its layer's backward and stays: it counts in the backward of every layer before.
    for index in reversed(range(len(layers))):
        backward_temporary[index] += accumulated
        accumulated += gradients[index]
        # A forward that is recomputed in the backward runs when gradients of later layers are there already; its own
        # are counted, too.
        temporary[index] += sum(gradients[index:])
    return Chain(
        forward=tuple(forward),
        backward=tuple(backward),
        boundary=tuple(boundary),
        saved=tuple(saved),
        forward_temporary=tuple(temporary),
        backward_temporary=(*backward_temporary, 0),
    )


_TIMES = 3


def _time_call(call: Callable[[], Any], device: torch.device) -> float:
    """Median of some calls, after one to warm up."""
    call()
    seconds = []
    for _ in range(_TIMES):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _find_floats(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _count_bytes(value: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _detach(value: Any) -> Any:
    def detach(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().requires_grad_(leaf.is_floating_point())

    return tree_map(detach, value)


@contextmanager
def _restore_state_after(layers: SequenceOf[nn.Module], device: torch.device) -> Iterator[None]:
    buffers = [(buffer, buffer.detach().clone()) for layer in layers for buffer in layer.buffers()]
    restore = torch_private.save_rng_states([device] if device.type == "cuda" else [])
    try:
        yield
    finally:
        restore()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
