"""A budget is a promise about the step, of however many calls and graphs it is made."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from roundpipe_fx.analysis.step_of_calls import (
    Footprint,
    NotedCall,
    NotedEvent,
    NotedStep,
    count_most_alive,
    simulate_step_peak,
)
from roundpipe_fx.runtime.step_calls import NotedGraph, StepCalls

Step = Callable[[nn.Module], Any]

X = torch.randn(128, 16)


def _layers(depth: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(depth)))


def _siamese(model: nn.Module) -> None:
    (model(X) - model(X + 0.1)).square().mean().backward()


def _triplet(model: nn.Module) -> None:
    F.triplet_margin_loss(model(X), model(X + 1), model(X - 1)).backward()


def _retained(model: nn.Module) -> None:
    first = model(X).square().mean()
    first.backward(retain_graph=True)
    second = model(X - 1).square().mean()
    first.backward()
    second.backward()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = _layers(3), nn.Linear(16, 8), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        return self.first(x).square().mean(), self.second(x).sigmoid().mean()


def _loss_by_loss(model: nn.Module) -> None:
    first, second = model(X)
    first.backward(retain_graph=True)
    second.backward()


def _norms_of_gradients(model: nn.Module) -> None:
    """As weights of losses that are balanced by their gradients need them."""
    losses = model(X)
    weights = list(model.trunk[-1].parameters())
    norms = [sum(g.norm() for g in torch.autograd.grad(loss, weights, retain_graph=True)) for loss in losses]
    (losses[0] / norms[0] + losses[1] / norms[1]).backward()


def _losses_outside(model: nn.Module) -> None:
    output = model(X)
    output.square().mean().backward(retain_graph=True)
    output.abs().mean().backward(retain_graph=True)
    output.tanh().mean().backward()


def _never_freed(model: nn.Module) -> None:
    sum(model(X)).backward(retain_graph=True)


def _one_by_one(model: nn.Module) -> None:
    first, second = model(X), model(-X)
    first.square().mean().backward()
    second.square().mean().backward()


def _with_a_target(model: nn.Module) -> None:
    output = model(X)
    with torch.no_grad():
        target = model(X.flip(0))
    F.mse_loss(output, target).backward()


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = _layers(2), _layers(2), _layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        torch._dynamo.graph_break()
        return self.third(x).square().mean()


def _broken(model: nn.Module) -> None:
    model(X).backward()


STEPS: list[tuple[Step, Callable[[], nn.Module]]] = [
    *((step, lambda: _layers(3)) for step in (_siamese, _triplet, _retained, _one_by_one, _with_a_target)),
    (_losses_outside, lambda: _layers(3)),
    (_loss_by_loss, Heads),
    (_norms_of_gradients, Heads),
    (_broken, Broken),
]


def _measured(model: nn.Module, step: Step) -> tuple[int, list[str]]:
    model.zero_grad()
    with warnings.catch_warnings(record=True) as told, roundpipe_fx.measure_peak("cpu") as peak:
        warnings.simplefilter("always")
        step(model)
    return peak.bytes, [str(own.message) for own in told if own.category is roundpipe_fx.StepBudgetWarning]


@pytest.mark.long
@pytest.mark.parametrize(("step", "make"), STEPS, ids=[step.__name__ for step, _ in STEPS])
def test_the_second_step_is_within_the_budget(step: Step, make: Callable[[], nn.Module]) -> None:
    """The least that can be planned for is kept, and refused by one byte less; gradients stay what they are."""
    reference = make()
    torch.compile(reference, backend="aot_eager")
    model = copy.deepcopy(reference)
    step(torch.compile(reference, backend="aot_eager"))
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=0.0)
    told = _measured(compiled, step)[1]
    assert len(told) == 1 and f"memory_budget is {compiled.plans[0].budget} bytes" in told[0]
    second, told = _measured(compiled, step)
    minimum = compiled.plan.budget
    assert not told and second <= compiled.plan.peak_bytes <= minimum and minimum > compiled.plans[0].budget
    for own, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(own.grad, theirs.grad)
    plans = len(compiled.plans)
    assert _measured(compiled, step) == (second, []) and len(compiled.plans) == plans

    compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=minimum)
    _measured(compiled, step)
    assert _measured(compiled, step)[0] <= minimum and compiled.plan.budget == minimum

    compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=minimum - 1, tiling="never")
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        for _ in range(2):
            _measured(compiled, step)
    assert refused.value.minimum == minimum


def test_a_graph_that_is_retained_to_no_end_is_planned_for() -> None:
    """Such a step ends when its outputs are dropped, which is seen before the next one is planned."""
    model = roundpipe_fx.compile(Heads(), memory_budget=0.0)
    first, _ = _measured(model, _never_freed)
    assert first > model.plan.budget
    second, told = _measured(model, _never_freed)
    assert len(told) == 1 and "went backward once and kept its saved values" in told[0]
    assert second <= model.plan.peak_bytes <= model.plan.budget
    plans = len(model.plans)
    assert _measured(model, _never_freed) == (second, []) and len(model.plans) == plans


def test_in_place_steps_with_several_backwards_are_told_of() -> None:
    model = Heads()
    model.compile(backend="roundpipe_fx", options={"memory_budget": 0.0})
    told = _measured(model, _loss_by_loss)[1]
    (plan,) = roundpipe_fx.plans(model)
    assert len(told) == 1 and "went backward 2 times" in told[0] and f"memory_budget is {plan.budget} bytes" in told[0]
    assert "torch.compile does not replan" in told[0]


@pytest.mark.parametrize(
    "step",
    [_siamese, *(pytest.param(step, marks=pytest.mark.long) for step in (_retained, _one_by_one))],
    ids=lambda step: step.__name__,
)
@pytest.mark.long
def test_several_calls_in_tiles_are_within_the_least_budget(step: Step) -> None:
    """Steps of two calls need tiles for the least that an error names, which is less than without; it is kept."""
    reference = _layers(3)
    model, untiled = copy.deepcopy(reference), copy.deepcopy(reference)
    step(reference)
    least = {}
    for tiling, own in (("never", untiled), (None, model)):
        budget, compiled = 1, None
        while compiled is None:
            torch._dynamo.reset()
            compiled = roundpipe_fx.compile(own, memory_budget=budget, tiling=tiling)
            try:
                peaks = [_measured(compiled, step)[0] for _ in range(3)]
            except roundpipe_fx.InfeasibleBudgetError as refused:
                assert refused.minimum > budget
                budget, compiled = refused.minimum, None
        assert peaks[1] == peaks[2] <= compiled.plan.peak_bytes <= budget
        least[tiling] = budget
    assert compiled.plan.tiles and least[None] < least["never"]
    for own, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_a_share_is_one_of_the_whole_step() -> None:
    budgets, recomputed = [], []
    for share in (0.0, 0.5, 0.99):
        compiled = roundpipe_fx.compile(_layers(6), memory_budget=share)
        for _ in range(2):
            peak, _told = _measured(compiled, _siamese)
        assert peak <= compiled.plan.budget
        assert compiled.plan.assumed["calls alive at once"] == 2
        budgets.append(compiled.plan.budget)
        recomputed.append(compiled.plan.recompute_seconds)
    low, middle, high = budgets
    assert abs(middle - (low + (high - low) * 0.5 / 0.99)) < 2
    assert recomputed[0] > recomputed[1] >= recomputed[2]


@pytest.mark.long
def test_a_share_is_not_refused_after_a_graph_break() -> None:
    """The first step shows that a part returns a scalar that another one reads, and needs more than was known."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            target = x.detach().roll(1, 1)
            scale = F.poisson_nll_loss(x, target.abs()) + F.gaussian_nll_loss(x, target, x.exp())  # reads a value
            return self.second(torch.tanh(x * scale)).square().mean()

    plain, x = Broken(), torch.randn(24, 16)
    plain(x).backward()
    peaks = []
    for share in (0.0, 0.5, 1.0):
        model = copy.deepcopy(plain)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = roundpipe_fx.compile(model, memory_budget=share, tiling="never")
            for _ in range(3):
                model.zero_grad()
                with roundpipe_fx.measure_peak("cpu") as peak:
                    compiled(x).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        peaks.append(peak.bytes)
    assert peaks == sorted(peaks)


