"""What a user can decide, checked before anything is traced."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from roundpipe_fx.budget import parse_budget

__all__ = ["Options", "RotorOptions", "StageCompiler", "meant", "names_checked"]

P = ParamSpec("P")
T = TypeVar("T")

StageCompiler = Literal["eager", "inductor"] | Callable[..., Any]

_RECOMPUTE = ("none", "full")
_NOT_OF_THE_USER = ("device_name", "rotor", "following")
_COSTS = ("roofline", "measured")
_STAGE_COMPILERS = ("eager", "inductor")


@dataclass(frozen=True)
class RotorOptions:
    """Follow a checkpointing sequence over the segments, instead of searching for a plan.

    Attributes:
        limit: bytes.
        slots: how finely memory is counted.
        algo: name of the algorithm that makes the sequence.
        loss_temporary: bytes that are allocated between forward and backward.
        preserve_rng_state: whether random operations are replayed; else what they drew is kept.
    """

    limit: int
    slots: int
    algo: str
    loss_temporary: int
    preserve_rng_state: bool


@dataclass(frozen=True)
class Options:
    """How to compile.

    Attributes:
        stages: how many pipeline stages; ``"auto"``: one stage a device, on one device as few as keep each within 1.1
            times the heaviest segment; or a list of module names (as in ``named_modules()``) at which stages begin.
        recompute: ``"none"``: everything the backward reads is saved. ``"full"``: each stage saves only what enters
            it, and what is hoisted. ``None``: as the budget says; without one, ``"none"``.
        memory_budget: bytes that a step may allocate at most at one time, or a share in [0, 1] of the way from the
            least that can be reached to nothing recomputed. ``None``: on CUDA 90 % of the memory that is free at the
            first step, unless ``recompute`` is given; on the CPU no limit.
        cost: ``"roofline"``: modelled, always the same for the same graph. ``"measured"``: every distinct operation is
            timed on the device once and kept on disk.
        stage_compiler: ``"eager"``, ``"inductor"``, or a callable ``(GraphModule, example_inputs) -> callable``.
            ``None``: eager on the CPU, Inductor on CUDA.
        passes: gets the list of passes, and returns the one that is run; ``None``: the list as it is.
        device_name: plan for a device of this name, not for the one at hand; not an option of the user's.
        rotor: follow a checkpointing sequence; not an option of the user's.
        following: by name of a module of the model the names of those that run after it, as far as that is known; not
            an option of the user's.
    """

    stages: int | str | tuple[str, ...] = "auto"
    recompute: str | None = None
    memory_budget: int | float | None = None
    cost: str = "roofline"
    stage_compiler: StageCompiler | None = None
    passes: Callable[[list[Any]], Sequence[Any]] | None = None
    device_name: str | None = None
    rotor: RotorOptions | None = None
    following: Mapping[str, Sequence[str]] | None = None

    def stage_compiler_for(self, device: torch.device) -> StageCompiler:
        """The stage compiler on this device: the user's choice, or eager on the CPU and Inductor on CUDA."""
        return self.stage_compiler or ("inductor" if device.type == "cuda" else "eager")

    @property
    def device(self) -> torch.device | None:
        """The device to plan for, if it is not the one at hand."""
        if self.device_name is None:
            return None
        return torch.device("cpu" if self.device_name == "cpu" else "cuda")

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Options:
        """Check names and values.

        Raises:
            ValueError: an unknown option or value; the message lists the valid ones.
            TypeError: a value of a wrong type.
        """
        known = [field.name for field in fields(cls) if field.name not in _NOT_OF_THE_USER]
        for name in options:
            if name not in known:
                raise ValueError(f"unknown option {name!r}.{meant(name, known)} Valid options: {', '.join(known)}.")
        checked = dict(options)
        if "stages" in checked:
            checked["stages"] = _stages(checked["stages"])
        if checked.get("recompute") is not None and checked["recompute"] not in _RECOMPUTE:
            raise ValueError(f"recompute={checked['recompute']!r}: valid values are {_quoted(_RECOMPUTE)}.")
        checked["memory_budget"] = parse_budget(checked.get("memory_budget"))
        if checked["memory_budget"] is not None and checked.get("recompute") is not None:
            raise ValueError(
                f"recompute={checked['recompute']!r} and memory_budget={options['memory_budget']!r} contradict each "
                "other: with a budget the plan decides what is recomputed. Give one of them."
            )
        if checked.get("cost", "roofline") not in _COSTS:
            raise ValueError(f"cost={checked['cost']!r}: valid values are {_quoted(_COSTS)}.")
        compiler = checked.get("stage_compiler")
        if compiler is not None and not callable(compiler) and compiler not in _STAGE_COMPILERS:
            raise ValueError(
                f"stage_compiler={compiler!r}: valid values are {_quoted(_STAGE_COMPILERS)}, a callable "
                "(GraphModule, example_inputs) -> callable, or None."
            )
        if checked.get("passes") is not None and not callable(checked["passes"]):
            raise TypeError(
                "passes must be a function that gets the list of passes and returns the one to run, not "
                f"{type(checked['passes']).__name__}; roundpipe_fx.default_passes() is the list."
            )
        return cls(**checked)


def meant(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """`` Did you mean …?``, for the end of a message about a name that is not known; empty if none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def names_checked(function: Callable[P, T]) -> Callable[P, T]:
    """A function that says which option was meant where it gets a keyword that it does not know."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in known:
                hint = meant(name, known)
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}.{hint}")
        return function(*args, **kwargs)

    return checked


def _stages(stages: Any) -> int | str | tuple[str, ...]:
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


def _quoted(values: Sequence[str]) -> str:
    return ", ".join(repr(value) for value in values)
