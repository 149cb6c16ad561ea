"""What parameters that replicas share out cost in a pipeline over processes."""

from __future__ import annotations

from collections import Counter

import torch

from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.ir.decisions import GatheredStage
from roundpipe_fx.ir.joint_graph import viewed
from roundpipe_fx.pipeline.steps import Steps
from roundpipe_fx.schedules import StepCosts, Timing
from roundpipe_fx.schedules.data_parallel import SMALL_BYTES
from roundpipe_fx.schedules.sharding import ShardedCosts, gaps_of, padded_bytes
from roundpipe_fx.schedules.step_costs import device_orders

__all__ = ["copied_bytes", "gathered_stages", "sharded_costs"]


def sharded_costs(lowered: Lowered, steps: Steps, replicas: int) -> ShardedCosts:
    """Bytes and readers of the parameters of a lowered graph.

    A graph does not know which of its inputs are parameters, and which are buffers: those that are not updated and have
    elements of a floating point type are counted as parameters.

    Args:
        lowered: the lowered graph.
        steps: its steps.
        replicas: how many share out each parameter.
    """
    updated = set(lowered.updates.values())
    places = {node: place for place, node in enumerate(lowered.forward.inputs)}
    whole = {
        place: padded_bytes(node.meta["val"], replicas)
        for node, place in places.items()
        if place in lowered.parameters and place not in updated and _is_sharded(node.meta.get("val"))
    }
    reads = {}
    for step, module in steps.modules.items():
        read = {places[base] for node in module.inputs if (base := viewed(node)) in places}
        reads[step] = tuple(sorted(read & whole.keys()))
    return ShardedCosts(replicas=replicas, whole_bytes=whole, reads=reads)


def copied_bytes(costs: StepCosts, sharded: ShardedCosts) -> int:
    """Bytes of copies that are made while parameters are gathered and gradients reduced.

    Small ones of a stage travel as one tensor, both ways, of which a rank's own part is one more tensor. A gradient is
    copied if it is not laid out as its parameter, and with padding if its rows are not divisible; one after another.

    Args:
        costs: of the stage actions.
        sharded: of the parameters.
    """
    stages: dict[int, set[int]] = {}
    sizes = dict(sharded.whole_bytes)
    padded = 0
    for (_, stage), numbers in sharded.reads.items():
        stages.setdefault(stage, set()).update(numbers)
    for (_, stage), gradients in costs.base_bytes.items():
        for number in gradients.keys() & sizes.keys():
            stages.setdefault(stage, set()).add(number)
            if gradients[number] < sharded.whole_bytes[number]:
                padded = max(padded, sharded.whole_bytes[number])
                sizes[number] = gradients[number]
    together = 0
    for numbers_of in stages.values():
        small = [number for number in numbers_of if sizes[number] < SMALL_BYTES]
        together = max(together, sum(sharded.whole_bytes[number] for number in small))
    largest = max(sharded.whole_bytes.values(), default=0)
    return largest + padded + 2 * (together + -(-together // sharded.replicas))


def gathered_stages(costs: StepCosts, timing: Timing) -> tuple[GatheredStage, ...]:
    """For each stage of a device, how often its parameters may stay gathered, and how often they do.

    Args:
        costs: of the stage actions.
        timing: of their schedule.
    """
    if costs.sharded is None:
        return ()
    whole, gathered = costs.sharded.whole_bytes, []
    for order in device_orders(timing.schedule):
        gaps = Counter(gap.stage for gap in gaps_of(order, costs.sharded))
        kept = Counter(staying.stage for staying in timing.kept if staying.device == order.device)
        read: dict[int, set[int]] = {}
        for step in set(order.steps):
            read.setdefault(step[1], set()).update(costs.sharded.reads.get(step, ()))
        gathered += [
            GatheredStage(
                device=order.device,
                stage=stage,
                bytes=sum(whole[number] for number in read[stage]),
                gaps=gaps[stage],
                kept=kept[stage],
            )
            for stage in sorted(read)
        ]
    return tuple(gathered)


def _is_sharded(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and (value.is_floating_point() or value.is_complex())
