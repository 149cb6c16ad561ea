"""The wheel and the sdist: what they hold, and that they work where there is no repository."""

from __future__ import annotations

import dataclasses
import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import roundpipe_fx

ROOT = Path(__file__).parent.parent
_NOT_SOURCES = ("build", "dist", "site", "out", "__pycache__", "*.egg-info", ".git", ".venv", ".*_cache", ".hypothesis")
_SAMPLE = (
    "tests/test_golden.py::test_golden[budget]",
    "tests/test_golden.py::test_golden[tiled_mlp]",
    "tests/passes/test_cse.py",
    "tests/ir/test_options.py",
    "tests/schedules/test_building.py",
    "tests/report/test_plan_page.py",
    "tests/command_line/test_command_line.py::test_a_report_has_figures_and_no_names",
    "tests/test_docs.py::test_the_page_of_benchmarks_is_that_of_the_stored_results",
)
"""Tests of each kind of file that a distribution has: code, golden programs, stored results, the page of a plan."""


@dataclasses.dataclass(frozen=True)
class Distributions:
    """Both files that ``python -m build`` makes."""

    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Build a copy of the sources, so that nothing is left in the repository; the wheel is built from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "copy", symlinks=True, ignore=shutil.ignore_patterns(*_NOT_SOURCES))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "copy")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning" not in done.stdout + done.stderr, done.stderr[-3000:]
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Distributions(wheel, sdist)


@pytest.fixture(scope="module")
def unpacked(built: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(built.sdist, folder)
    (unpacked,) = folder.iterdir()
    return unpacked


@pytest.fixture(scope="module")
def installed(built: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and all other packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    done = subprocess.run([*install, str(built.wheel)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return python


def _run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def _files(folder: Path) -> set[str]:
    """Paths of a folder's files, links followed, without what is generated."""
    paths = {path.relative_to(folder.parent) for path in folder.rglob("*") if path.is_file()}
    return {path.as_posix() for path in paths if "__pycache__" not in path.parts}


def test_the_wheel_has_the_package_and_nothing_else(built: Distributions) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(path))
    passes = {f"roundpipe_fx/{name}" for name in _files(ROOT / "passes")}
    assert names == _files(ROOT / "roundpipe_fx") | passes
    assert {"roundpipe_fx/py.typed", "roundpipe_fx/passes/cse.py", "roundpipe_fx/report/page/page.html"} <= names
    assert metadata["Version"] == roundpipe_fx.__version__ and metadata["License-Expression"] == "BSD-3-Clause"
    assert "roundpipe_fx.compile(model" in metadata.get_payload()
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata.get_all("Classifier") == known["classifiers"] and metadata["Keywords"] == ",".join(
        known["keywords"]
    )


def test_the_sdist_has_what_its_tests_read(unpacked: Path) -> None:
    for name in ("tests", "golden", "benchmarks", "docs", "examples", "passes"):
        assert _files(unpacked / name) == _files(ROOT / name)
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", ".ci/run"):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.long
def test_the_wheel_runs_the_readme(installed: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    where = "print(roundpipe_fx.__file__, roundpipe_fx.passes.__file__)"
    (tmp_path / "readme.py").write_text("\n".join(blocks) + where)
    *_, last = _run(installed, "readme.py", cwd=tmp_path).splitlines()
    assert all(Path(path).is_relative_to(installed.parent.parent) for path in last.split())
    assert (tmp_path / "plan.html").stat().st_size > 10_000
    report = _run(installed.parent / "roundpipe-fx", "report", cwd=tmp_path)
    assert f"- roundpipe_fx: {roundpipe_fx.__version__}" in report


@pytest.mark.long
def test_tests_of_the_sdist_pass_with_the_wheel(installed: Path, unpacked: Path, tmp_path: Path) -> None:
    for name in ("tests", "golden", "benchmarks", "docs", "examples"):
        shutil.copytree(unpacked / name, tmp_path / name)
    shutil.copy(unpacked / "pyproject.toml", tmp_path)
    # The package itself is not there: only the installed one can be imported.
    printed = _run(installed, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not long", *_SAMPLE, cwd=tmp_path)
    assert int(re.findall(r"(\d+) passed", printed)[0]) > 60 and "failed" not in printed
