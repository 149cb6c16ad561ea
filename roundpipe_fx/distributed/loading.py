"""Loading: a rank reads what it owns from files, or initializes it.

Files are those of Hugging Face: a folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and the
files that it names; or one file. A rank reads the tensors of its own stages only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from roundpipe_fx.distributed.ownership import Ownership
from roundpipe_fx.torch_private import local_part

__all__ = ["INDEX_FILE", "SINGLE_FILE", "Fill", "aliases", "initialize", "load_files", "load_tensors"]

Fill = Callable[[str, torch.Tensor], object]
"""Writes the values of a tensor, given its name."""

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def load_files(ownership: Ownership, path: str | Path, fill: Fill | None, seed: int) -> None:
    """Read what a rank owns.

    Args:
        ownership: of a planned model.
        path: a folder or a file.
        fill: writes what the files do not have.
        seed: see :func:`initialize`.

    Raises:
        FileNotFoundError: there is no such file.
        KeyError: the files lack tensors that this rank owns, and there is no ``fill``; or a tensor has another shape.
    """
    from safetensors import safe_open

    files = _files(Path(path))
    missing = []
    opened: dict[Path, Any] = {}
    for names, value in aliases(ownership):
        name = next((known for known in names if known in files), None)
        if name is None:
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
    """What a rank owns, each tensor once, with all its names.

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
            mesh, placements = parallel.device_mesh, parallel.placements
            loaded = distribute_tensor(loaded.to(value.device), mesh, placements, src_data_rank=None)
        loaded = loaded.redistribute(parallel.device_mesh, parallel.placements).to_local()
    if value.shape != loaded.shape:
        raise KeyError(f"{name!r} has the shape {tuple(loaded.shape)}, and {tuple(value.shape)} in the model.")
    sharded = ownership.shards.by_traced.get(id(value))
    if isinstance(loaded, DTensor):
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
