"""Symbolic sizes: numbers to plan with, and which of them depend on data.

What is known of the sizes of a graph beyond PyTorch's own ``ShapeEnv`` is kept here, in one record for each ShapeEnv:
the values that a plan assumes, and what data-dependent sizes count. Only this module reads and writes the records, and
each goes when its ShapeEnv does.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.functions import Max

__all__ = [
    "InputSize",
    "assume_sizes",
    "assumed_sizes",
    "data_dependent_symbol",
    "input_sizes",
    "note_count",
    "note_counts",
    "number_hint",
    "planned_sizes",
    "row_major",
    "shape_env_of",
    "size_binding",
    "size_hint",
]


def shape_env_of(value: Any) -> Any | None:
    """The ShapeEnv of a fake tensor or symbolic scalar; ``None`` if it has none."""
    if isinstance(value, torch.Tensor):
        mode = getattr(value, "fake_mode", None)
        return getattr(mode, "shape_env", None)
    node = getattr(value, "node", None)
    return getattr(node, "shape_env", None)


def size_binding(size: torch.SymInt) -> dict[Any, Any]:
    """``node.meta["unbacked_bindings"]`` of a node whose first dimension defines the unbacked ``size``."""
    from torch.fx.experimental.symbolic_shapes import CallMethodKey
    from torch.utils._pytree import SequenceKey

    return {size.node.expr: (CallMethodKey("size"), SequenceKey(0))}


_UNKNOWN_SIZE = 1024


_LARGEST_BOUND = 1 << 40


@dataclass(kw_only=True)
class _KnownSizes:
    """Facts about the sizes of one ShapeEnv.

    Attributes:
        assumed: values to plan with, by symbol.
        at_most: whether upper bounds of data-dependent sizes, where they are known, are planned with instead.
        counted: by data-dependent symbol, the shape of what it counts elements of: numbers, and expressions rather
            than SymInts, which would keep the ShapeEnv alive.
    """

    assumed: Mapping[str, int] = field(default_factory=dict)
    at_most: bool = False
    counted: dict[str, tuple[Any, ...]] = field(default_factory=dict)


_NOTHING_KNOWN = _KnownSizes()
_known_sizes: weakref.WeakKeyDictionary[Any, _KnownSizes] = weakref.WeakKeyDictionary()


def size_hint(size: Any) -> int:
    """A number to plan with for a size that may be symbolic.

    The value assumed by :func:`assume_sizes`, if there is one; else the value of the traced example; for a
    data-dependent size (``nonzero``) its upper bound, since a plan must hold for it; 1024 if no bound is known.
    """
    if isinstance(size, int):
        return size
    return _number(size.node.shape_env, size.node.expr)


def planned_sizes(nodes: Sequence[Any], graph: fx.Graph) -> dict[int, int]:
    """The integers among a program's inputs that sizes of tensors depend on, with the numbers that were planned with.

    Other integers, as a counter by which something is scaled, change no memory.

    Args:
        graph: the graph that the program was emitted from.

    Returns:
        the numbers, by position of the input.
    """
    tensors = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    symbolic = [size for value in tensors for size in value.shape if isinstance(size, torch.SymInt)]
    size_symbols = {symbol for size in symbolic for symbol in size.node.expr.free_symbols}
    inputs = {position: node.meta.get("val") for position, node in enumerate(nodes)}
    return {
        position: size_hint(value)
        for position, value in inputs.items()
        if isinstance(value, torch.SymInt) and not size_symbols.isdisjoint(value.node.expr.free_symbols)
    }


def row_major(value: torch.Tensor) -> bool:
    """Test for a tensor, whose sizes may be symbolic, with the strides of a contiguous one; adds no guard."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if (_if_not_empty(stride.node.expr) if isinstance(stride, torch.SymInt) else stride) != expected:
            return False
        expected = expected * (_if_not_empty(size.node.expr) if isinstance(size, torch.SymInt) else size)
    return True


def _if_not_empty(expression: Any) -> Any:
    """A stride of a tensor that has elements: a size that may be 0 is ``Max(1, size)`` in it."""
    at_least_one = {
        maximum: maximum.args[1] for maximum in expression.atoms(Max) if len(maximum.args) == 2 and maximum.args[0] == 1
    }
    return expression.xreplace(at_least_one)


