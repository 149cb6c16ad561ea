"""Memory over a step: how many bytes are alive at each moment, and which values they are.

A moment is an operation of the emitted programs. The bytes of the moments are those that the simulator takes the peak
of (:mod:`roundpipe_fx.analysis.simulator`): on CUDA what the caching allocator counts, which is more than the sizes of
the values alive then.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from roundpipe_fx.analysis.caching_allocator import NO_HISTORY, CachingAllocator, History
from roundpipe_fx.analysis.liveness import find_lifetimes
from roundpipe_fx.analysis.program_events import CALLER, Course
from roundpipe_fx.analysis.simulator import levels_of_course
from roundpipe_fx.ir.joint_graph import Mark, module_path, tensor_values
from roundpipe_fx.ir.source import find_line, find_source
from roundpipe_fx.torch_private import module_path_text

_INCOMING = "incoming gradient"


class Moment(NamedTuple):
    """An operation that runs.

    Attributes:
        call: the stage module that it runs in, or ``the caller``, who computes a loss outside.
        value: name in the emitted code of what it computes.
        module: path of the user's module that it belongs to.
        line: file and line of the user's program, as ``model.py:12``; empty if unknown.
        bytes: bytes allocated while it runs, beyond those that were when the step began.
        workspace: those of its kernel, which are freed when it is over.
    """

    call: str
    value: str
    module: str
    line: str
    bytes: int
    workspace: int


class Lifetime(NamedTuple):
    """A value that is alive for some moments.

    Attributes:
        name: name in the emitted code.
        origin: the value that it recomputes; ``name`` itself if it is computed for the first time.
        module: path of the user's module that computes it.
        line: file and line of the user's program that computes it; empty if unknown.
        bytes: bytes of its storage.
        first: index of the first moment at which it is alive.
        last: index of the last one.
        gradient: whether it is a gradient that the backward returns, of a parameter or an input.
    """

    name: str
    origin: str
    module: str
    line: str
    bytes: int
    first: int
    last: int
    gradient: bool


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """Memory over a step.

    Attributes:
        moments: the operations in order.
        values: what is alive, in the order of allocation.
        forward: number of moments of the forward.
        source: the user's lines, by file and line as in ``line``.
    """

    moments: tuple[Moment, ...]
    values: tuple[Lifetime, ...]
    forward: int
    source: dict[str, str]


def memory_timeline(
    course: Course,
    own_nodes: Mapping[str, Mapping[str, fx.Node]],
    allocator: CachingAllocator | None = None,
    owners: Collection[int] = (),
    history: History = NO_HISTORY,
) -> MemoryTimeline:
    """Memory over the step that a peak was predicted for.

    Args:
        own_nodes: by name of a stage module and of its node, the node of the joint graph that it stands for.
        allocator: a new simulated allocator, if the device has a caching one.
        owners: positions of the inputs that get gradients, which were allocated before the other inputs.
        history: what the allocator has besides.
    """
    run = course.run
    levels = levels_of_course(course, allocator, owners, history)
    source: dict[str, str] = {}
    makers: dict[int, fx.Node | str] = {}
    moments = []
    for event, level in zip(run.events, levels, strict=True):
        call, node = event.description
        name, module, line = "loss" if call == CALLER else "", "", ""
        # An event of compiled code has no node: names come from what it makes.
        if node is None:
            for storage in event.makes:
                result = run.makers[storage]
                makers[storage] = (
                    f"buffer of {result}" if isinstance(result, str) else own_nodes.get(call, {})[result.name]
                )
        else:
            # Names of the user's graph where they are known, else of the emitted module.
            node = own_nodes.get(call, {}).get(node.name, node)
            makers.update(dict.fromkeys(event.makes, node) | _items(node, event.makes))
            name = node.name
            module, line = _origin(node, source)
        moments.append(Moment(call=call, value=name, module=module, line=line, bytes=level, workspace=event.workspace))
    gradients = set().union(*course.gradients)
    values = []
    # Storages of size 0 (a view's own, an empty tensor) are never alive.
    for storage, (first, last) in find_lifetimes(run.events, course.lasting, course.arriving).items():
        size, maker = run.numbers.sizes[storage], makers.get(storage)
        if not size:
            continue
        name = origin = _INCOMING
        module = line = ""
        if isinstance(maker, str):
            name = origin = maker
        elif maker is not None:
            name, origin = maker.name, str(maker.meta.get(Mark.ORIGIN, maker.name))
            module, line = _origin(maker, source)
        values.append(
            Lifetime(
                name=name,
                origin=origin,
                module=module,
                line=line,
                bytes=size,
                first=first,
                last=last,
                gradient=maker is not None and storage in gradients,
            )
        )
    return MemoryTimeline(moments=tuple(moments), values=tuple(values), forward=course.ends, source=source)


def _items(node: fx.Node, result_storages: Sequence[int]) -> dict[int, fx.Node]:
    """The items of an operator with several results, by the storages that it makes for them."""
    results = node.meta.get("val")
    # Without one storage for each result it cannot be said which item is which.
    if not isinstance(results, (tuple, list)) or len(tensor_values(node)) != len(result_storages):
        return {}
    tensors = [position for position, result in enumerate(results) if isinstance(result, torch.Tensor)]
    storage_at = dict(zip(tensors, result_storages, strict=False))
    items: list[tuple[fx.Node, Any]] = [(user, user.args[1]) for user in node.users if user.target is operator.getitem]
    return {storage_at[position]: user for user, position in items if position in storage_at}


def _origin(node: fx.Node, source: dict[str, str]) -> tuple[str, str]:
    """Module and line of a node; ``source`` gets the text of the line."""
    line = find_line(node)
    if line and line not in source:
        source[line] = (*find_source(node).splitlines(), "")[1].strip()
    return module_path(node, module_path_text), line
