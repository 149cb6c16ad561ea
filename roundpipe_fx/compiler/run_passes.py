"""Running passes, one level at a time: the user's edit of the list, and the check and the text after each pass.

``ROUNDPIPE_FX_DISABLE=pass,pass`` leaves passes out, to find the one to blame without a change in the program.
``ROUNDPIPE_FX_VERIFY=1`` checks the graph after each pass (:mod:`roundpipe_fx.ir.verifier`).
``ROUNDPIPE_FX_DUMP=folder`` writes it after each pass: a folder for each captured graph, a file for each pass with its
number in the list. The logger ``roundpipe_fx.passes`` has the time of each pass at level DEBUG.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.text import graph_text, joint_text
from roundpipe_fx.ir.verifier import snapshot, verify, verify_graph
from roundpipe_fx.passes.entry import Pass, PassContext, PassLevel
from roundpipe_fx.passes.pipeline import default_passes
from roundpipe_fx.torch_private import PassedThrough

log = logging.getLogger("roundpipe_fx.passes")

G = TypeVar("G", JointGraph, fx.Graph)

_EMISSION_NEEDS = ("annotate", "segments", "stages", "roundpipe_slots", "apply_remat_schedule", "rng")
"""Without these no stage modules can be emitted, or their gradients would be wrong."""


class InvalidPassesError(PassedThrough, ValueError):
    """The list that ``passes=`` made cannot be run. Raised before anything runs."""


def edit_passes(edit: Callable[[list[Pass]], Sequence[Pass]] | None) -> tuple[Pass, ...]:
    """The passes to run, without those that ``ROUNDPIPE_FX_DISABLE`` names.

    Args:
        edit: the user's: gets the list, returns the one to run; ``None``: the list as it is.

    Raises:
        InvalidPassesError: it did not return a list of passes, a pass is missing or comes after one that needs it, or
            passes are not in the order of their levels; the environment names a pass that is not in the list.
    """
    if edit is None and not read_disabled_passes():
        return tuple(default_passes())
    edited = default_passes() if edit is None else edit(default_passes())
    if not isinstance(edited, (list, tuple)) or not all(isinstance(item, Pass) for item in edited):
        raise InvalidPassesError(
            f"passes: the function must return a list of roundpipe_fx.Pass, and returned {edited!r}. If it edits the "
            "list in place, it must return it too."
        )
    edited = _without_disabled(edited)
    names = [item.name for item in edited]
    doubled = next((name for name in names if names.count(name) > 1), None)
    # Names identify passes in `needs`, in ROUNDPIPE_FX_DISABLE and in the files of dumps.
    if doubled is not None:
        raise InvalidPassesError(f"passes: two passes are named {doubled!r}; give one of them another name.")
    levels = list(PassLevel)
    for before, item in itertools.pairwise(edited):
        if levels.index(item.level) < levels.index(before.level):
            raise InvalidPassesError(
                f"passes: {item.name!r} works on a {item.level}, and comes after {before.name!r}, which works on a "
                f"{before.level}. Levels run in this order: {', '.join(levels)}."
            )
    # A pass that is needed must come before: passes of one level run in the order of the list.
    for position, item in enumerate(edited):
        for need in item.needs:
            if need not in names[:position]:
                where = f"which comes after it; put {need!r} first" if need in names else "which is missing"
                raise InvalidPassesError(f"passes: {item.name!r} needs {need!r}, {where}.")
    lacking = [name for name in _EMISSION_NEEDS if name not in names]
    if lacking:
        raise InvalidPassesError(
            f"passes: stage modules cannot be emitted without {', '.join(map(repr, lacking))}. To replace a pass, give "
            "the new one its name."
        )
    return tuple(edited)


def read_disabled_passes() -> tuple[str, ...]:
    """Read the names in ``ROUNDPIPE_FX_DISABLE``, which commas separate."""
    return tuple(filter(None, map(str.strip, os.environ.get("ROUNDPIPE_FX_DISABLE", "").split(","))))


def _without_disabled(passes: Sequence[Pass]) -> list[Pass]:
    names = [item.name for item in passes]
    for name in read_disabled_passes():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
            hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
            default = ", ".join(item.name for item in passes if not item.changes_numerics)
            rounding = ", ".join(item.name for item in passes if item.changes_numerics)
            raise InvalidPassesError(
                f"ROUNDPIPE_FX_DISABLE: no pass is named {name!r}.{hint} Default passes, which keep the bits of "
                f"results: {default}. Passes that change numerics: {rounding}."
            )
    return [item for item in passes if item.name not in read_disabled_passes()]


def run_passes(
    graph: G, passes: Sequence[Pass], level: PassLevel, context: PassContext, start: int = 0, stop: int | None = None
) -> G:
    """Run the passes of one level.

    Args:
        level: which of them run.
        context: what passes may know.
        start: position of the first one that may run.
        stop: position of the first one after it that may not; ``None``: there is none.

    Raises:
        InvalidGraphError: with ``ROUNDPIPE_FX_VERIFY=1``, if a pass left a graph that breaks an invariant.
        InvalidPassesError: a pass did not return a graph.
    """
    verifies = os.environ.get("ROUNDPIPE_FX_VERIFY") == "1"
    for number, item in enumerate(passes[start:stop], start + 1):
        if item.level is not level or not item.when(context):
            continue
        before = snapshot(graph) if verifies and isinstance(graph, JointGraph) else None
        began = time.perf_counter()
        result = item.run(graph, context)
        log.debug("%s: %.3f ms", item.name, (time.perf_counter() - began) * 1e3)
        if not (isinstance(result, JointGraph) if isinstance(graph, JointGraph) else result is graph):
            expected = "a JointGraph" if isinstance(graph, JointGraph) else "the torch.fx.Graph that it got"
            raise InvalidPassesError(
                f"pass {item.name!r} must return {expected}, and returned {type(result).__name__}."
            )
        graph = result
        if verifies:
            # Only passes that are known have their marks checked; a user's may write any.
            if before is not None and isinstance(graph, JointGraph):
                verify(graph, item.name, before, _NAMES)
            elif isinstance(graph, fx.Graph):
                verify_graph(graph, item.name)
        if context.dump is not None:
            _dump(graph, context.dump, f"{number:02d}_{item.name}")
    return graph


_NAMES = frozenset(item.name for item in default_passes())


def make_dump_folder(captured: JointGraph) -> Path | None:
    """Make a new folder for the dumps of one graph, in the one that ``ROUNDPIPE_FX_DUMP`` names; ``None`` without it.

    Args:
        captured: the graph before the first pass, which is written as ``00_captured.py``.
    """
    parent = os.environ.get("ROUNDPIPE_FX_DUMP")
    if not parent:
        return None
    number = 0
    while True:
        folder = Path(parent) / f"graph_{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            break
    _dump(captured, folder, "00_captured")
    return folder


def _dump(graph: JointGraph | fx.Graph, folder: Path, name: str) -> None:
    """Write a graph; the results of one pass for several stage modules, programs or plans are numbered."""
    text = joint_text(graph) if isinstance(graph, JointGraph) else graph_text(graph)
    path, times = folder / f"{name}.py", 1
    while path.exists():
        times += 1
        path = folder / f"{name}.{times}.py"
    path.write_text(text)
