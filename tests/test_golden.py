"""Golden programs: the emitted code of small models, as text.

``make golden`` (``EXPECTTEST_ACCEPT=1``) regenerates them; the diff is the review of a change in what is emitted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch

from tests.comparison import aot_eager_step, assert_bitwise, compiled_step
from tests.golden_models import BUDGETED, GOLDEN, PINNED, PIPELINED
from tests.long import long_but
from tests.pipeline.steps import pipelined_step

FOLDER = Path(__file__).parent.parent / "golden"
MOST_LINES = 120


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="golden files pin what torch 2.13 traces")
@pytest.mark.parametrize("name", [*PINNED, *BUDGETED, *PIPELINED])
def test_golden(name: str, no_workspaces: None) -> None:
    if name in PINNED:
        make, make_batch, stages = PINNED[name]
        options: dict[str, Any] = {"stages": stages, "recompute": "full"}
    else:
        make, make_batch, options = {**BUDGETED, **PIPELINED}[name]
    step = pipelined_step if name in PIPELINED else compiled_step
    _, compiled = step(make(), make_batch(), **options)
    sources = compiled.plan.sources()
    folder = FOLDER / name
    if expecttest.ACCEPT:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        compiled.plan.write(folder)
    assert {path.name for path in folder.iterdir()} == sources.keys()
    for file, text in sources.items():
        expecttest.assert_eq((folder / file).read_text(), text, msg=f"golden/{name}/{file} (make golden regenerates)")
    _assert_text_is_what_runs(compiled)


def test_golden_files_are_short_and_of_a_model() -> None:
    """One can read them in a review."""
    lines = {path: path.read_text().count("\n") for path in FOLDER.glob("*/*")}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}
    assert {path.parent.name for path in lines} == {*PINNED, *BUDGETED, *PIPELINED}


def test_the_nested_golden_runs_a_layer_more_than_once(no_workspaces: None) -> None:
    make, make_batch, options = BUDGETED["nested_recomputation"]
    _, compiled = compiled_step(make(), make_batch(), **options)
    assert max(value.times for stage in compiled.plan.stages for value in stage.recomputed) >= 2


@pytest.mark.parametrize("autocast", long_but([False, True], quick={False}), ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", {**PINNED, **GOLDEN})
def test_bitwise_as_aot_eager(name: str, autocast: bool) -> None:
    make, make_batch, stages = {**PINNED, **GOLDEN}[name]
    model, batch = make(), make_batch()
    reference = aot_eager_step(model, batch, autocast=autocast)
    for recompute in ("full",) if autocast else ("none", "full"):
        step, _ = compiled_step(model, batch, autocast=autocast, stages=stages, recompute=recompute)
        assert_bitwise(step, reference)


def _assert_text_is_what_runs(compiled: Any) -> None:
    """Each stage's text, executed, gives the bits of the stage module."""
    sources = compiled.plan.sources()
    checked = 0
    for module in compiled.plan.modules:
        text = sources[f"stage_{module.stage}.{module.phase}.py"]
        inputs = [node.meta["val"] for node in module.module.graph.nodes if node.op == "placeholder"]
        if text.startswith("#") or not all(isinstance(v, torch.Tensor) and _is_plain(v) for v in inputs):
            continue
        arguments = [_example(value) for value in inputs]
        namespace: dict = {}
        exec(text, namespace)
        torch.manual_seed(0)
        expected = module.module([argument.clone() for argument in arguments])
        torch.manual_seed(0)
        found = namespace[module.name](list(arguments))
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        checked += 1
    assert checked


def _is_plain(value: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in value.shape)


def _example(value: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if value.dtype is torch.uint8:
        return torch.get_rng_state()
    return made.uniform_(0.1, 1.0) if value.is_floating_point() else made.zero_()
