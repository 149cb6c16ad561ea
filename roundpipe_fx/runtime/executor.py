"""The executor: compiles a program's source text and runs it."""

from __future__ import annotations

import functools
import itertools
import linecache
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from roundpipe_fx.codegen import Program, program_text
from roundpipe_fx.ir.joint_graph import Mark
from roundpipe_fx.runtime.incoming_gradients import ExpectedGradient, incoming_gradient
from roundpipe_fx.runtime.library_memory import touch_libraries
from roundpipe_fx.runtime.stage_compiler import Boxed
from roundpipe_fx.runtime.streams import AcceleratorStreams, NoStreams

_numbers = itertools.count()


def load_program(program: Program, stages: Mapping[str, Boxed], strided: bool = True) -> Boxed:
    """Make a program callable.

    Args:
        stages: the compiled stage modules by name.
        strided: whether stages require the strides that they were compiled for.

    Returns:
        a boxed function. Its source is the text that ``plan.write`` writes, and tracebacks quote it.
    """
    text = program_text(program)
    filename = f"<roundpipe_fx {program.name} program {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    streams = _streams(program)
    namespace: dict[str, Any] = {**stages, "torch": torch, "streams": streams}
    exec(compile(text, filename, "exec"), namespace)
    body = namespace[program.name]

    inputs = program.module.graph.find_nodes(op="placeholder")
    tensors = {
        index: functools.partial(_zeros, node.meta["val"], strided or Mark.STRIDED in node.meta)
        for index, node in enumerate(inputs)
        if isinstance(node.meta.get("val"), torch.Tensor)
    }

    def run(arguments: list[Any]) -> tuple[Any, ...]:
        for index, zeros in tensors.items():  # no name for a value here: the program holds the last reference
            if arguments[index] is None:
                arguments[index] = zeros()
        with streams.running():
            touch_libraries(*streams.used)
            return body(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    weakref.finalize(run, linecache.cache.pop, filename, None)
    return run


def _zeros(traced: torch.Tensor, strided: bool) -> torch.Tensor:
    """The gradient of an output that was not used; tokens of effects have no elements and no memory."""
    if any(isinstance(size, int) and not size for size in traced.shape):
        return torch.empty(traced.shape, dtype=traced.dtype, device=traced.device)
    return incoming_gradient(None, ExpectedGradient.of(traced, traced), strided)


def _streams(program: Program) -> NoStreams | AcceleratorStreams:
    graph = program.module.graph
    events = graph.find_nodes(op="call_function", target=torch.ops.streams.record_event.default)
    values = (node.meta.get("val") for node in graph.nodes if node.op == "placeholder")
    devices = {value.device for value in values if isinstance(value, torch.Tensor)} - _WITHOUT_STREAMS
    if not devices:
        return NoStreams()
    return AcceleratorStreams(min(devices, key=str), len(events))


_WITHOUT_STREAMS = {torch.device("cpu"), torch.device("meta")}
