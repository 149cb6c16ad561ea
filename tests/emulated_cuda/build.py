"""Compile the emulator for the torch that is installed: ``python -m tests.emulated_cuda.build`` prints its path."""

from __future__ import annotations

import hashlib
import subprocess
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

_SOURCE = Path(__file__).with_name("device.cpp")
_BUILT = Path(__file__).parents[2] / ".emulated_cuda"


def built() -> Path:
    """The shared library, made if it has not been made of this source for this torch.

    Raises:
        subprocess.CalledProcessError: g++ could not compile it.
    """
    made_of = f"{torch.__version__} {sysconfig.get_python_version()}\n{_SOURCE.read_text()}"
    path = _BUILT / f"device_{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        _BUILT.mkdir(exist_ok=True)
        command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", str(_SOURCE), "-o", str(path)]
        command += [f"-I{sysconfig.get_paths()['include']}", *(f"-isystem{place}" for place in include_paths())]
        for place in library_paths():
            command += [f"-L{place}", f"-Wl,-rpath,{place}"]
        subprocess.run([*command, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"], check=True)
    return path


if __name__ == "__main__":
    print(built())
