"""The user's own passes, and what is checked, written and logged as passes run."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import roundpipe_fx
from roundpipe_fx import JointGraph, Pass, PassContext, PassLevel
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step

Edit = Callable[[list[Pass]], Sequence[Pass]]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


BATCH = {"x": torch.ones(2, 4)}


def _without(name: str) -> Edit:
    return lambda passes: [item for item in passes if item.name != name]


def _replaced(passes: list[Pass], name: str, **changes: object) -> list[Pass]:
    return [dataclasses.replace(item, **changes) if item.name == name else item for item in passes]


def _moved_last(passes: list[Pass]) -> list[Pass]:
    return [*passes[1:], passes[0]]


def _in_place(passes: list[Pass]) -> None:
    passes.pop()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_in_place, "must return a list of roundpipe_fx.Pass, and returned None"),
        (lambda passes: [*passes, "log"], "must return a list of roundpipe_fx.Pass"),
        (_without("annotate"), "'equal_collectives' needs 'annotate', which is missing"),
        (_without("segments"), "'stages' needs 'segments', which is missing"),
        (_without("rng"), "cannot be emitted without 'rng'"),
        (lambda passes: [*passes, passes[-1]], "two passes are named 'host_copies'"),
        (_moved_last, "'conjugate_numbers' works on a joint graph, and comes after 'host_copies'"),
        (lambda passes: sorted(passes, key=lambda item: item.name == "annotate"), "works on a joint graph"),
    ],
)
def test_a_list_that_cannot_run_is_refused_at_once(edit: Edit, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        roundpipe_fx.compile(Two(), passes=edit)


def test_passes_is_a_function() -> None:
    with pytest.raises(TypeError, match="must be a function that gets the list"):
        roundpipe_fx.compile(Two(), passes=roundpipe_fx.default_passes())  # type: ignore[arg-type]


def test_a_pass_is_added_at_each_level() -> None:
    seen: list[tuple[PassLevel, type]] = []

    def logging_pass(level: PassLevel) -> Pass:
        def run(graph: JointGraph | fx.Graph, _: PassContext) -> JointGraph | fx.Graph:
            seen.append((level, type(graph)))
            return graph

        return Pass(f"log_{level}", run, level=level)

    def edit(passes: list[Pass]) -> list[Pass]:
        every = [*passes, *map(logging_pass, PassLevel)]
        return sorted(every, key=lambda item: list(PassLevel).index(item.level))

    step, _ = compiled_step(Two(), BATCH, passes=edit, recompute="full")
    tiling = (PassLevel.SUMMED, PassLevel.TILED)
    assert [level for level, _ in dict.fromkeys(seen)] == [level for level in PassLevel if level not in tiling]
    assert {kind for level, kind in seen if level in (PassLevel.STAGE_MODULE, PassLevel.PROGRAM)} == {fx.Graph}
    assert len({level for level, kind in seen if kind is JointGraph}) == 6
    torch.manual_seed(0)
    assert step.loss.isfinite()


def test_passes_run_where_tiles_are_considered() -> None:
    seen: list[PassLevel] = []

    def logging_pass(level: PassLevel) -> Pass:
        return Pass(f"log_{level}", lambda joint, _: seen.append(level) or joint, level=level)

    def edit(passes: list[Pass]) -> list[Pass]:
        tiling = (PassLevel.SUMMED, PassLevel.TILED)
        return sorted([*passes, *map(logging_pass, tiling)], key=lambda item: list(PassLevel).index(item.level))

    with pytest.raises(roundpipe_fx.InfeasibleBudgetError):
        compiled_step(Two(), {"x": torch.ones(512, 4)}, passes=edit, memory_budget=2)
    assert seen[0] is PassLevel.SUMMED


def test_a_pass_is_replaced_and_removed() -> None:
    model = Two()
    plain, _ = compiled_step(model, BATCH)
    other, _ = compiled_step(model, BATCH, passes=_without("reinplace"))
    assert_bitwise(other, plain)

    def edit(passes: list[Pass]) -> list[Pass]:
        return _replaced(passes, "reinplace", run=lambda graph, _: graph)

    same, _ = compiled_step(model, BATCH, passes=edit)
    assert_bitwise(same, plain)


@pytest.mark.filterwarnings("ignore")
def test_the_backend_takes_passes() -> None:
    names: list[str] = []

    def edit(passes: list[Pass]) -> list[Pass]:
        names.extend(item.name for item in passes)
        return passes

    compiled = torch.compile(Two(), backend="roundpipe_fx", options={"passes": edit})
    compiled(**BATCH).backward()
    assert "boolean_indexing" in names
    broken = torch.compile(Two(), backend="roundpipe_fx", options={"passes": _without("annotate")})
    with pytest.raises(ValueError, match="needs 'annotate'"):
        broken(**BATCH)


def _added(run: Callable[[JointGraph, PassContext], object], before: str = "unread_outputs") -> Edit:
    def edit(passes: list[Pass]) -> list[Pass]:
        place = [item.name for item in passes].index(before)
        return [*passes[:place], Pass("own", run), *passes[place:]]

    return edit


def test_passes_are_left_out_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_DUMP", str(tmp_path))
    monkeypatch.setenv("ROUNDPIPE_FX_DISABLE", "early_recompute, reinplace")
    model = Two()
    step, _ = compiled_step(model, BATCH)
    written = {path.stem[3:] for path in tmp_path.glob("graph_0/*.py")}
    assert "annotate" in written and written.isdisjoint({"early_recompute", "reinplace"})
    monkeypatch.delenv("ROUNDPIPE_FX_DISABLE")
    usual, _ = compiled_step(model, BATCH)
    written = {path.stem[3:] for path in tmp_path.glob("graph_1/*.py")}
    assert {"early_recompute", "reinplace"} <= written
    assert_bitwise(step, usual)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("drop_out", r"ROUNDPIPE_FX_DISABLE: no pass is named 'drop_out'\. Did you mean 'dropout'"),
        ("annotate", "needs 'annotate', which is missing"),
    ],
)
def test_passes_that_cannot_be_left_out(names: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_DISABLE", names)
    with pytest.raises(ValueError, match=message):
        roundpipe_fx.compile(Two())(**BATCH)


ROUNDING = {"mean_losses", "row_slices", "online_softmax", "tiles", "tied_gradients", "accumulate_gradients"}


def test_an_unknown_name_is_answered_with_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_DISABLE", "nothing_like_it")
    with pytest.raises(ValueError, match="no pass is named") as raised:
        roundpipe_fx.compile(Two())(**BATCH)
    listed = re.search(r"keep the bits of results: (.*)\. Passes that change numerics: (.*)\.", str(raised.value))
    assert listed is not None
    default, rounding = (set(names.split(", ")) for names in listed.groups())
    assert rounding == ROUNDING == {item.name for item in roundpipe_fx.default_passes() if item.changes_numerics}
    assert default | rounding == {item.name for item in roundpipe_fx.default_passes()}


class Tied(nn.Module):
    """An embedding that is also the head, so a microbatch adds two gradients to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = x @ self.embed.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def test_without_passes_that_change_numerics_microbatches_have_the_bits_of_added_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = Tied(), {"ids": torch.randint(50, (6, 20)), "labels": torch.randint(50, (6, 20))}
    reference = torch.compile(copy.deepcopy(model), backend="aot_eager")
    for rows in range(0, 6, 2):
        reference(**{name: value[rows : rows + 2] for name, value in batch.items()}).backward()
    expected = [parameter.grad for parameter in reference.parameters()]

    def has_the_bits() -> bool:
        model.zero_grad()
        options = {"devices": ["cpu", "cpu"], "num_microbatches": 3, "loss_reduction": "sum"}
        roundpipe_fx.compile(model, **options).forward_backward(**batch)
        return all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))

    assert not has_the_bits()
    monkeypatch.setenv("ROUNDPIPE_FX_DISABLE", ",".join(ROUNDING))
    assert has_the_bits()


