"""Records: what has many fields is made by their names, so that two of one type cannot be exchanged unseen; and a name
means one thing."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import roundpipe_fx

ROOT = Path(__file__).parent.parent
MOST = 5
"""Fields of a record that may be made by position, and positional arguments of a constructor."""

BY_POSITION = {
    "Chain": 6,  # rotor's signature
    "Event": 5,  # made for each operation of each plan that is tried
    "Pass": 2,  # users write its name and its function
    "ScheduleSpec": 4,  # users write its name, its function, and mostly no more than the next two
}
"""Records with more fields, of which so many may be given by position."""

EVERYWHERE_THE_SAME = {"_Local"}
"""The attributes of a thread, where a module has some."""

OF_PYTORCH = {"ProfilerConfig"}
"""PyTorch's classes that take no keywords."""


def _records() -> Iterator[type]:
    for module in pkgutil.walk_packages(roundpipe_fx.__path__, "roundpipe_fx."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.name:
                yield value


def test_records_of_many_fields_are_made_by_keyword() -> None:
    found = {}
    for record in _records():
        fields = [field for field in dataclasses.fields(record) if field.init]
        by_position = sum(not field.kw_only for field in fields)
        if len(fields) > MOST and by_position:
            found[record.__name__] = by_position
    assert found == BY_POSITION


def test_no_constructor_has_many_positional_arguments() -> None:
    found = set()
    for path in [*ROOT.glob("roundpipe_fx/**/*.py"), *ROOT.glob("passes/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and len(node.args) > MOST:
                name = ast.unparse(node.func).split(".")[-1]
                if re.match(r"_*[A-Z]", name):
                    found.add(name)
    assert found == OF_PYTORCH


def test_a_name_is_of_one_class_or_type() -> None:
    found: dict[str, set[str]] = {}
    for path in [*ROOT.glob("roundpipe_fx/**/*.py"), *ROOT.glob("passes/*.py")]:
        tree = ast.parse(path.read_text())
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        targets = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
        names += [own.id for own in targets if isinstance(own, ast.Name) and re.match(r"_*[A-Z]\w*[a-z]", own.id)]
        for name in names:
            found.setdefault(name, set()).add(path.stem)
    assert {name for name, places in found.items() if len(places) > 1} == EVERYWHERE_THE_SAME
