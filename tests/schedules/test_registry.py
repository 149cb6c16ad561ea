"""The registry: schedules are specifications by name, and nothing else asks for a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import expecttest
import pytest

from roundpipe_fx.schedules import SCHEDULES, ScheduleSpec, gpipe, one_f_one_b
from roundpipe_fx.schedules.registry import schedules_table
from roundpipe_fx.schedules.spec import make_custom_spec

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "how-it-works.md"


def test_the_documentation_has_the_table() -> None:
    page = PAGE.read_text()
    start = page.index("| schedule | |")
    end = page.index("\n\n", start) + 1
    if expecttest.ACCEPT:
        PAGE.write_text(page[:start] + schedules_table() + page[end:])
    else:
        assert page[start:end] == schedules_table(), "make golden regenerates it"


@pytest.mark.parametrize("page", ["docs/options.md", "roundpipe_fx/api/compile.py", "examples/pipeline.py"])
def test_where_the_option_is_described_all_are_named(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not [name for name in (*SCHEDULES, "auto") if name not in text]


def test_each_builder_returns_a_schedule_of_its_name() -> None:
    for name, spec in SCHEDULES.items():
        assert spec.name == name == spec.build(2, 4, 3).name and spec.about


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("other", ScheduleSpec("mine", gpipe), "has the name 'mine'"),
        ("mine", gpipe, "must be a ScheduleSpec, not function"),
    ],
)
def test_what_cannot_be_added(name: str, spec: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        SCHEDULES[name] = spec
    assert name not in SCHEDULES


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("auto", gpipe), "other than 'auto'"),
        (("", gpipe), "other than 'auto'"),
        (("mine", "gpipe"), "build is to be a function, not 'gpipe'"),
        (("mine", gpipe, 0), "stages_per_device=0 must be at least one"),
        (("mine", gpipe, 1.5), "stages_per_device=1.5 is no number"),
    ],
)
def test_what_is_no_specification(fields: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ScheduleSpec(*fields)


def test_schedules_that_run_alike() -> None:
    one = SCHEDULES["1f1b"]
    alike = {
        (name, devices, microbatches)
        for name, spec in SCHEDULES.items()
        for devices in (1, 2)
        for microbatches in (1, 2, 4)
        if spec is not one and spec.orders_as(one, devices, microbatches)
    }
    assert alike >= {("gpipe", 1, 1), ("gpipe", 2, 1), ("interleaved", 1, 1)}
    assert alike >= {("zero_bubble", 1, microbatches) for microbatches in (1, 2, 4)}
    assert not alike & {("gpipe", 1, 2), ("gpipe", 2, 2), ("interleaved", 1, 2), ("zero_bubble", 2, 1)}
    assert "roundpipe" not in {name for name, _, _ in alike}


def test_the_specification_of_a_written_schedule() -> None:
    spec = make_custom_spec(one_f_one_b(2, 4, 3))
    assert (spec.stages, spec.splits_backward, spec.updates_across_stages) == (4, False, False)
    assert spec.build(7, 7, 7) == one_f_one_b(2, 4, 3)


def _compared(tree: ast.AST) -> Iterator[str]:
    """Texts that something is compared with, or that a constant lists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            inside = [node.left, *node.comparators]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            inside = [node.value] if isinstance(node.value, (ast.Tuple, ast.List, ast.Set, ast.Dict)) else []
        elif isinstance(node, ast.MatchValue):
            inside = [node.value]
        else:
            continue
        for part in inside:
            yield from (
                leaf.value for leaf in ast.walk(part) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
            )


@pytest.mark.parametrize("text", ["x == 'gpipe'", "x in ('gpipe', y)", "X = ('gpipe',)", "X = {'gpipe': 1}"])
def test_comparisons_are_seen(text: str) -> None:
    assert "gpipe" in set(_compared(ast.parse(text)))


def test_no_other_folder_compares_names() -> None:
    found = {
        (str(path.relative_to(ROOT)), text)
        for path in [*ROOT.glob("roundpipe_fx/**/*.py"), *ROOT.glob("passes/*.py")]
        if path.parent.name != "schedules"
        for text in _compared(ast.parse(path.read_text()))
        if text in SCHEDULES
    }
    assert not found
