"""The plan of a pipelined graph: that of one microbatch, with the part about the pipeline."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence

from roundpipe_fx.ir.collectives import is_collective
from roundpipe_fx.ir.decisions import OffloadedValue, PlannedMesh, PlannedPipeline
from roundpipe_fx.ir.joint_graph import Mark, Phase, viewed
from roundpipe_fx.pipeline.host_memory import host_memory_of
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.pipeline.measured_seconds import replace_by_measured
from roundpipe_fx.pipeline.pipelined_graph import PipelinedGraph
from roundpipe_fx.pipeline.steps import gathered_stages
from roundpipe_fx.report.make_plan import host_link_share, plan_of
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.runtime.pipeline_run import Span
from roundpipe_fx.schedules import Timing, simulate_time, with_transfers
from roundpipe_fx.schedules.step_costs import device_orders


def plan_of_pipeline(graph: PipelinedGraph) -> Plan:
    """The plan of one microbatch, with the part about the pipeline."""
    pipeline, pipelining = graph.pipeline, graph.pipeline.pipelining
    timing = pipeline.predict(pipelining.microbatches)
    order = with_transfers(timing.schedule, pipeline.main.steps.graph)
    host = host_memory_of(pipeline, timing, pipelining)
    planned = PlannedPipeline(
        schedule=pipeline.structure.name,
        devices=tuple(map(str, pipelining.devices)) or ("the model's",),
        microbatches=pipelining.microbatches,
        checkpoint="" if pipeline.budget is not None else pipelining.checkpoint or "never",
        makespan=timing.makespan,
        bubble=timing.bubble,
        peak_bytes=timing.peak_bytes,
        order="\n".join(f"{device}: {' '.join(map(str, actions))}" for device, actions in enumerate(order)),
        host_to_device_bytes=timing.host_to_device_bytes,
        loss_reduction=pipelining.loss_reduction,
        sent_bytes=sum(offload.bytes for offload in timing.offloads),
        sent_values=sum(len(offload.values) for offload in timing.offloads),
        offloaded=_list_offloaded_values(pipeline, timing),
        host_weight_bytes=host.weights,
        host_gradient_bytes=host.gradients,
        host_value_bytes=host.values,
        host_optimizer_bytes=host.optimizer,
        gathered_bytes=timing.gathered_bytes,
        gathered=gathered_stages(pipeline.main.costs, timing),
        mesh=_describe_mesh(pipeline, timing) if pipelining.network is not None else None,
    )
    plan = plan_of(pipeline.main.lowered)
    bandwidth = pipelining.host_bandwidth(pipeline.main.lowered.setting.costs.host)
    return dataclasses.replace(
        plan,
        budget=pipeline.budget,
        trade_off=pipeline.trade_off,
        alternatives=pipeline.alternatives,
        pipeline=planned,
        dropped_bytes=plan.dropped_bytes * pipelining.microbatches,
        unread_bytes=plan.unread_bytes * pipelining.microbatches,
        host_link_share=host_link_share(plan, planned.sent_bytes // pipelining.microbatches, bandwidth),
        timing=timing,
        measured=graph.measured,
        read_corrected=functools.partial(_corrected_makespan, pipeline, timing, graph.measured),
    )


def _corrected_makespan(
    pipeline: LoweredPipeline, timing: Timing, measured: Sequence[Sequence[Sequence[Span]]]
) -> float | None:
    """The makespan of a schedule with the seconds that its stages took in the latest step, if there was one."""
    if not measured:
        return None
    costs = replace_by_measured(pipeline.main.costs, measured[-1])
    return simulate_time(
        timing.schedule, pipeline.main.steps.graph, costs, offloads=timing.offloads, kept=timing.kept
    ).makespan


def _describe_mesh(pipeline: LoweredPipeline, timing: Timing) -> PlannedMesh:
    """Describe the replicas of a pipeline, and what communication costs."""
    costs, pipelining = pipeline.main.costs, pipeline.pipelining
    alone = simulate_time(timing.schedule, pipeline.main.steps.graph, costs.without_communication())
    weights, optimizer = pipeline.bytes_between_steps(timing.schedule)
    return PlannedMesh(
        replicas=pipelining.replicas,
        sharded=pipelining.sharded,
        weight_bytes=tuple(weights),
        optimizer_bytes=tuple(optimizer),
        tensor_parallel=pipelining.tensor_parallel,
        tensor_parallel_seconds=_seconds_within(pipeline, timing),
        collective_seconds=max(timing.collective_seconds, default=0.0),
        unhidden_seconds=timing.makespan - alone.makespan,
        divisions=pipeline.divisions,
    )


def _seconds_within(pipeline: LoweredPipeline, timing: Timing) -> float:
    """Seconds of a step that the device with most of them spends in the collectives of the graph itself."""
    seconds: Counter[tuple[int, Phase]] = Counter()
    for node in pipeline.main.lowered.joint.computed():
        if is_collective(node.target):
            seconds[node.meta[Mark.STAGE], node.meta[Mark.PHASE]] += node.meta[Mark.SECONDS]
    step_seconds = {step: seconds[module.stage, module.phase] for step, module in pipeline.main.steps.modules.items()}
    orders = device_orders(timing.schedule)
    return max((sum(step_seconds.get(step, 0.0) for step in order.steps) for order in orders), default=0.0)


def _list_offloaded_values(pipeline: LoweredPipeline, timing: Timing) -> tuple[OffloadedValue, ...]:
    """List the values that leave the devices, in the order in which they are computed."""
    leaving: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    for offload in timing.offloads:
        for number, size in offload.values:
            leaving.setdefault(number, set()).add(offload.microbatch)
            sizes[number] = max(size, sizes.get(number, 0))
    nodes = list(pipeline.main.steps.maker)
    return tuple(
        OffloadedValue(
            name=str(node.meta.get(Mark.ORIGIN, node.name)),
            number=number,
            bytes=sizes[number],
            microbatches=len(leaving[number]),
        )
        for number in sorted(leaving)
        for node in (viewed(nodes[number]),)
    )
