"""Results of a run: outputs that every rank of a pipeline gets, wherever they are computed, and sums of gradients.

The ranks that own a tensor get its gradient. The lowest rank that has computed one adds the others' to its own in the
order of ranks, so the sum has the same bits in every run. A tensor that ranks 0, 1 and 3 read, and 0 and 1 own::

    rank 0    g0 ─── + g1 ─── + g3 ── mean over replicas, if there are any ─┬─▶ the gradient
    rank 1    g1 ──────┘        │                                           └─▶ the gradient
    rank 3    g3 ───────────────┘

    an output's source                             who has it          the other ranks of the pipeline get it
    result of a stage, up to 64 bytes              the stage's rank    in the record at the end of the run
    result of a stage, larger or of unknown size   the stage's rank    by a broadcast of its own
    tensor of the model                            its lowest owner    by a broadcast of its own
    a buffer's new value                           the stage's rank    never: they hold an expanded zero instead
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx.distributed.averaging import Averaging
from roundpipe_fx.distributed.group import PipelineGroup
from roundpipe_fx.distributed.layout import (
    ValueLayout,
    as_dense_row,
    as_strided_tensor,
    count,
    numbers_of,
    split_numbers,
)
from roundpipe_fx.distributed.run_end import EndBytes, RunEnd, SharedOutput, is_small
from roundpipe_fx.pipeline.capture.captured_calls import CapturedCalls
from roundpipe_fx.runtime.random_streams import RandomStream, state_of

_RESULTS = 3
"""The channel of gradients that are summed over ranks."""


@dataclass(frozen=True, kw_only=True)
class AgreedCalls(CapturedCalls):
    """Microbatches that all ranks agree on.

    Attributes:
        alone: whether they run in one pipeline, whatever its replicas do: an evaluation.
        averaged: whether gradients are averaged over the replicas.
        end_bytes: what each process tells the others at the end of a run.
    """

    alone: bool = False
    averaged: bool = True
    end_bytes: EndBytes = EndBytes()  # noqa: RUF009  frozen


def broadcast_value(group: PipelineGroup, value: Any, layout: ValueLayout, root: int) -> Any:
    """A rank's value on every rank. Every rank must call it; only the root's ``value`` is read."""
    mine = group.rank == root
    numbers = numbers_of([value], [layout]) if mine else [0] * layout.numbers
    if numbers:
        travelling = torch.tensor(numbers)
        group.share_tensor(travelling, root)
        numbers = travelling.tolist()
    (known,) = split_numbers([layout], numbers)
    if layout.kind != "tensor":
        return known
    if mine:
        body = as_dense_row(value, *known)
    else:
        device = group.device if layout.device != "cpu" else "cpu"
        body = torch.empty(count(*known), dtype=layout.dtype, device=device)
    if body.numel():
        group.share_tensor(body, root)
    return value if mine else as_strided_tensor(body, *known)


def sum_gradients(
    group: PipelineGroup,
    gradients: dict[int, torch.Tensor],
    shared: Sequence[tuple[int, Mapping[int, ValueLayout], frozenset[int]]],
    averaging: Averaging | None = None,
) -> None:
    """Sum the gradients of tensors that several ranks use, in the order of ranks, so that each gets the same bits.

    Args:
        gradients: this rank's, by identity of the tensor; changed.
        shared: in the same order on all ranks, for each such tensor: its identity here; the ranks that have computed a
            gradient, with its layout; the ranks that get the sum.
        averaging: over replicas of the pipeline; ``None``: there are none, or not in this step.
    """
    # All ranks walk the same list in the same order, so sends and receives match without tags.
    for key, computed, owners in shared:
        root = min(computed)
        gradient = gradients.pop(key, None)
        if group.rank == root:
            assert gradient is not None
            total = gradient
            del gradient  # so that no more than two others are there beside it, however many ranks add to it
            # In the order of the ranks: the bits of the sum do not depend on who is faster.
            for rank in sorted(computed.keys() - {root}):
                total = total + _receive(group, computed[rank], rank)
            if averaging is not None and key in averaging.over_ranks:
                total = averaging.mean(key, total)
            for rank in sorted(owners - {root}):
                _send(group, total, _layout_of_sum(key, computed[root], averaging), rank)
            if root in owners:
                gradients[key] = total
            continue
        if group.rank in computed:
            assert gradient is not None
            _send(group, gradient, computed[group.rank], root)
        if group.rank in owners:
            gradients[key] = _receive(group, _layout_of_sum(key, computed[root], averaging), root)


def _layout_of_sum(key: int, computed: ValueLayout, averaging: Averaging | None) -> ValueLayout:
    """The layout of a sum as its owners get it: of a sharded parameter, the rows of this replica."""
    if averaging is None or key not in averaging.sharded or key not in averaging.over_ranks:
        return computed
    return ValueLayout.of(averaging.sharded[key].local())


def _send(group: PipelineGroup, value: torch.Tensor, layout: ValueLayout, target: int) -> None:
    shape, stride = layout.shape or tuple(value.shape), layout.stride or tuple(value.stride())
    # Sizes first, where the receiver cannot know them.
    if layout.shape is None:
        group.start_send(torch.tensor([*shape, *stride]), target, _RESULTS).wait()
    body = as_dense_row(value, shape, stride)
    if body.numel():
        group.start_send(body, target, _RESULTS).wait()


def _receive(group: PipelineGroup, layout: ValueLayout, source: int) -> torch.Tensor:
    shape, stride = layout.shape, layout.stride
    if shape is None or stride is None:
        sizes = torch.empty(2 * layout.dims, dtype=torch.int64)
        group.start_receive(sizes, source, _RESULTS).wait()
        numbers = sizes.tolist()
        shape, stride = tuple(numbers[: layout.dims]), tuple(numbers[layout.dims :])
    body = torch.empty(count(shape, stride), dtype=layout.dtype, device=group.device)
    if body.numel():
        group.start_receive(body, source, _RESULTS).wait()
    return as_strided_tensor(body, shape, stride)


Where = Mapping[Any, int]
"""The rank that runs a (stage action, microbatch) of this run."""


def iterate_shared_outputs(
    captured: CapturedCalls, where: Where, owners: Mapping[int, frozenset[int]]
) -> Iterator[SharedOutput]:
    """The outputs of a run that every rank of the pipeline gets, in the same order on all.

    Args:
        owners: by identity, the ranks that own a tensor of the model.
    """
    for batch, program in enumerate(captured.programs):
        makers = {number: step for step, code in program.steps.items() for number in code.outputs}
        for position, source in enumerate(program.outputs):
            root, computed = None, False
            if source is not None and source.kind == "value" and position not in program.mutations:
                root, computed = where.get((makers[source.index], batch)), True  # None: of the forward, an earlier run
            elif source is not None and source.kind == "primal":
                root = min(owners.get(id(captured.primals[batch][source.index]), ()), default=None)
            if root is not None:
                layout = ValueLayout.of(captured.graphs[batch].outputs[position])
                yield SharedOutput(batch, position, layout, root, computed)


def replace_updates(captured: CapturedCalls, where: Where, outputs: Sequence[list[Any]], rank: int) -> None:
    """New values of buffers are of no use to ranks that do not own them: there they get one that takes no memory.

    Args:
        outputs: of each microbatch; changed.
    """
    for batch, program in enumerate(captured.programs):
        makers = {number: step for step, code in program.steps.items() for number in code.outputs}
        for position, primal in program.mutations.items():
            source = program.outputs[position]
            if source is not None and source.kind == "value":
                # Outside of the owner, a buffer's new value is an expanded zero: it has the shape, and no memory.
                root = where.get((makers[source.index], batch))
                if root is not None and root != rank:
                    original = captured.primals[batch][primal]
                    outputs[batch][position] = torch.zeros((), dtype=original.dtype, device=original.device).expand(
                        original.shape
                    )


def end_bytes_of(captured: CapturedCalls, device: torch.device) -> EndBytes:
    """Bytes in the record at the end of a run that this rank needs.

    Args:
        device: of whose generator they draw.
    """
    layouts = (
        ValueLayout.of(captured.graphs[batch].outputs[position])
        for batch, program in enumerate(captured.programs)
        for position, source in enumerate(program.outputs)
        if source is not None and source.kind == "value" and position not in program.mutations
    )
    draws = any(program.draws for program in captured.programs)
    return EndBytes.of(layouts, len(state_of(device)) if draws else 0)


def run_end_of(
    captured: AgreedCalls,
    where: Where,
    outputs: Sequence[SharedOutput],
    group: PipelineGroup,
    alike: Sequence[int],
    stream: RandomStream,
) -> RunEnd:
    """Make the record that ranks exchange when a run ends.

    Args:
        outputs: what every rank of the pipeline gets.
        alike: for each pipeline that runs, the first that began with the same state of the generator.
        stream: of the first microbatch, after which a step leaves the generator.
    """
    drawn = [step for step in captured.programs[0].draws if (step, 0) in where]
    number = group.part if captured.alone else group.replica * group.parts + group.part
    different = sorted(set(alike))
    return RunEnd(
        ranks=group.sharers if captured.alone else group.everyone,
        device=group.device,
        rank=group.rank,
        sizes=captured.end_bytes,
        pipeline=number,
        pipelines=len(alike),
        generator=different.index(alike[number]),
        generators=len(different),
        outputs=[output for output in outputs if is_small(output)],
        stream=stream if drawn else None,
        drew_last=bool(drawn) and where[drawn[-1], 0] == group.rank and alike[number] == number,
    )
