"""Shared outputs: what every rank of a pipeline over processes gets of a run, wherever it is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from roundpipe_fx.distributed.group import PipelineGroup
from roundpipe_fx.distributed.layout import ValueLayout
from roundpipe_fx.distributed.run_end import EndBytes, RunEnd, SharedOutput, is_small
from roundpipe_fx.pipeline.captured_calls import CapturedCalls
from roundpipe_fx.runtime.random_streams import RandomStream, state_of

__all__ = ["end_bytes_of", "replace_updates", "run_end_of", "shared_outputs_of"]

Where = Mapping[Any, int]
"""The rank that runs a (stage action, microbatch) of this run."""


def shared_outputs_of(
    captured: CapturedCalls, where: Where, owners: Mapping[int, frozenset[int]]
) -> Iterator[SharedOutput]:
    """The outputs of a run that every rank of the pipeline gets, in the same order on all.

    Args:
        captured: the microbatches.
        where: who runs what.
        owners: by identity, the ranks that own a tensor of the model.
    """
    for batch, program in enumerate(captured.programs):
        makers = {number: step for step, code in program.steps.items() for number in code.outputs}
        for place, source in enumerate(program.outputs):
            root, computed = None, False
            if source is not None and source.kind == "value" and place not in program.mutations:
                root, computed = where.get((makers[source.index], batch)), True  # None: of the forward, an earlier run
            elif source is not None and source.kind == "primal":
                root = min(owners.get(id(captured.primals[batch][source.index]), ()), default=None)
            if root is not None:
                layout = ValueLayout.of(captured.graphs[batch].outputs[place])
                yield SharedOutput(batch, place, layout, root, computed)


def replace_updates(captured: CapturedCalls, where: Where, outputs: Sequence[list[Any]], rank: int) -> None:
    """New values of buffers are of no use to ranks that do not own them: there they get one that takes no memory.

    Args:
        captured: the microbatches.
        where: who runs what.
        outputs: of each microbatch; changed.
        rank: this one's number.
    """
    for batch, program in enumerate(captured.programs):
        makers = {number: step for step, code in program.steps.items() for number in code.outputs}
        for place, primal in program.mutations.items():
            source = program.outputs[place]
            if source is not None and source.kind == "value":
                root = where.get((makers[source.index], batch))
                if root is not None and root != rank:
                    like = captured.primals[batch][primal]
                    outputs[batch][place] = torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


def end_bytes_of(captured: CapturedCalls, device: torch.device) -> EndBytes:
    """Bytes in the record at the end of a run that this rank needs.

    Args:
        captured: the microbatches.
        device: of whose generator they draw.
    """
    layouts = (
        ValueLayout.of(captured.graphs[batch].outputs[place])
        for batch, program in enumerate(captured.programs)
        for place, source in enumerate(program.outputs)
        if source is not None and source.kind == "value" and place not in program.mutations
    )
    draws = any(program.draws for program in captured.programs)
    return EndBytes.of(layouts, len(state_of(device)) if draws else 0)


def run_end_of(
    captured: CapturedCalls,
    where: Where,
    outputs: Sequence[SharedOutput],
    group: PipelineGroup,
    alike: Sequence[int],
    stream: RandomStream,
) -> RunEnd:
    """What ranks tell each other when a run ends.

    Args:
        captured: the microbatches.
        where: who runs what.
        outputs: what every rank of the pipeline gets.
        group: the pipeline.
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
