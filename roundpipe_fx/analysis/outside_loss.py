"""The loss outside the model: memory of a loss that the caller computes from a model's outputs.

Code between the forward and the backward is not traced. If a model returns no loss, the loss is computed from its
outputs, and a plan reserves memory for that.

- A cross-entropy takes three times the bytes of the outputs: the logarithms of the softmax, their gradient, and the
  gradient of the outputs, which is the incoming one. It is assumed for models that get integers only, as language
  models do, whose outputs are large.
- The mean of a squared error that is written out, ``((output - target) ** 2).mean()``, takes five times the bytes: the
  difference, the gradient of the mean, and three intermediate results of the gradient of the square. The scalar that
  ``mse_loss`` returns is a view of memory of the output's size, which stays allocated until the backward is over. It is
  assumed for all other models.
- If a model returns a loss, its other outputs are assumed not to be differentiated. If a step passes gradients of other
  outputs, the next plan reserves memory for a loss of all outputs; likewise if a model returns several scalars, which
  have to be added up.
- Where outputs are views of one value, AOTAutograd's graph gets the gradient of that value alone. Those of expanded
  views are larger: a loss takes as many times more, and the views' own gradients are allocated besides.
- Under autocast losses are computed with four bytes per number, whatever the dtype of the outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

from roundpipe_fx.analysis.cost.model import dense_bytes, tensor_bytes
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, tensor_values, viewed
from roundpipe_fx.torch_private import differentiated_outputs

_CROSS_ENTROPY = (3, 0)
_SQUARED_ERROR = (5, 1)
"""Peak of a loss, and bytes that last until the backward is over, as multiples of an output's bytes."""
_NUMBER = 8
"""Bytes of the loss itself, and of the number of labels."""


def expect_loss(joint: JointGraph, autocast: Collection[str], observed_tangents: Collection[str] = ()) -> JointGraph:
    """Annotate incoming gradients with the memory that a loss outside the model may take for each output.

    Args:
        autocast: types of devices for which autocast is enabled.
        observed_tangents: names of incoming gradients that steps have passed although the model returns a scalar.

    Returns:
        the graph.
    """
    inputs = [value for node in joint.primals if node not in joint.parameters for value in tensor_values(node)]
    # A model that computes its own cross-entropy returns other outputs for a different kind of loss.
    words = bool(inputs) and not observed_tangents and not any(value.is_floating_point() for value in inputs)
    # A value that is returned as itself has its own gradient; only views of it multiply.
    times = _times_of_views(joint)
    for node in joint.tangents:
        if node.name in observed_tangents:
            node.meta[Mark.OBSERVED_TANGENT] = True
        for value in tensor_values(node):
            # float32 losses of bfloat16 outputs under autocast: 4 / 2 = 2 times the bytes.
            wider = max(4 // value.dtype.itemsize, 1) if value.device.type in autocast else 1
            peak, lasting = _CROSS_ENTROPY if words else _SQUARED_ERROR
            larger = times.get(node, 0)
            # The factor applies to the loss's intermediate results, and the views' own gradients are allocated once
            # more: `times * larger + larger`.
            peak, lasting = (peak * larger + larger, lasting * larger) if larger else (peak, lasting)
            node.meta[Mark.LOSS_TIMES] = wider * peak, wider * lasting
    return joint


def _times_of_views(joint: JointGraph) -> dict[fx.Node, int]:
    """By incoming gradient, how many times its bytes the returned views of its value have, if these have more."""
    returned = [node for node in dict.fromkeys(joint.returned) if isinstance(node, fx.Node)]
    times = {}
    for node, position in zip(joint.tangents, differentiated_outputs(joint.module), strict=False):
        value = joint.outputs[position]
        views = [] if value in returned else [view for view in returned if viewed(view) is viewed(value)]
        size = sum(dense_bytes(tensor) for tensor in tensor_values(value))
        view_bytes = sum(dense_bytes(tensor) for view in views for tensor in tensor_values(view))
        if view_bytes > size > 0:
            # Rounded up: views of two and a half times the value's bytes count as three times.
            times[node] = -(-view_bytes // size)
    return times


def loss_bytes(tangents: Collection[fx.Node], granularity: int = 1) -> int:
    """Peak bytes of a loss outside the model, without the incoming gradients.

    Args:
        tangents: the incoming gradients that a step is expected to get. If exactly one of them is a scalar's, that is
            the loss, and nothing is computed outside.
        granularity: bytes that the device's allocator rounds sizes up to.
    """
    return _bytes(tangents, granularity, 0)


def lasting_bytes(tangents: Collection[fx.Node], granularity: int = 1) -> int:
    """Bytes of a loss outside that stay allocated until the backward is over. Arguments as for :func:`loss_bytes`."""
    return _bytes(tangents, granularity, 1)


def output_bytes(joint: JointGraph, outputs: Iterable[int]) -> int:
    """Bytes of outputs of the forward, as a caller sees them."""
    unread = {position: [output.value] for position, output in joint.unread.items()}
    values = (unread.get(position) or tensor_values(joint.outputs[position]) for position in outputs)
    return tensor_bytes([value for tensors in values for value in tensors])


def returned_view_bytes(joint: JointGraph, granularity: int = 1) -> int:
    """Bytes of gradients that come from returned views of inputs: allocated outside, until the backward is over.

    Autograd differentiates such an output by itself; its gradient has the size of the whole input. At the end it is
    added to the gradient that the graph computes, into a new tensor.
    """
    differentiated = {owner for owner in joint.gradient_owners if owner is not None}
    primals = joint.primals
    inputs = {primals[owner] for owner in differentiated}
    total = 0
    for position, node in enumerate(joint.forward_outputs):
        if isinstance(node, fx.Node) and position not in joint.updates and viewed(node) in inputs:
            # Twice: the gradient that autograd computes for the view, and the sum of both.
            total += 2 * _rounded(tensor_bytes(tensor_values(viewed(node))), granularity)
    return total


def _bytes(tangents: Collection[fx.Node], granularity: int, which: int) -> int:
    if not _is_outside(tangents):
        return 0
    sizes = [
        dense_bytes(value)
        for node in tangents
        for value in tensor_values(node)
        for _ in range(node.meta.get(Mark.LOSS_TIMES, _SQUARED_ERROR)[which])
    ]
    # Two numbers: the loss, and the number of labels.
    return sum(_rounded(size, granularity) for size in (*sizes, _NUMBER, _NUMBER))


def _is_outside(tangents: Collection[fx.Node]) -> bool:
    # A single scalar is the model's own loss, and nothing is computed outside.
    numbers = sum(value.dim() == 0 for node in tangents for value in tensor_values(node))
    is_observed = any(Mark.OBSERVED_TANGENT in node.meta for node in tangents)
    return bool(tangents) and (numbers != 1 or is_observed)


def _rounded(size: int, granularity: int) -> int:
    return -(-size // granularity) * granularity
