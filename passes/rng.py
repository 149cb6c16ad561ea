"""rng: recomputed seeded operations draw the same numbers, bit for bit.

The generator's state is saved just before the operation in the forward; the recomputation runs with that state and
leaves the generator unchanged. Uses PyTorch's own higher-order operations for this (``run_and_save_rng_state``,
``run_with_rng_state``), on CPU and CUDA. A state weighs 5,056 bytes on the CPU and 16 on CUDA.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from roundpipe_fx.analysis.cost import CostModel, annotate_node
from roundpipe_fx.analysis.recomputation import state_bytes
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, is_seeded, tensor_values
from roundpipe_fx.torch_private import run_and_save_rng_state, run_with_rng_state


def replay_rng(joint: JointGraph, costs: CostModel) -> JointGraph:
    """Replace every seeded operation that is recomputed by the form that saves the state, and its copies by the
    replaying form.

    Args:
        joint: a graph with recomputation written into it.
        costs: cost model for the nodes that are added.
    """
    graph = joint.graph
    originals = {node.name: node for node in joint.in_phase(Phase.FORWARD) if is_seeded(node)}
    repetitions: dict[str, list[fx.Node]] = {}
    for node in joint.computed():
        origin = node.meta.get(Mark.ORIGIN)
        if origin in originals and is_seeded(node):
            repetitions.setdefault(origin, []).append(node)
    for name, repeated in repetitions.items():
        original = originals[name]
        with graph.inserting_before(original):
            drawn = graph.call_function(run_and_save_rng_state, (_operator(original), *original.args), original.kwargs)
            state = graph.create_node("call_function", operator.getitem, (drawn, 0), name=f"{name}_rng_state")
            value = graph.call_function(operator.getitem, (drawn, 1))
        state_value = _fake_state(original)
        for added, val in (
            (drawn, (state_value, original.meta["val"])),
            (state, state_value),
            (value, original.meta["val"]),
        ):
            added.meta = dict(original.meta)
            added.meta["val"] = val
            added.meta.pop("tensor_meta", None)
            annotate_node(added, costs)
        for mark in (Mark.FLOPS, Mark.SECONDS):  # of the higher-order operation nothing is known
            drawn.meta[mark] = original.meta[mark]
        drawn.meta[Mark.REPLAYED] = True
        for node in repeated:
            with graph.inserting_before(node):
                replayed = graph.call_function(run_with_rng_state, (state, _operator(node), *node.args), node.kwargs)
            replayed.meta = dict(node.meta)
            replayed.meta[Mark.REPLAYED] = True
            # The generator's own state is saved meanwhile.
            replayed.meta[Mark.WORKSPACE] = node.meta.get(Mark.WORKSPACE, 0) + state_bytes(node)
            node.replace_all_uses_with(replayed)
            graph.erase_node(node)
        original.replace_all_uses_with(value)
        graph.erase_node(original)
    return joint


def _operator(node: fx.Node) -> torch._ops.OpOverload:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target


def _fake_state(node: fx.Node) -> torch.Tensor:
    with tensor_values(node)[0].fake_mode:  # type: ignore[attr-defined]
        return torch.empty((state_bytes(node),), dtype=torch.uint8, device="cpu")  # a CUDA generator's state too
