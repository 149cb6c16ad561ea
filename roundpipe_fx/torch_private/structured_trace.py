"""The structured trace of a compilation, which ``TORCH_TRACE`` asks for and ``tlparse`` reads."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["trace_artifact"]


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Write a text into the trace, if there is one."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
