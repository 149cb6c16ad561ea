"""Options of the user, checked before anything is traced."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from roundpipe_fx.budget import parse_budget, parse_host_budget
from roundpipe_fx.torch_private import inductor_settings

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Inductor:
    """Inductor, as what runs the stage modules.

    Attributes:
        options: names and values of its settings (``torch._inductor.config``) that the user has chosen.
    """

    options: tuple[tuple[str, Any], ...] = ()


StageCompiler = Literal["eager"] | Inductor | Callable[..., Any]

_RECOMPUTE = ("none", "full")
INTERNAL_OPTIONS = ("device_name", "rotor", "following")
"""Fields of the options that no user sets."""
_TILING = ("auto", "never")
_COSTS = ("roofline", "measured")
_OUTPUTS = ("auto", "held", "dropped", "unread")
_STAGE_COMPILERS = ("eager", "inductor")
NO_CUDA_GRAPHS = (
    "a captured CUDA graph keeps the memory of all that it has run from one step to the next, and reads its inputs at "
    "the addresses that they had; a budget counts that memory as free between stages and steps, and stages read values "
    "that are at other addresses in each step."
)
_OURS = {
    "fallback_random": "stages draw the numbers that eager mode draws, so it is always on.",
    "triton.cudagraphs": NO_CUDA_GRAPHS,
    "cpp_wrapper": "stages are called from Python.",
}
"""Settings of Inductor's that are not the user's to choose, with the reason."""


@dataclass(frozen=True)
class RotorOptions:
    """Options for following a checkpointing sequence over the segments, instead of searching for a plan.

    Attributes:
        limit: memory limit in bytes.
        slots: number of slots into which the memory is discretized.
        algo: name of the algorithm that computes the sequence.
        loss_temporary: bytes that are allocated between forward and backward.
        preserve_rng_state: whether random operations are replayed; otherwise their results are saved.
    """

    limit: int
    slots: int
    algo: str
    loss_temporary: int
    preserve_rng_state: bool


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a compilation.

    Attributes:
        stages: how many pipeline stages; ``"auto"``: one stage a device; on one device, or one in each replica, as few
            as keep each within 1.1 times the heaviest segment, or, where Inductor compiles them and nothing is
            recomputed, as few as let repeated layers be compiled once; or a list of module names (as in
            ``named_modules()``) at which stages begin.
        recompute: ``"none"``: everything the backward reads is saved. ``"full"``: each stage saves only what enters
            it, and hoisted values. ``None``: as the budget requires; without one, ``"none"``.
        memory_budget: bytes that a step may allocate at most at one time, or a share in [0, 1] of the way from the
            least that can be reached to nothing recomputed. ``None``: on CUDA 90 % of the memory that is free at the
            first step, unless ``recompute`` is given; on the CPU no limit.
        tiling: whether operations may be carried out in tiles, which rounds sums differently. ``None``: where a budget
            in bytes cannot be met otherwise. ``"auto"``: wherever it pays. ``"never"``.
        host_budget: bytes of the host's memory that values of a model on devices may take, where that makes a step
            within a budget shorter; 0: none leave. ``None``: 80 % of what is available.
        cost: ``"roofline"``: modelled, always the same for the same graph and rates. ``"measured"``: every distinct
            operation is timed on the device once and kept on disk.
        stage_compiler: ``"eager"``, ``"inductor"``, or a callable ``(GraphModule, example_inputs) -> callable``.
            ``None``: eager on the CPU, Inductor on CUDA.
        inductor_options: names and values of Inductor's settings, for stages that it compiles.
        outputs: what the caller does with the model's outputs before the backward of its loss begins: ``"held"``: it
            holds them. ``"dropped"``: it drops them. ``"unread"``: it drops them, and has not read them. ``"auto"``: as
            steps show; until one has, held, or, where the budget cannot be met so, dropped, or else unread.
        passes: gets the list of passes, and returns the one that is run; ``None``: the list as it is.
        device_name: name of a device to plan for instead of the model's; internal.
        rotor: options for following a checkpointing sequence; internal.
        following: by name of a module, the names of the modules that run after it, as far as known; internal.
    """

    stages: int | str | tuple[str, ...] = "auto"
    recompute: str | None = None
    memory_budget: int | float | None = None
    tiling: str | None = None
    host_budget: int | None = None
    cost: str = "roofline"
    stage_compiler: Literal["eager", "inductor"] | Callable[..., Any] | None = None
    inductor_options: tuple[tuple[str, Any], ...] = ()
    outputs: Literal["auto", "held", "dropped", "unread"] = "auto"
    passes: Callable[[list[Any]], Sequence[Any]] | None = None
    device_name: str | None = None
    rotor: RotorOptions | None = None
    following: Mapping[str, Sequence[str]] | None = None

    def stage_compiler_for(self, device: torch.device) -> StageCompiler:
        """The stage compiler for a device: the user's choice, else eager on the CPU and Inductor on CUDA."""
        chosen = self.stage_compiler or ("inductor" if device.type == "cuda" else "eager")
        return Inductor(self.inductor_options) if chosen == "inductor" else chosen

    @property
    def device(self) -> torch.device | None:
        """The device to plan for; ``None``: the one that the model is on."""
        if self.device_name is None:
            return None
        return torch.device("cpu" if self.device_name == "cpu" else "cuda")

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Make options from a mapping, and check names and values.

        Raises:
            ValueError: an option or a value is unknown; the message lists the valid ones.
            TypeError: a value has the wrong type.
        """
        known = [field.name for field in fields(cls) if field.name not in INTERNAL_OPTIONS]
        for name in options:
            if name not in known:
                raise ValueError(
                    f"unknown option {name!r}.{suggest_name(name, known)} Valid options: {', '.join(known)}."
                )
        checked = dict(options)
        if "stages" in checked:
            checked["stages"] = _parse_stages(checked["stages"])
        if checked.get("recompute") is not None and checked["recompute"] not in _RECOMPUTE:
            raise ValueError(f"recompute={checked['recompute']!r}: valid values are {_quote(_RECOMPUTE)}.")
        checked["memory_budget"] = parse_budget(checked.get("memory_budget"))
        if checked["memory_budget"] is not None and checked.get("recompute") is not None:
            raise ValueError(
                f"recompute={checked['recompute']!r} and memory_budget={options['memory_budget']!r} contradict each "
                "other: with a budget the plan decides what is recomputed. Give one of them."
            )
        if checked.get("tiling") is not None and checked["tiling"] not in _TILING:
            raise ValueError(
                f"tiling={checked['tiling']!r}: valid values are {_quote(_TILING)}, or None: tiles where a budget in "
                "bytes cannot be met otherwise."
            )
        if checked.get("tiling") == "auto" and checked.get("recompute") is not None:
            raise ValueError("tiling='auto' needs a budget to decide by: give memory_budget= instead of recompute=.")
        checked["host_budget"] = parse_host_budget(checked.get("host_budget"))
        if checked.get("cost", "roofline") not in _COSTS:
            raise ValueError(f"cost={checked['cost']!r}: valid values are {_quote(_COSTS)}.")
        if checked.get("outputs", "auto") not in _OUTPUTS:
            raise ValueError(f"outputs={checked['outputs']!r}: valid values are {_quote(_OUTPUTS)}.")
        compiler = checked.get("stage_compiler")
        if compiler is not None and not callable(compiler) and compiler not in _STAGE_COMPILERS:
            raise ValueError(
                f"stage_compiler={compiler!r}: valid values are {_quote(_STAGE_COMPILERS)}, a callable "
                "(GraphModule, example_inputs) -> callable, or None."
            )
        checked["inductor_options"] = _parse_inductor_options(checked.get("inductor_options"), compiler)
        if checked.get("passes") is not None and not callable(checked["passes"]):
            raise TypeError(
                "passes must be a function that gets the list of passes and returns the one to run, not "
                f"{type(checked['passes']).__name__}; roundpipe_fx.default_passes() is the list."
            )
        return cls(**checked)


def _parse_inductor_options(options: Any, compiler: Any) -> tuple[tuple[str, Any], ...]:
    if not options:
        return ()
    if not isinstance(options, Mapping):
        raise TypeError(f"inductor_options must be a mapping of names to values, not {type(options).__name__}.")
    if compiler not in (None, "inductor"):
        raise ValueError(
            f"inductor_options={dict(options)!r} and stage_compiler={compiler!r} contradict each other: the options "
            "are for stages that Inductor compiles."
        )
    known = inductor_settings()
    for name in options:
        if name not in known:
            raise ValueError(
                f"unknown name {name!r} in inductor_options.{suggest_name(name, known)} All of them: "
                "torch._inductor.list_options()."
            )
        if name in _OURS:
            raise ValueError(f"{name!r} in inductor_options: {_OURS[name]}")
    return tuple(sorted(options.items()))


def suggest_name(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """`` Did you mean …?`` for the end of a message about an unknown name; empty if no known name is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_names(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that the error for an unknown keyword argument suggests the closest known one."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in known:
                hint = suggest_name(name, known)
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}.{hint}")
        return function(*args, **kwargs)

    return checked


def _parse_stages(stages: Any) -> int | str | tuple[str, ...]:
    if isinstance(stages, str):
        if stages != "auto":
            raise ValueError(f"stages={stages!r}: valid values are a positive int, 'auto', or a list of module names.")
        return stages
    if isinstance(stages, bool):
        raise TypeError("stages must be a positive int, 'auto', or a list of module names, not a bool.")
    if isinstance(stages, int):
        if stages < 1:
            raise ValueError(f"stages={stages}: there must be at least one stage.")
        return stages
    if isinstance(stages, Sequence) and all(isinstance(name, str) for name in stages):
        return tuple(stages)
    raise TypeError(
        f"stages must be a positive int, 'auto', or a list of module names, not {type(stages).__name__} {stages!r}."
    )


def _quote(values: Sequence[str]) -> str:
    return ", ".join(repr(value) for value in values)
