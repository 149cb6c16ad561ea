"""Benchmarks wrap functions of the package to time them, or to leave them out: these exist."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_what_a_benchmark_replaces_exists() -> None:
    missing = {
        f"{path.name}:{line}: {module.__name__}.{name}"
        for path in BENCHMARKS.glob("**/*.py")
        for line, module, name in _replaced(ast.parse(path.read_text()))
        if not hasattr(module, name)
    }
    assert not missing


def test_replacements_are_seen() -> None:
    text = (
        "from roundpipe_fx.planner import lower\n"
        "lower.gone = 1\n"
        "def f():\n    with mock.patch.object(lower, 'gone_too', 0): pass\n"
        "lower.choose(1)\n"
    )
    assert [name for *_, name in _replaced(ast.parse(text))] == ["gone", "gone_too"]


def _replaced(tree: ast.Module) -> Iterator[tuple[int, ModuleType, str]]:
    modules = {
        alias.asname or alias.name: module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("roundpipe_fx")
        for alias in node.names
        if isinstance(module := getattr(importlib.import_module(node.module or ""), alias.name), ModuleType)
    }
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in modules:
                yield node.lineno, modules[target.value.id], target.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "mock.patch.object":
            owner, name = node.args[:2]
            if isinstance(owner, ast.Name) and owner.id in modules and isinstance(name, ast.Constant):
                yield node.lineno, modules[owner.id], str(name.value)
