"""Dynamo: its graphs and where they come from in the user's code."""

from __future__ import annotations

import contextlib
import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch._dynamo.exc
from torch import fx
from torch._dynamo.eval_frame import OptimizedModule

from roundpipe_fx.torch_private.interpreter_stack import run_in_one_chunk
from roundpipe_fx.torch_private.tracing_retries import was_retried

__all__ = [
    "CompiledFrame",
    "OptimizedModule",
    "PassedThrough",
    "RecompileLimit",
    "UserLine",
    "checkpoint_body",
    "compiled_in_place_by_us",
    "enter_around_compilations",
    "forget_compiled",
    "graph_break",
    "graph_breaks",
    "input_path",
    "limit_of_error",
    "line_of_break",
    "module_path_text",
    "modules_being_compiled",
    "passed_through",
    "reads_input",
    "recompile_limit_errors",
    "traced_forward_call",
    "tracing_inside_checkpoint",
    "try_again",
    "untraced_functions",
    "why_disabled",
]


class PassedThrough(torch._dynamo.exc.ShortenTraceback):
    """An error of a backend's that reaches the user as it is, not wrapped into Dynamo's ``BackendCompilerFailed``."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)

    @property
    def args(self) -> tuple[Any, ...]:
        """As of any exception. That Dynamo sets them, to add advice on finding errors in PyTorch, has no effect."""
        return BaseException.args.__get__(self)  # type: ignore[attr-defined]

    @args.setter
    def args(self, _value: Any) -> None:
        pass


def passed_through(error: Exception) -> PassedThrough:
    """An error of the same type and text that Dynamo does not wrap.

    Args:
        error: of a built-in type that takes a message.
    """
    kind = type(error)
    # Both: Dynamo lets it pass, and a user's ``except ValueError`` still catches it.
    transparent: Any = type(kind.__name__, (PassedThrough, kind), {"__module__": kind.__module__})
    return transparent(str(error)).with_traceback(error.__traceback__)


class CompiledFrame(NamedTuple):
    """A function that Dynamo compiles.

    Attributes:
        options: those given to ``torch.compile`` together with a backend's name.
    """

    code: CodeType
    options: Mapping[str, Any]


def enter_around_compilations(by_others: Callable[[CodeType, Sequence[torch.nn.Module]], None]) -> None:
    """Make Dynamo enter the context that a backend names in ``around_compilations`` while it compiles a frame for it.

    Dynamo's own ``backend_ctx_ctor`` is entered around each call, which costs time in each step. Backends that have no
    such attribute are not affected.

    Args:
        by_others: called when a frame has been compiled for such a backend, with its code and its modules.
    """
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    compile_frame: Any = CatchErrorsWrapper.__call__
    # Patched once for each process, whichever model comes first.
    if hasattr(compile_frame, "roundpipe_fx"):
        return

    compile_undisturbed = run_in_one_chunk(compile_frame)

    # Other backends' compilations pass through: only frames that are compiled by our backend are entered.
    def compile_frame_in_context(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        around = getattr(_given_backend(self), "around_compilations", None)
        if around is not None:
            with around(CompiledFrame(frame.f_code, _given_options(self))):
                return compile_undisturbed(self, frame, *args, **kwargs)
        # Another backend has compiled this frame. One of its modules may be compiled in place with ours.
        compiled = compile_frame(self, frame, *args, **kwargs)
        if compiled.guarded_code is not None:
            by_others(frame.f_code, _owners(frame.f_locals))
        return compiled

    compile_frame_in_context.roundpipe_fx = True  # type: ignore[attr-defined]
    CatchErrorsWrapper.__call__ = compile_frame_in_context  # type: ignore[method-assign]


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


_UNKNOWN = UserLine("an unknown file", 0, "an unknown function")


def line_of_break(reason: Any) -> UserLine:
    """Where in the user's code a graph break happened."""
    if not reason.user_stack:
        return _UNKNOWN
    frame = reason.user_stack[-1]
    return UserLine(frame.filename, frame.lineno, frame.name)


class UntracedFunction(NamedTuple):
    """A function that Dynamo gave up and runs eagerly.

    Attributes:
        limit: the limit on compilations that was reached; ``None`` if that is not the reason.
    """

    line: UserLine
    reason: str
    limit: RecompileLimit | None = None