def test_calls_that_end_before_the_next_begins_are_no_step_of_several() -> None:
    compiled = roundpipe_fx.compile(_layers(4), memory_budget=0.3)

    def step(model: nn.Module) -> None:
        for _ in range(2):  # accumulated
            model(X).square().mean().backward()
        model(X)  # dropped
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        with torch.no_grad():
            model(X)
        model(X).square().mean().backward()

    for _ in range(3):
        assert not _measured(compiled, step)[1]
    assert len([plan for plan in compiled.plans if plan.training]) == 1


@pytest.mark.parametrize("step", [_siamese, _retained])
def test_where_everything_is_kept_the_second_plan_says_what_the_step_takes(step: Step) -> None:
    compiled = roundpipe_fx.compile(_layers(4), memory_budget=1.0)
    first, told = _measured(compiled, step)
    assert not told and first > compiled.plan.budget
    second, told = _measured(compiled, step)
    assert not told and compiled.plan.recompute_seconds == 0
    assert first == second <= compiled.plan.peak_bytes <= compiled.plan.budget


def test_through_the_front_door_there_is_a_warning() -> None:
    model = torch.compile(_layers(4), backend="roundpipe_fx", options={"memory_budget": 0.0})
    told = [_measured(model, _siamese)[1] for _ in range(2)]
    assert not told[1] and "torch.compile does not replan" in told[0][0]
    assert "up to 2 calls of 1 graphs" in told[0][0]


