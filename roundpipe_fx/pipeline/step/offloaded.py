"""Offloaded models: the model is on the host, accelerators train it.

Parameters, their gradients and the optimizer's state then need memory of an accelerator only for the current stage, as
with RoundPipe (thustorage/RoundPipe) and with DeepSpeed's ZeRO-Offload (Ren et al., 2021).

A graph is traced for the device that runs it, since PyTorch and models choose their operations by the device. So while
a microbatch is captured or its results are returned, the model's own tensors appear to be on the device: their data is
exchanged for data of the same shape without memory. Guards, hooks and identities do not change.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe_fx.pipeline.batches.structures import map_leaves
from roundpipe_fx.pipeline.capture.captured_calls import CapturedCalls
from roundpipe_fx.pipeline.step.local import Local
from roundpipe_fx.runtime.host_buffers import allocating_on_host
from roundpipe_fx.runtime.pinned_memory import pinned_copy
from roundpipe_fx.runtime.pipeline_run import Finished
from roundpipe_fx.torch_private import inner_tensors

_NOT_PINNED = (
    "No weight has changed and nothing of the step has run: close other programs and run it again, or use a host with "
    "more memory."
)


def make_mode(mode: Local, modules: Sequence[nn.Module], extra: Iterable[torch.Tensor] = ()) -> Local:
    """The mode of a step: offloaded, if a model is on the host while its workers are not.

    Args:
        mode: that of the step before.
        modules: the model, and other modules with parameters and buffers.
        extra: more tensors that move with the model.

    Raises:
        ValueError: part of the model is on the host and part of it elsewhere, or the workers are the host and the model
            is on an accelerator.
    """
    # The mode of the step before is reused: it knows which tensors are pinned.
    known = mode if isinstance(mode, Offloaded) else None
    here = mode if known is None else Local(mode.devices)
    devices = mode.devices
    if not devices:
        return here
    if devices[0].type == "cpu":
        first = next(
            (value for module in modules for value in itertools.chain(module.parameters(), module.buffers())), None
        )
        if first is not None and first.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"the model lies on {str(first.device)!r}, but devices={list(map(str, devices))}: move it there, as "
                "model.to('cpu'), or name the devices that it is to run on."
            )
        return here
    named = {
        id(value): (name, value)
        for module in modules
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    elsewhere = [name for name, value in named.values() if value.device.type != "cpu"]
    on_host = [name for name, value in named.values() if value.device.type == "cpu"]
    if elsewhere and not on_host:
        return here
    if elsewhere:
        raise ValueError(
            f"{on_host[0]!r} lies on the CPU and {elsewhere[0]!r} does not: move the whole model to "
            f"{str(devices[0])!r}, or all of it to the CPU, from where stages get what they need while they run."
        )
    model = known or Offloaded(devices)
    tensors = (part for _, value in named.values() for part in tensors_of(value))
    # Tied tensors appear once, by identity.
    model.tensors = {id(value): value for value in (*tensors, *extra)}
    return model


def tensors_of(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a parameter or a buffer consists of: itself; of a quantized one its parts.

    torchao's weights are tensors around others. bitsandbytes' have scales in a ``quant_state`` beside their numbers.
    """
    inner = inner_tensors(value)
    for part in inner:
        yield from tensors_of(part)
    if inner:
        return
    yield value
    # The list grows while it is walked: a state may hold another of its type (double quantization of the scales).
    extra = [getattr(value, "quant_state", None)]
    for state in extra:
        for part in () if state is None else vars(state).values():
            if isinstance(part, torch.Tensor):
                yield part
            elif type(part) is type(state):
                extra.append(part)


