"""Learned steps: the calls that made up earlier steps, and the memory that the next plans must leave for other calls.

The first step is planned as if each call were alone; one that is known to have several graphs, as if all were like
the graph that is planned. If several calls were alive at once and together exceed the budget, a warning says so once,
and the next plans are made for steps like that one. For a budget of 10 GiB::

    first plan      8 while the forward runs, 6 of them saved; 3 more while the backward runs: 6 + 3 = 9
    first step      forward, forward, backward, backward; the first backward peaks: 6 + 6 + 3 = 15
    next plan       for two calls: 3 saved, and 4 more while the backward runs, which recomputes: 3 + 3 + 4 = 10

If a step has several graphs, :meth:`LearnedSteps.split_budget` chooses a footprint for each of them first. Then each is
planned anew, with these for the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.analysis.step_of_calls import Footprint, NotedStep, StepNeeds, count_most_alive, simulate_step_peak
from roundpipe_fx.budget import Found, Infeasible, Result, bytes_text
from roundpipe_fx.remat.multi_graph_step import FittedGraphs, fit_graphs, make_ladder

_MOST = 16
"""Kinds of steps that are planned for."""


class StepBudgetWarning(UserWarning):
    """A step takes, or may take, more bytes than its budget: it makes several calls, or holds what no plan counts."""


@dataclass(frozen=True)
class _Planned:
    footprint: Footprint
    operations: Callable[[], OperationGraph] | None
    budget: int


class LearnedSteps:
    """Calls and graphs that steps of one model consisted of.

    Args:
        replans: whether replanning is possible.

    Attributes:
        stale: whether steps have shown something that the plans do not take into account.
        outside: lines that run eagerly, with the reasons.
        parts: how many graphs a step is known to have before one has run; 0: it is not known.
        gathered_bytes: bytes of the budget that are set aside for what is no graph.
        budget: as the user gave it, if it is known.
    """

    def __init__(self, replans: bool = True) -> None:
        self.stale = False
        self.parts = 0
        self.gathered_bytes = 0
        self.budget: int | float | None = None
        self._seen = False
        self._replans = replans
        self._steps: dict[tuple[object, ...], NotedStep] = {}
        self._planned: dict[str, _Planned] = {}
        self._footprints: dict[str, Footprint] = {}
        self._asked: int | float = 0
        self._limit: int | None = None
        self.outside: dict[str, str] = {}
        self._warned = False
        self._reported_more: set[str] = set()
        self._reported_outside = False

    @property
    def replans(self) -> bool:
        """Return whether replanning is possible."""
        return self._replans

    @property
    def expected_parts(self) -> int:
        """Number of graphs of the first step; 0 if it is not known, or once it has been seen."""
        return self.parts if self._replans and not self._seen else 0

    def plan(
        self,
        graph: str,
        footprint: Footprint,
        operations: Callable[[], OperationGraph] | None,
        budget: int,
        asked: int | float,
    ) -> None:
        """Note the plan of a graph.

        Args:
            operations: gives those that it was chosen for; ``None`` for a graph without a backward.
            asked: the budget as the user gave it.
        """
        self._planned[graph] = _Planned(footprint, operations, budget)
        self._footprints[graph] = footprint
        self._asked = asked

    def warn_of_uncounted(self, what: str, size: int, peak: int, budget: int) -> None:
        """Warn, once, that a step takes memory that its plan does not count, unless the next one will.

        Args:
            peak: bytes that are planned for a step.
            budget: bytes that it may take.
        """
        # With replanning the next step is planned for it, so there is nothing that the user has to do.
        if self._replans or peak + size <= budget or what in self._reported_more:
            return
        self._reported_more.add(what)
        warnings.warn(
            f"roundpipe_fx: a step may take {size} bytes ({bytes_text(size)}) more than its plan, for {what}, which "
            f"the plan does not count: it needs {peak} bytes ({bytes_text(peak)}), and the memory_budget is {budget} "
            f"bytes ({bytes_text(budget)}). torch.compile does not replan: use roundpipe_fx.compile, which plans the "
            "next step for it, or give a smaller budget.",
            StepBudgetWarning,
            stacklevel=2,
        )

    def warn_of_held(self, size: int, peak: int, budget: int) -> None:
        """Warn that a step holds outputs that its plan assumed dropped, and takes more than its budget with them.

        Args:
            size: bytes of these outputs.
            peak: bytes that are planned for a step.
            budget: bytes that it may take.
        """
        if peak + size <= budget:
            return
        then = "The next step is planned for that." if self._replans else 'outputs="held" plans for that.'
        warnings.warn(
            f"roundpipe_fx: the caller holds {size} bytes ({bytes_text(size)}) of outputs when the backward begins, "
            f"which were planned as dropped by then: the step needs up to {peak + size} bytes "
            f"({bytes_text(peak + size)}), and the memory_budget is {budget} bytes ({bytes_text(budget)}). {then}",
            StepBudgetWarning,
            stacklevel=2,
        )

    def warn_of_read(self, size: int, peak: int, budget: int) -> None:
        """Warn that a step reads an output that its plan assumed unread, and takes more than its budget with it.

        Args:
            size: bytes of the output.
            peak: bytes that are planned for a step.
            budget: bytes that it may take.
        """
        if peak + size <= budget:
            return
        then = "The next step is planned for that." if self._replans else 'outputs="dropped" plans for that.'
        warnings.warn(
            f"roundpipe_fx: the caller reads an output of {size} bytes ({bytes_text(size)}), which was planned as "
            f"unread and had to be computed: the step needs up to {peak + size} bytes ({bytes_text(peak + size)}), and "
            f"the memory_budget is {budget} bytes ({bytes_text(budget)}). {then}",
            StepBudgetWarning,
            stacklevel=2,
        )

    def runs_eagerly(self, line: object, why: str) -> None:
        """Note where code runs that is part of no graph, and why."""
        if str(line) not in self.outside:
            self.outside[str(line)] = why.partition("\n")[0]
            self._reported_outside = False

    def see(self, is_usual: bool, noted: Callable[[], NotedStep]) -> None:
        """Note a step that is over. May be called from several threads.

        Args:
            is_usual: whether it was one call with one backward at most, for which the plans were made.
            noted: the calls it consisted of; not called for the usual step.
        """
        outside = bool(self.outside) and not self._reported_outside
        first = self.expected_parts > 0
        self._seen = True
        # The usual step (one call, one backward, nothing outside) is not written down, since it is what plans assume.
        if is_usual and not outside and not first:
            return
        step = noted()
        # The tightest plan decides: calls were planned for budgets of their own.
        budgets = [self._planned[call.graph].budget for call in step.calls if call.graph in self._planned]
        budget = self._asked if first and isinstance(self._asked, int) else max(budgets, default=0)
        peak = simulate_step_peak(step, {})
        # Equal kinds are learned once; a model with ever new kinds of steps (a recurrent loop of random length) stops
        # at a limit.
        new = step.kind not in self._steps and len(self._steps) < _MOST
        # A fraction is of the range of peaks that all graphs can reach together, which no plan knew before this step.
        over = peak > budget and new and not (first and isinstance(self._asked, float))
        if not budgets or not (over or outside or first):
            return
        if new and (over or first):
            self._steps[step.kind] = step
            self.stale = self._replans
        # Where everything is kept, the next plan differs in what it says alone.
        is_news = (
            over and not self._warned and not (self._replans and self._asked == 1.0 and isinstance(self._asked, float))
        )
        if outside or is_news:
            self._warned |= over
            self._reported_outside |= outside
            warnings.warn(self._describe_change(step, peak, budget, first), StepBudgetWarning, stacklevel=2)

    def _describe_change(self, step: NotedStep, peak: int, budget: int, first: bool) -> str:
        graphs = sorted({call.graph for call in step.calls})
        alive = sum(count_most_alive(step, graph) for graph in graphs)
        calls = f"up to {alive} calls of {len(graphs)} graphs were alive at once in a step"
        if step.retains:
            calls = "a call" if len(step.calls) == 1 else f"{calls}, and one of them"
            times = "once" if step.most_backwards == 1 else f"{step.most_backwards} times"
            calls += f" went backward {times} and kept its saved values for another backward (retain_graph=True)"
        held = f"by their plans they hold {peak} bytes ({bytes_text(peak)}) together"
        allowed = f"the memory_budget is {budget} bytes ({bytes_text(budget)})"
        if self.gathered_bytes and isinstance(self._asked, int):
            gathered = f"{self.gathered_bytes} bytes ({bytes_text(self.gathered_bytes)})"
            allowed += f" without the {gathered} set aside to gather parameters"
        text = f"roundpipe_fx: {calls}; {held}, and {allowed}."
        if peak > budget and self._replans:
            how = "as if all were like it" if first else "as if it were alone"
            text += f" Each was planned {how}. The next step is planned for all of them."
        elif peak > budget:
            text += (
                " Each was planned as if it were alone, and torch.compile does not replan: use "
                "roundpipe_fx.compile, which plans the next step for all of them, or give a smaller budget."
            )
        if self.outside:
            text += f" Code that runs eagerly between graphs is not counted: {', '.join(self.outside)}."
        return text

    def needs(self, graph: str) -> StepNeeds | None:
        """Bytes and times that are left for other calls where a graph is planned."""
        # Only steps in which this graph takes part.
        steps = tuple(step for step in self._steps.values() if any(call.graph == graph for call in step.calls))
        if not steps or not self._replans:
            return None
        others: Mapping[str, Footprint] = {
            name: footprint for name, footprint in self._footprints.items() if name != graph
        }
        return StepNeeds(graph, steps, others, limit=self._limit)

    def split_budget(self, share: float) -> Result[None]:
        """Decide what each graph may hold, where steps consist of several, so that the budget holds for the step.

        Args:
            share: of the budget that may be used.
        """
        self._limit = None
        steps = list(self._steps.values())
        # With a single graph, its own plan leaves room for its other calls (:meth:`needs`); several graphs have to
        # divide the budget first.
        several = any(len({call.graph for call in step.calls}) > 1 for step in steps)
        if several:
            fitted = self._fit_steps(steps, share)
            if isinstance(fitted, Infeasible):
                return fitted
            self._footprints.update(fitted.value.footprints)
            self._limit = fitted.value.limit
        self.stale = False
        return Found(None)

    def check_parts(self, expected: Callable[[], NotedStep], share: float) -> Result[None]:
        """Before the first backward of a model that is known to have several graphs: check that all can be planned so
        that the budget holds for the step.

        Args:
            share: of the budget that may be used.
        """
        if not self.expected_parts or not isinstance(self._asked, int):
            return Found(None)
        step = expected()
        if simulate_step_peak(step, {}) > self._asked * share:  # as they are planned, for the least bytes
            fitted = self._fit_steps([step], share)
            return fitted if isinstance(fitted, Infeasible) else Found(None)
        return Found(None)

    def _fit_steps(self, steps: Sequence[NotedStep], share: float) -> Result[FittedGraphs]:
        """Plans for all graphs of some steps. Arguments as for :meth:`split_budget`."""
        graphs = dict.fromkeys(call.graph for step in steps for call in step.calls)
        ladders = {}
        for graph in graphs:
            # A graph that cannot be planned anew (its operations are gone) keeps its footprint, and the others plan
            # around it.
            planned = self._planned.get(graph)
            if planned is None or planned.operations is None or not self._replans:
                continue
            steps_of_graph = tuple(step for step in steps if any(call.graph == graph for call in step.calls))
            others = {name: footprint for name, footprint in self._footprints.items() if name != graph}
            needs = StepNeeds(graph, steps_of_graph, others, planned.footprint.gradients)
            ladders[graph] = make_ladder(planned.operations(), needs)
        fixed = {graph: known_footprint for graph, known_footprint in self._footprints.items() if graph not in ladders}
        fitted = fit_graphs(ladders, steps, fixed, self._asked, share)
        if fitted.peak > fitted.limit:
            # Parameters that FSDP2 gathers were taken off the budget before planning; the user sees the budget as
            # given.
            gathered_bytes = self.gathered_bytes if isinstance(self._asked, int) else 0
            budget, minimum = fitted.limit + gathered_bytes, fitted.peak + gathered_bytes
            if isinstance(self.budget, int) and share == 1:
                budget = self.budget  # which may be less than what is set aside
            gathering = (
                f", {gathered_bytes} bytes ({bytes_text(gathered_bytes)}) to gather parameters (FSDP2) among them"
                if gathered_bytes
                else ""
            )
            text = (
                f"memory_budget of {budget} bytes ({bytes_text(budget)}) cannot be met: a step of this model is made "
                f"of {len(graphs)} graphs, which together need at least {minimum} bytes ({bytes_text(minimum)})"
                f"{gathering}. Use a smaller batch, fewer calls before a backward, or a budget of at least "
                "the minimum."
            )
            return Infeasible(minimum=minimum, bottleneck=text)
        return Found(fitted)
