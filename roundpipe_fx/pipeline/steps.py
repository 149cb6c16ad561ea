"""Steps: the stage modules of a lowered graph as the steps of a microbatch, with their order, seconds and bytes.

A step reads another one if an argument is its result. For ``x - mean`` in stage 0, a running mean that each microbatch
updates, and the loss in stage 1 (sums of gradients are left out)::

    step   arguments                        results                  reads     carried: of the microbatch before
    F0     mean, x, w0                      new mean, x - mean, h              F0, since it computes the new mean
    F1     w1, h                            loss                     F0
    B1     w1, h, gradient of loss          gradients of w1 and h    F0
    B0     x - mean, h, gradient of h       gradient of w0           F0, B1

If F0 and F1 both draw random numbers, F1 reads F0 also where no value passes between them: draws keep the order of the
program. Over processes, parameters that are sharded across replicas have their own costs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from roundpipe_fx.analysis.cost.model import tensor_bytes
from roundpipe_fx.analysis.outside_loss import lasting_bytes, loss_bytes
from roundpipe_fx.analysis.stage_calls import HeldBytes, simulate_calls
from roundpipe_fx.codegen import StageModule
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.values_on_host import is_requested_on_host, may_be_on_host
from roundpipe_fx.ir.bodies import draws
from roundpipe_fx.ir.decisions import GatheredStage
from roundpipe_fx.ir.joint_graph import Phase, is_tensor, storages, tensor_values, viewed
from roundpipe_fx.schedules import ActionKind, Held, StageAction, StageGraph, StepCosts, Timing
from roundpipe_fx.schedules.data_parallel import SMALL_BYTES
from roundpipe_fx.schedules.sharding import ShardedCosts, find_gaps, padded_bytes
from roundpipe_fx.schedules.step_costs import device_orders
from roundpipe_fx.torch_private import run_and_save_rng_state, size_hint


@dataclass(frozen=True)
class Steps:
    """The stage modules of a lowered graph as steps.

    Attributes:
        modules: the stage module of each step, in an order in which they can run.
        maker: the step that computes a value of the joint graph.
        draws: the steps that draw random numbers, in order.
    """

    modules: Mapping[StageAction, StageModule]
    graph: StageGraph
    maker: Mapping[fx.Node, StageAction]
    draws: tuple[StageAction, ...]


def steps_of(lowered: Lowered) -> Steps:
    """The steps of a lowered graph."""
    calls = [*lowered.forward.calls, *(lowered.backward.calls if lowered.backward is not None else ())]
    # ZB-H1 and the like: the backward is split into one for inputs, which the previous stage waits for, and one for
    # weights.
    split = any(call.phase is Phase.WEIGHT for call in calls)
    kinds = {
        Phase.FORWARD: ActionKind.FORWARD,
        Phase.RECOMPUTE: ActionKind.RECOMPUTE,
        Phase.BACKWARD: ActionKind.BACKWARD_INPUT if split else ActionKind.BACKWARD,
        Phase.WEIGHT: ActionKind.BACKWARD_WEIGHT,
    }
    modules: dict[StageAction, StageModule] = {(kinds[call.phase], call.stage): call for call in calls}
    maker = {node: step for step, call in modules.items() for node in call.outputs}
    # A step reads another if one of its inputs is the other's output. `dict.fromkeys` keeps the order of the inputs, so
    # schedules do not depend on hashes.
    reads = {
        step: tuple(dict.fromkeys(maker[node] for node in call.inputs if node in maker))
        for step, call in modules.items()
    }
    # Two branches of a model may run at the same time, but random numbers are drawn in the order of the program.
    drawing = [step for step, call in modules.items() if _has_random_draws(call)]
    for before, step in pairwise(drawing):
        if before not in reads[step]:
            reads[step] = (*reads[step], before)
    return Steps(modules, StageGraph(reads, _find_carried_reads(lowered, modules, maker)), maker, tuple(drawing))


def _find_carried_reads(
    lowered: Lowered, modules: Mapping[StageAction, StageModule], maker: Mapping[fx.Node, StageAction]
) -> dict[StageAction, tuple[StageAction, ...]]:
    """For each step, those that computed, for the previous microbatch, the new value of an input that it reads."""
    # An input that a microbatch updates (a running mean) is an edge from microbatch b to b + 1: its writer runs before
    # every reader of the next one.
    writers = {lowered.forward.inputs[i]: maker.get(lowered.forward.results[o]) for o, i in lowered.updates.items()}
    carried: dict[StageAction, tuple[StageAction, ...]] = {}
    for step, module in modules.items():
        # An input whose new value is another input has no step that writes it, so nothing is waited for.
        before = dict.fromkeys(writer for node in module.inputs if (writer := writers.get(node)) is not None)
        if before:
            carried[step] = tuple(before)
    return carried


def _has_random_draws(call: StageModule) -> bool:
    """Return whether a stage module draws new random numbers; replaying saved states does not change a generator."""
    return any(draws(node, call.module) or node.target is run_and_save_rng_state for node in call.module.graph.nodes)


def step_costs(
    lowered: Lowered,
    steps: Steps,
    transfer_seconds: Callable[[int], float],
    granularity: int,
    remote: Collection[int] = (),
) -> StepCosts:
    """Modelled seconds and bytes of each step, for one microbatch.

    Args:
        transfer_seconds: returns the seconds of sending a number of bytes to another device.
        granularity: bytes that the device's allocator rounds sizes up to.
        remote: numbers of the devices that get copies of the caller's tensors.
    """
    positions = {node: position for position, node in enumerate(lowered.forward.inputs)}
    kinds = {value.device.type for node in lowered.forward.inputs for value in tensor_values(node)}
    # Copies are counted for the accelerator's tensors; where there is none, everything is on the CPU.
    kind = next(iter(kinds - {"cpu"}), "cpu")
    phases = {step: (module.stage, module.phase) for step, module in steps.modules.items()}
    sent_bytes: dict[tuple[StageAction, StageAction], int] = {}
    for step, module in steps.modules.items():
        for source in steps.graph.reads[step]:
            sent = [value for node in module.inputs if steps.maker.get(node) == source for value in tensor_values(node)]
            sent_bytes[source, step] = tensor_bytes(sent)
    simulated, held = simulate_calls(
        lowered.forward,
        lowered.backward,
        lowered.gradient_owners,
        lowered.tangents,
        granularity,
        lowered.parameters,
        lowered.follow,
    )
    calls = {call.name: call for call in simulated}
    of_step = {step: calls[module.name] for step, module in steps.modules.items()}
    first_peaks = {step: call.first_peak for step, call in of_step.items()}
    # Inductor adds gradients to sums that exist from the start, so its first microbatch needs room for the zeros as
    # well.
    if lowered.stage_compiler != "eager":  # sums begin with zeros there
        first_peaks = {step: call.peak + sum(call.gradients.values()) for step, call in of_step.items()}
    step_of = {module.name: step for step, module in steps.modules.items()}
    return StepCosts(
        seconds={step: lowered.seconds.get(phase, 0.0) for step, phase in phases.items()},
        transfer_seconds={pair: transfer_seconds(size) for pair, size in sent_bytes.items()},
        sent_bytes=sent_bytes,
        held=_make_held(held, steps, step_of, kind),
        wanted_on_host=frozenset(
            number
            for number, node in enumerate(steps.maker)
            if may_be_on_host(node, kind) and is_requested_on_host(node)
        ),
        peak_bytes={step: call.peak for step, call in of_step.items()},
        first_peak_bytes=first_peaks,
        base_bytes={step: _select_owned(call.gradients, lowered.parameters) for step, call in of_step.items()},
        input_gradient_bytes={
            step: _select_owned(call.gradients, call.gradients.keys() - lowered.parameters)
            for step, call in of_step.items()
        },
        incoming_gradient_bytes={step: call.incoming_gradient_bytes for step, call in of_step.items()},
        merged_bytes=_merged_bytes(lowered, granularity),
        outside_bytes=loss_bytes(lowered.tangents, granularity) if lowered.backward is not None else 0,
        loss_bytes=lasting_bytes(lowered.tangents, granularity) if lowered.backward is not None else 0,
        copied_bytes={
            step: {
                positions[node]: _copied_bytes(node, granularity, kind) for node in module.inputs if node in positions
            }
            for step, module in steps.modules.items()
        },
        parameters=lowered.parameters,
        remote=frozenset(remote),
    )


def _make_held(
    held: Sequence[HeldBytes], steps: Steps, step_of: Mapping[str, StageAction], kind: str
) -> tuple[Held, ...]:
    """Values that outlive their stage action; those with the same maker and readers that may be offloaded are one.

    Args:
        step_of: the step of each stage module, by name.
        kind: type of the device.
    """
    numbers = {node: number for number, node in enumerate(steps.maker)}
    alike: dict[tuple[StageAction, tuple[StageAction, ...], bool, bool, bool], list[tuple[int, int]]] = {}
    # Values with equal makers and readers live equally long, so they are one `Held`: fewer intervals to simulate, and
    # exactly the same peak.
    for value in held:
        maker, readers = step_of[value.maker], tuple(step_of[name] for name in value.readers)
        node = None if value.result is None else steps.modules[maker].outputs[value.result]
        may_leave = node is not None and not value.lasts and may_be_on_host(node, kind)
        wanted = may_leave and node is not None and is_requested_on_host(node)
        number = numbers[node] if node is not None else -1
        alike.setdefault((maker, readers, value.lasts, may_leave, wanted), []).append((number, value.bytes))
    return tuple(
        Held(sum(size for _, size in values), maker, readers, lasts, tuple(values) if may_leave else ())
        for (maker, readers, lasts, may_leave, _), values in alike.items()
    )


def _merged_bytes(lowered: Lowered, granularity: int) -> int:
    """Bytes of a microbatch's part of merged outputs beyond those of the results that it is copied from.

    Tensors of the model are returned once, and inputs, and views of those without a gradient, are not copied.
    """
    joint = lowered.joint
    primals = joint.primals
    differentiated = {primals[owner] for owner in joint.gradient_owners if owner is not None}
    parts: dict[int, int] = {}
    copies: dict[int, int] = {}
    for node in dict.fromkeys(joint.returned):
        if not isinstance(node, fx.Node) or not is_tensor(node) or not node.meta["val"].dim():
            continue
        base, value = viewed(node), node.meta["val"]
        # Merging copies outputs that are parts of no common memory. Views of inputs that get no gradient are returned
        # as they are and cost nothing.
        if base in primals and (node is base or base in joint.parameters or base not in differentiated):
            continue
        for storage in storages(node):
            # A view of an input has no memory of its own to free, so its whole copy counts.
            parts[storage] = 0 if base in primals else tensor_bytes([value])
            size = math.prod(map(size_hint, value.shape)) * value.dtype.itemsize
            copies[storage] = copies.get(storage, 0) + -(-size // granularity) * granularity
    return sum(max(0, size - parts[storage]) for storage, size in copies.items())


def _select_owned(gradients: Mapping[int, int], owners: Collection[int]) -> dict[int, int]:
    return {owner: size for owner, size in gradients.items() if owner in owners}


def _copied_bytes(node: fx.Node, granularity: int, kind: str) -> int:
    """Bytes of a copy on another device; tensors on the CPU in an accelerator's graph stay there."""
    size = tensor_bytes([value for value in tensor_values(node) if value.device.type == kind])
    return -(-size // granularity) * granularity


def sharded_costs(lowered: Lowered, steps: Steps, replicas: int) -> ShardedCosts:
    """Bytes and readers of the parameters of a lowered graph.

    A graph does not know which of its inputs are parameters, and which are buffers: those that are not updated and have
    elements of a floating point type are counted as parameters.

    Args:
        replicas: number of replicas across which each parameter is sharded.
    """
    updated = set(lowered.updates.values())
    positions = {node: position for position, node in enumerate(lowered.forward.inputs)}
    whole = {
        position: padded_bytes(node.meta["val"], replicas)
        for node, position in positions.items()
        if position in lowered.parameters and position not in updated and _is_sharded(node.meta.get("val"))
    }
    reads = {}
    for step, module in steps.modules.items():
        read = {positions[base] for node in module.inputs if (base := viewed(node)) in positions}
        reads[step] = tuple(sorted(read & whole.keys()))
    return ShardedCosts(replicas=replicas, whole_bytes=whole, reads=reads)


def copied_bytes(costs: StepCosts, sharded: ShardedCosts) -> int:
    """Bytes of copies that are made while parameters are gathered and gradients reduced.

    Small ones of a stage travel as one tensor, both ways, of which a rank's own part is one more tensor. A gradient is
    copied if it is not laid out as its parameter, and with padding if its rows are not divisible; one after another.

    Args:
        costs: of the stage actions.
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
                # A rank keeps its own rows of this gradient: the whole one is padded to a multiple of the replicas only
                # while it is reduced.
                sizes[number] = gradients[number]
    together = 0
    # Small tensors travel as one message: the stage with most of them decides how large the buffers are. Large ones
    # travel alone, one after another.
    for numbers_of in stages.values():
        small = [number for number in numbers_of if sizes[number] < SMALL_BYTES]
        together = max(together, sum(sharded.whole_bytes[number] for number in small))
    largest = max(sharded.whole_bytes.values(), default=0)
    # Buffers of one bucket (whole, then this rank's rows), one for gathering and one for reducing, beside the largest
    # tensor that travels alone.
    return largest + padded + 2 * (together + -(-together // sharded.replicas))


def gathered_stages(costs: StepCosts, timing: Timing) -> tuple[GatheredStage, ...]:
    """For each stage of a device, how often its parameters may stay gathered, and how often they do.

    Args:
        costs: of the stage actions.
    """
    if costs.sharded is None:
        return ()
    whole, gathered = costs.sharded.whole_bytes, []
    for order in device_orders(timing.schedule):
        gaps = Counter(gap.stage for gap in find_gaps(order, costs.sharded))
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
