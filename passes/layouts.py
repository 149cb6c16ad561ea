"""layouts: restore the strides recorded in the graph.

The graph records the strides that fake kernels chose while it was traced, and much depends on them: views (``view``
fails where dimensions are not adjacent, ``as_strided`` reads other elements), operations that write over an operand
(the next kernel traverses memory in its order, which determines rounding), and the operands on which kernels are
measured. For some operators the fake kernel chooses other strides than the real one
(:mod:`roundpipe_fx.analysis.cost.real_layout`).

The pass replaces the recorded value where the real one differs, and those that follow from it
(:mod:`roundpipe_fx.analysis.recorded_values`): nothing is copied but for operations that would fail or read other
elements, with one exception. For a dimension of size 1 the real ``view`` returns another stride than its fake kernel.
This matters to group normalization alone, which tells by it whether channels lie innermost, and fails or reads another
order. A copy has the recorded strides.

Memory-efficient attention on CUDA leaves its seed and its offset on the host, and its gradient reads them there. Its
fake kernel says that they are on the device; they are recorded where they are, so nothing moves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import (
    is_plainly_contiguous,
    note_sparse_bytes,
    predict_real_values,
    results_on_host,
)
from roundpipe_fx.analysis.recorded_values import RecordedValues
from roundpipe_fx.ir.graph_edit import inherit_origin, insert_call
from roundpipe_fx.ir.joint_graph import JointGraph, has_tag, input_nodes, is_tensor, tensor_values

aten = torch.ops.aten


def restore_layouts(joint: JointGraph, device: torch.device | None = None) -> JointGraph:
    """Record the strides that values really have. Runs before annotate.

    Args:
        joint: the graph; it is rewritten.
        device: where kernels run and can be tried; ``None``: it is not present, and only pointwise operators are.

    Returns:
        The same graph.
    """
    plain: dict[fx.Node, tuple[Any, bool]] = {}

    def is_plain(node: fx.Node) -> bool:
        value = node.meta["val"]
        if node not in plain or plain[node][0] is not value:
            plain[node] = value, all(map(is_plainly_contiguous, tensor_values(node)))
        return plain[node][1]

    def predict(node: fx.Node, changed: bool) -> Sequence[torch.Tensor] | None:
        # Results of contiguous operands are contiguous too, in storages of their own size.
        simple = device is None or (is_tensor(node) and has_tag(node.target, torch.Tag.pointwise))
        if not changed and simple and all(map(is_plain, input_nodes(node))):
            return None
        return predict_real_values(node, device) if node.target.namespace == "aten" else None  # type: ignore[union-attr]

    values = RecordedValues(joint, predict)
    for node in list(joint.computed()):
        values.visit(node)
        if results_on_host(node.target):
            values.replace(node, _on_host(node.meta["val"], results_on_host(node.target)))
        if any(value.layout is not torch.strided for value in tensor_values(node)):
            note_sparse_bytes(node, device)
    _copy_single_samples(joint)
    return joint


def _on_host(results: Sequence[torch.Tensor], positions: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Results of an operator, some of them single numbers on the host."""
    # Seeds of attention: recorded where the kernel leaves them.
    values = list(results)
    for position in positions:
        with values[position].fake_mode:  # type: ignore[attr-defined]
            values[position] = torch.empty((), dtype=values[position].dtype, device="cpu")
    return tuple(values)


_NORMALIZED: dict[Any, int] = {aten.native_group_norm.default: 0, aten.native_group_norm_backward.default: 1}
"""Position of the input."""


def _copy_single_samples(joint: JointGraph) -> None:
    """Give group normalization copies of computed inputs of batch size 1 whose channels lie innermost."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(joint.computed()):
        position = _NORMALIZED.get(node.target)
        source = node.args[position] if position is not None else None
        if not isinstance(source, fx.Node) or source.op == "placeholder" or not _is_single_sample(source.meta["val"]):
            continue
        # One copy for forward and backward.
        if source not in copies:
            form = torch.channels_last if source.meta["val"].dim() == 4 else torch.channels_last_3d
            copies[source] = insert_call(source.next, aten.clone.default, source, memory_format=form)
            inherit_origin(copies[source], source)
        node.replace_input_with(source, copies[source])


def _is_single_sample(value: torch.Tensor) -> bool:
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
    if form is None or value.shape[0] != 1:
        return False
    return value.is_contiguous(memory_format=form) and not value.is_contiguous()
