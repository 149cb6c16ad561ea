from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import roundpipe_fx
from roundpipe_fx.analysis.cost.measured import MeasuredCosts
from roundpipe_fx.analysis.cost.roofline import DEVICES
from roundpipe_fx.analysis.data_files import cache_folder
from tests.comparison import aot_eager_step, assert_bitwise, train_step
from tests.golden_models import MixtureOfExperts
from tests.remat.graphs import mlp

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROUNDPIPE_FX_CACHE", str(tmp_path))
    return tmp_path


def _file(folder: Path) -> Path:
    (found,) = folder.glob("costs_*.json")
    return found


def test_each_signature_is_timed_once_and_kept_on_disk(folder: Path) -> None:
    assert cache_folder() == folder
    model, x = mlp(depth=3), torch.randn(64, 16)
    plan = roundpipe_fx.compile(model, memory_budget=0.3, cost="measured").trace(x)
    assert plan.forward_seconds > 0
    seconds = json.loads(_file(folder).read_text())["seconds"]
    assert 5 < len(seconds) < 60 and all(0 < value < 1 for value in seconds.values())
    # Known costs are not measured again: the same plan comes out, to the second.
    torch._dynamo.reset()
    again = roundpipe_fx.compile(mlp(depth=3), memory_budget=0.3, cost="measured").trace(x)
    assert again.forward_seconds == plan.forward_seconds
    assert json.loads(_file(folder).read_text())["seconds"] == seconds


@pytest.mark.long
def test_measuring_leaves_the_generators_and_the_bits_alone() -> None:
    for model, x in ((mlp(), torch.randn(8, 16)), (MixtureOfExperts(), torch.randn(6, 8))):
        torch._dynamo.reset()
        reference = aot_eager_step(model, {"x": x})
        compiled = roundpipe_fx.compile(model, memory_budget=0.2, cost="measured")
        state = torch.get_rng_state()
        compiled.trace(x)
        assert torch.equal(state, torch.get_rng_state())
        assert_bitwise(train_step(compiled, model, {"x": x}), reference)


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        '{"format": "roundpipe_fx costs 1", "device": "another", "torch": "1.0", "seconds": {}}',
        '{"format": "x"}',
    ],
)
def test_a_corrupt_or_foreign_file_is_ignored_with_a_warning(folder: Path, content: str) -> None:
    costs = MeasuredCosts(DEVICES["cpu"], CPU, {"a": 1.0})
    costs.save()
    assert MeasuredCosts.load(DEVICES["cpu"], CPU).seconds_by_signature == {"a": 1.0}
    _file(folder).write_text(content)
    with pytest.warns(UserWarning, match="is ignored"):
        assert MeasuredCosts.load(DEVICES["cpu"], CPU).seconds_by_signature == {}


def test_two_writers_keep_what_the_other_measured() -> None:
    first = MeasuredCosts(DEVICES["cpu"], CPU, {"a": 1.0})
    second = MeasuredCosts(DEVICES["cpu"], CPU, {"b": 2.0})
    first.save()
    second.save()
    assert MeasuredCosts.load(DEVICES["cpu"], CPU).seconds_by_signature == {"a": 1.0, "b": 2.0}


def test_unknown_cost_models_are_refused() -> None:
    with pytest.raises(ValueError, match="'roofline', 'measured'"):
        roundpipe_fx.compile(mlp(), cost="guessed")
