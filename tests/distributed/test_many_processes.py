"""Pipelines over processes: the results of one process's pipeline, and each rank with the parameters of its stages."""

from __future__ import annotations

import copy
import functools
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import roundpipe_fx
from roundpipe_fx.distributed.ranks import RanksDifferError, RemoteError
from tests.distributed.models import LARGER, MODELS, Block, Net, Tied, language_loss, make
from tests.distributed.reference import train_on_rank_0
from tests.processes import Check, in_processes

STEPS = 2


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))


def _steps(model: Any, batch: dict[str, Any], count: int = STEPS) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [model.forward_backward(**batch) for _ in range(count)]


def _in_one_process(model: nn.Module, **options: Any) -> Any:
    return roundpipe_fx.compile(model, devices=["cpu"] * dist.get_world_size(), **options)


def _memory(model: nn.Module) -> int:
    """Bytes of a model's tensors, except single numbers."""
    return sum(value.untyped_storage().nbytes() for value in (*model.parameters(), *model.buffers()) if value.dim())


def _check_equal(name: str, **options: Any) -> None:
    """Losses, gradients and buffers of two steps are bitwise those of one process; memory is that of own stages."""
    model, batch = make(name)
    plain = copy.deepcopy(model)
    losses = train_on_rank_0(plain, lambda: _steps(_in_one_process(plain, **options), batch))
    after = torch.get_rng_state()
    compiled = roundpipe_fx.compile(model, mesh=_mesh(), **options)
    assert all(map(torch.equal, _steps(compiled, batch), losses))
    assert torch.equal(torch.get_rng_state(), after)
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    owned = {**dict(compiled.named_parameters()), **dict(compiled.named_buffers())}
    assert 0 < len(owned) < len(expected)
    for key, value in owned.items():
        assert torch.equal(value, expected[key]), key
        if expected[key].grad is not None:
            assert torch.equal(value.grad, expected[key].grad), key
    assert _memory(model) == sum(value.untyped_storage().nbytes() for value in owned.values() if value.dim())
    assert all(value.grad is None for name, value in model.named_parameters() if name not in owned)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(owned))
    assert set().union(*everywhere) == expected.keys()


def check_budget(_rank: int, _folder: str) -> None:
    """What a rank allocates in a step, received values and summed gradients included, is within the budget."""
    tokens = make("tied")[1]["tokens"].repeat(8, 4)
    net, x = Net(width=128), torch.randn(512, 128)
    mean = nn.functional.mse_loss
    for plain, inputs, labels, loss_fn in ((net, x, x, mean), (Tied(512, 64), tokens, tokens, language_loss)):
        peaks = []
        for share in (1.0, 0.3, 0.0):
            options = {"memory_budget": share, "tiling": "never", "dynamic": False}
            compiled = roundpipe_fx.compile(copy.deepcopy(plain), mesh=_mesh(), num_microbatches=4, **options)
            compiled.trace(inputs, labels=labels, loss_fn=loss_fn)
            found = []
            for _ in range(2):
                compiled.zero_grad()
                with roundpipe_fx.measure_peak("cpu") as peak:
                    compiled.forward_backward(inputs, labels=labels, loss_fn=loss_fn)
                found.append(peak.bytes)
            assert max(found) <= compiled.plan.budget, (share, found, compiled.plan.budget)
            peaks.append(max(found))
        assert peaks[0] >= peaks[1] >= peaks[2]


