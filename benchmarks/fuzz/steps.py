"""Training steps: what one leaves behind, and how two differ."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

import roundpipe_fx

__all__ = ["Left", "differences", "eager_microbatches", "left_by", "loss_of", "losses_of", "run_step", "take_step"]


@dataclass
class Left:
    """What a step left behind.

    Attributes:
        outputs: the tensors that were returned, detached.
        structure: of what was returned.
        loss: one number.
        gradients: by parameter, and ``input i``.
        buffers: by name; ``input i``: what the caller's tensor is afterwards.
        state: of the generator.
        asked: host syncs, in the forward and in the backward; ``None`` where they were not counted.
        is_planned_for: whether plans count all that the step computed outside of the program.
    """

    outputs: list[torch.Tensor] = field(default_factory=list)
    structure: str = ""
    loss: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    state: torch.Tensor | None = None
    asked: tuple[dict[str, int], dict[str, int]] | None = None
    is_planned_for: bool = True


def loss_of(output: Any) -> torch.Tensor:
    """A loss for what a program returned: itself where it is one number, else of every part that has a gradient."""
    parts = [(place, part) for place, part in enumerate(tree_leaves(output)) if _is_differentiable(part)]
    # One number is the loss, wherever it stands: plans leave no room for computing another one from it.
    if len(parts) == 1 and not parts[0][1].dim() and not parts[0][1].is_complex():
        return parts[0][1]
    total: Any = 0
    for place, part in parts:
        real = part.abs() if part.is_complex() else part
        total = total + (real.square().mean() if place % 2 == 0 else real.sum() * 0.01)
    return total


def _is_differentiable(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.requires_grad


def losses_of(output: Any, use: str = "all") -> list[torch.Tensor]:
    """The losses that a step differentiates, in order.

    Args:
        output: of the program.
        use: of it; see :class:`benchmarks.fuzz.case.Case`.
    """
    return [loss_of(parts) for parts in _read_parts(output, use)]


def _read_parts(output: Any, use: str) -> list[list[Any]]:
    """The parts of an output that each loss is computed from."""
    which = use.partition(",")[0]
    leaves = tree_leaves(output)
    parts = [part for part in leaves if _is_differentiable(part)]
    if which == "first":
        return [parts[:1]]
    if which == "last":
        return [parts[-1:]]
    if which == "twice":
        return [parts[:1], parts[1:] or parts]
    return [leaves]


def _is_planned_for(output: Any, use: str) -> bool:
    """Whether plans count what the losses take that a step computes outside of the program.

    A number that a program returns is taken to be its loss, and then nothing else to be read by a loss outside. Plans
    do not know of gradients of inputs that a loss outside reads itself.
    """
    numbers = [part for part in tree_leaves(output) if _is_number(part)]
    for parts in _read_parts(output, use):
        read = [part for part in parts if _is_differentiable(part)]
        if len(read) == 1 and _is_number(read[0]):
            continue
        if numbers or any(part.is_leaf for part in read):
            return False
    return True


def _is_number(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and not part.dim() and part.is_floating_point()


def take_step(
    run: Callable[..., Any],
    net: nn.Module,
    inputs: Sequence[torch.Tensor],
    seed: int,
    count: bool = False,
    meter: AbstractContextManager[Any] | None = None,
    use: str = "all",
) -> Left:
    """Forward, loss, backward.

    Args:
        run: the compiled program.
        net: the program itself.
        inputs: a batch.
        seed: of the generator.
        count: whether to count host syncs.
        meter: entered meanwhile.
        use: of the outputs; see :class:`benchmarks.fuzz.case.Case`.
    """
    net.zero_grad()
    torch.manual_seed(seed)
    first, second = roundpipe_fx.count_host_syncs(), roundpipe_fx.count_host_syncs()
    with meter or contextlib.nullcontext():
        with first if count else contextlib.nullcontext():
            output = run(*inputs)
        losses = losses_of(output, use)
        is_planned_for = _is_planned_for(output, use)
        if use.endswith("dropped"):
            output = _copied(output)
        with second if count else contextlib.nullcontext():
            for place, loss in enumerate(losses, 1):
                loss.backward(retain_graph=place < len(losses))
    left = left_by(net, inputs, output, _total(losses))
    left.is_planned_for = is_planned_for
    if count:
        left.asked = dict(first.by_operator), dict(second.by_operator)
    return left


def run_step(run: Callable[..., Any], inputs: Sequence[torch.Tensor], use: str) -> None:
    """Forward, loss, backward, and nothing else that would allocate memory; arguments of :func:`take_step`."""
    output = run(*inputs)
    losses = losses_of(output, use)
    if use.endswith("dropped"):
        del output
    for place, loss in enumerate(losses, 1):
        loss.backward(retain_graph=place < len(losses))


def _copied(output: Any) -> Any:
    """An output to compare, unseen by meters, so that the step's own may be freed."""
    with _disable_current_modes():
        return tree_map(lambda part: part.detach().clone() if isinstance(part, torch.Tensor) else part, output)


def _total(losses: list[torch.Tensor]) -> torch.Tensor:
    return losses[0] if len(losses) == 1 else torch.stack([loss.detach() for loss in losses]).sum()


