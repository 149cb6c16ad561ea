"""Packed sequences: functions on them as Dynamo can trace them.

Dynamo does not trace ``pack_padded_sequence`` and ``pad_packed_sequence``, and recurrent modules read the number of
sequences on the host. In our compilations Dynamo inlines the functions below instead; what cannot be traced in these is
an operator of :mod:`roundpipe_fx.operators.packed`. Models that need it: taggers and acoustic models with an LSTM or a
GRU over sentences of different lengths, whose graph otherwise breaks at each call of the three.

A packed sequence has the rows of all sequences, step by step. Two sequences of 3 steps and 1 step::

    padded [[1, 2, 3], [4, 0, 0]]  ──▶  data [1, 4, 2, 3], batch_sizes [2, 1, 1]

The number of sequences is known from the padded tensor. The packed sequence stores it, because otherwise the size of
the last states, which users add to and compare with others, would be known only at run time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from roundpipe_fx import torch_private
from roundpipe_fx.operators.packed import pack, pad, recur


@functools.cache
def trace_packed_sequences() -> None:
    """Make Dynamo trace packed sequences in our compilations."""
    torch_private.trace_packed_sequences(
        pack=pack_padded_sequence, pack_by_numbers=pack_by_numbers_of_tensors, pad=pad_packed_sequence, forward=forward
    )


def pack_padded_sequence(
    input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """PyTorch's, traced."""
    if isinstance(lengths, torch.Tensor):
        return _pack(input, lengths.to(dtype=torch.int64), batch_first, enforce_sorted, None, None)
    # Lengths that are numbers of the program are known while tracing, and so are the rows and steps of the packed data.
    tensor = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    return _pack(input, tensor, batch_first, enforce_sorted, sum(lengths), max(lengths))


def pack_by_numbers_of_tensors(
    input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """``pack_padded_sequence`` for lengths that were read from a tensor, such as ``lengths.tolist()``."""
    tensor = torch.stack([torch.scalar_tensor(length, dtype=torch.int64, device="cpu") for length in lengths])
    return _pack(input, tensor, batch_first, enforce_sorted, None, None)


def _pack(
    input: Tensor, lengths: Tensor, batch_first: bool, enforce_sorted: bool, rows: int | None, steps: int | None
) -> PackedSequence:
    batch_dim = 0 if batch_first else 1
    sorted_indices = None
    if not enforce_sorted:
        # Kernels need the longest sequence first; the sorted order is kept to undo it.
        lengths, sorted_indices = torch.sort(lengths, descending=True)
        sorted_indices = sorted_indices.to(input.device)
        input = input.index_select(batch_dim, sorted_indices)
    data, batch_sizes = pack(input, lengths, batch_first, rows, steps)
    packed = PackedSequence(data, batch_sizes, sorted_indices, None)
    packed._sequences = input.size(batch_dim)  # type: ignore[attr-defined]
    return packed


def pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """PyTorch's, traced."""
    steps = sequence.batch_sizes.size(0) if total_length is None else total_length
    padded, lengths = pad(
        sequence.data, sequence.batch_sizes, batch_first, float(padding_value), steps, _count_sequences(sequence, None)
    )
    unsorted_indices = sequence.unsorted_indices
    if unsorted_indices is None:
        return padded, lengths
    return padded.index_select(0 if batch_first else 1, unsorted_indices), lengths[unsorted_indices.cpu()]


def _count_sequences(packed: Any, states: tuple[Tensor, ...] | None) -> Any:
    """Count the sequences."""
    if hasattr(packed, "_sequences"):
        return packed._sequences
    if packed.sorted_indices is not None:
        return packed.sorted_indices.size(0)
    return states[0].size(1) if states is not None else packed.batch_sizes[0].item()


def forward(self: Any, input: Any, hx: Any = None) -> Any:
    """The ``forward`` of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` on a packed sequence, for tracing.

    Layers run one by one if there is dropout between them, which then is in the graph, and on the CPU, where the
    kernels do the same internally.
    """
    self._update_flat_weights()
    data, batch_sizes = input.data, input.batch_sizes
    has_cells = self.mode == "LSTM"
    directions = 2 if self.bidirectional else 1
    states = None
    if hx is not None:
        hx = self.permute_hidden(hx, input.sorted_indices)
        states = tuple(hx) if has_cells else (hx,)
    sequences = _count_sequences(input, states)
    widths = (self.proj_size or self.hidden_size, self.hidden_size) if has_cells else (self.hidden_size,)
    sizes = [(self.num_layers * directions, sequences, width) for width in widths]
    if states is None:
        states = tuple(torch.zeros(size, dtype=data.dtype, device=data.device) for size in sizes)
    self.check_input(data, batch_sizes)
    for state, size in zip(states, sizes, strict=True):
        self.check_hidden_size(state, size, "Expected hidden size {}, got {}")
    device = data.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    dropout = self.dropout if self.training else 0.0
    # Several layers in one call where the kernel takes them, and one per call otherwise.
    layers = 1 if dropout > 0 or device == "cpu" else self.num_layers
    weights, weights_per_layer = self._flat_weights, len(self._flat_weights) // self.num_layers
    initial_states = [state.split(layers * directions) for state in states]
    final_states = []
    for part, initial in enumerate(zip(*initial_states, strict=True)):
        # Dropout acts between layers, not before the first.
        if part and dropout > 0:
            data = torch.dropout(data, dropout, True)
        part_weights = weights[part * layers * weights_per_layer : (part + 1) * layers * weights_per_layer]
        data, *final = recur(
            self.mode.lower(),
            data,
            batch_sizes,
            list(initial),
            part_weights,
            self.bias,
            layers,
            self.training,
            self.bidirectional,
            autocast,
        )
        final_states.append(final)
    output = PackedSequence(data, batch_sizes, input.sorted_indices, input.unsorted_indices)
    output._sequences = sequences  # type: ignore[attr-defined]
    hidden = tuple(torch.cat(parts) for parts in zip(*final_states, strict=True))
    return output, self.permute_hidden(hidden if has_cells else hidden[0], input.unsorted_indices)