def _number(shape_env: Any, size: Any) -> int:
    """:func:`size_hint` of a number or an expression."""
    if isinstance(size, int):
        return size
    expression = shape_env.replace(size)
    known = _known_sizes.get(shape_env, _NOTHING_KNOWN)
    values = {}
    for symbol in expression.free_symbols:
        assumed, backed = known.assumed.get(str(symbol)), _backed_hint(shape_env, symbol)
        bound = _largest_value(shape_env, symbol, known) if backed is None else None
        if bound is not None and known.at_most:
            values[symbol] = bound
        elif assumed is not None:
            values[symbol] = assumed if bound is None else min(assumed, bound)  # with headroom, it may exceed the bound
        else:
            values[symbol] = backed if backed is not None else bound or _UNKNOWN_SIZE
    return int(expression.xreplace(values))


def number_hint(number: Any) -> Any:
    """A plain number for a symbolic one, to run operators with. Converting the symbol would guard on its value."""
    if isinstance(number, torch.SymInt):
        return size_hint(number)
    if isinstance(number, (torch.SymFloat, torch.SymBool)):
        hint = number.node.hint if number.node.has_hint() else None
        plain = float if isinstance(number, torch.SymFloat) else bool
        return plain(1 if hint is None else hint)
    return number


def _upper_bound(shape_env: Any, symbol: Any) -> int | None:
    bounds = shape_env.var_to_range.get(symbol)
    upper = int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None
    return upper if upper is not None and upper < _LARGEST_BOUND else None


def _largest_value(shape_env: Any, symbol: Any, known: _KnownSizes) -> int | None:
    """The largest value of a data-dependent symbol, as far as it is known."""
    counted = known.counted.get(str(symbol))
    bound = _upper_bound(shape_env, symbol)
    if bound is not None or counted is None:
        return bound
    return math.prod(_number(shape_env, size) for size in counted)


def note_count(count: Any, shape: Sequence[Any]) -> None:
    """Let :func:`size_hint` know that a data-dependent size is at most the number of elements of a shape.

    PyTorch notes an upper bound only if these sizes are plain numbers.

    Args:
        shape: of what it counts elements of, such as a mask.
    """
    symbol = data_dependent_symbol(count)
    if symbol is not None:
        known = _known_sizes.setdefault(count.node.shape_env, _KnownSizes())
        known.counted[symbol] = tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in shape)


def note_counts(joint: fx.GraphModule) -> None:
    """The same for all results of a graph whose sizes count elements of an operand."""
    for node in joint.graph.nodes:
        shape = _counted_shape(node) if node.meta.get("unbacked_bindings") else None
        if shape is None:
            continue
        operand_sizes = {str(size) for source in node.all_input_nodes for size in _sizes(source.meta.get("val"))}
        for size in _sizes(node.meta.get("val")):
            if str(size) not in operand_sizes:
                note_count(size, shape)


def _sizes(value: Any) -> list[Any]:
    return [size for item in tree_leaves(value) if isinstance(item, torch.Tensor) for size in item.shape]


def _counted_shape(node: fx.Node) -> Sequence[Any] | None:
    """The shape of what the result's size counts elements of; ``None`` for other operators."""
    aten = torch.ops.aten
    packet = getattr(node.target, "overloadpacket", None)
    if packet in (aten.nonzero, aten._unique2, aten.unique_consecutive, aten.unique_dim):
        return node.args[0].meta["val"].shape  # type: ignore[union-attr]
    if packet is aten.masked_select:
        shapes = [operand.meta["val"].shape for operand in node.args]  # type: ignore[union-attr]
        pairs = itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
        return [max(pair, key=size_hint) for pair in pairs]  # broadcast
    if packet is aten.index:
        indices = [index.meta["val"] for index in node.args[1] if index is not None]  # type: ignore[union-attr]
        return next((index.shape for index in indices if index.dtype in (torch.bool, torch.uint8)), None)
    return None


