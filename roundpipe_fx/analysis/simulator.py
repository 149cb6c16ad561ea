"""The simulator: peak bytes of emitted programs, by liveness analysis of storages.

It follows the forward and the backward program call by call and, inside each call, operation by operation, as the
generated code runs them: a value is freed at its last use, an in-place operation allocates nothing, a view keeps its
base alive. Counted is what the step allocates beyond what was allocated when it began: saved values, temporaries, new
gradients, the forward's outputs and incoming gradients, which the caller may hold until the backward is over, and
workspaces of kernels (:mod:`roundpipe_fx.analysis.cost.workspace`). New values of updated inputs (running statistics)
are freed when the forward is over and the caller has copied them. Parameters and the user's inputs do not count. On
CUDA the caching allocator is simulated (:mod:`roundpipe_fx.analysis.caching_allocator`).

Stages that Inductor compiles are followed by the code that it writes, where that was asked for
(:mod:`roundpipe_fx.analysis.wrapper_memory`); otherwise fusion is not modelled. Data-dependent sizes count with the
values assumed for them (:func:`roundpipe_fx.torch_private.size_hint`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import fx

from roundpipe_fx.analysis.caching_allocator import NO_HISTORY, ROUNDED_TO, CachingAllocator, History
from roundpipe_fx.analysis.cost import tensor_bytes
from roundpipe_fx.analysis.liveness import find_peak, levels_of
from roundpipe_fx.analysis.program_events import CALLER, Course
from roundpipe_fx.analysis.step_of_calls import Footprint, compute_footprint
from roundpipe_fx.ir.decisions import LiveValue, PeakMoment
from roundpipe_fx.ir.joint_graph import module_path, tensor_values
from roundpipe_fx.ir.source import find_line
from roundpipe_fx.torch_private import module_path_text

_FIRST_INPUT = -3
"""This and lower numbers stand for the inputs of the forward, for an allocator."""


def allocation_granularity(device: torch.device) -> int:
    """Bytes that a device's allocator rounds sizes up to: 512 for CUDA's caching allocator, 1 on the CPU."""
    return ROUNDED_TO if device.type == "cuda" else 1


def find_worst_history(course: Course, histories: Sequence[History], owners: Collection[int] = ()) -> History:
    """Find the first history after which a step's peak is highest. Other arguments as for :func:`find_course_peak`."""
    # A step may begin after several different histories of the allocator; the plan is judged by the worst.
    peaks = [max(levels_of_course(course, CachingAllocator(), owners, history), default=0) for history in histories]
    return histories[peaks.index(max(peaks))]


def find_course_peak(
    course: Course,
    allocator: CachingAllocator | None = None,
    owners: Collection[int] = (),
    history: History = NO_HISTORY,
) -> PeakMoment:
    """Find the peak of a step.

    Args:
        allocator: a new simulated allocator, if the device has a caching one. The peak is then the higher one of a
            first step and a later one, which finds the blocks that the first has left.
        owners: positions of the inputs that get gradients, which were allocated before the other inputs.
        history: what the allocator has besides, for the first step.

    Returns:
        the peak, with what is alive then.
    """
    run, lasting, arriving = course.run, course.lasting, course.arriving
    # The caching allocator starts with the blocks that earlier calls and the inputs have left.
    if allocator is not None:
        _begin(course, allocator, owners, history)
    peak = find_peak(run.events, run.numbers.sizes, (), lasting, arriving, True, allocator)
    # Simulated twice: the second step finds the blocks that the first one has left, and the larger peak counts.
    if allocator is not None:
        # Gradients and outputs are given back between the steps, as ``zero_grad()`` and the caller do.
        for storage in lasting:
            allocator.free(storage)
        later = find_peak(run.events, run.numbers.sizes, (), lasting, arriving, True, allocator)
        peak = max(peak, later, key=lambda peak: peak.bytes)
    call, node = run.events[peak.position].description if peak.position >= 0 else ("", None)
    gradients = set().union(*course.gradients)
    saved = set().union(*course.results[course.forward.outputs :])
    live = [_live(run.makers.get(storage), size, storage in gradients, storage in saved) for storage, size in peak.live]
    name, module = (node.name, module_path(node, module_path_text)) if node is not None else ("", "")
    line = find_line(node) if node is not None else ""
    workspace = run.events[peak.position].workspace if peak.position >= 0 else 0
    # The peak is outside of the graphs, in the loss.
    if call == CALLER and workspace:
        name = "loss"
        live = sorted(
            [*live, LiveValue(name="loss outside", module="", bytes=workspace)], key=lambda value: -value.bytes
        )
    elif workspace:
        temporary = LiveValue(name=f"workspace of {name or call}", module=module, bytes=workspace)
        live = sorted([*live, temporary], key=lambda value: -value.bytes)
    return PeakMoment(bytes=peak.bytes, call=call, value=name, module=module, live=tuple(live), line=line)


def levels_of_course(
    course: Course,
    allocator: CachingAllocator | None = None,
    owners: Collection[int] = (),
    history: History = NO_HISTORY,
) -> list[int]:
    """For each event of a step the bytes allocated while it runs: in the step that :func:`find_course_peak` is the peak
    of. Arguments as there.
    """
    run = course.run
    if allocator is not None:
        _begin(course, allocator, owners, history)

    def levels() -> list[int]:
        run_levels = levels_of(run.events, run.numbers.sizes, course.lasting, course.arriving, allocator)
        return [during for during, _ in run_levels]

    first = levels()
    if allocator is None:
        return first
    for storage in course.lasting:
        allocator.free(storage)
    return max(first, levels(), key=lambda step_levels: max(step_levels, default=0))


def _begin(course: Course, allocator: CachingAllocator, owners: Collection[int], history: History) -> None:
    inputs = course.forward.inputs
    # Inputs occupy blocks of the pools too, and split them.
    for index in () if history.has_inputs else dict.fromkeys((*owners, *range(len(inputs)))):
        allocator.allocate(_FIRST_INPUT - index, tensor_bytes(tensor_values(inputs[index])))
    allocator.add(history.segments)


def compute_course_footprint(course: Course, owners: Sequence[int | None] = (), beyond: int = 0) -> Footprint:
    """Compute the footprint of one call of a graph.

    Args:
        course: course of its programs.
        owners: for each result of the backward, the number of the input that it is the gradient of.
        beyond: bytes that the device's allocator counts in addition to those simulated here.
    """
    gradients: Counter[int] = Counter()
    for owner, node in zip(owners, course.backward.results if course.backward is not None else (), strict=False):
        if isinstance(node, fx.Node) and owner is not None:
            gradients[owner] += tensor_bytes(tensor_values(node))
    sizes, events = course.run.numbers.sizes, course.run.events
    return compute_footprint(
        events, course.ends, sizes, course.lasting, course.arriving, course.outputs, dict(gradients), beyond
    )


def _live(maker: fx.Node | str | None, size: int, gradient: bool, saved: bool) -> LiveValue:
    if maker is None:
        return LiveValue(name="incoming gradient", module="", bytes=size)
    if isinstance(maker, str):
        return LiveValue(name=f"buffer of {maker}", module="", bytes=size, saved=saved)
    module = module_path(maker, module_path_text)
    return LiveValue(
        name=maker.name,
        module=module,
        bytes=size,
        gradient=gradient,
        line="" if module else find_line(maker),
        saved=saved,
    )
