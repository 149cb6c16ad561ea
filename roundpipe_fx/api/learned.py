"""Learned: what a plan takes for granted about run time, and what steps have shown.

Sizes that depend on data (how many tokens an expert gets) are known only when a step runs. The first plan takes their
upper bounds; the first step shows real sizes; the next plan takes those with headroom. A step that exceeds what was
assumed runs all the same, and the plan is made anew before the next one, with more headroom each time: sizes that
hardly vary are predicted closely, and those that do cost few plans. Running out of memory makes the budget smaller in
the same way. So does what operators that are not PyTorch's own allocate for themselves: nobody knows it before a step
shows it. So do gradients of outputs that a model returns beside its loss (:mod:`roundpipe_fx.analysis.outside_loss`).
And so do calls that are alive at once (:mod:`roundpipe_fx.remat.learned_steps`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from roundpipe_fx.remat.learned_steps import LearnedSteps
from roundpipe_fx.runtime.step_calls import StepCalls

__all__ = ["Learned"]

_FIRST_HEADROOM = 0.02
_MOST_HEADROOM = 0.5
_WORKSPACE = "workspace"
_BROUGHT = "brought"
_noting = threading.Lock()


@dataclass(kw_only=True)
class Learned:
    """Shared by the compilations of one model and the steps that they run.

    Attributes:
        largest: the largest seen of each data-dependent size, by graph and symbol, and of each operator's workspace.
        assumed: what the latest plans take them to be; absent: sizes their upper bounds, workspaces nothing.
        share: of the budget that plans may use; less than 1 after running out of memory.
        stale: whether steps have shown what plans do not know.
        headroom: how much larger than the largest seen a size is taken to be, as a share of it.
        steps: what steps are made of.
        calls: notes it.
    """

    largest: dict[str, int] = field(default_factory=dict)
    assumed: dict[str, int] = field(default_factory=dict)
    share: float = 1.0
    stale: bool = False
    headroom: float = _FIRST_HEADROOM / 2
    steps: LearnedSteps = field(default_factory=LearnedSteps)
    calls: StepCalls = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.calls = StepCalls(self.steps.see)

    def see(self, name: str, size: int) -> None:
        """Note a size that a step had. May be called from several threads."""
        with _noting:
            if size > self.largest.get(name, -1):
                self.largest[name] = size
                if size > self.assumed.get(name, -1):
                    self.stale = True

    def see_workspace(self, operator: str, size: int) -> None:
        """Note the bytes that an operator allocated for itself in a step."""
        name = f"{_WORKSPACE}/{operator}"
        self.assumed.setdefault(name, 0)
        self.see(name, size)

    def see_brought(self, graph: str, tangent: str) -> None:
        """Note that a step has brought an incoming gradient that its plan did not expect."""
        self.see(f"{_BROUGHT}/{graph} {tangent}", 1)

    def brought(self, graph: str) -> frozenset[str]:
        """Names of the incoming gradients of a graph that steps have brought and plans would not expect."""
        prefix = f"{_BROUGHT}/{graph} "
        return frozenset(name.removeprefix(prefix) for name in self.assumed if name.startswith(prefix))

    @property
    def workspaces(self) -> Mapping[str, int]:
        """Assumed bytes that operators allocate for themselves, by operator."""
        return self.of_graph(_WORKSPACE)

    def renew(self) -> None:
        """Assume from here on what was seen, with headroom."""
        self.headroom = min(2 * self.headroom, _MOST_HEADROOM)
        self.assumed = {name: math.ceil(size * (1 + self.headroom)) for name, size in self.largest.items()}
        self.stale = False

    def of_graph(self, graph: str) -> Mapping[str, int]:
        """Assumed sizes of one graph, by symbol."""
        prefix = f"{graph}/"
        return {name.removeprefix(prefix): size for name, size in self.assumed.items() if name.startswith(prefix)}