def check_budget_of_outputs(_rank: int, _folder: str) -> None:
    """Every rank gets the outputs, and the gradients of those that a loss outside reads."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 512, bias=False))
    x = torch.randn(512, 8)
    for returned in (False, True):
        options = {"memory_budget": 1.0, "tiling": "never", "dynamic": False}
        compiled = roundpipe_fx.compile(copy.deepcopy(wide), mesh=_mesh(), num_microbatches=4, **options)
        compiled.trace(x, labels=x, loss_fn=lambda output, _: output.square().mean())
        for _ in range(2):
            compiled.zero_grad()
            with roundpipe_fx.measure_peak("cpu") as peak:
                if returned:
                    results = compiled.forward_backward(
                        x, labels=x, loss_fn=lambda output, _: output.square().mean(), return_outputs=True
                    )
                else:
                    results = compiled(x)
                    results.square().mean().backward()
            del results
        assert peak.bytes <= compiled.plan.budget, (returned, peak.bytes, compiled.plan.budget)


def check_a_budget_that_does_not_count_all(_rank: int, _folder: str) -> None:
    """Messages of unknown size are held to the end of the step: the user is told once, with figures."""
    model, batch = make("experts")
    told = []
    compiled = roundpipe_fx.compile(model, mesh=_mesh(), num_microbatches=2, memory_budget=0.3)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled.forward_backward(**batch)
        told.append([str(own.message) for own in caught if own.category is roundpipe_fx.StepBudgetWarning])
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, told)
    texts = [text for first, _ in everywhere for text in first]
    assert texts and all("until the end of the step" in text and "memory_budget of" in text for text in texts)
    assert all(len(first) <= 1 and not second for first, second in everywhere)


def check_models(_rank: int, _folder: str) -> None:
    for number, name in enumerate(MODELS):
        for microbatches in (4,) if number else (1, 4):
            _check_equal(name, num_microbatches=microbatches)


def check_larger_models(_rank: int, _folder: str) -> None:
    """In three processes, where stages are smaller and more values skip one; every second model in one microbatch."""
    for number, name in enumerate(name for name in LARGER if name != "qwen3_moe"):  # as in single precision, but slower
        _check_equal(name, num_microbatches=1 if number % 2 else 4)


SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "interleaved"},
    {"schedule": "zero_bubble"},
    {"schedule": "zero_bubble", "memory_budget": 0.5},
    {"schedule": "zbv"},
    {"schedule": "dualpipev", "memory_budget": 0.5},
    {"checkpoint": "except_last"},
    {"memory_budget": 0.0},
]


def check_schedules(_rank: int, _folder: str) -> None:
    for options in SCHEDULES:
        _check_equal("net", num_microbatches=2 * dist.get_world_size(), **options)
    _check_equal("tied", num_microbatches=4, schedule="interleaved")


class Armed:
    """Whether the stages of this process raise, and how many seconds they take."""

    now = False
    seconds = 0.0


def check_failure(rank: int, _folder: str) -> None:
    """An exception of one rank's stage is raised on all; the next step runs as if nothing had been."""
    model, batch = make("net")
    plain = copy.deepcopy(model)
    expected = train_on_rank_0(plain, lambda: _steps(_in_one_process(plain, num_microbatches=4), batch))
    compiled = roundpipe_fx.compile(model, mesh=_mesh(), num_microbatches=4, stage_compiler=_breaking)
    compiled.trace(**batch)
    for broken, seconds in ((1, 0.0), (0, 0.0), (1, 0.3), (0, 0.3)):  # others go through the step, or stop in it
        Armed.now, Armed.seconds = rank == broken, 0.0 if rank == broken else seconds
        start = time.monotonic()
        with pytest.raises(Exception, match="the stage of this rank is broken") as caught:
            compiled.forward_backward(**batch)
        assert time.monotonic() - start < 10
        assert isinstance(caught.value, ValueError if rank == broken else RemoteError)
        assert rank == broken or f"rank {broken} of the pipeline raised ValueError" in str(caught.value)
    Armed.now, Armed.seconds = False, 0.0
    assert all(value.grad is None for value in compiled.parameters())
    assert all(map(torch.equal, _steps(compiled, batch), expected))


