"""Random numbers: generator states, and the operators that save and replay them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

__all__ = ["rng_states", "run_and_save_rng_state", "run_with_rng_state"]


@contextlib.contextmanager
def rng_states(devices: Collection[torch.device]) -> Iterator[Callable[[], None]]:
    """Remember the states of the CPU's and these devices' generators; yields a function that goes back to them."""
    host = torch.get_rng_state()
    others = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore() -> None:
        torch.set_rng_state(host)
        for device, state in others:
            torch.cuda.set_rng_state(state, device)

    yield restore
