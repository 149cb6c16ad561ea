"""A tape: the operations of a gradient checkpoint scope, recorded to be replayed.

Operations are recorded below autograd and autocast, so exactly the operations that ran are replayed, without either. A
tape knows *storages*, not tensors: an operation is recorded with the storages that it allocates and writes, and a
tensor is a storage with sizes, strides and an offset, so views are not replayed.

- Random operations are recorded with the state of their generator, and leave the generator as it was.
- Results of operations that must run once (:mod:`roundpipe_fx.analysis.host_sync`) are kept, not recorded.
- A tensor from outside that the scope updates in place is copied before the first update; replaying works on that copy.
- Only the recorded operations that lead to the wanted tensors are replayed, and their results die at their last use.

RETURNN's weight noise needs it: a scope there computes a noisy copy of each weight, which the layer outside reads
(``NoisyWeights`` in ``tests/compat/checkpointing/models.py``).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx import torch_private
from roundpipe_fx.analysis.host_sync import registered_sync_ops, why_host_sync
from roundpipe_fx.torch_private import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor as part of a storage, which is numbered."""

    number: int
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def make_tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Make the tensor on a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TapeEntry:
    """One operation.

    Attributes:
        leaves: its arguments, flat; tensors as :class:`View`.
        reads: numbers of the storages that it reads or writes.
        writes: numbers of those it writes.
        makes: by result, the number of the storage that it allocates; ``None`` if it allocates none.
        states: generators that it draws from, with their states before.
    """

    operator: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    reads: frozenset[int]
    writes: frozenset[int]
    makes: tuple[int | None, ...]
    states: tuple[tuple[torch.Generator, torch.Tensor], ...]


@dataclass(slots=True)
class _Input:
    """A storage from outside: a tensor on it (or what gives one), its version, a copy if the scope updates it."""

    tensor: Callable[[], torch.Tensor]
    version: Callable[[], int]
    expected: int
    copy: torch.UntypedStorage | None = None


