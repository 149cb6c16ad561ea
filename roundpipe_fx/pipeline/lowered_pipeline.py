"""A graph that was lowered for a pipeline: its steps, how it was cut, and which schedule runs it.

The lowered steps are those of one microbatch. Their schedule, and what leaves a device under it, are worked out for the
number of microbatches of a step. What has to leave depends on the bytes of a run in which nothing does, so such a run
is simulated first::

    structure, steps ── make_schedule, validate ──▶ schedule
    schedule ── simulate_time ──▶ bytes during each action ─┬─ offloads_within ─▶ values that leave for the host
                                                            └─ choose_kept ─────▶ sharded parameters that stay gathered
    schedule, both choices ── simulate_time ──▶ the timing and the peaks that are predicted

With ``checkpoint="except_last"`` the last microbatch runs ``last`` and all others run ``main``, in one schedule.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from roundpipe_fx.analysis.simulator import allocation_granularity
from roundpipe_fx.budget import Infeasible
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.alternative_plans import Alternatives
from roundpipe_fx.ir.decisions import PlannedDivision
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.pipeline.settings import Pipelining, Structure
from roundpipe_fx.pipeline.steps import Steps, copied_bytes, sharded_costs, step_costs, steps_of
from roundpipe_fx.schedules import Schedule, StageGraph, StepCosts, Timing, simulate_time, validate
from roundpipe_fx.schedules.building import make_schedule
from roundpipe_fx.schedules.choose_offloads import OffloadRule, offloads_within
from roundpipe_fx.schedules.data_parallel import TOGETHER_BYTES, DataParallel, aligned_bytes
from roundpipe_fx.schedules.memory import weights_of_devices
from roundpipe_fx.schedules.offloads import Offload
from roundpipe_fx.schedules.sharding import KeptGathered, choose_kept, find_gaps
from roundpipe_fx.schedules.step_costs import device_orders


@dataclass(frozen=True)
class Variant:
    """One lowering of a graph as steps.

    Attributes:
        lowered: plan, programs and stage modules.
        steps: the stage modules as steps.
    """

    lowered: Lowered
    steps: Steps
    costs: StepCosts


@dataclass(frozen=True, kw_only=True)
class LoweredPipeline:
    """A graph that was lowered for a pipeline.

    Attributes:
        main: what most microbatches run.
        last: what the last microbatch runs; the same unless ``checkpoint="except_last"``.
        structure: how the graph was cut, and for which schedule.
        staged: the graph with its stages, before it was decided what is recomputed.
        pipelining: the user's settings, and where devices were divided the chosen ones.
        forwards_before_backwards: whether all forwards run before all backwards, with a loss outside between them.
        budget: bytes that a device may allocate at most at one time; ``None``: no limit.
        allowed: bytes that the user allows per device, of which a plan may have to leave some; ``None``: no number was
            given.
        refused: why this is the plan that needs least: one for what the user allows, or for the share of it that may be
            used, was refused; ``None``: it was not.
        trade_off: (bytes of the device that needs most, modelled seconds of recomputation for a microbatch) of the
            plans that were simulated for a budget.
        alternatives: those plans, as the page of the plan shows them.
        offload: how it is decided which values leave for the host; ``None``: only those do that the user wants there.
        divisions: the ways to divide the devices that were considered; empty: they were given.
    """

    main: Variant
    last: Variant
    structure: Structure
    staged: JointGraph
    pipelining: Pipelining
    forwards_before_backwards: bool
    budget: int | None = None
    allowed: int | None = None
    refused: Infeasible[str] | None = None
    trade_off: tuple[tuple[int, float], ...] = ()
    offload: OffloadRule | None = None
    alternatives: Alternatives = dataclasses.field(default_factory=Alternatives)
    divisions: tuple[PlannedDivision, ...] = ()

    def schedule(self, graph: StageGraph, microbatches: int) -> Schedule:
        """The schedule for a number of microbatches.

        Args:
            graph: the steps of a microbatch; that of ``main`` unless microbatches differ.

        Raises:
            InvalidScheduleError: the schedule does not fit; the message names the action.
        """
        devices = self.pipelining.workers
        made = make_schedule(self.structure.schedule, graph, self.main.costs, devices, microbatches)
        # The schedule may be a user's function, so it is checked before anything is planned with it.
        validate(made, graph, microbatches, devices)
        return made.halves() if self.forwards_before_backwards else made

    def predict(self, microbatches: int) -> Timing:
        """When everything would run, and each device's peak."""
        graph = self.main.steps.graph
        schedule = self.schedule(graph, microbatches)
        offloads = self.offloads(schedule, graph)
        kept = self.kept(schedule, graph)
        return simulate_time(schedule, graph, self.main.costs, offloads=offloads, kept=kept)

    def offloads(
        self, schedule: Schedule, graph: StageGraph, others: Mapping[int, StepCosts] | None = None
    ) -> list[Offload]:
        """The values that leave for the host under a schedule.

        Args:
            others: costs of microbatches of another size, by index.
        """
        costs, rule = self.main.costs, self.offload
        # Without a rule of the planner, only values leave that the user asked to be on the host: no limit of bytes, and
        # copies beside one action.
        if rule is None:
            if costs.host_bandwidth is None or not costs.wanted_on_host:
                return []
            rule = OffloadRule(sys.maxsize, 1)
        timing = simulate_time(schedule, graph, costs, others)
        return offloads_within(timing, costs, others or {}, rule)

    def bytes_between_steps(self, schedule: Schedule) -> tuple[list[int], list[int]]:
        """For each device, bytes of its parameters and buffers, and of the optimizer's state."""
        costs, share = self.main.costs, self.pipelining.optimizer_share
        trained = weights_of_devices(schedule, costs, trained=True)
        return weights_of_devices(schedule, costs), [int(share * size) for size in trained]

    def kept(
        self, schedule: Schedule, graph: StageGraph, others: Mapping[int, StepCosts] | None = None
    ) -> list[KeptGathered]:
        """The sharded parameters that stay gathered under a schedule: as many as the budget has room for.

        Args:
            others: costs of microbatches of another size, by index.
        """
        if self.budget is None or self.main.costs.sharded is None:
            return []
        # What stays gathered is chosen by the bytes of a run in which nothing does.
        timing = simulate_time(schedule, graph, self.main.costs, others)
        return choose_kept(gaps(schedule, self.main.costs), timing.action_bytes, self.budget)


