"""Real layouts: the strides of a node's results where fake kernels may compute others.

Fake kernels of operators that are decompositions order a result's dimensions like another operand than the real kernel
does, or choose other strides for dimensions of size 1. The latter do not change addresses, but kernels choose the order
of their loops by them, and thereby the rounding.

A pointwise operator is run on small tensors with the layouts of its operands, which determines its result's layout.
Sizes 0, 1 and 2 stay, larger ones become 3, and the order of strides stays::

    operand     sizes (8, 512, 12, 64), a transposed view     strides (393216, 64, 32768, 1)
    small       sizes (3, 3, 3, 3)                            strides (27, 3, 9, 1)         what the kernel gets
    result      strides (27, 3, 9, 1) as well, so those of the operand; (27, 9, 3, 1) would be those of a dense result

Other operators are run as they are, which measures their workspace too (:mod:`roundpipe_fx.analysis.cost.probe`).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost.model import note_bytes, tensor_bytes
from roundpipe_fx.analysis.cost.operand_kinds import OperandKind
from roundpipe_fx.analysis.cost.probe import TensorLayout, probe_in_thread
from roundpipe_fx.analysis.cost.synthetic import fill_operands, is_on_host, run_alone
from roundpipe_fx.analysis.cost.workspace import is_measured
from roundpipe_fx.ir.joint_graph import has_tag, is_seeded, is_view, tensor_values
from roundpipe_fx.torch_private import number_hint, size_hint, tree_leaves, tree_map_only, without_modes

log = logging.getLogger(__name__)

ValueOf = Callable[[fx.Node], Any]
"""Returns the value that a node is assumed to have."""

_LARGEST_SMALL = 3
_MOST_ELEMENTS = 2**20
"""Of a small tensor whose sizes are arguments."""
_FOREIGN = 1009
"""From here on: strides in small tensors, of dimensions of size 1, that are unrelated to other strides."""


def layout_of(value: torch.Tensor) -> TensorLayout:
    """Sizes and strides of a fake tensor as numbers."""
    return TensorLayout(tuple(map(size_hint, value.shape)), tuple(map(size_hint, value.stride())))


def is_plainly_contiguous(value: torch.Tensor) -> bool:
    """Test for a contiguous tensor whose dimensions of size 1 have the strides of one as well."""
    if value.layout is not torch.strided:
        return False
    sizes, strides = layout_of(value)
    # Row-major: from the last dimension on, each stride is the product of the sizes behind it. ``[4, 1, 3]`` has ``(3,
    # 3, 1)``.
    following = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if stride != following:
            return False
        following *= max(size, 1)
    return True


def predict_real_values(node: fx.Node, device: torch.device | None) -> list[torch.Tensor] | None:
    """Fake tensors with the layouts of a node's real results, flattened; the recorded ones where these are right.

    Args:
        node: a PyTorch operator that computes on fake tensors.
        device: where kernels can be run; ``None``: it is not present.

    Returns:
        ``None`` if nothing is known.
    """
    # A pointwise operator's layout follows from small tensors as well, without running the real sizes.
    if device is not None and is_measured(node, device) and not has_tag(node.target, torch.Tag.pointwise):
        probe = probe_in_thread(node, device)
        operands = [value for source in node.all_input_nodes for value in tensor_values(source)]
        if probe is not None:
            kept = zip(probe.layouts, probe.storages, strict=True)
            storages = iter([size for layout, size in kept if layout is not None])

            def value(noted: torch.Tensor, layout: TensorLayout) -> torch.Tensor | None:
                return _extend_storage(_apply_layout(noted, layout, operands), next(storages))

            return _values(node, probe.layouts, value)
    return None if is_seeded(node) or _has_known_order(node) else probe_small_values(node)


def note_real_values(node: fx.Node, device: torch.device) -> None:
    """Record the real layouts of the results of an operation that was added to a graph.

    Args:
        node: an operation on fake tensors that have their real layouts.
        device: where kernels run.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten" or is_view(node):
        return
    values = predict_real_values(node, device)
    if values is not None:
        remaining = iter(values)
        node.meta["val"] = tree_map_only(torch.Tensor, lambda _: next(remaining), node.meta["val"])


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


def _has_known_order(node: fx.Node) -> bool:
    """Return whether the result's strides do not depend on the operands'."""
    target: Any = node.target
    return target.overloadpacket in _PRODUCTS


def note_sparse_bytes(node: fx.Node, device: torch.device | None) -> None:
    """Record the bytes of a sparse result, whose number of elements its fake kernel does not tell."""
    values = [value for value in tensor_values(node) if value.layout is not torch.strided]
    if len(values) == 1 and device is not None and is_measured(node, device):
        probe = probe_in_thread(node, device)
        # `left` counts what the result holds beside its operands.
        if probe is not None:
            operands = [value for source in node.all_input_nodes for value in tensor_values(source)]
            note_bytes(values[0], probe.retained + tensor_bytes(operands))  # it may share memory with its operands


