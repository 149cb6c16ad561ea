"""The ``torch.compile`` backend: ``torch.compile(model, backend="roundpipe_fx", options={...})``.

Dynamo keeps everything that it has compiled for models of a class for the life of the process, and stops compiling that
class at a limit. So what was compiled for a model with a backend of its own is dropped with the model.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

from torch import fx, nn

from roundpipe_fx import torch_private
from roundpipe_fx.analysis.host_sync import registered_sync_ops
from roundpipe_fx.api.compilation import compile_graph
from roundpipe_fx.api.learned import Learned
from roundpipe_fx.api.plans_of_modules import add_plan, note_plan, wrap_to_note_models
from roundpipe_fx.api.wrapper_memory import WrapperMemory, compile_within_remaining_budget, wrapper_memory_of
from roundpipe_fx.budget import parse_budget
from roundpipe_fx.compiler.run_passes import edit_passes
from roundpipe_fx.frontend.graph_breaks import around_compilations
from roundpipe_fx.ir.joint_graph import module_paths
from roundpipe_fx.ir.options import NO_CUDA_GRAPHS, Options
from roundpipe_fx.pipeline.settings import Pipelining, StepCompileState
from roundpipe_fx.remat.learned_steps import LearnedSteps
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.torch_private import CompiledFrame, UserLine

Backend = Callable[..., Callable[..., Any]]


def make_backend(
    options: Options,
    on_plan: Callable[[Plan], None],
    learned: Learned | None = None,
    pipelining: Pipelining | None = None,
    compile_state: StepCompileState | None = None,
    wrapper_memory: Callable[[], WrapperMemory] = WrapperMemory,
) -> Backend:
    """Make a Dynamo backend with its options bound.

    Args:
        on_plan: called with each plan that is made.
        learned: what plans assume about run time; steps extend it.
        pipelining: how microbatches are pipelined; ``None``: they are not.
        compile_state: how the first graph of the current step was cut.
        wrapper_memory: what others allocate beside graphs, asked when one is compiled.
    """
    torch_private.enter_around_compilations(_warn_of_others)
    warned: set[UserLine] = set()
    learned = learned or Learned()

    def roundpipe_fx(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def compile_within(options: Options, on_plan: Callable[[Plan], None]) -> Callable[..., Any]:
            syncs = registered_sync_ops()
            return compile_graph(
                module, example_inputs, options, syncs, on_plan, warned, learned, pipelining, compile_state
            )

        watched = wrapper_memory()
        steps = learned.steps
        steps.parts, steps.gathered_bytes, steps.budget = watched.parts, watched.gathered, options.memory_budget
        return compile_within_remaining_budget(watched, options, on_plan, compile_within)

    settings = warned, options.memory_budget, learned.steps.runs_eagerly, pipelining is not None
    roundpipe_fx.around_compilations = lambda frame: _around(frame, *settings)  # type: ignore[attr-defined]
    return roundpipe_fx


@contextlib.contextmanager
def _around(*settings: Any) -> Iterator[None]:
    """Context in which Dynamo compiles a frame; arguments of :func:`around_compilations`."""
    with around_compilations(*settings):
        yield


_warned: set[UserLine] = set()


def _no_mode(mode: str) -> str:
    """The refusal of a mode of ``torch.compile``."""
    text = f"mode={mode!r} is for Inductor alone"
    if mode == "reduce-overhead":
        return f"{text}: {NO_CUDA_GRAPHS}"
    return f"{text}. Its settings for stages: options={{'inductor_options': {{'max_autotune': True}}}}."


def _backend_by_name(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend that PyTorch finds by the name ``"roundpipe_fx"``.

    :func:`roundpipe_fx.plans` gives the plans of the model; they are logged at level INFO by the logger
    ``roundpipe_fx.planner.lower``.

    Args:
        mode: of Inductor's; all but ``None`` are refused.

    Raises:
        ValueError: an unknown option or value, a mode, or a list of passes that cannot be run.
        TypeError: a value of a wrong type.
    """
    if mode is not None:
        raise torch_private.passed_through(ValueError(_no_mode(mode)))
    try:
        parsed = Options.parse(options or {})
    except (TypeError, ValueError) as error:
        raise torch_private.passed_through(error) from None
    edit_passes(parsed.passes)  # an invalid list raises before anything is traced
    learned = _learned_of(options or {})
    modules = torch_private.modules_being_compiled()
    learned.memory.models.update(modules)
    _refuse_inlined(module, modules)

    def compile_within(options: Options, on_plan: Callable[[Plan], None]) -> Callable[..., Any]:
        return compile_graph(module, example_inputs, options, registered_sync_ops(), on_plan, _warned, learned)

    references = [weakref.ref(module) for module in modules]  # what Dynamo keeps must not keep the model
    plans: list[Plan] = []

    def on_plan(plan: Plan) -> None:
        add_plan(plans, plan)
        note_plan((module for reference in references if (module := reference()) is not None), plan)

    run = compile_within_remaining_budget(wrapper_memory_of(modules), parsed, on_plan, compile_within)
    return wrap_to_note_models(run, modules, plans)


