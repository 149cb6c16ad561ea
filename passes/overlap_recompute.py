"""overlap_recompute: stream-level fork and join in a program of stage calls.

A stage's recomputation does not depend on the gradient that its backward waits for, so it may run beside the backward
of the stage after it. It is issued on a side stream, which waits for the point just *before* that backward, and the
main stream waits for it only where its results are read. The order in which the host issues calls, and so the order
of allocations, stays that of the program: overlap costs no memory.

Values that one stream computes and another reads are announced to the allocator (``record_stream``) where they may be
freed while the other stream still reads them. Uses PyTorch's own ``torch.ops.streams`` operations. Streams and events
are numbered: 0 is the stream that the program was called on, 1 the side stream, events follow.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import Mark, is_tensor

MAIN, SIDE = 0, 1
_FIRST_EVENT = 2


def overlap_recompute(program: fx.Graph, recomputing: Collection[str]) -> fx.Graph:
    """Run recomputations on a side stream, beside gradients that they do not depend on.

    Args:
        program: a graph of stage calls; it is rewritten.
        recomputing: names of the recompute modules that gain by running beside the module that is called before them.

    Returns:
        the graph. A recomputation with nothing before it, or that reads a result of the call before it, is left on the
        main stream.
    """
    calls = [node for node in program.nodes if node.op == "call_module"]
    last_use = _last_use(program)
    event = _FIRST_EVENT
    for before, call in itertools.pairwise(calls):
        if call.target not in recomputing or before in _makers(call):
            continue
        ready, done = event, event + 1
        event += 2
        with program.inserting_before(before):
            program.call_function(torch.ops.streams.record_event.default, (ready, MAIN))
        with program.inserting_before(call):
            program.call_function(torch.ops.streams.fork.default, (MAIN, SIDE))
            program.call_function(torch.ops.streams.wait_event.default, (ready, SIDE))
            for value in _computed_tensors(call.all_input_nodes):
                if last_use[value] is call:
                    program.call_function(torch.ops.streams.record_stream.default, (value, SIDE))
        results = sorted(call.users, key=lambda user: int(user.args[1]))
        with program.inserting_after(results[-1] if results else call):
            joined = program.call_function(torch.ops.streams.record_event.default, (done, SIDE))
        with program.inserting_after(joined):
            joined = program.call_function(torch.ops.streams.join.default, (SIDE, MAIN))
        with program.inserting_after(joined):
            joined = program.call_function(torch.ops.streams.wait_event.default, (done, MAIN))
        for value in reversed(_computed_tensors(results)):
            with program.inserting_after(joined):
                program.call_function(torch.ops.streams.record_stream.default, (value, MAIN))
    return program


def _makers(call: fx.Node) -> list[fx.Node]:
    """The calls whose results a call reads."""
    return [source.args[0] for source in call.all_input_nodes if source.target is operator.getitem]  # type: ignore[misc]


def _computed_tensors(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Tensors that the step computes; parameters and the user's inputs outlive the program."""
    return [node for node in nodes if is_tensor(node) and Mark.PHASE in node.meta]


def _last_use(program: fx.Graph) -> dict[fx.Node, fx.Node]:
    last_use: dict[fx.Node, fx.Node] = {}
    for node in program.nodes:
        if node.target is not operator.getitem:
            last_use.update(dict.fromkeys(node.all_input_nodes, node))
    return last_use
