"""AOTAutograd: the joint graph, its inputs and outputs, and registered backwards of operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    ForwardTokenAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    SyntheticBaseAOTInput,
    TangentAOTInput,
    ViewBaseAOTInput,
)
from torch._guards import TracingContext

__all__ = [
    "aot_autograd",
    "aot_flags",
    "autocast_of_backwards",
    "checkpoint_policy",
    "default_partition",
    "differentiated_outputs",
    "gradient_inputs",
    "has_bases_of_inputs",
    "input_mutations",
    "is_effect_token",
    "is_opaque",
    "is_same_object",
    "leave_unused_gradients_out",
    "mutated_inputs",
    "note_no_donated_buffers",
    "opaque_object",
    "plain_input",
    "registered_backwards",
    "returned_outputs",
    "traces",
]


def aot_autograd(**kwargs: Any) -> Callable[..., Any]:
    """``torch._dynamo.backends.common.aot_autograd``: AOTAutograd as a Dynamo backend."""
    from torch._dynamo.backends.common import aot_autograd as make

    return make(**kwargs)


def aot_flags() -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd's flags for our compilation.

    No buffers are donated, so that ``backward(retain_graph=True)`` works. The backward is traced without autocast, as
    ``loss.backward()`` runs behind the region eagerly: traced under the autocast that surrounds the forward, it
    would cast what the model computes in a region of another dtype, or of none. An autocast that the user has
    configured for backwards is kept.
    """
    return torch._functorch.config.patch(donated_buffer=False, backward_pass_autocast=autocast_of_backwards() or "off")


def autocast_of_backwards() -> list[dict[str, Any]]:
    """The autocast that the user has configured for backwards; empty: none."""
    configured = torch._functorch.config.backward_pass_autocast
    return configured if isinstance(configured, list) else []


def note_no_donated_buffers() -> None:
    """Note that the graph whose forward is being compiled has no donated buffers.

    Without the flag nothing is noted, which ``backward(retain_graph=True)`` takes for some, once there was a backward
    that did not retain the graph (seen with torch 2.13). Parameters that are tensor subclasses have notes of their own,
    which cannot be reached from here.
    """
    context = TracingContext.try_get()
    # An empty list says that nothing may be freed early; ``None`` would say nothing.
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def mutated_inputs(joint: fx.GraphModule) -> list[fx.Node]:
    """Graph inputs that AOTAutograd's epilogue updates in place from a forward output."""
    descriptions = joint.graph.output_node().meta.get("desc") or []
    mutated = {
        description.mutated_input for description in descriptions if isinstance(description, InputMutationAOTOutput)
    }
    return [node for node in joint.graph.find_nodes(op="placeholder") if node.meta.get("desc") in mutated]


def has_bases_of_inputs(graph: fx.GraphModule) -> bool:
    """Test for inputs that share memory, one of which is written: AOTAutograd makes them from one input."""
    descriptions = (node.meta.get("desc") for node in graph.graph.find_nodes(op="placeholder"))
    return any(isinstance(description, (SyntheticBaseAOTInput, ViewBaseAOTInput)) for description in descriptions)


def input_mutations(graph: fx.GraphModule) -> dict[int, int]:
    """Numbers of inputs that AOTAutograd's epilogue updates in place, by number of the output that it copies."""
    positions = {
        node.meta.get("desc"): position for position, node in enumerate(graph.graph.find_nodes(op="placeholder"))
    }
    return {
        position: positions[description.mutated_input]
        for position, description in enumerate(graph.graph.output_node().meta.get("desc") or [])
        if isinstance(description, InputMutationAOTOutput)
    }


def returned_outputs(graph: fx.GraphModule, num_forward_outputs: int) -> list[int]:
    """Numbers of the forward's outputs that Dynamo's graph returns: no new values of inputs, and no intermediate
    results that some of these are views of.

    A graph without AOTAutograd's descriptions returns all.
    """
    descriptions = graph.graph.output_node().meta.get("desc")
    positions = range(num_forward_outputs)
    return [position for position in positions if descriptions is None or _is_returned(descriptions[position])]


def _is_returned(description: Any) -> bool:
    """Test for an output of Dynamo's graph, or an inner tensor of one."""
    # An attribute of a tensor subclass (the local tensor of a DTensor) is described by what it is taken from.
    while isinstance(description, SubclassGetAttrAOTOutput):
        description = description.base
    return isinstance(description, PlainAOTOutput)


def differentiated_outputs(joint: fx.GraphModule) -> list[int]:
    """For each incoming gradient of a joint graph, the number of the forward output that it is the gradient of."""
    positions = {
        description: position for position, description in enumerate(joint.graph.output_node().meta.get("desc") or [])
    }
    descriptions = [node.meta.get("desc") for node in joint.graph.find_nodes(op="placeholder")]
    return [positions[d.output] for d in descriptions if isinstance(d, TangentAOTInput)]


