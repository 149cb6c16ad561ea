"""The peak memory of each device under a schedule.

A value is on the device that computes it until its last reader there. A device that reads a value of another device
holds it from the moment it is computed, whether it waits for it or not, until its own last reader. Between its actions
a device holds such values; during an action it needs the peak of the stage module in addition. Gradients of parameters
live from the first microbatch of a stage action to the end of the step, gradients of inputs from their own microbatch
to the end, where they are concatenated to the batch's gradient. Where a loss is computed outside the model, between all
forwards and all backwards, the caller's device needs memory for that too.

All of it is entered as changes of a level, for each device by position in its order::

    position      0        1        2        3        4         5: the end
    actions     │ F0.0   │ F0.1   │ B0.0   │ F0.2   │ B0.1   │
    value of F0.0, read by B0.0     +v at 1 ──────── -v at 3
    gradient that B0.0 is the first to add to        +g at 3 ──────────▶
    level       0        v        v        g        g + …
                what is held while the action runs; the peak is the largest level + what its action allocates itself

Values enter at their maker's position + 1, since the maker counts them in its own peak, and leave at their last
reader's + 1. The moment between forwards and backwards, and the end of the step, at which gradients are gathered, are
counted separately. Where parameters are sharded across replicas, these are counted while a device has them whole, and
whole gradients until they are reduced to rows (:mod:`roundpipe_fx.schedules.sharding`).

Devices may be faster or slower than simulated, so a received value is counted from the earliest action at which it can
have arrived: only those actions of the receiver that the sender depends on are certain to be over when the value is
computed (:mod:`roundpipe_fx.schedules.action_positions`). The peak is therefore an upper bound for any timing; on one
device nothing is received, and it is exact. Schedules of more than a hundred thousand actions are assumed to run as
simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from roundpipe_fx.schedules.action import StageAction
from roundpipe_fx.schedules.action_positions import ActionPositions, vector_clocks
from roundpipe_fx.schedules.offloads import Offload
from roundpipe_fx.schedules.residency import ResidencyWindow
from roundpipe_fx.schedules.sharding import KeptGathered, late_gradients, sharded_changes
from roundpipe_fx.schedules.step_costs import Held, StepCosts, backward_start, device_orders
from roundpipe_fx.schedules.timetable import Schedule

_MOST_EXACT = 100_000
"""Above this many actions the arrival of values is taken from the simulated times."""


def peaks_of(
    schedule: Schedule,
    codes: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    waves: Sequence[np.ndarray],
    reads: np.ndarray,
    steps: Sequence[StageAction],
    costs: StepCosts,
    others: Mapping[int, StepCosts],
    windows: Sequence[Sequence[ResidencyWindow]],
    offloads: Sequence[Offload] = (),
    kept: Sequence[KeptGathered] = (),
) -> list[tuple[int, np.ndarray]]:
    """Peak bytes of each device, and the bytes allocated there at most during each of its actions.

    Args:
        schedule: the order in which devices run their actions.
        codes: for each device, the number of each action's stage action.
        ends: for each device, the seconds at which its actions end.
        waves: for each device, a number for each action that is greater than those of all that it waits for.
        reads: for each stage action, the numbers of those that it reads; padded with -1.
        steps: the stage actions, by number.
        costs: costs of the stage actions.
        others: costs of microbatches of another size, by index.
        windows: residency windows of each device, where tensors stay on the host.
        offloads: values that are on the host for a while.
        kept: sharded parameters that stay gathered for a while.
    """
    memory = _Memory(schedule, codes, steps, costs, others)
    clocks = None
    if any(variant.held for variant in memory.variants) and len(codes) > 1 and schedule.size <= _MOST_EXACT:
        # Without values between devices, or with too many actions, the simulated end of an action stands for its
        # arrival.
        clocks = vector_clocks(schedule, codes, waves, reads, memory.positions)

    def arrival(device: int, at: np.ndarray, other: int) -> np.ndarray:
        """The first position on another device at which results of actions of a device can have arrived."""
        if clocks is not None:
            return clocks[device][at, other]
        return np.searchsorted(ends[other], ends[device][at], side="right")

    memory.enter_values(arrival)
    memory.enter_input_gradients()
    memory.enter_offloads(offloads)
    memory.enter_sharded(kept)
    peaks = (memory.peak(device, of_device) for device, of_device in enumerate(windows))
    return [(costs.transport_bytes + peak, costs.transport_bytes + during) for peak, during in peaks]


def weights_of_devices(schedule: Schedule, costs: StepCosts, trained: bool = False) -> list[int]:
    """For each device, the bytes of the parameters and buffers that its actions read; of sharded ones, its part.

    Args:
        schedule: the actions of each device.
        costs: of the stage actions.
        trained: whether only those count that get gradients.
    """
    gradients = {tensor for of_step in costs.base_bytes.values() for tensor in of_step}
    counted = costs.parameters & gradients if trained else costs.parameters
    sharded = costs.sharded
    rows = {} if sharded is None else {key: size // sharded.replicas for key, size in sharded.whole_bytes.items()}
    sizes: list[dict[int, int]] = []
    # A tensor that several actions of a device read is there once: sizes are keyed by tensor.
    for device in range(schedule.devices):
        steps = {(action.kind, action.stage) for action in schedule.actions(device)}
        read = [costs.copied_bytes.get(step, {}).items() for step in steps]
        sizes.append(
            {tensor: rows.get(tensor, size) for of_step in read for tensor, size in of_step if tensor in counted}
        )
    return [sum(of_device.values()) for of_device in sizes]


class _Memory:
    """The bytes that each device holds, entered one concept after the other.

    Microbatches of different sizes have different costs: the *variants*.
    """

    def __init__(
        self,
        schedule: Schedule,
        codes: Sequence[np.ndarray],
        steps: Sequence[StageAction],
        costs: StepCosts,
        others: Mapping[int, StepCosts],
    ) -> None:
        self._schedule, self._codes, self._steps, self._costs = schedule, codes, steps, costs
        self._number = {step: index for index, step in enumerate(steps)}
        self.positions = ActionPositions(schedule, codes)
        self.variants = list({id(variant): variant for variant in (costs, *others.values())}.values())
        self._variant_of = np.zeros(max(schedule.microbatches, 1), dtype=np.intp)
        """By microbatch, which of the variants it has."""
        # Microbatches of the usual size have variant 0.
        for batch, of_batch in others.items():
            self._variant_of[batch] = next(i for i, variant in enumerate(self.variants) if variant is of_batch)
        self._peak = self._table(lambda variant, step: variant.peak_bytes.get(step, 0))
        self._first_peak = self._table(
            lambda variant, step: variant.first_peak_bytes.get(step, variant.peak_bytes.get(step, 0))
        )
        incoming = self._table(lambda variant, step: variant.incoming_gradient_bytes.get(step, 0))
        self._incoming_gradient_bytes = [
            int(incoming[self._variant_of[order[:, 2]], codes_of_device].sum())
            for order, codes_of_device in zip(schedule.orders, codes, strict=True)
        ]
        """By device, bytes of incoming gradients."""
        # Entry p is what is added, or freed, before action p: levels are its running sum. What the last action makes is
        # added behind it.
        self._changes = [np.zeros(len(of_device) + 2, dtype=np.int64) for of_device in codes]
        self._offloaded = [np.zeros(len(of_device) + 2, dtype=np.int64) for of_device in codes]
        """The part of these changes that is due to values that are on the host for a while."""
        self._callers = next((device for device in range(len(codes)) if device not in costs.remote), -1)
        self._outputs = self._of_batches(lambda variant: sum(held.bytes for held in variant.held if held.lasts))
        self._merged = self._outputs
        """Bytes of the outputs once they are put together."""
        if schedule.microbatches > 1:
            self._merged += self._of_batches(lambda variant: variant.merged_bytes)
        self._outputs_made = [0] * len(codes)
        """By device, bytes of the outputs that it computes itself. The caller's gets the others too."""
        self._parts_kept = [0] * len(codes)
        """By device, bytes of parts of outputs that a backward reads, beside the outputs that were put together."""
        self._of_inputs = [_sum_by_owner(variant.input_gradient_bytes) for variant in self.variants]
        """By variant, bytes of the gradients of inputs."""

    def _table(self, bytes_of: Callable[[StepCosts, StageAction], int]) -> np.ndarray:
        """Bytes by variant and stage action."""
        rows = [[bytes_of(variant, step) for step in self._steps] for variant in self.variants]
        return np.array(rows, dtype=np.int64)

    def _of_batches(self, bytes_of: Callable[[StepCosts], int]) -> int:
        """Bytes of all microbatches together."""
        sizes = [bytes_of(variant) for variant in self.variants]
        return int(np.take(sizes, self._variant_of[: self._schedule.microbatches]).sum())

    def enter_values(self, arrival: Callable[[int, np.ndarray, int], np.ndarray]) -> None:
        """Values that outlive their action: on the device of their maker, then on every other device that reads them.

        Args:
            arrival: of a device, positions there, and another device: the first positions there at which the results
                can have arrived.
        """
        # Vectorized over microbatches: one value, one maker, one device at a time, for all microbatches of a variant.
        for which, variant in enumerate(self.variants):
            for held in variant.held:
                readers = [self._number[reader] for reader in held.readers]
                reading = {device for reader in readers for device in self.positions.devices(reader)}
                for device, at, batches in self.positions.of(self._number[held.maker]):
                    is_of_variant = self._variant_of[batches] == which
                    self._enter_value(
                        held, readers, device, at[is_of_variant], batches[is_of_variant], reading - {device}, arrival
                    )

    def _enter_value(
        self,
        held: Held,
        readers: Sequence[int],
        device: int,
        at: np.ndarray,
        batches: np.ndarray,
        others: set[int],
        arrival: Callable[[int, np.ndarray, int], np.ndarray],
    ) -> None:
        """A value that a device makes at some positions, for some microbatches, and others read."""
        until = self.positions.last(device, readers, batches)
        # An output stays on its maker's device to the end of the step.
        if held.lasts:
            self._enter_parts(held, device, until)
            until = np.full(len(at), len(self._codes[device]))
            self._outputs_made[device] += held.bytes * len(at)
        here = until >= 0
        # While its maker runs, a value is part of the maker's own peak; it is freed once its last reader has ended.
        self._enter(device, at[here] + 1, until[here] + 1, held.bytes)
        for other in others:
            until = self.positions.last(other, readers, batches)
            there = until >= 0
            # It may arrive any time after it was sent, but it is there when it is read.
            arrives = np.minimum(arrival(device, at[there], other), until[there])
            self._enter(other, arrives, until[there] + 1, held.bytes)

    def _enter_parts(self, held: Held, device: int, read_until: np.ndarray) -> None:
        """Parts of an output that a backward reads: they stay when the output has been put together from them."""
        # An output is gone when the backwards begin, or there beside its parts, only where the loss is outside: it has
        # left for the host, or was put together.
        leaves = self._costs.on_host is not None
        if not self._schedule.forwards_before_backwards or (self._schedule.microbatches < 2 and not leaves):
            return
        turn = backward_start(self._schedule.orders[device], self._schedule)
        late = read_until[read_until >= turn]
        self._parts_kept[device] += held.bytes * len(late)
        self._enter(device, np.full(len(late), turn), late + 1, held.bytes)

    def _enter(self, device: int, start: np.ndarray, end: np.ndarray, size: int) -> None:
        np.add.at(self._changes[device], start, size)
        np.add.at(self._changes[device], end, -size)

    def enter_input_gradients(self) -> None:
        """Gradients of inputs: from the first action of their microbatch that adds to them, to the end of the step."""
        microbatches = self._schedule.microbatches
        for which, by_owner in enumerate(self._of_inputs):
            batches = np.flatnonzero(self._variant_of[:microbatches] == which)
            # The first action that adds allocates the gradient; the microbatch's gradient then stays, since all are
            # concatenated at the end.
            makers_of = self.variants[which].input_gradient_bytes
            for device, change in enumerate(self._changes):
                for owner, size in by_owner.items():
                    makers = [self._number[step] for step, numbers in makers_of.items() if owner in numbers]
                    at = self.positions.first(device, makers, batches)
                    np.add.at(change, at[at >= 0] + 1, size)

    def enter_offloads(self, offloads: Sequence[Offload]) -> None:
        """Values that are on the host: absent from their device once they are freed, until they are reloaded."""
        # Negative first: the bytes are missing between being freed and being reloaded.
        for offload in offloads:
            for changes in (self._changes, self._offloaded):
                changes[offload.device][offload.freed] -= offload.bytes
                changes[offload.device][offload.reloads] += offload.bytes

    def enter_sharded(self, kept: Sequence[KeptGathered]) -> None:
        """Parameters that are whole for a while, and their gradients, of which only rows are left in the end.

        Args:
            kept: parameters that stay gathered.
        """
        sharded = self._costs.sharded
        if sharded is None:
            return
        orders, gradients = device_orders(self._schedule), self._costs.base_bytes
        late = late_gradients(orders, gradients)
        for device_order, change in zip(orders, self._changes, strict=True):
            staying = [stay for stay in kept if stay.device == device_order.device]
            change += sharded_changes(device_order, sharded, gradients, late, staying)

    def peak(self, device: int, windows: Sequence[ResidencyWindow]) -> tuple[int, np.ndarray]:
        """Peak bytes of a device, whose values and gradients of inputs have been entered; and those of its actions."""
        change, codes = self._changes[device], self._codes[device]
        # The order matters: parameter gradients depend on windows, and the turn needs the levels entered so far.
        first = self._enter_parameter_gradients(device, windows)
        of_windows = _changes_of(windows, len(change))
        change += of_windows
        of_turn = change.copy()
        outside = self._enter_turn(device)
        of_turn = change - of_turn
        change[0] += self._copies(device)
        levels = np.cumsum(change)
        level = levels[: len(codes)]
        variant_at = self._variant_of[self._schedule.orders[device][:, 2]]
        needed = self._peak[variant_at, codes]
        # The first to add to a gradient allocates it, the others add in place or to a sum: their peaks differ.
        needed[first] = self._first_peak[variant_at[first], codes[first]]
        during = level + np.maximum(needed, 0)
        if self._costs.sharded is None:  # a process frees before it gathers, and receives when it chooses
            during[:-1] = np.maximum(during[:-1], self._until_next(device, levels - of_turn, of_windows))
        left = int(levels[len(codes)]) if self._costs.sharded is not None else 0  # a bucket that was reduced last
        return max(outside, left, self._at_end(device, levels), int(during.max(initial=0))), during

    def _until_next(self, device: int, levels: np.ndarray, of_windows: np.ndarray) -> np.ndarray:
        """Bytes behind each action but the last, until the worker has exchanged what is there for the next one.

        Other workers go on as soon as they have an action's results, so what they send back may arrive before this
        worker frees weights. Then it allocates others, and then it frees values that have left::

            worker 0   F0 ── sends ──────────────────── frees weights ── allocates weights ── frees values ── B3
            worker 1               F1 ── sends, and allocates on worker 0's device

        Args:
            levels: bytes before each action, without those that change between forwards and backwards.
            of_windows: the part of their changes that is due to residency windows.
        """
        count = len(self._codes[device])
        until_values_free = (levels - self._offloaded[device])[1:count]
        until_weights_free = until_values_free - of_windows[1:count]
        most = np.maximum(until_values_free, until_weights_free)
        turn = backward_start(self._schedule.orders[device], self._schedule)
        # All weights are freed between the halves, and others are allocated behind that.
        if 0 < turn < count:
            most[turn - 1] = until_weights_free[turn - 1]
        return most

    def _enter_parameter_gradients(self, device: int, windows: Sequence[ResidencyWindow]) -> np.ndarray:
        """Gradients of parameters: from the first action that adds to them.

        Those of an offloaded model leave after each residency window, and so begin again in the next one.

        Returns:
            the positions of the first actions of each stage action, which have peaks of their own, too.
        """
        codes, change = self._codes[device], self._changes[device]
        variant_at = self._variant_of[self._schedule.orders[device][:, 2]]
        firsts = []
        for part in [window.positions for window in windows] or [range(len(codes))]:
            present, first = np.unique(codes[part.start : part.stop], return_index=True)
            firsts.append(first + part.start)
            # Within a window each parameter's gradient is allocated once, by the first action that adds to it.
            known: set[int] = set()
            for position, code in sorted(zip(firsts[-1].tolist(), present.tolist(), strict=True)):
                base = self.variants[variant_at[position]].base_bytes.get(self._steps[code], {})
                change[position + 1] += sum(size for owner, size in base.items() if owner not in known)
                known |= base.keys()
        return np.concatenate(firsts)

    def _enter_turn(self, device: int) -> int:
        """Enter what happens between forwards and backwards.

        Returns:
            bytes while outputs are put together and the loss is computed outside; 0 where neither happens.
        """
        costs, change = self._costs, self._changes[device]
        half_and_half = self._schedule.forwards_before_backwards
        turn = backward_start(self._schedule.orders[device], self._schedule)
        outside, is_callers = 0, self._is_callers(device)
        # Outputs of other devices arrive at the caller's, where the loss is computed.
        if is_callers and (costs.remote or half_and_half):
            # Parts of outputs that other devices computed arrive, then all parts are concatenated (`merged`), then the
            # loss runs.
            change[turn] += self._outputs - self._outputs_made[device]
        if is_callers and half_and_half:
            change[turn] += self._merged - self._outputs
            # Their parts are freed afterwards, but for those that a backward reads, which are counted already.
            put_together = (self._outputs if self._schedule.microbatches > 1 else 0) - self._parts_kept[device]
            level = int(np.cumsum(change)[turn])
            if costs.on_host is not None:
                # The caller gets the outputs on the host, where the loss is computed.
                outside = level + put_together
                change[turn] -= self._merged
            else:
                outside = level + max(self._of_batches(lambda variant: variant.outside_bytes), put_together)
                change[turn] += self._of_batches(lambda variant: variant.loss_bytes)
        brings_all = is_callers and (costs.remote or (costs.outputs_everywhere and half_and_half))
        change[turn] += sum(self._incoming_gradient_bytes) if brings_all else self._incoming_gradient_bytes[device]
        return outside

    def _is_callers(self, device: int) -> bool:
        """Return whether the caller gets the outputs on a device."""
        return device == self._callers or self._costs.outputs_everywhere

    def _copies(self, device: int) -> int:
        """Bytes of copies of the caller's tensors, which live for the whole step."""
        orders, costs = self._schedule.orders, self._costs
        if costs.on_host is not None and device == self._callers:
            return _copies(np.concatenate(orders), np.concatenate(self._codes), self._steps, costs)
        return _copies(orders[device], self._codes[device], self._steps, costs) if device in costs.remote else 0

    def _at_end(self, device: int, levels: np.ndarray) -> int:
        """Bytes at the end of the step: the caller's device holds all gradients, and concatenates those of inputs, and
        the outputs if they were not put together before."""
        whole = not self._schedule.forwards_before_backwards
        merged = self._merged if whole and self._schedule.microbatches > 1 else 0
        arrived = self._outputs - self._outputs_made[device] if whole and self._costs.outputs_everywhere else 0
        # A rank gets gradients of stages it does not run, since every replica of a dispatched model has all parameters.
        if self._costs.gradients_everywhere:
            codes = set(self._codes[device].tolist())
            steps = [self._steps[code] for code in codes]
            computed = {owner for step in steps for owner in self._costs.base_bytes.get(step, {})}
            others = {
                owner: size
                for of_step in self._costs.base_bytes.values()
                for owner, size in of_step.items()
                if owner not in computed
            }
            return int(levels[len(self._codes[device])]) + sum(others.values()) + arrived + merged
        if not self._is_callers(device):
            return 0
        variants = self._variant_of[: self._schedule.microbatches].tolist()
        put_together = 0  # inputs are concatenated one after another, and their parts freed
        if len(variants) > 1:
            put_together = sum(max(self._of_inputs[which].values(), default=0) for which in variants)
        # One device, or processes: everything is on the device already, and the level at the end counts it.
        if not self._costs.remote or self._costs.on_host is not None:
            return int(levels[len(self._codes[device])]) + arrived + max(put_together, merged)
        gradients = {
            owner: size
            for variant in self.variants
            for base in variant.base_bytes.values()
            for owner, size in base.items()
        }
        of_inputs = sum(sum(self._of_inputs[which].values()) for which in variants)
        together = max(put_together, merged)
        outputs = self._outputs if whole else self._merged
        return sum(gradients.values()) + of_inputs + together + outputs + sum(self._incoming_gradient_bytes)