class Offloaded(Local):
    """A step of an offloaded model. Arguments as for :class:`Local`.

    Attributes:
        device: where the model appears to be.
        tensors: its parameters and buffers, and those that move with them, by identity.
    """

    offloaded = True

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        self.device = devices[0]
        self.tensors: dict[int, torch.Tensor] = {}
        self._without_memory: dict[int, tuple[torch.Tensor, int]] = {}
        self._seen: dict[int, int] = {}

    @property
    def updatable(self) -> Collection[int]:
        """All of the model's."""
        return self.tensors.keys()

    def generator_device(self, captured: CapturedCalls) -> torch.device:
        """The device that runs the model."""
        return self.device

    def to_device(self, inputs: Any) -> Any:
        """Inputs, with all tensors on the device."""
        return map_leaves(lambda _, v: v.to(self.device) if isinstance(v, torch.Tensor) else v, inputs)

    def to_model(self, outputs: Any) -> Any:
        """Outputs, with all tensors on the host; it waits for them."""
        return map_leaves(lambda _, v: v.cpu() if isinstance(v, torch.Tensor) else v, outputs)

    def run(self, *args: Any) -> Finished:
        """As in any mode, with the model's memory pinned."""
        self.pin()
        return super().run(*args)

    def pin(self) -> None:
        """Pin the memory of tensors that use all of it: copies from there overlap with the device's work.

        Raises:
            HostMemoryError: the host has no memory for it. What is pinned already stays so; the others have their own.
        """
        # The address tells whether a tensor got new memory since (`load_state_dict`, `model.to`).
        new = [key for key, value in self.tensors.items() if self._seen.get(key) != value.data_ptr()]
        if not new:
            return
        storages = Counter(value.untyped_storage()._cdata for value in self.tensors.values())
        for key in new:
            value = self.tensors[key]
            storage = value.untyped_storage()
            # A tensor that shares its storage, or uses part of it, stays pageable: pinning would copy the storage, and
            # break the sharing.
            is_whole = storage.nbytes() == value.numel() * value.element_size() and storages[storage._cdata] == 1
            if is_whole and storage.nbytes():
                with allocating_on_host(storage.nbytes(), "the model's weights in pinned memory", _NOT_PINNED):
                    value.data = pinned_copy(value.data, self.device)
            self._seen[key] = value.data_ptr()

    @contextlib.contextmanager
    def calling(self, updated: Collection[int]) -> Iterator[None]:
        """Context manager in which the model's tensors appear to be on the device.

        Args:
            updated: those that will be written to, by identity; they keep what is written.
        """
        moved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        try:
            for key, value in self.tensors.items():
                stand_in, size = self._stand_in(key, value)
                # A buffer that was updated needs memory while the model's code may read it; all others are never read
                # in between.
                if key in updated:
                    stand_in.untyped_storage().resize_(size)
                    stand_in.copy_(value.data)
                gradient = value.grad if value.is_leaf else None
                moved.append((value, value.data, gradient, stand_in))
                # `value.data = …` refuses data on another device than that of the gradient.
                if gradient is not None:
                    value.grad = None  # it is on the host
                value.data = stand_in
            yield
        finally:
            for value, data, gradient, stand_in in moved:
                value.data = data
                # The model's code may have updated the stand-in (BatchNorm outside the graph): what it wrote goes back
                # to the host.
                if id(value) in updated:
                    data.copy_(stand_in)
                    stand_in.untyped_storage().resize_(0)
                if gradient is not None:
                    value.grad = gradient

    def _stand_in(self, key: int, value: torch.Tensor) -> tuple[torch.Tensor, int]:
        """A tensor like another, on the device and without memory, and the bytes that it would have."""
        cached = self._without_memory.get(key)
        # One tensor for each of the model's, made once; its memory is given back at once, so it takes none between the
        # steps.
        if cached is None or not _has_same_layout(cached[0], value):
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
            cached = self._without_memory[key] = made, made.untyped_storage().nbytes()
            made.untyped_storage().resize_(0)
        return cached


def _has_same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (first.shape, first.stride(), first.dtype) == (second.shape, second.stride(), second.dtype)
