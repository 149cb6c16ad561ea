"""Random streams: each microbatch has its own stream of random numbers.

Generators belong to the process (CPU) or the device, and several workers would draw from them in an undefined order. So
each microbatch has its own generator state: it is set around each operation that draws, under a lock, and the previous
state is restored. Random numbers then depend on the seed and on the index of the microbatch, not on threads, devices or
the schedule::

    state s of the generator when the step begins
    microbatch 0    starts from s itself
    microbatch n    starts from a seed: a hash of s and n, whatever the number of microbatches
    after the step  the generator has the state in which microbatch 0 has left its own

So a step of one microbatch draws the same numbers as a step without pipelining, and leaves the generator in the same
state.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir import bodies
from roundpipe_fx.torch_private import ForkedLock, graph_module, run_and_save_rng_state, run_with_rng_state

_local = threading.local()
_locks: dict[torch.device, ForkedLock] = {}
_making = ForkedLock()


class RandomStream:
    """The generator state of one microbatch."""

    def __init__(self, state: torch.Tensor) -> None:
        self.state = state
        self.drawn = False
        self.lock = threading.RLock()


def random_streams(device: torch.device, microbatches: int, first: int = 0) -> list[RandomStream]:
    """A stream for each microbatch: number 0 has the state of the device's generator, the others are seeded by it.

    Args:
        first: number of the first one's stream: replicas with the same state have different microbatches.
    """
    state = state_of(device)
    digest = hashlib.sha256(state.numpy().tobytes()).digest()
    streams = []
    for number in range(first, first + microbatches):
        if number:
            # Seeds depend on the generator's state and on the number of the microbatch, not on how many there are.
            seed = int.from_bytes(hashlib.sha256(digest + number.to_bytes(8, "little")).digest()[:7], "little")
            streams.append(RandomStream(torch.Generator(device).manual_seed(seed).get_state()))
        else:
            streams.append(RandomStream(state))
    return streams


def finish(device: torch.device, streams: list[RandomStream]) -> None:
    """Set the device's generator to the state of the first stream, if any random number was drawn."""
    if any(stream.drawn for stream in streams):
        set_state(device, streams[0].state)


class drawing:
    """Context manager in which operations of this thread draw from a stream, on a device."""

    def __init__(self, stream: RandomStream, device: torch.device) -> None:
        self._stream_and_device = (stream, device)

    def __enter__(self) -> None:
        _local.stream_and_device = self._stream_and_device

    def __exit__(self, *exc: object) -> None:
        _local.stream_and_device = None


def draws(module: fx.GraphModule) -> bool:
    """Return whether a stage module draws or replays random numbers."""
    return any(_is_random(node, module) for node in module.graph.nodes)


def draw_from_streams(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a stage module in which every random operation draws from the stream of its microbatch."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(module.graph._codegen)
    for node, original in zip(graph.nodes, module.graph.nodes, strict=True):
        if _is_random(original, module):
            node.target = _wrap_operation(node.target)
    return graph_module(module, graph, module._get_name())


def run_on_stream(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Wrap a compiled stage module so that all its random numbers come from the stream of its microbatch."""
    return _wrap_operation(call)


def _is_random(node: fx.Node, module: fx.GraphModule) -> bool:
    return bodies.draws(node, module) or node.target in (run_and_save_rng_state, run_with_rng_state)


def _wrap_operation(operation: Callable[..., Any]) -> Callable[..., Any]:
    def from_stream(*args: Any, **kwargs: Any) -> Any:
        # Outside of a step (tracing, a call of the module by itself) the process's generator is used.
        stream_and_device = getattr(_local, "stream_and_device", None)
        if stream_and_device is None:
            return operation(*args, **kwargs)
        stream, device = stream_and_device
        # The generator belongs to the device: two workers must not swap its state at one time.
        with stream.lock, _lock(device):
            before = state_of(device)
            set_state(device, stream.state)
            try:
                return operation(*args, **kwargs)
            finally:
                after = state_of(device)
                # As bytes: comparing tensors is an operation, which ``count_host_syncs`` would count.
                stream.drawn = stream.drawn or after.numpy().tobytes() != stream.state.numpy().tobytes()
                stream.state = after
                set_state(device, before)

    return from_stream


def _lock(device: torch.device) -> ForkedLock:
    with _making:
        return _locks.get(device) or _locks.setdefault(device, ForkedLock())


def state_of(device: torch.device) -> torch.Tensor:
    """The state of a device's generator."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of a device's generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)