def probe_small_values(
    node: fx.Node, value_of: ValueOf = lambda node: node.meta.get("val")
) -> list[torch.Tensor] | None:
    """Like :func:`predict_real_values`, but determined by running the operator on small tensors with the layouts of its
    operands.

    Args:
        node: a PyTorch operator that computes on fake tensors.
        value_of: returns the values that operands are assumed to have.
    """
    scale = _Scale()

    def argument(operand: Any) -> Any:
        if isinstance(operand, list | tuple):
            return tuple(map(argument, operand))
        value = value_of(operand) if isinstance(operand, fx.Node) else operand
        if isinstance(value, torch.Tensor):
            return scale.small(value) if value.layout is torch.strided else None
        return number_hint(value)

    # Constant lists of numbers stay as they are: a list of a million would be a call as large as the real one.
    if not node.all_input_nodes or any(map(_is_large, node.args)):
        return None
    args = argument(node.args)
    kwargs = tuple((name, argument(value)) for name, value in node.kwargs.items() if name != "device")
    try:
        layouts = _run_small(node.target, args, kwargs)
    except TypeError:  # an argument without a hash
        return None
    return None if layouts is None else _values(node, layouts, scale.large)


def _is_large(argument: Any) -> bool:
    """Return whether an argument may be the sizes of a tensor that is not small, whatever the operands are."""
    numbers = [number_hint(item) for item in argument if not isinstance(item, fx.Node)] if _is_list(argument) else []
    return math.prod(number for number in numbers if type(number) is int and number > 0) > _MOST_ELEMENTS


def _is_list(argument: Any) -> bool:
    return isinstance(argument, list | tuple)


def _values(
    node: fx.Node,
    layouts: Sequence[TensorLayout | None],
    value: Callable[[torch.Tensor, TensorLayout], torch.Tensor | None],
) -> list[torch.Tensor] | None:
    noted = tensor_values(node)
    strided = [layout for layout in layouts if layout is not None]
    if len(strided) != len(noted) or len(layouts) != len(tree_leaves(node.meta.get("val"))):
        return None
    values = []
    for tensor, layout in zip(noted, strided, strict=True):
        if tensor.layout is not torch.strided or len(layout.sizes) != tensor.dim():
            return None
        result = value(tensor, layout)
        if result is None:
            return None
        values.append(tensor if 0 in layout.sizes else result)
    return values


@dataclass(frozen=True)
class _Small:
    """A small tensor with the order of dimensions of another one."""

    layout: TensorLayout
    dtype: torch.dtype
    device: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.layout.sizes


class _Scale:
    """Maps tensors to small ones, and layouts of small results back. Keeps the strides of dimensions of size 1."""

    def __init__(self) -> None:
        self._operands: list[tuple[TensorLayout, torch.Tensor]] = []
        self._foreign: dict[int, int] = {}

    def small(self, value: torch.Tensor) -> _Small:
        """The small tensor of an operand."""
        sizes, strides = layout_of(value)
        # Sizes 0, 1, 2 stay, all larger ones are 3: enough for a kernel to see the order of strides.
        small = tuple(min(size, _LARGEST_SMALL) for size in sizes)
        small_sizes = [0] * len(sizes)
        small_stride_of = {0: 0}
        following, small_following = 1, 1
        for dim in _sort_inner_first(sizes, strides):
            # An expanded dimension (stride 0) is expanded in the small tensor, too.
            if not strides[dim]:
                continue
            if strides[dim] > following:  # kernels ask whether a tensor has gaps
                small_following *= 2
            small_stride_of[strides[dim]] = small_sizes[dim] = small_following
            following, small_following = strides[dim] * sizes[dim], small_following * small[dim]
            # The stride that a dimension around all of them would have, as a dimension of size 1 often does.
            small_stride_of.setdefault(following, small_following)
        small_stride_of.setdefault(1, 1)
        for dim, size in enumerate(sizes):
            if size == 1:
                # A stride that is none of the tensor's own stands for itself: if it comes back in the result, `large`
                # knows it again.
                small_sizes[dim] = (
                    small_stride_of[strides[dim]] if strides[dim] in small_stride_of else self._stand_in(strides[dim])
                )
        layout = TensorLayout(small, tuple(small_sizes))
        self._operands.append((layout, value))
        return _Small(layout, value.dtype, value.device.type)

    def _stand_in(self, stride: int) -> int:
        return self._foreign.setdefault(stride, _FOREIGN + len(self._foreign))

    def large(self, noted: torch.Tensor, small: TensorLayout) -> torch.Tensor | None:
        """The fake tensor ``noted`` with the layout of a small result; ``None`` if it cannot be determined."""
        if small.sizes != tuple(min(size_hint(size), _LARGEST_SMALL) for size in noted.shape):
            return None
        shape = str(tuple(noted.shape))
        # A result that lies like an operand has its strides, gaps included.
        for layout, operand in self._operands:
            if layout == small and str(tuple(operand.shape)) == shape:
                return _with_strides_of(noted, operand)
        stride_of: dict[int, Any] = {0: 0}
        following, small_following = 1, 1
        strides: list[Any] = [0] * noted.dim()
        for dim in _sort_inner_first(small.sizes, small.strides):
            if small.strides[dim] != small_following:
                return None  # it has gaps, as no operand has
            stride_of[small_following] = strides[dim] = following
            following, small_following = following * noted.shape[dim], small_following * small.sizes[dim]
        stride_of.setdefault(small_following, following)
        stride_of.setdefault(1, 1)
        stride_of.update({stand_in: stride for stride, stand_in in self._foreign.items()})
        for dim, size in enumerate(small.sizes):
            if size == 1:
                if small.strides[dim] not in stride_of:
                    return None
                strides[dim] = stride_of[small.strides[dim]]
        return _with_strides(noted, strides)


