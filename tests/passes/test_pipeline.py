"""The list of passes: every pass is in it, and the documentation shows it as it is."""

from __future__ import annotations

import ast
from pathlib import Path

import expecttest

from roundpipe_fx.ir.joint_graph import ADDING_NODES, MARK_USES, Mark
from roundpipe_fx.passes.entry import PassLevel
from roundpipe_fx.passes.pipeline import default_passes, passes_table

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "how-it-works.md"
NO_FILE = {"dce"}


def test_every_pass_is_in_the_list() -> None:
    files = {path.stem for path in (ROOT / "passes").glob("*.py")} - {"__init__", "entry", "pipeline"}
    assert {item.name for item in default_passes()} - NO_FILE == files
    for name in files:
        assert (ROOT / "passes" / f"{name}.py").read_text().startswith(f'"""{name}: '), name


def test_every_pass_is_tested_on_text() -> None:
    """At least twice: a graph written as Python, the pass, the graph after."""
    for item in default_passes():
        tree = ast.parse((Path(__file__).parent / f"test_{item.name}.py").read_text())
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert len([name for name in names if name.startswith("test_as_text")]) >= 2, item.name


def test_passes_stand_in_the_order_of_their_levels() -> None:
    places = [list(PassLevel).index(item.level) for item in default_passes()]
    assert places == sorted(places)
    assert all(item.about and item.when.__doc__ for item in default_passes())


def test_the_documentation_has_the_list() -> None:
    before, table, after = _parts(PAGE.read_text())
    if expecttest.ACCEPT:
        PAGE.write_text(before + passes_table() + after)
    else:
        assert table == passes_table(), "make golden regenerates it"


def test_the_documentation_names_the_passes_that_round_differently() -> None:
    names = [item.name for item in default_passes() if item.changes_numerics]
    assert f"\n    ROUNDPIPE_FX_DISABLE={','.join(names)}\n" in PAGE.read_text()


def _parts(page: str) -> tuple[str, str, str]:
    start = page.index("| | pass |")
    end = page.index("\n\n", start) + 1
    return page[:start], page[start:end], page[end:]


def test_who_writes_and_who_reads_a_mark_is_declared() -> None:
    """Where a mark is named in code, there it is read or written."""
    named: dict[str, set[str]] = {key: set() for key in MARK_USES}
    for path in [*ROOT.glob("passes/*.py"), *ROOT.glob("roundpipe_fx/*/**/*.py")]:
        place = path.stem if path.parent.name == "passes" else path.relative_to(ROOT / "roundpipe_fx").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Mark":
                named[getattr(Mark, node.attr)].add(place)
    names = {item.name for item in default_passes()}
    for key, use in MARK_USES.items():
        places = named[key] - {"ir"}
        assert places <= use.read_by | use.written_by | ADDING_NODES, key
        assert use.read_by <= places, key
        assert use.written_by | use.on_all_after <= names, key
    assert set(MARK_USES) == {value for name, value in vars(Mark).items() if name.isupper()}
