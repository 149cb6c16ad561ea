"""streams: stream-level fork and join in a program of stage calls."""

from __future__ import annotations

from roundpipe_fx.codegen.program import Program

__all__ = ["fork_recompute"]


def fork_recompute(program: Program) -> Program:
    """Let each stage's recomputation run beside the gradient it waits for."""
    return program