def _refuse_inlined(module: fx.GraphModule, roots: Sequence[nn.Module]) -> None:
    """Raise if a graph holds a part of the model that was compiled in place, whose options Dynamo has dropped.

    Raises:
        TypeError: it does.
    """
    compiled = {
        name
        for root in roots
        for name, part in root.named_modules()
        if part is not root and part._compiled_call_impl is not None
    }
    if not compiled:
        return
    traced = {path for node in module.graph.nodes for path in module_paths(node, torch_private.module_path_text)}
    for name in sorted(compiled & traced):
        error = TypeError(
            f"{name!r}, a part of the model, is compiled in place, and its backend and options would be dropped: the "
            "model around it is compiled as one. Compile the model with all options and leave its parts as they are, "
            "or compile only the parts."
        )
        raise torch_private.passed_through(error)


_warned_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _warn_of_others(code: CodeType, roots: Sequence[nn.Module]) -> None:
    """Warn if another backend has compiled a module that contains one compiled in place with ours."""
    for root in roots:
        for name, part in root.named_modules():
            if (
                part._compiled_call_impl is None
                or part in _warned_models
                or not torch_private.compiled_in_place_by_us(part)
            ):
                continue
            _warned_models.add(part)
            subject = f"{name!r}, a part of the model," if name else "the model"
            warnings.warn_explicit(
                f"roundpipe_fx: {subject} is compiled in place with the backend roundpipe_fx, and now another "
                "torch.compile, with another backend, compiles code around it. Where that traces it, PyTorch drops the "
                "backend and options of the part: no plan and no memory_budget apply. Compile only the part, or use "
                "roundpipe_fx.compile for the part, which then stays compiled as it was.",
                UserWarning,
                code.co_filename,
                code.co_firstlineno,
            )


_MOST = 64
_shared: dict[int, tuple[Mapping[str, Any], Learned]] = {}


def _learned_of(options: Mapping[str, Any]) -> Learned:
    """One backend for all graphs of a ``torch.compile``, which passes the same options object for each.

    There is no replanning there, but a warning says if the graphs of a step hold more than the budget together.
    """
    if id(options) not in _shared:
        while len(_shared) >= _MOST:
            del _shared[next(iter(_shared))]
        _shared[id(options)] = options, Learned(steps=LearnedSteps(replans=False))
    return _shared[id(options)][1]


def _around_by_name(frame: CompiledFrame) -> AbstractContextManager[None]:
    """As :func:`_around`, for the backend that PyTorch finds by its name."""
    budget = None
    with contextlib.suppress(TypeError, ValueError):  # which the backend raises
        budget = parse_budget(frame.options.get("memory_budget"))
    return _around(frame, _warned, budget)


_backend_by_name.__name__ = "roundpipe_fx"  # in Dynamo's messages
_backend_by_name.around_compilations = _around_by_name  # type: ignore[attr-defined]


def __getattr__(name: str) -> Backend:
    """``roundpipe_fx_backend``, which PyTorch looks up when it is first asked for the backend by its name."""
    if name != "roundpipe_fx_backend":
        raise AttributeError(name)
    torch_private.enter_around_compilations(_warn_of_others)
    return _backend_by_name


Unused = weakref.finalize
"""When called, it notes that nothing uses a backend any more; further calls do nothing."""

_unused: list[Backend] = []
"""Garbage collection may run at any point, so it only notes backends; :func:`evict_unused` acts."""


def evict_when_unused(compiled: object, backend: Backend) -> Unused:
    """Note that an object is compiled with its own backend, which is unused once the object dies or the result is
    called."""
    unused = weakref.finalize(compiled, _unused.append, backend)
    unused.atexit = False
    return unused


def evict_unused() -> None:
    """Have Dynamo drop what it compiled with unused backends."""
    backends = []
    with contextlib.suppress(IndexError):  # other threads take some, garbage collection adds some
        while True:
            backends.append(_unused.pop())
    torch_private.forget_compiled(backends)