def _sum_by_owner(gradients: Mapping[StageAction, Mapping[int, int]]) -> dict[int, int]:
    """Bytes by number of the input, whose gradient several stage actions may contribute to."""
    bytes_by_owner: dict[int, int] = {}
    for of_step in gradients.values():
        for owner, size in of_step.items():
            bytes_by_owner[owner] = max(size, bytes_by_owner.get(owner, 0))
    return bytes_by_owner


def _copies(order: np.ndarray, codes: np.ndarray, steps: Sequence[StageAction], costs: StepCosts) -> int:
    """Bytes of a device's copies of the caller's tensors, except those that stay on the host."""
    batches: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    for code, batch in zip(codes.tolist(), order[:, 2].tolist(), strict=True):
        for tensor, size in costs.copied_bytes.get(steps[code], {}).items():
            if tensor in (costs.on_host or ()):
                continue
            sizes[tensor] = size
            # A parameter is copied once; an input that each microbatch has for itself, once per microbatch.
            batches.setdefault(tensor, set()).add(0 if tensor in costs.parameters else batch)
    return sum(size * len(batches[tensor]) for tensor, size in sizes.items())


def _changes_of(windows: Sequence[ResidencyWindow], length: int) -> np.ndarray:
    """Changes by the tensors of residency windows; gradients of a window are freed when the next one is over."""
    change = np.zeros(length, dtype=np.int64)
    for window in windows:
        change[window.positions.start] += window.resident
        change[window.positions.stop] -= window.resident
    # Gradients of a window leave during the next one, and their memory is free behind that.
    for window, following in pairwise(windows):
        change[following.positions.stop] -= sum(window.gradients.values())
    return change
