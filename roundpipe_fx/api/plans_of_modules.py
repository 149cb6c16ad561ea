"""The plans of a model, whichever way it was compiled.

Dynamo keeps compiled code for all models of a class, and passes a model's parameters to it. So a second model may run
what was compiled for the first one, without another compilation: it is found by the parameters of its calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from roundpipe_fx.report.plan import Plan

_plans: weakref.WeakKeyDictionary[nn.Module, list[Plan]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class _Run:
    """That a graph has run with certain parameters.

    Attributes:
        cls: the class of the module whose they are.
        names: their names in it.
        parameters: weak references to them.
    """

    cls: type[nn.Module]
    names: tuple[str, ...]
    parameters: tuple[weakref.ref[torch.Tensor], ...]
    plans: Sequence[Plan]

    def equals(self, other: _Run) -> bool:
        """Return whether another one is of the same graph with the same parameters."""
        pairs = zip(self.parameters, other.parameters, strict=False)
        same = self.plans is other.plans and self.cls is other.cls and self.names == other.names
        return same and all(this() is that() for this, that in pairs)

    def is_of(self, module: nn.Module, parameters: dict[str, nn.Parameter]) -> bool:
        """Return whether a module with these parameters is the one that the graph has run for."""
        return type(module) is self.cls and all(
            name in parameters and parameters[name] is parameter()
            for name, parameter in zip(self.names, self.parameters, strict=True)
        )


_runs = WeakTensorKeyDictionary()
"""Lists of runs by the first of their parameters."""


def note_plan(modules: Iterable[nn.Module], plan: Plan) -> None:
    """Record a plan as that of modules; it lives as long as they do."""
    for module in modules:
        add_plan(_plans.setdefault(module, []), plan)


def add_plan(plans_so_far: list[Plan], plan: Plan) -> None:
    """Add a plan to those of a model, in the place of an earlier one of the same compilation."""
    for position, earlier in enumerate(plans_so_far):
        # A replanned step takes the position of its first plan.
        if earlier.compilation is plan.compilation:
            plans_so_far[position] = plan
            return
    plans_so_far.append(plan)


def wrap_to_note_models(
    run: Callable[..., Any], modules: Iterable[nn.Module], plans_made: Sequence[Plan]
) -> Callable[..., Any]:
    """A compiled graph that records its plans for each model that it runs for.

    In a step of the model that ran last, it costs the comparison of two parameters.

    Args:
        run: takes the inputs of Dynamo's graph, parameters among them.
        modules: those that it was compiled for; not kept alive.
    """
    compiled_for = [weakref.ref(module) for module in modules]
    if not compiled_for:
        return run
    names_of_owners: list[tuple[type[nn.Module], dict[int, str]]] | None = None
    watching, first, last = True, 0, 0
    at_first: Callable[[], torch.Tensor | None] = _return_none
    at_last: Callable[[], torch.Tensor | None] = _return_none

    def note(inputs: Sequence[Any]) -> None:
        nonlocal names_of_owners, watching, first, last, at_first, at_last
        # The first call: which inputs are parameters of the modules is the same in all later ones.
        if names_of_owners is None:
            owners = [owner for reference in compiled_for if (owner := reference()) is not None]
            names_of_owners = [(type(owner), names) for owner in owners if (names := _find_names(owner, inputs))]
            watching = bool(names_of_owners)
            if not watching:
                return
            positions = sorted({position for _, names in names_of_owners for position in names})
            # What is trained differs most likely between models that share parameters.
            trained = [position for position in positions if inputs[position].requires_grad] or positions
            # Two comparisons of identity in each step, not one for each parameter.
            first, last = trained[0], trained[-1]
        for cls, names in names_of_owners:
            parameters = tuple(weakref.ref(inputs[position]) for position in names)
            _add_run(_Run(cls, tuple(names.values()), parameters, plans_made), inputs[next(iter(names))])
        at_first, at_last = weakref.ref(inputs[first]), weakref.ref(inputs[last])

    def run_and_note(*inputs: Any) -> Any:
        # The same two parameters as last time: the same model runs, and nothing is to be noted.
        if watching and inputs and (inputs[first] is not at_first() or inputs[last] is not at_last()):
            note(inputs)
        return run(*inputs)

    return run_and_note


def _return_none() -> None:
    return None


def _find_names(owner: nn.Module, inputs: Sequence[Any]) -> dict[int, str]:
    """Find the names of a module's parameters among the inputs of a graph, by place."""
    names = {id(parameter): name for name, parameter in owner.named_parameters()}
    return {position: names[id(value)] for position, value in enumerate(inputs) if id(value) in names}


def _add_run(run: _Run, parameter: torch.Tensor) -> None:
    runs: list[_Run] = _runs.setdefault(parameter, [])
    # Runs of models that are gone are dropped, so that a shared parameter does not collect them.
    runs[:] = [earlier for earlier in runs if all(reference() is not None for reference in earlier.parameters)]
    if not any(earlier.equals(run) for earlier in runs):
        runs.append(run)


def plans(model: nn.Module) -> tuple[Plan, ...]:
    """All plans of a model and of its submodules, in the order in which they were made for each.

    If models of the same class are compiled in place or by ``torch.compile``, Dynamo may run for the second one what it
    has compiled for the first one. Both have these plans then, once they have run; a model without parameters has none.
    A graph that has run with parameters that all are shared by several models of a class is each of theirs.

    ::

        model.compile(backend="roundpipe_fx", options={"memory_budget": "6GiB"})
        model(x).sum().backward()
        print(roundpipe_fx.plans(model)[-1])

    Args:
        model: from :func:`roundpipe_fx.compile`; compiled by ``model.compile(backend="roundpipe_fx")`` or
            ``torch.compile(model, backend="roundpipe_fx")``; or one that has such a model among its submodules, as
            wrappers for distributed training have.

    Returns:
        one plan per graph (several where the graph breaks), shape and mode; none before the first call.
    """
    plans_of_model: list[Plan] = []
    for module in model.modules():
        state = getattr(type(module), "_state_of_roundpipe_fx", None)
        candidates = (
            [*_plans.get(module, ()), *_find_plans_of_runs(module)] if state is None else state.__get__(module).plans
        )
        plans_of_model.extend(plan for plan in candidates if not any(plan is other for other in plans_of_model))
    return tuple(plans_of_model)


def _find_plans_of_runs(module: nn.Module) -> Iterator[Plan]:
    """Find the plans of graphs that have run for a module."""
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        for run in _runs.get(parameter, ()):
            if run.is_of(module, parameters):
                yield from run.plans
