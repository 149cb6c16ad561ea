"""Buffers that are read and updated: averages, counters, rings, code books."""

from __future__ import annotations

import torch

from benchmarks.fuzz.operations.pool import kind
from benchmarks.fuzz.program import Builder


@kind(0.7)
def moving_average(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    mean = b.buffer(f"torch.zeros({x.shape[-1]})")
    order = b.rng.choice(["before", "after", "both"])
    made = b.let(f"{x} - {mean}") if order != "after" else x
    b.line(f"{mean}.mul_(0.9).add_({x}.detach().flatten(0, -2).mean(0), alpha=0.1)")
    b.out(f"{made} * 1.5" if order == "before" else f"{made} + {mean}")


@kind(0.7)
def moving_average_no_grad(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    mean = b.buffer(f"torch.zeros({x.shape[-1]})")
    b.line(f"with torch.no_grad(): {mean}.lerp_({x}.flatten(0, -2).mean(0), 0.1)")
    b.out(f"{x} * {mean}")


@kind(0.8)
def counter(b: Builder) -> None:
    x = b.float()
    count = b.buffer("torch.zeros((), dtype=torch.long)")
    update = b.rng.choice([f"{count}.add_(1)", f"{count} += 1", f"{count}.copy_({count} + 1)"])
    b.line(update)
    b.out(b.rng.choice([f"{x} * {x}.detach() + {count} * 0.01 * {x}", f"{x} / ({count} + 1)", f"{x} * 0.9**{count}"]))


@kind(0.5)
def counter_read_twice(b: Builder) -> None:
    x = b.float()
    count = b.buffer(b.rng.choice(["torch.ones((), dtype=torch.long)", "torch.ones(())", "torch.ones(1)"]))
    first = b.let(f"{x}.sin() * {count}")
    b.line(f"{count}.mul_(2)" if b.rng.random() < 0.5 else f"{count}.add_(1)")
    second = b.let(f"{x} * {count}")
    b.line(f"{count}.clamp_(max=8)")
    b.out(f"{first} + {second} * 0.1")


@kind(0.6)
def ring_buffer(b: Builder) -> None:
    x = b.rows()
    bank = b.buffer(f"torch.zeros(12, {x.shape[1]})")
    place = b.buffer("torch.zeros((), dtype=torch.long)")
    b.line(f"where_ = ({place} + torch.arange({x}.shape[0])) % 12")
    b.line(f"{bank}[where_] = {x}.detach()")
    b.line(f"{place}.copy_(({place} + {x}.shape[0]) % 12)")
    b.out(f"{x} @ {bank}.t() * 0.3")


@kind(0.5)
def bank_slice(b: Builder) -> None:
    x = b.rows()
    bank = b.buffer(f"torch.randn(16, {x.shape[1]})")
    scores = b.let(f"{x} @ {bank}.t() * 0.2")
    b.line(f"with torch.no_grad(): {bank}[: {x}.shape[0]] = {x}")
    b.out(str(scores))


@kind(0.4)
def code_book(b: Builder) -> None:
    """Vector quantization, whose codes follow what is assigned to them."""
    x = b.rows()
    d = x.shape[1]
    codes, counts = b.buffer(f"torch.randn(5, {d})"), b.buffer("torch.ones(5)")
    b.line(f"near = torch.cdist({x}.detach(), {codes}).argmin(1)")
    read = b.let(f"{codes}[near]")
    b.line(f"hot = F.one_hot(near, 5).to({x}.dtype)")
    b.line(f"{counts}.mul_(0.9).add_(hot.sum(0), alpha=0.1)")
    b.line(f"{codes}.mul_(0.9).add_((hot.t() @ {x}.detach()) / {counts}[:, None], alpha=0.1)")
    b.out(f"{x} + ({read} - {x}).detach() + ({read} - {x}) * 0.1")


@kind(0.4)
def index_add_buffer(b: Builder) -> None:
    x = b.rows()
    sums = b.buffer(f"torch.zeros(4, {x.shape[1]})")
    b.line(f"with torch.no_grad(): {sums}.index_add_(0, {x}.argmax(1) % 4, {x})")
    b.out(f"{x} - {sums}.mean(0) * 0.1")


@kind(0.5)
def running_maximum(b: Builder) -> None:
    x = b.float()
    top = b.buffer("torch.zeros(())")
    b.line(f"with torch.no_grad(): {top}.copy_(torch.maximum({top}, {x}.abs().max()))")
    b.out(f"{x} / ({top} + 1)")


@kind(0.4)
def buffer_replaced(b: Builder) -> None:
    x = b.rows()
    last = b.buffer(f"torch.zeros({x.shape[1]})")
    made = b.let(f"{x} + {last}")
    b.line(f"{last}.copy_({x}.detach()[0])")
    b.out(f"{made}.tanh()")


@kind(0.4)
def buffer_in_a_mask(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    seen = b.buffer(f"torch.zeros({x.shape[-1]}, dtype=torch.bool)")
    b.line(f"{seen}.logical_or_({x}.detach().flatten(0, -2).amax(0) > 0.5)")
    b.out(f"torch.where({seen}, {x}, {x} * 0.5)")


@kind(0.4)
def constant_buffer(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.out(f"{x} * {b.buffer(f'torch.linspace(0.5, 1.5, {x.shape[-1]})')}")


@kind(0.4)
def buffer_after_backward_use(b: Builder) -> None:
    """A product saves the buffer; then it is updated."""
    x = b.float(at_least=2, batched=True)
    scale = b.buffer(f"torch.ones({x.shape[-1]})")
    b.out(f"({x} * {scale}).sin() * {scale}")
    b.line(f"with torch.no_grad(): {scale}.mul_(0.95)")


@kind(0.4)
def integer_statistics(b: Builder) -> None:
    x = b.rows()
    seen = b.buffer("torch.zeros(4, dtype=torch.long)")
    b.line(f"{seen}.scatter_add_(0, {x}.argmax(1) % 4, torch.ones({x}.shape[0], dtype=torch.long))")
    b.out(f"{x} * ({seen}.sum() * 0.01 + 1)")


@kind(0.3)
def frozen_parameter_updated(b: Builder) -> None:
    """A teacher that follows: a parameter without gradients, written in the forward."""
    x = b.rows()
    d = x.shape[1]
    student = b.module(f"nn.Linear({d}, {d})")
    teacher = b.module(f"nn.Linear({d}, {d}).requires_grad_(False)")
    b.line(f"with torch.no_grad(): {teacher}.weight.lerp_({student}.weight, 0.1)")
    b.out(f"{student}({x}) - {teacher}({x})")


_ = torch
