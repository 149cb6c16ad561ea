"""Commands: what they print, their JSON, exit codes, and errors of one line."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.analysis.cost import DEVICES
from roundpipe_fx.budget import InfeasibleBudgetError, bytes_text
from roundpipe_fx.command_line import commands
from roundpipe_fx.command_line.largest_batch import largest_batch
from roundpipe_fx.command_line.main import main
from roundpipe_fx.command_line.model_of import named_model
from roundpipe_fx.report.issue_report import issue_report
from roundpipe_fx.report.plan import Plan

_MLP = "tests.command_line.models:mlp"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan in JSON."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert main(["plan", _MLP, "--batch", "4", "--sequence", "8", "--memory-budget", "0.0", "--output", str(path)]) == 0
    return path


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> object:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_is_that_of_the_function(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", _MLP, "--batch", "4", "--sequence", "8", "--memory-budget", "0.0"]) == 0
    plan = Plan.from_json(stored.read_text())
    assert capsys.readouterr().out == f"{plan}\n"
    assert main(["show", str(stored), "--details"]) == 0
    assert capsys.readouterr().out == f"{plan.details()}\n"


def test_explain_and_frontier_of_a_stored_plan(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.from_json(stored.read_text())
    assert _json(capsys, "explain", str(stored), "layers.0") == plan.explain("layers.0").splitlines()
    assert _json(capsys, "frontier", str(stored)) == [list(point) for point in plan.frontier()]
    assert main(["explain", str(stored), "layer.0"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Did you mean" in error and error.startswith("roundpipe-fx: ")


def test_the_frontier_is_the_same_of_a_stored_plan_and_on_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a plan that fits as it is, too: nothing else was looked at for it."""
    asked = [_MLP, "--batch", "4", "--memory-budget", "1.0"]
    path = tmp_path / "plan.json"
    points = _json(capsys, "frontier", *asked)
    assert isinstance(points, list) and len(points) > 3
    assert main(["plan", *asked, "--output", str(path)]) == 0
    capsys.readouterr()
    assert _json(capsys, "frontier", str(path)) == points
    assert json.loads(path.read_text())["frontier"] == points  # what the page draws
    found = Plan.from_json(path.read_text()).look_into().alternatives
    assert [[other.bytes, other.seconds] for other in found.plans] == points


def test_compare(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    main(["plan", _MLP, "--batch", "4", "--sequence", "8", "--memory-budget", "1.0", "--output", str(other)])
    capsys.readouterr()
    rows = _json(capsys, "compare", str(stored), str(other))
    plans = [Plan.from_json(path.read_text()) for path in (stored, other)]
    assert isinstance(rows, dict)
    assert rows["peak_bytes"] == [plan.peak_bytes for plan in plans] and rows["peak_bytes"][0] < rows["peak_bytes"][1]
    assert rows["recompute_seconds"] == [plan.recompute_seconds for plan in plans] and rows["recompute_seconds"][0] > 0
    assert rows["saved_alone"][1] and not rows["saved_alone"][0]
    assert main(["compare", str(stored), str(other)]) == 0
    assert re.search(rf"recomputed, ms +{plans[0].recompute_seconds * 1e3:.3f} +0.000\n", capsys.readouterr().out)


def test_pages(stored: Path, tmp_path: Path) -> None:
    shown, both, own = (tmp_path / name for name in ("shown.html", "both.html", "own.html"))
    assert main(["show", str(stored), "--html", str(shown)]) == 0
    plan = Plan.from_json(stored.read_text())
    assert shown.read_text() == plan.write_html(own).read_text()
    assert main(["compare", str(stored), str(stored), "--html", str(both)]) == 0
    assert both.read_text().count(json.dumps(str(stored))) == 2
    assert main(["show", str(stored), "--html", str(tmp_path / "missing" / "page.html")]) == 2


def test_what_does_not_fit_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", _MLP, "--memory-budget", "100"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cannot be met" in error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "tests.command_line.models:nothing"], "no 'nothing'"),
        (["plan", "tests.command_line.no_module:mlp"], "No module named"),
        (["plan", "tests.command_line.models:number"], "returns int"),
        (["plan", "tests.command_line.models:alone"], "must return a pair"),
        (["plan", "./nowhere"], "no such folder"),
        (["plan", _MLP, "--device", "RTX 409"], "Did you mean"),
        (["plan", _MLP, "--batch", "2", "--num-microbatches", "4"], "2 rows cannot be split into 4 microbatches"),
        (["plan", _MLP, "--dtype", "bfloat"], "not a floating-point dtype"),
        (["fit", _MLP, "--device", "cpu"], "has no limit"),
        (["fit", _MLP, "--memory-budget", "0.5"], "is a share"),
        (["plan", _MLP, "--output", "nowhere/plan.json"], "there is no folder nowhere"),
        (["plan", _MLP, "--html", "nowhere/plan.html"], "there is no folder nowhere"),
        (["show", "nowhere.json"], "roundpipe-fx: nowhere.json: No such file"),
        (["show", __file__], "not a roundpipe_fx plan"),
    ],
)
def test_errors_are_one_line_that_says_what_is_wrong(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and text in error


def test_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["plan"], ["plna"], ["plan", _MLP, "--batch", "0"], []):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.startswith("roundpipe-fx: ") and error.count("\n") == 1


