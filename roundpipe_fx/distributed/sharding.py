"""Sharding: parameters that replicas share out among each other, as FSDP2's ``fully_shard`` does (ZeRO-3).

Each replica has some rows of every parameter, as a ``DTensor``: that is what the user's optimizer and checkpoints see.
The traced parameter stays the same object, without memory; a stage that reads it has it gathered before
(:mod:`roundpipe_fx.distributed.gathering`), and its gradient is reduced to rows
(:mod:`roundpipe_fx.distributed.averaging`). ::

                     rows of a parameter of 7, for 3 replicas
    replica 0        0 1 2      a part has a third of the rows, rounded up,
    replica 1        3 4 5
    replica 2        6 · ·      and is padded, so that all parts are equally large

The modules of the model have the DTensors registered, except while a step is traced
(:meth:`ShardedParameters.traced`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

__all__ = ["ShardedParameter", "ShardedParameters", "check_shardable", "padded_bytes"]


def padded_bytes(value: torch.Tensor, parts: int) -> int:
    """Bytes of a tensor whose rows are padded to so many equal parts."""
    rows = -(-value.shape[0] // parts) * parts if value.dim() else 1
    return rows * math.prod(value.shape[1:]) * value.element_size()


def check_shardable(name: str, value: nn.Parameter) -> None:
    """Refuse a parameter that cannot be sharded.

    Raises:
        ValueError: it has no rows, is not contiguous, or has hooks.
    """
    if not value.dim():
        raise ValueError(
            f"the parameter {name!r} is a single number, which has no rows to shard: make it a tensor of one element."
        )
    if not value.is_contiguous():
        raise ValueError(f"the parameter {name!r} cannot be sharded, because it is not contiguous: call .contiguous().")
    if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            f"the parameter {name!r} has hooks, which the DTensor in its place would not have: register them after "
            "model.trace(…), on model.named_parameters()."
        )


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """A parameter of which each replica has some rows.

    Attributes:
        traced: the parameter that stages read; it has memory only while it is gathered.
        own: the DTensor with this replica's rows.
        parts: number of replicas.
        part: number of this one.
    """

    traced: nn.Parameter
    own: nn.Parameter
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
            rows: torch.Tensor = self.own.detach().to_local()  # type: ignore[attr-defined]
        return rows

    def padded(self) -> torch.Tensor:
        """The elements of this replica's part with its padding, one-dimensional; a view if there is memory for it."""
        rows = self.local()
        room = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset()
        if rows.is_contiguous() and room >= self.count:
            return rows.as_strided((self.count,), (1,), rows.storage_offset())
        flat = rows.new_zeros(self.count)
        flat[: rows.numel()].copy_(rows.reshape(-1))
        return flat

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
        """Whether a DTensor has on each rank the rows that this parameter has there."""
        own: DTensor = self.own  # type: ignore[assignment]
        return other.device_mesh == own.device_mesh and other.placements == own.placements

    def as_gradient(self, rows: torch.Tensor) -> torch.Tensor:
        """This replica's rows of the gradient, as a DTensor."""
        return _distributed(rows, self.own.device_mesh, self.traced)  # type: ignore[attr-defined]


class ShardedParameters:
    """The parameters of one rank that are sharded.

    Args:
        mesh: of the replicas, one-dimensional; ``None``: no parameter is sharded.

    Attributes:
        mesh: likewise.
        by_traced: by identity of the traced parameter.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.by_traced: dict[int, ShardedParameter] = {}
        self._by_own: dict[int, ShardedParameter] = {}
        self._places: list[tuple[dict[str, nn.Parameter | None], str, ShardedParameter]] = []

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
            if isinstance(value, nn.Parameter) and id(value) not in self.by_traced:
                made = self._sharded(value, with_values=id(value) not in unloaded)
                self.by_traced[id(value)] = self._by_own[id(made.own)] = made
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in self.by_traced:
                    self._places.append((module._parameters, name, self.by_traced[id(parameter)]))
        self._register(traced=False)

    def _sharded(self, value: nn.Parameter, with_values: bool) -> ShardedParameter:
        assert self.mesh is not None
        parts, part = self.mesh.size(), self.mesh.get_local_rank()
        chunk = -(-value.shape[0] // parts)
        rows = max(min(value.shape[0] - part * chunk, chunk), 0)
        padded = torch.zeros((chunk, *value.shape[1:]), dtype=value.dtype, device=value.device)
        own = nn.Parameter(_distributed(padded[:rows], self.mesh, value), value.requires_grad)
        own.__dict__.update(value.__dict__)
        made = ShardedParameter(traced=value, own=own, parts=parts, part=part)
        if with_values:
            made.write(value.data)
        # Its memory may be a part of another tensor's, or not be PyTorch's.
        value.data = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        made.free()
        return made

    def of_own(self, value: torch.Tensor) -> ShardedParameter | None:
        """The sharded parameter of a DTensor; ``None`` for other tensors."""
        return self._by_own.get(id(value))

    @property
    def receivers(self) -> Mapping[int, nn.Parameter]:
        """The DTensors that get gradients, by identity of the traced parameter."""
        return {key: sharded.own for key, sharded in self.by_traced.items()}

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
        for sharded in self.by_traced.values():
            if sharded.traced.requires_grad != sharded.own.requires_grad:  # the user has frozen it
                sharded.traced.requires_grad_(sharded.own.requires_grad)
        self._register(traced=True)
        try:
            yield
        finally:
            self._register(traced=False)

    def _register(self, traced: bool) -> None:
        for registered, name, sharded in self._places:
            registered[name] = sharded.traced if traced else sharded.own


def _distributed(rows: torch.Tensor, mesh: DeviceMesh, whole: torch.Tensor) -> DTensor:
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
