"""The executor: a program's own text, run."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from roundpipe_fx.codegen import Program, program_text
from roundpipe_fx.runtime.stage_compiler import Boxed
from roundpipe_fx.runtime.streams import AcceleratorStreams, NoStreams

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
    streams = _streams(program)
    namespace: dict[str, Any] = {**stages, "torch": torch, "streams": streams}
    exec(compile(text, filename, "exec"), namespace)
    body = namespace[program.name]

    def run(arguments: list[Any]) -> tuple[Any, ...]:
        with streams.running():
            return body(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    weakref.finalize(run, linecache.cache.pop, filename, None)
    return run


def _streams(program: Program) -> NoStreams | AcceleratorStreams:
    graph = program.module.graph
    events = graph.find_nodes(op="call_function", target=torch.ops.streams.record_event.default)
    values = (node.meta.get("val") for node in graph.nodes if node.op == "placeholder")
    devices = {value.device for value in values if isinstance(value, torch.Tensor) and value.device.type != "cpu"}
    if not events or not devices:
        return NoStreams()
    return AcceleratorStreams(min(devices, key=str), len(events))
