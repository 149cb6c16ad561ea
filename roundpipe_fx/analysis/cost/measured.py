"""Measured costs: each distinct operator signature of a graph is timed once on the device.

Times are stored on disk as JSON, by device, torch version and signature, so a graph is measured once per machine. The
folder is ``$ROUNDPIPE_FX_CACHE``, else ``$XDG_CACHE_HOME/roundpipe_fx`` or ``~/.cache/roundpipe_fx``. A file that is
corrupt or belongs to another device is ignored with a warning; files are read as data and never executed.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost.operand_rules import may_run_alone
from roundpipe_fx.analysis.cost.probe import kernel_settings
from roundpipe_fx.analysis.cost.roofline import Roofline
from roundpipe_fx.analysis.cost.signature import signature_of
from roundpipe_fx.analysis.cost.synthetic import has_memory_for, run_alone, synthetic_operands
from roundpipe_fx.analysis.data_files import cache_folder
from roundpipe_fx.ir.collectives import is_collective
from roundpipe_fx.ir.joint_graph import has_side_effect
from roundpipe_fx.torch_private import save_rng_states

log = logging.getLogger(__name__)

_FORMAT = "roundpipe_fx costs 1"
_RUNS = 5
"""Number of runs of which the median is taken."""


@dataclass
class MeasuredCosts:
    """A cost model by measurement. Operations that cannot be run alone have the seconds of the roofline model.

    Attributes:
        roofline: for transfers, and for operations that are not measured.
        device: the device to measure on.
        seconds_by_signature: measured seconds.
    """

    roofline: Roofline
    device: torch.device
    seconds_by_signature: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, roofline: Roofline, device: torch.device) -> MeasuredCosts:
        """Load the costs of a device that are stored on disk."""
        path = _path(device)
        return cls(roofline, device, _read(path, device) if path.exists() else {})

    @property
    def overhead(self) -> float:
        """Seconds of an operation that are independent of its size."""
        return self.roofline.overhead

    @property
    def launch(self) -> float:
        """Seconds in which the host launches an operation while the device works."""
        return self.roofline.launch

    @property
    def rates(self) -> str:
        """The table that the other seconds are from."""
        return f"operations measured one by one; {self.roofline.rates}"

    @property
    def host(self) -> float:
        """Bytes per second between the device and the host."""
        return self.roofline.host

    @property
    def both_ways(self) -> float:
        """The share of ``host`` that each direction has while both are busy."""
        return self.roofline.both_ways

    def seconds(self, flops: int, traffic: int, dtype: torch.dtype = torch.float32) -> float:
        """Modelled seconds, for work that is not a single operation."""
        return self.roofline.seconds(flops, traffic, dtype)

    def transfer_seconds(self, size: int) -> float:
        """Modelled seconds of sending ``size`` bytes to another device."""
        return self.roofline.transfer_seconds(size)

    def node_seconds(self, node: fx.Node, flops: int, traffic: int, dtype: torch.dtype) -> float:
        """Measured seconds of a node's operation."""
        if is_collective(node.target):  # other ranks would have to run it too
            return self.roofline.node_seconds(node, flops, traffic, dtype)
        if has_side_effect(node) or not may_run_alone(node):
            return self.seconds(flops, traffic, dtype)
        signature = f"{signature_of(node)} {kernel_settings()}"
        if signature not in self.seconds_by_signature:
            measured = self._measure(node)
            if measured is None:
                return self.seconds(flops, traffic, dtype)
            self.seconds_by_signature[signature] = measured
        return self.seconds_by_signature[signature]

    def save(self) -> None:
        """Store the measured costs on disk."""
        path = _path(self.device)
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = _read(path, self.device) if path.exists() else {}
        text = json.dumps({**_header(self.device), "seconds": {**saved, **self.seconds_by_signature}}, indent=0)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(text)
        partial.replace(path)  # atomic: another process reads the old file or the new one

    def _measure(self, node: fx.Node) -> float | None:
        if not has_memory_for(node, self.device):
            log.info("%s is not measured: %s has no memory for its operands and results", node.target, self.device)
            return None
        restore = save_rng_states([self.device] if self.device.type == "cuda" else [])
        try:
            with torch.no_grad():
                args, kwargs = synthetic_operands(node, self.device, _fill)
                run_alone(node.target, args, kwargs)
                durations = [_time(lambda: run_alone(node.target, args, kwargs), self.device) for _ in range(_RUNS)]
            return statistics.median(durations)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            # Not every operator accepts made-up inputs.
            log.info("%s cannot be measured alone: %s", node.target, error)
            return None
        finally:
            restore()


def _fill(value: torch.Tensor) -> torch.Tensor:
    return value.normal_() if value.is_floating_point() else value.zero_()


def _time(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.accelerator.device_index(device.index):  # events are recorded on the current device
            start.record()
            run()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} with {torch.get_num_threads()} threads"


def _header(device: torch.device) -> dict[str, str]:
    return {"format": _FORMAT, "device": _device_name(device), "torch": torch.__version__}


def _path(device: torch.device) -> Path:
    name = "".join(letter if letter.isalnum() else "_" for letter in f"{_device_name(device)}_{torch.__version__}")
    return cache_folder() / f"costs_{name}.json"


def _read(path: Path, device: torch.device) -> dict[str, float]:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or {key: content.get(key) for key in _header(device)} != _header(device):
            raise ValueError("it belongs to another device or torch version, or is not a file of costs")
        return {str(key): float(value) for key, value in content["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"roundpipe_fx: the file of measured costs {path} is ignored: {error}", stacklevel=2)
        return {}
