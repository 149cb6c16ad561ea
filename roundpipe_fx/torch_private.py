"""The one place that touches private torch APIs.

Tried with torch 2.11.0, 2.13.0 and 2.15.0. Everything else in the project uses documented interfaces, so a torch
release that moves something is answered here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch._dynamo
import torch._dynamo.exc
import torch._functorch.config
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = [
    "PassedThrough",
    "WatchedMemory",
    "active_dispatch_modes",
    "aot_autograd",
    "assume_sizes",
    "assumed_sizes",
    "boxed_codegen",
    "checkpoint_body",
    "checkpoint_policy",
    "data_dependent_symbol",
    "detached_with_version",
    "differentiated_outputs",
    "dispatch_mode_flags",
    "dispatch_modes",
    "dynamo_flags",
    "fakes_on",
    "forget_compiled",
    "forward_backend_context",
    "graph_break",
    "has_kernel",
    "in_backward",
    "inductor",
    "input_mutations",
    "input_path",
    "module_path_text",
    "mutated_inputs",
    "pop_saved_tensor_hooks",
    "profiler_runs",
    "push_saved_tensor_hooks",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "set_dispatch_mode_flags",
    "shape_env_of",
    "size_hint",
    "top_saved_tensor_hooks",
    "traced_forward_call",
    "tracing_inside_checkpoint",
    "user_stack_text",
    "watch_memory",
    "when_backward_ends",
]


_T = TypeVar("_T")


class PassedThrough(torch._dynamo.exc.ShortenTraceback):
    """An error of a backend's that reaches the user as it is, not wrapped into Dynamo's ``BackendCompilerFailed``."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


# Methods through which libraries log inside ``forward`` (Hugging Face does); tracing skips the calls.
_LOGGER_METHODS = ("debug", "info", "warning", "warn", "warning_once", "info_once", "warning_advice", "error")


def aot_autograd(**kwargs: Any) -> Callable[..., Any]:
    """``torch._dynamo.backends.common.aot_autograd``: AOTAutograd as the second half of a Dynamo backend."""
    from torch._dynamo.backends.common import aot_autograd as make

    return make(**kwargs)


def aot_flags() -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd's flags for our compilation: no donated buffers, so ``backward(retain_graph=True)`` works."""
    return torch._functorch.config.patch(donated_buffer=False)


@contextlib.contextmanager
def dynamo_flags() -> Iterator[None]:
    """Dynamo's flags for our compilation only, restored on exit.

    Data-dependent shapes and scalars are captured into the graph instead of breaking it, loggers are skipped, and
    hooks that are added to a submodule later are noticed.
    """
    config = torch._dynamo.config
    with config.patch(
        capture_dynamic_output_shape_ops=True,
        capture_scalar_outputs=True,
        skip_nnmodule_hook_guards=False,
        ignore_logging_functions=set(config.ignore_logging_functions) | _logging_functions(),
    ):
        yield


def _logging_functions() -> frozenset[Any]:
    found: set[Any] = set()
    for owner in (logging.Logger, logging.LoggerAdapter):
        for name in _LOGGER_METHODS:
            method = getattr(owner, name, None)
            if method is not None:
                found.add(method)
    return frozenset(found)


def forward_backend_context() -> None:
    """Let ``torch.compile`` see the ``backend_ctx_ctor`` of a backend that it wraps.

    ``torch._dynamo.optimize`` enters the context that a backend names in ``backend_ctx_ctor`` around each call, but
    ``torch.compile`` hides the backend in two wrappers that do not pass the attribute on. This adds it to the
    wrappers' classes; backends that have no such attribute are not affected.
    """
    from torch._dynamo.repro.after_dynamo import WrapBackendDebug

    def inner(name: str) -> property:
        return property(lambda self: getattr(getattr(self, name), "backend_ctx_ctor", contextlib.nullcontext))

    for wrapper, name in ((torch._TorchCompileWrapper, "compiler_fn"), (WrapBackendDebug, "__wrapped__")):
        if not hasattr(wrapper, "backend_ctx_ctor"):
            setattr(wrapper, "backend_ctx_ctor", inner(name))  # noqa: B010 - the type checker knows no such attribute


