"""The page of a plan of an 8B-parameter model: CPU seconds until it is written, its size, milliseconds a click; and the
pictures of docs/plan-page.md. Needs Chromium.

python -m benchmarks.plan_page
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import roundpipe_fx
from benchmarks.models import llama_8b
from benchmarks.side_by_side import report
from tests.report.chromium import Page, open_page

_PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
_SIZE = (1280, 800)
_CLICKS = {
    "a moment": ("memory", "#view-memory canvas", "ArrowLeft"),
    "a value": ("values", "#view-values .table", "ArrowDown"),
    "a plan of the frontier": ("frontier", "#view-frontier canvas", "ArrowLeft"),
}


def main() -> None:
    os.environ["ROUNDPIPE_FX_PLAN_CACHE"] = "0"
    start = time.process_time()
    plan = _plan()
    planned = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        path = plan.write_html(Path(folder) / "plan.html")
        written = time.process_time() - start
        size = path.stat().st_size
        with open_page(Path(folder) / "profile") as page:
            page.open(path, *_SIZE)
            clicks = {name: _milliseconds(page, *how) for name, how in _CLICKS.items()}
            _take_pictures(page, path)
            _take_picture_of_copies(page, _offloaded().write_html(Path(folder) / "offloaded.html"))
    step = plan.look_into().step
    assert step is not None
    rows: list[dict[str, Any]] = [
        {
            "moments": len(step.memory.moments),
            "values alive": len(step.memory.values),
            "planning CPU s": planned,
            "writing CPU s": written,
            "size MB": size / 1e6,
            **{f"{name} ms": taken for name, taken in clicks.items()},
        }
    ]
    report("plan_page", "the page of a plan of Llama-3.1-8B, 2 x 4,096 tokens, 25 GiB", rows)


def _plan() -> roundpipe_fx.Plan:
    tokens = torch.empty(2, 4096, dtype=torch.long, device="meta")
    return roundpipe_fx.plan(llama_8b(), input_ids=tokens, labels=tokens, device="H100", memory_budget="25GiB")


def _offloaded() -> roundpipe_fx.Plan:
    tokens = torch.empty(4, 4096, dtype=torch.long, device="meta")
    return roundpipe_fx.plan(
        llama_8b(), input_ids=tokens, labels=tokens, device="RTX 4090", offloaded=True, num_microbatches=4
    )


def _milliseconds(page: Page, tab: str, selector: str, key: str) -> float:
    """From a key to the drawn picture, the median of eleven."""
    page.click(f"#tab-{tab}")
    return float(
        page.evaluate(
            f"""(async () => {{
                const element = document.querySelector({json.dumps(selector)});
                const frame = () => new Promise(requestAnimationFrame);
                const taken = [];
                for (let times = 0; times < 11; times += 1) {{
                    const start = performance.now();
                    element.dispatchEvent(new KeyboardEvent("keydown", {{ key: {json.dumps(key)}, bubbles: true }}));
                    await frame(); await frame();
                    taken.push(performance.now() - start);
                }}
                return taken.sort((a, b) => a - b)[5];
            }})()"""
        )
    )


def _take_pictures(page: Page, path: Path) -> None:
    _PICTURES.mkdir(exist_ok=True)
    page.open(path, *_SIZE)
    page.click("#view-memory canvas", 0.62, 0.5)
    _screenshot(page, _PICTURES / "plan-page-memory.png")
    page.open(path, *_SIZE, dark=True)
    page.click("#tab-frontier")
    page.click("#view-frontier canvas", 0.6, 0.7)
    _screenshot(page, _PICTURES / "plan-page-frontier.png")


def _take_picture_of_copies(page: Page, path: Path) -> None:
    page.open(path, *_SIZE)
    page.click("#tab-pipeline")
    page.evaluate('document.querySelector("#view-pipeline canvas[aria-label^=Copies]").focus()')
    for key in ("ArrowRight", "ArrowDown", *["ArrowRight"] * 4):
        page.press(key)
    _screenshot(page, _PICTURES / "plan-page-pipeline.png")


def _screenshot(page: Page, path: Path) -> None:
    page.screenshot(path)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main()
