"""Saving: a folder as Hugging Face has it, into which each rank writes the tensors of its own stages.

``torch.distributed.checkpoint.HuggingFaceStorageWriter`` writes a tied tensor under each of its names, and rows of
DTensors to a second folder, which one rank then merges. Here each tensor is written once, by one rank, whole.

::

    rank 0   .model-00001-of-00002.safetensors ──┐                      ┌─▶ model-00001-of-00002.safetensors
    rank 1   .model-00002-of-00002.safetensors ──┴─ all are written? ───┴─▶ model-00002-of-00002.safetensors ──▶ index

A rank that fails ends it for all, before a file of an earlier save is replaced.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from roundpipe_fx.distributed.agreement import together
from roundpipe_fx.distributed.group import PipelineGroup
from roundpipe_fx.distributed.loading import INDEX_FILE, SINGLE_FILE, aliases
from roundpipe_fx.distributed.ownership import Ownership

__all__ = ["save_files"]

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
    with together(everyone, "save the model"):
        missing = ownership.missing()
        if missing:
            raise RuntimeError(f"{missing[0]!r} (of {len(missing)} tensors of this rank) has no values to be saved.")
    tensors = _tensors_to_write(ownership, group)
    all_names: list[list[str]] = everyone.gather(list(tensors))
    writers = [rank for rank, names in enumerate(all_names) if names]
    files = {rank: _file_name(place, len(writers)) for place, rank in enumerate(writers)}
    mine = files.get(everyone.rank)
    try:
        with together(everyone, "save the model"):
            if mine is not None:
                folder.mkdir(parents=True, exist_ok=True)
                _write(folder / f".{mine}", tensors)
    except BaseException:
        if mine is not None:
            _remove(folder / f".{mine}")
        raise
    size = sum(everyone.gather(sum(value.nbytes for value in tensors.values())))
    with together(everyone, "save the model"):
        if mine is not None:
            (folder / f".{mine}").replace(folder / mine)
    with together(everyone, "save the model"):
        if everyone.rank == 0:
            index = {name: files[rank] for rank in writers for name in all_names[rank]}
            _finish(folder, index, size)
            _write_configuration(ownership.model, folder)


def _tensors_to_write(ownership: Ownership, group: PipelineGroup) -> dict[str, torch.Tensor]:
    """What this rank writes, by name: of tensors that several ranks own, those of which it is the first owner."""
    saved = ownership.model.state_dict(keep_vars=True).keys()
    assert ownership.owners is not None
    tensors = {}
    for names, value in aliases(ownership):
        name = next((known for known in names if known in saved), None)
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


def _file_name(place: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{place + 1:05}-of-{count:05}.safetensors"


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
