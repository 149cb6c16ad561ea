"""Updates in place: of clones, of results, of views of them, of inputs."""

from __future__ import annotations

import torch

from benchmarks.fuzz.operations.pool import kind, table
from benchmarks.fuzz.program import Builder, NoFit, Value

_FRESH = {
    "add_in_place": "{f}.add_({y})",
    "mul_in_place": "{f}.mul_({y})",
    "sub_alpha_in_place": "{f}.sub_({y}, alpha=0.4)",
    "clamp_in_place": "{f}.clamp_(-0.5, 1.5)",
    "relu_in_place": "F.relu({f}, inplace=True)",
    "silu_in_place": "F.silu({f}, inplace=True)",
    "leaky_in_place": "F.leaky_relu_({f}, 0.2)",
    "hardtanh_in_place": "F.hardtanh_({f})",
    "elu_in_place": "F.elu_({f})",
    "tanh_in_place": "{f}.tanh_()",
    "sigmoid_in_place": "{f}.sigmoid_()",
    "exp_in_place": "{f}.clamp_(max=1).exp_()",
    "masked_fill_in_place": "{f}.masked_fill_({y} > 0.3, 0.25)",
    "addcmul_in_place": "{f}.addcmul_({y}, {y}, value=0.3)",
    "lerp_in_place": "{f}.lerp_({y}, 0.25)",
    "copy_half": "{f}[:, :1].copy_({y}[:, :1])",
    "slice_assign": "{f}[:, 0] = {y}[:, -1]",
    "slice_assign_number": "{f}[..., 0] = 0.5",
    "slice_add": "{f}[:, 1:] += {y}[:, :-1]",
    "slice_of_slice": "{f}[1:][:, 0].mul_(0.5)",
    "strided_assign": "{f}[..., ::2] = {y}[..., ::2] * 2",
    "mask_assign": "{f}[{y} > 0.4] = 0.1",
    "mask_assign_values": "{f}[{y} > 0.4] = {y}[{y} > 0.4] * 0.5",
    "index_assign": "{f}[torch.tensor([0, 1])] = {y}[torch.tensor([1, 0])]",
    "index_put_accumulate": "{f}.index_put_((torch.tensor([0, 1, 0]),), {y}[:3], accumulate=True)",
    "index_add_in_place": "{f}.index_add_(0, torch.tensor([1, 0]), {y}[:2])",
    "index_copy_in_place": "{f}.index_copy_(0, torch.tensor([1, 0]), {y}[:2])",
    "index_fill_in_place": "{f}.index_fill_(1, torch.tensor([0]), 0.2)",
    "scatter_in_place": "{f}.scatter_(1, {y}[:, :2].argsort(1), {y}[:, :2])",
    "scatter_add_in_place": "{f}.scatter_add_(1, {y}[:, :2].argsort(1), {y}[:, :2])",
    "transposed_in_place": "{f}.transpose(0, 1).mul_({y}.transpose(0, 1))",
    "flatten_in_place": "{f}.view(-1).add_(0.5)",
    "zero_part": "{f}[:, 0].zero_()",
    "fill_part": "{f}[0].fill_(0.3)",
    "diagonal_in_place": "{f}.diagonal(0, 0, 1).add_(1)",
    "fill_diagonal": "{f}.flatten(1).fill_diagonal_(0.7)",
    "no_grad_in_place": "{f}.detach().mul_(0.5)",
    "set_through_view": "{f}.unsqueeze(0)[0, :, 0].add_({y}[:, 0])",
    "swap_halves": "{f}[:, :1], {f}[:, -1:] = {f}[:, -1:].clone(), {f}[:, :1].clone()",
    "tril_in_place": "{f}.tril_()",
    "cumsum_in_place": "{f}.cumsum_(1)",
    "round_in_place": "{f}.detach().round_()",
    "squeeze_in_place": "{f}.unsqueeze_(1).squeeze_(1).add_(0.1)",
    "out_variant": "{f}.add_(torch.mul({y}, 2))",
}

_MADE = ["{x}.clone()", "{x} * 1.25", "{x} + 0.5", "{x}.new_zeros({x}.shape)", "torch.empty_like({x}).copy_({x})"]


def _fresh(b: Builder, text: str) -> None:
    x = b.float(at_least=2, batched=True, fits=lambda v: v.shape[1] > 1)
    y = b.like(x)
    made = b.let(b.rng.choice(_MADE).format(x=x))
    b.line(text.format(f=made, y=y))
    b.out(f"{made} * 1.0" if b.rng.random() < 0.3 else str(made))


table(_FRESH, _fresh, 0.45)


def _checked(b: Builder, value: Value) -> None:
    """Autograd refuses a backward whose values were updated since; then this is no program."""
    tensor = value.tensors[0]
    if not tensor.requires_grad:
        return
    leaves = [p for p in b.program.nets[0].parameters() if p.requires_grad]
    leaves += [
        x for n in range(9) if isinstance(x := b.program.spaces[0].get(f"x{n}"), torch.Tensor) and x.requires_grad
    ]
    torch.autograd.grad(tensor.abs().sum(), leaves, retain_graph=True, allow_unused=True)


@kind(1.5)
def update_of_a_value(b: Builder) -> None:
    """In place on what others read, before and after."""
    x = b.float(at_least=1, fits=lambda v: not (v.tensors[0].is_leaf and v.tensors[0].requires_grad))
    text = b.rng.choice(["{x}.add_(0.5)", "{x}.mul_(0.5)", "{x}[0].add_(1)", "{x}[..., 0] = 0.2", "{x}.neg_()"])
    before = b.let(f"{x} * 2")
    b.line(text.format(x=x))
    made = b.out(f"{before} + {x}")
    _checked(b, made)


@kind(0.8)
def update_through_a_view(b: Builder) -> None:
    x = b.float(at_least=2, fits=lambda v: not (v.tensors[0].is_leaf and v.tensors[0].requires_grad))
    b.line(f"{x}.transpose(0, 1)[0].mul_(0.5)")
    made = b.out(f"{x}.sin()")
    _checked(b, made)


@kind(0.5)
def update_of_an_input(b: Builder) -> None:
    """The caller's tensor is another afterwards."""
    if b.program.case.differentiable_inputs:
        raise NoFit
    x = b.pick(lambda v: v.number[0] == -1)
    b.line(b.rng.choice([f"{x}.mul_(0.9)", f"{x}[:, 0] = 0.1", f"{x}.add_({x}.sin(), alpha=0.1)"]))
    b.program.notes.add("updates inputs")
    b.out(f"{x} * 1.5")


@kind(0.6)
def accumulate_in_place(b: Builder) -> None:
    x = b.float(at_least=2, batched=True, fits=lambda v: 1 < v.shape[1] < 6)
    total = b.let(f"{x}.new_zeros({x}.shape[0], *{x}.shape[2:])")
    for i in range(min(3, x.shape[1])):
        b.line(f"{total} += {x}[:, {i}].tanh()")
    b.out(str(total))


@kind(0.6)
def fill_rows(b: Builder) -> None:
    """A result that is written piece by piece."""
    x = b.float(at_least=2, batched=True, fits=lambda v: 1 < v.shape[1] < 6)
    made = b.let(f"torch.empty_like({x})")
    for i in range(x.shape[1]):
        b.line(f"{made}[:, {i}] = {x}[:, {i}] * {i + 1} + {x}[:, 0]")
    b.out(str(made))
