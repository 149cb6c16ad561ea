"""Compared texts: what ranks compare of batches, graphs and gradients, without addresses and numbers of devices."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.collectives import collective_name, group_of, is_collective
from roundpipe_fx.pipeline.graph import PipelinedGraph
from roundpipe_fx.pipeline.structures import leaves_of
from roundpipe_fx.runtime.pipeline_program import PipelineProgram, Source

__all__ = ["batch_text", "collectives_text", "gradients_text", "graph_text", "shapes_text"]

_INDEX = re.compile(r"(cuda:|index=)\d+")
_NAME = re.compile(r"%(\w+)")
_PLACEHOLDER = re.compile(r"placeholder\[target=\w+\]")
_SYMBOL = re.compile(r"\b[su]\d+\b")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def batch_text(batch: Any) -> str:
    """Structure, shapes and values of a step's inputs, except what tensors hold."""
    return ", ".join(
        f"{text}: {_tensor(leaf) if isinstance(leaf, torch.Tensor) else _value(leaf)}"
        for _, text, leaf in leaves_of(batch)
    )


def shapes_text(batch: Any) -> str:
    """Shapes of the tensors among a step's inputs."""
    return ", ".join(_tensor(leaf) for _, _, leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor))


def _tensor(leaf: torch.Tensor) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


def _value(leaf: Any) -> str:
    """A text without addresses."""
    return repr(leaf) if isinstance(leaf, (int, float, bool, str, type(None))) else _name(leaf)


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", type(value).__qualname__)


def graph_text(graph: PipelinedGraph) -> str:
    """The code of all stages."""
    symbols: dict[str, str] = {}
    return "\n".join(
        f"{kind}{stage}: {_module_text(module.module, symbols)}"
        for variant in (graph.pipeline.main, graph.pipeline.last)
        for (kind, stage), module in variant.steps.modules.items()
    )


def _module_text(module: fx.GraphModule, symbols: dict[str, str]) -> str:
    """A stage's code, without the number of this rank's device, and with numbers for names.

    Which names are free when a node or a symbolic size is made may depend on what else the process has compiled.

    Args:
        module: the stage.
        symbols: what stands for symbolic sizes, by name; those of this stage are added.
    """
    numbers = {node.name: f"%{number}" for number, node in enumerate(module.graph.nodes)}
    lines = [f"{_node_text(node, numbers)} {_kind(node.meta.get('val'))}" for node in module.graph.nodes]
    text = _ADDRESS.sub("", _INDEX.sub(r"\1", "\n".join(lines)))
    text = _SYMBOL.sub(lambda match: symbols.setdefault(match[0], f"{match[0][0]}:{len(symbols)}"), text)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if len(text) > 100_000 else text


def _node_text(node: fx.Node, numbers: Mapping[str, str]) -> str:
    if node.op == "output":
        return f"return {fx.map_arg(node.args, lambda argument: numbers[argument.name])}".replace("'", "")
    text = _PLACEHOLDER.sub("placeholder", node.format_node() or "")
    if is_collective(node.target):  # each stage has groups of its own
        for argument in node.args:
            if isinstance(argument, str):
                text = text.replace(f", {argument})", f", {len(group_of(node))} ranks)")
    return _NAME.sub(lambda match: numbers.get(match[1], match[0]), text)


def _kind(value: Any) -> str:
    return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}" if isinstance(value, torch.Tensor) else ""


def collectives_text(graph: PipelinedGraph) -> str:
    """The collectives of each stage action, in their order, with the shapes of their results."""
    return "\n".join(
        f"{kind}{stage}: {collective_name(node)} {_kind(node.meta.get('val'))}"
        for variant in (graph.pipeline.main, graph.pipeline.last)
        for (kind, stage), module in variant.steps.modules.items()
        for node in module.module.graph.nodes
        if is_collective(node.target)
    )


def gradients_text(
    programs: Sequence[PipelineProgram], primals: Sequence[Sequence[Any]], names: Mapping[int, str]
) -> str:
    """Which stage actions compute the gradients of the model's tensors.

    Args:
        programs: of each microbatch.
        primals: for each microbatch, the inputs.
        names: of the model's tensors, by identity.
    """
    parts: dict[str, set[str]] = {}
    once = {id(program): (program, arguments) for program, arguments in zip(programs, primals, strict=True)}
    for compared, inputs in once.values():
        makers = {number: f"{step[0]}{step[1]}" for step, code in compared.steps.items() for number in code.outputs}
        for gradient in compared.gradients:
            name = names.get(id(inputs[gradient.primal])) if gradient.source is not None else None
            if name is not None:
                parts.setdefault(name, set()).add(_origin(gradient.source, makers))
    return "\n".join(f"{name}: {sorted(origins)}" for name, origins in sorted(parts.items()))


def _origin(source: Source | None, makers: Mapping[int, str]) -> str:
    assert source is not None
    return makers[source.index] if source.kind == "value" else source.kind