def left_by(net: nn.Module, inputs: Sequence[torch.Tensor], output: Any, loss: torch.Tensor) -> Left:
    """What there is after a step."""
    state = torch.get_rng_state()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
    gradients |= {f"input {i}": None if x.grad is None else x.grad.clone() for i, x in enumerate(inputs)}
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    buffers |= {f"parameter {name}": p.detach().clone() for name, p in net.named_parameters() if not p.requires_grad}
    buffers |= {f"input {i}": x.detach().clone() for i, x in enumerate(inputs)}
    outputs = [part.detach().clone() for part in tree_leaves(output) if isinstance(part, torch.Tensor)]
    structure = str(tree_structure(tree_map(lambda part: type(part).__name__, output)))
    return Left(outputs, structure, loss.detach().clone(), gradients, buffers, state)


def eager_microbatches(
    net: nn.Module, inputs: Sequence[torch.Tensor], seed: int, count: int, call: str, use: str = "all"
) -> Left:
    """What a pipelined step is to leave behind: one microbatch after the other, each drawing from its own stream.

    Losses, and other outputs of one floating-point number, are the mean of the microbatches', weighed by rows.
    """
    net.zero_grad()
    torch.manual_seed(seed)
    count = min(count, len(inputs[0]))
    pieces = list(zip(*(x.tensor_split(count) if count > 1 else [x] for x in inputs), strict=True))
    first = torch.get_rng_state()
    digest = hashlib.sha256(first.numpy().tobytes()).digest()
    weights = [len(piece[0]) / len(inputs[0]) for piece in pieces]
    outputs, total, after = [], torch.zeros(()), first
    is_planned_for = True
    asked = roundpipe_fx.count_host_syncs()
    asked_later = roundpipe_fx.count_host_syncs()
    for number, piece in enumerate(pieces):
        if number:
            own = int.from_bytes(hashlib.sha256(digest + number.to_bytes(8, "little")).digest()[:7], "little")
            torch.set_rng_state(torch.Generator().manual_seed(own).get_state())
        with asked:
            output = net(*piece)
        if number == 0:
            after = torch.get_rng_state()
        outputs.append(output)
        if call == "forward_backward":
            loss = loss_of(output) * weights[number]
            with asked_later:
                loss.backward()
            total = total + loss.detach()
    merged: Any = None
    if call == "autograd":
        merged = _merged(outputs, weights)
        losses = losses_of(merged, use)
        is_planned_for = _is_planned_for(merged, use)
        with asked_later:
            for place, loss in enumerate(losses, 1):
                loss.backward(retain_graph=place < len(losses))
        total = _total(losses).detach()
    torch.set_rng_state(after)
    left = left_by(net, inputs, merged, total)
    left.asked = dict(asked.by_operator), dict(asked_later.by_operator)
    left.is_planned_for = is_planned_for
    return left


def _merged(outputs: list[Any], weights: list[float]) -> Any:
    if len(outputs) == 1:
        return outputs[0]

    def put(*parts: Any) -> Any:
        if not isinstance(parts[0], torch.Tensor):
            return parts[0]
        if parts[0].dim():
            return torch.cat(parts)
        counts = not (parts[0].is_floating_point() or parts[0].is_complex())
        weighed = parts if counts else [part * weight for part, weight in zip(parts, weights, strict=True)]
        return sum(weighed[1:], weighed[0])

    return tree_map(put, *outputs)


def differences(left: Left, right: Left, tolerance: float | None) -> dict[str, str]:
    """How one step differs from another, by what of it; ``tolerance=None``: in any bit.

    A tolerance is relative to the largest number of the kind (of all gradients, of all outputs), since a gradient that
    is mathematically zero consists of rounding.
    """
    found = {}
    if left.structure != right.structure:
        found["outputs"] = f"other structure: {left.structure}, expected {right.structure}"
    elif text := _differ(_named(left.outputs), _named(right.outputs), tolerance, False):
        found["outputs"] = text
    if text := _differ({"loss": left.loss}, {"loss": right.loss}, tolerance, False):
        found["loss"] = text
    if text := _differ(left.gradients, right.gradients, tolerance, True):
        found["gradients"] = text
    if text := _differ(left.buffers, right.buffers, tolerance, False):
        found["buffers"] = text
    return found


def _named(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor | None]:
    return {f"output {i}": tensor for i, tensor in enumerate(tensors)}


def _differ(
    left: dict[str, torch.Tensor | None], right: dict[str, torch.Tensor | None], tolerance: float | None, nothing: bool
) -> str:
    if left.keys() != right.keys():
        return f"other names: {sorted(left.keys() ^ right.keys())}"
    largest = max(
        [_top(value) for value in right.values() if value is not None and not value.is_complex()], default=0.0
    )
    found = []
    for name, one in left.items():
        other = right[name]
        if one is None or other is None:
            if not (one is None and other is None):
                present = one if one is not None else other
                assert present is not None
                if not nothing or _top(present) > (tolerance or 0) * max(largest, 1e-3):
                    found.append(f"{name} is {'None' if one is None else 'there'}, expected the opposite")
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            found.append(f"{name} is {one.dtype} {tuple(one.shape)}, expected {other.dtype} {tuple(other.shape)}")
            continue
        if torch.equal(one, other) or (tolerance is None and _same_bits(one, other)):
            continue
        worst = _top(_plain(one) - _plain(other))
        if tolerance is None or not worst <= tolerance * max(largest, _top(other), 1e-3):
            found.append(f"{name} by {worst:.1e} of {max(_top(other), 0):.1e}")
    return "; ".join(found[:4])


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.isnan(_plain(one)).any()) and torch.equal(
        torch.nan_to_num(_plain(one)), torch.nan_to_num(_plain(other))
    )


def _plain(value: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(value.detach()) if value.is_complex() else value.detach().double()


def _top(value: torch.Tensor) -> float:
    if not value.numel():
        return 0.0
    top = _plain(value).abs().max().item()
    return math.inf if math.isnan(top) else top
