"""Data files: what one process has found out, on disk for the next ones.

A file is two lines of JSON: a header with a digest of the second line, and the data. It is read as data and never
executed; one that is not what its reader expects is ignored. The folder is ``$ROUNDPIPE_FX_CACHE``, else
``$XDG_CACHE_HOME/roundpipe_fx`` or ``~/.cache/roundpipe_fx``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def cache_folder() -> Path:
    """The folder for files of this package."""
    named = os.environ.get("ROUNDPIPE_FX_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roundpipe_fx"


def is_on() -> bool:
    """Return whether plans and trials are kept on disk: unless ``ROUNDPIPE_FX_PLAN_CACHE`` is ``0``."""
    return os.environ.get("ROUNDPIPE_FX_PLAN_CACHE", "1") != "0"


@functools.cache
def versions() -> Mapping[str, str]:
    """Versions of PyTorch and of this package's sources; a file that others wrote is not read."""
    sources = hashlib.sha256()
    for package in ("roundpipe_fx", "roundpipe_fx.passes"):
        folder = Path(str(importlib.import_module(package).__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            sources.update(f"{path.relative_to(folder)}\n".encode())
            sources.update(path.read_bytes())
    return {"torch": torch.__version__, "roundpipe_fx": sources.hexdigest()}


def read_data(path: Path, header: Mapping[str, str]) -> Any:
    """Read the data of a file.

    Args:
        header: as it was written with.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file, has another header, or has been changed; the message says which.
    """
    first, _, body = path.read_bytes().partition(b"\n")
    try:
        header_read = json.loads(first)
        if not isinstance(header_read, dict):
            raise ValueError("it is not a file of roundpipe_fx")
        for name, value in header.items():
            if header_read.get(name) != value:
                raise ValueError(f"it was written for {name} {header_read.get(name)!r}, not {value!r}")
        if header_read.get("digest") != _digest(body):
            raise ValueError("its digest is not that of its data")
        return json.loads(body)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_data(path: Path, header: Mapping[str, str], data: Any) -> None:
    """Write a file. Other processes read the old one or the new one, whole.

    Args:
        path: the file; its folder is made.
        header: what :func:`read_data` is to be given.
        data: as ``json`` takes it, with names of strings only.

    Raises:
        OSError: it cannot be written.
    """
    body = json.dumps(data).encode()
    first = json.dumps({**header, "digest": _digest(body)}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=path.name, suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(first + b"\n" + body)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def drop_oldest(folder: Path, limit: int) -> None:
    """Delete the files of a folder that were written first, down to a number of them."""
    files = list(folder.glob("*.json"))
    if len(files) <= limit:
        return
    files.sort(key=lambda path: path.stat().st_mtime)
    for path in files[: len(files) - limit]:
        path.unlink(missing_ok=True)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
