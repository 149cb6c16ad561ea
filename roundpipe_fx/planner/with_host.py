"""The host as a second tier: offload values of a model on one GPU if that saves recomputation within the budget.

The first plan ignores the host. If it recomputes, or if none fits, plans that recompute less are emitted and offload as
many values as the link can hide (:mod:`roundpipe_fx.compiler.hidden_copies`). The first of these that fits is used,
with about as few offloaded values as it needs. The bytes of successive plans do not fall steadily, so they are tried
one by one.

These plans come from two sources: plans made without a host, and solutions of the chain of segments in which a
segment's saved values may be offloaded (:mod:`roundpipe_fx.remat.options_on_host`). Only the latter treat all layers
alike. A plan made without a host, with as many saved bytes, saves everything of some layers and nothing of the others.
::

    saved of a long sequence, by layer       MLP: 48 GiB        attention: 8 GiB
    without a host, 400 GiB of values        of 6 layers        of 14
    with one, 130 GiB of values              of none            of 16, and nothing costly is recomputed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import psutil
import torch
from torch import fx

from roundpipe_fx.analysis.cost import tensor_bytes
from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.compiler.values_on_host import is_host_requested
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, tensor_values
from roundpipe_fx.pipeline.host_memory import ASSUMED_HOST_BYTES, host_budget_for
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.planner.evaluation import Candidate, Evaluation
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import make_schedule_of_choice
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.remat.options_on_host import HostTier, find_solutions_on_host
from roundpipe_fx.remat.segment_chain import chain_of, make_remat_choice
from roundpipe_fx.torch_private import offload_operators

_SHARE = 0.8
"""Of the memory that the host has available, if no ``host_budget`` is given."""
TRIED = 12
"""Plans that are emitted with values on the host, at most."""
_PARTS = (8, 4, 2)
"""Of a plan's peak, such a part is sent if that suffices. What is tried must not depend on the budget: the first that
suffices has then no lower peak than what is taken for a smaller budget."""
_STAGES = 64
"""At most: each takes a call."""
_HIDDEN = 0.9
"""Share of the shorter of forward and backward in which the link is expected to be at work."""
_BY_CHAIN = 6
"""Solutions of the chain that are emitted at most."""


def has_host(device: torch.device) -> bool:
    """Return whether values of a device can leave for the host."""
    return device.type != "cpu" and offload_operators() is not None


def find_host_budget(host_budget: int | None, on_paper: bool) -> int:
    """Bytes of values that may be on the host.

    Args:
        host_budget: the user's; ``None``: a share of what the host has available.
        on_paper: whether the plan is for another machine, whose host is taken to have the memory of most.
    """
    if host_budget is None and on_paper:
        return ASSUMED_HOST_BYTES
    return int(_SHARE * psutil.virtual_memory().available) if host_budget is None else host_budget


def make_host_tier(joint: JointGraph, setting: Setting) -> HostTier | None:
    """The host for the values of a graph that programs run; ``None``: none may leave.

    Args:
        joint: an annotated graph.
        setting: what else there is to know.
    """
    options, device = setting.options, setting.device
    if not setting.context.runs_programs or setting.step is not None or not has_host(device):
        return None
    if is_host_requested(joint, device.type):
        return None
    host_limit = find_host_budget(options.host_budget, on_paper=options.device_name is not None)
    return _tier(joint, setting.costs.host, host_limit) if host_limit else None


def host_tier_of_step(joint: JointGraph, setting: Setting, pipelining: Pipelining) -> HostTier | None:
    """The host for the values of a microbatch of an offloaded model; ``None``: the model is not offloaded.

    Args:
        joint: an annotated graph of one microbatch.
        setting: what else there is to know.
    """
    if not pipelining.offloaded:
        return None
    # Weights and their gradients are on the host before any value is.
    weights = sum(tensor_bytes(tensor_values(node)) for node in joint.parameters)
    gradients = sum(
        tensor_bytes(tensor_values(node))
        for owner, node in zip(joint.gradient_owners, joint.gradients, strict=True)
        if owner is not None and isinstance(node, fx.Node)
    )
    host_limit = host_budget_for(weights, pipelining) - weights - gradients - pipelining.optimizer.bytes
    bandwidth = pipelining.host_bandwidth(setting.costs.host)
    return _tier(joint, bandwidth, max(host_limit, 0) // pipelining.microbatches)


def _tier(joint: JointGraph, bandwidth: float, host_limit: int) -> HostTier:
    shorter = min(
        sum(node.meta[Mark.SECONDS] for node in joint.in_phase(phase)) for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    return HostTier(byte_seconds=1 / bandwidth, host_limit=host_limit, carried=int(_HIDDEN * shorter * bandwidth))


def plan_with_host(
    graph: OperationGraph,
    chosen: Chosen,
    tier: HostTier,
    evaluate: Callable[[Candidate], Evaluation[Lowered]],
) -> Evaluation[Lowered] | None:
    """The plan that recomputes least of those that the chain of segments finds with a host, and that fit.

    What an emitted plan needs beyond what the chain counts, the next one is expected to need too.

    Args:
        graph: the operations.
        chosen: a plan for the same limit, of the same operations.
        tier: the host.
        evaluate: emits a candidate.

    Returns:
        the plan; if none fits, the one that needs least; ``None``: the chain finds none.
    """
    blocks, limit = Blocks(graph), chosen.limit
    chain, save_options = chain_of(blocks)
    most = 1 << (limit - 1).bit_length()
    solutions = find_solutions_on_host(chain, tier, most)
    tried: list[Evaluation[Lowered]] = []
    beyond = index = 0
    while len(tried) < _BY_CHAIN:
        index = next((at for at in range(index, len(solutions)) if solutions[at].bytes + beyond <= limit), -1)
        if index < 0:
            break
        candidate = make_schedule_of_choice(
            blocks, make_remat_choice(graph, save_options, [*solutions[index].decisions])
        )
        plan = dataclasses.replace(chosen, candidate=candidate, graph=graph, followed=graph, fits=True)
        tried.append(find_first_fitting([plan], evaluate, tier.host_limit))
        if tried[-1].peak <= limit:
            return tried[-1]
        beyond = max(beyond, tried[-1].peak - solutions[index].bytes)
        index += 1
    return min(tried, key=lambda evaluation: evaluation.peak, default=None)


def choose_stage_starts(segments: int) -> list[int]:
    """The first segment of each stage, so that copies find where to begin and to end: one a stage, or a few."""
    return [*range(0, segments, -(-segments // _STAGES))]


def find_first_fitting(
    plans: Sequence[Chosen], evaluate: Callable[[Candidate], Evaluation[Lowered]], host_limit: int
) -> Evaluation[Lowered]:
    """The first of some plans that fits with values on the host; if none does, the one that needs least.

    Args:
        plans: at least one, the least recomputation first.
        host_limit: bytes of values that may be on the host.
    """
    tried: list[Evaluation[Lowered]] = []
    for chosen in plans:
        with_all = evaluate(Candidate(chosen, host_limit))
        if with_all.peak > chosen.limit:
            tried.append(with_all)
            continue
        planned = chosen.candidate.peak.bytes
        # No peak falls by more than the bytes that leave.
        sizes = (planned // part for part in _PARTS if planned - planned // part <= chosen.limit)
        with_less = (evaluate(Candidate(chosen, sent)) if sent < host_limit else with_all for sent in sizes)
        return next((evaluation for evaluation in with_less if evaluation.peak <= chosen.limit), with_all)
    return min(tried, key=lambda evaluation: evaluation.peak)
