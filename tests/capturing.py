"""Captured joint graphs for testing passes: real ones, through the same front end, without the passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from roundpipe_fx.api import on_one_device
from roundpipe_fx.api.backend import make_backend
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.options import Options


class Captured(Exception):
    """Carries the graph out of the compilation."""


def capture_joint(run: Callable[..., Any], *args: Any, **kwargs: Any) -> JointGraph:
    """The joint graph of ``run`` as the passes get it."""
    found: list[JointGraph] = []

    def stop(joint: JointGraph, *_: Any, **__: Any) -> Any:
        found.append(joint)
        raise Captured

    original = on_one_device.lower
    on_one_device.lower = stop  # type: ignore[assignment]
    try:
        backend = make_backend(Options(), lambda plan: None)
        torch.compile(run, backend=backend, fullgraph=True)(*args, **kwargs)
    except Exception:
        if not found:
            raise
    finally:
        on_one_device.lower = original
        torch._dynamo.reset()
    return found[0]


def run_joint(joint: JointGraph, inputs: list[Any]) -> list[Any]:
    """Interpret the graph as it stands on real inputs: forward outputs, then gradients."""
    module = fx.GraphModule(joint.module, copy.deepcopy(joint.graph))
    module.graph.set_codegen(fx.graph.CodeGen())
    with torch.no_grad():
        return list(fx.Interpreter(module).run(*inputs))


def example_inputs(joint: JointGraph) -> list[Any]:
    """Random inputs of the right shapes."""
    made = []
    for node in joint.inputs:
        value = node.meta["val"]
        tensor = torch.empty(value.shape, dtype=value.dtype)
        made.append(tensor.normal_() if value.is_floating_point() else tensor.zero_())
    return made