class RecompileLimit(NamedTuple):
    """A limit on how often Dynamo compiles a function, which was reached.

    Attributes:
        name: of the setting in ``torch._dynamo.config``.
        guard: what did not hold in the last call and had held when the function was compiled, as ``self.count == 3``;
            ``""`` if it is not known.
    """

    name: str
    number: int
    guard: str


def recompile_limit_errors() -> tuple[type[Exception], ...]:
    """Errors that Dynamo raises at a limit on compilations if the user wants an error there."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return (FailOnRecompileLimitHit,)


_LIMIT = re.compile(r"\b(accumulated_recompile_limit|recompile_limit)\b")
_GUARD = re.compile(r"^\s*(?:\d+/\d+(?:_\d+)?:\s*)?(.*?)\s*(?:#.*|\(HINT.*)?$")


def limit_of_error(error: BaseException) -> RecompileLimit | None:
    """The limit that an error of :func:`recompile_limit_errors` speaks of, just after it was raised."""
    from torch._dynamo.utils import get_compilation_metrics

    last = next(reversed(get_compilation_metrics()), None)
    return _limit_in(f"{error}\n{error.__cause__}", last)


def _limit_in(text: str, attempt: Any) -> RecompileLimit | None:
    """The limit on compilations that a message of Dynamo's names.

    Args:
        attempt: Dynamo's metrics of the compilation.
    """
    name = _LIMIT.search(text)
    # "recompile limit" is part of the message, and the setting's name may occur elsewhere.
    if name is None or "recompile limit" not in text:
        return None
    # The first line names the guard that failed in the last compiled version.
    last = getattr(attempt, "recompile_reason", None) or ""
    guard = _GUARD.match(last.partition("\n")[0])
    number = getattr(torch._dynamo.config, name.group())
    return RecompileLimit(name.group(), number, guard.group(1) if guard is not None else "")


_given_up: list[weakref.ref[CodeType]] = []


@contextlib.contextmanager
def untraced_functions(code: CodeType) -> Iterator[list[UntracedFunction]]:
    """The functions that Dynamo gives up while entered; known on leaving, unless by an exception.

    Dynamo asks no backend about these. It has them among its metrics of compilations.

    Args:
        code: of the function that is compiled, which those metrics do not name if a limit on compilations is reached.
    """
    from torch._dynamo.utils import get_compilation_metrics

    untraced: list[UntracedFunction] = []
    last = next(reversed(get_compilation_metrics()), None)
    yield untraced
    # Attempts since this context began, latest first.
    for attempt in itertools.takewhile(lambda attempt: attempt is not last, reversed(get_compilation_metrics())):
        # A frame that was traced again after our own error is no failure.
        if was_retried(attempt.co_filename, attempt.co_firstlineno):
            continue
        limit = _limit_in(attempt.fail_reason or "", attempt)
        if limit is not None:
            # Functions that were given up may compile once the model is planned anew: see try_again.
            _given_up.append(weakref.ref(code))
            line = UserLine(code.co_filename, code.co_firstlineno, code.co_qualname)
            untraced.append(UntracedFunction(line, attempt.fail_reason or "", limit))
        elif attempt.fail_type in ("Unsupported", "UserError"):
            file, number = attempt.fail_user_frame_filename, attempt.fail_user_frame_lineno
            line = UserLine(file or attempt.co_filename or "", number or 0, attempt.co_name or "")
            line = line if line.file else _UNKNOWN
            _given_up.extend(_codes_at(attempt.co_filename, attempt.co_firstlineno))
            untraced.append(UntracedFunction(line, attempt.fail_reason or ""))


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[Any]]:
    """Dynamo's records of the graph breaks while entered, those before or after which there is no graph among them."""
    from torch._dynamo.utils import graph_break_reasons

    breaks: list[Any] = []
    before = len(graph_break_reasons)
    yield breaks
    breaks.extend(reason for reason in graph_break_reasons[before:] if reason.graph_break)


def why_disabled(function: Any) -> str | None:
    """Why a function is kept from being compiled (``torch.compiler.disable``); ``None``: it is not."""
    if not getattr(function, "_torchdynamo_disable", False):
        return None
    return getattr(function, "_torchdynamo_disable_msg", None) or "torch.compiler.disable"


