"""The documentation: links, figures and messages are what they say."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import roundpipe_fx
from benchmarks.page import page
from benchmarks.pictures import clock_table, memory_curve, timing, way_in
from benchmarks.plots import PLOTS, heavy_head, lowest_peaks, step_times
from benchmarks.side_by_side import RESULTS
from roundpipe_fx.compat import rotor
from roundpipe_fx.torch_private.canary import SUPPORTED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def _mkdocs_of_make() -> list[str]:
    """The command of ``make docs``."""
    (command,) = re.findall(r"^\t\$\(BIN\)/(mkdocs .*)$", (ROOT / "Makefile").read_text(), re.M)
    return [sys.executable, "-m", *command.split()]


@pytest.mark.long
def test_the_site_has_no_broken_link(tmp_path: Path) -> None:
    command = [*_mkdocs_of_make(), "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # which the Makefile sets
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    reference = (tmp_path / "reference.html").read_text()
    assert ":meth:" not in reference and "<p>::</p>" not in reference
    assert "memory_budget" in (tmp_path / "search" / "search_index.json").read_text()


@pytest.mark.long
def test_a_broken_link_breaks_the_site(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[a page](nowhere.md)\n[a heading](other.md#nowhere)\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    validation = re.findall(r"^validation:\n(?:  .*\n)+", (ROOT / "mkdocs.yml").read_text(), re.M)
    (tmp_path / "mkdocs.yml").write_text("site_name: broken\nplugins: []\n" + "".join(validation))
    done = subprocess.run(_mkdocs_of_make(), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "'nowhere.md'" in done.stderr and "'#nowhere'" in done.stderr


def test_the_front_page_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {path.name for path in DOCS.glob("*.md")}


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: roundpipe_fx\.([\w.]+)$", (DOCS / "reference.md").read_text(), re.M)
    of_rotor = [f"compat.rotor.{name}" for name in rotor.__all__]
    assert sorted(named) == sorted(
        [*roundpipe_fx.__all__, "ir.decisions.Decisions", "schedules.ScheduleSpec", *of_rotor]
    )


def test_the_page_of_benchmarks_is_that_of_the_stored_results() -> None:
    assert (DOCS / "benchmarks.md").read_text() == page()


def test_tables_that_are_modelled_say_so_in_their_headings_and_name_the_rates() -> None:
    sections = [section.split("\n") for section in page().split("\n## ")[1:]]
    modelled = [heading for heading, *_ in sections if "(modelled" in heading]
    assert len(modelled) >= 10
    for heading, *lines in sections:
        text = "\n".join(lines)
        assert (heading in modelled) >= ("Planned, not run" in text or "Rates: " in text), heading
        # The bubble's closed form is of stages that take equally long, on no device.
        assert "Rates: " in text or heading not in modelled or "closed form" in text, heading


def test_plots_of_benchmarks_are_of_the_stored_results() -> None:
    """Each bar and dot is a figure of a stored result, and each picture is on the page."""
    lowest = json.loads((RESULTS / "frontier_lowest.json").read_text())["rows"]
    peers = json.loads((RESULTS / "frontier_peers.json").read_text())["rows"]
    eager = {row["model"]: row["peak MB"] for row in peers if row["peer"] == "eager"}
    (axes,) = lowest_peaks().axes
    own = [bar.get_width() for bar in axes.patches if bar.get_facecolor() == axes.patches[4].get_facecolor()]
    assert own == pytest.approx([100 * row["ours MB"] / eager[row["model"]] for row in lowest])
    (axes,) = step_times().axes
    dots = sorted(line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o")
    assert dots == sorted(row["step ratio"] for row in peers if row["step ratio"] is not None)
    (axes,) = heavy_head().axes
    heavy = json.loads((RESULTS / "pipeline_heavy_head.json").read_text())["rows"]
    assert [bar.get_width() for bar in axes.patches] == [row["modelled s"] for row in heavy]
    for name in PLOTS:
        assert f"(pictures/{name}.svg)" in page() and (DOCS / "pictures" / f"{name}.svg").exists()


def test_messages_on_the_page_of_errors_are_raised() -> None:
    headings = re.findall(r'^### "(.*)"$', (DOCS / "errors.md").read_text(), flags=re.M)
    texts = [*_texts()]
    assert len(headings) > 25
    for heading in headings:
        parts = [part.strip() for part in heading.split("…")]
        assert any(all(part in text for part in parts) for text in texts), heading


def _texts() -> Iterator[str]:
    """The constant parts of each text in the package, docstrings left out."""
    for path in [*(ROOT / "roundpipe_fx").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]:
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                yield "…".join(part.value for part in node.values if isinstance(part, ast.Constant))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _rows(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def test_figures_of_the_front_page_are_those_of_the_stored_results() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    columns = ("torch.compile", "ours", "torch.compile 0.5", "ours, as 0.5", "ours 0.0")
    stored = {row["model"]: [row[column].split(" / ")[:2] for column in columns] for row in _rows("inductor")}
    compared = re.findall(r"\| ([^|]+) \|((?: \d+ MB, [0-9.]+ s \|)+)", text)
    assert len(compared) == 6
    for model, cells in compared:
        expected = [(size.split(" ")[0], seconds) for size, seconds in stored[model]]
        assert re.findall(r"(\d+) MB, ([0-9.]+) s", cells) == expected
    tiled = {row["model"]: row for row in _rows("tiling") if row["tiles by hand"] == "Liger"}
    llama, t5 = tiled["Llama"], tiled["T5"]
    assert f"take {llama['time ratio']:.3g} of the time for a Llama and {t5['time ratio']:.3g} for a T5" in text
    assert f"reach {llama['ours / its']:.3g} and {t5['ours / its']:.3g} of its peak" in text


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/versions.md"])
def test_pages_name_the_supported_releases_of_pytorch(page: str) -> None:
    oldest, newest = SUPPORTED
    assert f"torch {oldest} to {newest}" in " ".join((ROOT / page).read_text().split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={oldest}" in project["dependencies"] and project["version"] == roundpipe_fx.__version__


def test_the_clock_table_is_a_simulated_schedule() -> None:
    timed = timing(devices=4, microbatches=8)
    (axes,) = clock_table().axes
    assert axes.get_xlim()[1] == timed.makespan
    assert len(axes.texts) == timed.schedule.size == 4 * 8 * 3
    assert way_in().axes


@pytest.mark.long
def test_the_memory_curve_is_below_its_budgets() -> None:
    (axes,) = memory_curve().axes
    peaks = {line.get_label(): max(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) > 2}
    budgets = {line.get_color(): line.get_ydata()[0] for line in axes.lines if len(line.get_ydata()) == 2}
    colors = {line.get_label(): line.get_color() for line in axes.lines}
    for name in ("a share of 0.3", "the lowest peak"):
        assert peaks[name] <= budgets[colors[name]]
    assert peaks["the lowest peak"] < peaks["a share of 0.3"] < peaks["compiled, nothing recomputed"] < peaks["eager"]