def gaps(schedule: Schedule, costs: StepCosts) -> list[KeptGathered]:
    """The sharded parameters that may stay gathered under a schedule, on all devices."""
    if costs.sharded is None:
        return []
    return [gap for order in device_orders(schedule) for gap in find_gaps(order, costs.sharded)]


def has_host(setting: Setting, pipelining: Pipelining) -> bool:
    """Return whether values can be offloaded to a host."""
    device = setting.options.device or setting.device
    return pipelining.offloaded or device.type != "cpu"


def make_variant(lowered: Lowered, setting: Setting, pipelining: Pipelining) -> Variant:
    """A lowered graph as steps with their costs."""
    steps = steps_of(lowered)
    granularity = allocation_granularity(setting.device)
    # A process has the parameters of its own stages, and the batch, before a step begins.
    copied = () if pipelining.over_processes else enumerate(pipelining.devices)
    remote = [number for number, device in copied if device != setting.device]
    costs = step_costs(lowered, steps, setting.costs.transfer_seconds, granularity, remote)
    if has_host(setting, pipelining):
        # Each flag adds a resource to the simulation: a link to the host, weights on the host, messages between
        # processes, a network of nodes, replicas.
        bandwidth = pipelining.host_bandwidth(setting.costs.host)
        costs = dataclasses.replace(costs, host_bandwidth=bandwidth, both_ways=setting.costs.both_ways)
    if pipelining.offloaded:
        costs = dataclasses.replace(costs, on_host=lowered.parameters)
    if pipelining.over_processes:
        if pipelining.sharded:
            costs = dataclasses.replace(costs, sharded=sharded_costs(lowered, steps, pipelining.replicas))
        costs = dataclasses.replace(
            costs,
            transport_bytes=_transport_bytes(steps, costs, setting, pipelining),
            gradients_everywhere=setting.context.roundpipe_partition is not None,
            outputs_everywhere=True,
        )
    if pipelining.between is not None:
        costs = dataclasses.replace(costs, network=pipelining.between)
        if pipelining.replicas > 1:
            ring = pipelining.between.ring(pipelining.replicas, pipelining.workers)
            parallel = DataParallel(ring=ring, sharded=pipelining.sharded)
            costs = dataclasses.replace(costs, data_parallel=parallel)
    return Variant(lowered, steps, costs)


_GENERATOR_BYTES = 5056
"""Of the state of the CPU's generator; a GPU's lies on the host."""
_EXTRA_STATES = 2
"""Of the generator, beside one for each microbatch: one that the ranks compare, and one in the record at the end."""
_LOSS_BYTES = 512
"""Of a microbatch's loss, received from the rank that computes it; as much as CUDA's allocator rounds up to."""


def _transport_bytes(steps: Steps, costs: StepCosts, setting: Setting, pipelining: Pipelining) -> int:
    """Bytes of messages that a process holds beside the values of the graph.

    At the end of a step the gradients of each tensor that several ranks read are summed, one tensor after the other:
    beside a rank's own there are then another's and the sum. Averaging over replicas copies gradients of a stage into
    tensors of some megabytes, one after the other, and larger ones where they are not laid out as their parameters.
    """
    stages: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    of_stage: dict[int, list[int]] = {}
    for (_, stage), gradients in costs.base_bytes.items():
        for parameter, size in gradients.items():
            stages.setdefault(parameter, set()).add(stage)
            sizes[parameter] = size
    # A parameter that several stages read is summed by the rank of the first one, and its bytes belong there.
    for parameter, of_parameter in stages.items():
        of_stage.setdefault(min(of_parameter), []).append(sizes[parameter])
    everywhere = setting.context.roundpipe_partition is not None  # a stage runs on all ranks
    summed = (size for parameter, size in sizes.items() if everywhere or len(stages[parameter]) > 1)
    largest = max(summed, default=0)
    averaged = 0
    if costs.sharded is not None:
        averaged = copied_bytes(costs, costs.sharded)
    elif pipelining.replicas > 1:
        # Averaging: a tensor that is as large as a group travels alone. Small ones are copied into a flat buffer of at
        # most TOGETHER_BYTES.
        alone = max(sizes.values(), default=0)
        grouped = max((min(sum(of_one), TOGETHER_BYTES) for of_one in of_stage.values()), default=0)
        averaged = max(alone, grouped) + sum(aligned_bytes(size) - size for size in sizes.values())
    drawn = _GENERATOR_BYTES if steps.draws and setting.device.type == "cpu" else 0
    states = (pipelining.microbatches + _EXTRA_STATES) * drawn
    # Two of the largest: another rank's gradient, and the sum, beside this rank's own.
    return 2 * largest + averaged + states + pipelining.microbatches * _LOSS_BYTES
