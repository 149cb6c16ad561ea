"""The end of a run: one exchange of failures, losses and generator states between all ranks.

It is a maximum over ranks, byte by byte, of a record in which each rank writes what it alone knows::

    failed | for each state of the generator with which pipelines began: drawn, state | for each pipeline: small outputs

What every rank gets is small: the state in which the step leaves the generator, which only the rank knows that has
drawn last, and losses of microbatches. Larger outputs follow one by one (:mod:`roundpipe_fx.distributed.results`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx.distributed.layout import (
    ValueLayout,
    as_dense_row,
    as_strided_tensor,
    count,
    numbers_of,
    split_numbers,
)
from roundpipe_fx.distributed.ranks import Ranks
from roundpipe_fx.runtime.random_streams import RandomStream

_SMALL = 64
"""Bytes of an output up to which it is part of the record."""


def _small_bytes(layout: ValueLayout) -> int | None:
    """Bytes of an output in a record; ``None`` if it is not small, or its size depends on data."""
    if layout.kind != "tensor":
        return 8
    if layout.shape is None or layout.stride is None:
        return None
    size = count(layout.shape, layout.stride) * layout.dtype.itemsize
    return size if size <= _SMALL else None


@dataclass(frozen=True)
class SharedOutput:
    """An output that every rank of a pipeline gets.

    Attributes:
        root: the rank of the pipeline that has it.
        computed: whether a stage has computed it; an input's is known only after the run.
    """

    microbatch: int
    position: int
    layout: ValueLayout
    root: int
    computed: bool


def is_small(output: SharedOutput) -> bool:
    """Return whether an output is part of the record."""
    return output.computed and _small_bytes(output.layout) is not None


@dataclass(frozen=True)
class EndBytes:
    """Bytes in a record, the same on all ranks.

    Attributes:
        state: of a generator's state; 0: no rank draws.
        outputs: of the small outputs of a pipeline.
    """

    state: int = 0
    outputs: int = 0

    @classmethod
    def of(cls, layouts: Iterable[ValueLayout], state: int) -> EndBytes:
        """Make the entries of some outputs and a state."""
        return cls(state, sum(_small_bytes(layout) or 0 for layout in layouts))


@dataclass(kw_only=True)
class RunEnd:
    """This rank's entries of the record, and those that it takes from it.

    Attributes:
        rank: this one's number in its pipeline.
        sizes: of parts of the record.
        pipeline: number of this pipeline among those that run together.
        pipelines: how many there are.
        generator: number of the state with which this pipeline began, among different ones.
        generators: how many different ones there are.
        outputs: small ones that the ranks of this pipeline get.
        stream: whose state the step leaves the generator in; ``None``: nothing is drawn here.
        drew_last: whether this rank has drawn the last random numbers of the first pipeline that began with the state.
    """

    ranks: Ranks
    device: torch.device
    rank: int
    sizes: EndBytes
    pipeline: int
    pipelines: int
    generator: int
    generators: int
    outputs: Sequence[SharedOutput]
    stream: RandomStream | None
    drew_last: bool

    def exchange(self, failed: bool, outputs: Sequence[list[Any]]) -> bool:
        """Exchange records.

        Args:
            failed: whether this rank has.
            outputs: of each microbatch; those of other ranks are put in if no rank has failed.

        Returns:
            whether any rank has failed.
        """
        state, small = (self.sizes.state and 1 + self.sizes.state), self.sizes.outputs
        # A maximum of bytes: every rank writes only its own fields, all others are zero, so the maximum is the union.
        record = torch.zeros(1 + self.generators * state + self.pipelines * small, dtype=torch.uint8)
        generator_record = record[1 + self.generator * state :][:state]
        start = 1 + self.generators * state + self.pipeline * small
        parts = []
        for output in self.outputs:
            size = _small_bytes(output.layout) or 0
            parts.append(record[start : start + size])
            start += size
        # The first byte: whether any rank has failed. If so, nothing else of the record is read.
        record[0] = failed
        if not failed:
            if self.stream is not None and self.drew_last:
                generator_record[0] = True
                generator_record[1:] = self.stream.state
            for output, part in zip(self.outputs, parts, strict=True):
                if output.root == self.rank:
                    part.copy_(_bytes(outputs[output.microbatch][output.position], output.layout))
        self.ranks.maximum(record)
        if record[0]:
            return True
        if self.stream is not None and generator_record[0]:
            self.stream.state = generator_record[1:].clone()
            self.stream.drawn = True
        for output, part in zip(self.outputs, parts, strict=True):
            if output.root != self.rank:
                outputs[output.microbatch][output.position] = _value(part, output.layout, self.device)
        return False


def _bytes(value: Any, layout: ValueLayout) -> torch.Tensor:
    if layout.kind != "tensor":
        return torch.tensor(numbers_of([value], [layout])).view(torch.uint8)
    assert layout.shape is not None and layout.stride is not None
    return as_dense_row(value.detach(), layout.shape, layout.stride).view(torch.uint8).cpu()


def _value(part: torch.Tensor, layout: ValueLayout, device: torch.device) -> Any:
    if layout.kind != "tensor":
        return split_numbers([layout], part.clone().view(torch.int64).tolist())[0]
    assert layout.shape is not None and layout.stride is not None
    body = part.clone().view(layout.dtype)
    if layout.device != "cpu":
        body = body.to(device)
    return as_strided_tensor(body, layout.shape, layout.stride)
