"""Order of the measurements: the most valuable first, so that a run which is stopped has told most."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence

import torch
import transformers

import roundpipe_fx
from benchmarks.gpu import budgets, by_stage, forks, longest, on_host, peers, syncs
from benchmarks.gpu.measurement import Measurement, Row, Sizes

MACHINE = Measurement("machine", lambda *_: _machine(), timed=False)
"""The first measurement: its row is the head of a run."""


def _machine() -> Iterator[Row]:
    _, memory = torch.cuda.mem_get_info()
    yield {
        "part": "machine",
        "card": torch.cuda.get_device_name(),
        "memory GiB": memory / 2**30,
        "cores": os.cpu_count() or 1,
        "platform": platform.platform(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "roundpipe_fx": roundpipe_fx.__version__,
    }


def groups(sizes: Sizes) -> Sequence[Sequence[Measurement]]:
    """Measurements in groups: later ones may read the rows of earlier ones."""
    llama, gpt2 = peers.MODELS
    return (
        peers.peer_measurements(llama),
        peers.our_measurements(llama),
        on_host.without_optimizer(),
        [*budgets.measurements(sizes), *syncs.measurements()],
        [*by_stage.measurements(), *forks.measurements()],
        on_host.with_optimizer(),
        on_host.at_the_peaks_of_roundpipe(),
        peers.peer_measurements(gpt2),
        peers.our_measurements(gpt2),
        longest.measurements(sizes),
    )