def _breaking(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A stage compiler whose stages raise while they are armed to."""

    def call(*arguments: Any) -> Any:
        time.sleep(Armed.seconds)
        if Armed.now:
            raise ValueError("the stage of this rank is broken")
        return module(*arguments)

    return call


def check_differences(rank: int, _folder: str) -> None:
    """Other options, batches, models or failures on a rank are an error on all of them, which says what differs."""
    mesh = _mesh()
    model, batch = make("net")
    compiled = roundpipe_fx.compile(copy.deepcopy(model), mesh=mesh, num_microbatches=2 + 2 * rank)
    with pytest.raises(RanksDifferError, match=r"differ in options(.|\n)*microbatches=2(.|\n)*microbatches=4"):
        compiled.forward_backward(**batch)
    compiled = roundpipe_fx.compile(copy.deepcopy(model), mesh=mesh, num_microbatches=2)
    short = {**batch, "x": batch["x"][: 24 - 4 * rank], "labels": batch["labels"][: 24 - 4 * rank]}
    for run in (compiled.trace, compiled.forward_backward):
        with pytest.raises(RanksDifferError, match=r"differ in batch(.|\n)*\[24, 16\](.|\n)*\[20, 16\]"):
            run(**short)
    compiled = roundpipe_fx.compile(Net(depth=6 + 2 * rank), mesh=mesh, num_microbatches=2)
    with pytest.raises(RanksDifferError, match=r"differ in (graph|plan)"):
        compiled.forward_backward(**batch)
    compiled = roundpipe_fx.compile(copy.deepcopy(model), mesh=mesh, num_microbatches=2)
    wrong = {**batch, "loss_fn": _wrong_loss if rank else nn.functional.mse_loss}
    with pytest.raises((RanksDifferError, RemoteError, ValueError)):
        compiled.forward_backward(**wrong)
    compiled.forward_backward(**batch)


def _wrong_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output - labels


def check_refusals(_rank: int, _folder: str) -> None:
    """What a pipeline over processes cannot do is refused where it is asked for."""
    mesh = _mesh()
    model, batch = make("net")
    for options, text in (
        ({"devices": ["cpu"]}, "devices="),
        ({"cost": "measured"}, "all ranks need the same plan"),
        ({"deferred_batch_norm": True}, "deferred_batch_norm=True"),
        ({"host_links": 2}, "host_links=2 is not supported with a mesh"),
        ({"mesh": init_device_mesh("cpu", (2,))}, "no dimension 'pp'"),
        ({"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "pp"))}, "dimension 'tp'"),
    ):
        with pytest.raises(ValueError, match=text):
            roundpipe_fx.compile(model, **{"mesh": mesh, **options})
    with pytest.raises(TypeError, match="DeviceMesh"):
        roundpipe_fx.compile(model, mesh=2)
    both_ends = nn.Sequential(norm := nn.BatchNorm1d(16), *(Block(16) for _ in range(4)), norm)
    compiled = roundpipe_fx.compile(both_ends, mesh=mesh, num_microbatches=2)
    with pytest.raises(ValueError, match=r"num_batches_tracked' is updated by stages, and ranks \[0, 1\]"):
        compiled.forward_backward(batch["x"], labels=batch["labels"], loss_fn=batch["loss_fn"])
    compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=2)
    for early in (compiled.parameters, compiled.state_dict, compiled.named_buffers):
        with pytest.raises(RuntimeError, match=r"call model\.trace"):
            list(early())
    compiled.trace(**batch)
    assert list(compiled.parameters())
    for around in (compiled, nn.Sequential(compiled)):
        with pytest.raises(ValueError, match="give the mesh a dimension 'dp'"):
            nn.parallel.DistributedDataParallel(around)
    with pytest.raises(TypeError, match="save its state_dict"):
        copy.deepcopy(compiled)


def check_what_a_plan_shows(rank: int, folder: str) -> None:
    """Every rank's plan predicts all devices, and has the measured actions of its own."""
    model, batch = make("tied")
    compiled = roundpipe_fx.compile(model, mesh=_mesh(), num_microbatches=4, memory_budget=0.3)
    compiled.trace(**batch)
    compiled.forward_backward(**batch)
    plan = compiled.plan
    timeline, shown = plan.timeline(), plan.look_into()
    ranks = range(dist.get_world_size())
    assert {bar.device for bar in timeline.predicted} == set(ranks)
    assert {bar.device for bar in timeline.measured} == {rank}
    assert shown.step is not None and all(len(own.devices) == len(ranks) for own in shown.alternatives.plans)
    text = plan.to_json()
    assert roundpipe_fx.Plan.from_json(text).look_into() == shown
    assert text.splitlines()[3] in plan.write_html(Path(folder) / f"plan_{rank}.html").read_text()
    printed: list[Any] = [None] * len(ranks)
    dist.all_gather_object(printed, str(plan))
    assert len(set(printed)) == 1


def _call_and_step(model: Any, batch: dict[str, Any], step_first: bool) -> tuple[torch.Tensor, ...]:
    """A call with its backward, one without gradients, and a step: the call's loss, outputs, and the step's results."""
    x = batch["x"] if "x" in batch else batch["tokens"]
    torch.manual_seed(5)
    if step_first:
        model.forward_backward(**batch)
    loss = batch["loss_fn"](model(x), batch["labels"])
    loss.backward()
    model.eval()
    with torch.no_grad():
        output = model(x)
    model.train()
    return loss.detach(), output, *model.forward_backward(**batch, return_outputs=True)


def check_calls(_rank: int, _folder: str) -> None:
    """A call with ``backward()``, and one without gradients, are those of one process, after a step and before one."""
    for name, step_first in (("net", True), ("tied", False)):
        model, batch = make(name)
        plain = copy.deepcopy(model)
        alone = functools.partial(_call_and_step, _in_one_process(plain, num_microbatches=4), batch, step_first)
        expected = train_on_rank_0(plain, alone)
        compiled = roundpipe_fx.compile(model, mesh=_mesh(), num_microbatches=4)
        assert all(map(torch.equal, _call_and_step(compiled, batch, step_first), expected))
        gradients = {key: value.grad for key, value in plain.named_parameters()}
        assert all(torch.equal(value.grad, gradients[key]) for key, value in compiled.named_parameters())


def check_input_gradients(_rank: int, _folder: str) -> None:
    """The gradient of an input is the same on all ranks, whichever of them read it."""
    model, batch = make("skips")
    plain = copy.deepcopy(model)

    def gradients(compiled: Any) -> list[torch.Tensor]:
        own, scale = batch["x"].clone().requires_grad_(), torch.ones(16, requires_grad=True)
        compiled.forward_backward(own * scale, labels=batch["labels"], loss_fn=nn.functional.mse_loss)
        return [own.grad, scale.grad]

    expected = train_on_rank_0(plain, lambda: gradients(_in_one_process(plain, num_microbatches=3)))
    compiled = roundpipe_fx.compile(model, mesh=_mesh(), num_microbatches=3)
    assert all(map(torch.equal, gradients(compiled), expected))


def _on_meta(name: str) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        model, _ = make(name)
    return model, make(name)[1]


def check_without_memory(rank: int, folder: str) -> None:
    """A model without memory is planned, loaded from files of which each rank reads its own, and trained."""
    for name in ("llama", "tied"):
        path = Path(folder) / name
        whole, batch = make(name)
        if rank == 0:
            _save(whole, path)
        dist.barrier()
        alone = _in_one_process(whole, num_microbatches=2)
        losses = train_on_rank_0(whole, functools.partial(_steps, alone, batch))
        model, _ = _on_meta(name)
        compiled = roundpipe_fx.compile(model, mesh=_mesh(), num_microbatches=2)
        compiled.trace(**batch)
        assert _memory(model) == 0
        with pytest.raises(RuntimeError, match=r"call model\.load"):
            compiled.forward_backward(**batch)
        buffers = dict(make(name)[0].named_buffers())
        if name == "llama":
            with pytest.raises((KeyError, RemoteError), match="inv_freq"):
                compiled.load(path)
            compiled.load(path, fill=lambda name, value, buffers=buffers: value.copy_(buffers[name]))
        else:
            compiled.load(path)
        assert all(map(torch.equal, _steps(compiled, batch), losses))
        expected = dict(whole.named_parameters())
        assert all(torch.equal(value.grad, expected[key].grad) for key, value in compiled.named_parameters())
        assert 0 < _memory(model) < _memory(whole)


def _save(model: nn.Module, path: Path) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(path, max_shard_size="50KB")
        assert (path / "model.safetensors.index.json").exists()
    else:
        path.mkdir()
        safetensors.torch.save_model(model, str(path / "model.safetensors"))


def check_initialization(_rank: int, _folder: str) -> None:
    """Initial values do not depend on the ranks: a tied tensor has the same on each, and so does another cut."""
    found = []
    for stages in ("auto", ["layers.1"]):
        model, batch = _on_meta("tied")
        compiled = roundpipe_fx.compile(model, mesh=_mesh(), num_microbatches=2, stages=stages)
        compiled.trace(**batch)
        compiled.init_weights(lambda name, value: nn.init.normal_(value) if "weight" in name else value.zero_())
        own = {name: value.detach() for name, value in compiled.named_parameters()}
        both: list[Any] = [None, None]
        dist.all_gather_object(both, own)
        assert all(torch.equal(both[0][name], both[1][name]) for name in both[0].keys() & both[1].keys())
        assert "embed.weight" in both[0].keys() & both[1].keys()
        found.append(both[0] | both[1])
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert found[0]["layers.0.up.weight"].std() > 0.5
    assert not torch.equal(found[0]["layers.0.up.weight"], found[0]["layers.1.up.weight"])


def _train(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any], steps: int) -> list[torch.Tensor]:
    losses = []
    for _ in range(steps):
        losses.append(model.forward_backward(**batch))
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""The optimizer's state by names of parameters, which differ from rank to rank."""


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def check_checkpoints(_rank: int, folder: str) -> None:
    """Training goes on from a checkpoint with the same bits, with other stages too, and in one process."""
    for name in ("net", "tied"):
        model, batch = make(name)
        initial = copy.deepcopy(model)
        plain = copy.deepcopy(initial)
        alone = _in_one_process(plain, num_microbatches=2)
        torch.manual_seed(5)
        expected = train_on_rank_0(plain, functools.partial(_train, alone, _adam(alone), batch, 4))
        compiled = roundpipe_fx.compile(model, mesh=_mesh(), num_microbatches=2)
        compiled.trace(**batch)
        optimizer = _adam(compiled)
        torch.manual_seed(5)
        losses = _train(compiled, optimizer, batch, 2)
        state = get_state_dict(compiled, optimizer, options=FLAT)
        path = f"{folder}/checkpoint of {name}"
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=path)
        generator = torch.get_rng_state()
        losses += _train(compiled, optimizer, batch, 2)
        assert all(map(torch.equal, losses, expected))
        for stages in ("auto", ["layers.1"]):
            model, _ = _on_meta(name)
            again = roundpipe_fx.compile(model, mesh=_mesh(), num_microbatches=2, stages=stages)
            again.trace(**batch)
            again.init_weights(lambda name, value: value.zero_())
            optimizer = _adam(again)
            model_state, optimizer_state = get_state_dict(again, optimizer, options=FLAT)
            dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
            states = {"model_state_dict": model_state, "optim_state_dict": optimizer_state}
            set_state_dict(again, optimizer, **states, options=FLAT)
            torch.set_rng_state(generator)
            assert all(map(torch.equal, _train(again, optimizer, batch, 2), expected[2:])), stages
        alone = initial
        state = alone.state_dict()
        dcp.load({"model": state}, checkpoint_id=path)
        alone.load_state_dict(state)
        compiled.load_state_dict(state)
        own = compiled.state_dict()
        assert own.keys() < state.keys() or name == "tied"
        assert all(torch.equal(value, state[key]) for key, value in own.items())


def check_killed(rank: int, _folder: str) -> None:
    """If a rank dies in a step, the others raise."""
    model, batch = make("net")
    compiled = roundpipe_fx.compile(model, mesh=_mesh(), num_microbatches=4, stage_compiler=_dying)
    compiled.trace(**batch)
    Armed.now = rank == 1
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        compiled.forward_backward(**batch)
    assert time.monotonic() - start < 10
    os._exit(0)  # no barrier with a dead rank


def _dying(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if Armed.now:
            os._exit(0)
        return module(*arguments)

    return call


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "checks"),
    [
        (2, [check_models]),
        (3, [check_larger_models]),
        (3, [check_schedules]),
        (2, [check_failure, check_differences, check_refusals, check_killed]),
        (
            2,
            [
                check_what_a_plan_shows,
                check_calls,
                check_input_gradients,
                check_budget,
                check_budget_of_outputs,
                check_a_budget_that_does_not_count_all,
            ],
        ),
        (2, [check_without_memory, check_initialization, check_checkpoints]),
    ],
    ids=["models", "larger", "schedules", "failures", "calls", "state"],
)
def test_processes(ranks: int, checks: Sequence[Check], tmp_path: Path) -> None:
    in_processes(ranks, checks, tmp_path)
