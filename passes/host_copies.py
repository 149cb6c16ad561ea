"""host_copies: copy offloaded values to the host in the forward's program, and back in the backward's.

A value that leaves is copied as soon as the stage that computes it has been called, beside what runs next, and its
memory on the device is freed after a later call, which may be the one that reads it last. On its way back it is copied
beside the calls before the one that reads it first. ::

    forward    stage_0  offload ─ ─ ─ ▶ wait      stage_2 …        the host has it
                        stage_1 ──────▶ freed
    backward   … reload ─ ─ ─ ─ ▶ wait  stage_0                    memory of its own again
                 stage_1 ───────▶

Uses PyTorch's own operators ``ao::offload``, ``ao::reload`` and ``ao::wait_tensor``, which copy on a stream of their
own. The host's memory is not freed by the wait, since a backward may run again.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from roundpipe_fx.ir.decisions import ValueOnHost
from roundpipe_fx.torch_private import offload_operators


def copy_to_host(program: fx.Graph, copies: Collection[ValueOnHost]) -> fx.Graph:
    """Return values of a forward's program on the host.

    Args:
        program: it; it is rewritten.

    Returns:
        the graph.
    """
    ao = offload_operators()
    nodes = {node.name: node for node in program.nodes}
    calls = _calls(program)
    output = program.output_node()
    waits: dict[str, list[tuple[fx.Node, fx.Node]]] = {}
    for copy in copies:
        value = nodes[copy.name]
        (maker,) = value.all_input_nodes
        with program.inserting_after(_end(maker)):
            sent = program.create_node("call_function", ao.offload.default, (value,), name=f"{copy.name}_leaving")
        sent.meta["val"] = _on_host(value.meta["val"])
        waits.setdefault(copy.freed, []).append((sent, value))
    for freed, pairs in waits.items():
        previous = _end(calls[freed])
        for sent, value in pairs:
            with program.inserting_after(previous):
                waited = ao.wait_tensor.default, (sent, None, value)
                previous = program.create_node("call_function", *waited, name=f"{value.name}_on_host")
            previous.meta["val"] = sent.meta["val"]
            output.replace_input_with(value, previous)
    return program


def copy_back(program: fx.Graph, copies: Collection[ValueOnHost]) -> fx.Graph:
    """Bring values back that a backward's program gets on the host.

    Args:
        program: it; it is rewritten.

    Returns:
        the graph.
    """
    ao = offload_operators()
    inputs = {node.name: node for node in program.find_nodes(op="placeholder")}
    calls = _calls(program)
    for copy in copies:
        host = inputs[copy.name]
        value = host.meta["val"]
        readers = [*host.users]
        with program.inserting_before(_on_main_stream(calls[copy.reloaded])):
            known = all(type(size) is int for size in (*value.shape, *value.stride()))
            layout = ([*value.shape], [*value.stride()]) if known else ()  # a contiguous value's are the copy's
            called = ao.reload.default, (host, str(value.device), *layout)
            reloaded = program.create_node("call_function", *called, name=f"{copy.name}_returning")
        with program.inserting_before(calls[copy.back]):
            waited = ao.wait_tensor.default, (reloaded, None, host)
            back = program.create_node("call_function", *waited, name=f"{copy.name}_back")
        reloaded.meta, back.meta = dict(host.meta), dict(host.meta)
        host.meta["val"] = _on_host(value)
        for reader in readers:
            reader.replace_input_with(host, back)
    return program


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return value.new_empty(value.shape, device="cpu")


def _on_main_stream(call: fx.Node) -> fx.Node:
    """Where main-stream operations before a call go: before a fork to its stream.

    A copy back allocates on the current stream, and is read on the main stream; memory of another stream's would be
    handed out again while the main stream reads it.
    """
    node = call.prev
    while node.op == "call_function" and node.target is not torch.ops.streams.join.default:
        if node.target is torch.ops.streams.fork.default:
            return node
        node = node.prev
    return call


def _calls(program: fx.Graph) -> dict[str, fx.Node]:
    return {str(node.target): node for node in program.find_nodes(op="call_module")}


def _end(call: fx.Node) -> fx.Node:
    """The last of a call's results, or the call."""
    results = [user for user in call.users if user.target is operator.getitem]
    return max(results, key=lambda item: int(item.args[1]), default=call)  # type: ignore[arg-type]
