"""Forms in which a forward value is recomputed: by the same operation, or with fewer inputs.

- Of a hoisted ``sort`` or ``topk`` only the indices are saved; the values are gathered by them.
- The mask of a dropout depends on the generator's state and on the shape of the dropout's input, not on its values.
  Where only the mask is needed it is drawn with the shape of the incoming gradient, and the dropout's input need not be
  recomputed.
- A recomputed batch norm that used the batch's statistics does not read running statistics, which it only updates. They
  have changed by then, and would have to be copied before.
"""

from __future__ import annotations

import enum
import operator

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, input_nodes, tensor_values
from roundpipe_fx.ir.ordered_gather import gather_in_order, memory_order

aten = torch.ops.aten

_STATE_BYTES = {"cpu": 5056, "cuda": 16}

_SELECTIONS = {
    aten.topk.default: 2,
    aten.sort.default: 1,
    aten.sort.stable: None,
    aten.cummax.default: 1,
    aten.cummin.default: 1,
}
"""Operators that select along a dimension, and the position of the argument ``dim``."""


class Form(enum.StrEnum):
    """The form in which a forward operation is recomputed."""

    SAME = "same"
    GATHER = "gather"
    MASK = "mask"


def selection(values: fx.Node) -> tuple[fx.Node, int, fx.Node] | None:
    """For the values of a hoisted selection: its source, its dimension and its indices.

    Returns:
        ``None`` if ``values`` is not a selection's, if the indices are not in the graph, or if gathered values would
        have another layout.
    """
    # Item 0 are the values; item 1, the indices, is what is saved.
    if values.target is not operator.getitem or values.args[1] != 0:
        return None
    (maker,) = input_nodes(values)
    if maker.target not in _SELECTIONS or Mark.MUST_SAVE not in maker.meta:
        return None
    indices = [user for user in maker.users if user.target is operator.getitem and user.args[1] == 1]
    if not indices or memory_order(values.meta["val"]) is None:
        return None
    position = _SELECTIONS[maker.target]
    # The dimension is the last one unless it is given, by position or by name.
    dim = maker.args[position] if position is not None and len(maker.args) > position else maker.kwargs.get("dim", -1)
    source = maker.args[0]
    assert isinstance(source, fx.Node) and isinstance(dim, int)
    return source, dim, indices[0]


def is_mask_only(mask: fx.Node) -> bool:
    """Test for the mask of a dropout all of whose readers in the backward have a gradient of the input's shape."""
    if mask.target is not operator.getitem or mask.args[1] != 1:
        return False
    (maker,) = input_nodes(mask)
    if maker.target is not aten.native_dropout.default:
        return False
    # One reader that cannot use the gradient's shape needs the dropout's input.
    later = [user for user in mask.users if user.op != "output" and user.meta.get(Mark.PHASE) is not Phase.FORWARD]
    return bool(later) and all(find_rng_shape_source(mask, user) is not None for user in later)


def find_rng_shape_source(mask: fx.Node, reader: fx.Node) -> fx.Node | None:
    """Find the gradient with the shape and layout of the input of the dropout that drew ``mask``; ``None`` if none
    has."""
    if reader.target not in (aten.native_dropout_backward.default, aten.mul.Tensor) or reader.args[1] is not mask:
        return None
    gradient = reader.args[0]
    (maker,) = input_nodes(mask)
    source = maker.args[0]
    assert isinstance(gradient, fx.Node) and isinstance(source, fx.Node)
    left, right = gradient.meta["val"], source.meta["val"]
    # As text: comparing symbolic sizes would add guards.
    alike = (
        left.dtype == right.dtype
        and left.device == right.device
        and str((left.shape, left.stride())) == str((right.shape, right.stride()))
        and str(left.storage_offset()) == str(right.storage_offset()) == "0"
    )
    return gradient if alike else None


def state_bytes(node: fx.Node) -> int:
    """Bytes of the generator state that is saved to replay ``node``."""
    return _STATE_BYTES.get(tensor_values(node)[0].device.type, 16)


def repetition(joint: JointGraph, original: fx.Node, form: Form, before: fx.Node) -> fx.Node:
    """Insert a copy of a forward node, which reads what the original reads.

    Its annotations are copied from the original and have to be updated unless ``form`` is ``Form.SAME``.

    Args:
        form: the form of the copy.
        before: the node before which the copy is inserted.
    """
    with joint.graph.inserting_before(before):
        picked = selection(original) if form is Form.GATHER else None
        copy = joint.graph.node_copy(original) if picked is None else _gathering(joint.graph, picked, original)
    # Unbacked symbols are bound where the original is: a copy must not bind them again.
    copy.meta = {key: value for key, value in original.meta.items() if key != "unbacked_bindings"}
    # The statistics' new values are not read: they belong to the forward, which has made them.
    if updates_statistics_alone(original):
        source, weight, bias, _, _, in_training, momentum, epsilon = original.args
        copy.target = aten._native_batch_norm_legit.no_stats
        copy.args = (source, weight, bias, in_training, momentum, epsilon)
        copy.meta["val"] = tuple(original.meta["val"][:3])
    copy.meta[Mark.ORIGIN] = original.name
    return copy


def _gathering(graph: fx.Graph, picked: tuple[fx.Node, int, fx.Node], values: fx.Node) -> fx.Node:
    order = memory_order(values.meta["val"])
    assert order is not None
    # Values in row-major order are what ``gather`` returns by itself.
    if order == tuple(range(len(order))):
        return graph.call_function(aten.gather.default, picked)
    return graph.call_function(gather_in_order, (*picked, order))


def updates_statistics_alone(node: fx.Node) -> bool:
    """Test for a batch norm that only updates its running statistics, which only the output reads."""
    if node.target is not aten._native_batch_norm_legit_functional.default or node.args[5] is not True:
        return False
    source, weight, running = (node.args[position] for position in (0, 1, 3))
    assert isinstance(source, fx.Node) and isinstance(running, fx.Node)
    # The kernel computes in the dtype of the running statistics or, without them, of the weight or the source.
    base = weight if isinstance(weight, fx.Node) else source
    new = [user for user in node.users if user.target is operator.getitem and user.args[1] in (3, 4)]
    return base.meta["val"].dtype is running.meta["val"].dtype and all(
        reader.op == "output" for statistic in new for reader in statistic.users
    )
