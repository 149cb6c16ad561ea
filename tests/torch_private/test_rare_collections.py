"""Thresholds of the garbage collector while models are compiled, and after."""

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.torch_private import rare_collections

_USUAL, _RARE = (700, 10, 10), (20_000, 20, 50)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("before", "during"),
    [(_USUAL, _RARE), ((0, 10, 10), (0, 20, 50)), ((50_000, 5, 100), (50_000, 20, 100)), (_RARE, _RARE)],
)
def test_thresholds_are_raised_and_restored(before: tuple[int, int, int], during: tuple[int, int, int]) -> None:
    gc.set_threshold(*before)
    with rare_collections():
        assert gc.get_threshold() == during
        with rare_collections():
            assert gc.get_threshold() == during
        assert gc.get_threshold() == during
    assert gc.get_threshold() == before


def test_thresholds_are_restored_after_an_error() -> None:
    gc.set_threshold(*_USUAL)
    with contextlib.suppress(ValueError), rare_collections():
        raise ValueError
    assert gc.get_threshold() == _USUAL


def test_the_last_thread_restores() -> None:
    gc.set_threshold(*_USUAL)
    entered, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with rare_collections():
            entered.set()
            may_leave.wait()

    other = threading.Thread(target=stay)
    with rare_collections():
        other.start()
        entered.wait()
    assert gc.get_threshold() == _RARE
    may_leave.set()
    other.join()
    assert gc.get_threshold() == _USUAL


def test_thresholds_that_are_set_meanwhile_stay() -> None:
    gc.set_threshold(*_USUAL)
    with rare_collections():
        gc.set_threshold(1000, 7, 7)
    assert gc.get_threshold() == (1000, 7, 7)


def test_a_model_is_compiled_with_raised_thresholds() -> None:
    seen = []

    def note(joint: roundpipe_fx.JointGraph, _: object) -> roundpipe_fx.JointGraph:
        seen.append(gc.get_threshold())
        return joint

    noting = roundpipe_fx.Pass("noting", note, about="note the thresholds")
    gc.set_threshold(*_USUAL)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = roundpipe_fx.compile(model, passes=lambda passes: [noting, *passes])
    compiled(torch.ones(2, 4)).sum().backward()
    assert seen and set(seen) == {_RARE}
    assert gc.get_threshold() == _USUAL
