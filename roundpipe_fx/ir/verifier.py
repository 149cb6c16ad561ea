"""The verifier: invariants of a graph that hold after every pass.

- Each node comes after what it reads; what it reads is in the graph; every node has a value (``meta["val"]``).
- Inputs do not change, except that accumulate_gradients adds sums; the forward has as many outputs as before, and no
  gradient is lost (in a pipeline it may be returned in parts).
- No node reads one that runs later in a step: the forward reads none of the backward, early recomputation reads none
  that waits for a gradient, and no node reads one of a module that a schedule may delay. The forward reads earlier
  segments and stages, the backward later ones.
- Marks are written by the passes that :data:`roundpipe_fx.ir.joint_graph.MARK_USES` names, and are on every node that
  needs them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from roundpipe_fx.ir.joint_graph import ADDING_NODES, MARK_USES, JointGraph, Mark, Phase, is_sum, module_path
from roundpipe_fx.torch_private import PassedThrough, module_path_text


class InvalidGraphError(PassedThrough, ValueError):
    """A pass left a graph that breaks an invariant. Raised before anything runs."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a graph before a pass.

    Attributes:
        marks: by node its marks.
        forward_outputs: how many outputs are the forward's.
        gradients: how many are the backward's, further parts of gradients left out.
    """

    marks: Mapping[fx.Node, Mapping[str, Any]]
    inputs: tuple[fx.Node, ...]
    forward_outputs: int
    gradients: int


def snapshot(joint: JointGraph) -> Snapshot:
    """A record of a graph that :func:`verify` compares it with later."""
    marks = {node: {key: node.meta[key] for key in MARK_USES if key in node.meta} for node in joint.graph.nodes}
    return Snapshot(marks, tuple(joint.inputs), len(joint.forward_outputs), len(joint.gradients) - len(joint.parts))


def verify(joint: JointGraph, name: str, before: Snapshot, known: Collection[str]) -> None:
    """Check a graph after a pass.

    Args:
        joint: the graph that the pass returned; not changed.
        before: the graph that the pass got.
        known: passes whose marks are declared; others may write any.

    Raises:
        InvalidGraphError: an invariant does not hold; the message names it, the pass, the node, its module and the line
            it was traced from.
    """
    verify_graph(joint.graph, name)
    _verify_ends(joint, name, before)
    for node in joint.computed():
        # The branches of a ``cond`` are graphs, without a value.
        if node.op != "get_attr" and "val" not in node.meta and not _returns_nothing(node):
            raise _make_error(name, node, 'it has no value: a pass that adds a node sets its node.meta["val"]')
        for source in node.all_input_nodes:
            reason = _explain_wrong_read(joint, node, source)
            if reason is not None:
                raise _make_error(name, node, reason)
    _verify_marks(joint, name, before, known)


def verify_graph(graph: fx.Graph, name: str) -> None:
    """Check the order of any graph.

    Args:
        graph: a joint graph's, a stage module's or a program's; not changed.
        name: the pass that made it.

    Raises:
        InvalidGraphError: see :func:`verify`.
    """
    seen: set[fx.Node] = set()
    names: set[str] = set()
    for node in graph.nodes:
        missing = next((source for source in node.all_input_nodes if source not in seen), None)
        if missing is not None:
            where = "comes later in the graph" if missing.graph is graph else "is not in the graph"
            raise _make_error(name, node, f"it reads {missing.name!r}, which {where}")
        if node.name in names:
            raise _make_error(name, node, "another node has its name")
        seen.add(node)
        names.add(node.name)
    if graph.output_node() is not next(iter(reversed(graph.nodes))):
        raise _make_error(name, graph.output_node(), "the output is not the last node")


def _returns_nothing(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.returns


def _verify_ends(joint: JointGraph, name: str, before: Snapshot) -> None:
    # Sums are inputs that a pass may add, so only those that were there before are compared.
    kept = [node for node in joint.inputs if not is_sum(node) or node in before.inputs]
    if kept != list(before.inputs):
        raise InvalidGraphError(
            f"pass {name!r}: the graph's inputs are {[node.name for node in joint.inputs]}, and were "
            f"{[node.name for node in before.inputs]}: a pass must leave them as they are."
        )
    ends = len(joint.forward_outputs), len(joint.gradients) - len(joint.parts)
    if ends != (before.forward_outputs, before.gradients):
        raise InvalidGraphError(
            f"pass {name!r}: the graph returns {ends[0]} outputs of the forward and {ends[1]} gradients, and "
            f"returned {before.forward_outputs} and {before.gradients}."
        )


_LATER = {Phase.FORWARD: 0, Phase.RECOMPUTE: 1, Phase.BACKWARD: 2, Phase.WEIGHT: 3}


def _explain_wrong_read(joint: JointGraph, node: fx.Node, source: fx.Node) -> str | None:
    """Why a node must not read another; ``None`` if it may."""
    phase = node.meta.get(Mark.PHASE)
    if phase is None:
        return None
    if source.op == "placeholder":
        waits = is_sum(source) or str(source.target).startswith("tangents")
        return f"it is {phase} and reads the gradient {source.name!r}" if waits and _LATER[phase] < 2 else None
    source_phase = source.meta.get(Mark.PHASE)
    if source_phase is None:
        return None
    # An early recomputation may read what the backward of a later stage has made: that runs before it.
    if (
        phase is Phase.RECOMPUTE
        and source_phase in (Phase.BACKWARD, Phase.WEIGHT)
        and _runs_before(joint, source, node)
    ):
        return None
    if _LATER[source_phase] > _LATER[phase]:
        return f"it is {phase} and reads {source.name!r}, which is {source_phase}: that runs later"
    if source_phase is not phase or phase in (Phase.RECOMPUTE, Phase.WEIGHT):
        return None
    for unit, read_number in (("segment", _segment), ("stage", _stage)):
        reader, other = read_number(joint, node), read_number(joint, source)
        if reader is None or other is None:
            continue
        if unit == "segment" and phase is Phase.BACKWARD and Mark.ORIGIN in source.meta:
            continue  # recomputed operations run in the order of the forward
        if (other > reader) if phase is Phase.FORWARD else (other < reader):
            return f"it is {phase} of {unit} {reader} and reads {source.name!r} of {unit} {other}, which runs later"
    return None


def _runs_before(joint: JointGraph, source: fx.Node, node: fx.Node) -> bool:
    """Return whether a stage's whole backward runs before another stage's recomputation."""
    reader, other = _stage(joint, node), _stage(joint, source)
    return reader is not None and other is not None and other > reader


def _segment(_joint: JointGraph, node: fx.Node) -> int | None:
    return node.meta.get(Mark.SEGMENT)


def _stage(joint: JointGraph, node: fx.Node) -> int | None:
    """The stage, counted such that the backward runs from the last to the first; RoundPipe's slots are counted on."""
    stage = node.meta.get(Mark.STAGE)
    slots = any(cut.first <= before.last for before, cut in zip(joint.cuts, joint.cuts[1:], strict=False))
    # With slots the stages of the backward are numbered in the order in which they run, otherwise in that of the
    # forward. The sign makes both comparable.
    return -stage if stage is not None and slots and node.meta[Mark.PHASE] is not Phase.FORWARD else stage