def test_a_plan_for_several_devices(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "plan", _MLP, "--batch", "4", "--device", "H100", "--devices", "2")
    assert isinstance(found, dict)
    assert (found["pipeline"]["microbatches"], len(found["pipeline"]["peak_bytes"])) == (4, 2)
    found = _json(capsys, "plan", _MLP, "--batch", "3", "--device", "H100", "--devices", "2")
    assert isinstance(found, dict) and found["pipeline"]["microbatches"] == 3  # each has a row at least


def test_a_report_has_figures_and_no_names(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.from_json(stored.read_text())
    found = _json(capsys, "report", str(stored))
    assert isinstance(found, dict)
    assert found["versions"]["torch"] == torch.__version__ and found["machine"]["cores"] == os.cpu_count()
    assert found["options"] == plan.options
    assert {"device", "memory_budget", "stage_compiler"} <= found["options"].keys()
    assert found["plan"]["peak bytes"] == plan.peak_bytes and found["plan"]["stages"] == len(plan.stages)
    assert main(["report", str(stored)]) == 0
    text = capsys.readouterr().out
    assert f"- fingerprint: {found['plan']['fingerprint']}" in text
    names = {text for stage in plan.stages for value in stage.saved for text in (value.name, value.module)}
    private = {name for name in names if len(name) > 1} | {platform.node(), str(Path.home()), "models.py"}
    assert not [name for name in private if name in text]
    assert main(["report"]) == 0 and "**plan**" not in capsys.readouterr().out


def test_options_of_a_report_tell_nothing_private() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    compiled = roundpipe_fx.compile(model, stages=["2"], passes=lambda passes: passes, memory_budget="1MiB")
    plan = compiled.trace(torch.ones(2, 4))
    options = issue_report(plan)["options"]
    expected = {"stages": "1 given", "passes": "a function", "memory_budget": str(2**20)}
    assert options == expected | {"device": "cpu", "stage_compiler": "eager"}
    assert Plan.from_json(plan.to_json()).options == options
    named = roundpipe_fx.plan(model, torch.ones(2, 4), device="RTX 4090").options
    assert named["device"] == "RTX 4090, planned for"


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    assert "RTX 4090" in capsys.readouterr().out


def test_a_configuration_is_planned_without_weights(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "dtype": "bfloat16"}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    named = named_model(str(tmp_path), None)
    assert all(parameter.is_meta and parameter.dtype is torch.bfloat16 for parameter in named.model.parameters())
    assert named.make_batch(3, 5)["labels"].shape == (3, 5)
    assert {p.dtype for p in named_model(str(tmp_path), "float32").model.parameters()} == {torch.float32}


def _configured(folder: Path, architecture: str, **config: object) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "vocab_size": 64, **config}))
    return str(folder)


_GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}


