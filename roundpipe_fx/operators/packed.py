"""Operators on packed sequences, for graphs.

PyTorch's own operators read the number of sequences at each step on the host, and have no fake implementation. The ones
here call them, so results are bitwise equal. The backward of a layer runs its forward once more, so the intermediate
results of its steps are never saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from roundpipe_fx.torch_private import autograd_in_kernels, pack_padded, pad_packed, recurrent_kernel, without_mkldnn


@torch.library.custom_op("roundpipe_fx::pack", mutates_args=(), tags=(torch.Tag.dynamic_output_shape,))
def pack(
    padded: Tensor, lengths: Tensor, batch_first: bool, rows: int | None, steps: int | None
) -> tuple[Tensor, Tensor]:
    """Pack padded sequences.

    Args:
        padded: sequences, the longest first.
        lengths: their lengths, on the CPU.
        batch_first: whether sequences are the first dimension, rather than steps.
        rows: sum of the lengths, if it is known while tracing.
        steps: largest length, if it is known while tracing.

    Returns:
        the elements of the sequences step by step, and the number of sequences at each step.
    """
    data, batch_sizes = pack_padded(padded, lengths, batch_first)
    # A custom operator must not return memory of its operands, as PyTorch's function may.
    return data.clone() if _share_storage(data, padded) else data, batch_sizes


@pack.register_fake
def _(padded: Tensor, lengths: Tensor, batch_first: bool, rows: int | None, steps: int | None) -> tuple[Tensor, Tensor]:
    if rows is None or steps is None:
        # Data decides how many rows and steps there are: sizes that are known only at run time.
        context = torch.library.get_ctx()
        sizes: tuple[Any, Any] = context.new_dynamic_size(min=1), context.new_dynamic_size(min=1)
    else:
        sizes = rows, steps
    return padded.new_empty([sizes[0], *padded.shape[2:]]), lengths.new_empty([sizes[1]])


def _keep_for_pack(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    padded, _, ctx.batch_first, _, _ = inputs
    ctx.save_for_backward(output[1])
    ctx.shape = padded.shape
    ctx.mark_non_differentiable(output[1])


def _pack_backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    (batch_sizes,) = ctx.saved_tensors
    return unpack(gradient, batch_sizes, ctx.batch_first, ctx.shape), None, None, None, None


@torch.library.custom_op("roundpipe_fx::unpack", mutates_args=())
def unpack(data: Tensor, batch_sizes: Tensor, batch_first: bool, shape: Sequence[int]) -> Tensor:
    """Padded sequences of a shape, with zeros as padding, from packed data."""
    return torch.ops.aten._pack_padded_sequence_backward(data, shape, batch_sizes, batch_first).contiguous()


@unpack.register_fake
def _(data: Tensor, batch_sizes: Tensor, batch_first: bool, shape: Sequence[int]) -> Tensor:
    return data.new_empty(shape)


pack.register_autograd(_pack_backward, setup_context=_keep_for_pack)


@torch.library.custom_op("roundpipe_fx::pad", mutates_args=())
def pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, steps: int, sequences: int
) -> tuple[Tensor, Tensor]:
    """Pad packed sequences.

    Args:
        data: the elements of the sequences, step by step.
        batch_sizes: number of sequences at each step.
        batch_first: whether sequences become the first dimension, rather than steps.
        value: value of the padding.
        steps: length of the padded sequences.
        sequences: number of sequences.

    Returns:
        the padded sequences and their lengths.

    Raises:
        ValueError: a sequence is longer than ``steps``.
    """
    longest = batch_sizes.size(0)
    if steps < longest:
        raise ValueError(
            "Expected total_length to be at least the length of the longest sequence in input, but got "
            f"total_length={steps} and max sequence length being {longest}"
        )
    padded, lengths = pad_packed(data, batch_sizes, batch_first, value, steps)
    return padded.contiguous(), lengths


@pad.register_fake
def _(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, steps: int, sequences: int
) -> tuple[Tensor, Tensor]:
    outer = [sequences, steps] if batch_first else [steps, sequences]
    return data.new_empty([*outer, *data.shape[1:]]), batch_sizes.new_empty([sequences])


def _keep_for_pad(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    data, _, ctx.batch_first, _, _, _ = inputs
    ctx.save_for_backward(output[1])
    ctx.rows = data.shape[0]
    ctx.mark_non_differentiable(output[1])


def _pad_backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    (lengths,) = ctx.saved_tensors
    return unpad(gradient, lengths, ctx.batch_first, ctx.rows), None, None, None, None, None


@torch.library.custom_op("roundpipe_fx::unpad", mutates_args=())
def unpad(padded: Tensor, lengths: Tensor, batch_first: bool, rows: int) -> Tensor:
    """The elements of padded sequences within their lengths, step by step."""
    data = pack_padded(padded, lengths, batch_first)[0]
    return data.clone() if _share_storage(data, padded) else data


@unpad.register_fake
def _(padded: Tensor, lengths: Tensor, batch_first: bool, rows: int) -> Tensor:
    return padded.new_empty([rows, *padded.shape[2:]])


pad.register_autograd(_pad_backward, setup_context=_keep_for_pad)


@torch.library.custom_op("roundpipe_fx::recur", mutates_args=())
def recur(
    kind: str,
    data: Tensor,
    batch_sizes: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    training: bool,
    bidirectional: bool,
    autocast: torch.dtype | None,
) -> list[Tensor]:
    """Run layers of a recurrent network on packed sequences, without dropout.

    Args:
        kind: ``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``.
        data: the elements of the sequences, step by step.
        batch_sizes: number of sequences at each step.
        states: initial hidden states and, for an LSTM, cell states.
        weights: weights of all layers, in the order of ``torch.lstm`` and similar functions.
        biases: whether biases are among them.
        layers: number of layers.
        training: whether the module is in training mode.
        bidirectional: whether sequences are also processed backwards.
        autocast: dtype of autocast, if it is enabled.

    Returns:
        the output, and the final states.
    """
    return _run(kind, data, batch_sizes, states, weights, (biases, layers, 0.0, training, bidirectional), autocast)


def _run(
    kind: str,
    data: Tensor,
    batch_sizes: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    options: tuple[Any, ...],
    autocast: torch.dtype | None,
) -> list[Tensor]:
    first = tuple(states) if kind == "lstm" else states[0]
    # Autocast is no part of the graph; the operator enters the state in which it was traced.
    with torch.autocast(data.device.type, autocast, enabled=autocast is not None):
        return list(recurrent_kernel(kind)(data, batch_sizes, first, list(weights), *options))


@recur.register_fake
def _(
    kind: str,
    data: Tensor,
    batch_sizes: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    training: bool,
    bidirectional: bool,
    autocast: torch.dtype | None,
) -> list[Tensor]:
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    kinds = [data.dtype] * (1 + len(states))
    if autocast is not None:
        kinds = _types_under_autocast(
            kind, data, states, weights, (biases, layers, 0.0, training, bidirectional), autocast
        )
    made = [data.new_empty([data.shape[0], width], dtype=kinds[0])]
    return made + [state.new_empty(state.shape, dtype=dtype) for state, dtype in zip(states, kinds[1:], strict=True)]


def _types_under_autocast(
    kind: str,
    data: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    options: tuple[Any, ...],
    autocast: torch.dtype,
) -> list[torch.dtype]:
    """Dtypes of the results under autocast, found by running one step of one sequence."""
    # One step of one sequence on fake tensors: kernels decide by themselves which result has which dtype.
    one = [state.new_empty([state.shape[0], 1, state.shape[2]]) for state in states]
    first = tuple(one) if kind == "lstm" else one[0]
    with without_mkldnn(), torch.autocast(data.device.type, autocast), torch.no_grad():
        step = data.new_empty([1, 1, data.shape[1]])
        results = recurrent_kernel(kind)(step, first, list(weights), *options, False)
    return [result.dtype for result in results]


def _keep_for_recur(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.kind, data, batch_sizes, states, weights, *ctx.options = inputs
    ctx.save_for_backward(data, batch_sizes, *states, *weights)
    ctx.states = len(states)


def _recur_backward(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Any, ...]:
    data, batch_sizes, *others = ctx.saved_tensors
    states, weights = others[: ctx.states], others[ctx.states :]
    _, data_needs, _, states_need, weights_need, *_ = ctx.needs_input_grad
    needs = [data_needs, *_each(states_need, len(states)), *_each(weights_need, len(weights))]
    made = iter(recur_backward(list(gradients), ctx.kind, data, batch_sizes, states, weights, *ctx.options, needs, []))
    selected = [next(made) if needed else None for needed in needs]
    of_states, of_weights = selected[1 : 1 + len(states)], selected[1 + len(states) :]
    return None, selected[0], None, of_states, of_weights, None, None, None, None, None


def _each(need: Any, count: int) -> list[bool]:
    return list(need) if isinstance(need, list | tuple) else [bool(need)] * count


@torch.library.custom_op("roundpipe_fx::recur_backward", mutates_args=())
def recur_backward(
    gradients: Sequence[Tensor],
    kind: str,
    data: Tensor,
    batch_sizes: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    training: bool,
    bidirectional: bool,
    autocast: torch.dtype | None,
    needs: Sequence[bool],
    sums: Sequence[Tensor | None],
) -> list[Tensor]:
    """Gradients of those of data, states and weights that need one.

    Each step adds to the gradient of a weight. If the gradient has a value already, autograd accumulates into that; an
    addition in another order would not be bitwise equal.

    Args:
        gradients: gradients of the results.
        needs: which of data, states and weights need a gradient.
        sums: for each returned gradient, its accumulated value; may be empty.
    """
    with autograd_in_kernels():
        wanted = iter(needs)
        # The forward runs once more, with autograd, and its intermediate results live in this call alone.
        differentiated = [value.detach().requires_grad_(next(wanted)) for value in (data, *states, *weights)]
        count = 1 + len(states)
        options = (biases, layers, 0.0, training, bidirectional)
        results = _run(
            kind, differentiated[0], batch_sizes, differentiated[1:count], differentiated[count:], options, autocast
        )
        leaves = [value for value in differentiated if value.requires_grad]
        totals = zip(leaves, sums or [None] * len(leaves), strict=True)
        # Gradients that exist already are passed in as the incoming gradient of an identity, so that autograd adds to
        # them in its own order.
        begun = [(value.view_as(value), total) for value, total in totals if total is not None]
        results += [value for value, _ in begun]  # autograd starts with the last call
        incoming = [*gradients, *(total for _, total in begun)]
        made = torch.autograd.grad(results, leaves, incoming, allow_unused=True, materialize_grads=True)
    return [
        # The result must not be an operand or another result.
        gradient.clone(memory_format=torch.contiguous_format)
        if _is_taken(gradient, made[:number], incoming)
        else gradient.contiguous()
        for number, gradient in enumerate(made)
    ]


@recur_backward.register_fake
def _(
    gradients: Sequence[Tensor],
    kind: str,
    data: Tensor,
    batch_sizes: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    training: bool,
    bidirectional: bool,
    autocast: torch.dtype | None,
    needs: Sequence[bool],
    sums: Sequence[Tensor | None],
) -> list[Tensor]:
    inputs = (data, *states, *weights)
    return [value.new_empty(value.shape) for value, needed in zip(inputs, needs, strict=True) if needed]


recur.register_autograd(_recur_backward, setup_context=_keep_for_recur)


def _share_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _is_taken(gradient: Tensor, *others: Sequence[Tensor]) -> bool:
    """Return whether two tensors share a storage, which results of an operator must not do with others."""
    return any(_share_storage(gradient, other) for several in others for other in several)
