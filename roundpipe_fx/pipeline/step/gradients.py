"""Gradients of a step: those that come in, adding results to ``.grad``, and passing them on to autograd.

The differentiated outputs of a graph are the model's own, and parameters that it has updated: autograd could continue
from these, so the graph has an incoming gradient for them, which is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from roundpipe_fx.pipeline.batches.microbatch import SplitTensor
from roundpipe_fx.pipeline.pipelined_graph import PipelinedGraph
from roundpipe_fx.runtime.incoming_gradients import ExpectedGradient, incoming_gradient
from roundpipe_fx.schedules.data_parallel import aligned_bytes


@dataclass(frozen=True)
class Receiver:
    """A tensor of the caller's that gets a gradient.

    Attributes:
        edge: where its gradient goes: to its version before the step, if the step updates it.
    """

    tensor: torch.Tensor
    edge: GradientEdge


def receivers_of(
    primals: Sequence[Sequence[Any]], splits: Sequence[SplitTensor], instead: Mapping[int, torch.Tensor] | None = None
) -> dict[int, Receiver]:
    """The tensors that get gradients of a step, by identity; a whole tensor in place of its parts.

    Args:
        primals: inputs of the compiled graph, for each microbatch.
        splits: the tensors that were split.
        instead: tensors that get the gradients of others in their place, by identity of those: of sharded parameters.
    """
    instead = instead or {}
    parts = {id(part) for split in splits for part in split.parts}
    tensors = [
        value
        for of_batch in primals
        for value in of_batch
        if isinstance(value, torch.Tensor) and id(value) not in parts
    ]
    tensors += [split.whole for split in splits]
    # A part of a split tensor gets no gradient of its own: the whole one does, from the concatenation of its parts'.
    pairs = {id(value): instead.get(id(value), value) for value in tensors}
    # The edge is taken before the step updates anything in place, which would give the tensor another one.
    return {key: Receiver(value, get_gradient_edge(value)) for key, value in pairs.items() if value.requires_grad}


def concatenate_split_gradients(gradients: dict[int, torch.Tensor], splits: Sequence[SplitTensor]) -> None:
    """Concatenate the gradients of tensors from those of their parts, which are removed.

    Autograd would allocate one of the whole batch's size for each part, and add them up.
    """
    for split in splits:
        parts = [gradients.pop(id(part), None) for part in split.parts]
        if all(gradient is None for gradient in parts):
            continue
        pieces = [
            # A microbatch that did not read its part contributes zeros.
            torch.zeros_like(part) if gradient is None else gradient
            for gradient, part in zip(parts, split.parts, strict=True)
        ]
        whole = torch.cat(pieces, split.dim)
        before = gradients.get(id(split.whole))  # given twice, or read by all microbatches as well
        gradients[id(split.whole)] = whole if before is None else before + whole


def hand_to_autograd(
    receivers: Mapping[int, Receiver],
    primals: Sequence[Sequence[Any]],
    outputs: Sequence[Sequence[Any]],
    gradients: dict[int, torch.Tensor],
) -> None:
    """Add gradients to ``.grad`` and pass on those of inputs that were computed. ``gradients`` is emptied.

    Autograd copies the gradient that it is given for a leaf without one, so a gradient that only the step refers to
    becomes ``.grad`` directly, unless there are hooks.
    """
    unshared = _find_unshared(primals, outputs, gradients)
    edges, rest = [], []
    for key, receiver in receivers.items():
        gradient = gradients.pop(key, None)
        # Popped one at a time, so a gradient that was added to an existing `.grad` is freed at once.
        if gradient is None:
            continue
        value = receiver.tensor
        unshared_total = key in unshared and gradient.stride() == value.stride()
        # Assigned without a copy, as autograd does for a gradient that nothing else refers to: same strides, no hooks
        # that expect a call.
        if value.is_leaf and value.grad is None and not has_hooks(value) and unshared_total:
            value.grad = gradient
        else:
            edges.append(receiver.edge)
            rest.append(gradient)
    if edges:
        torch.autograd.backward(edges, rest)


def has_hooks(value: torch.Tensor) -> bool:
    """Return whether functions of the user's are called with a tensor's gradient."""
    return bool(value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None))


def loss_with_gradients(
    loss: torch.Tensor,
    receivers: Mapping[int, Receiver],
    primals: Sequence[Sequence[Any]],
    outputs: Sequence[Sequence[Any]],
    gradients: dict[int, torch.Tensor],
) -> torch.Tensor:
    """A loss whose ``backward()`` passes on gradients that are computed already, without scaling them.

    ``gradients`` is emptied. Parameters without a gradient are not part of the loss's graph.
    """
    unshared = _find_unshared(primals, outputs, gradients)
    # Autograd stores a gradient without other references as ``.grad``, even if its memory is shared.
    with_gradients = [
        (receiver.tensor, gradients.pop(key), key in unshared)
        for key, receiver in receivers.items()
        if key in gradients
    ]
    # A gradient that shares memory is copied, since in-place operations on `.grad` (clipping, zeroing) would change
    # other tensors.
    values = [gradient if is_own else gradient.clone() for _, gradient, is_own in with_gradients]
    return _Ready.apply(values, loss, *(tensor for tensor, _, _ in with_gradients))


class _Ready(torch.autograd.Function):
    """A loss as a function of the tensors that its gradients belong to, with the gradients computed already."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], loss: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return (None, None, *gradients)


