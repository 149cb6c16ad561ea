"""Sharding: parameters are sharded across replicas, as by FSDP2's ``fully_shard`` (ZeRO-3).

Each replica has some rows of every parameter, as a ``DTensor``: that is what the user's optimizer and checkpoints see.
The traced parameter stays the same object, without memory; a stage that reads it has it gathered before
(:mod:`roundpipe_fx.distributed.gathering`), and its gradient is reduced to rows
(:mod:`roundpipe_fx.distributed.averaging`). A parameter that is a single number has no rows: each replica has it, in
the memory of the traced one. ::

                     rows of a parameter of 7, for 3 replicas
    replica 0        0 1 2      a part has a third of the rows, rounded up,
    replica 1        3 4 5
    replica 2        6 · ·      and is padded, so that all parts are equally large

The modules of the model have the DTensors registered, except while a step is traced
(:meth:`ShardedParameters.traced`).

A gradient that is not averaged yet is whole on each replica: a DTensor whose placement says that the mean is to be
taken.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

StartGather = Callable[[torch.Tensor, torch.Tensor], dist.Work]
"""Starts filling a tensor from the parts of all replicas, given this one's: see ``Replicas.start_gather``."""


def check_shardable(name: str, value: nn.Parameter) -> None:
    """Refuse a parameter that cannot be sharded.

    Raises:
        ValueError: it is not contiguous, or has hooks.
    """
    if not value.is_contiguous():
        raise ValueError(f"the parameter {name!r} cannot be sharded, because it is not contiguous: call .contiguous().")
    if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            f"the parameter {name!r} has hooks, which the DTensor in its place would not have: register them after "
            "model.trace(…), on model.named_parameters()."
        )


