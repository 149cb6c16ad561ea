"""Costs of stage actions: the seconds and bytes that schedules are simulated with.

A cost is that of one microbatch, whatever the schedule. The simulators of time (:mod:`roundpipe_fx.schedules.timing`)
and of memory (:mod:`roundpipe_fx.schedules.memory`) enter it for each action. One microbatch on two devices with a
stage each::

    device 0        F0    ·    ·    ·    ·   B0    ·    seconds[F0], seconds[B0]
    device 1         ·    ·   F1   B1    ·    ·    ·    transfer_seconds[F0, F1] before F1, [B1, B0] before B0
    F0 runs         ███                                 peak_bytes[F0], the first time first_peak_bytes[F0]
    its results          █████████████████████████      Held(maker=F0, readers=(F1, B0)) on device 0
    received             ██████████                     the same bytes on device 1, which reads them in F1 only
    gradients                                      ███  base_bytes[B0]: of parameters, to the end of the step
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from roundpipe_fx.analysis.cost.network import Network
from roundpipe_fx.schedules.action import ActionKind, StageAction
from roundpipe_fx.schedules.data_parallel import Bucket, DataParallel, Gather, buckets_of
from roundpipe_fx.schedules.residency import ResidencyWindow, residency_windows
from roundpipe_fx.schedules.sharding import DeviceOrder, KeptGathered, ShardedCosts, gathers_of, late_gradients
from roundpipe_fx.schedules.timetable import KINDS, Schedule

_FORWARD = KINDS.index(ActionKind.FORWARD)


@dataclass(frozen=True)
class Held:
    """Bytes that outlive the stage action that allocates them.

    Attributes:
        bytes: number of bytes, for one microbatch.
        maker: the stage action that allocates them.
        readers: stage actions that read them.
        lasts: whether they stay allocated to the end of the step, on the device of ``maker``.
        values: numbers of the values that they are, with the bytes of each, if these may leave the device between two
            readers (:mod:`roundpipe_fx.schedules.offloads`); empty: they must not.
    """

    bytes: int
    maker: StageAction
    readers: tuple[StageAction, ...]
    lasts: bool = False
    values: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs of stage actions. Bytes and seconds are those of one microbatch.

    Attributes:
        seconds: of each stage action.
        transfer_seconds: of sending the results of a stage action to a reader, by (maker, reader); 0 where absent.
        sent_bytes: bytes of these results, by (maker, reader).
        held: bytes that outlive the stage action that allocates them.
        peak_bytes: peak bytes that a stage action allocates beyond those that are allocated when it begins.
        first_peak_bytes: the same for the first time that a device runs the stage action; where absent, as later.
        base_bytes: bytes that stay allocated once a stage action has run for the first time (gradients of parameters),
            by stage action and by number of the parameter. Stage actions on one device share a parameter's gradient.
        input_gradient_bytes: bytes of gradients of inputs that each microbatch has for itself, by stage action and by
            number of the input. At the end of the step those of all microbatches are concatenated on the first device.
        incoming_gradient_bytes: bytes of incoming gradients, by the stage action that reads them. They are allocated
            from the beginning or, where all forwards run before all backwards, from the first backward on.
        merged_bytes: bytes that outputs which are put together of several microbatches take beyond those of their
            parts, since these are expanded, or views of each other or of inputs.
        outside_bytes: bytes that a loss outside the model needs on the first device, between all forwards and all
            backwards.
        loss_bytes: those of ``outside_bytes`` that stay allocated until the last backward is over.
        copied_bytes: bytes of the caller's tensors that a stage action reads, by stage action and by number of the
            tensor.
        parameters: numbers of the tensors that are shared by all microbatches.
        remote: devices other than the caller's. They hold copies of its tensors, assumed to be there for the whole
            step, and return gradients at the end.
        on_host: numbers of the tensors that stay on the host: devices hold copies of them, and their gradients, during
            residency windows (:mod:`roundpipe_fx.schedules.residency`). The caller's other tensors are on its device.
            ``None``: the model is not offloaded.
        host_bandwidth: bytes per second between the host and a device; ``None``: nothing is copied between them.
        both_ways: share of ``host_bandwidth`` that each direction has while both are busy.
        wanted_on_host: numbers of values that leave from the forward to the backward whether or not there is room for
            them; those of one ``held`` are all among them, or none is.
        gradients_everywhere: whether each device gets all gradients at the end of a step, not only its own.
        outputs_everywhere: whether each device gets the outputs of all, and the loss outside is computed on each.
        transport_bytes: bytes that each device holds of messages in any case, where devices are processes.
        sharded: costs of the parameters that are sharded across replicas; ``None``: they do not.
        network: the links between the devices of many nodes, by which results are sent in place of
            ``transfer_seconds``; ``None``: all devices are connected alike.
        data_parallel: replicas of the pipeline; ``None``: there are none.
    """

    seconds: Mapping[StageAction, float]
    transfer_seconds: Mapping[tuple[StageAction, StageAction], float] = field(default_factory=dict)
    sent_bytes: Mapping[tuple[StageAction, StageAction], int] = field(default_factory=dict)
    held: tuple[Held, ...] = ()
    peak_bytes: Mapping[StageAction, int] = field(default_factory=dict)
    first_peak_bytes: Mapping[StageAction, int] = field(default_factory=dict)
    base_bytes: Mapping[StageAction, Mapping[int, int]] = field(default_factory=dict)
    input_gradient_bytes: Mapping[StageAction, Mapping[int, int]] = field(default_factory=dict)
    incoming_gradient_bytes: Mapping[StageAction, int] = field(default_factory=dict)
    merged_bytes: int = 0
    outside_bytes: int = 0
    loss_bytes: int = 0
    copied_bytes: Mapping[StageAction, Mapping[int, int]] = field(default_factory=dict)
    parameters: frozenset[int] = frozenset()
    remote: frozenset[int] = frozenset()
    on_host: frozenset[int] | None = None
    host_bandwidth: float | None = None
    both_ways: float = 1.0
    wanted_on_host: frozenset[int] = frozenset()
    gradients_everywhere: bool = False
    outputs_everywhere: bool = False
    transport_bytes: int = 0
    sharded: ShardedCosts | None = None
    network: Network | None = None
    data_parallel: DataParallel | None = None

    def windows(
        self, schedule: Schedule, codes: Sequence[np.ndarray], steps: Sequence[StageAction]
    ) -> list[list[ResidencyWindow]]:
        """The residency windows of each device; none if the model is not offloaded.

        Args:
            schedule: the actions of each device.
            codes: for each device, the number of each action's stage action.
            steps: the stage actions, by number.
        """
        if self.on_host is None:
            return [[] for _ in codes]
        # The same filter for both: only tensors on the host have windows; the others are on the device all the time.
        reads, gradients = (
            [{number: size for number, size in sizes.get(step, {}).items() if number in self.on_host} for step in steps]
            for sizes in (self.copied_bytes, self.base_bytes)
        )
        return [
            residency_windows(order[:, 1], order_codes, reads, gradients, backward_start(order, schedule))
            for order, order_codes in zip(schedule.orders, codes, strict=True)
        ]

    def gathers(self, schedule: Schedule, kept: Sequence[KeptGathered]) -> list[list[Gather]]:
        """Tensors that each device gathers; none unless parameters are sharded across replicas.

        Args:
            schedule: the actions of each device.
            kept: what stays gathered for a while.
        """
        if self.sharded is None:
            return [[] for _ in schedule.orders]
        return [
            gathers_of(order, self.sharded, [gathered for gathered in kept if gathered.device == order.device])
            for order in device_orders(schedule)
        ]

    def buckets(self, schedule: Schedule) -> list[list[Bucket]]:
        """The gradients that each device reduces, at the end of the step those that are known only then.

        Args:
            schedule: the actions of each device.
        """
        orders = device_orders(schedule)
        late = late_gradients(orders, self.base_bytes)
        whole = self.sharded.whole_bytes if self.sharded is not None else {}
        # What is reduced is the whole gradient, though the device keeps a share of it afterwards.
        gradients = {
            step: {number: whole.get(number, size) for number, size in of_step.items()}
            for step, of_step in self.base_bytes.items()
        }
        buckets = [buckets_of(order.steps, gradients, late) for order in orders]
        for order, device_buckets in zip(orders, buckets, strict=True):
            # Gradients that are complete only at the end, since several devices add to them, form a bucket of their own
            # after the last action.
            added = [gradients.get(step, {}).items() for step in set(order.steps)]
            sizes = {number: size for of_step in added for number, size in of_step if number in late}
            if sizes:
                device_buckets.append(Bucket(len(order.steps) - 1, sizes))
        return buckets

    def without_communication(self) -> StepCosts:
        """The same where sending, gathering and reducing take no time."""
        return dataclasses.replace(self, transfer_seconds={}, network=None, data_parallel=None)


def backward_start(order: np.ndarray, schedule: Schedule) -> int:
    """Position at which a device's backwards begin, if all forwards run before all backwards; else 0."""
    return int((order[:, 0] == _FORWARD).sum()) if schedule.forwards_before_backwards else 0


def device_orders(schedule: Schedule) -> list[DeviceOrder]:
    """The order of each device, as what is gathered there is worked out from it."""
    return [
        DeviceOrder(
            device=device,
            steps=[(KINDS[kind], stage) for kind, stage, _ in order.tolist()],
            turn=backward_start(order, schedule),
        )
        for device, order in enumerate(schedule.orders)
    ]
