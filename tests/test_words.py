"""Words: variables, parameters and attributes are named for what they are (``offload``, not ``own``)."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

NO_NAMES = {"own", "given", "found"}
"""Words that name nothing in particular."""

_NOT_NOUNS = re.compile(r"(?:^|_)(?:places?|told|brought|beside|away|at_hand)(?=_|$)")
"""Words that stand for a noun: a position, a device, memory, bytes that are copied. ``in_place`` is PyTorch's own."""

_NAMED_BY = {
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.keyword: "arg",
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ExceptHandler: "name",
    ast.MatchAs: "name",
    ast.MatchStar: "name",
    ast.MatchMapping: "rest",
    ast.alias: "asname",
}
"""By type of syntax node, the attribute that holds the name that it binds or reads."""


def _names(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, _NAMED_BY.get(type(node), ""), None)
        if name is not None:
            yield name


@pytest.mark.parametrize(
    "source",
    [
        "own = 1",
        "[0 for own in values]",
        "for own, other in values: pass",
        "lambda own: 0",
        "def name(*, own): pass",
        "name(own=1)",
        "value.own",
        "class Name:\n    own: int",
        "with value as own: pass",
        "import value as own",
        "try: pass\nexcept ValueError as own: pass",
        "match value:\n    case [*own]: pass",
    ],
)
def test_each_way_to_name_something_is_seen(source: str) -> None:
    assert "own" in set(_names(source))


def _sources() -> Iterator[Path]:
    yield from (*ROOT.glob("roundpipe_fx/**/*.py"), *ROOT.glob("passes/*.py"))


def test_variables_are_named_for_what_they_are() -> None:
    files = [
        path.relative_to(ROOT).as_posix()
        for path in _sources()
        if not NO_NAMES.isdisjoint(_names(path.read_text(encoding="utf-8")))
    ]
    assert not files


def _stands_for_a_noun(name: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return bool(_NOT_NOUNS.search(words.replace("in_place", "inplace")))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("place", True),
        ("_places", True),
        ("brought_bytes", True),
        ("BesideGraphs", True),
        ("is_at_hand", True),
        ("placeholder", False),
        ("replace", False),
        ("in_place_form", False),
        ("InPlaceForm", False),
    ],
)
def test_words_that_stand_for_a_noun(name: str, expected: bool) -> None:
    assert _stands_for_a_noun(name) is expected


def test_names_are_nouns_verbs_and_questions() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {name}"
        for path in _sources()
        for name in (path.stem, *_names(path.read_text(encoding="utf-8")))
        if _stands_for_a_noun(name)
    }
    assert not found


_OPENINGS = {"What", "Whether", "How", "Those", "So many"}
"""First words of sentences that say neither what a function does nor what a thing is."""


def _first_words(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            yield " ".join(words[:2]) if words[:1] == ["So"] else words[0] if words else ""


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    source = '"""What is."""\nclass Name:\n    """So many."""\n    def method(): "Whether."'
    assert set(_first_words(source)) == {"What", "So many.", "Whether."}
    files = [
        path.relative_to(ROOT).as_posix()
        for path in _sources()
        if not _OPENINGS.isdisjoint(_first_words(path.read_text(encoding="utf-8")))
    ]
    assert not files


LEAST_COMMENTS = 0.03
"""Lines that hold a comment, as a share of the package's lines. Those for tools (``# noqa``) do not count."""

_FOR_TOOLS = ("# type:", "# noqa", "# fmt", "# ruff", "#!")


def _commented_lines(path: Path) -> int:
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    return sum(not token.string.startswith(_FOR_TOOLS) for token in tokens)


def test_comments_of_tools_are_none(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import os  # noqa: F401\n# Why.\nx = '# text'  # and why\n", encoding="utf-8")
    assert _commented_lines(tmp_path / "module.py") == 2


def test_code_says_why() -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in _sources())
    assert sum(map(_commented_lines, _sources())) >= LEAST_COMMENTS * lines
