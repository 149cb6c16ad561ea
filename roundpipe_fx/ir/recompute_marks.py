"""Marks of recompute regions and saved data in a traced graph.

- ``torch.utils.checkpoint`` is a higher-order operation with a body in Dynamo's graph. :func:`mark_checkpoints` records
  in each node of a body which checkpoints contain it, where it survives AOTAutograd (``node.meta["custom"]``).
- ``save_for_recompute`` is an operator without a result, whose inputs are to be saved.
- A ``gradient_checkpoint_scope`` uses ``torch.fx.traceback.annotate``, and so does a checkpoint whose inputs are to be
  on the host.
- So does a *region* (:func:`memory_budget`), a part of a model's ``forward`` that has its own budget. Outside of
  compilation it does nothing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from roundpipe_fx.budget import parse_budget
from roundpipe_fx.ir.source import find_source
from roundpipe_fx.torch_private import (
    PassedThrough,
    checkpoint_body,
    checkpoint_policy,
    module_path_text,
    passed_through,
    traced_forward_call,
)

_CHECKPOINTS = "roundpipe_fx_checkpoints"
_INPUTS_ON_HOST = "roundpipe_fx_inputs_on_host"
_SCOPE = "roundpipe_fx_scope"


class RecomputeDataError(PassedThrough, ValueError, RuntimeError):
    """A model calls ``save_for_recompute`` in a way that is not allowed. Raised when the model is compiled."""


@torch.library.custom_op("roundpipe_fx::save_for_recompute", mutates_args=())
def _save_for_recompute(data: list[torch.Tensor], call: int) -> None:
    """Marks what a call of a module's ``forward`` saves for recomputation; does nothing when it runs."""


@_save_for_recompute.register_fake
def _(data: list[torch.Tensor], call: int) -> None:
    return None


_SAVE = torch.ops.roundpipe_fx.save_for_recompute.default
# Without this the operator, which has no result, would be dropped from graphs as dead.
fx.node.has_side_effect(_SAVE)


def save_in_graph(tensors: Sequence[torch.Tensor]) -> None:
    """Record in the graph that is being traced that tensors are to be saved."""
    if len(tensors):
        torch.ops.roundpipe_fx.save_for_recompute(list(tensors), traced_forward_call())


def saves_for_recompute(node: fx.Node) -> bool:
    """Return whether a node is a mark of :func:`save_in_graph`."""
    return node.target is _SAVE


def annotated_scope() -> Generator[None, None, None]:
    """Annotate operations that are traced between the first and the second step as in a gradient checkpoint scope.

    A generator and not a context manager, because Dynamo traces ``with`` inside a generator, but not the ``__enter__``
    of a context manager that is stored in an object.
    """
    with torch.fx.traceback.annotate({_SCOPE: True}):
        yield


def inputs_on_host() -> contextlib.AbstractContextManager[None]:
    """Context manager in which the inputs of a checkpoint that is traced are to be on the host until the backward."""
    return torch.fx.traceback.annotate({_INPUTS_ON_HOST: True})


def mark_checkpoints(module: fx.GraphModule) -> None:
    """Record in the bodies of checkpoints in Dynamo's graph which checkpoints contain each node.

    Raises:
        RecomputeDataError: gradients are enabled, and ``save_for_recompute`` is called twice in one forward of a
            layer, or with a tensor that requires grad.
    """
    _mark(module, (), itertools.count())


