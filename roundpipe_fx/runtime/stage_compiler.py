"""Stage compilers: make stage modules callable.

Modules that do the same work on the same shapes are compiled once. Code that Inductor writes depends on more than the
graph: on inputs that arrive expanded, and on inputs that die in the call, whose memory it may write over. So there may
be several pieces of code for a module, each compiled when a call first needs it::

    a call ──▶ compile_by_arrival      one piece of code for each set of inputs that arrive expanded
               compile_by_donation     one for each set of inputs that nothing else refers to
               start_from_zeros        sums that do not exist yet begin as zeros
               compiled code, in which a tile loop is one opaque operator

An eager stage needs none of these: its operators take what they get.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import fx

from roundpipe_fx import torch_private
from roundpipe_fx.codegen import StageModule
from roundpipe_fx.console.progress import progress
from roundpipe_fx.frontend.opaque_backward import calls_in
from roundpipe_fx.ir.joint_graph import Phase
from roundpipe_fx.ir.options import Inductor, StageCompiler
from roundpipe_fx.runtime.compiled_loops import Boxed, opaque_loops
from roundpipe_fx.runtime.compiled_sums import make_sums_functional, start_from_zeros
from roundpipe_fx.runtime.donated_inputs import compile_by_donation, find_donatable
from roundpipe_fx.runtime.eager_stage import eager_stage
from roundpipe_fx.runtime.expanded_inputs import compile_by_arrival
from roundpipe_fx.runtime.loss_gradients import DECOMPOSITIONS
from roundpipe_fx.runtime.observers import profile_operators
from roundpipe_fx.runtime.recorded_order import InRecordedOrder

__all__ = ["COMPILING", "Boxed", "compile_stage", "compile_stages", "find_computed_inputs", "unbox"]

COMPILING = torch_private.ForkedLock()
"""Held by a worker that compiles within a step: all share the fake tensors of a graph, whose state is of one thread."""


def compile_stages(
    modules: Iterable[StageModule],
    compiler: StageCompiler,
    cache: dict[str, Boxed],
    see_workspace: Callable[[str, int], None] | None = None,
    in_order: bool = False,
    failed: Callable[[], None] | None = None,
) -> dict[str, Boxed]:
    """Make every stage module callable.

    Args:
        cache: callables compiled before, by fingerprint; extended.
        see_workspace: called with name and bytes each time that an operator runs whose workspace depends on data. Only
            for ``"eager"``.
        in_order: whether the calls run one after the other on the device, so that one may write over what dies in it.
        failed: called when Inductor cannot compile a module, which then runs eagerly.

    Returns:
        the callables by module name.
    """
    ready = {}
    for module in progress([*modules], "compiling stages"):
        donated: Sequence[int] = ()
        # In a program that runs in order nothing else reads what dies in a module, so its kernels may overwrite it.
        if in_order and isinstance(compiler, Inductor) and module.phase is not Phase.FORWARD:
            donated = find_donatable(module.module, find_computed_inputs(module))
        # One graph compiled with and without donated inputs is two pieces of code.
        key = f"{module.fingerprint} {donated}" if donated else module.fingerprint
        if key not in cache:
            graph_module = module.module
            if compiler == "eager" and see_workspace is not None:
                graph_module = profile_operators(graph_module, see_workspace)
            cache[key] = compile_stage(graph_module, compiler, donated, failed)
        ready[module.name] = cache[key]
    return ready


def find_computed_inputs(module: StageModule) -> list[int]:
    """Positions of the inputs that other stage modules compute."""
    return [position for position, node in enumerate(module.inputs) if node.op != "placeholder"]


def compile_stage(
    graph_module: fx.GraphModule,
    compiler: StageCompiler,
    donated: Sequence[int] = (),
    failed: Callable[[], None] | None = None,
) -> Boxed:
    """Make one stage module callable. The result keeps the opaque calls of its graph alive.

    Args:
        donated: positions of inputs that Inductor's code may write over, if nothing else refers to them in a call.
        failed: called when Inductor cannot compile it; it runs eagerly then, with a warning.
    """

    def compiled(module: fx.GraphModule) -> Boxed:
        if not donated:
            return _compile_module(module, compiler, failed)
        return compile_by_donation(donated, lambda dying: _compile_module(module, compiler, failed, dying), COMPILING)

    function = (
        _compile_module(graph_module, compiler, failed)
        # In eager mode there is nothing to specialize; compiled code depends on which inputs arrive expanded.
        if compiler == "eager"
        else compile_by_arrival(graph_module, compiled, COMPILING)
    )
    return _keep_alive(function, calls_in(graph_module.graph))


def _keep_alive(function: Boxed, held: Any) -> Boxed:
    """The same function, which keeps what its code calls alive."""
    if not held:
        return function

    def call(arguments: list[Any], _held: Any = held) -> tuple[Any, ...]:
        return function(arguments)

    return call


def _compile_module(
    graph_module: fx.GraphModule,
    compiler: StageCompiler,
    failed: Callable[[], None] | None = None,
    donated: Collection[int] = (),
) -> Boxed:
    if compiler == "eager":
        return eager_stage(graph_module)
    examples = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    module = make_sums_functional(unbox(graph_module))
    loops = opaque_loops(module, lambda body: _compile_module(body, compiler, failed))
    if isinstance(compiler, Inductor):
        try:
            # A stage that Inductor cannot compile runs eagerly: a slower step is better than none.
            run = InRecordedOrder(module).run
            code = torch_private.inductor(module, run, examples, DECOMPOSITIONS, donated, dict(compiler.options))
        except torch_private.InductorError as error:
            _warn_of_failure(graph_module, error)
            if failed is not None:
                failed()
            return eager_stage(graph_module)
        function = start_from_zeros(graph_module, _box(code))
    else:
        assert callable(compiler)
        function = start_from_zeros(graph_module, _box(compiler(module, examples)))
    return _keep_alive(function, loops)


def _warn_of_failure(module: fx.GraphModule, error: Exception) -> None:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    warnings.warn(
        f"roundpipe_fx: Inductor could not compile {module._get_name()}, which runs eagerly instead: "
        f"{type(error).__name__}: {lines[0]} A plan that was made for compiled stages may not hold; the next one of a "
        "model on one device is made for eager stages, as stage_compiler='eager' does from the start.",
        RuntimeWarning,
        stacklevel=2,
    )


def unbox(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with ordinary positional arguments, as compilers expect it."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch_private.graph_module(module, graph, module._get_name())


def _box(function: Callable[..., Any]) -> Boxed:
    """Box what a compiler returned. A function that is boxed already (``_boxed_call``) is returned as it is."""
    if getattr(function, "_boxed_call", False):
        # Inductor's functions empty the list of arguments themselves, so that inputs die while they run. Others are
        # called as usual, and the list is emptied first for the same reason.
        return function

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        values = list(arguments)
        arguments.clear()
        return tuple(function(*values))

    return call
