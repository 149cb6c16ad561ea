"""The executor: a program's own text, run."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Mapping
from typing import Any

import torch

from roundpipe_fx.codegen import Program, program_text
from roundpipe_fx.runtime.stage_compiler import Boxed

__all__ = ["load_program"]

_numbers = itertools.count()


def load_program(program: Program, stages: Mapping[str, Boxed]) -> Boxed:
    """Make a program callable.

    Args:
        program: what to run.
        stages: the compiled stage modules by name.

    Returns:
        a boxed function. Its source is the text that ``plan.write`` shows, and tracebacks quote it.
    """
    text = program_text(program)
    filename = f"<roundpipe_fx {program.name} program {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {**stages, "torch": torch}
    exec(compile(text, filename, "exec"), namespace)
    run = namespace[program.name]
    run._boxed_call = True
    return run
