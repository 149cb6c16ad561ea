"""Eager checkpointed functions, and the functions that say which pass is running."""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, create_selective_checkpoint_contexts

import roundpipe_fx
from roundpipe_fx import checkpoint, checkpoint_sequential, is_checkpointing, is_recomputing
from roundpipe_fx.report.peak_memory import measure_peak
from tests.counting import count_operations


def flags() -> tuple[bool, bool]:
    return is_checkpointing(), is_recomputing()


def test_flags_of_each_pass() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(flags())
        return x.sin()

    x = torch.randn(3, requires_grad=True)
    assert flags() == (False, False)
    y = checkpoint(function, x)
    assert flags() == (False, False)
    y.sum().backward()
    assert flags() == (False, False)
    assert seen == [(True, False), (False, True)]
    assert torch.equal(x.grad, x.detach().cos())


def test_flags_are_restored_after_an_exception_in_either_pass() -> None:
    def function(x: torch.Tensor, broken: Any) -> torch.Tensor:
        if broken == flags():
            raise KeyError("broken")
        return x.sin().cos()

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(KeyError):
        checkpoint(function, x, (True, False))
    assert flags() == (False, False)
    y = checkpoint(function, x, (False, True))
    with pytest.raises(KeyError):
        y.sum().backward()
    assert flags() == (False, False)


def test_flags_are_of_the_thread() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=lambda: seen.append(flags()))
        other.start()
        other.join()
        return x.sin()

    checkpoint(function, torch.randn(3, requires_grad=True)).sum().backward()
    assert seen == [(False, False)] * 2


def test_without_gradients_there_are_no_passes() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(flags())
        return x.sin()

    with torch.no_grad():
        checkpoint(function, torch.randn(3))
    assert seen == [(False, False)]


def test_a_layer_inside_a_layer_is_recomputed_with_it() -> None:
    seen = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(flags())
        if roundpipe_fx.doing_recompute():
            (mask,) = roundpipe_fx.get_recompute_data()
        else:
            mask = (x > 0).detach()
            roundpipe_fx.save_for_recompute(mask)
            seen.append("asked")
        return (x * mask).sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, checkpoint(inner, x.cos())).exp()

    x = torch.randn(5, requires_grad=True)
    checkpoint(outer, x).sum().backward()
    assert seen.count("asked") == 2
    assert [item for item in seen if item != "asked"] == [(True, False)] * 2 + [(False, True)] * (len(seen) - 4)
    reference = x.detach().requires_grad_()
    y = reference.cos()
    for _ in range(2):
        y = (y * (y > 0)).sin()
    y.exp().sum().backward()
    assert torch.equal(x.grad, reference.grad)


def test_inputs_without_grad_but_parameters_with_grad() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    checkpoint(layer, x).square().sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    layer(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, expected)


def test_outputs_that_are_not_floats_are_detached() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values, indices = x.sort()
        return values, indices, values > 0

    x = torch.randn(6, requires_grad=True)
    values, indices, positive = checkpoint(function, x)
    assert not indices.requires_grad and indices.grad_fn is None and positive.grad_fn is None
    values.sum().backward()
    assert torch.equal(x.grad, torch.ones(6))


def test_random_numbers_are_repeated_and_the_generator_is_left_alone() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x, 0.5, True).sin()

    x = torch.randn(64, requires_grad=True)
    torch.manual_seed(3)
    function(x).sum().backward()
    expected, x.grad = x.grad, None
    torch.manual_seed(3)
    y = checkpoint(function, x)
    torch.manual_seed(17)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x.grad, expected)


def test_autocast_is_restored() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        seen.append(y.dtype)
        return y.sin()

    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(function, x)
    y.float().sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_keywords_and_nested_structures() -> None:
    def function(x: torch.Tensor, *, scale: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
        return {"out": [x.sin() * scale["by"], x]}

    x = torch.randn(3, requires_grad=True)
    by = torch.randn(3, requires_grad=True)
    out = checkpoint(function, x, scale={"by": by, "name": "s"})
    out["out"][0].sum().backward()
    assert torch.equal(by.grad, x.detach().sin())


def test_several_backwards_grad_and_inputs() -> None:
    calls = []

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        calls.append(flags())
        return (x * w).sin()

    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    loss = checkpoint(function, x, w).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(inputs=[w], retain_graph=True)
    assert x.grad is None
    loss.backward()
    assert torch.equal(x.grad, first)
    assert torch.equal(w.grad, 2 * (x * (x * w).cos()).detach())
    assert calls == [(True, False)] + [(False, True)] * 3


def test_early_stop() -> None:
    reached = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().exp()
        reached.append(flags())
        return y + 1

    x = torch.randn(3, requires_grad=True)
    checkpoint(function, x).sum().backward()
    assert reached == [(True, False)]
    checkpoint(function, x, early_stop=False).sum().backward()
    assert reached == [(True, False), (True, False), (False, True)]


def test_determinism_check_and_debug() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() if is_checkpointing() else x[:1].sin()).exp()

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(CheckpointError, match="different metadata"):
        checkpoint(function, x).sum().backward()
    with pytest.raises(CheckpointError, match="aten"):
        checkpoint(function, x, debug=True).sum().backward()
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint(function, x, determinism_check="strict")