def test_a_model_whose_name_ends_in_model_may_have_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = named_model(_configured(tmp_path, "GPT2LMHeadModel", **_GPT2), None)
    assert set(named.make_batch(2, 4)) == {"input_ids", "labels"}
    assert main(["plan", _configured(tmp_path, "GPT2Model", **_GPT2)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "GPT2Model takes no labels" in error


def test_a_sequence_beyond_learned_positions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = _configured(tmp_path / "short", "GPT2LMHeadModel", **_GPT2, n_positions=16)
    assert main(["plan", short, "--sequence", "17"]) == 2
    assert "has 16 positions" in capsys.readouterr().err
    assert named_model(short, None).make_batch(1, 16)["input_ids"].shape == (1, 16)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"max_position_embeddings": 16}
    rotary = _configured(tmp_path / "rotary", "LlamaForCausalLM", model_type="llama", **sizes)
    assert named_model(rotary, None).make_batch(1, 17)["input_ids"].shape == (1, 17)


def test_rows_of_images_have_no_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = {"model_type": "vit", "image_size": 8, "patch_size": 4}
    named = named_model(_configured(tmp_path / "vit", "ViTForImageClassification", **images, **sizes), None)
    assert named.images and named.make_batch(2, 128)["pixel_values"].shape == (2, 3, 8, 8)
    assert not named_model(_MLP, None).images
    no_size = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1]}
    assert main(["plan", _configured(tmp_path / "resnet", "ResNetForImageClassification", **no_size)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "says no image_size" in error


def test_an_error_of_the_model_is_one_line_that_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tests.command_line.models:broken"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(r"KeyError: 'no such part' \(models\.py:\d+\)", error)
    assert "TORCH_LOGS=+roundpipe_fx" in error
    assert main(["plan", "tests.command_line.models:refusing"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(r"ValueError: the width must be even \(models\.py:\d+\)", error)


@pytest.mark.long
def test_a_name_is_looked_up_as_transformers_does(tmp_path: Path) -> None:
    """In the hub's cache here: without a network, a name that is not there is an error of one line."""
    cached = tmp_path / "hub" / "models--someone--small"
    _configured(cached / "snapshots" / "0123abcd", "GPT2LMHeadModel", **_GPT2)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abcd")
    program = (
        "from roundpipe_fx.command_line.main import main\n"
        "print(main(['plan', 'someone/small', '--sequence', '8', '--json', '--memory-budget', '0.5']))\n"
        "print(main(['plan', 'someone/smal']))"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    *plan, found, missing = run.stdout.splitlines()
    assert json.loads("\n".join(plan))["stages"] and (found, missing) == ("0", "2")
    (error,) = run.stderr.splitlines()
    assert error.startswith("roundpipe-fx: someone/smal: no configuration: ")
    assert "give a folder with a config.json, or module:function" in error


_BUDGET = 10**6


def _searched(stored: Path, most: int, needed: Callable[[int], int]) -> list[int]:
    """The rows that are tried until it is found how many fit."""
    plan = dataclasses.replace(Plan.from_json(stored.read_text()), budget=_BUDGET)
    tried: list[int] = []

    def planned(rows: int) -> Plan:
        tried.append(rows)
        if rows > most:
            raise InfeasibleBudgetError("too many", needed(rows))
        peak = dataclasses.replace(plan.peak, bytes=min(_BUDGET, needed(rows)))
        return dataclasses.replace(plan, peak=peak)

    rows, found = largest_batch(planned)
    assert rows == most and found.peak_bytes == min(_BUDGET, needed(most))
    assert len(set(tried)) == len(tried)
    return tried


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 100, 1000])
def test_the_largest_batch_is_found_whatever_refusals_say(stored: Path, most: int) -> None:
    _searched(stored, most, lambda rows: 1)
    _searched(stored, most, lambda rows: rows)
    assert len(_searched(stored, most, lambda rows: _BUDGET * rows)) <= 48


@pytest.mark.parametrize("most", [1, 2, 9, 100, 1000])
@pytest.mark.parametrize("fixed", [0, _BUDGET // 3])
def test_few_plans_are_made_where_bytes_grow_with_rows(stored: Path, most: int, fixed: int) -> None:
    each = (_BUDGET - fixed) // most
    tried = _searched(stored, most, lambda rows: fixed + each * rows)
    assert len(tried) <= 7


def test_what_always_fits_is_not_searched(stored: Path) -> None:
    assert len(_searched(stored, 2**16, lambda rows: 1)) <= 10


def test_not_even_one_row_fits() -> None:
    def planned(rows: int) -> Plan:
        raise InfeasibleBudgetError("too many", rows)

    with pytest.raises(InfeasibleBudgetError):
        largest_batch(planned)


@pytest.mark.long
def test_fit_says_what_plan_would(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [_MLP, "--sequence", "64", "--memory-budget", "1MiB", "--tiling", "never"]
    found = _json(capsys, "fit", *asked)
    assert isinstance(found, dict)
    rows = found["batch"]
    assert main(["plan", *asked, "--batch", str(rows)]) == 0
    assert main(["plan", *asked, "--batch", str(rows + 1)]) == 1


def test_fit_says_what_is_beside_the_peak(
    stored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan.from_json(stored.read_text())
    monkeypatch.setattr(commands, "largest_batch", lambda planned, note: (3, plan))
    asked = ["fit", _MLP, "--device", "RTX 4090", "--sequence", "64"]
    parameters = 3 * 4 * (2 * 64 * 256 + 256 + 64)
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"largest batch: 3 rows of 64 tokens (peak {bytes_text(plan.peak_bytes)}, recomputes ")
    assert f"parameters and buffers, {bytes_text(parameters)};" in told
    assert f"({bytes_text(2 * parameters)} for AdamW)" in told
    found = _json(capsys, *asked)
    assert isinstance(found, dict) and (found["batch"], found["parameter_bytes"]) == (3, parameters)
    assert main([*asked, "--offloaded"]) == 0  # the optimizer's state is on the host
    assert "AdamW" not in capsys.readouterr().out


@pytest.mark.long
def test_fit_leaves_room_for_an_optimizer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = 3 * 4 * (2 * 64 * 256 + 256 + 64)
    monkeypatch.setitem(DEVICES, "H100", dataclasses.replace(DEVICES["H100"], memory=8 * parameters))
    asked = ["fit", _MLP, "--device", "H100", "--sequence", "256", "--tiling", "never", "--optimizer", "AdamW"]
    found = _json(capsys, *asked)
    assert isinstance(found, dict)
    assert found["optimizer_bytes"] == 2 * parameters
    assert found["peak_bytes"] <= 0.9 * 8 * parameters - 3 * parameters
    alone = _json(capsys, *asked[:-2])
    assert isinstance(alone, dict) and alone["batch"] > found["batch"]
    rows = found["batch"]
    monkeypatch.setattr(commands, "largest_batch", lambda planned, note: (rows, planned(rows)))
    assert main(asked) == 0
    assert f"AdamW's state, {bytes_text(2 * parameters)}" in capsys.readouterr().out


def test_devices_are_divided(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", _MLP, "--batch", "4", "--sequence", "8", "--device", "H100", "--optimizer", "AdamW"]
    found = _json(capsys, *asked, "--mesh-shape", "2", "--num-microbatches", "2")
    assert isinstance(found, dict)
    mesh = found["pipeline"]["mesh"]
    (chosen,) = (own for own in mesh["divisions"] if own["chosen"])
    assert chosen["replicas"] * chosen["pipeline"] == 2 and any(mesh["optimizer_bytes"])
    given = f"{chosen['replicas']}x{chosen['pipeline']}"
    asked[3] = str(4 // chosen["replicas"])
    fixed = _json(capsys, *asked, "--mesh-shape", given, "--num-microbatches", str(2 // chosen["replicas"]))
    assert isinstance(fixed, dict) and fixed["pipeline"]["mesh"]["replicas"] == chosen["replicas"]


def test_what_is_no_mesh_or_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", _MLP, "--mesh-shape", "2", "--optimizer", "Adamw"]) == 2
    assert "--optimizer Adamw: not a class of torch.optim" in capsys.readouterr().err
    assert main(["plan", _MLP, "--mesh-shape", "2", "--batch", "3", "--num-microbatches", "2"]) == 2
    assert "3 rows, which are not divisible" in " ".join(capsys.readouterr().err.split())
    for wrong in ("0", "4x", "x4", "4x0"):
        with pytest.raises(SystemExit):
            main(["plan", _MLP, "--mesh-shape", wrong])


@pytest.mark.long
def test_an_encoder_and_decoder_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1, "decoder_start_token_id": 0}
    t5 = _configured(tmp_path, "T5ForConditionalGeneration", model_type="t5", pad_token_id=0, eos_token_id=1, **sizes)
    found = _json(capsys, "plan", t5, "--batch", "2", "--sequence", "16", "--device", "RTX 4090")
    assert isinstance(found, dict) and found["peak"]["bytes"] > 0
    modules = {value["module"] for stage in found["stages"] for value in stage["saved"]}
    assert any(name.startswith("encoder.block.0") for name in modules)
    assert any(name.startswith("decoder.block.0") for name in modules)


@pytest.mark.long
def test_the_module_runs_as_a_program() -> None:
    run = subprocess.run([sys.executable, "-m", "roundpipe_fx", "devices"], capture_output=True, text=True, check=True)
    assert "H200" in run.stdout


@pytest.mark.long
def test_the_commands_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    (model,) = re.findall(r"```python\n(# my_model.py\n.*?)```", text, re.DOTALL)
    (commands,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert model.count("range(4)") == 1
    (tmp_path / "my_model.py").write_text(model.replace("range(4)", "range(2)"))  # fewer layers: less to plan
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for line in commands.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "roundpipe-fx"
        assert main(arguments) == 0, line
