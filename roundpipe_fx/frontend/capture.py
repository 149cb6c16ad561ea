"""Capture: from Dynamo's graph, through AOTAutograd, to a joint graph.

AOTAutograd calls the compiler back: once to partition the joint graph, which is where the passes run, then to compile
the forward and, at the first backward, the backward::

    Dynamo's graph ── masks, checkpoints, opaque backwards ──▶ AOTAutograd traces forward and backward
    partition(joint graph)    ──▶ forward graph and backward graph          the plan is made here
    forward(graph)            ──▶ a function of the inputs
    backward(graph)           ──▶ a function of saved values and incoming gradients; at the first backward
    inference(graph)          ──▶ instead of the three, for a graph without gradients
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from roundpipe_fx import torch_private
from roundpipe_fx.console.progress import working
from roundpipe_fx.frontend.backward_autocast import full_precision_product, warn_under_autocast
from roundpipe_fx.frontend.causal_masks import leave_out_causal_masks
from roundpipe_fx.frontend.data_assignments import copy_assigned_data
from roundpipe_fx.frontend.invalid_backward import (
    InvalidBackwardError,
    eager_graph,
    is_of_backward,
    warn_of_invalid_backward,
)
from roundpipe_fx.frontend.loss_mark import detach_all_but_loss
from roundpipe_fx.frontend.opaque_backward import OpaqueCall, opaque_backwards
from roundpipe_fx.frontend.shared_memory import (
    SharedInputs,
    run_if_shared_as_traced,
    separate_memory,
    shared_inputs,
    shared_outputs,
)
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.recompute_marks import mark_checkpoints
from roundpipe_fx.ir.resolved_branches import keep_resolved_random_branches

_BoxedFunction = Callable[[list[Any]], Any]


class Callbacks(Protocol):
    """Functions that AOTAutograd calls while it compiles one graph.

    Attributes:
        opaque: set before any call: backward calls that were made opaque, to be held until all stages are compiled.
    """

    opaque: list[OpaqueCall]

    def partition(
        self, joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph of a joint graph."""

    def forward(self, _module: fx.GraphModule, _inputs: Sequence[Any]) -> _BoxedFunction:
        """The compiled forward."""

    def backward(self, _module: fx.GraphModule, _inputs: Sequence[Any]) -> _BoxedFunction:
        """The compiled backward."""

    def inference(self, module: fx.GraphModule, _inputs: Sequence[Any]) -> _BoxedFunction:
        """A compiled graph without a backward."""


def prepare(module: fx.GraphModule) -> None:
    """Mark or replace operations of Dynamo's graph that AOTAutograd would drop, could not trace or lower otherwise, in
    place.

    Raises:
        RecomputeDataError: the model calls ``save_for_recompute`` in a way that is not allowed.
    """
    detach_all_but_loss(module)
    mark_checkpoints(module)
    leave_out_causal_masks(module)
    torch_private.spell_out_recurrence(module)
    keep_resolved_random_branches(module)
    copy_assigned_data(module)


def capture(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    compilation: Callbacks,
    labels: Sequence[tuple[str, bool]],
    may_run_eagerly: bool,
) -> Callable[..., Any]:
    """Compile Dynamo's graph with AOTAutograd.

    Args:
        compilation: the functions that AOTAutograd calls.
        labels: for each input, its path and whether it is a parameter.
        may_run_eagerly: whether calls that cannot be run as compiled are run eagerly; else they are refused.

    Returns:
        the function that Dynamo calls instead of the graph.
    """
    # Inputs that share memory are noted before tracing: a traced graph is only right for the same sharing.
    shared = shared_inputs(example_inputs)
    try:
        run, written = _compile(module, example_inputs, compilation, shared)
    except InvalidBackwardError as error:
        if not may_run_eagerly:
            raise
        warn_of_invalid_backward(error)
        return eager_graph(module)
    except _WrittenInSharedMemoryError:
        # Traced again as if nothing shared memory; calls that do are run eagerly.
        example_inputs = separate_memory(module, example_inputs, shared)
        run, written = _compile(module, example_inputs, compilation, SharedInputs((), ()))
    run = torch_private.without_class(run, example_inputs)
    eagerly = eager_graph(module) if may_run_eagerly and written else None
    return run_if_shared_as_traced(run, eagerly, example_inputs, written, labels)


class _WrittenInSharedMemoryError(Exception):
    """AOTAutograd cannot trace inputs that share memory, or the graph would be wrong."""