def _codes_at(file: str | None, line: int | None) -> list[weakref.ref[CodeType]]:
    """The code of functions that Dynamo tried and that begin at a line."""
    from torch._dynamo.convert_frame import input_codes

    codes = [(reference, reference()) for reference in input_codes.seen]
    return [reference for reference, code in codes if code and (code.co_filename, code.co_firstlineno) == (file, line)]


def try_again() -> None:
    """Let Dynamo try the functions again that it gave up: it does not for any model of their class."""
    while _given_up:
        code = _given_up.pop()()
        if code is not None:
            torch._dynamo.eval_frame.reset_code(code)


_ROOT = re.compile(
    r"[LG]\[['\"][^\]]+['\"]\](?:\.(?:__self__|__func__|cell_contents)|\.__closure__\[\d+\]|\._orig_mod(?=[.\[]|$))*"
)
_PATH_STEP = re.compile(r"\.(\w+)|\[['\"]?([^'\"\]]+)['\"]?\]")
_TABLES = ("__dict__", "_modules", "_parameters", "_buffers")


def module_path_text(source: str) -> str:
    """A tracer's module path as users write it, ``""`` for the root.

    ``L['self'].h.0``, ``L['self']._modules['h']._modules['0']`` and ``L['self'].__dict__['_modules']['h']['0']``, as
    for a class with a ``__getattr__`` of its own, are all ``h.0``.
    """
    root = _ROOT.match(source)
    steps = _PATH_STEP.findall(source[root.end() :] if root else "." + source)
    # ``_modules`` and ``__dict__`` are how Dynamo reads attributes, and no part of a path.
    return ".".join(step for step in (attribute or key for attribute, key in steps) if step not in _TABLES)


def input_path(placeholder: fx.Node) -> tuple[str, bool]:
    """Readable name of an input of Dynamo's graph, and whether it is a parameter or buffer."""
    text = _source_text(placeholder)
    if not text:
        return str(placeholder.target), False
    path = module_path_text(text)
    if path and ("_parameters[" in text or "_buffers[" in text):
        return path, True
    # An argument: ``L['batch']['ids']`` is called ``batch_ids``.
    matched = re.match(r"L\['([^']+)'\](.*)$", text)
    if matched:
        attribute = re.sub(r"[^0-9A-Za-z]+", "_", matched.group(2)).strip("_")
        return matched.group(1) + (f"_{attribute}" if attribute else ""), False
    return str(placeholder.target), False


def _source_text(placeholder: fx.Node) -> str:
    """Where an input of Dynamo's graph comes from, as ``L['x']``; ``""`` if it is not known."""
    argument = placeholder.meta.get("grapharg")
    return _name_of(getattr(argument, "source", None) or getattr(placeholder, "_dynamo_source", None))


def _name_of(source: Any) -> str:
    name = getattr(source, "name", "")  # a method, or in newer versions a property
    return str(name() if callable(name) else name)


def reads_input(module: fx.GraphModule, key: str) -> bool:
    """Return whether a graph of Dynamo's that is being compiled reads an input that its caller passes by this name.

    Tensors, and integers whose sources are dynamic (:func:`dynamo_flags`), are inputs of the graph if they are read.
    Of what Dynamo has taken for a constant, as a float, there is only a guard, also if it was but compared with
    ``None``: that counts as read.
    """
    suffix = f"['{key}']"
    placeholders = module.graph.find_nodes(op="placeholder")
    if any(_source_text(node).endswith(suffix) and node.users for node in placeholders):
        return True
    tracing = torch._guards.TracingContext.try_get()
    guards = tracing.guards_context.dynamo_guards if tracing is not None else ()
    return any(_name_of(guard).endswith(suffix) and guard.create_fn_name() == "CONSTANT_MATCH" for guard in guards)


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

    # Tracers are nested as higher-order operators are; any of them may be the checkpoint.
    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if tracer.source_target is torch.ops.higher_order.tag_activation_checkpoint:
            return True
        tracer = tracer.parent
    return False


