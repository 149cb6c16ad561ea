"""Compiled memory: allocations and frees of stage modules that Inductor compiles.

Read off the code that Inductor writes for a stage module, before its kernels are compiled. That takes as long as
Inductor takes to write it, so what was read is kept on disk::

    stage module ── Inductor writes code ──▶ code ── run on fake tensors, with kernels ──▶ allocations and frees
                                                     that do nothing (wrapper_memory)
    the key        the stage's fingerprint, donated inputs, inputs that share storages, sizes, workspaces of operators,
                   the user's options of Inductor, settings that kernels depend on
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.caching_allocator import make_allocator
from roundpipe_fx.analysis.cost.operand_rules import may_run_alone
from roundpipe_fx.analysis.cost.probe import kernel_settings, probe_in_thread
from roundpipe_fx.analysis.cost.signature import signature_of
from roundpipe_fx.analysis.data_files import cache_folder, drop_oldest, is_on, read_data, versions, write_data
from roundpipe_fx.analysis.liveness import Event, find_peak
from roundpipe_fx.analysis.program_events import FollowedModule, FollowedOperation
from roundpipe_fx.analysis.simulator import allocation_granularity
from roundpipe_fx.analysis.storage_ids import OUTSIDE
from roundpipe_fx.analysis.wrapper_memory import Layout, follow_wrapper
from roundpipe_fx.codegen import StageModule
from roundpipe_fx.ir.collectives import starts_collective
from roundpipe_fx.ir.joint_graph import Mark, Phase, tensor_values
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.runtime.compiled_loops import Boxed, opaque_loops
from roundpipe_fx.runtime.compiled_sums import make_sums_functional
from roundpipe_fx.runtime.donated_inputs import find_donatable
from roundpipe_fx.runtime.loss_gradients import DECOMPOSITIONS
from roundpipe_fx.runtime.recorded_order import InRecordedOrder
from roundpipe_fx.runtime.stage_compiler import find_computed_inputs, unbox
from roundpipe_fx.torch_private import inductor_code, size_hint

log = logging.getLogger(__name__)

_FORMAT = "roundpipe_fx compiled memory 3"
_LOOP = "roundpipe_fx::tile_loop"
"""The name of the operator that stands for a tile loop in compiled code."""
_MOST_FILES = 4000
_MOST_KNOWN = 4000
_known: dict[str, FollowedModule | None] = {}


def follow_compiled(
    call: StageModule,
    storages: Sequence[Sequence[int]],
    dying: Collection[int] = (),
    beyond: int = 0,
    options: Sequence[tuple[str, Any]] = (),
) -> FollowedModule | None:
    """Follow the code that Inductor writes for a stage module.

    Args:
        storages: for each input, its storages, numbered in the order in which they come in.
        dying: positions of inputs that nothing refers to but the call.
        beyond: bytes that compiled stages have been seen to hold beyond what is known of them, counted in workspaces.
        options: of Inductor's, that the user has chosen.

    Returns:
        what the code allocates and frees; ``None``: that cannot be read, and the reason is logged.
    """
    nodes = [*call.module.graph.nodes]
    if any(starts_collective(node.target) for node in nodes):  # compiled in parts
        return None
    values = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    # An input of several storages (a tuple) is no single argument of Inductor's code.
    if any(
        isinstance(value, torch.Tensor) and len(leaves) != 1 for value, leaves in zip(values, storages, strict=True)
    ):
        return None
    donated: list[int] = []
    # As `compile_stage` decides: the code that is followed must be the code that runs.
    if dying and call.phase is not Phase.FORWARD:
        donated = [
            position for position in find_donatable(call.module, find_computed_inputs(call)) if position in dying
        ]
    inputs = list(map(_replace_symbols, values))
    workspaces = _list_workspaces(call.module, beyond)
    # Everything that the code depends on: a fingerprint of the graph alone would mix what differs in donated inputs.
    depends_on = (
        call.fingerprint,
        donated,
        [[*s] for s in storages],
        inputs,
        sorted(workspaces.items()),
        options,
        kernel_settings(),
    )
    key = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:32]
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        # On disk, from an earlier process; else Inductor writes the code now, without compiling its kernels.
        _known[key] = _read(key)
        if _known[key] is None:
            _known[key] = _follow_call(call, storages, donated, inputs, workspaces, options)
            _write(key, _known[key])
    followed = _known[key]
    if followed is None or not beyond:
        return followed
    # Added after reading: what is kept on disk does not depend on it.
    operations = [operation._replace(workspace=operation.workspace + beyond) for operation in followed.operations]
    return followed._replace(operations=operations)


def _follow_call(
    call: StageModule,
    storages: Sequence[Sequence[int]],
    donated: Sequence[int],
    inputs: Sequence[Any],
    workspaces: Mapping[str, int],
    options: Sequence[tuple[str, Any]],
) -> FollowedModule | None:
    examples = [node.meta["val"] for node in call.module.graph.find_nodes(op="placeholder")]
    module = make_sums_functional(unbox(call.module))
    try:
        loops = _follow_loops(module, options)
        run = InRecordedOrder(module).run
        code = inductor_code(module, run, examples, DECOMPOSITIONS, donated, dict(options))
        measures = {**_measures(workspaces), _LOOP: lambda call: loops[call.args[1]][1]}
        return follow_wrapper(code, inputs, measures, storages)
    except Exception as error:  # of code that reads numbers, or has constants
        log.warning(
            "the memory of %s cannot be read from Inductor's code: %s: %s", call.name, type(error).__name__, error
        )
        return None


def _follow_loops(module: fx.GraphModule, options: Sequence[tuple[str, Any]]) -> dict[int, tuple[TileLoop, int]]:
    """Replace a module's loops by calls of an operator, and follow the code of their bodies. Rewrites the module.

    Returns:
        by the number that it is called with, each loop, which the caller keeps as long as fake ones are called, and the
        bytes that it allocates beside its results.
    """
    peaks: list[int] = []

    def follow(body: fx.GraphModule) -> Boxed:
        peaks.append(_find_peak_of_body(body, options))
        return _raise_if_called

    loops = opaque_loops(module, follow)
    operator = torch.ops.roundpipe_fx.tile_loop.default
    numbers = sorted({node.args[1] for node in module.graph.nodes if node.target is operator})
    of_bodies = iter(peaks)
    return {
        number: (loop, loop.workspace(max(next(of_bodies) for _ in loop.bodies)))
        for number, loop in zip(numbers, loops, strict=True)
    }


def _find_peak_of_body(body: fx.GraphModule, options: Sequence[tuple[str, Any]]) -> int:
    """Find the bytes that a loop's compiled body holds at most beside its operands."""
    examples = [node.meta["val"] for node in body.graph.find_nodes(op="placeholder")]
    module = make_sums_functional(unbox(body))
    code = inductor_code(module, InRecordedOrder(module).run, examples, DECOMPOSITIONS, (), dict(options))
    inputs = list(map(_replace_symbols, examples))
    followed = follow_wrapper(code, inputs, _measures(_list_workspaces(body)), [[OUTSIDE]] * len(inputs))
    events = [Event(None, of.reads, of.makes, workspace=of.workspace) for of in followed.operations]
    returned = {storage for storages in followed.returns for storage in storages} - {OUTSIDE}
    device = next(value.device for value in inputs if isinstance(value, Layout))
    granularity = allocation_granularity(device)
    sizes = [-(-size // granularity) * granularity for size in followed.sizes]
    return find_peak(events, sizes, lasting=returned, allocator=make_allocator(device)).bytes


def _list_workspaces(module: fx.GraphModule, beyond: int = 0) -> dict[str, int]:
    """Workspaces of a graph's calls, by signature, and the most of an operator's calls, by its name.

    Args:
        beyond: bytes to be left out.
    """
    workspaces: dict[str, int] = {}
    for node in module.graph.nodes:
        size = node.meta.get(Mark.WORKSPACE, 0) - beyond
        name = _operator_name(node)
        if name and size > 0:
            # By name and operands, and by name alone, for a call that cannot be measured with other operands.
            for key in (name, signature_of(node)):
                workspaces[key] = max(workspaces.get(key, 0), size)
    return workspaces


def _measures(workspaces: Mapping[str, int]) -> dict[str, Callable[[fx.Node], int]]:
    return dict.fromkeys(workspaces, functools.partial(_workspace_of_call, workspaces))


def _workspace_of_call(workspaces: Mapping[str, int], call: fx.Node) -> int:
    """Bytes that a call in Inductor's code allocates beside its results.

    Inductor may lay out operands otherwise than the graph: convolutions read channels last, and reorder less. Such
    calls are measured anew.

    Args:
        workspaces: bytes of the graph's calls, by signature; the most of an operator's calls, by its name.
        call: the call, as a node with the operands of the code.
    """
    signature = signature_of(call)
    if signature in workspaces:
        return workspaces[signature]
    probe = None
    if isinstance(call.target, torch._ops.OpOverload) and may_run_alone(call):
        devices = {value.device for operand in call.all_input_nodes for value in tensor_values(operand)}
        probe = probe_in_thread(call, devices.pop()) if len(devices) == 1 else None
    return workspaces[_operator_name(call)] if probe is None else probe.workspace


def _raise_if_called(arguments: list[Any]) -> tuple[Any, ...]:
    raise AssertionError("a loop's body, where only code is written")


def _operator_name(node: fx.Node) -> str:
    """The name of the operator that compiled code calls."""
    if isinstance(node.target, TileLoop):
        return _LOOP
    return node.target.name() if isinstance(node.target, torch._ops.OperatorBase) else ""


def _replace_symbols(value: Any) -> Layout | Any:
    """An input of the numbers that a plan is made for."""
    if isinstance(value, torch.Tensor):
        shape, stride = (tuple(map(size_hint, sizes)) for sizes in (value.shape, value.stride()))
        return Layout(shape, stride, value.dtype, value.device)
    return size_hint(value) if isinstance(value, (int, torch.SymInt)) else value


def _read(key: str) -> FollowedModule | None:
    if not is_on():
        return None
    try:
        operations, sizes, returns = read_data(_path(key), {"format": _FORMAT, **versions()})
    except (OSError, ValueError, TypeError):
        return None
    return FollowedModule([FollowedOperation(*operation) for operation in operations], sizes, returns)


def _write(key: str, followed: FollowedModule | None) -> None:
    if followed is None or not is_on() or _path(key).exists():
        return
    try:
        write_data(_path(key), {"format": _FORMAT, **versions()}, followed)
        drop_oldest(_path(key).parent, _MOST_FILES)
    except OSError as error:
        log.warning("the memory read from Inductor's code is not stored: %s", error)


def _path(key: str) -> Any:
    return cache_folder() / "compiled_memory" / f"{key}.json"
