"""Agreement of ranks: compare options, batches, graphs and plans before a run; a difference is an error on all ranks.

Planning is deterministic, so ranks with equal inputs make equal plans. If options, batches, code or versions differ,
schedules differ too, and ranks would wait for each other forever. Ranks therefore exchange digests, and the full texts
if digests differ. Options and batch are compared before tracing: a wrong batch must not leave one rank with a graph
that others lack. Graph and plan are compared before the run. Replicas have their own batches and may plan differently::

    options, batch ── digests ──▶ equal? ── trace, plan ──▶ graph, plan ── digests ──▶ equal? ── run
                                    │ no                                                 │ no
                                    └── full texts ──▶ an error on all ranks ◀── full texts

Most steps repeat an agreed one. A rank then finds its graph and plan without tracing, and all digests are exchanged at
once, as numbers (:func:`known_to_all`). If a digest differs or a rank must trace, all ranks use the exchanges above,
whose error names the difference.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from roundpipe_fx.distributed.ranks import Ranks, RanksDifferError, RemoteError
from roundpipe_fx.distributed.run_end import EndBytes
from roundpipe_fx.pipeline.step.scheduled import UnequalMicrobatches

FIRST_BATCH = "the shapes of the first batch"
"""Name of the text by which replicas are compared before stages are given to ranks."""


GATHERS = "the parameters that they gather"
"""Name of the text by which replicas are compared that gather parameters from each other."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A rank's statement of the step that it is about to run.

    Attributes:
        global_fields: texts by name (options) that must be equal on all ranks of all pipelines; empty after a failure.
        per_pipeline_fields: texts by name (batch, graph, plan) that must be equal on the ranks of one pipeline.
        generator: the state of the generator that the step draws from.
        per_replica_fields: texts by name that must be equal on the ranks of one replica, whatever their shard of the
            layers.
        failure: the error of tracing or planning; ``None`` if there was none.
        unfitting: the failure, if all ranks must try again with other plans.
    """

    global_fields: dict[str, str] = field(default_factory=dict)
    per_pipeline_fields: dict[str, str] = field(default_factory=dict)
    generator: bytes = b""
    per_replica_fields: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    unfitting: UnequalMicrobatches | None = None


@dataclass(frozen=True, kw_only=True)
class KnownStep:
    """A step that this rank has agreed on before.

    Attributes:
        global_texts: texts that must be equal on all ranks of all pipelines.
        per_pipeline_texts: texts that must be equal on the ranks of one pipeline.
        per_replica_texts: texts that must be equal on the ranks of one replica.
        generator: the state of the generator that the step draws from.
        end_bytes: sizes that this rank needs for the record at the end of the step.
    """

    global_texts: tuple[str, ...]
    per_pipeline_texts: tuple[str, ...]
    per_replica_texts: tuple[str, ...]
    generator: bytes
    end_bytes: EndBytes


@dataclass(frozen=True)
class KnownByAll:
    """Facts of a step that all ranks know before it.

    Attributes:
        shown: whether all have the same digest of what steps have shown, and their plans take it into account.
        same: whether all know the step, and agree on it.
        generators: for each pipeline, digests of the states of its ranks' generators.
        end_bytes: the most of any rank.
    """

    shown: bool
    same: bool
    generators: list[list[int]]
    end_bytes: EndBytes


def known_to_all(ranks: Ranks, known: KnownStep | None, shown: str | None, size: int, parts: int = 1) -> KnownByAll:
    """Compare what ranks know of a step, in one exchange of a few numbers.

    Args:
        ranks: of one pipeline or of several, one after another.
        known: what this rank knows; ``None``: it does not know the step.
        shown: what steps have shown to this rank; ``None``: its plans do not take it into account.
        size: how many ranks a pipeline has.
        parts: how many pipelines a replica has.
    """
    # The record: known, digests of the three groups of texts, the generator's, bytes of the end record, and what steps
    # have shown.
    row = [0] * 8
    if known is not None:
        texts = [
            "\0".join(group_texts)
            for group_texts in (known.global_texts, known.per_replica_texts, known.per_pipeline_texts)
        ]
        row[:7] = [
            1,
            *(_number(text) for text in texts),
            _number(known.generator),
            known.end_bytes.state,
            known.end_bytes.outputs,
        ]
    row[7] = _number(shown) if shown is not None else 0
    rows = ranks.gather_record(torch.tensor(row)).tolist()
    same = all(record[0] for record in rows)
    # Rows are ordered by (replica, part, number), so each group of ranks that must be alike is a run of consecutive
    # rows.
    for column, group_size in ((1, ranks.size), (2, size * parts), (3, size)):
        same &= all(record[column] == rows[rank - rank % group_size][column] for rank, record in enumerate(rows))
    generators = [record[4] for record in rows]
    return KnownByAll(
        all(record[7] and record[7] == rows[0][7] for record in rows),
        same,
        [generators[start : start + size] for start in range(0, len(rows), size)],
        EndBytes(*(max(record[column] for record in rows) for column in (5, 6))),
    )


def agree(ranks: Ranks, statement: Statement, size: int, parts: int = 1) -> list[list[str]] | UnequalMicrobatches:
    """Compare the statements of all ranks.

    Args:
        ranks: of one pipeline or of several, one after another.
        size: how many ranks a pipeline has.
        parts: how many pipelines a replica has.

    Returns:
        for each pipeline, digests of the states of its ranks' generators. If another rank has failed, and all are to
        try again, why.

    Raises:
        RanksDifferError: they differ; the message says in what, and which ranks.
        RemoteError: another rank has failed, and this one has not.
    """
    digests = {
        name: _digest(text)
        for name, text in {
            **statement.global_fields,
            **statement.per_pipeline_fields,
            **statement.per_replica_fields,
        }.items()
    }
    gathered = ranks.gather((digests, _digest(statement.generator), statement.failure, statement.unfitting))
    # Every rank sees the same list, so all of them raise (or retry) without another exchange.
    failed = [(rank, *failure) for rank, (_, _, *failure) in enumerate(gathered) if failure[0] is not None]
    if failed and statement.failure is None:
        rank, failure, unfitting = failed[0]
        if unfitting is not None:
            return unfitting
        raise RemoteError(f"rank {ranks.ranks[rank]} of {ranks.name} could not prepare the step: {failure}")
    if not failed:
        # Three scopes: all ranks, the ranks of a replica, the ranks of one pipeline.
        _compare(ranks, statement.global_fields, [texts for texts, *_ in gathered], ranks.size)
        _compare(ranks, statement.per_replica_fields, [texts for texts, *_ in gathered], size * parts)
        _compare(ranks, statement.per_pipeline_fields, [texts for texts, *_ in gathered], size)
    generators = [generator for _, generator, *_ in gathered]
    return [generators[start : start + size] for start in range(0, len(generators), size)]


@contextlib.contextmanager
def all_or_none(ranks: Ranks, task: str) -> Iterator[None]:
    """Context manager in which every rank does something on its own; if one fails, all raise.

    Args:
        task: what they do, for the message.

    Raises:
        RemoteError: another rank has failed, and this one has not.
    """
    try:
        yield
    except BaseException as error:
        # The failing rank takes part in the exchange too, or the others would wait for it.
        ranks.gather(f"{type(error).__name__}: {error}")
        raise
    for rank, failure in enumerate(ranks.gather(None)):
        if failure is not None:
            raise RemoteError(f"rank {ranks.ranks[rank]} of {ranks.name} could not {task}: {failure}")


def _compare(ranks: Ranks, texts_here: dict[str, str], gathered: Sequence[dict[str, str]], size: int) -> None:
    """Raise on every rank if the texts of any of ``size`` ranks that follow each other differ.

    All ranks have the same names.
    """
    for name in texts_here:
        # Each rank is compared with the first one of its group. The pairs are equal on all ranks, so all of them gather
        # the texts, or none.
        pairs = [(rank - rank % size, rank) for rank in range(ranks.size)]
        differing = [
            (first_rank, second_rank)
            for first_rank, second_rank in pairs
            if gathered[first_rank].get(name) != gathered[second_rank].get(name)
        ]
        if differing:
            first_rank, second_rank = differing[0]
            texts = ranks.gather(texts_here[name])
            first, other = _around_difference(texts[first_rank], texts[second_rank])
            rule = "Every rank must be given the same model, options and batch."
            if size < ranks.size or name == FIRST_BATCH:
                rule = (
                    "Every rank must be given the same model and options, and all ranks of a pipeline the same batch. "
                    "The first batch, or that of model.trace, must have the same shapes in all replicas."
                )
            if name == GATHERS:
                rule = (
                    "With shard='dp' replicas gather each parameter together, so all must run the same schedule: give "
                    "them batches of the same shapes."
                )
            raise RanksDifferError(
                f"the ranks of {ranks.name} differ in {name}. Rank {ranks.ranks[first_rank]} has\n    {first}\n"
                f"and rank {ranks.ranks[second_rank]} has\n    {other}\n{rule}"
            )


_SHOWN = 300


def _around_difference(first: str, other: str) -> tuple[str, str]:
    """The parts of two texts around the place at which they begin to differ."""
    start = next((i for i, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, start - _SHOWN // 2)
    return first[start : start + _SHOWN], other[start : start + _SHOWN]


def _number(text: str | bytes) -> int:
    """A digest as a number, which is not 0."""
    digest = hashlib.sha256(text if isinstance(text, bytes) else text.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True) or 1


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:16]
