"""Seen gradients: tells which incoming gradients steps bring that their plan did not expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roundpipe_fx.runtime.stage_compiler import Boxed

__all__ = ["gradient_observer"]


def gradient_observer(run: Boxed, unexpected: Mapping[int, str], see: Callable[[str], None]) -> Boxed:
    """A backward program that tells of what it is given.

    Args:
        run: the program.
        unexpected: by place, names of incoming gradients that are to be told of where they come.
        see: told the name of each.
    """

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        for place, name in unexpected.items():
            if arguments[place] is not None:
                see(name)
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
