"""The plan cache: decisions for a graph within a budget, on disk for the next process that compiles it.

A plan is stored as plain data: the rematerialization schedule by names of nodes, the budget in bytes, the trade-off and
the simulated peak. Its key is a digest of the captured graph and everything else that a decision depends on
(:mod:`roundpipe_fx.compiler.plan_key`): options, device, the model of costs, and settings of kernels. The passes that
rewrite the graph run as without a cache, the schedule is written into it by the same pass, and the emitted programs are
simulated as usual; only the search is skipped, and the passes that only mark nodes
(:mod:`roundpipe_fx.compiler.cached_marks`). So a plan from the cache gives the programs that the search would have
given, or is not used: a file that was written by other versions, was changed, or has a schedule that does not fit the
graph is ignored with a line in the log.

::

    captured graph, options, device ──▶ key ──▶ file?
                                                 │ yes: marks, schedule ────────┐
                                                 │ no: search ──▶ written ──────┤
    captured graph ──▶ passes ──────────────────────────────────────────────────┴──▶ schedule written ──▶ programs
                                                                                     into the graph       simulated

Not cached, so planned anew in each process, are graphs with symbolic sizes, graphs in which passes that mark nodes also
move some (a host synchronization in the backward), plans with tiles, steps of several calls, pipelines, and
compilations with measured costs, with passes of the user's or without some of ours, or with a stage compiler of the
user's.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from roundpipe_fx.analysis.cost import CostModel
from roundpipe_fx.analysis.data_files import cache_folder, drop_oldest, is_on, read_data, versions, write_data
from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.compiler.plan_key import NotPlainError, describe_device, describe_graph
from roundpipe_fx.compiler.run_passes import read_disabled_passes
from roundpipe_fx.ir.joint_graph import JointGraph

log = logging.getLogger(__name__)

_FORMAT = "roundpipe_fx plan 5"
_MOST_FILES = 1000
_ADDRESS = " at 0x"
"""In the text of an object that has no other."""


@dataclass(frozen=True, kw_only=True)
class CachedPlan:
    """The decisions for a graph.

    Attributes:
        limit: the budget in bytes.
        peak: simulated, of the emitted programs.
        frontier: (peak bytes, modelled seconds of recomputation) of all candidates, highest peak first.
        sent: bytes of values that leave for the host, if their copies are hidden; the last of them may exceed it.
        host_limit: bytes that all these values have at most.
        shared: whether the schedule is for the graph after common subexpressions were eliminated.
        dropped: numbers of outputs that the caller is assumed to drop before the backward begins.
        unread: numbers of outputs that the caller is assumed not to read either.
        schedule: as data: see :mod:`roundpipe_fx.compiler.schedule_data`.
        marks: as data: see :mod:`roundpipe_fx.compiler.cached_marks`.
    """

    limit: int
    peak: int
    frontier: tuple[tuple[int, float], ...]
    sent: int
    host_limit: int
    shared: bool
    dropped: tuple[int, ...]
    unread: tuple[int, ...]
    schedule: Any
    marks: Any


@dataclass(frozen=True)
class CachedReport:
    """A plan from the cache, as far as it is reported.

    Attributes:
        limit: the budget in bytes.
        frontier: (peak bytes, modelled seconds of recomputation) of all candidates, highest peak first.
        read_operations: gives the operations of the graph.
    """

    limit: int
    frontier: tuple[tuple[int, float], ...]
    read_operations: Callable[[], OperationGraph]


@dataclass(frozen=True)
class PlanFile:
    """Where the plan of one graph is stored."""

    path: Path

    def read(self) -> CachedPlan | None:
        """Read the plan; ``None`` if there is none that can be used."""
        try:
            data = read_data(self.path, _header())
            plan = CachedPlan(
                limit=_number(data["limit"]),
                peak=_number(data["peak"]),
                frontier=tuple((_number(size), _seconds(seconds)) for size, seconds in data["frontier"]),
                sent=_number(data["sent"]),
                host_limit=_number(data["room"]),
                shared=data["shared"] is True,
                dropped=tuple(map(_number, data["dropped"])),
                unread=tuple(map(_number, data["unread"])),
                schedule=data["schedule"],
                marks=data["marks"],
            )
            # A plan whose stored peak exceeds its limit was never returned by a search: the file was changed.
            if not plan.frontier or plan.peak > plan.limit:
                raise ValueError("its peak exceeds the budget")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.ignore(error)
            return None
        return plan

    def ignore(self, why: object) -> None:
        """Log that the file is not used."""
        log.warning("the cached plan %s is ignored, and the graph is planned: %s", self.path, why)

    def write(self, plan: CachedPlan) -> None:
        """Store a plan; a failure is logged."""
        data = {
            "limit": plan.limit,
            "peak": plan.peak,
            "frontier": plan.frontier,
            "sent": plan.sent,
            "room": plan.host_limit,
            "shared": plan.shared,
            "dropped": plan.dropped,
            "unread": plan.unread,
            "schedule": plan.schedule,
            "marks": plan.marks,
        }
        try:
            write_data(self.path, _header(), data)
            drop_oldest(self.path.parent, _MOST_FILES)
        except OSError as error:
            log.warning("the plan is not cached: %s", error)


def _header() -> dict[str, str]:
    return {"format": _FORMAT, **versions()}


def plan_file(
    joint: JointGraph,
    *,
    device: torch.device,
    costs: CostModel,
    options: Sequence[object],
    registered_syncs: Collection[Any],
    workspaces: Mapping[str, int],
) -> PlanFile | None:
    """The file for a captured graph.

    Args:
        joint: the graph, before any pass.
        options: everything else that decisions depend on, as plain values.
        registered_syncs: operators that the user declared to force a host sync.
        workspaces: assumed bytes that operators allocate for themselves, by name.

    Returns:
        ``None`` if the cache is switched off (``ROUNDPIPE_FX_PLAN_CACHE=0``), or if plain values do not determine what
        the graph computes, and how.
    """
    if not is_on() or os.environ.get("ROUNDPIPE_FX_DUMP") or read_disabled_passes():
        return None
    try:
        lines = [*describe_graph(joint), *describe_device(device), repr(costs), repr(options)]
    except NotPlainError:
        return None
    lines += [*sorted(map(str, registered_syncs)), repr(sorted(workspaces.items()))]
    text = "\n".join(lines)
    # The address of an object in a text differs between processes, so it cannot be a key.
    if _ADDRESS in text:
        return None
    return PlanFile(cache_folder() / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json")


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number of bytes")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} is not a number of seconds")
    return float(value)
