"""stages: consecutive segments become pipeline stages.

The objective is the slowest stage: its modelled forward and backward seconds plus those of transferring the values that
it reads from other stages and of their gradients. Of partitions that are equal in that, the one with the fewest bytes
across its cuts is used. Both optima are exact, by dynamic programming over the chain of segments.
"""

from __future__ import annotations

import difflib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch

from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, module_paths
from roundpipe_fx.ir.segment import Segment, StageCut
from roundpipe_fx.schedules.partition import add_stage, partition, run_costs
from roundpipe_fx.torch_private import PassedThrough

_AUTO_SLACK = 1.1
"""Times the least, of the slowest stage's seconds or of what is compiled, that fewer stages may need."""

_NODES_OF_A_STAGE = 5
"""A stage costs the compiler as much as so many nodes: what would be one kernel on both sides of its end is two."""


class InvalidStageError(PassedThrough, ValueError):
    """The name of a stage is not a module that runs in the model's forward. Raised before anything runs."""


def cut_stages(
    joint: JointGraph, segments: Sequence[Segment], stages: int | str, transfer_seconds: Callable[[int], float]
) -> tuple[JointGraph, list[StageCut]]:
    """Mark every computing node with its stage.

    Args:
        joint: a graph with segments.
        stages: how many, or ``"auto"``: as few as keep each stage within 1.1 times the heaviest segment.
        transfer_seconds: returns the modelled seconds of sending a number of bytes from one stage to the next.

    Returns:
        the graph, and the stages in forward order. More stages than segments are clamped, with a warning.
    """
    # Twice: the value that enters in the forward, and its gradient that leaves in the backward.
    entry_seconds = [2 * transfer_seconds(segment.entry_bytes) for segment in segments]
    costs = run_costs([segment.seconds for segment in segments], entry_seconds)
    if stages == "auto":
        count = _auto_count(costs)
    else:
        count = int(stages)
        if count > len(segments):
            warnings.warn(
                f"roundpipe_fx: stages={count} is more than the {len(segments)} segments that the model can be cut "
                f"into; using {len(segments)} stages.",
                stacklevel=2,
            )
            count = len(segments)
    starts = partition(costs, [segment.entry_bytes for segment in segments], count)
    return stages_of_starts(joint, starts, len(segments))


def cut_between_repeats(joint: JointGraph, segments: Sequence[Segment]) -> tuple[JointGraph, list[StageCut]]:
    """Mark every computing node with its stage: as few stages as still let what repeats be compiled once.

    A compiler fuses within a stage, so long ones have fewer kernels and write less to memory; but it compiles each
    distinct stage, so one that holds everything takes as long to compile as the model is deep. Segments that never
    occur but together are one stage::

        a b c b c b c d e                 c always follows b, and b always comes before c; so do d and e
        a (b c) (b c) (b c) (d e)         five stages, of which three are compiled together

    Stages are then joined where that makes little more to compile: a small segment that happens to occur twice
    is no reason to cut a model that repeats nothing else.

    Args:
        joint: a graph with segments.

    Returns:
        the graph, and the stages in forward order.
    """
    sizes = Counter(node.meta[Mark.SEGMENT] for node in joint.computed())
    names = [segment.fingerprint for segment in segments]
    starts = starts_between_repeats(names, [sizes[segment.index] for segment in segments])
    return stages_of_starts(joint, starts, len(segments))


def starts_between_repeats(names: Sequence[str], sizes: Sequence[int]) -> list[int]:
    """The first segment of each stage, see :func:`cut_between_repeats`.

    Args:
        names: of the segments; equal for equal ones.
        sizes: their numbers of nodes, for which compiling time stands.
    """
    following: dict[str, set[str | None]] = defaultdict(set)
    preceding: dict[str, set[str | None]] = defaultdict(set)
    for earlier, later in pairwise([None, *names, None]):
        if earlier is not None:
            following[earlier].add(later)
        if later is not None:
            preceding[later].add(earlier)
    starts = [
        index
        for index, name in enumerate(names)
        if not index or len(following[names[index - 1]]) > 1 or len(preceding[name]) > 1
    ]
    least = _compiled_nodes(names, sizes, starts)
    # Each round joins the two neighbours that add least to what is compiled; a copy of a stage, once it is part of a
    # longer one, is compiled again with it.
    while len(starts) > 1:
        joined = min(
            ([*starts[:cut], *starts[cut + 1 :]] for cut in range(1, len(starts))),
            key=lambda fewer: _compiled_nodes(names, sizes, fewer),
        )
        nodes = _compiled_nodes(names, sizes, joined)
        if nodes > least * _AUTO_SLACK:
            break
        starts, least = joined, min(least, nodes)
    # Where little repeats, each join on the way compiles something twice that one stage of everything has once.
    return [0] if _compiled_nodes(names, sizes, [0]) <= least * _AUTO_SLACK else starts


