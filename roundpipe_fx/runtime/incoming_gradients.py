"""Incoming gradients of a call: in the memory layout that the backward was traced with, and none that no loss needs.

A language model returns logits beside its loss. Autograd fills the missing gradient of such an output with zeros of the
output's size, and keeps them until the backward has read them. It passes ``None`` if the node that AOTAutograd makes
for a call is told so, which only the caller of AOTAutograd's function can do, since its results lead to that node::

    Dynamo's code            AOTAutograd                   forward program        backward program
      │                           │                                │                      │
      ├── leaving_out(run) ──────▶├── flattens ───────────────────▶┤ returning(run)       │
      │                           │◀── results ────────────────────┤ notes its outputs    │
      │   tells the node          │                                                       │
      │◀── outputs ───────────────┤                                                       │
      │                           │                                                       │
      │   a backward: autograd calls the node's hook, and then the node ─────────────────▶┤ receiving(run)
      │               hands over what the outputs of this call were like                  │ fills what is missing

The backward program puts an expanded scalar zero in the place of ``None``, or full zeros where strides matter. Where
sizes are symbolic they are known only in the call, so a hook hands them over in the thread of the backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx import torch_private
from roundpipe_fx.runtime.stage_compiler import Boxed


@dataclass(frozen=True)
class ExpectedGradient:
    """The expected properties of an incoming gradient."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, output: torch.Tensor, traced: torch.Tensor) -> ExpectedGradient:
        """A tensor of the output's shape, with its dimensions in memory in the order that the gradient was traced
        with."""
        stride = traced.stride()
        # Symbolic strides: the order of the dimensions in memory is taken from the hints, and the sizes from this
        # output.
        if not all(isinstance(step, int) for step in stride):
            hints = [torch_private.size_hint(step) for step in stride]
            steps, following = [0] * len(hints), 1
            # From the innermost dimension outwards: each step is the product of the sizes inside.
            for dim in sorted(range(len(hints)), key=lambda dim: (hints[dim], -dim)):
                steps[dim] = following
                following *= max(output.shape[dim], 1)
            stride = tuple(steps)
        return cls(output.shape, stride, output.dtype, output.device)


def incoming_gradient(gradient: torch.Tensor | None, like: ExpectedGradient, strided: bool) -> torch.Tensor:
    """An incoming gradient with the strides that it was traced with; zeros if its output was not used.

    One that was not expected has the strides in which it came: its stage is compiled for these
    (:mod:`roundpipe_fx.runtime.expanded_inputs`).

    Args:
        gradient: the gradient; ``None``: its output was not used.
        like: its sizes and strides.
        strided: whether strides matter: zeros are an expanded scalar otherwise.
    """
    # No strides were asked for: one zero, expanded, is enough.
    if gradient is None and not strided:
        return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
    if gradient is not None and gradient.stride() == like.stride:
        return gradient
    # An expanded gradient (of a mean) stays expanded: its stage is compiled for it.
    if gradient is not None and len(like.shape) and not any(like.stride):
        return gradient
    made = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)
    return made.zero_() if gradient is None else made.copy_(gradient)


@dataclass(frozen=True)
class _Returned:
    """Outputs of a forward program that has run.

    Attributes:
        outputs: the outputs, by identity.
        likes: properties of the incoming gradients; ``None``: they are known from the graph.
    """

    outputs: dict[int, weakref.ref[Any]]
    likes: Sequence[ExpectedGradient] | None


class _Thread(threading.local):
    returned: _Returned | None = None
    likes: Sequence[ExpectedGradient] | None = None


_thread = _Thread()


def record_outputs(run: Boxed, outputs: int, traced: Sequence[tuple[int, torch.Tensor]] | None) -> Boxed:
    """Wrap a forward program so that its outputs are known to :func:`drop_unused_gradients`.

    Args:
        outputs: number of its leading results that are outputs.
        traced: for each incoming gradient the number of its output, and its fake value; ``None``: all sizes are known.
    """

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        results = run(arguments)
        # Weak: a dropped output must die. The identity alone could belong to another object by then.
        known = {id(value): weakref.ref(value) for value in results[:outputs] if isinstance(value, torch.Tensor)}
        likes = (
            [ExpectedGradient.of(results[position], fake) for position, fake in traced] if traced is not None else None
        )
        _thread.returned = _Returned(known, likes)
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def drop_unused_gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of AOTAutograd so that gradients of unused outputs do not arrive.

    Args:
        run: runs at most one forward program, one wrapped in :func:`record_outputs`, and returns its outputs.
    """

    def call(*args: Any) -> Any:
        # A nested call (a compiled function inside another) must not see the outer one's outputs.
        _thread.returned = None
        try:
            outputs = run(*args)
            returned = _thread.returned
        finally:
            _thread.returned = None
        if returned is not None and torch.is_grad_enabled():
            _tell(outputs, returned)
        return outputs

    return call


def _tell(outputs: Sequence[Any], returned: _Returned) -> None:
    """Tell the node of a call; outputs that are views of others lead to it through their base."""
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            continue
        # A view of an output has the output's node behind it.
        for value in (output,) if output._base is None else (output, output._base):
            reference = returned.outputs.get(id(value))
            known = reference is not None and reference() is value
            node = torch_private.leave_unused_gradients_out(value) if known else None
            if node is None:
                continue
            if returned.likes is not None:
                node.register_prehook(_make_gradient_hook(returned.likes))
            return  # all outputs have the same node


def _make_gradient_hook(likes: Sequence[ExpectedGradient]) -> Callable[[Any], None]:
    def hook(_gradients: Any) -> None:
        _thread.likes = likes

    return hook


def fill_missing_gradients(run: Boxed, tangents: Mapping[int, bool]) -> Boxed:
    """Wrap a backward program so that it gets zeros of the sizes of its call for gradients that did not arrive.

    Args:
        tangents: positions of the incoming gradients, in order, and whether their strides matter.
    """

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        # Taken at once: the next backward in this thread may be another call's.
        likes, _thread.likes = _thread.likes, None
        for (position, strided), like in zip(tangents.items(), likes or (), strict=False):
            if arguments[position] is None:
                arguments[position] = incoming_gradient(None, like, strided)
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def observe_unexpected_gradients(run: Boxed, unexpected: Mapping[int, str], see: Callable[[str], None]) -> Boxed:
    """Wrap a backward program so that it reports unexpected incoming gradients.

    Args:
        unexpected: names of the incoming gradients that the plan assumes missing, by position.
        see: called with the name of each one that is passed.
    """

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        for position, name in unexpected.items():
            if arguments[position] is not None:
                see(name)
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
