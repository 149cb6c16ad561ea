"""The plan cache: the same programs without the search, and nothing that does not fit is used."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.analysis.data_files import read_data, write_data
from roundpipe_fx.planner import program_within_budget as within_budget
from tests.comparison import Step, aot_eager_step, assert_bitwise, compiled_step
from tests.golden_models import CheckpointedMLP, DropoutMLP, TiedTransformer, UNet
from tests.hugging_face import gpt2, language_batch, llama, t5

Batch = Mapping[str, Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "1")
    monkeypatch.setenv("ROUNDPIPE_FX_CACHE", str(tmp_path))
    return tmp_path / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Has an item for each search."""
    made: list[object] = []
    search = within_budget.choose

    def choose(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return search(*args, **kwargs)

    monkeypatch.setattr(within_budget, "choose", choose)
    return made


def _texts(plan: roundpipe_fx.Plan) -> list[str]:
    """The plan, and all that was emitted for it."""
    programs = [program.module.code for program in plan.programs]
    return [str(plan), plan.to_json(), *programs, *(module.module.code for module in plan.modules)]


def _compiled(model: nn.Module, batch: Batch, **options: Any) -> tuple[Step, roundpipe_fx.Plan]:
    torch._dynamo.reset()
    step, compiled = compiled_step(model, batch, **options)
    return step, compiled.plan


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(roundpipe_fx.checkpoint(self.inner, x)).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "dropout": (DropoutMLP, lambda: {"x": torch.randn(4, 8)}),
    "tied": (TiedTransformer, lambda: {"tokens": torch.randint(16, (2, 4)), "targets": torch.randint(16, (2, 4))}),
    "U-Net": (UNet, lambda: {"x": torch.randn(2, 3, 8, 8)}),
    "checkpoint": (Checkpointed, lambda: {"x": torch.randn(4, 8)}),
    "GPT-2": (lambda: gpt2(layers=1), language_batch),
    "Llama": (lambda: llama(layers=1), language_batch),
    "T5": (lambda: t5(layers=1), language_batch),
}


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        *((name, budget) for name in ("dropout", "checkpoint") for budget in (0.0, 1.0)),
        *((name, 0.4) for name in CASES),
    ],
)
@pytest.mark.long
def test_a_cached_plan_gives_the_same_programs_without_a_search(
    name: str, budget: float, folder: Path, searches: list[object]
) -> None:
    make, make_batch = CASES[name]
    model, batch = make().train(), make_batch()
    first, planned = _compiled(model, batch, memory_budget=budget)
    assert searches
    searches.clear()
    again, cached = _compiled(model, batch, memory_budget=budget)
    assert not searches, "the second was searched for"
    assert _texts(cached) == _texts(planned)
    assert cached.frontier() == planned.frontier()
    assert cached.budget is not None and cached.peak_bytes <= cached.budget
    assert_bitwise(again, first)


_OTHER_PROCESS = """
from roundpipe_fx.planner import program_within_budget as within_budget
from tests.compiler.test_plan_cache import digest_of_step
searched, search = [], within_budget.choose
within_budget.choose = lambda *args, **kwargs: searched.append(1) or search(*args, **kwargs)
print(digest_of_step(), len(searched))
"""


def digest_of_step() -> str:
    """Train one step; hash its plan, its programs and its gradients."""
    make, make_batch = CASES["GPT-2"]
    torch.manual_seed(0)
    model, batch = make().train(), make_batch()
    step, plan = _compiled(model, batch, memory_budget=0.4)
    gradients = [gradient.numpy().tobytes().hex() for gradient in step.gradients.values()]
    return hashlib.sha256("\n".join([*_texts(plan), *gradients]).encode()).hexdigest()


@pytest.mark.long
def test_another_process_finds_the_plan(folder: Path, searches: list[object]) -> None:
    """Keys are of values alone: no identities, no numbers that a process counts."""
    digest = digest_of_step()
    assert searches
    other = subprocess.run([sys.executable, "-c", _OTHER_PROCESS], check=True, capture_output=True, text=True)
    assert other.stdout.split() == [digest, "0"]


def test_the_cache_can_be_switched_off(folder: Path, searches: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "0")
    for _ in range(2):
        _compiled(DropoutMLP(), {"x": torch.randn(4, 8)}, memory_budget=0.4)
        assert searches
        searches.clear()
    assert not folder.parent.exists() or not list(folder.parent.iterdir())


