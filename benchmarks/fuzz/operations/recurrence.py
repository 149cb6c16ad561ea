"""Recurrence: layers, cells in a loop, and one by hand."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind
from benchmarks.fuzz.program import Builder


@kind(0.25)
def lstm(b: Builder) -> None:
    x = b.sequence()
    more = b.rng.choice(["", ", num_layers=2", ", bidirectional=True"])
    b.program.notes.add("rnn")
    b.out(f"{b.module(f'nn.LSTM({x.shape[2]}, 4, batch_first=True{more})')}({x})[0]")


@kind(0.25)
def gru(b: Builder) -> None:
    x = b.sequence()
    b.program.notes.add("rnn")
    layer = b.module(f"nn.{b.rng.choice(['GRU', 'RNN'])}({x.shape[2]}, 4, batch_first=True)")
    b.out(f"{layer}({x})[1].transpose(0, 1)")


@kind(0.5)
def lstm_cell(b: Builder) -> None:
    x = b.sequence()
    cell = b.module(f"nn.LSTMCell({x.shape[2]}, 3)")
    b.line("h = c = x0.new_zeros(x0.shape[0], 3)")
    for step in range(min(3, x.shape[1])):
        b.line(f"h, c = {cell}({x}[:, {step}], (h, c))")
    b.out("h + c")


@kind(0.5)
def gru_cell(b: Builder) -> None:
    x = b.sequence()
    cell = b.module(f"nn.{b.rng.choice(['GRUCell', 'RNNCell'])}({x.shape[2]}, 3)")
    b.line("h = None")
    for step in range(min(3, x.shape[1])):
        b.line(f"h = {cell}({x}[:, {step}], h)")
    b.out("h")


@kind(0.5)
def linear_recurrence(b: Builder) -> None:
    x = b.sequence()
    decay = b.parameter(x.shape[2])
    b.line("h = 0")
    b.line("hs = []")
    for step in range(min(4, x.shape[1])):
        b.line(f"h = h * torch.sigmoid({decay}) + {x}[:, {step}]")
        b.line("hs.append(h)")
    b.out("torch.stack(hs, 1)")
