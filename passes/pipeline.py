"""The list of passes: what runs, in which order, under which condition, on one device and in pipelines.

Passes stand in the order in which they run. Each works at a level, and between two levels something is decided or
emitted, by functions that are not passes:

- *joint graph*: the captured graph, up to where its operations are annotated. A pipeline may then try several
  schedules, which cut the graph differently.
- *joint graph for one caller*: without the outputs that a caller of one device is assumed not to read.
- *graph to be tiled*, *tiled graph*: where tiles are considered, on a copy. Between the two it is decided which regions
  of operations are carried out in tiles, and in how many.
- *annotated graph*: it is cut into segments. RoundPipe's dispatch then decides which segments its slots have.
- *segmented graph*: segments become stages.
- *staged graph*: once for a plan that may recompute, and on a copy for one that saves everything. Then it is decided
  what is recomputed: by the planner within a budget, else by a save policy. The decision is plain data,
  ``context.schedule``.
- *planned graph*: the decision is written into the graph. The planner may try several, each in a copy.
- *stage module*: stage modules are emitted; these passes get the ``torch.fx.Graph`` of one of them.
- *program*: the programs that call stage modules are emitted; these passes get the graph of one of them.

Passes keep the bits of results but for those with ``changes_numerics``: they may sum in another order.

The passes themselves are functions with explicit arguments, one per file; the list passes them what they need of the
context. ``ROUNDPIPE_FX_VERIFY=1`` checks the graph after each pass (:mod:`roundpipe_fx.ir.verifier`);
``ROUNDPIPE_FX_DUMP=folder`` writes it as text after each pass; the logger ``roundpipe_fx.passes`` has the seconds of
each at level DEBUG.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from roundpipe_fx.analysis.simulator import allocation_granularity
from roundpipe_fx.analysis.tiling import BodyCosts
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.options import Inductor, Options
from roundpipe_fx.passes.accumulate_gradients import accumulate_gradients
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.apply_remat_schedule import apply_remat_schedule
from roundpipe_fx.passes.average_pooling import divide_by_counts
from roundpipe_fx.passes.batch_norm import release_running_statistics
from roundpipe_fx.passes.boolean_indexing import expand_boolean_indexing
from roundpipe_fx.passes.channels_last import put_channels_last
from roundpipe_fx.passes.conjugate_numbers import fold_conjugate_numbers
from roundpipe_fx.passes.cse import eliminate_common_subexpressions
from roundpipe_fx.passes.dropout import expand_dropout
from roundpipe_fx.passes.early_recompute import early_recompute
from roundpipe_fx.passes.entry import Pass, PassContext, PassLevel
from roundpipe_fx.passes.equal_collectives import merge_equal_collectives
from roundpipe_fx.passes.fuse_costs import fuse_costs, fuse_costs_of_body
from roundpipe_fx.passes.fused_recompute import recompute_in_readers
from roundpipe_fx.passes.hoist_host_syncs import hoist_host_syncs
from roundpipe_fx.passes.host_copies import copy_back, copy_to_host
from roundpipe_fx.passes.in_place_draws import draw_in_memory_order
from roundpipe_fx.passes.interpolation import restore_interpolation
from roundpipe_fx.passes.layouts import restore_layouts
from roundpipe_fx.passes.mean_losses import split_mean_losses
from roundpipe_fx.passes.missing_gradients import expand_missing_gradients
from roundpipe_fx.passes.online_softmax import rewrite_online
from roundpipe_fx.passes.overlap_recompute import overlap_recompute
from roundpipe_fx.passes.packed_gradients import pass_sums_to_backward
from roundpipe_fx.passes.pooling import save_offsets_alone
from roundpipe_fx.passes.recompute_regions import mark_recompute_regions, region_bounds
from roundpipe_fx.passes.redundant_views import remove_redundant_views
from roundpipe_fx.passes.reinplace import reinplace
from roundpipe_fx.passes.resolved_random_branches import release_resolved_random_branches
from roundpipe_fx.passes.rng import replay_rng
from roundpipe_fx.passes.roundpipe_slots import cut_roundpipe_slots
from roundpipe_fx.passes.row_slices import slice_narrow_values
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.passes.split_backward import split_backward
from roundpipe_fx.passes.stages import (
    cut_between_repeats,
    cut_stages,
    positions_of_names,
    stages_at_positions,
    stages_of_starts,
)
from roundpipe_fx.passes.statistics import decompose_into_statistics
from roundpipe_fx.passes.storage_copies import copy_parts_only
from roundpipe_fx.passes.strided_gradients import mark_strided_gradients
from roundpipe_fx.passes.tied_gradients import split_tied_gradients
from roundpipe_fx.passes.tiles import tile_regions
from roundpipe_fx.passes.unread_outputs import drop_unread_outputs
from roundpipe_fx.passes.wide_values import compute_for_each_reader
from roundpipe_fx.passes.workspaces import mark_workspaces
from roundpipe_fx.torch_private import module_path_text


def _eager(context: PassContext) -> bool:
    """stages run eagerly"""
    return context.compiler == "eager"


def _compiled(context: PassContext) -> bool:
    """a stage compiler generates the kernels"""
    return context.compiler != "eager"


def _by_inductor(context: PassContext) -> bool:
    """Inductor compiles the stages"""
    return isinstance(context.compiler, Inductor)


def _fused(context: PassContext) -> bool:
    """training, and Inductor compiles the stages"""
    return isinstance(context.compiler, Inductor) and context.training


def _eager_cpu(context: PassContext) -> bool:
    """stages run eagerly, on the CPU"""
    return context.compiler == "eager" and context.options.device_name in (None, "cpu")


def _device_present(context: PassContext) -> bool:
    """the device is present"""
    return context.options.device_name is None


def _workspaces_known(context: PassContext) -> bool:
    """the device is present, or a GPU"""
    return _device_present(context) or context.device.type == "cuda"


def _microbatches(context: PassContext) -> bool:
    """training with several microbatches"""
    return context.training and context.microbatches > 1


def _unread(context: PassContext) -> bool:
    """the caller is assumed not to read some outputs"""
    return bool(context.unread)


def _in_tiles_of_classes(context: PassContext) -> bool:
    """loss heads in tiles of their classes"""
    return any(region.online for region, _ in context.tiles)


def _stages(context: PassContext) -> bool:
    """one device, and every schedule but RoundPipe's"""
    return context.roundpipe_partition is None


