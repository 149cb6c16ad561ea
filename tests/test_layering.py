"""Imports run one way: each folder of the package imports only from those below it.

The order is written down here, and nowhere else.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = (
    "torch_private",
    "budget",
    "console",
    "operators",
    "ir",
    "frontend",
    "codegen",
    "analysis",
    "schedules",
    "passes",
    "remat",
    "runtime",
    "compiler",
    "pipeline",
    "planner",
    "report",
    "distributed",
    "api",
    "compat",
    "command_line",
    "__main__",
)
"""Folders and modules of the package, lowest first."""

APART = {
    "passes": {"frontend", "codegen"},
    "remat": {"frontend", "codegen", "schedules", "passes"},
    "runtime": {"passes", "remat"},
    "report": {"frontend", "passes"},
}
"""What a folder must not import though it lies below: these know each other through plain data only."""

MODULES_AT_THE_TOP = 4


def _modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, without the package's."""
    found = {}
    for path in ROOT.glob("roundpipe_fx/**/*.py"):
        found[_dotted(path.relative_to(ROOT / "roundpipe_fx"))] = path
    for path in ROOT.glob("passes/**/*.py"):
        found[_dotted(path.relative_to(ROOT))] = path
    return found


def _dotted(path: Path) -> str:
    return ".".join(part for part in path.with_suffix("").parts if part != "__init__")


MODULES = _modules()


def imports(text: str, modules: set[str]) -> Iterator[str]:
    """Modules of the package that a text imports anywhere, type checking included; without the package's name.

    Raises:
        ValueError: a relative import.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError("a relative import")
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, inner = name.partition(".")
            if package != "roundpipe_fx":
                continue
            parts = inner.split(".")
            # What is no module is a name in one.
            yield next((m for n in range(len(parts), 0, -1) if (m := ".".join(parts[:n])) in modules), "")


def forbidden(module: str, imported: str) -> bool:
    """Whether one module of the package must not import the other."""
    importer, layer = module.split(".")[0], imported.split(".")[0]
    if importer == layer:
        return importer == "passes" and imported not in (module, "passes.entry") and module != "passes.pipeline"
    return LAYERS.index(layer) > LAYERS.index(importer) or layer in APART.get(importer, ())


def test_every_folder_has_its_place() -> None:
    assert {module.split(".")[0] for module in MODULES} - {""} == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_one_way(layer: str) -> None:
    wrong = {
        f"{module} imports {imported or 'the package itself'}"
        for module, path in MODULES.items()
        if module.split(".")[0] == layer
        for imported in imports(path.read_text(), set(MODULES))
        if not imported or forbidden(module, imported)
    }
    assert not wrong


def test_imports_are_seen_wherever_they_stand() -> None:
    text = (
        "import roundpipe_fx.ir.segment\n"
        "if TYPE_CHECKING:\n    from roundpipe_fx.remat import search\n"
        "def f():\n    from roundpipe_fx.passes.rng import replay_rng\n"
        "from roundpipe_fx import compile\n"
        "import torch\n"
    )
    modules = {"", "ir", "ir.segment", "remat", "remat.search", "passes", "passes.rng"}
    assert sorted(imports(text, modules)) == ["", "ir.segment", "passes.rng", "remat.search"]
    with pytest.raises(ValueError, match="relative"):
        list(imports("from . import segment", modules))


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("ir.segment", "analysis.liveness"),
        ("passes.rng", "remat.search"),
        ("passes.rng", "runtime.worker"),
        ("passes.rng", "passes.masks"),
        ("remat.search", "passes.rng"),
        ("runtime.worker", "remat.search"),
        ("api.backend", "compat.rotor"),
    ],
)
def test_what_is_forbidden(module: str, imported: str) -> None:
    assert forbidden(module, imported)
    assert not forbidden("api.backend", "ir.segment")
    assert not forbidden("passes.pipeline", "passes.rng")


def test_no_files_import_each_other() -> None:
    """Not even for type checking. The sorter names a circle."""
    imported = {name: {*imports(path.read_text(), set(MODULES))} - {name} for name, path in MODULES.items()}
    assert len([*TopologicalSorter(imported).static_order()]) == len(MODULES)


def test_few_modules_lie_at_the_top() -> None:
    assert len(list(ROOT.glob("roundpipe_fx/*.py"))) <= MODULES_AT_THE_TOP


def test_every_data_file_is_packaged() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {
        path for package, own in globs.items() for glob in own for path in (ROOT / package.replace(".", "/")).glob(glob)
    }
    files = {path for path in ROOT.glob("roundpipe_fx/**/*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files if path.suffix != ".py"} == packaged


def test_every_folder_is_packaged() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("roundpipe_fx/**/__init__.py")}
    assert set(packages) == folders | {"roundpipe_fx.passes"}


def test_a_checkout_on_the_path_has_its_own_passes(tmp_path: Path) -> None:
    """They lie beside the package, which has a link to them; another checkout may be installed."""
    for folder in ("roundpipe_fx", "passes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "roundpipe_fx" / "__init__.py").write_text("")  # imports all of the package
    code = "import roundpipe_fx.passes as passes, os; print(os.path.realpath(passes.__file__))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()) == (tmp_path / "passes" / "__init__.py").resolve()
