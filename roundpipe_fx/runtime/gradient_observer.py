"""Gradient observers: report incoming gradients that a plan did not expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roundpipe_fx.runtime.stage_compiler import Boxed

__all__ = ["gradient_observer"]


def gradient_observer(run: Boxed, unexpected: Mapping[int, str], see: Callable[[str], None]) -> Boxed:
    """Wrap a backward program so that it reports unexpected incoming gradients.

    Args:
        run: the program.
        unexpected: names of the incoming gradients that the plan assumes missing, by position.
        see: called with the name of each one that is passed.
    """

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        for place, name in unexpected.items():
            if arguments[place] is not None:
                see(name)
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