def is_to_average(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is of steps that were not averaged."""
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """A parameter of which each replica has some rows.

    Attributes:
        traced: the parameter that stages read; it has memory only while it is gathered.
        dtensor: the DTensor with this replica's rows.
        part: number of this one.
    """

    traced: nn.Parameter
    dtensor: nn.Parameter
    parts: int
    part: int

    @property
    def rows(self) -> int:
        """Rows of a part, with padding."""
        return -(-self.traced.shape[0] // self.parts)

    @property
    def count(self) -> int:
        """Elements of a part, with padding."""
        return self.rows * math.prod(self.traced.shape[1:])

    @property
    def bytes(self) -> int:
        """Bytes of the gathered parameter, with padding."""
        return self.count * self.parts * self.traced.element_size()

    def local(self) -> torch.Tensor:
        """This replica's rows."""
        with torch.no_grad():
            rows: torch.Tensor = self.dtensor.detach().to_local()  # type: ignore[attr-defined]
        return rows

    def padded(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The elements of this replica's part with its padding, one-dimensional; a view if there is memory for it.

        Args:
            rows: of another tensor of this shape; ``None``: of the parameter.
        """
        rows = self.local() if rows is None else rows
        # Memory for padding exists behind the rows unless the user has replaced them: then a view suffices.
        room = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset()
        if rows.is_contiguous() and room >= self.count:
            return rows.as_strided((self.count,), (1,), rows.storage_offset())
        flat = rows.new_zeros(self.count)
        flat[: rows.numel()].copy_(rows.reshape(-1))
        return flat

    def whole(self, gather: StartGather, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The parameter, or another tensor of its shape, from the rows of all replicas, which must call it together."""
        part = self.padded(rows)
        gathered = part.new_empty(self.count * self.parts)
        gather(gathered, part).wait()
        return gathered[: self.traced.numel()].view(self.traced.shape)

    def rows_of(self, flat: torch.Tensor) -> torch.Tensor:
        """A part's elements as rows, without padding."""
        return flat.view(self.rows, *self.traced.shape[1:])[: len(self.local())]

    def allocate(self) -> torch.Tensor:
        """Give the traced parameter memory; returns all of it, padding included, one-dimensional."""
        self.traced.untyped_storage().resize_(self.bytes)
        # Autograd does not see what is written through ``data``: values that were saved stay valid.
        return self.traced.data.as_strided((self.count * self.parts,), (1,), 0)

    def free(self) -> None:
        """Free the traced parameter's memory."""
        self.traced.untyped_storage().resize_(0)

    def write(self, values: torch.Tensor) -> None:
        """Take over this replica's rows of the whole parameter's values."""
        rows, first = self.local(), self.part * self.rows
        rows.copy_(values[first : first + len(rows)])

    def padded_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The elements of a whole gradient with the padding of its last parts, one-dimensional."""
        flat = gradient.reshape(-1)
        missing = self.count * self.parts - len(flat)
        return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat

    def holds_rows_of(self, other: DTensor) -> bool:
        """Return whether a DTensor has on each rank the rows that this parameter has there."""
        parameter: DTensor = self.dtensor  # type: ignore[assignment]
        return other.device_mesh == parameter.device_mesh and other.placements == parameter.placements


class ShardedParameters:
    """The parameters of one rank that are sharded.

    Args:
        mesh: of the replicas, one-dimensional; ``None``: no parameter is sharded.

    Attributes:
        by_traced: those that have rows, by identity of the traced parameter.
        receivers: the DTensors in place of traced parameters, single numbers too, by identity of those.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.by_traced: dict[int, ShardedParameter] = {}
        self.receivers: dict[int, nn.Parameter] = {}
        self._traced: dict[int, nn.Parameter] = {}
        """By identity of the DTensor."""
        self._attributes: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        """Where traced parameters are registered, and their names there."""

    def shard(self, model: nn.Module, owned: Iterable[tuple[str, torch.Tensor]], unloaded: set[int]) -> None:
        """Shard what a rank owns.

        Args:
            model: whose modules get the DTensors.
            owned: names and tensors; buffers stay whole.
            unloaded: identities of those that have no values yet.
        """
        if self.mesh is None:
            return
        for _, value in owned:
            if not isinstance(value, nn.Parameter) or id(value) in self.receivers:
                continue
            if value.dim():
                sharded = self._sharded(value, with_values=id(value) not in unloaded)
                self.by_traced[id(value)], dtensor = sharded, sharded.dtensor
            else:
                dtensor = _make_substitute(value, _distributed(value.detach(), self.mesh, value, Replicate()))
            self.receivers[id(value)], self._traced[id(dtensor)] = dtensor, value
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in self.receivers:
                    self._attributes.append((module._parameters, name, parameter))
        self._register(traced=False)

    def _sharded(self, value: nn.Parameter, with_values: bool) -> ShardedParameter:
        assert self.mesh is not None
        parts, part = self.mesh.size(), self.mesh.get_local_rank()
        # Rows per part, rounded up: the last parts may be shorter, or empty.
        chunk = -(-value.shape[0] // parts)
        rows = max(min(value.shape[0] - part * chunk, chunk), 0)
        padded = torch.zeros((chunk, *value.shape[1:]), dtype=value.dtype, device=value.device)
        parameter = _make_substitute(value, _distributed(padded[:rows], self.mesh, value, Shard(0)))
        sharded = ShardedParameter(traced=value, dtensor=parameter, parts=parts, part=part)
        if with_values:
            sharded.write(value.data)
        # Its memory may be a part of another tensor's, or not be PyTorch's.
        value.data = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        sharded.free()
        return sharded

    def traced_of(self, value: torch.Tensor) -> torch.Tensor:
        """The traced parameter of a DTensor; other tensors themselves."""
        return self._traced.get(id(value), value)

    def distribute(self, gradients: dict[int, torch.Tensor], averaged: bool, gather: StartGather) -> None:
        """Make gradients DTensors, as their receivers are.

        Args:
            gradients: by identity of the traced parameter: this replica's rows of the mean; or its own whole ones.
            gather: gathers parts of all replicas.
        """
        for key, receiver in self.receivers.items():  # in the model's order, since ranks gather together
            value = gradients.get(key)
            if value is None:
                continue
            # The mean's rows are the gradient of the DTensor.
            if averaged:
                placement = Shard(0) if key in self.by_traced else Replicate()
                gradients[key] = _distributed(value, receiver.device_mesh, receiver, placement)  # type: ignore[attr-defined]
                continue
            gradients[key] = self._to_average(value)
            # Gradients of earlier, averaged steps are rows; to add whole ones they are gathered first.
            if receiver.grad is not None and not is_to_average(receiver.grad):  # the mean of earlier steps
                assert isinstance(receiver.grad, DTensor)
                mean, sharded = receiver.grad.to_local(), self.by_traced.get(key)
                receiver.grad = self._to_average(mean if sharded is None else sharded.whole(gather, mean))

    def _to_average(self, whole: torch.Tensor) -> DTensor:
        assert self.mesh is not None
        return _distributed(whole, self.mesh, whole, Partial("avg"))

    def fill(self, sharded: ShardedParameter, write: Callable[[torch.Tensor], object]) -> None:
        """Write all values of a parameter, of which this replica's are kept."""
        sharded.allocate()
        try:
            with torch.no_grad():
                write(sharded.traced.data)
                sharded.write(sharded.traced.data)
        finally:
            sharded.free()

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Context manager in which the model has the traced parameters, without values."""
        # The user may freeze a parameter between steps, on the DTensor that the model shows.
        for receiver in self.receivers.values():
            traced = self._traced[id(receiver)]
            if traced.requires_grad != receiver.requires_grad:  # the user has frozen it
                traced.requires_grad_(receiver.requires_grad)
        self._register(traced=True)
        try:
            yield
        finally:
            self._register(traced=False)

    def _register(self, traced: bool) -> None:
        for registered, name, parameter in self._attributes:
            registered[name] = parameter if traced else self.receivers[id(parameter)]


def _make_substitute(value: nn.Parameter, distributed: DTensor) -> nn.Parameter:
    parameter = nn.Parameter(distributed, value.requires_grad)
    parameter.__dict__.update(value.__dict__)
    return parameter


def _distributed(local: torch.Tensor, mesh: DeviceMesh, whole: torch.Tensor, placement: Placement) -> DTensor:
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