def _roundpipe(context: PassContext) -> bool:
    """RoundPipe's schedule"""
    return context.roundpipe_partition is not None


def _recomputes(context: PassContext) -> bool:
    """training within a budget, or with `recompute="full"`"""
    return context.recomputes


def _everything_saved(context: PassContext) -> bool:
    """within a budget, for plans that save everything"""
    return context.everything_saved


def _recomputed(context: PassContext) -> bool:
    """training"""
    return context.schedule is not None


def _early(context: PassContext) -> bool:
    """training without a budget"""
    return context.early and not (context.runs_programs and _fused(context))


def _split(context: PassContext) -> bool:
    """schedules that delay gradients of parameters"""
    return context.split


def _training(context: PassContext) -> bool:
    """training"""
    return context.training


def _sums(context: PassContext) -> bool:
    """training in a pipeline"""
    return context.sums


def _backward_program(context: PassContext) -> bool:
    """the backward's program"""
    return context.program == "backward"


def _copied_to_host(context: PassContext) -> bool:
    """values that leave for the host, on one device"""
    return bool(context.host_copies)


def default_passes() -> list[Pass]:
    """The passes in the order in which they run: the list that the option ``passes`` edits.

    Returns:
        a new list.
    """
    return list(_PASSES)


_PASSES = (
    Pass(
        "conjugate_numbers",
        lambda joint, _: fold_conjugate_numbers(joint),
        about="replace conjugates of complex numbers by numbers, which kernels need not copy",
    ),
    Pass(
        "resolved_random_branches",
        lambda joint, _: release_resolved_random_branches(joint),
        about="keep drawing the random numbers of branches that were resolved while tracing",
    ),
    Pass(
        "packed_gradients",
        lambda joint, _: pass_sums_to_backward(joint),
        about="add the gradients of recurrent modules on packed sequences in autograd's order",
    ),
    Pass(
        "boolean_indexing",
        lambda joint, _: expand_boolean_indexing(joint),
        about="replace indexing by a mask by one `nonzero` and integer indexing",
    ),
    Pass(
        "batch_norm",
        lambda joint, _: release_running_statistics(joint),
        about="drop saved running statistics, which the gradient does not read",
    ),
    Pass(
        "in_place_draws",
        lambda joint, _: draw_in_memory_order(joint),
        about="draw in-place random numbers in the order of the tensor's memory",
    ),
    Pass(
        "dropout",
        lambda joint, _: expand_dropout(joint),
        when=_eager_cpu,
        about="replace dropout by drawing a mask and two products",
    ),
    Pass(
        "interpolation",
        lambda joint, _: restore_interpolation(joint),
        when=_eager_cpu,
        about="replace indexing that repeats nearest neighbours by an interpolation kernel",
    ),
    Pass(
        "storage_copies",
        lambda joint, _: copy_parts_only(joint),
        when=_eager,
        about="copy only a tensor's part where an operator would copy its whole storage",
    ),
    Pass(
        "layouts",
        lambda joint, context: restore_layouts(joint, context.device if _device_present(context) else None),
        when=_eager,
        about="restore the strides recorded in the graph",
    ),
    Pass(
        "average_pooling",
        lambda joint, _: divide_by_counts(joint),
        when=_by_inductor,
        about="divide gradients of average pooling by the elements of a window that exist",
    ),
    Pass(
        "channels_last",
        lambda joint, context: put_channels_last(joint, context.device.type == "cpu", _inductor_options(context)),
        when=_by_inductor,
        about="record channels innermost in memory where Inductor computes convolutions in that order",
    ),
    Pass(
        "pooling",
        lambda joint, _: save_offsets_alone(joint),
        when=_fused,
        about="save offsets of maxima within their windows for gradients of pooling, and no image",
    ),
    Pass(
        "strided_gradients",
        lambda joint, _: mark_strided_gradients(joint),
        about="mark incoming gradients whose strides matter even if they are zeros",
    ),
    Pass(
        "missing_gradients",
        lambda joint, _: expand_missing_gradients(joint),
        when=_compiled,
        about="expand zeros for incoming gradients that are not expected",
        needs=("strided_gradients",),
    ),
    Pass(
        "redundant_views",
        lambda joint, _: remove_redundant_views(joint),
        about="drop views that equal an earlier value",
    ),
    Pass(
        "wide_values",
        lambda joint, _: compute_for_each_reader(joint),
        when=_recomputes,
        about="compute wide values that are cheap to compute from narrow ones anew for each reader",
    ),
    Pass(
        "annotate",
        lambda joint, context: annotate(joint, context.costs),
        about="annotate each node with its phase, bytes, FLOPs and modelled seconds",
    ),
    Pass(
        "workspaces",
        lambda joint, context: mark_workspaces(
            joint, context.device, _compiled(context), context.workspaces, _device_present(context)
        ),
        when=_workspaces_known,
        about="annotate the bytes that kernels allocate internally",
    ),
    Pass(
        "equal_collectives",
        lambda joint, _: merge_equal_collectives(joint),
        about="run collectives with equal operands once",
        needs=("annotate",),
    ),
    Pass(
        "hoist_host_syncs",
        lambda joint, context: hoist_host_syncs(joint, context.registered_syncs, not context.one_plan),
        about="run operations that synchronize the host, decide a route or communicate once, in the forward",
        needs=("annotate",),
    ),
    Pass(
        "recompute_regions",
        lambda joint, context: mark_recompute_regions(joint, _replays_random(context.options)),
        about="mark values that checkpoints, scopes and saved data of the user require or forbid to save",
        needs=("annotate",),
    ),
    Pass(
        "fuse_costs",
        lambda joint, context: fuse_costs(joint, context.costs),
        when=_compiled,
        about="replace the modelled seconds of fused operations",
        needs=("annotate",),
    ),
    Pass(
        "tied_gradients",
        lambda joint, _: split_tied_gradients(joint),
        when=_microbatches,
        about="return the contributions of several uses of a parameter to its gradient separately",
        changes_numerics=True,
    ),
    Pass(
        "unread_outputs",
        lambda joint, context: drop_unread_outputs(joint, context.unread),
        level=PassLevel.OUTPUTS,
        when=_unread,
        about="return narrow values that outputs are computed from instead of outputs that nobody reads",
        needs=("hoist_host_syncs",),
    ),
    Pass(
        "mean_losses",
        lambda joint, context: split_mean_losses(
            joint, context.costs, context.device, _eager(context), _device_present(context)
        ),
        level=PassLevel.SUMMED,
        about="turn a loss that is a mean into a sum and a division",
        needs=("annotate",),
        changes_numerics=True,
    ),
    Pass(
        "row_slices",
        lambda joint, context: slice_narrow_values(
            joint, context.costs, context.device, _eager(context), _device_present(context)
        ),
        level=PassLevel.SUMMED,
        about="slice narrow values instead of the wide values that are computed from them row by row",
        needs=("annotate",),
        changes_numerics=True,
    ),
    Pass(
        "online_softmax",
        lambda joint, context: rewrite_online(
            joint,
            {name for region, _ in context.tiles for name in region.online},
            context.costs,
            context.device,
            _eager(context),
            _device_present(context),
        ),
        level=PassLevel.TILED,
        when=_in_tiles_of_classes,
        about="write cross entropies as sums over their classes",
        needs=("annotate", "mean_losses", "row_slices"),
        changes_numerics=True,
    ),
    Pass(
        "tiles",
        lambda joint, context: tile_regions(joint, context.tiles, body_costs(context)),
        level=PassLevel.TILED,
        about="turn regions of operations into loops over tiles of rows",
        needs=("annotate", "mean_losses", "row_slices", "online_softmax"),
        changes_numerics=True,
    ),
    Pass(
        "segments",
        lambda joint, context: _cut_segments(joint, context),
        level=PassLevel.ANNOTATED,
        about="cut the forward where few bytes are alive; backward nodes join their segment",
        needs=("annotate",),
    ),
    Pass(
        "stages",
        lambda joint, context: _stages_as_asked(joint, context),
        level=PassLevel.SEGMENTED,
        when=_stages,
        about="group consecutive segments into pipeline stages",
        needs=("segments",),
    ),
    Pass(
        "roundpipe_slots",
        lambda joint, context: _slots(joint, context),
        level=PassLevel.SEGMENTED,
        when=_roundpipe,
        about="cut forward and backward into slots independently of each other",
        needs=("segments",),
    ),
    Pass(
        "cse",
        lambda joint, _: eliminate_common_subexpressions(joint),
        level=PassLevel.STAGED,
        when=_everything_saved,
        about="replace values that equal an earlier one",
        needs=("annotate",),
    ),
    Pass(
        "apply_remat_schedule",
        lambda joint, context: _recompute(joint, context),
        level=PassLevel.PLANNED,
        when=_recomputed,
        about="insert the recomputation that the planner or a save policy decided",
        needs=("stages", "roundpipe_slots"),
    ),
    Pass(
        "statistics",
        lambda joint, context: decompose_into_statistics(joint, context.costs),
        level=PassLevel.PLANNED,
        when=_fused,
        about="write softmaxes and norms with the narrow values that they are computed from",
        needs=("apply_remat_schedule",),
    ),
    Pass(
        "fused_recompute",
        lambda joint, context: recompute_in_readers(joint, context.runs_programs, not context.fewest_stages),
        level=PassLevel.PLANNED,
        when=_fused,
        about="recompute values in the kernels that read them instead of saving them",
        needs=("apply_remat_schedule",),
    ),
    Pass(
        "early_recompute",
        lambda joint, _: early_recompute(joint),
        level=PassLevel.PLANNED,
        when=_early,
        about="run further operations of the backward before the incoming gradients arrive",
        needs=("apply_remat_schedule",),
    ),
    Pass(
        "split_backward",
        lambda joint, _: split_backward(joint),
        level=PassLevel.PLANNED,
        when=_split,
        about="move gradients of parameters into modules of their own",
        needs=("stages", "roundpipe_slots"),
    ),
    Pass(
        "rng",
        lambda joint, context: replay_rng(joint, context.costs),
        level=PassLevel.PLANNED,
        when=_training,
        about="replay recomputed random operations from their saved generator state",
        needs=("apply_remat_schedule",),
    ),
    Pass(
        "accumulate_gradients",
        lambda joint, context: accumulate_gradients(joint, context.costs, _eager(context)),
        level=PassLevel.PLANNED,
        when=_sums,
        about="add gradients to those of earlier microbatches where they are computed",
        needs=("stages", "roundpipe_slots"),
        changes_numerics=True,
    ),
    Pass(
        "dce",
        lambda joint, _: _drop_dead_code(joint),
        level=PassLevel.PLANNED,
        about="drop values without readers",
    ),
    Pass(
        "reinplace",
        lambda graph, _: reinplace(graph),
        level=PassLevel.STAGE_MODULE,
        when=_eager,
        about="write results over operands that are dead",
    ),
    Pass(
        "overlap_recompute",
        lambda graph, context: overlap_recompute(graph, context.overlapped),
        level=PassLevel.PROGRAM,
        when=_backward_program,
        about="fork and join streams where recomputation overlaps with a gradient",
    ),
    Pass(
        "host_copies",
        lambda graph, context: (copy_back if context.program == "backward" else copy_to_host)(
            graph, context.host_copies
        ),
        level=PassLevel.PROGRAM,
        when=_copied_to_host,
        about="copy offloaded values to the host in the forward, and back in the backward",
    ),
)


