"""The plans of a model, whichever way it was compiled."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from roundpipe_fx.report.plan import Plan

__all__ = ["note_plan", "plans"]

_plans: weakref.WeakKeyDictionary[nn.Module, list[Plan]] = weakref.WeakKeyDictionary()


def note_plan(modules: Iterable[nn.Module], plan: Plan) -> None:
    """Record a plan as that of modules; it lives as long as they do."""
    for module in modules:
        _plans.setdefault(module, []).append(plan)


def plans(model: nn.Module) -> tuple[Plan, ...]:
    """All plans of a model and of its submodules, in the order in which they were made for each.

    If models of the same class are compiled in place or by ``torch.compile``, the second one may run what Dynamo has
    compiled for the first one; only the first one then has plans.

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
    found: list[Plan] = []
    for module in model.modules():
        state = getattr(type(module), "_state_of_roundpipe_fx", None)
        made = _plans.get(module, []) if state is None else state.__get__(module).plans
        found.extend(plan for plan in made if not any(plan is other for other in found))
    return tuple(found)
