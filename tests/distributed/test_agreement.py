"""Agreement of the ranks of two pipelines, as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from roundpipe_fx.distributed.agreement import KnownStep, Statement, agree, known_to_all
from roundpipe_fx.distributed.ranks import RanksDifferError, RemoteError
from roundpipe_fx.distributed.run_end import EndBytes
from roundpipe_fx.pipeline.step.scheduled import UnequalMicrobatches

RANKS, SIZE = 4, 2


class _Rank:
    """A rank of two pipelines, whose global ranks begin with 10."""

    size, name, ranks = RANKS, "the pipelines", [10, 11, 12, 13]

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self._values, self._barrier = rank, values, barrier

    def gather_record(self, record: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(record))

    def gather(self, value: Any) -> list[Any]:
        self._values[self._rank] = value
        self._barrier.wait(10)
        found = list(self._values)
        self._barrier.wait(10)
        return found


def _agreed(*statements: Statement) -> list[Any]:
    """What each rank gets, or raises."""
    return _on_each(lambda ranks, number: agree(ranks, statements[number], SIZE))


def _on_each(call: Callable[[Any, int], Any]) -> list[Any]:
    values: list[Any] = [None] * RANKS
    barrier = threading.Barrier(RANKS)

    def of_rank(rank: int) -> Any:
        ranks: Any = _Rank(rank, values, barrier)
        try:
            return call(ranks, rank)
        except (RanksDifferError, RemoteError) as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(of_rank, range(RANKS)))


def _statement(option: str = "a", batch: str = "x", generator: bytes = b"") -> Statement:
    return Statement(global_fields={"options": option}, per_pipeline_fields={"batch": batch}, generator=generator)


def test_replicas_have_batches_and_generators_of_their_own() -> None:
    own = [_statement(batch=batch, generator=batch.encode()) for batch in "xxyy"]
    for generators in _agreed(*own):
        first, second = generators
        assert first[0] == first[1] != second[0] == second[1]


@pytest.mark.parametrize(
    ("options", "batches", "text"),
    [
        ("aaab", "xxyy", r"the pipelines differ in options. Rank 10 has\s+a\s+and rank 13 has\s+b\s"),
        ("aaaa", "xxyz", r"the pipelines differ in batch. Rank 12 has\s+y\s+and rank 13 has\s+z\s"),
    ],
)
def test_a_difference_is_an_error_on_all_ranks(options: str, batches: str, text: str) -> None:
    for error in _agreed(*map(_statement, options, batches)):
        with pytest.raises(RanksDifferError, match=text):
            raise error


def test_a_failure_is_an_error_on_the_others() -> None:
    own, *others = _agreed(Statement(failure="it failed"), *[_statement()] * 3)
    assert len(own) == 2  # it raises its own error
    for error in others:
        with pytest.raises(RemoteError, match="rank 10 of the pipelines could not prepare the step: it failed"):
            raise error


def test_others_get_what_they_need_to_try_again() -> None:
    unfitting = UnequalMicrobatches(3, 2, False)
    own, *others = _agreed(Statement(failure="it did not fit", unfitting=unfitting), *[_statement()] * 3)
    assert len(own) == 2 and others == [unfitting] * 3


@pytest.mark.parametrize(
    ("options", "batches", "shown", "expected"),
    [
        ("aaaa", "xxyy", "ssss", (True, True)),
        ("aaab", "xxyy", "ssss", (True, False)),
        ("aaaa", "xxyz", "ssss", (True, False)),
        ("aaaa", "xx?y", "ssss", (True, False)),
        ("aaaa", "xxyy", "ssst", (False, True)),
        ("aaaa", "xxyy", "sss?", (False, True)),
    ],
)
def test_all_ranks_see_whether_all_know_a_step(
    options: str, batches: str, shown: str, expected: tuple[bool, bool]
) -> None:
    """A rank that does not know it, or whose plans are stale, is marked with ``?``."""

    def known(number: int) -> KnownStep | None:
        if batches[number] == "?":
            return None
        sizes = EndBytes(number, 3 - number)
        return KnownStep(
            global_texts=(options[number],),
            per_replica_texts=(),
            per_pipeline_texts=(batches[number],),
            generator=batches[number].encode(),
            end_bytes=sizes,
        )

    everywhere = _on_each(
        lambda ranks, number: known_to_all(ranks, known(number), shown[number].replace("?", "") or None, SIZE)
    )
    assert all((found.shown, found.same) == expected for found in everywhere)
    first, second = everywhere[0].generators
    assert first[0] == first[1] != second[1]
    assert everywhere[0].end_bytes == EndBytes(3, 3)