def _compiled_nodes(names: Sequence[str], sizes: Sequence[int], starts: Sequence[int]) -> int:
    """Nodes of the distinct stages, and those that each costs as a stage."""
    ends = [*starts[1:], len(names)]
    distinct = {tuple(names[start:end]): sum(sizes[start:end]) for start, end in zip(starts, ends, strict=True)}
    return sum(distinct.values()) + _NODES_OF_A_STAGE * len(distinct)


def stages_at_positions(
    joint: JointGraph, segments: Sequence[Segment], positions: Sequence[int]
) -> tuple[JointGraph, list[StageCut]]:
    """Mark every computing node with its stage, where a stage begins at each given position of the forward order."""
    forward = joint.in_phase(Phase.FORWARD)
    starts = sorted({0, *(forward[position].meta[Mark.SEGMENT] for position in positions)})
    return stages_of_starts(joint, starts, len(segments))


def positions_of_names(
    joint: JointGraph,
    names: Sequence[str],
    clean: Callable[[str], str],
    following: Mapping[str, Sequence[str]] | None = None,
) -> list[int]:
    """Forward positions at which the named modules begin.

    Args:
        names: module paths as in ``model.named_modules()``.
        clean: turns the tracer's spelling of a module path into the user's.
        following: for each of the model's modules those that run after it, as far as known: a stage that should begin
            at a module without operations (``nn.Identity``, dropout in evaluation) begins at the first that has some.

    Raises:
        InvalidStageError: no forward node was traced in a module of that name; close matches are listed.
    """
    first: dict[str, int] = {}
    for position, node in enumerate(joint.in_phase(Phase.FORWARD)):
        for path in module_paths(node, clean):
            parts = path.split(".")
            # "h.0.attn" counts for "h", "h.0" and "h.0.attn": the first operation of any of them is where a stage may
            # begin.
            for depth in range(1, len(parts) + 1):
                first.setdefault(".".join(parts[:depth]), position)
    positions = []
    for name in names:
        if following is not None and name in following:
            # A module without operations of its own (a container) begins where the first of those behind it does.
            running = [path for path in (name, *following[name]) if path in first]
            if not running:
                raise InvalidStageError(
                    f"stages: the module {name!r} has no operations in this model's forward, so no stage can begin "
                    "there. Name the module that runs after it."
                )
            positions.append(first[running[0]])
            continue
        if name not in first:
            close = difflib.get_close_matches(name, list(first), n=3, cutoff=0.4)
            hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
            raise InvalidStageError(
                f"stages: no module named {name!r} runs in this model's forward.{hint} "
                "Names are those of model.named_modules()."
            )
        positions.append(first[name])
    return positions


def _auto_count(costs: torch.Tensor) -> int:
    count = costs.shape[0]
    # No stage is cheaper than its heaviest segment alone (the first superdiagonal), so that bounds what more stages can
    # gain.
    heaviest = costs.diagonal(1).max()
    best = costs[0]
    for stages in range(1, count):
        # The fewest stages whose slowest one is within 10 % of that bound.
        if best[count] <= _AUTO_SLACK * heaviest:
            return stages
        best = add_stage(best, costs)
    return count


def stages_of_starts(joint: JointGraph, starts: Sequence[int], count: int) -> tuple[JointGraph, list[StageCut]]:
    """Mark every computing node with its stage.

    Args:
        joint: a graph with segments.
        starts: the first segment of each stage.
        count: how many segments there are.
    """
    ends = [*starts[1:], count]
    cuts = [StageCut(index, start, end - 1) for index, (start, end) in enumerate(zip(starts, ends, strict=True))]
    stage_of = {segment: cut.index for cut in cuts for segment in range(cut.first, cut.last + 1)}
    for node in joint.computed():
        node.meta[Mark.STAGE] = stage_of[node.meta[Mark.SEGMENT]]
    return joint, cuts
