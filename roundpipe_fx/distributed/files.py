"""Files: a rank reads what it owns from them, or initializes it, and writes it to them.

Files are those of Hugging Face: a folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and the
files that it names; or one file. A rank reads and writes the tensors of its own stages only.

``torch.distributed.checkpoint.HuggingFaceStorageWriter`` writes a tied tensor under each of its names, and rows of
DTensors to a second folder, which one rank then merges. Here each tensor is written once, by one rank, whole.

::

    rank 0   .model-00001-of-00002.safetensors ──┐                      ┌─▶ model-00001-of-00002.safetensors
    rank 1   .model-00002-of-00002.safetensors ──┴─ all are written? ───┴─▶ model-00002-of-00002.safetensors ──▶ index

A rank that fails ends it for all, before a file of an earlier save is replaced.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from roundpipe_fx.distributed.agreement import all_or_none
from roundpipe_fx.distributed.group import PipelineGroup
from roundpipe_fx.distributed.ownership import Ownership
from roundpipe_fx.torch_private import local_part

Fill = Callable[[str, torch.Tensor], object]
"""Writes the values of a tensor, given its name."""

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def load_files(ownership: Ownership, path: str | Path, fill: Fill | None, seed: int) -> None:
    """Read what a rank owns.

    Args:
        ownership: of a planned model.
        path: a folder or a file.
        fill: writes what the files do not have.

    Raises:
        FileNotFoundError: there is no such file.
        KeyError: the files lack tensors that this rank owns, and there is no ``fill``; or a tensor has another shape.
    """
    from safetensors import safe_open

    files = _files(Path(path))
    missing = []
    opened: dict[Path, Any] = {}
    for names, value in aliases(ownership):
        # A tied tensor may be in the files under any of its names.
        name = next((known for known in names if known in files), None)
        if name is None:
            # Buffers that are not persistent have no entry, and have their values already.
            if id(value) in ownership.unloaded or isinstance(value, torch.nn.Parameter):
                missing.append(names[0])
            continue
        if files[name] not in opened:
            opened[files[name]] = safe_open(files[name], framework="pt")
        _copy(ownership, name, value, opened[files[name]].get_tensor(name))
    if missing and fill is None:
        raise KeyError(
            f"{path} has no {missing[0]!r} (and {len(missing) - 1} more of what this rank owns). Buffers that are not "
            "saved, such as rotary frequencies, are computed when a model is built with memory; give "
            "fill=a function (name, tensor) that writes them."
        )
    if fill is not None:
        initialize(ownership, fill, seed, set(missing))


def load_tensors(ownership: Ownership, tensors: Mapping[str, Any]) -> None:
    """Copy what a rank owns from tensors by name; what they do not have stays as it is."""
    for names, value in aliases(ownership):
        name = next((known for known in names if known in tensors), None)
        if name is not None:
            _copy(ownership, name, value, tensors[name])


def initialize(ownership: Ownership, fill: Fill, seed: int, names: set[str] | None = None) -> None:
    """Let a function write the values of what a rank owns.

    For each tensor the generators are seeded by the seed and the tensor's name. So the values do not depend on how many
    ranks there are, and a tied tensor gets the same on each rank.

    Args:
        ownership: of a planned model.
        fill: called with a name and the tensor.
        seed: the same on all ranks.
        names: of the tensors to write; ``None``: all.
    """
    for (name, *_), value in aliases(ownership):
        if names is None or name in names:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            with torch.random.fork_rng():
                torch.manual_seed(int.from_bytes(digest[:7], "little"))
                if any(local_part(parameter) is value for parameter in ownership.parallel):
                    raise NotImplementedError(
                        f"init_weights() writes whole tensors, and {name!r} is distributed over ranks: initialize it "
                        "before compile, or load a checkpoint."
                    )
                ownership.fill(value, lambda tensor, name=name: fill(name, tensor))  # type: ignore[misc]


def aliases(ownership: Ownership) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Tensors that a rank owns, each once, with all its names.

    Args:
        ownership: of a planned model.

    Returns:
        names, in the model's order, and tensors, as they are traced.
    """
    names_of: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, value in ownership.named():
        if ownership.owns(value):
            names_of.setdefault(id(value), ([], value))[0].append(name)
    yield from names_of.values()


def _copy(ownership: Ownership, name: str, value: torch.Tensor, loaded: torch.Tensor) -> None:
    parallel = next((parameter for parameter in ownership.parallel if local_part(parameter) is value), None)
    if parallel is not None:
        if parallel.shape != loaded.shape:
            raise KeyError(f"{name!r} has the shape {tuple(loaded.shape)}, and {tuple(parallel.shape)} in the model.")
        if not isinstance(loaded, DTensor):  # every rank has the whole
            # Each rank cuts its own part out of the whole, without communication.
            mesh, placements = parallel.device_mesh, parallel.placements
            loaded = distribute_tensor(loaded.to(value.device), mesh, placements, src_data_rank=None)
        loaded = loaded.redistribute(parallel.device_mesh, parallel.placements).to_local()
    if value.shape != loaded.shape:
        raise KeyError(f"{name!r} has the shape {tuple(loaded.shape)}, and {tuple(value.shape)} in the model.")
    sharded = ownership.shards.by_traced.get(id(value))
    if isinstance(loaded, DTensor):
        # A checkpoint with the same distribution: rows are copied without gathering.
        if sharded is not None and sharded.holds_rows_of(loaded):
            with torch.no_grad():
                sharded.local().copy_(loaded.to_local())
            ownership.unloaded.discard(id(value))
            return
        loaded = loaded.full_tensor()
    ownership.fill(value, lambda tensor: tensor.copy_(loaded))