class Tape:
    """Records operations, and recomputes storages.

    Args:
        refer: for a tensor from outside, a function that gives it later without keeping it, or ``None``.
        on_death: called when a storage that was allocated on this tape has died.
    """

    def __init__(
        self, refer: Callable[[torch.Tensor], Callable[[], torch.Tensor] | None], on_death: Callable[[], None]
    ) -> None:
        self._refer = refer
        self._on_death = on_death
        self._steps: list[_TapeEntry] = []
        self._inputs: dict[int, _Input] = {}
        self._numbers: dict[int, int] = {}
        """Numbers of live storages: those allocated here, and those from outside that were read."""
        self._versions: dict[int, int] = {}
        """By number of a storage allocated here: the version of its tensors, as far as the scope has seen."""
        self._count = 0

    def find_view(self, tensor: torch.Tensor) -> View | None:
        """Find the part of a storage of this tape that a tensor is; ``None`` if its contents are not known."""
        if not _is_plain(tensor):
            return None
        number = self._numbers.get(storage_key(tensor))
        # Changed since it was recorded, by an operation that is not on the tape: what it holds now cannot be replayed.
        if number is None or self._versions.get(number) != tensor._version:
            return None
        return view_of(tensor, number)

    @property
    def lives(self) -> bool:
        """Return whether any storage allocated here is alive."""
        return any(number in self._versions for number in self._numbers.values())

    def count_writes(self, number: int) -> int:
        """Number of times that the scope has updated a storage in place."""
        return sum(number in step.writes for step in self._steps)

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and record it."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        written = _find_written(operator, args, kwargs)
        if not all(map(_is_plain, tensors)):
            for tensor in filter(_is_plain, written):  # from here on something from outside, with contents of its own
                self._numbers.pop(storage_key(tensor), None)
            return operator(*args, **kwargs)
        # Before the operation runs: afterwards the old contents are gone.
        for tensor in written:
            self._copy_before_update(tensor)
        states = _save_generator_states(operator, leaves)
        result = operator(*args, **kwargs)
        results = tree_leaves(result)
        # Results that share memory with an argument are views of it, or the argument itself; only others are allocated
        # here.
        argument_keys = {storage_key(tensor) for tensor in tensors}
        allocated: dict[int, int | None] = {}
        for tensor in results:
            if isinstance(tensor, torch.Tensor) and _is_plain(tensor) and storage_key(tensor) not in argument_keys:
                allocated.setdefault(storage_key(tensor), None)
        result_tensors = [tensor for tensor in results if isinstance(tensor, torch.Tensor)]
        asks = why_host_sync(operator, args, tensors, result_tensors, registered_sync_ops()) is not None
        # Operations that allocate and write nothing make views, which are not replayed; host synchronizations run once,
        # and their results become inputs.
        if (allocated or written) and not asks:
            positions = []
            views = tuple(self._view(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
            for tensor in results:
                plain = isinstance(tensor, torch.Tensor) and _is_plain(tensor)
                fresh = plain and allocated.get(storage_key(tensor), 0) is None
                positions.append(self._number(tensor) if fresh else None)
                if fresh:
                    allocated[storage_key(tensor)] = positions[-1]
            numbers = [self._numbers[storage_key(tensor)] for tensor in written]
            for number, tensor in zip(numbers, written, strict=True):
                if number in self._versions:
                    self._versions[number] = tensor._version + 1  # autograd counts when the operation returns
            reads = frozenset(view.number for view in views if isinstance(view, View))
            self._steps.append(
                _TapeEntry(
                    operator=operator,
                    leaves=views,
                    spec=spec,
                    reads=reads,
                    writes=frozenset(numbers),
                    makes=tuple(positions),
                    states=states,
                )
            )
        return result

    def _number(self, tensor: torch.Tensor) -> int:
        """Number a storage that was just allocated."""
        number = self._watch(tensor)
        self._versions[number] = tensor._version
        return number

    def _watch(self, tensor: torch.Tensor) -> int:
        number = self._count
        self._count += 1
        key = storage_key(tensor)
        self._numbers[key] = number
        death = weakref.finalize(tensor.untyped_storage(), _forget, weakref.ref(self), key, number)
        death.atexit = False
        return number

    def forget(self, key: int, number: int) -> None:
        """A storage has died."""
        # A storage's address may be used again; then the number has changed, and the newer one stays.
        if self._numbers.get(key) == number:
            del self._numbers[key]
            if number in self._versions:
                self._on_death()

    def _view(self, tensor: torch.Tensor) -> View:
        """An argument as part of a numbered storage."""
        key = storage_key(tensor)
        if key not in self._numbers:
            self._add_input(tensor, self._watch(tensor))
        return view_of(tensor, self._numbers[key])

    def _add_input(self, tensor: torch.Tensor, number: int) -> None:
        # Values of an outer scope are not kept alive: that scope recomputes them when they are asked for.
        get_tensor = self._refer(tensor)
        if get_tensor is not None:
            self._inputs[number] = _Input(get_tensor, lambda: 0, 0)
            return
        detached = torch_private.detached_with_version(tensor)  # holds no graph
        self._inputs[number] = _Input(lambda: detached, lambda: detached._version, detached._version)

    def _copy_before_update(self, tensor: torch.Tensor) -> None:
        number = self._view(tensor).number
        entry = self._inputs.get(number)
        if entry is not None and entry.copy is None:
            entry.copy = tensor.untyped_storage().clone()

    def prune(self, roots: Collection[int]) -> None:
        """Drop what does not lead to these storages."""
        self._steps = self._find_entries_leading_to(roots)
        read = {number for step in self._steps for number in step.reads}
        self._inputs = {number: entry for number, entry in self._inputs.items() if number in read}

    def _find_entries_leading_to(self, roots: Collection[int]) -> list[_TapeEntry]:
        needed = set(roots)
        entries = []
        # Backwards, as liveness is computed: an entry is needed if it makes or writes what is needed so far, and then
        # what it reads is needed, too.
        for step in reversed(self._steps):
            if needed.isdisjoint(step.writes) and needed.isdisjoint(step.makes):
                continue
            entries.append(step)
            needed |= step.reads
        return entries[::-1]

    def recompute(self, roots: Collection[int]) -> dict[int, torch.UntypedStorage]:
        """Run what leads to these storages, and nothing else.

        Raises:
            RuntimeError: a tensor from outside has been updated in place since.
        """
        steps = self._find_entries_leading_to(roots)
        last: dict[int, int] = {}
        for position, step in enumerate(steps):
            # The last entry that reads a storage, or that makes one that nobody reads.
            last.update(dict.fromkeys((*step.reads, *(n for n in step.makes if n is not None)), position))
        live: dict[int, torch.UntypedStorage] = {}
        with _below_autograd({view.device.type for step in steps for view in step.leaves if isinstance(view, View)}):
            for position, step in enumerate(steps):
                self._rerun(step, live)
                # Freed at the last use, so that replaying needs no more memory than the forward did.
                for dead in [n for n in live if last.get(n, -1) <= position and n not in roots]:
                    del live[dead]
        return {number: live[number] for number in roots}

    def _rerun(self, step: _TapeEntry, live: dict[int, torch.UntypedStorage]) -> None:
        for number in step.reads - live.keys():
            live[number] = self._input_storage(number)
        leaves = [leaf.make_tensor(live[leaf.number]) if isinstance(leaf, View) else leaf for leaf in step.leaves]
        args, kwargs = tree_unflatten(leaves, step.spec)
        with _use_generator_states(step.states):
            results = tree_leaves(step.operator(*args, **kwargs))
        for allocated, result in zip(step.makes, results, strict=True):
            if allocated is not None:
                live[allocated] = result.untyped_storage()

    def _input_storage(self, number: int) -> torch.UntypedStorage:
        entry = self._inputs[number]
        if entry.copy is not None:
            # Cloned once more: replaying updates it in place, and it may be replayed again.
            return entry.copy.clone()
        if entry.version() != entry.expected:
            shape = tuple(entry.tensor().shape)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {shape} that a gradient_checkpoint_scope reads is at version {entry.version()}; "
                f"expected version {entry.expected} instead."
            )
        return entry.tensor().untyped_storage()


def _forget(tape: weakref.ref[Tape], key: int, number: int) -> None:
    alive_tape = tape()
    if alive_tape is not None:
        alive_tape.forget(key, number)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, while it lives."""
    return tensor.untyped_storage()._cdata


def view_of(tensor: torch.Tensor, number: int) -> View:
    """A tensor as part of the storage with this number."""
    return View(
        number=number,
        dtype=tensor.dtype,
        device=tensor.device,
        size=tensor.size(),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


_UNDECLARED = ("running_mean", "running_var")
"""Arguments that normalizations (``native_batch_norm``) update although their schemas do not declare it."""


def _find_written(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors that an operator updates in place."""
    written: list[Any] = []
    for position, argument in enumerate(operator._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in _UNDECLARED:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += tree_leaves(value)
    return [value for value in written if isinstance(value, torch.Tensor)]


def _save_generator_states(operator: Any, leaves: Sequence[Any]) -> tuple[tuple[torch.Generator, torch.Tensor], ...]:
    """The generators that an operator may draw from, with their states."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return ()
    generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
    if not generators:
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
        devices |= {torch.device(leaf) for leaf in leaves if isinstance(leaf, torch.device)}
        generators = [_default_generator(device) for device in sorted(devices, key=str)] or [torch.default_generator]
    return tuple((generator, generator.get_state()) for generator in generators)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextlib.contextmanager
def _use_generator_states(states: Sequence[tuple[torch.Generator, torch.Tensor]]) -> Iterator[None]:
    """Context manager in which generators have these states; afterwards they have their own."""
    before = [(generator, generator.get_state()) for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


@contextlib.contextmanager
def _below_autograd(devices: Collection[str]) -> Iterator[None]:
    """Context manager below autograd and autocast, where the operations were recorded."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in sorted(devices):
            if torch.amp.is_autocast_available(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