class Head(nn.Module):
    """Logits that are much wider than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 512)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(torch.tanh(self.body(x))), labels)


def test_without_passes_that_change_numerics_nothing_is_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Head(), {"x": torch.randn(256, 8), "labels": torch.randint(512, (256,))}
    budget = 2**19
    usual, compiled = compiled_step(model, batch, memory_budget=budget)
    assert compiled.plan.tiles and usual.loss.isfinite()
    monkeypatch.setenv("ROUNDPIPE_FX_DISABLE", ",".join(ROUNDING))
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as raised:
        compiled_step(model, batch, memory_budget=budget)
    step, untiled = compiled_step(model, batch, memory_budget=raised.value.minimum)
    assert not untiled.plan.tiles
    assert_bitwise(step, aot_eager_step(model, batch))


def test_a_pass_that_returns_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="pass 'own' must return a JointGraph, and returned NoneType"):
        compiled_step(Two(), BATCH, passes=_added(lambda joint, _: None))


def test_a_graph_that_breaks_the_rules_is_refused() -> None:
    def swap(joint: JointGraph, _: PassContext) -> JointGraph:
        nodes = [node for node in joint.computed() if node.target is torch.ops.aten.tanh.default]
        nodes[0].append(nodes[0].all_input_nodes[0])  # what it reads comes after it
        return joint

    with pytest.raises(ValueError, match=r"pass 'own': node 'tanh' .*it reads 'addmm', which comes later") as raised:
        compiled_step(Two(), BATCH, passes=_added(swap))
    assert "test_run_passes.py" in str(raised.value)  # where the operation was traced from


def test_graphs_are_written_after_each_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_DUMP", str(tmp_path))
    compiled_step(Two(), BATCH, recompute="full")
    (folder,) = tmp_path.iterdir()
    files = sorted(path.name for path in folder.iterdir())
    assert files[:2] == ["00_captured.py", "01_conjugate_numbers.py"]
    assert any(name.endswith("_apply_remat_schedule.py") for name in files)
    assert (folder / files[0]).read_text() == (folder / files[1]).read_text()
    assert "    # forward, stage 0, segment 0\n" in next(folder.glob("*_stages.py")).read_text()


def test_times_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "roundpipe_fx.passes"):
        compiled_step(Two(), BATCH)
    assert any(record.message.startswith("annotate: ") for record in caplog.records)