def gradient_inputs(joint: fx.GraphModule, num_forward_outputs: int) -> list[int | None]:
    """For each output of a joint graph beyond the forward's, the number of the input that it is the gradient of.

    ``None``: the output is not a gradient (the token of an effect), or there is no gradient. A graph without
    AOTAutograd's descriptions has a gradient for each input.
    """
    outputs: Any = joint.graph.output_node().args[0]
    gradients = list(outputs[num_forward_outputs:])
    descriptions = joint.graph.output_node().meta.get("desc")
    # Without descriptions, gradients are in the order of the inputs.
    if descriptions is None:
        return list(range(len(gradients)))
    inputs = enumerate(joint.graph.find_nodes(op="placeholder"))
    positions = {node.meta["desc"]: position for position, node in inputs if "desc" in node.meta}
    return [
        None if gradient is None else positions.get(_differentiated_input(description))
        for gradient, description in zip(gradients, descriptions[num_forward_outputs:], strict=False)
    ]


def _differentiated_input(description: Any) -> Any:
    """The description of the input that an output is the gradient of; inner tensors of subclasses have their own."""
    if isinstance(description, SubclassGetAttrAOTOutput):
        base = _differentiated_input(description.base)
        return None if base is None else SubclassGetAttrAOTInput(base, description.attr)
    return description.grad_of if isinstance(description, GradAOTOutput) else None


def is_effect_token(placeholder: fx.Node) -> bool:
    """Return whether a graph input is a token that orders effects (assertions, printing); its value is ``None``."""
    return isinstance(placeholder.meta.get("desc"), (ForwardTokenAOTInput, BackwardTokenAOTInput))


def is_opaque(value: Any) -> bool:
    """Test for an object that PyTorch passes through graphs unread: the device mesh of a DTensor."""
    from torch._library.fake_class_registry import FakeScriptObject
    from torch._library.opaque_object import is_opaque_value

    return isinstance(value, (torch.ScriptObject, FakeScriptObject)) or is_opaque_value(value)


def opaque_object(value: Any) -> Any:
    """The object that an opaque traced value stands for."""
    return getattr(value, "real_obj", value)


def is_same_object(value: Any, other: Any) -> bool:
    """Return whether two opaque values are equal."""
    return bool(opaque_object(value) == opaque_object(other))


def plain_input(placeholder: fx.Node) -> int | None:
    """Number of the input of Dynamo's graph that a graph input is, or whose inner tensor it is; ``None``: of none."""
    description: Any = placeholder.meta.get("desc")
    while isinstance(description, SubclassGetAttrAOTInput):
        description = description.base
    return description.idx if isinstance(description, PlainAOTInput) else None


def checkpoint_policy(node: fx.Node) -> torch.utils.checkpoint.CheckpointPolicy | None:
    """The selective checkpoint policy of a node of a joint graph."""
    return node.meta.get("recompute")


def registered_backwards(targets: Sequence[Any]) -> list[Any]:
    """Definitions (``CustomOpDef``) of the operators whose backward was registered from Python."""
    from torch._library.custom_ops import OPDEFS

    definitions = {}
    for target in targets:
        # One overload has the operator's name without the overload's; a packet has only that.
        if isinstance(target, torch._ops.OpOverload):
            name = target._schema.name
        elif isinstance(target, torch._ops.OpOverloadPacket):
            name = target._qualified_op_name
        else:
            continue
        definition = OPDEFS.get(name)
        if definition is not None and definition._backward_fn is not None:
            definitions[name] = definition
    return list(definitions.values())


def traces(function: Callable[[], Any], tensors: Sequence[Any]) -> bool:
    """Return whether ``function`` runs on fake tensors without reading data. It is not recorded in a graph.

    Args:
        tensors: some of the fake tensors that it reads, which give the shape environment.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    mode = torch._guards.detect_fake_mode(tensors)
    shape_env = mode.shape_env if mode is not None else None
    # Symbols that the trial creates are bound nowhere, which PyTorch would report as an error.
    fresh = shape_env.ignore_fresh_unbacked_symbols() if shape_env is not None else contextlib.nullcontext()
    try:
        with disable_proxy_modes_tracing(), fresh:
            function()
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode):
        return False
    return True


def default_partition(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's default partition, without recomputation."""
    from torch._functorch.partitioners import default_partition as partition

    return partition(*args, **kwargs)


def leave_unused_gradients_out(output: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Make autograd pass ``None`` instead of zeros to a compiled backward for unused outputs.

    Args:
        output: an output of one of our programs, returned by AOTAutograd. Its backward must accept ``None``.

    Returns:
        the node of the call, if it has a backward.
    """
    node: Any = output.grad_fn
    # The class is made in a function, so it is told by its name, which the canary looks for.
    if type(node).__name__ != "CompiledFunctionBackward":
        return None
    # ``None`` instead of zeros for outputs whose gradients nobody gives: zeros would take memory.
    node.set_materialize_grads(False)
    return node
