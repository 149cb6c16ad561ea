"""The page of plans whose values leave the device or are never there as a whole: offloaded models, and tiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from roundpipe_fx.budget import bytes_text
from roundpipe_fx.report.timeline import CopyBar
from tests.pipeline.steps import Blocks, squares
from tests.report.chromium import Page, needs_browser

pytestmark = needs_browser


@pytest.fixture
def offloaded(on_the_host: None) -> roundpipe_fx.Plan:
    compiled = roundpipe_fx.compile(
        Blocks(32, 4, dropout=0.2), devices=["cpu"], num_microbatches=8, memory_budget=12_000_000, tiling="never"
    )
    x, y = torch.randn(2, 2048, 32)
    return compiled.trace(x, labels=y, loss_fn=squares)


_LANES = """(() => {
    const canvas = document.querySelector("#view-pipeline canvas[aria-label^=Copies]"), { width, height } = canvas;
    const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
    const colors = [...document.querySelectorAll("#view-pipeline .legend")][0];
    const swatches = [...colors.querySelectorAll(".swatch")].map(e =>
        getComputedStyle(e).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number));
    const is = (x, y, color) => color.every((part, at) => Math.abs(pixels[4 * (x + y * width) + at] - part) < 90);
    const lane = row => Array.from({ length: width }, (_, x) => x)
        .filter(x => x >= 74 && x <= width - 8 && swatches.some(color => is(x, row * 20 + 10, color)));
    return { width, lanes: [lane(0), lane(1)] };
})()"""


def test_copies_are_drawn_and_told_as_the_plan_says(offloaded: roundpipe_fx.Plan, page: Page, tmp_path: Path) -> None:
    pipeline, copies = offloaded.pipeline, offloaded.timeline().copies
    assert pipeline is not None
    page.open(offloaded.write_html(tmp_path / "plan.html"), 2400, 1400)
    page.click("#tab-pipeline")
    drawn = page.evaluate(_LANES)
    end = max(pipeline.makespan, max(copy.end for copy in copies))
    for to_host, columns in enumerate(drawn["lanes"]):
        own = [copy for copy in copies if copy.to_host is bool(to_host)]
        spans = [[74 + at / end * (drawn["width"] - 82) for at in (copy.start, copy.end)] for copy in own]
        assert columns
        for first, last in spans:  # one pixel at least
            assert any(first - 1 <= column <= max(last, first + 1) + 1 for column in columns), (to_host, first)
        for column in columns:
            assert any(first - 1.5 <= column <= max(last, first + 1) + 1.5 for first, last in spans), (to_host, column)
    legend = page.text("#view-pipeline .legend")
    gradients = sum(copy.bytes for copy in copies if copy.what == "gradients")
    for size in (pipeline.host_to_device_bytes, pipeline.sent_bytes, gradients):
        assert bytes_text(size) in legend
    note = page.text("#view-pipeline .note")
    assert f"{pipeline.sent_values} values ({bytes_text(pipeline.sent_bytes)}) leave for the host" in note
    page.evaluate('document.querySelector("#view-pipeline canvas[aria-label^=Copies]").focus()')
    for key, to_host in (("ArrowRight", False), ("ArrowDown", True)):
        own = sorted((copy for copy in copies if copy.to_host is to_host), key=lambda copy: copy.start)
        page.press(key)
        for copy in own:
            _assert_told(page.text("#view-pipeline .panel"), copy)
            if copy is own[-1] or copy is own[11]:
                break
            page.press("ArrowRight")
        for _ in own:
            page.press("ArrowLeft")
    page.dark(True)
    page.settle()
    assert len(page.evaluate(_LANES)["lanes"][0]) > 10


def _assert_told(shown: str, copy: CopyBar) -> None:
    assert f"KiB of {copy.what} to the {'host' if copy.to_host else 'device'}" in shown
    assert f"{(copy.end - copy.start) * 1e3:.3f} ms, from {copy.start * 1e3:.3f} ms" in (
        shown.replace("from 0 ms", "from 0.000 ms")
    )
    assert f"of stage {copy.action.stage}, microbatch {copy.action.microbatch}" in shown
    assert f"{copy.bytes:,}" in shown and all(name in shown for name in copy.values)


def test_values_that_leave_are_offloaded(offloaded: roundpipe_fx.Plan, page: Page, tmp_path: Path) -> None:
    assert offloaded.pipeline is not None
    own = offloaded.pipeline.offloaded
    page.open(offloaded.write_html(tmp_path / "plan.html"))
    page.press("/")
    page.type("offloaded")
    assert page.text("#values-count") == f"{len(own)} values, {bytes_text(sum(value.bytes for value in own))}"
    names = page.evaluate('[...document.querySelectorAll("#view-values .row")].map(r => r.children[0].innerText)')
    assert set(names) == {value.name for value in own}
    largest = [value.bytes for value in sorted(own, key=lambda value: -value.bytes)]
    assert [next(value.bytes for value in own if value.name == name) for name in names] == largest
    page.click("#view-values .table .row", 0.05)
    chosen = next(value for value in own if value.name == names[0])
    panel = page.text("#view-values .panel")
    assert "leaves the device for the host" in panel and f"in {chosen.microbatches} of 8 microbatches" in panel
    assert "recomputing it instead would take" in panel
    assert f"offloaded: it leaves for the host and comes back in {chosen.microbatches} of 8" in offloaded.explain(
        chosen.name
    )
    listed = [line for line in offloaded.details().splitlines() if line.endswith("; offloaded")]
    assert listed and {line.split()[0] for line in listed} <= set(names)
    page.click("#tab-memory")
    page.click("#view-memory .choice button:nth-child(3)")
    assert "offloaded" in page.text("#view-memory .legend")


class LossHead(nn.Module):
    """Its logits are wider than all else."""

    def __init__(self, words: int = 4096, width: int = 32) -> None:
        super().__init__()
        self.words, self.hidden, self.head = (
            nn.Embedding(words, width),
            nn.Linear(width, width),
            nn.Linear(width, words),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.hidden(self.words(tokens)))
        return F.cross_entropy(self.head(hidden), tokens)


def test_what_is_computed_in_tiles_is_told_as_the_plan_says(page: Page, tmp_path: Path) -> None:
    plan = roundpipe_fx.compile(LossHead(), memory_budget="3MiB").trace(torch.randint(4096, (512,)))
    (tiles,) = plan.tiles
    step = plan.look_into().step
    assert step is not None and tiles.bytes == 4 * 512 * 4096
    page.open(plan.write_html(tmp_path / "plan.html"))
    assert "1 region in tiles" in page.text("header")
    at = next(at for at, moment in enumerate(step.memory.moments) if moment.value == tiles.loop)
    moment = step.memory.moments[at]
    assert moment.bytes == plan.peak.bytes  # so it is the one that is shown first
    assert f"for one tile\n{bytes_text(moment.workspace)}" in page.text("#view-memory .panel")
    assert f"workspaces of kernels, and tiles {bytes_text(moment.workspace)}" in page.text("#view-memory .legend")
    page.press("/")
    page.type("tiled")
    assert page.text("#values-count") == f"1 value, {bytes_text(tiles.bytes)}"
    row = page.text("#view-values .table .row").split("\n")
    assert row[:3] == [tiles.name, "tiled", bytes_text(tiles.bytes)] and "head" in row and tiles.type in row
    page.click("#view-values .table .row", 0.05)
    panel = page.text("#view-values .panel")
    assert f"{tiles.tiles} tiles of its {tiles.rows} rows" in panel
    assert f"as a whole it would hold {bytes_text(tiles.bytes)}; all tiles take {tiles.seconds * 1e3:.3f} ms" in panel
    assert "return F.cross_entropy(self.head(hidden), tokens)" in panel
    (line,) = step.lines[tiles.loop]
    assert line.text in panel and "tiles_of_head(" in line.text
    assert roundpipe_fx.Plan.from_json(plan.to_json()) == plan
