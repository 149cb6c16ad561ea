"""Dynamo: its flags, its graphs and where they come from in the user's code."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.exc
from torch import fx

__all__ = [
    "PassedThrough",
    "checkpoint_body",
    "dynamo_flags",
    "forget_compiled",
    "forward_backend_context",
    "graph_break",
    "input_path",
    "module_path_text",
    "traced_forward_call",
    "tracing_inside_checkpoint",
    "user_stack_text",
]


class PassedThrough(torch._dynamo.exc.ShortenTraceback):
    """An error of a backend's that reaches the user as it is, not wrapped into Dynamo's ``BackendCompilerFailed``."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


# Methods through which libraries log inside ``forward`` (Hugging Face does); tracing skips the calls.
_LOGGER_METHODS = ("debug", "info", "warning", "warn", "warning_once", "info_once", "warning_advice", "error")


_MOST_COMPILATIONS = 64


@contextlib.contextmanager
def dynamo_flags() -> Iterator[None]:
    """Dynamo's flags for our compilation only, restored on exit.

    Data-dependent shapes and scalars are captured into the graph instead of breaking it, loggers are skipped, and
    hooks that are added to a submodule later are noticed. A function may be compiled more often than eight times before
    Dynamo runs it eagerly: within a budget in bytes there is a plan for each range of sizes, and eagerly there is none.
    """
    config = torch._dynamo.config
    with config.patch(
        recompile_limit=max(config.recompile_limit, _MOST_COMPILATIONS),
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


def checkpoint_body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The body of a ``torch.utils.checkpoint`` call in a graph of Dynamo's; ``None`` if a node is something else."""
    if node.target is not torch.ops.higher_order.tag_activation_checkpoint:
        return None
    name = node.args[0]
    assert isinstance(name, fx.Node)
    body = module.get_submodule(str(name.target))
    assert isinstance(body, fx.GraphModule)
    return body


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