def _replays_random(options: Options) -> bool:
    return options.rotor is None or options.rotor.preserve_rng_state


def _cut_segments(joint: JointGraph, context: PassContext) -> JointGraph:
    required = [*_named_positions(joint, context.options), *region_bounds(joint)]
    joint, segments = cut_segments(
        joint, required, context.updates_whole, context.segment_starts, isinstance(context.compiler, Inductor)
    )
    return dataclasses.replace(joint, segments=tuple(segments))


def _named_positions(joint: JointGraph, options: Options) -> list[int]:
    if not isinstance(options.stages, tuple):
        return []
    return positions_of_names(joint, options.stages, module_path_text, options.following)


def _stages_as_asked(joint: JointGraph, context: PassContext) -> JointGraph:
    """Gather segments in the stages that the user asked for, or in those that are known."""
    if context.stage_starts is not None:
        return _with_cuts(stages_of_starts(joint, context.stage_starts, len(joint.segments)))
    if isinstance(context.options.stages, tuple):
        positions = _named_positions(joint, context.options)
        return _with_cuts(stages_at_positions(joint, joint.segments, positions))
    if context.fewest_stages and context.options.stages == "auto":
        return _with_cuts(cut_between_repeats(joint, joint.segments))
    return _with_cuts(cut_stages(joint, joint.segments, context.options.stages, context.costs.transfer_seconds))