def _verify_marks(joint: JointGraph, name: str, before: Snapshot, known: Collection[str]) -> None:
    nodes = list(joint.computed())
    for key, use in MARK_USES.items():
        if not use.on_all_after:
            continue
        lacking = [node for node in nodes if key not in node.meta]
        if lacking and (len(lacking) < len(nodes) or name in use.on_all_after):
            raise _make_error(
                name, lacking[0], f"it lacks the mark {key!r}, which every computing node has from here on"
            )
    if name not in known:
        return
    # Each pass of each compilation comes through here, so nodes are visited once, and not once for each mark.
    unwritable = [key for key, use in MARK_USES.items() if name not in use.written_by]
    for node in joint.graph.nodes:
        if node.op == "output" or (node not in before.marks and name in ADDING_NODES):
            continue
        earlier = before.marks.get(node, {})
        for key in unwritable:
            if key in node.meta and earlier.get(key, _ABSENT) != node.meta[key]:
                raise _make_error(name, node, f"its mark {key!r} was written, and MARK_USES does not name this pass")


_ABSENT = object()


def _make_error(name: str, node: fx.Node, reason: str) -> InvalidGraphError:
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    last = max((number for number, line in enumerate(lines) if line.startswith("File ")), default=None)
    traced = "" if last is None else ", traced from " + ": ".join(lines[last : last + 2])
    path = module_path(node, module_path_text)
    where = f" (of module {path or 'model'!r}{traced})" if path or traced else ""
    return InvalidGraphError(f"pass {name!r}: node {node.name!r}{where}: {reason}.")
