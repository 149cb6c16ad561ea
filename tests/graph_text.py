"""Joint graphs from text and to text: a pass is tested on a few lines of Python, without a model and without tracing.

The form is that of :func:`roundpipe_fx.ir.text.joint_text`, which dumps are written in too: inputs with their types,
one operation a line, comments for phase, stage and segment, comments behind a line for other marks. Values are fake
tensors; the types in the text are checked against what the operators say.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from roundpipe_fx.analysis.cost import DEVICES, annotate_node
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, is_view
from roundpipe_fx.ir.segment import StageCut
from roundpipe_fx.ir.text import SHOWN_MARKS, joint_text, type_text
from roundpipe_fx.ir.verifier import snapshot, verify
from roundpipe_fx.operators.gradient_sums import SUMMING

__all__ = ["after", "joint_of", "program_of"]

CPU = DEVICES["cpu"]
"""What operations cost in graphs that are written with phases."""


def joint_of(text: str) -> JointGraph:
    """The graph that a text describes.

    Args:
        text: a function ``joint`` in the form of ``joint_text``. Inputs called ``tangents_…`` are incoming gradients.
    """
    return _Reader().read(text)


def after(change: Callable[..., Any], text: str, *args: Any, name: str = "") -> str:
    """The text of a graph after a pass, which is verified too.

    Args:
        change: the pass; it may return more than the graph.
        text: the graph before.
        *args: for the pass.
        name: of the pass in the list, for the marks that it may write; ``""``: any.
    """
    joint = joint_of(text)
    before = snapshot(joint)
    made = change(joint, *args)
    joint, more = made if isinstance(made, tuple) else (made, ())
    if any(isinstance(item, StageCut) for item in more):
        joint = dataclasses.replace(joint, cuts=tuple(more))
    verify(joint, name, before, {name} - {""})
    return joint_text(joint)


def program_of(text: str) -> fx.Graph:
    """The program of stage calls that a text describes.

    Args:
        text: a function ``graph`` in the form of ``graph_text``. Inputs that the step computes are marked ``# saved``;
            the others are parameters and the user's inputs. Calls are of stage modules.
    """
    return _Reader().read_program(text)


class _Reader:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.values: dict[str, Any] = {
            "aten": _Operators(torch.ops.aten, self),
            "torch": _Operators(torch, self),
            "operator": _Operators(operator, self),
            "device": torch.device,
            "inf": math.inf,
            "nan": math.nan,
            **{own.__name__: _Operators(own, self) for own in SUMMING},
        }
        self.section: dict[str, Any] = {}
        self.parameters: list[fx.Node] = []

    def read(self, text: str) -> JointGraph:
        lines = [line.strip() for line in text.strip().splitlines()]
        assert lines[0] == "def joint("
        end = lines.index("):")
        for line in lines[1:end]:
            self._input(line)
        outputs: Any = ()
        for line in lines[end + 1 :]:
            if line.startswith("# "):
                self.section = _section(line[2:])
            elif line.startswith("return "):
                outputs = _unwrapped(eval(line.removeprefix("return "), {}, self.values))
            else:
                self._operation(line)
        self.graph.output((*outputs[0], *outputs[1]))
        module = fx.GraphModule(nn.Module(), self.graph)
        joint = JointGraph(module=module, num_forward_outputs=len(outputs[0]), parameters=frozenset(self.parameters))
        if self.section:
            for node in joint.computed():
                annotate_node(node, CPU)
        return joint

    def read_program(self, text: str) -> fx.Graph:
        lines = [line.strip() for line in text.strip().splitlines()]
        assert lines[0] == "def graph("
        end = lines.index("):")
        for line in lines[1:end]:
            self._input(line)
        for line in lines[end + 1 :]:
            if line.startswith("return "):
                self.graph.output(_unwrapped(eval(line.removeprefix("return "), {}, self.values)))
                continue
            left, right = line.split(" = ", 1)
            name, _, annotation = left.partition(": ")
            if not annotation:
                node = self._stage_call(right)
            else:
                call, index = right.removesuffix("]").split("[")
                node = self.graph.call_function(operator.getitem, (self.values[call].node, int(index)), name=name)
                node.meta |= {"val": self._value(annotation), Mark.PHASE: Phase.BACKWARD}
            assert node.name == name, f"{name} is a name that FX changes to {node.name}"
            self.values[name] = _Value(node, self)
        return self.graph

    def _stage_call(self, text: str) -> fx.Node:
        stage, operands = text.removesuffix(")").split("(", 1)
        return self.graph.call_module(stage, (_unwrapped(eval(operands, {}, self.values)),))

    def _input(self, line: str) -> None:
        line, marks = _marks(line)
        name, annotation = line.removesuffix(",").split(": ", 1)
        node = self.graph.placeholder(name)
        node.meta["val"] = self._value(annotation)
        if marks.pop("parameter", False):
            self.parameters.append(node)
        if marks.pop("saved", False):
            node.meta[Mark.PHASE] = Phase.FORWARD
        node.meta |= marks
        self.values[name] = _Value(node, self)

    def _operation(self, line: str) -> None:
        line, marks = _marks(line)
        name, rest = line.split(": ", 1)
        annotation, expression = rest.split(" = ", 1)
        made = eval(expression, {}, self.values)
        node = made.node
        node._rename(name)
        assert node.name == name, f"{name} is a name that FX changes to {node.name}"
        found = type_text(node.meta["val"])
        assert annotation.split(".strides")[0] == found, f"{name} is {found}, the text says {annotation}"
        if ".strides" in annotation and not is_view(node):
            node.meta["val"] = self._value(annotation)  # as it was noted while tracing
        node.meta |= self.section | marks
        self.values[name] = made

    def _value(self, annotation: str) -> torch.Tensor:
        spec = eval(annotation.replace("[]", "[()]"), {}, TYPES)
        with self.mode:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)

    def call(self, target: Any, args: Any, kwargs: Any) -> _Value:
        args, kwargs = _unwrapped(args), _unwrapped(kwargs)
        node = self.graph.call_function(target, args, kwargs)
        fakes, named = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*fakes, **named)
        return _Value(node, self)


class _Value:
    def __init__(self, node: fx.Node, reader: _Reader) -> None:
        self.node, self.reader = node, reader

    def __getitem__(self, index: int) -> _Value:
        return self.reader.call(operator.getitem, (self, index), {})


class _Operators:
    """A namespace whose operators make nodes; what is no operator (dtypes) is itself."""

    def __init__(self, inner: Any, reader: _Reader) -> None:
        self.inner, self.reader = inner, reader

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return _Operators(found, self.reader) if callable(found) or "ops" in type(found).__module__ else found

    def __call__(self, *args: Any, **kwargs: Any) -> _Value:
        return self.reader.call(self.inner, args, kwargs)


class _Type:
    """``float32[4, 8].strides(1, 4)``"""

    def __init__(self, dtype: torch.dtype, shape: Any = (), stride: Any = None) -> None:
        self.dtype, self.shape = dtype, shape
        self.stride = torch.empty(shape, device="meta").stride() if stride is None else stride

    def __getitem__(self, shape: Any) -> _Type:
        return _Type(self.dtype, shape if isinstance(shape, tuple) else (shape,))

    def strides(self, *stride: int) -> _Type:
        return _Type(self.dtype, self.shape, stride)


TYPES = {
    str(kind).removeprefix("torch."): _Type(kind) for kind in vars(torch).values() if isinstance(kind, torch.dtype)
}


def _unwrapped(value: Any) -> Any:
    if isinstance(value, _Value):
        return value.node
    if isinstance(value, _Operators):
        return value.inner
    if isinstance(value, dict):
        return {key: _unwrapped(item) for key, item in value.items()}
    return type(value)(map(_unwrapped, value)) if isinstance(value, (tuple, list)) else value


def _section(text: str) -> dict[str, Any]:
    if text == "captured":
        return {}
    phase, *places = text.split(", ")
    found: dict[str, Any] = {Mark.PHASE: Phase(phase), "partitioner_tag": _tag(phase)}
    for place in places:
        name, index = place.split(" ")
        found[{"stage": Mark.STAGE, "segment": Mark.SEGMENT}[name]] = int(index)
    return found


def _tag(phase: str) -> str:
    return "is_forward" if phase == "forward" else "is_backward"


def _marks(line: str) -> tuple[str, dict[str, Any]]:
    line, _, comment = line.partition("  # ")
    found: dict[str, Any] = {}
    for part in comment.split("; ") if comment else ():
        name, _, value = part.partition(": ")
        found[SHOWN_MARKS.get(name, name)] = (int(value) if value.isdigit() else value) if value else True
    return line, found