def forget_compiled(backends: Sequence[Any]) -> None:
    """Drop what Dynamo has compiled with backends that are not used any more.

    Dynamo keeps it by code object, for all models of a class, as long as the process lives; when it has compiled a
    function often enough it runs it eagerly from then on.

    Args:
        backends: functions that were given to ``torch.compile``.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    # All functions that Dynamo has seen: a code object does not know its backends.
    for code in [code for reference in input_codes.seen if (code := reference()) is not None]:
        entries = _debug_get_cache_entry_list(code)
        alive = [entry for entry in entries if not isinstance(entry.guard_manager, DeletedGuardManagerWrapper)]
        unused = [entry for entry in alive if any(_given_backend(entry.backend) is backend for backend in backends)]
        if not unused:
            continue
        # Entries cannot be removed one by one. They are invalidated, and once too many are, the code is compiled anew.
        used = len(alive) - len(unused)
        if not used or len(entries) - used > _MOST_UNUSED:
            torch._dynamo.eval_frame.reset_code(code)  # models that are in use are compiled once more
            continue
        for entry in unused:
            deleted = DeletedGuardManagerWrapper("what it was compiled for is not used any more")
            if entry.guard_manager.extra_state is not None:
                entry.guard_manager.extra_state.invalidate(entry, deleted)


_MOST_UNUSED = 16
"""Entries that are dropped stay behind as empty ones, and count as compilations."""


def _given_backend(wrapper: Any) -> Any:
    """The function that a user of ``torch.compile`` gave."""
    for name in ("compiler_fn", "_torchdynamo_orig_backend"):
        inner = getattr(wrapper, name, None)
        if inner is not None:
            return _given_backend(inner)
    return wrapper


def _given_options(wrapper: Any) -> Mapping[str, Any]:
    """The options that a user of ``torch.compile`` gave."""
    while wrapper is not None:
        arguments = getattr(wrapper, "kwargs", None)
        if isinstance(arguments, Mapping) and "options" in arguments:
            options: Mapping[str, Any] = arguments["options"]
            return options
        wrapper = getattr(wrapper, "compiler_fn", None) or getattr(wrapper, "_torchdynamo_orig_backend", None)
    return {}


def compiled_in_place_by_us(module: torch.nn.Module) -> bool:
    """Return whether ``module.compile`` was given a backend that has the attribute ``around_compilations``."""
    compiled: Any = module._compiled_call_impl
    names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
    if "callback" not in names:
        return False
    callback = compiled.__closure__[names.index("callback")].cell_contents
    return hasattr(_given_backend(callback), "around_compilations")


def modules_being_compiled() -> list[torch.nn.Module]:
    """While a backend compiles: the modules whose function it is that Dynamo has traced."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return _owners(InstructionTranslator.current_tx().output.root_tx.f_locals)


def _owners(local: Mapping[str, Any]) -> list[torch.nn.Module]:
    """The modules among the local variables of a frame, and those whose methods are.

    A wrapper of a ``forward``, as Accelerate's for autocast, has the module among its ``*args``.
    """
    owners = []
    for value in (
        item
        for local_value in local.values()
        for item in (local_value if type(local_value) is tuple else (local_value,))
    ):
        owner = getattr(value, "__self__", value)
        if isinstance(owner, torch.nn.Module):
            owners.append(owner)
    return owners


@dataclass(frozen=True)
class _ForwardCalls:
    """The calls of ``forward`` in one graph, by Dynamo's frame; a frame that is gone is not asked for again."""

    number_by_object: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)
    numbers: Iterator[int] = field(default_factory=itertools.count)


_forward_calls: weakref.WeakKeyDictionary[Any, _ForwardCalls] = weakref.WeakKeyDictionary()
"""By the outermost frame of Dynamo's graph; only :func:`traced_forward_call` reads and writes it."""


@torch._dynamo.assume_constant_result
def traced_forward_call() -> int:
    """While Dynamo traces: a number for the call of a module's ``forward`` that the place is in, counted in a graph.

    Run by Dynamo at that place, its result is a constant of the graph.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    frame = InstructionTranslator.current_tx().output.current_tx
    # One count for each top-level trace: a retried trace begins at 0 again.
    calls = _forward_calls.setdefault(frame.output.root_tx, _ForwardCalls())
    # The innermost ``forward`` that encloses the call, whichever helper functions lie between.
    while frame.parent is not None and frame.f_code.co_name != "forward":
        frame = frame.parent
    if frame not in calls.number_by_object:
        calls.number_by_object[frame] = next(calls.numbers)
    return calls.number_by_object[frame]
