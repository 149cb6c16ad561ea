"""Compilation of one graph of Dynamo's: prepared, traced by AOTAutograd, planned and compiled by its callbacks.

AOTAutograd gets graphs of stage calls back.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx import torch_private
from roundpipe_fx.api.in_pipeline import InPipeline
from roundpipe_fx.api.learned import Learned
from roundpipe_fx.api.on_one_device import OnOneDevice
from roundpipe_fx.distributed.tensor_parallel import redistribute_gradients
from roundpipe_fx.frontend.capture import capture, prepare
from roundpipe_fx.frontend.graph_breaks import warn_of_graph_break
from roundpipe_fx.frontend.own_gradients import own_gradients
from roundpipe_fx.ir.options import Options
from roundpipe_fx.pipeline.settings import COUNT_OF_BATCH, Pipelining, StepCompileState
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.runtime.incoming_gradients import (
    drop_unused_gradients,
)
from roundpipe_fx.runtime.library_memory import library_bytes, touch_libraries, touch_libraries_in_backward
from roundpipe_fx.torch_private import UserLine


def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    registered_syncs: Collection[Any],
    on_plan: Callable[[Plan], None],
    warned: set[UserLine],
    learned: Learned | None = None,
    pipelining: Pipelining | None = None,
    compile_state: StepCompileState | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's.

    Args:
        registered_syncs: operators that the user declared to force a host sync.
        on_plan: called with each plan that is made.
        warned: lines of graph breaks that the user has been warned of; extended.
        learned: what plans assume about run time; steps extend it.
        pipelining: how microbatches are pipelined; ``None``: they are not.
        compile_state: how the first graph of the current step was cut.
    """
    learned = learned or Learned()
    warn_of_graph_break(module, warned, options.memory_budget is not None, learned.steps.runs_eagerly)
    prepare(module)
    if pipelining is not None and pipelining.over_processes:
        redistribute_gradients(module)
    labels = [torch_private.input_path(node) for node in module.graph.find_nodes(op="placeholder")]
    name = hashlib.sha256(str(module.graph).encode()).hexdigest()[:8]
    make: Callable[..., OnOneDevice | InPipeline]
    if pipelining is None:
        devices = _touched_devices(example_inputs)
        make = functools.partial(OnOneDevice, call_name=f"{name} {_shapes(example_inputs)}", own_gradients=())
    else:
        # Workers of a pipeline have streams of their own, which they have touched, or will when they start.
        devices = list(pipelining.devices) or _cuda_devices(example_inputs)
        state = compile_state or StepCompileState()
        # Each microbatch's loss is divided by the whole batch's count already, so they are summed.
        # Losses that are divided by the count of the whole batch are parts of one mean.
        parts = state.step.counted and torch_private.reads_input(module, COUNT_OF_BATCH)
        pipelining = dataclasses.replace(
            pipelining,
            offloaded=state.step.offloaded,
            loss_reduction="sum" if parts else pipelining.loss_reduction,
            optimizer=state.optimizer,
        )
        make = functools.partial(
            InPipeline, pipelining=pipelining, step=state.step, own_gradients=own_gradients(module)
        )
    compilation = make(
        options=options,
        registered_syncs=registered_syncs,
        learned=learned,
        name=name,
        operations_name=_operations_name(module),
        labels=labels,
        autocast=frozenset(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)),
        on_plan=_with_library_bytes(on_plan, devices),
    )
    return drop_unused_gradients(
        capture(module, example_inputs, compilation, labels, may_run_eagerly=pipelining is None)
    )


def _touched_devices(inputs: Sequence[Any]) -> list[torch.device]:
    """CUDA devices of the inputs, where libraries have allocated by now what they keep for the threads of a step."""
    devices = _cuda_devices(inputs)
    for device in devices:
        stream = torch.accelerator.current_stream(device)
        touch_libraries(stream)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            touch_libraries_in_backward(stream)
    return devices


def _cuda_devices(inputs: Sequence[Any]) -> list[torch.device]:
    if not torch.cuda.is_initialized():
        return []
    tensors = (value for value in inputs if isinstance(value, torch.Tensor) and value.device.type == "cuda")
    return [*dict.fromkeys(tensor.device for tensor in tensors)]


def _with_library_bytes(on_plan: Callable[[Plan], None], devices: Sequence[torch.device]) -> Callable[[Plan], None]:
    """``on_plan`` for plans that tell what libraries keep on the devices by then."""

    def tell(plan: Plan) -> None:
        kept = sum(map(library_bytes, dict.fromkeys(devices)))
        on_plan(dataclasses.replace(plan, library_bytes=kept) if kept else plan)

    return tell


def _shapes(inputs: Sequence[Any]) -> str:
    """A text that distinguishes graphs which differ only in the sizes of their inputs."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    kinds = [(str(tuple(value.shape)), str(value.dtype), value.requires_grad) for value in tensors]
    modes = torch.is_grad_enabled()
    return hashlib.sha256(f"{kinds} {modes}".encode()).hexdigest()[:8]


def _operations_name(module: fx.GraphModule) -> str:
    """A name that graphs of the same operations share, whatever their sizes, symbolic ones included.

    Which outputs a step differentiates is learned with one batch and holds for others.
    """
    sizes = (int, torch.SymInt, torch.Size)
    targets = [
        node.target if isinstance(node.target, str) else getattr(node.target, "__qualname__", str(node.target))
        for node in module.graph.nodes
        if node.op.startswith("call") and not isinstance(node.meta.get("example_value"), sizes)
    ]
    return hashlib.sha256(" ".join(targets).encode()).hexdigest()[:8]