def graph_break(module: fx.GraphModule) -> Any | None:
    """Dynamo's record of the graph break that ended this graph (``reason``, ``user_stack``), or ``None``."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return reason if reason is not None and reason.graph_break else None


def user_stack_text(reason: Any) -> str:
    """Where in the user's code a graph break happened: ``file:line in function``."""
    if not reason.user_stack:
        return "an unknown line"
    frame = reason.user_stack[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


_PATH_STEP = re.compile(r"_(?:modules|parameters|buffers)\[['\"]([^'\"]+)['\"]\]")


def module_path_text(source: str) -> str:
    """A tracer's module path as users write it, ``""`` for the root.

    ``L['self'].h.0`` and ``L['self']._modules['h']._modules['0']`` are both ``h.0``.
    """
    if "_modules[" in source or "_parameters[" in source or "_buffers[" in source:
        return ".".join(_PATH_STEP.findall(source))
    return re.sub(r"^[LG]\[['\"][^\]]+['\"]\]\.?", "", source)


def input_path(placeholder: fx.Node) -> tuple[str, bool]:
    """Readable name of an input of Dynamo's graph, and whether it is a parameter or buffer."""
    argument = placeholder.meta.get("grapharg")
    source = getattr(argument, "source", None) or getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return str(placeholder.target), False
    text = source.name() if callable(source.name) else source.name
    path = module_path_text(text)
    if path and ("_parameters[" in text or "_buffers[" in text):
        return path, True
    found = re.match(r"L\['([^']+)'\](.*)$", text)
    if found:
        rest = re.sub(r"[^0-9A-Za-z]+", "_", found.group(2)).strip("_")
        return found.group(1) + (f"_{rest}" if rest else ""), False
    return str(placeholder.target), False


def mutated_inputs(joint: fx.GraphModule) -> list[fx.Node]:
    """Graph inputs that AOTAutograd's epilogue updates in place from a forward output."""
    descriptions = joint.graph.output_node().meta.get("desc") or []
    mutated = {
        description.mutated_input
        for description in descriptions
        if type(description).__name__ == "InputMutationAOTOutput"
    }
    return [node for node in joint.graph.find_nodes(op="placeholder") if node.meta.get("desc") in mutated]


def input_mutations(graph: fx.GraphModule) -> dict[int, int]:
    """Inputs that AOTAutograd's epilogue updates in place: number of the input by number of the output it copies."""
    places = {node.meta.get("desc"): place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    return {
        place: places[description.mutated_input]
        for place, description in enumerate(graph.graph.output_node().meta.get("desc") or [])
        if type(description).__name__ == "InputMutationAOTOutput"
    }


def differentiated_outputs(joint: fx.GraphModule) -> list[int]:
    """For each incoming gradient of a joint graph the number of the forward output that it is the gradient of."""
    places = {description: place for place, description in enumerate(joint.graph.output_node().meta.get("desc") or [])}
    descriptions = [node.meta.get("desc") for node in joint.graph.find_nodes(op="placeholder")]
    return [places[d.output] for d in descriptions if type(d).__name__ == "TangentAOTInput"]


def checkpoint_body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The body of a ``torch.utils.checkpoint`` call in a graph of Dynamo's; ``None`` if a node is something else."""
    if node.target is not torch.ops.higher_order.tag_activation_checkpoint:
        return None
    name = node.args[0]
    assert isinstance(name, fx.Node)
    body = module.get_submodule(str(name.target))
    assert isinstance(body, fx.GraphModule)
    return body


def checkpoint_policy(node: fx.Node) -> torch.utils.checkpoint.CheckpointPolicy | None:
    """What selective checkpointing says of a node of a joint graph."""
    return node.meta.get("recompute")


@torch._dynamo.assume_constant_result
def tracing_inside_checkpoint() -> bool:
    """While Dynamo traces: whether the place is inside a function given to ``torch.utils.checkpoint``.

    Run by Dynamo at that place, its result is a constant of the graph.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if tracer.source_target is torch.ops.higher_order.tag_activation_checkpoint:
            return True
        tracer = tracer.parent
    return False


def forget_compiled(model: torch.nn.Module) -> None:
    """Drop what was compiled of a model's ``forward``, so that compiling it anew counts as the first time.

    Dynamo keeps what it compiled by code object, and compiles no more after eight. Other models of the same class are
    compiled again at their next call.
    """
    function: Any = model.forward
    while function is not None:
        if hasattr(function, "__code__"):
            torch._dynamo.eval_frame.reset_code(function.__code__)
        function = getattr(function, "__wrapped__", None)  # decorators have code of their own


@torch._dynamo.assume_constant_result
def traced_forward_call() -> int:
    """While Dynamo traces: a number for the call of a module's ``forward`` that the place is in, counted in a graph.

    Run by Dynamo at that place, its result is a constant of the graph.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    frame = InstructionTranslator.current_tx().output.current_tx
    numbers = frame.output.__dict__.setdefault("roundpipe_fx_calls", {})
    while frame.parent is not None and frame.f_code.co_name != "forward":
        frame = frame.parent
    return numbers.setdefault(frame, len(numbers))


def boxed_codegen() -> Any:
    """FX code generation for functions that take one list and clear it, so that arguments can die inside."""
    from torch.fx.graph import _BoxedCodeGen

    return _BoxedCodeGen()


def shape_env_of(value: Any) -> Any | None:
    """The ShapeEnv behind a fake tensor or symbolic scalar, or ``None``."""
    if isinstance(value, torch.Tensor):
        mode = getattr(value, "fake_mode", None)
        return getattr(mode, "shape_env", None)
    node = getattr(value, "node", None)
    return getattr(node, "shape_env", None)


def size_binding(size: torch.SymInt) -> dict[Any, Any]:
    """``node.meta["unbacked_bindings"]`` of a node whose first dimension defines the unknown ``size``."""
    from torch.fx.experimental.symbolic_shapes import CallMethodKey
    from torch.utils._pytree import SequenceKey

    return {size.node.expr: (CallMethodKey("size"), SequenceKey(0))}


_UNKNOWN_SIZE = 1024
_LARGEST_BOUND = 1 << 40


def size_hint(size: Any) -> int:
    """A number to plan with for a size that may be symbolic.

    The traced example's value where there is one; for a data-dependent size (``nonzero``) what was assumed
    (:func:`assume_sizes`), else its upper bound, since a plan must hold for it; 1024 where no bound is known.
    """
    if isinstance(size, int):
        return size
    node = size.node
    shape_env = node.shape_env
    expression = shape_env.replace(node.expr)
    values = {}
    for symbol in expression.free_symbols:
        hint = _backed_hint(shape_env, symbol)
        if hint is None:
            hint = getattr(shape_env, _ASSUMED, {}).get(str(symbol))
        if hint is None:
            bounds = shape_env.var_to_range.get(symbol)
            upper = int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None
            hint = upper if upper is not None and upper < _LARGEST_BOUND else _UNKNOWN_SIZE
        values[symbol] = hint
    return int(expression.xreplace(values))


_ASSUMED = "roundpipe_fx_assumed_sizes"


def assume_sizes(joint: fx.GraphModule, sizes: Mapping[str, int]) -> None:
    """Let :func:`size_hint` take these values for data-dependent sizes of a graph, by symbol."""
    for node in joint.graph.nodes:
        shape_env = shape_env_of(node.meta.get("val"))
        if shape_env is not None:
            setattr(shape_env, _ASSUMED, dict(sizes))
            return


def assumed_sizes(joint: fx.GraphModule) -> dict[str, int]:
    """What :func:`assume_sizes` was given for a graph."""
    for node in joint.graph.nodes:
        shape_env = shape_env_of(node.meta.get("val"))
        if shape_env is not None:
            return dict(getattr(shape_env, _ASSUMED, {}))
    return {}


def data_dependent_symbol(size: Any) -> str | None:
    """The symbol's name, if a size is one that depends on data and nothing else."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.shape_env.replace(size.node.expr)
    if not expression.is_Symbol or _backed_hint(size.node.shape_env, expression) is not None:
        return None
    return str(expression)


def _backed_hint(shape_env: Any, symbol: Any) -> int | None:
    name = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"
    value = getattr(shape_env, name).get(symbol)
    return None if value is None else int(value)


def inductor(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile one functional ATen graph with Inductor. The result is boxed.

    Random numbers are drawn as eager draws them (``fallback_random``), so that stages agree with ``aot_eager`` but for
    rounding; outputs keep the strides that they have in the graph, which the next stage was compiled for.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = detect_fake_mode(example_inputs)
    # A tracing context of its own: Inductor reports output strides to the active one, which is the whole model's.
    with torch.no_grad(), tracing(TracingContext(mode)), V.set_fake_mode(mode), config.patch(fallback_random=True):
        retrace = make_fx(module, decomposition_table=select_decomp_table(), _allow_non_fake_inputs=True)
        with mode if mode is not None else contextlib.nullcontext():
            lowered = retrace(*example_inputs)
        output = lowered.graph.output_node()
        results: Any = output.args[0]
        values = [result.meta.get("val") if isinstance(result, fx.Node) else None for result in results]
        output.meta["original_output_strides"] = [
            value.stride() if isinstance(value, torch.Tensor) else None for value in values
        ]
        output.meta["user_visible_output_idxs"] = list(range(len(values)))
        return compile_fx_inner(lowered, list(example_inputs), cudagraphs=boxed_false(), is_inference=False)


def boxed_false() -> Any:
    """Inductor's spelling of "no CUDA graphs"."""
    from torch._inductor.utils import BoxedBool

    return BoxedBool(False)


def registered_backwards(targets: Sequence[Any]) -> list[Any]:
    """Definitions (``CustomOpDef``) of those operators whose backward was registered from Python."""
    from torch._library.custom_ops import OPDEFS

    found = {}
    for target in targets:
        if isinstance(target, torch._ops.OpOverload):
            name = target._schema.name
        elif isinstance(target, torch._ops.OpOverloadPacket):
            name = target._qualified_op_name
        else:
            continue
        definition = OPDEFS.get(name)
        if definition is not None and definition._backward_fn is not None:
            found[name] = definition
    return list(found.values())


def traces(function: Callable[[], Any], tensors: Sequence[Any]) -> bool:
    """Whether ``function`` runs on fake tensors without asking for data. What it does leaves no trace in a graph.

    Args:
        function: run once, with nothing recorded.
        tensors: some of the fake tensors that it reads, to find their shape environment by.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    mode = torch._guards.detect_fake_mode(tensors)
    shape_env = mode.shape_env if mode is not None else None
    fresh = shape_env.ignore_fresh_unbacked_symbols() if shape_env is not None else contextlib.nullcontext()
    try:
        with disable_proxy_modes_tracing(), fresh:
            function()
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode):
        return False
    return True


def default_partition(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's own partition without recomputation."""
    from torch._functorch.partitioners import default_partition as partition

    return partition(*args, **kwargs)


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """No dispatch mode is active inside, the tracer's fake mode included: tensors that are made are real."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def leave_unused_gradients_out(output: torch.Tensor) -> None:
    """Let autograd hand ``None``, not a tensor of zeros, to a compiled backward for outputs that nobody used.

    Args:
        output: what a program of ours returned, by way of AOTAutograd; its backward must cope with ``None``.
    """
    if type(output.grad_fn).__name__ == "CompiledFunctionBackward":
        output.grad_fn.set_materialize_grads(False)  # type: ignore[union-attr]


@contextlib.contextmanager
def rng_states(devices: Collection[torch.device]) -> Iterator[Callable[[], None]]:
    """Remember the states of the CPU's and these devices' generators; yields a function that goes back to them."""
    host = torch.get_rng_state()
    others = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore() -> None:
        torch.set_rng_state(host)
        for device, state in others:
            torch.cuda.set_rng_state(state, device)

    yield restore


@dataclass(frozen=True)
class WatchedMemory:
    """What the allocator of a device handed out while something ran.

    Attributes:
        peak: bytes, beyond those that were allocated when it began, at most at one time.
        left: those of them that are allocated still.
    """

    peak: int
    left: int


_watching = threading.local()
"""Whom to tell about the memory of what runs in this thread, if it is being watched."""


def watch_memory(run: Callable[[], _T], device_type: str, seen: Callable[[WatchedMemory], None]) -> _T:
    """Run something and watch the allocator meanwhile, what kernels allocate inside themselves included.

    It is the profiler's record of this thread's allocations. What runs inside something that is watched already is
    told of the memory of the whole.

    Args:
        run: what to run.
        device_type: ``"cpu"`` or ``"cuda"``.
        seen: told of the memory.

    Raises:
        RuntimeError: a profiler of the user's runs on this thread.
    """
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    others: list[Callable[[WatchedMemory], None]] | None = getattr(_watching, "others", None)
    if others is not None:
        others.append(seen)
        return run()
    if profiler_runs():
        raise RuntimeError("memory cannot be watched while a profiler runs on the same thread: stop one of the two.")
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    told = [seen]
    _watching.others = told
    _enable_profiler_legacy(config)
    try:
        result = run()
    finally:
        del _watching.others
        records = _disable_profiler_legacy()
    live = peak = 0
    for event in itertools.chain.from_iterable(records):
        if event.kind() == "memory_alloc":
            live += event.cpu_memory_usage() if device_type == "cpu" else event.cuda_memory_usage()
            peak = max(peak, live)
    for tell in told:
        tell(WatchedMemory(peak, live))
    return result


def profiler_runs() -> bool:
    """Whether a profiler of the user's runs on this thread."""
    return getattr(_watching, "others", None) is None and torch._C._autograd._profiler_enabled()


_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def dispatch_mode_flags() -> tuple[bool, ...]:
    """What Dynamo is told about dispatch modes being active: flags of the process, although modes are of a thread."""
    from torch.utils import _python_dispatch

    return tuple(getattr(_python_dispatch, name) for name in _MODE_FLAGS)


def set_dispatch_mode_flags(flags: tuple[bool, ...]) -> None:
    """Set what :func:`dispatch_mode_flags` tells."""
    from torch.utils import _python_dispatch

    for name, flag in zip(_MODE_FLAGS, flags, strict=True):
        setattr(_python_dispatch, name, flag)
    tell_guards = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)  # not in 2.11
    if tell_guards is not None:
        tell_guards(flags[-1])


def active_dispatch_modes() -> list[Any]:
    """The dispatch modes that are active in this thread, outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


@contextlib.contextmanager
def dispatch_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Dispatch modes that another thread has active, active in this one too while that waits."""
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def push_saved_tensor_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Put a pair on top of this thread's stack of saved-tensor hooks."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Take the topmost pair off this thread's stack of saved-tensor hooks."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def top_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The topmost pair of this thread's stack of saved-tensor hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # False: also while something is traced


def detached_with_version(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()`` that shares the version counter, also below autograd, as in a dispatch mode."""
    key = torch._C.DispatchKey.ADInplaceOrView
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(call: Callable[[], None]) -> bool:
    """Have ``call`` called at the end of the backward that this thread is in; ``False`` if it is in none."""
    if not in_backward():
        return False
    torch.autograd.Variable._execution_engine.queue_callback(call)
    return True


def has_kernel(operator: torch._ops.OpOverload, device: str) -> bool:
    """Whether a device has a kernel of its own for an operator, rather than one composed of others."""
    key = getattr(torch._C.DispatchKey, device.upper(), None)
    return key is not None and operator.has_kernel_for_dispatch_key(key)


def fakes_on(device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that stands a fake tensor, which has no memory, in for a tensor; ``torch.compile`` traces with it."""
    mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return like.requires_grad_(tensor.requires_grad)

    return fake
