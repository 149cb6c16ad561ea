"""Docstrings of what users import: results, errors, and of arguments what their names and types do not say."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import roundpipe_fx
from roundpipe_fx.compat import rotor


def _public() -> Iterator[Any]:
    members = {name: getattr(package, name) for package in (roundpipe_fx, rotor) for name in package.__all__}
    for name, member in members.items():
        yield pytest.param(member, id=name)
        if not inspect.isclass(member):
            continue
        inner = getattr(member, "__members__", {})
        for attribute, raw in vars(member).items():
            function = getattr(raw, "__func__", raw)
            is_field = dataclasses.is_dataclass(member) and attribute in {f.name for f in dataclasses.fields(member)}
            hidden = attribute.startswith("_") or attribute == "is_infra_mode" or attribute in inner or is_field
            if not hidden and (inspect.isfunction(function) or isinstance(function, property)):
                yield pytest.param(function, id=f"{name}.{attribute}")


@pytest.mark.parametrize("member", _public())
def test_docstring_is_complete(member: Any) -> None:
    text = inspect.getdoc(member)
    assert text, "has no docstring"
    if not inspect.isclass(member) and not isinstance(member, property):
        signature = inspect.signature(member)
        assert signature.return_annotation in (None, "None") or re.search("^(Returns|Yields):$", text, re.MULTILINE)
        raises = re.search(r"^\s+raise \w", inspect.getsource(member), re.MULTILINE)
        assert not raises or re.search("^Raises:$", text, re.MULTILINE)


ROOT = Path(__file__).parent.parent
_ENTRY = re.compile(r"^ {4}\*{0,2}(\w+(?:, \*{0,2}\w+)*): (.*(?:\n {8,}.*)*)", re.MULTILINE)
"""An entry of a section, with its further lines, which are indented."""

MOST_SHORT_ENTRIES = 60
"""Entries of Args and Attributes in the whole package that have no more than three words."""


def _entries(docstring: str) -> list[tuple[str, str]]:
    """Names and texts of the entries of the sections Args and Attributes."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:(?: .*)?\n?)*)", docstring, re.MULTILINE)
    entries = [entry for section in sections for entry in _ENTRY.findall(section)]
    return [(name.strip("* "), text) for names, text in entries for name in names.split(",")]


def _documented() -> Iterator[tuple[str, ast.AST, list[tuple[str, str]]]]:
    for path in [*ROOT.glob("roundpipe_fx/**/*.py"), *ROOT.glob("passes/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                entries = _entries(ast.get_docstring(node) or "")
                if entries:
                    yield f"{path.relative_to(ROOT).as_posix()}: {node.name}", node, entries


def test_entries_of_sections_are_read() -> None:
    text = "Do.\n\nArgs:\n    first: it.\n    *rest, kind: two\n        lines.\n\nReturns:\n    nothing: at all.\n"
    assert _entries(text) == [("first", "it."), ("rest", "two\n        lines."), ("kind", "two\n        lines.")]


def test_sections_list_parameters_that_exist() -> None:
    unknown = []
    for where, node, entries in _documented():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            names = {argument.arg for argument in every if argument is not None}
            unknown += [f"{where}({name})" for name, _ in entries if name not in names]
    assert not unknown


def test_an_entry_says_more_than_the_name_and_the_type() -> None:
    """A section lists what needs saying (a unit, a shape, when ``None``), so short entries are rare."""
    short = [f"{where}: {name}: {text}" for where, _, of in _documented() for name, text in of if len(text.split()) < 4]
    assert len(short) <= MOST_SHORT_ENTRIES, "\n".join(short)
