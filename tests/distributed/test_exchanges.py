"""Exchanges of a step: one before it and one after it, once its plan is known to all ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import roundpipe_fx
from roundpipe_fx.distributed.ranks import RanksDifferError, RemoteError
from tests.distributed.models import Block, make
from tests.processes import in_processes

GATHER, REDUCE = "_allgather_base_", "allreduce_"


class Exchanges(TorchDispatchMode):
    """Counts operations of process groups, except messages between two ranks."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether models are compiled under it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, _, name = func.name().partition("::")
        if library == "c10d" and name not in ("send", "recv_"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _counts(model: Any, batch: dict[str, Any]) -> Counter[str]:
    """Of the third step: the second one may be planned with what the first has shown."""
    for _ in range(2):
        model.forward_backward(**batch)
    with Exchanges() as exchanges:
        model.forward_backward(**batch)
    return exchanges.counts


def check_a_pipeline(_rank: int, _folder: str) -> None:
    """Losses and the generator's state are part of the exchange at the end, with a budget too."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model, batch = make("llama")
    for options in ({}, {"memory_budget": 0.5}):
        compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=4, **options)
        assert _counts(compiled, batch) == {GATHER: 1, REDUCE: 1}
    dropping = nn.Sequential(*(Block(16, dropout=0.5) for _ in range(4)))
    x = torch.randn(8, 16)
    compiled = roundpipe_fx.compile(dropping, mesh=mesh, num_microbatches=4)
    assert _counts(compiled, _args(x)) == {GATHER: 1, REDUCE: 1}
    states: list[Any] = [None] * 2
    dist.all_gather_object(states, torch.get_rng_state())
    assert torch.equal(*states)


def _args(x: torch.Tensor) -> dict[str, Any]:
    return {"input": x, "labels": x, "loss_fn": nn.functional.mse_loss}


def check_replicas(rank: int, _folder: str) -> None:
    """Beside the reductions of gradients."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = torch.randn(8, 16)[4 * rank :][:4]
    for dropout in (0.0, 0.5):
        model = nn.Sequential(*(Block(16, dropout) for _ in range(2)))
        compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=1, stages=1, memory_budget=1.0)
        assert _counts(compiled, _args(x)) == {GATHER: 1, REDUCE: 1 + 1}


def check_what_is_unknown_to_one(rank: int, _folder: str) -> None:
    """A rank that would have to trace leaves the others unchanged, and the error is that of a first step."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = nn.Sequential(*(Block(16, 0.5) for _ in range(4)))
    compiled = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=2)
    batch = _args(torch.randn(8, 16))
    _counts(compiled, batch)
    compiled.train(rank == 0)
    with pytest.raises(RanksDifferError, match=r"differ in graph\. Rank 0 has"):
        compiled.forward_backward(**batch)
    compiled.train()
    assert _counts(compiled, batch) == {GATHER: 1, REDUCE: 1}
    wrong = _args(torch.randn(8 + 2 * rank, 16))
    with pytest.raises(RanksDifferError, match=r"differ in batch\. Rank 0 has"):
        compiled.forward_backward(**wrong)
    compiled.eval()  # on all: traced together, and then known
    assert _counts(compiled, batch) == {GATHER: 1, REDUCE: 1}
    if rank:
        compiled.register_forward_pre_hook(_refuse)
    with pytest.raises((RemoteError, ValueError), match="this rank is broken"):
        compiled.forward_backward(**batch)


def _refuse(*_: Any) -> None:
    raise ValueError("this rank is broken")


@pytest.mark.long
def test_exchanges(tmp_path: Path) -> None:
    in_processes(2, [check_a_pipeline, check_replicas, check_what_is_unknown_to_one], tmp_path)
