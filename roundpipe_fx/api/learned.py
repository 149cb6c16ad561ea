"""Learned facts: the assumptions of a plan about run time, and the observations of steps that correct them.

Sizes that depend on data (how many tokens an expert gets) are known only when a step runs. The first plan assumes their
upper bounds; the first step shows real sizes; the next plan assumes those plus headroom. A step that exceeds the
assumptions runs nevertheless, and is replanned before the next one, with more headroom each time: sizes that hardly
vary are predicted closely, and those that do vary cost few plans. Other facts are learned in the same way: running out
of memory makes the budget smaller; the memory that custom operators allocate internally is known after the first step,
and so are gradients of outputs that a model returns beside its loss (:mod:`roundpipe_fx.analysis.outside_loss`), calls
that are alive at once (:mod:`roundpipe_fx.remat.learned_steps`), and outputs that the caller drops before the backward
(:mod:`roundpipe_fx.runtime.dropped_outputs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from roundpipe_fx.analysis.step_of_calls import NotedStep
from roundpipe_fx.api.out_of_memory import StepMemory
from roundpipe_fx.budget import plan_or_error
from roundpipe_fx.remat.learned_steps import LearnedSteps
from roundpipe_fx.runtime.step_calls import StepCalls
from roundpipe_fx.torch_private import ForkedLock

_FIRST_HEADROOM = 0.02
_MOST_HEADROOM = 0.5
_WORKSPACE = "workspace"
_OBSERVED_TANGENT = "brought"
_EAGER = "eager"
_HELD, _DROPPED, _READ = "held", "dropped", "read"
_noting = ForkedLock()


@dataclass(kw_only=True)
class Learned:
    """Shared by the compilations of one model and the steps that they run.

    Attributes:
        largest: the largest seen of each data-dependent size, by graph and symbol, and of each operator's workspace.
        assumed: the values that the latest plans assume; if absent, upper bounds for sizes and 0 for workspaces.
        share: of the budget that plans may use; less than 1 after running out of memory.
        stale: whether steps have shown something that the plans do not take into account.
        headroom: added to the largest size seen, as a share of it.
        steps: the calls that steps consist of.
        memory: memory of steps, for the message of an out-of-memory error.
    """

    largest: dict[str, int] = field(default_factory=dict)
    assumed: dict[str, int] = field(default_factory=dict)
    share: float = 1.0
    stale: bool = False
    # Doubled before each plan, so the first one has `_FIRST_HEADROOM`.
    headroom: float = _FIRST_HEADROOM / 2
    steps: LearnedSteps = field(default_factory=LearnedSteps)
    calls: StepCalls = field(init=False, repr=False)
    memory: StepMemory = field(default_factory=StepMemory, repr=False)

    def __post_init__(self) -> None:
        def check(expected: Callable[[], NotedStep]) -> None:
            plan_or_error(self.steps.check_parts(expected, self.share))

        self.calls = StepCalls(self.steps.see, check)

    def see(self, name: str, size: int) -> None:
        """Record a size of a step. May be called from several threads."""
        # The largest seen is kept, not the last: a plan for it holds for all smaller ones.
        with _noting:
            if size > self.largest.get(name, -1):
                self.largest[name] = size
                # -1: what no plan has assumed yet makes plans stale even with size 0, such as an expert without tokens.
                if size > self.assumed.get(name, -1):
                    self.stale = True

    def see_workspace(self, operator: str, size: int) -> None:
        """Record the bytes that an operator allocated internally in a step."""
        name = f"{_WORKSPACE}/{operator}"
        # Without an entry the workspace of the first step would seem assumed by nobody; 0 is what the first plan took.
        self.assumed.setdefault(name, 0)
        self.see(name, size)

    def merge(self, largest: Mapping[str, int]) -> None:
        """Record what steps have shown elsewhere."""
        for name, size in largest.items():
            if name.startswith(f"{_WORKSPACE}/"):
                self.assumed.setdefault(name, 0)
            self.see(name, size)

    def observe_tangent(self, graph: str, tangent: str) -> None:
        """Record that a step has passed an incoming gradient that its plan did not expect."""
        self.see(f"{_OBSERVED_TANGENT}/{graph} {tangent}", 1)

    def observed_tangents(self, graph: str) -> frozenset[str]:
        """Names of the incoming gradients of a graph that steps have passed and plans would not expect."""
        prefix = f"{_OBSERVED_TANGENT}/{graph} "
        return frozenset(name.removeprefix(prefix) for name in self.assumed if name.startswith(prefix))

    def see_failure(self, graph: str) -> None:
        """Record that Inductor cannot compile a stage of a graph, which runs eagerly."""
        self.see(f"{_EAGER}/{graph}", 1)

    def runs_eagerly(self, graph: str) -> bool:
        """Test for a graph that plans are made for as one of eager stages, since Inductor cannot compile one."""
        return f"{_EAGER}/{graph}" in self.assumed

    def see_held(self, graph: str, outputs: Collection[int]) -> None:
        """Record outputs of a graph, by number, that a step has held and its plan assumed dropped."""
        for position in outputs:
            self.see(f"{_HELD}/{graph} {position}", 1)

    def note_held(self, graph: str, outputs: Collection[int]) -> None:
        """Record outputs of a graph, by number, that a step has held, as its plan assumed."""
        for position in outputs:
            name = f"{_HELD}/{graph} {position}"
            # Noted while tracing, so the plan that is being made counts with it, and is not stale for it.
            self.assumed.setdefault(name, 1)
            self.see(name, 1)

    def see_dropped(self, graph: str, outputs: Collection[int]) -> None:
        """Record outputs of a graph that a step has dropped and its plan assumed held."""
        for position in outputs:
            self.see(f"{_DROPPED}/{graph} {position}", 1)

    def see_read(self, graph: str, output: int) -> None:
        """Record an output of a graph, by number, that a step has read and its plan assumed unread."""
        self.see(f"{_READ}/{graph} {output}", 1)

    def read(self, graph: str) -> frozenset[int]:
        """Numbers of the outputs of a graph that some step has read."""
        return self._read_outputs(_READ, graph)

    def held(self, graph: str) -> frozenset[int]:
        """Numbers of the outputs of a graph that some step has held."""
        return self._read_outputs(_HELD, graph)

    def dropped(self, graph: str) -> frozenset[int]:
        """Numbers of the outputs of a graph that plans assume dropped before the backward."""
        # An output that was held once may be held again, whatever other steps drop.
        return self._read_outputs(_DROPPED, graph) - self.held(graph)

    def _read_outputs(self, kind: str, graph: str) -> frozenset[int]:
        prefix = f"{kind}/{graph} "
        return frozenset(int(name.removeprefix(prefix)) for name in self.assumed if name.startswith(prefix))

    @property
    def workspaces(self) -> Mapping[str, int]:
        """Assumed bytes that operators allocate internally, by operator."""
        return self.of_graph(_WORKSPACE)

    def renew(self) -> None:
        """From now on, assume the values seen so far, plus headroom."""
        # 2 %, 4 %, 8 %, … up to 50 %: sizes that vary in every step cost few plans.
        self.headroom = min(2 * self.headroom, _MOST_HEADROOM)
        self.assumed = {name: math.ceil(size * (1 + self.headroom)) for name, size in self.largest.items()}
        self.stale = False

    def of_graph(self, graph: str) -> Mapping[str, int]:
        """Assumed sizes of one graph, by symbol."""
        prefix = f"{graph}/"
        return {name.removeprefix(prefix): size for name, size in self.assumed.items() if name.startswith(prefix)}
