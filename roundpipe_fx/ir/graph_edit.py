"""Graph edits: add nodes to a captured graph, with the fake values and origins that the tracer would have recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from roundpipe_fx.ir.joint_graph import is_view, tensor_values

_ORIGIN = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr", "partitioner_tag", "custom")


def inherit_origin(node: fx.Node, source: fx.Node) -> None:
    """Copy the origin (module, source line, autograd numbering) of a node to a node that replaces it."""
    for key in _ORIGIN:
        if key in source.meta:
            node.meta[key] = source.meta[key]


def insert_call(before: fx.Node, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> fx.Node:
    """Insert a call before the node that it replaces, and compute its fake value.

    Args:
        before: the node before which the call is inserted, and whose origin it gets.
        value: the fake value, if it is known.
    """
    with before.graph.inserting_before(before):
        call = before.graph.call_function(target, args, kwargs)
    inherit_origin(call, before)
    if value is not None:
        call.meta["val"] = value
        return call
    around = (before, *before.all_input_nodes, *call.all_input_nodes)  # any may be a size, or have no operands
    values = next(tensor_values(node) for node in around if tensor_values(node))
    fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
    with values[0].fake_mode:  # type: ignore[attr-defined]
        call.meta["val"] = target(*fake_args, **fake_kwargs)
    return call


def insert_decomposed(node: fx.Node, template: fx.Graph) -> list[fx.Node]:
    """Replace an operation by the operations that compute it, and erase it.

    Args:
        template: these operations, with an input for each node that the operation reads, in order.

    Returns:
        The operations; none if the template is the operation itself, which then stays.
    """
    steps = [step for step in template.nodes if step.op == "call_function"]
    if any(step.target is node.target for step in steps):
        return []
    written = dict(zip(template.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    for step in steps:
        args, kwargs = fx.node.map_arg((step.args, step.kwargs), written.__getitem__)
        written[step] = insert_call(node, step.target, *args, **kwargs)
    results = template.output_node().args[0]
    # Of a tuple nothing but the items is read.
    items = [node] if isinstance(results, fx.Node) else list(node.users)
    for item in items:
        result = results if isinstance(results, fx.Node) else results[item.args[1]]  # type: ignore[index]
        substitute_node(item, written[result])
        item.graph.erase_node(item)
    if items != [node]:
        node.graph.erase_node(node)
    return [written[step] for step in steps]


def replace_by(node: fx.Node, by: fx.Node) -> None:
    """Replace a node by a node with the same value, and erase it."""
    by.meta["val"] = node.meta["val"]  # views are recognized by the storage
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def substitute_node(node: fx.Node, replacement: fx.Node) -> None:
    """Replace a node by one with an equal value in another storage, and update the fake values of its views."""
    values: dict[fx.Node, Any] = {node: replacement.meta["val"]}
    for view in list(views_of(node)):
        args, kwargs = fx.node.map_arg(
            (view.args, view.kwargs),
            lambda source: values.get(source, source.meta.get("val")),
        )
        with tensor_values(replacement)[0].fake_mode:  # type: ignore[attr-defined]
            values[view] = view.target(*args, **kwargs)  # type: ignore[operator]
    for view, value in values.items():
        if view is not node:
            view.meta["val"] = value
    node.replace_all_uses_with(replacement)


def views_of(node: fx.Node) -> Iterator[fx.Node]:
    """All views of a value, including views of views, each after its base."""
    for user in node.users:
        if is_view(user):
            yield user
            yield from views_of(user)
