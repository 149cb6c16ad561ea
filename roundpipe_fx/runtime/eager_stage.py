"""An eager stage: a stage module's graph as one Python function, which calls PyTorch's operators one by one.

FX's own code generator writes code that can be imported anywhere, which is slow to generate and compile. Here every
callable, and every constant without a plain literal, is bound to a name in the function's globals instead. A value's
only reference is its name, which is set to ``None`` behind its last use::

    def forward_0(args):
        x, w, = args
        args.clear()
        h = aten_mm_default(x, w); x = w = None
        relu_default = aten_relu_default(h); h = None
        sum_default = aten_sum_default(relu_default)
        return (relu_default, sum_default, )
"""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roundpipe_fx.codegen.last_uses import find_last_uses
from roundpipe_fx.ir.collectives import starts_collective
from roundpipe_fx.runtime.stage_collectives import count_calls
from roundpipe_fx.torch_private import (
    draws_on_own_device,
    run_and_save_rng_state,
    run_with_rng_state,
    tree_leaves,
    without_wrapper,
)

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class BoxedCall:
    """A target of nodes whose only argument is a list: a function that takes it, and clears it.

    The list holds the only reference to values that die with the call, so each is freed at its last use inside.
    """

    call: Callable[[list[Any]], tuple[Any, ...]]

    __name__ = "boxed_call"

    def __call__(self, arguments: list[Any]) -> tuple[Any, ...]:
        """Call the function."""
        return self.call(arguments)


def eager_stage(module: fx.GraphModule) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Make a stage module callable.

    Returns:
        a boxed function: it takes one list of arguments and clears it, so that every value is freed at its last use.
    """
    graph = module.graph
    names = _Names({node.name for node in graph.nodes})
    name = module._get_name()
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    lines = [f"def {name}(args):"]
    if inputs:
        lines.append(f"    {', '.join(inputs)}, = args")
    # The arguments are bound to names, then the list is cleared: each value's only reference is a name that is set to
    # None at its last use.
    lines.append("    args.clear()")
    dying = find_last_uses(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"    return {names.text(node.args[0])}")
            continue
        if isinstance(node.target, BoxedCall):
            # What dies with this call is freed inside the call, through the list that it gets.
            dead = [value for value in dying[node] if value is not node]
            lines.append(f"    args = {names.text(node.args[0])}{_free_text(dead)}")
            lines.append(f"    {node.name} = {names.of(node.target.call, 'compiled')}(args)")
        else:
            lines.append(f"    {node.name} = {_expression(node, module, names)}{_free_text(dying[node])}")
    text = "\n".join(lines) + "\n"
    filename = f"<roundpipe_fx {name} {next(_numbers)}>"
    # `linecache` lets tracebacks and debuggers show the line of the generated function.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), names.bound)
    function = names.bound.pop(name)
    weakref.finalize(function, linecache.cache.pop, filename, None)
    return function


def _free_text(values: Sequence[fx.Node]) -> str:
    return f"; {' = '.join(value.name for value in values)} = None" if values else ""


def _expression(node: fx.Node, module: fx.GraphModule, names: _Names) -> str:
    if node.op == "get_attr":
        return names.of(operator.attrgetter(str(node.target))(module), "constant")
    assert node.op == "call_function", f"{node.op} in a stage module"
    if node.target is operator.getitem:
        source, index = node.args
        return f"{names.text(source)}[{names.text(index)}]"
    arguments = [names.text(value) for value in node.args]
    arguments += [f"{key}={names.text(value)}" for key, value in node.kwargs.items()]
    called = names.of(_callable_of(node), str(node.target))
    return f"{called}({', '.join(arguments)})"


def _callable_of(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target)
    values = tree_leaves(node.meta.get("val"))
    if node.target in (run_and_save_rng_state, run_with_rng_state) and any(
        # Replayed random operations on an accelerator have to draw from the generator of the device that runs them.
        isinstance(value, torch.Tensor) and value.device.type != "cpu"
        for value in values
    ):
        return draws_on_own_device(node.target)
    return count_calls(node) if starts_collective(node.target) else without_wrapper(node.target)


class _Names:
    """Source text of values, and the objects that names in it are bound to.

    Args:
        taken: names that must not be used.
    """

    def __init__(self, used_names: set[str]) -> None:
        self._taken = used_names
        self._known: dict[int, str] = {}
        self.bound: dict[str, Any] = {}

    def of(self, value: Any, called: str) -> str:
        """The name of an object, derived from ``called``."""
        # By identity: equal objects may differ in ways that `==` does not see (0.0 and -0.0, tensors).
        if id(value) not in self._known:
            plain = "".join(letter if letter.isalnum() else "_" for letter in called)
            tried = itertools.chain([plain], (f"{plain}_{number}" for number in itertools.count()))
            name = next(
                n
                for n in tried
                if n.isidentifier() and not keyword.iskeyword(n) and n not in self._taken and n not in self.bound
            )
            self._known[id(value)] = name
            self.bound[name] = value
        return self._known[id(value)]

    def text(self, value: Any) -> str:
        """Python source of an argument."""
        kind = type(value)
        if isinstance(value, fx.Node):
            return value.name
        if value is None or kind in (int, bool, str) or (kind is float and math.isfinite(value)):
            return repr(value)
        if kind is tuple:
            return f"({''.join(f'{self.text(item)}, ' for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.text(key)}: {self.text(item)}' for key, item in value.items())}}}"
        if kind is slice:
            return f"{self.of(slice, 'slice')}({', '.join(map(self.text, (value.start, value.stop, value.step)))})"
        assert not _reads(value), f"{value!r} contains a node and cannot be written as source"
        return self.of(value, kind.__name__)


def _reads(value: Any) -> bool:
    """Return whether an argument contains nodes."""
    reads: list[fx.Node] = []
    fx.node.map_arg(value, reads.append)
    return bool(reads)