def test_selective_policy() -> None:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, policy)
    x = torch.randn(4, 4, requires_grad=True)
    y = checkpoint(lambda x: torch.mm(x, x).sin().exp(), x, context_fn=context)
    with count_operations() as ran:
        y.sum().backward()
    assert ran[torch.ops.aten.mm.default] == 2  # its two gradients, and not itself again
    assert ran[torch.ops.aten.sin.default] == 1
    expected, x.grad = x.grad, None
    torch.mm(x, x).sin().exp().sum().backward()
    assert torch.equal(x.grad, expected)


def test_nothing_inside_is_kept() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.sin()
        return x

    def run(call: Any) -> int:
        x = torch.randn(1 << 16, requires_grad=True)
        with measure_peak("cpu") as peak:
            loss = call(x).sum()
        loss.backward()
        return peak.bytes

    assert run(lambda x: checkpoint(function, x)) < 0.75 * run(function)


def test_use_reentrant_has_no_effect_and_says_so() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.warns(UserWarning, match="always non-reentrant"):
        y = checkpoint(torch.sin, x, use_reentrant=True)
    (gradient,) = torch.autograd.grad(y.sum(), x)  # which the reentrant form cannot
    assert torch.equal(gradient, x.detach().cos())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(torch.sin, x, use_reentrant=False)


def test_checkpoint_sequential() -> None:
    seen = []

    class Layer(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.linear = index, nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((self.index, *flags()))
            return self.linear(x).tanh()

    model = nn.Sequential(*(Layer(index) for index in range(5)))
    x = torch.randn(2, 4)
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    first = [(0, True, False), (1, True, False), (2, False, False), (3, False, False), (4, False, False)]
    assert seen == [*first, (0, False, True), (1, False, True)]
    model.zero_grad()
    model(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    with pytest.raises(ValueError, match="between 1 and the number of functions, 5"):
        checkpoint_sequential(model, 6, x)


class Routed(nn.Module):
    """Routes by ``nonzero`` and saves the route by hand."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.linear, self.twice = nn.Linear(8, 8), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if roundpipe_fx.doing_recompute():
            rows, extra = roundpipe_fx.get_recompute_data()
            assert extra == {"name": "rows"}
        else:
            rows = (x.detach().sum(-1) > 0).nonzero()[:, 0]
            roundpipe_fx.save_for_recompute(rows, {"name": "rows"})
        if self.twice:
            roundpipe_fx.save_for_recompute(rows)
        return x.index_add(0, rows, self.linear(x[rows]).tanh()).sin()


def test_saved_data_is_not_asked_for_again() -> None:
    model = nn.Sequential(Routed(), Routed())
    x = torch.randn(16, 8)
    loss = checkpoint(model[1], checkpoint(model[0], x)).sum()
    with roundpipe_fx.count_host_syncs() as syncs:
        loss.backward()
    assert syncs.total == 0
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()  # outside any checkpoint it has no effect
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_a_second_call_names_the_layer() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match=r"second time in one forward of layer Routed\(linear: Linear\)"):
        checkpoint(Routed(twice=True), x)
    with torch.no_grad():
        checkpoint(Routed(twice=True), x)  # nothing is saved


def test_saved_tensors_must_not_require_grad() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        roundpipe_fx.save_for_recompute([x.sin()])
        return x.sin()

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"shape \(3,\) requires grad"):
        checkpoint(function, x)
    with pytest.raises(ValueError, match=r"outside any checkpointed layer.*requires grad"):
        function(x)
    with torch.no_grad():
        function(x)


def test_data_is_there_only_in_recomputation_and_always_a_tuple() -> None:
    seen: list[Any] = []

    def ask() -> None:
        try:
            seen.append(roundpipe_fx.get_recompute_data())
        except AssertionError as error:
            seen.append(str(error))

    def function(x: torch.Tensor) -> torch.Tensor:
        ask()
        if roundpipe_fx.doing_recompute():
            other = threading.Thread(target=ask)
            other.start()
            other.join()
        return x.sin()

    checkpoint(function, torch.randn(3, requires_grad=True)).sum().backward()
    assert seen[1] == ()
    assert "outside of recomputation" in seen[0] and "outside of recomputation" in seen[2]
    with pytest.raises(AssertionError, match="ask doing_recompute"):
        roundpipe_fx.get_recompute_data()