def test_code_beside_graphs_is_told_of_with_the_figures() -> None:
    compiled = roundpipe_fx.compile(Broken(), memory_budget="1 GiB")
    told = [_measured(compiled, _broken)[1] for _ in range(2)]
    assert len(told[0]) == 1 and not told[1]
    assert (
        "memory_budget is 1073741824 bytes" in told[0][0]
        and "runs eagerly between graphs is not counted: " in told[0][0]
    )
    assert f"{__file__}:" in told[0][0] and "3 calls of 3 graphs" in told[0][0]


def test_pipelined_calls_that_are_alive_at_once_are_told_of() -> None:
    compiled = roundpipe_fx.compile(_layers(4), num_microbatches=2, memory_budget=0.0)
    for _ in range(2):
        compiled(X).square().mean().backward()
    with pytest.warns(roundpipe_fx.StepBudgetWarning, match="2 calls of a pipelined model were alive at once"):
        _siamese(compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _siamese(compiled)


# The simulation, by figures that can be worked out by hand.

CALL = Footprint(forward=50, saved=30, outputs=4, loss=7, arriving=2, backward=20, gradients={0: 10})
F_, B_, R_, X_ = NotedEvent.FORWARD, NotedEvent.BACKWARD, NotedEvent.RETAINED, NotedEvent.FREED


def _step(events: list[tuple[NotedEvent, int]], count: int, footprint: Footprint = CALL, **others: Any) -> NotedStep:
    given = {"new_input_bytes": 0, "consumed": False, **others}
    calls = tuple(
        NotedCall(graph="g", inputs=(1,), outputs=(100 + i,), footprint=footprint, **given) for i in range(count)
    )
    return NotedStep(calls, tuple(events))


def test_peaks_of_steps() -> None:
    alone = _step([(F_, 0), (B_, 0), (X_, 0)], 1)
    assert simulate_step_peak(alone, {}) == 30 + 4 + 2 + 20  # the backward
    two = _step([(F_, 0), (F_, 1), (B_, 1), (X_, 1), (B_, 0), (X_, 0)], 2)
    assert simulate_step_peak(two, {}) == 2 * (30 + 4 + 2) + 20
    # Gradients of the same input are added into a new place, those of the second backward beside those of the first.
    wide = Footprint(forward=1, saved=1, outputs=0, gradients={0: 100})
    twice = _step([(F_, 0), (F_, 1), (B_, 1), (X_, 1), (B_, 0), (X_, 0)], 2, wide)
    assert simulate_step_peak(twice, {}) == 300
    retained = _step([(F_, 0), (B_, 0), (F_, 1), (B_, 1), (X_, 1), (B_, 0), (X_, 0)], 2)
    assert simulate_step_peak(retained, {}) > simulate_step_peak(two, {})
    assert simulate_step_peak(two, {"g": Footprint(forward=0, saved=0, outputs=0)}) == 0
    assert count_most_alive(two, "g") == 2 and count_most_alive(alone, "g") == 1 and count_most_alive(two, "h") == 0


def test_what_autograd_holds_tells_which_calls_are_alive() -> None:
    steps: list[NotedStep] = []
    calls = StepCalls(lambda _, noted: steps.append(noted()))
    graph = NotedGraph(name="g", footprint=CALL, outputs=1, parameters=frozenset(), differentiated=frozenset({0}))

    def program(arguments: list[Any]) -> tuple[Any, ...]:
        (x,) = arguments
        return x + 1, x.exp()

    forward, backward = calls.forward(program, graph), calls.backward(lambda arguments: (arguments.clear(),), graph)
    x = torch.ones(3)
    _, kept = forward([x])
    _, other = forward([x])
    arguments = [other, x]
    del other
    backward(arguments)
    del kept  # nobody can go backward any more
    forward([x])
    (step,) = steps
    assert step.events == ((F_, 0), (F_, 1), (B_, 1), (X_, 1), (X_, 0))
    assert [call.new_input_bytes for call in step.calls] == [0, 0]


def test_a_call_that_holds_only_its_output_ends_after_its_own_backward() -> None:
    """Where the next layer's backward frees the output, gradients of the layer before are still to come."""
    steps: list[NotedStep] = []
    calls = StepCalls(lambda _, noted: steps.append(noted()))
    graph = NotedGraph(name="g", footprint=CALL, outputs=1, parameters=frozenset(), differentiated=frozenset({0}))
    forward = calls.forward(lambda arguments: (arguments[0].exp(),), graph)
    backward = calls.backward(lambda arguments: (arguments[0],), graph)

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return forward([x])[0]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return backward([gradient])[0]

    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        Layer.apply(Layer.apply(x)).square().sum().backward()
    assert [step.events for step in steps] == 2 * [((F_, 0), (F_, 1), (B_, 1), (X_, 1), (B_, 0), (X_, 0))]


def test_calls_end_with_their_backward_whoever_else_holds_what_they_saved() -> None:
    """Threads of gloo hold what they communicate a little longer, on some ranks and not on others."""
    steps: list[NotedStep] = []
    calls = StepCalls(lambda _, noted: steps.append(noted()))
    graph = NotedGraph(name="g", footprint=CALL, outputs=1, parameters=frozenset(), differentiated=frozenset({0}))
    forward = calls.forward(lambda arguments: (arguments[0] + 1, arguments[0].exp()), graph)
    backward = calls.backward(lambda arguments: (arguments[0] * arguments[1],), graph)
    held: list[torch.Tensor] = []

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            output, saved = forward([x])
            held.append(saved)
            ctx.save_for_backward(saved)
            return output

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return backward([gradient, *ctx.saved_tensors])[0]

    loss = Layer.apply(Layer.apply(torch.ones(3, requires_grad=True))).sum()
    loss.backward(retain_graph=True)
    assert not steps
    loss.backward()
    (step,) = steps
    assert step.events == ((F_, 0), (F_, 1), (R_, 1), (R_, 0), (B_, 1), (X_, 1), (B_, 0), (X_, 0))


def test_threads_that_share_a_model_end_each_others_steps() -> None:
    steps: list[NotedStep] = []
    calls = StepCalls(lambda _, noted: steps.append(noted()))
    graph = NotedGraph(name="g", footprint=CALL, outputs=1, parameters=frozenset(), differentiated=frozenset({0}))
    evaluated = replace(graph, training=False)
    forward = calls.forward(lambda arguments: (arguments[0] + 1, arguments[0].exp()), graph)

    def backward_of_other(arguments: list[Any]) -> tuple[Any, ...]:
        arguments.clear()  # nothing holds its saved value any more
        calls.backward(lambda arguments: (arguments.clear(),), graph)([other.pop()])
        return (None,)

    x = torch.ones(3)
    saved, other = [forward([x])[1]], [forward([x])[1]]
    calls.backward(backward_of_other, graph)([saved.pop()])
    (step,) = steps
    assert step.events == ((F_, 0), (F_, 1), (B_, 0), (X_, 0), (B_, 1), (X_, 1))

    def backward_meanwhile(arguments: list[Any]) -> tuple[Any, ...]:
        calls.backward(lambda arguments: (arguments.clear(),), graph)([other.pop()])
        return (x.exp(),)

    other.append(forward([x])[1])
    calls.forward(backward_meanwhile, evaluated)([x])
    assert [len(step.calls) for step in steps] == [2, 2]