def _slots(joint: JointGraph, context: PassContext) -> JointGraph:
    assert context.roundpipe_partition is not None
    return _with_cuts(cut_roundpipe_slots(joint, context.roundpipe_partition))


def _recompute(joint: JointGraph, context: PassContext) -> JointGraph:
    assert context.schedule is not None
    return apply_remat_schedule(joint, context.schedule, context.costs)


def body_costs(context: PassContext) -> BodyCosts:
    """Builder of the bodies of loops, and their costs."""
    return BodyCosts(
        model=context.costs,
        device=context.device,
        present=_device_present(context),
        granularity=allocation_granularity(context.device),
        eager=_eager(context),
        rewrite=reinplace if _eager(context) else lambda body: fuse_costs_of_body(body, context.costs),
    )


def _with_cuts(cut: tuple[JointGraph, Sequence[Any]]) -> JointGraph:
    joint, cuts = cut
    return dataclasses.replace(joint, cuts=tuple(cuts))


def _drop_dead_code(joint: JointGraph) -> JointGraph:
    joint.drop_unread()
    return joint


def _inductor_options(context: PassContext) -> dict[str, Any]:
    assert isinstance(context.compiler, Inductor)
    return dict(context.compiler.options)


def passes_table() -> str:
    """The list as a Markdown table."""
    rows = ["| | pass | works on | when | results | what it does |", "|---|---|---|---|---|---|"]
    for number, item in enumerate(_PASSES, 1):
        condition = (item.when.__doc__ or "").splitlines()[0]
        results = "rounded differently" if item.changes_numerics else "same bits"
        rows.append(f"| {number} | `{item.name}` | {item.level} | {condition} | {results} | {item.about} |")
    return "\n".join(rows) + "\n"