def _compile(
    module: fx.GraphModule, example_inputs: Sequence[Any], compilation: Callbacks, shared: SharedInputs
) -> tuple[Callable[..., Any], set[int]]:
    """The function that AOTAutograd makes, and the numbers of the inputs that it writes.

    Raises:
        _WrittenInSharedMemoryError: inputs that share memory stand in the way.
    """
    written: set[int] = set()
    products: list[fx.Node] = []
    autocast = frozenset(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    returned = bool(shared.groups) and shared_outputs(module, shared)
    with contextlib.ExitStack() as tracing:
        traced = False

        def note_written(graph: fx.GraphModule) -> None:
            nonlocal traced
            bases = torch_private.has_bases_of_inputs(graph)
            if bases and returned:
                raise _WrittenInSharedMemoryError
            positions = map(torch_private.plain_input, torch_private.mutated_inputs(graph))
            written.update(position for position in positions if position is not None)
            if bases:
                written.update(position for group in shared.groups for position in group)
            traced = True
            # The status line ends when tracing does, not when compilation does.
            tracing.close()

        def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            if is_outermost(joint):
                note_written(joint)
                product = full_precision_product(joint, autocast)
                products.extend([product] if product is not None else [])
            return compilation.partition(joint, inputs, **options)

        def forward(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            torch_private.note_no_donated_buffers()
            return torch_private.with_harmless_checks(compilation.forward(module, inputs))

        def inference(module: fx.GraphModule, inputs: Sequence[Any]) -> _BoxedFunction:
            note_written(module)
            return torch_private.with_harmless_checks(compilation.inference(module, inputs))

        tracing.enter_context(working("tracing operations, forward and backward"))
        with torch_private.aot_flags(), opaque_backwards(module) as compilation.opaque:
            compile_graph = torch_private.aot_autograd(
                fw_compiler=forward,
                bw_compiler=compilation.backward,
                inference_compiler=inference,
                partition_fn=partition,
            )
            try:
                run = compile_graph(module, example_inputs)
            except (AssertionError, RuntimeError) as error:
                # Before the joint graph exists an error is of the user's backward, or of inputs that share memory.
                if not traced and is_of_backward(error):
                    raise InvalidBackwardError(str(error)) from error
                # AOTAutograd refuses views of different dtypes, of detached tensors, and others.
                if shared.groups and not traced and not isinstance(error, torch_private.PassedThrough):
                    raise _WrittenInSharedMemoryError from error
                raise
    if products and not torch_private.autocast_of_backwards():
        run = warn_under_autocast(run, products[0])
    return run, written


def joint_graph_of(
    module: fx.GraphModule,
    num_forward_outputs: int,
    input_labels: Sequence[tuple[str, bool]],
    own_gradients: tuple[str, ...] = (),
) -> JointGraph:
    """Make a joint graph from a graph of AOTAutograd.

    Args:
        num_forward_outputs: number of its outputs that belong to the forward.
        input_labels: for each input of Dynamo's graph, its path and whether it is a parameter.
    """
    labels: dict[fx.Node, str] = {}
    parameters = set()
    names: set[str] = set()
    for node in module.graph.find_nodes(op="placeholder"):
        index = torch_private.plain_input(node)
        is_object = torch_private.is_opaque(node.meta.get("val"))  # the mesh of a DTensor, beside its local tensor
        if index is not None and index < len(input_labels) and not is_object:
            label, is_parameter = input_labels[index]
            # Names are labels for messages and files, so they have to be unique.
            # Modules in a closure or a list all appear as roots, so their parameters may have the same name.
            repeated = next(n for n in itertools.count() if (f"{label}_{n}" if n else label) not in names)
            labels[node] = f"{label}_{repeated}" if repeated else label
            names.add(labels[node])
            if is_parameter:
                parameters.add(node)
    mutated = frozenset(torch_private.mutated_inputs(module))
    torch_private.note_counts(module)
    _return_objects_of_primals(module, num_forward_outputs)
    return JointGraph(
        module=module,
        num_forward_outputs=num_forward_outputs,
        labels=labels,
        parameters=frozenset(parameters),
        mutated_inputs=mutated,
        own_gradients=own_gradients,
    )


def _return_objects_of_primals(module: fx.GraphModule, num_forward_outputs: int) -> None:
    """Let the forward return an input of its own where it returns an equal one of the backward's, in place.

    AOTAutograd knows opaque objects, such as the mesh of a DTensor, by their identity. If an incoming gradient has the
    same one as an output, the forward of the joint graph returns the gradient's.
    """
    output = module.graph.output_node()
    placeholders = module.graph.find_nodes(op="placeholder")
    primals = [node for node in placeholders if not str(node.target).startswith("tangents")]
    objects = [node for node in primals if torch_private.is_opaque(node.meta.get("val"))]
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for position, node in enumerate(results[:num_forward_outputs]):
        if isinstance(node, fx.Node) and node.op == "placeholder" and node not in primals:
            same = torch_private.is_same_object
            results[position] = next((primal for primal in objects if same(primal.meta["val"], node.meta["val"])), node)
    output.args = (tuple(results),)


def is_outermost(joint: fx.GraphModule) -> bool:
    """Return whether a graph is the model's: AOTAutograd partitions bodies of higher-order operators too."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    return not placeholders or any("desc" in node.meta for node in placeholders)
