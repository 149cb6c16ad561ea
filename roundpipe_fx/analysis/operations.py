"""Operations and storages: the joint graph as the planner sees it.

Views are removed: an *operation* is a node that computes; it reads and makes *storages*, which are numbered. A storage
is bytes that live from the operation that makes them to the last one that reads them, through any number of views.
Parameters and other graph inputs are always available and do not count as storages; incoming gradients do.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import fx

from roundpipe_fx.analysis.liveness import Event
from roundpipe_fx.analysis.recomputation import Form
from roundpipe_fx.analysis.step_of_calls import StepNeeds
from roundpipe_fx.ir.joint_graph import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A node that computes.

    Attributes:
        index: position among the operations: those of the forward in order, then those of the backward, last segment
            first.
        reads: storages that it reads, each once.
        makes: storages that it makes.
        seconds: modelled seconds of one execution on the device that the graph is compiled for.
        inplace_candidates: storages that its result may overwrite, if they die here.
        workspace: bytes that its kernel allocates and frees while it runs.
    """

    index: int
    node: fx.Node
    segment: int
    stage: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float
    inplace_candidates: tuple[int, ...]
    workspace: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeRecipe:
    """The operation that recomputes a forward storage, and its inputs.

    Attributes:
        operation: the forward operation that is recomputed.
        node: the node that is copied: that of the operation or, for a gather, that of the value.
        form: the same operation, a gather by saved indices, or a dropout that computes only its mask.
        reads: storages that it reads.
        makes: storages that it makes.
        workspace: bytes that it allocates beside these and frees at once, including its kernel's workspace.
        seconds: modelled seconds of one execution on the device that the graph is compiled for.
    """

    operation: Operation
    node: fx.Node
    form: Form
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    workspace: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOp:
    """An operation that runs in the backward: one of the backward graph, or a recomputed one of the forward.

    Attributes:
        operation: the operation; of the forward if it is recomputed.
        recipe: how it is recomputed; ``None`` for an operation of the backward.
        reads: storages that it reads; a recomputed forward storage stands for its latest copy.
        stage: the stage in whose backward it runs.
        rng_shape_source: for a dropout that computes only its mask, the gradient whose shape the mask gets.
        early: whether it runs in its stage's recompute module, before the incoming gradients arrive.
    """

    operation: Operation
    recipe: RecomputeRecipe | None
    reads: tuple[int, ...]
    stage: int
    rng_shape_source: fx.Node | None = None
    early: bool = False

    @property
    def makes(self) -> tuple[int, ...]:
        """Storages that it computes or recomputes."""
        return self.operation.makes if self.recipe is None else self.recipe.makes

    @property
    def seconds(self) -> float:
        """Modelled seconds of recomputation; 0 for an operation of the backward."""
        return 0.0 if self.recipe is None else self.recipe.seconds


@dataclass(frozen=True, kw_only=True)
class OperationGraph:
    """All operations and storages of a joint graph with segments and stages.

    Attributes:
        forward: operations of the forward, in order.
        backward: operations of the backward by segment, each in order.
        sizes: bytes of each storage, indexed by its number.
        makers: index of the forward operation that makes a storage; absent for those of the backward and tangents.
        segment_of: by storage, the segment of its maker; for tangents the number of segments.
        values: by forward storage, the node (not a view or a tuple) whose value it is, where there is one.
        must_save: forward storages that are saved under every plan, because they are hoisted.
        must_recompute: forward storages that must not be saved in the forward.
        hold_at: by storage that is not saved, the last segment of its checkpoint, if that spans several: recomputed
            before the backward of that segment, it is held for all of them.
        outputs: forward storages that the caller gets.
        released: forward storages that the caller gets and frees when the forward is over.
        tangents: storages of incoming gradients.
        held: those of them that the caller may hold; the others are expanded scalar zeros.
        loss: bytes of a loss that is computed outside the model.
        loss_lasts: those of them that stay allocated until the backward is over.
        gradients: storages that the backward returns.
        recipes: by forward storage, how it is recomputed; absent where it must not be.
        mask_only: for masks of dropouts, the recipe that computes the mask without the dropout's input.
        rng_shape_sources: by mask and index of the operation that reads it, the gradient whose shape it can be drawn
            with.
        states: bytes of the saved generator state, by index of a seeded forward operation.
        snapshots: by index of an operation, copies of updated inputs (:mod:`roundpipe_fx.analysis.snapshots`) that it
            reads if it runs in the backward. They are storages that no operation makes.
        last_segments: by forward storage, the last segment whose forward or backward reads it.
        stages: by segment, its stage.
        regions: storages made in parts of the model that have their own budget, with that budget.
        step: memory of other calls, where a step makes several; ``None``: there are none.
    """

    forward: tuple[Operation, ...]
    backward: dict[int, list[Operation]]
    sizes: list[int]
    makers: dict[int, int]
    segment_of: list[int]
    values: dict[int, fx.Node]
    must_save: frozenset[int]
    must_recompute: frozenset[int]
    hold_at: dict[int, int]
    outputs: frozenset[int]
    released: frozenset[int]
    tangents: frozenset[int]
    held: frozenset[int]
    loss: int
    loss_lasts: int
    gradients: frozenset[int]
    recipes: dict[int, RecomputeRecipe]
    mask_only: dict[int, RecomputeRecipe]
    rng_shape_sources: dict[tuple[int, int], fx.Node]
    states: dict[int, int]
    snapshots: dict[int, tuple[int, ...]]
    last_segments: dict[int, int]
    stages: dict[int, int]
    regions: tuple[tuple[frozenset[int], int | float], ...]
    segments: int
    step: StepNeeds | None = None

    @property
    def seconds(self) -> float:
        """Modelled seconds of all operations, each once."""
        return sum(operation.seconds for part in (self.forward, *self.backward.values()) for operation in part)

    @functools.cached_property
    def always_live(self) -> frozenset[int]:
        """Forward storages that live until the backward under every plan: hoisted ones and outputs."""
        return self.must_save | self.outputs

    @functools.cached_property
    def forward_events(self) -> list[Event]:
        """The operations of the forward as events."""
        return [
            Event(o, o.reads, o.makes, o.inplace_candidates, (o.stage, Phase.FORWARD), workspace=o.workspace)
            for o in self.forward
        ]

    @functools.cached_property
    def live_across_from(self) -> dict[int, list[tuple[int, int]]]:
        """By segment, the storages that it makes and a later segment reads, each with the last segment that does."""
        live: dict[int, list[tuple[int, int]]] = {}
        for storage, last in self.last_segments.items():
            # Plans decide how long such values live: each is read in a later segment, and none is live in any case.
            if last > self.segment_of[storage] and storage not in self.always_live:
                live.setdefault(self.segment_of[storage], []).append((storage, last))
        return live

    @functools.cached_property
    def live_across(self) -> frozenset[int]:
        """All storages that one segment makes and a later one reads."""
        return frozenset(storage for storages in self.live_across_from.values() for storage, _ in storages)

    def is_forward(self, storage: int) -> bool:
        """Return whether a storage is made by the forward."""
        return storage in self.makers