def _mark(module: fx.GraphModule, inside: tuple[tuple[int, bool, bool], ...], numbers: Iterator[int]) -> None:
    saves: set[Any] = set()
    for node in module.graph.nodes:
        if inside:
            node.meta["custom"] = {**(node.meta.get("custom") or {}), _CHECKPOINTS: inside}
        body = checkpoint_body(module, node)
        if body is not None:
            preserve = bool(node.kwargs.get("preserve_rng_state", True))
            # Debugging records recomputed operations, which does not work while tracing.
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "debug"}
            on_host = _INPUTS_ON_HOST in (node.meta.get("custom") or {})
            _mark(body, (*inside, (next(numbers), preserve, on_host)), numbers)
        elif node.target is torch.ops.roundpipe_fx.save_for_recompute and torch.is_grad_enabled():
            _check_saved(node)
            # A checkpointed function counts as a layer; outside of checkpoints, a call of a module does.
            layer = None if inside else node.args[1]
            if layer in saves:
                raise RecomputeDataError(
                    f"save_for_recompute was called a second time in one forward of layer {_layer(node)}. Save "
                    f"everything in one call: save_for_recompute(a, b).\n{find_source(node)}"
                )
            saves.add(layer)


def _check_saved(node: fx.Node) -> None:
    for source in node.all_input_nodes:
        value = source.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise RecomputeDataError(
                f"save_for_recompute in layer {_layer(node)}: {source.name} of shape {tuple(value.shape)} requires "
                "grad. What is saved is not differentiated through; save tensor.detach(), or let it be recomputed."
                f"\n{find_source(node)}"
            )


def _layer(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "the model"
    path, kind = stack[-1]
    name = kind if isinstance(kind, str) else kind.__name__
    return f"{module_path_text(path) or 'the model'} ({name.rpartition('.')[2]})"


def read_checkpoints(node: fx.Node) -> tuple[int, ...]:
    """Read the numbers of the checkpoints that contain a node, outermost first."""
    return tuple(number for number, *_ in (node.meta.get("custom") or {}).get(_CHECKPOINTS, ()))


def offloading_inputs(node: fx.Node) -> tuple[int, ...]:
    """Numbers of the checkpoints that contain a node and whose inputs are to be on the host, outermost first."""
    return tuple(number for number, _, on_host in (node.meta.get("custom") or {}).get(_CHECKPOINTS, ()) if on_host)


def keeps_generator_state(node: fx.Node) -> bool:
    """Return whether a random operation may be replayed from a saved generator state, according to its checkpoints."""
    return all(preserve for _, preserve, _ in (node.meta.get("custom") or {}).get(_CHECKPOINTS, ()))


def is_in_scope(node: fx.Node) -> bool:
    """Return whether a node is in a gradient checkpoint scope."""
    return _SCOPE in (node.meta.get("custom") or {})


def read_policy(node: fx.Node) -> torch.utils.checkpoint.CheckpointPolicy | None:
    """Read the selective checkpoint policy of a node; ``None`` outside of checkpoints, or without a policy."""
    return checkpoint_policy(node) if read_checkpoints(node) else None


_KEY = "roundpipe_fx_budget"


def memory_budget(budget: int | float | str) -> AbstractContextManager[Any]:
    """Context manager that bounds the bytes saved, from forward to backward, of the values computed inside.

    ::

        def forward(self, x):
            with roundpipe_fx.memory_budget(0.3):
                x = self.expensive(x)
            return self.head(x)

    Regions nest; a value counts for the innermost region that computes it. Values that leave a segment are saved if the
    plan continues from them. Together with a budget of the whole step, a region is an additional constraint. It has no
    effect outside of a model that is compiled with roundpipe_fx.

    Args:
        budget: bytes of saved values (``int``, or a size like ``"512MiB"``), or a share in [0, 1]: 0 saves as little
            as possible, 1 everything.

    Returns:
        the context manager.

    Raises:
        ValueError: ``budget`` is out of range, or a text that is not a size. Raised at once outside of compilation,
            else when the model is planned.
        TypeError: ``budget`` has another type.
    """
    if not torch.compiler.is_compiling():
        parse_budget(budget)
    return torch.fx.traceback.annotate({_KEY: budget})


def read_region_budget(node: fx.Node) -> int | float | None:
    """Read the budget of the innermost region that a node was traced in; ``None`` outside of any region."""
    try:
        return parse_budget((node.meta.get("custom") or {}).get(_KEY))
    except (TypeError, ValueError) as error:
        raise passed_through(error) from None