def _files(path: Path) -> dict[str, Path]:
    """The file of each tensor, by name."""
    from safetensors import safe_open

    if path.is_dir() and (path / INDEX_FILE).exists():
        index = json.loads((path / INDEX_FILE).read_text())["weight_map"]
        return {name: path / file for name, file in index.items()}
    file = path / SINGLE_FILE if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(
            f"{path}: there is neither {SINGLE_FILE} nor {INDEX_FILE}, nor is it a file of that format."
        )
    with safe_open(file, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), file)


_OF_SEVERAL = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def save_files(ownership: Ownership, group: PipelineGroup, path: str | Path) -> None:
    """Write the model's parameters and persistent buffers, and its configuration if it has one.

    Args:
        ownership: of a planned model.
        group: the ranks. All of them, those of replicas included, must call it.
        path: a folder; it is created.

    Raises:
        RuntimeError: a tensor has no values yet.
        OSError: this rank cannot write.
        RemoteError: another rank has failed, and this one has not.
    """
    folder = Path(path)
    everyone = group.everyone
    with all_or_none(everyone, "save the model"):
        missing = ownership.missing_names()
        if missing:
            raise RuntimeError(f"{missing[0]!r} (of {len(missing)} tensors of this rank) has no values to be saved.")
    tensors = _tensors_to_write(ownership, group)
    all_names: list[list[str]] = everyone.gather(list(tensors))
    # Files are numbered among the ranks that write something.
    writers = [rank for rank, names in enumerate(all_names) if names]
    files = {rank: _file_name(position, len(writers)) for position, rank in enumerate(writers)}
    mine = files.get(everyone.rank)
    try:
        with all_or_none(everyone, "save the model"):
            if mine is not None:
                folder.mkdir(parents=True, exist_ok=True)
                # First to hidden names. A failure of any rank leaves the earlier save untouched.
                _write(folder / f".{mine}", tensors)
    except BaseException:
        if mine is not None:
            _remove(folder / f".{mine}")
        raise
    size = sum(everyone.gather(sum(value.nbytes for value in tensors.values())))
    with all_or_none(everyone, "save the model"):
        if mine is not None:
            # All files are complete: from here on a failure can only be one of the file system.
            (folder / f".{mine}").replace(folder / mine)
    with all_or_none(everyone, "save the model"):
        if everyone.rank == 0:
            index = {name: files[rank] for rank in writers for name in all_names[rank]}
            _finish(folder, index, size)
            _write_configuration(ownership.model, folder)


def _tensors_to_write(ownership: Ownership, group: PipelineGroup) -> dict[str, torch.Tensor]:
    """Tensors that this rank writes, by name: of those that several ranks own, the ones that it owns first."""
    saved = ownership.model.state_dict(keep_vars=True).keys()
    assert ownership.owners is not None
    tensors = {}
    for names, value in aliases(ownership):
        name = next((known for known in names if known in saved), None)
        # Of tied tensors with several owners the first rank writes.
        if name is None or min(ownership.owners[id(value)]) != group.rank:
            continue
        sharded = ownership.shards.by_traced.get(id(value))
        whole = value.detach()
        if sharded is not None:
            assert group.replicas is not None
            gathered = sharded.whole(group.replicas.start_gather)
            whole = gathered.cpu() if group.replica == 0 else gathered
        if group.replica == 0:
            tensors[name] = whole.contiguous()
    return tensors


def _file_name(position: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{position + 1:05}-of-{count:05}.safetensors"


def _write(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    # Parts of a larger storage as tensors of their own, which the format requires.
    parts = {
        name: value.clone() if value.untyped_storage().nbytes() != value.nbytes else value
        for name, value in tensors.items()
    }
    save_file(parts, file, metadata={"format": "pt"})


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError:  # of a folder that cannot be written to, which is what is being told already
        return


def _finish(folder: Path, index: Mapping[str, str], size: int) -> None:
    """Write the index, and remove what an earlier save has left, which a reader might take instead."""
    used = set(index.values())
    if used != {SINGLE_FILE}:
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}, indent=2)
        (folder / f".{INDEX_FILE}").write_text(text + "\n")
        (folder / f".{INDEX_FILE}").replace(folder / INDEX_FILE)
    else:
        (folder / INDEX_FILE).unlink(missing_ok=True)
    # Files of an earlier save with more parts would otherwise be read as well.
    for file in folder.glob("model*.safetensors"):
        if file.name not in used and (file.name == SINGLE_FILE or _OF_SEVERAL.fullmatch(file.name)):
            file.unlink()


def _write_configuration(model: Any, folder: Path) -> None:
    """That of a Hugging Face model: how it is built, and how it generates."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(folder)
