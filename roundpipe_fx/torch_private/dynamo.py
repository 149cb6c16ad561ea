"""Dynamo: its flags, its graphs and where they come from in the user's code."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch._dynamo.exc
from torch import fx

from roundpipe_fx.torch_private.random_branches import known_random_branches

__all__ = [
    "PassedThrough",
    "UserLine",
    "checkpoint_body",
    "dynamo_flags",
    "forget_compiled",
    "forward_backend_context",
    "graph_break",
    "input_path",
    "line_of_break",
    "log_metrics_with_functions",
    "module_path_text",
    "traced_forward_call",
    "tracing_inside_checkpoint",
    "try_again",
    "untraced_functions",
]


class PassedThrough(torch._dynamo.exc.ShortenTraceback):
    """An error of a backend's that reaches the user as it is, not wrapped into Dynamo's ``BackendCompilerFailed``."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


# Methods through which libraries log inside ``forward`` (Hugging Face does); tracing skips the calls.
_LOGGER_METHODS = ("debug", "info", "warning", "warn", "warning_once", "info_once", "warning_advice", "error")


def log_metrics_with_functions() -> None:
    """Let Dynamo log its configuration although ``ignore_logging_functions`` is set, which torch 2.11 fails to do.

    It would log an error with a traceback at each compilation, and lose what it measured of it.
    """
    from torch._dynamo import utils

    in_full = utils._get_dynamo_config_for_logging

    def unless_it_cannot_be_written() -> str | None:
        try:
            return in_full()
        except TypeError:
            return None

    utils._get_dynamo_config_for_logging = unless_it_cannot_be_written


_MOST_COMPILATIONS = 64


@contextlib.contextmanager
def dynamo_flags() -> Iterator[None]:
    """Dynamo's flags for our compilation only, restored on exit.

    Data-dependent shapes and scalars are captured into the graph instead of breaking it, as are branches on random
    numbers that can go one way only; loggers are skipped, and hooks that are added to a submodule later are noticed.
    A function may be compiled more often than eight times before Dynamo runs it eagerly: within a budget in bytes there
    is a plan for each range of sizes, and eagerly there is none.
    """
    config = torch._dynamo.config
    flags = config.patch(
        recompile_limit=max(config.recompile_limit, _MOST_COMPILATIONS),
        capture_dynamic_output_shape_ops=True,
        capture_scalar_outputs=True,
        skip_nnmodule_hook_guards=False,
        ignore_logging_functions=set(config.ignore_logging_functions) | _logging_functions(),
    )
    with flags, known_random_branches():
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


class UserLine(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


def line_of_break(reason: Any) -> UserLine:
    """Where in the user's code a graph break happened."""
    if not reason.user_stack:
        return UserLine("an unknown file", 0, "an unknown function")
    frame = reason.user_stack[-1]
    return UserLine(frame.filename, frame.lineno, frame.name)


class UntracedFunction(NamedTuple):
    """A function that Dynamo gave up and runs eagerly.

    Attributes:
        line: where.
        reason: why.
    """

    line: UserLine
    reason: str


_given_up: list[weakref.ref[CodeType]] = []


@contextlib.contextmanager
def untraced_functions() -> Iterator[list[UntracedFunction]]:
    """The functions that Dynamo gives up while entered; known on leaving, unless by an exception.

    Dynamo asks no backend about these. It has them among its metrics of compilations.
    """
    from torch._dynamo.utils import get_compilation_metrics

    found: list[UntracedFunction] = []
    last = next(reversed(get_compilation_metrics()), None)
    yield found
    for attempt in itertools.takewhile(lambda attempt: attempt is not last, reversed(get_compilation_metrics())):
        if attempt.fail_type in ("Unsupported", "UserError"):
            file, number = attempt.fail_user_frame_filename, attempt.fail_user_frame_lineno
            line = UserLine(file or attempt.co_filename or "", number or 0, attempt.co_name or "")
            _given_up.extend(_codes_at(attempt.co_filename, attempt.co_firstlineno))
            found.append(UntracedFunction(line, attempt.fail_reason or ""))


def _codes_at(file: str | None, line: int | None) -> list[weakref.ref[CodeType]]:
    """The code of functions that Dynamo tried and that begin at a line."""
    from torch._dynamo.convert_frame import input_codes

    found = [(reference, reference()) for reference in input_codes.seen]
    return [reference for reference, code in found if code and (code.co_filename, code.co_firstlineno) == (file, line)]


def try_again() -> None:
    """Let Dynamo try the functions again that it gave up: it does not for any model of their class."""
    while _given_up:
        code = _given_up.pop()()
        if code is not None:
            torch._dynamo.eval_frame.reset_code(code)


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
