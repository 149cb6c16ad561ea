"""Agreement: before each run all ranks compare what they are about to do, so that a difference is an error on all.

Ranks plan alike because planning is deterministic. Where options, batches, code or versions differ, schedules would
differ too, and ranks would wait for each other for ever. So digests are exchanged, and texts if they differ: options
and batch before anything is traced, so that a wrong batch leaves no rank with a graph that others do not have; graph
and plan before anything runs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from roundpipe_fx.distributed.errors import RanksDifferError, RemoteError
from roundpipe_fx.distributed.group import PipelineGroup

__all__ = ["Statement", "agree", "together"]


@dataclass(frozen=True)
class Statement:
    """What a rank is about to do.

    Attributes:
        texts: by name (options, batch, graph, plan), what is to be the same on all ranks; empty after a failure.
        generator: the state of the generator that the step draws from.
        failure: what tracing or planning has raised; ``None`` if nothing.
    """

    texts: dict[str, str] = field(default_factory=dict)
    generator: bytes = b""
    failure: str | None = None


def agree(group: PipelineGroup, own: Statement) -> bool:
    """Compare the statements of all ranks.

    Returns:
        whether the generators of all ranks have the same state.

    Raises:
        RanksDifferError: they differ; the message says in what, and which ranks.
        RemoteError: another rank has failed, and this one has not.
    """
    digests = {name: _digest(text) for name, text in own.texts.items()}
    gathered = group.gather((digests, _digest(own.generator), own.failure))
    failed = [(rank, failure) for rank, (_, _, failure) in enumerate(gathered) if failure is not None]
    if failed and own.failure is None:
        rank, failure = failed[0]
        raise RemoteError(f"rank {rank} of the pipeline could not prepare the step: {failure}")
    if not failed:
        _compare(group, own.texts, [each for each, _, _ in gathered])
    return len({generator for _, generator, _ in gathered}) == 1


@contextlib.contextmanager
def together(group: PipelineGroup, what: str) -> Iterator[None]:
    """Context manager in which every rank does something on its own; if one fails, all raise.

    Args:
        group: the ranks.
        what: what they do, for the message.

    Raises:
        RemoteError: another rank has failed, and this one has not.
    """
    try:
        yield
    except BaseException as error:
        group.gather(f"{type(error).__name__}: {error}")
        raise
    for rank, failure in enumerate(group.gather(None)):
        if failure is not None:
            raise RemoteError(f"rank {rank} of the pipeline could not {what}: {failure}")


def _compare(group: PipelineGroup, own: dict[str, str], gathered: Sequence[dict[str, str]]) -> None:
    """Raise on every rank if the texts of any differ. All ranks have the same names."""
    for name in own:
        differing = [rank for rank, digests in enumerate(gathered) if digests.get(name) != gathered[0].get(name)]
        if differing:
            texts = group.gather(own[name])
            first, other = _around_difference(texts[0], texts[differing[0]])
            raise RanksDifferError(
                f"the ranks of the pipeline differ in {name}. Rank 0 has\n    {first}\nand rank {differing[0]} has\n"
                f"    {other}\nEvery rank must be given the same model, options and batch."
            )


_SHOWN = 300


def _around_difference(first: str, other: str) -> tuple[str, str]:
    """The parts of two texts around the place at which they begin to differ."""
    start = next((i for i, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, start - _SHOWN // 2)
    return first[start : start + _SHOWN], other[start : start + _SHOWN]


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:16]