def _find_unshared(
    primals: Sequence[Sequence[Any]], outputs: Sequence[Sequence[Any]], gradients: Mapping[int, torch.Tensor]
) -> Collection[int]:
    """The gradients whose elements are no others', and which use all their memory: each alone, or those together that
    were averaged as one tensor."""
    others = {
        value.untyped_storage()._cdata
        for values in (*primals, *outputs)
        for value in values
        if isinstance(value, torch.Tensor)
    }
    # DTensors: the memory is that of the local tensor, which may be padded to equal rows.
    padded = {key: value.to_local() for key, value in gradients.items() if isinstance(value, DTensor)}
    by_storage: dict[int, dict[int, torch.Tensor]] = {}
    for key, value in gradients.items():
        local = padded.get(key, value)
        by_storage.setdefault(local.untyped_storage()._cdata, {})[key] = local
    # Gradients from one buffer (a bucket) count as unshared if together they fill it.
    unshared: set[int] = set()
    for storage, of_storage in by_storage.items():
        rows_alone = len(of_storage) == 1 and of_storage.keys() <= padded.keys()
        if storage not in others and (rows_alone or _is_filled_once([*of_storage.values()])):
            unshared |= of_storage.keys()
    return unshared


def _is_filled_once(values: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors in the same memory have different elements, and leave none of it but what aligns them."""
    if len(values) == 1:
        return values[0].untyped_storage().nbytes() == values[0].nbytes
    # Invariant: the elements before `end` belong to the gradients that were looked at, without overlap.
    end = 0
    for value in sorted(values, key=lambda value: value.storage_offset() * value.itemsize):
        start = int(value.storage_offset()) * value.itemsize
        if not end <= start <= aligned_bytes(end) or torch.empty_like(value, device="meta").stride() != value.stride():
            return False
        end = start + value.nbytes
    return values[0].untyped_storage().nbytes() <= aligned_bytes(end)


def gradients_of_loss(graph: PipelinedGraph, loss: int, primals: Sequence[Any], weight: float) -> list[torch.Tensor]:
    """The incoming gradients of a microbatch: its loss's weight, and zeros for parameters that it updates.

    Args:
        loss: number of the output that is the loss.
        weight: of its loss in that of the batch.
    """
    gradients = []
    for position, traced, strided in zip(graph.main.tangents, graph.tangents, graph.strided, strict=True):
        # An incoming gradient for the loss is its weight; parameters and buffers that the step updates are
        # differentiated outputs of AOTAutograd's graph as well, and get zeros.
        if position == loss:
            gradients.append(torch.full((), weight, dtype=traced.dtype, device=traced.device))
        else:
            like = ExpectedGradient.of(primals[graph.main.mutations[position]], traced)
            on_device = dataclasses.replace(like, device=traced.device)  # an offloaded model's lies on the host
            gradients.append(incoming_gradient(None, on_device, strided))
    return gradients