def assume_sizes(joint: fx.GraphModule, sizes: Mapping[str, int], *, at_most: bool = False) -> None:
    """Set the values that :func:`size_hint` returns for sizes of a graph.

    Args:
        at_most: whether data-dependent sizes are to have their upper bounds instead, where these are known. Some become
            known only as passes run (the mask that a `nonzero` counts).
    """
    for node in joint.graph.nodes:
        shape_env = shape_env_of(node.meta.get("val"))
        if shape_env is not None:
            known = _known_sizes.setdefault(shape_env, _KnownSizes())
            known.assumed, known.at_most = dict(sizes), at_most
            return


def assumed_sizes(joint: fx.GraphModule) -> dict[str, int]:
    """The values set by :func:`assume_sizes` for a graph, or the upper bounds that are planned with instead."""
    for node in joint.graph.nodes:
        shape_env = shape_env_of(node.meta.get("val"))
        if shape_env is not None:
            known = _known_sizes.get(shape_env, _NOTHING_KNOWN)
            symbols = {str(symbol): symbol for symbol in shape_env.var_to_range} if known.at_most else {}
            return {
                name: _number(shape_env, symbols[name]) if name in symbols else size
                for name, size in known.assumed.items()
            }
    return {}


def data_dependent_symbol(size: Any) -> str | None:
    """The name of the symbol, if a size is a single data-dependent symbol; else ``None``."""
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.shape_env.replace(size.node.expr)
    if not expression.is_Symbol or _backed_hint(size.node.shape_env, expression) is not None:
        return None
    return str(expression)


def _backed_hint(shape_env: Any, symbol: Any) -> int | None:
    name = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"
    value = getattr(shape_env, name).get(symbol)
    return None if value is None else int(value)


@dataclass(frozen=True, kw_only=True)
class InputSize:
    """A symbolic size of the graph's inputs.

    Attributes:
        symbol: name of the symbol.
        node: an input that has the size.
        size: size of that dimension; may be an expression, such as a multiple of the symbol.
        current: value of the symbol in the current inputs.
        largest: upper bound of the symbol, if the user gave a range (``torch._dynamo.mark_dynamic``).
    """

    symbol: str
    node: fx.Node
    dim: int
    size: torch.SymInt
    current: int
    largest: int | None

    def keep_within(self, smallest: int, largest: int) -> None:
        """Guard that the graph is used only for values of the symbol in a range; others recompile."""
        expression = self.size.node.expr
        symbols = {str(symbol): symbol for symbol in expression.free_symbols}
        low, high = (int(expression.xreplace({symbols[self.symbol]: value})) for value in (smallest, largest))
        # Converting a symbolic comparison to bool adds its outcome to the graph's guards.
        if smallest > 2:
            bool(self.size >= low)
        bool(self.size <= high)


def input_sizes(joint: fx.GraphModule) -> list[InputSize]:
    """The symbolic sizes of a graph's inputs, each once."""
    by_symbol: dict[str, InputSize] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if not isinstance(size, torch.SymInt):
                continue
            shape_env = size.node.shape_env
            expression = shape_env.replace(size.node.expr)
            symbols = expression.free_symbols
            hint = _backed_hint(shape_env, next(iter(symbols))) if len(symbols) == 1 else None
            if hint is None:
                continue
            (symbol,) = symbols
            name = str(symbol)
            # Prefer a dimension whose size is the symbol itself.
            if name not in by_symbol or (expression.is_Symbol and by_symbol[name].size.node.expr != symbol):
                largest = _upper_bound(shape_env, symbol) if symbol in _bounded_by_user(shape_env) else None
                by_symbol[name] = InputSize(symbol=name, node=node, dim=dim, size=size, current=hint, largest=largest)
    return list(by_symbol.values())


def _bounded_by_user(shape_env: Any) -> set[Any]:
    """Symbols with a range given by the user, which must not be narrowed."""
    from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint

    bounded = set()
    for tracked in shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            if isinstance(constraint, StrictMinMaxConstraint) and isinstance(size, torch.SymInt):
                bounded |= shape_env.replace(size.node.expr).free_symbols
    return bounded