def _change(key: str, value: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        first, _, body = path.read_text().partition("\n")
        header, data = json.loads(first), json.loads(body)
        if key in header:
            path.write_text(json.dumps({**header, key: value}) + "\n" + body)
            return
        header.pop("digest")
        write_data(path, header, {**data, key: value(data[key])})

    return change


def _rename_a_node(schedule: Any) -> Any:
    blocks, saved = schedule
    blocks[0][2][0][0] = "nothing_of_that_name"
    return [blocks, saved]


def _drop_an_operation(schedule: Any) -> Any:
    blocks, saved = schedule
    blocks[-1][2].pop()
    return [blocks, saved]


def _reverse(schedule: Any) -> Any:
    blocks, saved = schedule
    return [[[segment, stage, items[::-1]] for segment, stage, items in blocks], saved]


def _move(schedule: Any) -> Any:
    blocks, saved = schedule
    return [[[1000, stage, items] for _, stage, items in blocks], saved]


def _forget_a_node(marks: Any) -> Any:
    columns, segments, cuts = marks
    return [{key: values[:-1] for key, values in columns.items()}, segments, cuts]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": _truncate,
    "empty": lambda path: path.write_text(""),
    "not JSON": lambda path: path.write_text("import os\n"),
    "not text": lambda path: path.write_bytes(b"\x80\x04\x95\xff"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "a list": lambda path: path.write_text("[]\n[]"),
    "a bit": _flip_a_bit,
    "another torch": _change("torch", "1.0"),
    "another version": _change("roundpipe_fx", "0"),
    "another format": _change("format", "pickle"),
    "another peak": _change("peak", lambda peak: peak - 1),
    "a peak above the budget": _change("limit", lambda limit: 0),
    "a negative peak": _change("peak", lambda peak: -1),
    "no frontier": _change("frontier", lambda _: []),
    "unknown node": _change("schedule", _rename_a_node),
    "missing operation": _change("schedule", _drop_an_operation),
    "reversed": _change("schedule", _reverse),
    "unknown segment": _change("schedule", _move),
    "no schedule": _change("schedule", lambda _: None),
    "marks of another graph": _change("marks", _forget_a_node),
    "no marks": _change("marks", lambda _: None),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.quick_every(6)
def test_a_file_that_does_not_fit_is_ignored_and_rewritten(
    name: str, folder: Path, searches: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = DropoutMLP(), {"x": torch.randn(4, 8)}
    first, planned = _compiled(model, batch, memory_budget=0.4)
    (path,) = folder.iterdir()
    DAMAGE[name](path)
    searches.clear()
    with caplog.at_level(logging.WARNING, "roundpipe_fx"):
        again, replanned = _compiled(model, batch, memory_budget=0.4)
    assert searches
    assert [record for record in caplog.records if "is ignored" in record.message and str(path) in record.message]
    assert _texts(replanned) == _texts(planned)
    assert_bitwise(again, first)
    searches.clear()
    _compiled(model, batch, memory_budget=0.4)
    assert not searches, "it has been rewritten"


def test_what_a_plan_depends_on_is_in_its_key(folder: Path, searches: list[object]) -> None:
    batch = {"x": torch.randn(4, 8)}
    frozen = DropoutMLP()
    frozen.layers[0][0].weight.requires_grad_(False)
    other_rate = DropoutMLP()
    other_rate.layers[0][2].p = 0.3
    runs: list[tuple[nn.Module, Batch, dict[str, Any]]] = [
        (DropoutMLP(), batch, {"memory_budget": 0.4}),
        (DropoutMLP(), batch, {"memory_budget": 0.5}),
        (DropoutMLP(), batch, {"memory_budget": 0.4, "stages": 2}),
        (DropoutMLP(), {"x": torch.randn(6, 8)}, {"memory_budget": 0.4}),
        (DropoutMLP(), {"x": torch.randn(8, 4).T}, {"memory_budget": 0.4}),
        (DropoutMLP().double(), {"x": torch.randn(4, 8).double()}, {"memory_budget": 0.4}),
        (DropoutMLP(), {"x": torch.randn(4, 8, requires_grad=True)}, {"memory_budget": 0.4}),
        (frozen, batch, {"memory_budget": 0.4}),
        (other_rate, batch, {"memory_budget": 0.4}),
    ]
    for number, (model, own, options) in enumerate(runs, 1):
        searches.clear()
        _compiled(model, own, **options, dynamic=False)
        assert searches
        assert len(list(folder.iterdir())) == number


def test_what_values_do_not_determine_is_not_cached(folder: Path, searches: list[object]) -> None:
    batch = {"x": torch.randn(4, 8)}
    for options in (
        {"passes": lambda passes: passes},
        {"cost": "measured"},
        {"stage_compiler": lambda module, _: module},
        {"dynamic": True},
    ):
        _compiled(DropoutMLP(), batch, memory_budget=0.4, **options)
        assert not folder.exists()
    _compiled(CheckpointedMLP(), {"x": torch.randn(8, 4)}, memory_budget=0.4)  # saves values by hand
    assert not folder.exists()


def test_an_unwritable_folder_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "1")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROUNDPIPE_FX_CACHE", str(tmp_path / "file"))
    model, batch = DropoutMLP(), {"x": torch.randn(4, 8)}
    step, _ = _compiled(model, batch, memory_budget=0.4)
    assert_bitwise(step, aot_eager_step(model, batch))


def test_writers_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    path, header = tmp_path / "plans" / "one.json", {"format": "test"}
    versions = [[number] * 20_000 for number in range(4)]
    failed: list[Exception] = []
    write_data(path, header, versions[0])

    def write(data: Any) -> None:
        for _ in range(20):
            write_data(path, header, data)

    def read() -> None:
        for _ in range(80):
            try:
                assert read_data(path, header) in versions
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=write, args=(data,)) for data in versions] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [own.name for own in path.parent.iterdir()] == ["one.json"]