def _sort_inner_first(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dimensions of size above 1, from the innermost in memory to the outermost."""
    # Expanded dimensions have equal strides (0); of equal ones the later dimension is the inner one.
    return sorted((dim for dim, size in enumerate(sizes) if size > 1), key=lambda dim: (strides[dim], -dim))


@functools.lru_cache(maxsize=4096)
def _run_small(target: Any, args: Any, kwargs: tuple[tuple[str, Any], ...]) -> tuple[TensorLayout | None, ...] | None:
    def real(value: _Small, kind: OperandKind | None) -> torch.Tensor:
        sizes, strides = value.layout
        # The address of the last element: strides with gaps reach beyond the number of elements.
        reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
        numbers = torch.ones(max(reach, 1), dtype=value.dtype, device="cpu" if is_on_host(kind) else value.device)
        return numbers.as_strided(sizes, strides)

    with without_modes(), torch.no_grad():
        try:
            operands, named_operands = fill_operands(target, args, dict(kwargs), real)
            result = run_alone(target, operands, named_operands)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
            # No such kernel, no such device, or small tensors do not suit the operator: nothing is known of it.
            log.info("the layout of the result of %s cannot be probed: %s", target, error)
            return None
    return tuple(
        TensorLayout(tuple(leaf.shape), tuple(leaf.stride())) if isinstance(leaf, torch.Tensor) else None
        for leaf in tree_leaves(result)
    )


def _apply_layout(noted: torch.Tensor, layout: TensorLayout, operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The fake tensor ``noted`` with the layout of a real result; ``None`` if it cannot be determined."""
    traced = layout_of(noted)
    if traced == layout or traced.sizes != layout.sizes:
        return noted
    if all(isinstance(size, int) for size in noted.shape):
        return _with_strides(noted, layout.strides)
    shape = str(tuple(noted.shape))
    for operand in operands:
        if operand.layout is torch.strided and str(tuple(operand.shape)) == shape and layout_of(operand) == layout:
            return _with_strides_of(noted, operand)
    # Sizes are symbolic: strides are products of them.
    strides: list[Any] = [0] * noted.dim()
    following, reached = 1, 1
    # Dimensions of size 1 first among equal strides: their stride is that of the next dimension inside.
    for dim in sorted(range(noted.dim()), key=lambda dim: (layout.strides[dim], layout.sizes[dim] > 1, -dim)):
        if layout.strides[dim] != reached:
            return None
        strides[dim] = following
        following, reached = following * noted.shape[dim], reached * layout.sizes[dim]
    return _with_strides(noted, strides)


def _with_strides_of(noted: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    return _with_strides(noted, operand.stride())


def _with_strides(noted: torch.Tensor, strides: Sequence[Any]) -> torch.Tensor:
    if str(noted.stride()) == str(tuple(strides)):  # as text: comparing symbols would add guards
        return noted
    with noted.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(noted.shape, tuple(strides), dtype=noted.dtype, device=noted.device)


def _extend_storage(value: torch.Tensor | None, size: int) -> torch.Tensor | None:
    """A fake tensor in a storage of ``size`` bytes: some kernels allocate more than they return."""
    if value is None:
        return None
    missing = size - size_hint(value.untyped_storage().nbytes())
    if missing <= 0 or not is_plainly_contiguous(value):
        return value
    # Kernels may allocate more than their result needs: the value gets a storage of that size.
    with value.fake_mode:  # type: ignore[attr-defined]
        padded = torch.empty(
            value.numel() + -(-missing // value.dtype.itemsize), dtype=value.dtype, device=value.device
        )
        return padded.as_strided(value.shape, value.stride())
