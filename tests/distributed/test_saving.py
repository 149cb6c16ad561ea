"""A model that is spread over ranks is saved as a Hugging Face folder."""

from __future__ import annotations

import copy
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import roundpipe_fx
from roundpipe_fx.distributed.ranks import RemoteError
from tests.distributed.models import Tied, language_loss, make
from tests.processes import Check, in_processes


def _traced(model: nn.Module, batch: dict[str, Any], names: tuple[str, ...] = ("pp",), **options: Any) -> Any:
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=names)
    compiled = roundpipe_fx.compile(copy.deepcopy(model), mesh=mesh, num_microbatches=2, **options)
    compiled.trace(**batch)
    return compiled


def _tied() -> tuple[nn.Module, dict[str, Any]]:
    tokens = torch.randint(32, (8, 6))
    return Tied(), {"tokens": tokens, "labels": tokens, "loss_fn": language_loss}


def _written(folder: Path) -> dict[str, list[str]]:
    """Names of the tensors in each file."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, framework="pt") as opened:
            found[file.name] = list(opened.keys())
    return found


def check_own_model(rank: int, folder: str) -> None:
    """A file of each rank, a tied tensor once; saved again over one file; loaded onto other stages."""
    torch.manual_seed(0)
    model, batch = _tied()
    path = Path(folder) / "own"
    if rank == 0:
        path.mkdir()
        (path / "model.safetensors").write_text("of an earlier save")
    dist.barrier()
    _traced(model, batch).save(path)
    written = _written(path)
    assert sorted(written) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, names in written.items() for name in names}
    distinct = {id(value): name for name, value in reversed([*model.named_parameters()])}
    assert sorted(index["weight_map"]) == sorted(distinct.values())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in model.parameters())
    other = _traced(Tied(), batch, stages=["layers.1"])
    other.load(path)
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in other.named_parameters())


def check_faults(rank: int, folder: str) -> None:
    """One rank that cannot write ends it on all; files of an earlier save stay, and none that is half written."""
    model, batch = _tied()
    compiled = _traced(model, batch)
    path = Path(folder) / "faults"
    compiled.save(path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    dist.barrier()
    occupied = Path(folder) / f"occupied {rank}"
    occupied.write_text("a file")
    with torch.no_grad():
        for value in compiled.parameters():
            value.add_(1)
    with pytest.raises((OSError, RemoteError)) as caught:
        compiled.save(occupied / "model" if rank == 1 else path)
    assert isinstance(caught.value, OSError if rank == 1 else RemoteError)
    assert rank == 1 or "rank 1 of the pipeline could not save the model: NotADirectoryError" in str(caught.value)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # as a disk that is full after 2,000 bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    with pytest.raises((OSError, safetensors.SafetensorError, RemoteError), match="File too large"):
        compiled.save(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    dist.barrier()  # each rank removes its own file
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    with torch.device("meta"):
        unloaded = _traced(Tied(), batch)
    with pytest.raises((RuntimeError, RemoteError), match="no values to be saved"):
        unloaded.save(Path(folder) / "unloaded")


def check_sharded(_rank: int, folder: str) -> None:
    """Rows of all replicas are gathered, and one replica writes."""
    torch.manual_seed(0)
    for options in ({"shard": "dp"}, {}):
        model, batch = _tied()
        path = Path(folder) / f"sharded {len(options)}"
        _traced(model, batch, ("dp",), **options).save(path)
        assert sorted(file.name for file in path.iterdir()) == ["model.safetensors"]
        dist.barrier()
        again = _traced(Tied(), batch, ("dp",))
        again.load(path)
        first: list[Any] = [dict(model.named_parameters())]
        dist.broadcast_object_list(first, src=0)
        assert all(torch.equal(value, first[0][name]) for name, value in again.named_parameters())


def check_hugging_face(_rank: int, folder: str) -> None:
    """from_pretrained has the same tensors, with tied weights too."""
    for name in ("gpt2", "llama", "t5"):
        model, batch = make(name)
        path = Path(folder) / name
        _traced(model, batch).save(path)
        dist.barrier()
        auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
        loaded, info = auto.from_pretrained(path, output_loading_info=True)
        assert type(loaded) is type(model) and not any(info[key] for key in ("missing_keys", "unexpected_keys"))
        both = loaded.state_dict(), model.state_dict()
        assert both[0].keys() == both[1].keys()
        assert all(torch.equal(value, both[1][key]) for key, value in both[0].items())


QUICK: list[Check] = [check_own_model, check_faults, check_sharded]


@pytest.mark.long
def test_two_processes(tmp_path: Path) -> None:
    in_processes(2, QUICK, tmp_path)


@pytest.mark.long
def test_hugging_face(tmp_path: Path) -> None:
    in_processes(2, [check_hugging_face], tmp_path)
