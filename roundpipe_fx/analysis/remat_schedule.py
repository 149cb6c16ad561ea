"""The rematerialization schedule: what is recomputed, when and in which form, as plain data.

Whatever decides on recomputation (a save policy, the planner within a byte budget, a rotor sequence, a pipeline's
planner) returns it in this form, and one pass writes it into the graph (``passes/apply_remat_schedule.py``). A forward
value that the backward reads and that no operation of the schedule recomputes is saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from roundpipe_fx.analysis.recomputation import Form


@dataclass(frozen=True, slots=True)
class BackwardOp:
    """One operation of the backward.

    Attributes:
        node: a backward node that runs, or the forward node that is recomputed.
        form: in which form a forward node is recomputed; ``None``: a backward node.
        early: whether it runs in the stage's recompute module, before the stage's incoming gradients arrive. It must
            then read nothing that depends on them, and nothing of the same stage that is not early.
        rng_shape_source: for a dropout of which only the mask is drawn, the gradient that gives its shape.
    """

    node: fx.Node
    form: Form | None = None
    early: bool = False
    rng_shape_source: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class RematBlock:
    """Consecutive operations of one segment's backward.

    Attributes:
        stage: the stage in whose backward they run.
        ops: the operations, in order. Views need not be among them: they are created where they are read.
    """

    segment: int
    stage: int
    ops: tuple[BackwardOp, ...]


@dataclass(frozen=True, slots=True)
class RematSchedule:
    """The backward of a step, operation by operation.

    Attributes:
        blocks: in the order in which values are recomputed and read: a reader gets the latest copy before it that its
            own stage has made, or else the latest of all. Each stage's early operations run before its others.
        saved: forward values that readers get as they are, even where the operation that computes them is recomputed.
    """

    blocks: tuple[RematBlock, ...]
    saved: frozenset[fx.Node] = frozenset()

    def copy_to(self, graph: fx.Graph) -> RematSchedule:
        """Return the same schedule for a copy of the graph, whose nodes have the same names."""
        named = {node.name: node for node in graph.nodes}

        def op(old: BackwardOp) -> BackwardOp:
            source = old.rng_shape_source
            return BackwardOp(named[old.node.name], old.form, old.early, source and named[source.name])

        blocks = (RematBlock(block.segment, block.stage, tuple(map(op, block.ops))) for block in self.blocks)
        return RematSchedule(tuple(blocks), frozenset(named[node.name] for node in self.saved))

    def nodes(self) -> Iterable[fx.Node]:
        """The nodes of all operations, in order."""
        return (op.node for block in self.blocks for op in block.ops)
