"""The trade-off of peak memory and recomputation beside its peers: table, plot and results file.

python -m benchmarks.frontier [model …] [--pairs N]

For each model eleven budgets from 0.0 to 1.0: measured peak, prediction, modelled seconds of recomputation, and
whether loss and gradients are bitwise equal to ``aot_eager``. Peers in the same run: eager, ``torch.utils.checkpoint``
per block, ``torch.compile`` with ``activation_memory_budget`` at eleven values (its partitioner with eager kernels,
so that live bytes can be seen), and rotor's optimum on the chain of segments (simulated). At the peak that each peer
reaches, our recomputation is held against the peer's, in modelled seconds and in paired step times, and the latter
against what no plan of the same operations can beat: the seconds that pass inside them, each run once. The lowest peak
is held against the lowest of any peer, and both against a computed lower bound of all schedules of the same operations.

Modelled seconds of a step are those of every operation that it dispatches, by the CPU's roofline; a peer's
recomputation is what it runs beyond its own step without any.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.compile_fx import select_decomp_table

import roundpipe_fx
from benchmarks.lower_bound import lower_bound
from benchmarks.operator_seconds import modelled_seconds, seconds_in_operators
from benchmarks.rotor import rotor_candidates
from benchmarks.side_by_side import (
    RESULTS,
    Case,
    build,
    checkpoint_blocks,
    console,
    fresh,
    heavy_cases,
    paired,
    report,
    seconds_of,
)
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import refine, search
from roundpipe_fx.torch_private import dynamo_flags

BUDGETS = tuple(round(0.1 * index, 1) for index in range(11))
TIMED_SECONDS = 20.0
"""So long, about, the steps of a peer are timed, and at least so many pairs as were asked for."""


@dataclass(frozen=True)
class Measured:
    """One way to run a model's training step."""

    peak: int
    seconds: float
    step: Callable[[], Any]
    error: float


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def measure(
    run: Callable[..., Any], model: nn.Module, batch: dict[str, Any], reference: Any, plans_twice: bool = False
) -> Measured:
    """Peak, modelled seconds, and the worst gradient error relative to the largest gradient."""

    def step() -> torch.Tensor:
        model.zero_grad()
        torch.manual_seed(0)
        out = run(**batch)  # held through the backward, as training loops hold it
        out.loss.backward()
        return out.loss.detach()

    step()
    if plans_twice:
        step()
    model.zero_grad()
    with roundpipe_fx.measure_peak("cpu") as peak:
        loss, seconds = modelled_seconds(step)
    error = 0.0
    if reference is not None:
        expected_loss, expected = reference
        found = gradients(model)
        assert found.keys() == expected.keys()
        largest = max(float(value.abs().max()) for value in expected.values())
        error = max(float((found[name] - value).abs().max()) for name, value in expected.items()) / largest
        error = max(error, float((loss - expected_loss).abs()))
    model.zero_grad()
    return Measured(peak.bytes, seconds, step, error)


def find_peak(measured: Measured) -> int:
    """The peak of one more step."""
    with roundpipe_fx.measure_peak("cpu") as peak:
        measured.step()
    return peak.bytes


def reference_of(case: Case, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of ``aot_eager``."""
    model = build(case)
    with dynamo_flags():
        compiled = torch.compile(model, backend="aot_eager")
        torch.manual_seed(0)
        loss = compiled(**batch).loss
        loss.backward()
    return loss.detach(), gradients(model)


def ours_at(case: Case, batch: dict[str, Any], budget: int | float, reference: Any = None) -> tuple[Measured, Any]:
    torch._dynamo.reset()
    model = build(case)
    compiled = roundpipe_fx.compile(model, memory_budget=budget, fullgraph=True)
    # Where sizes depend on data the first step shows them and the second is planned with them.
    return measure(compiled, model, batch, reference, "experts" in case.name), compiled


def peers(case: Case, batch: dict[str, Any], reference: Any) -> dict[str, tuple[Measured, float]]:
    """Each peer's measurement and its modelled seconds of recomputation."""
    torch._dynamo.reset()
    model = build(case)
    eager = measure(model, model, batch, None)
    found = {"eager": (eager, 0.0)}
    model = checkpoint_blocks(build(case), case.blocks)
    checkpointed = measure(model, model, batch, None)
    found["checkpoint per block"] = (checkpointed, checkpointed.seconds - eager.seconds)
    plain = budgeted(case, batch, default_partition, 1.0, reference)
    for budget in reversed(BUDGETS):
        partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
        try:
            measured = budgeted(case, batch, partition, budget, reference)
        except RuntimeError as error:
            # Dropout that is redrawn in the backward routes tokens differently, and shapes no longer match.
            console.print(f"{case.name}: activation_memory_budget {budget} fails: {str(error).splitlines()[0]}")
            continue
        found[f"activation_memory_budget {budget}"] = (measured, measured.seconds - plain.seconds)
    return found


def budgeted(case: Case, batch: dict[str, Any], partition: Any, budget: float, reference: Any) -> Measured:
    """``torch.compile`` with Inductor's decompositions and a given partitioner, but eager kernels."""
    torch._dynamo.reset()
    model = build(case)
    backend = aot_autograd(
        fw_compiler=lambda module, _: make_boxed_func(module.forward),
        bw_compiler=lambda module, _: make_boxed_func(module.forward),
        partition_fn=partition,
        decompositions=select_decomp_table,
    )
    compiled = torch.compile(model, backend=backend)

    def run(**inputs: Any) -> Any:
        # Around every call, since it recompiles once Dynamo's caches are emptied.
        with torch._functorch.config.patch(activation_memory_budget=budget), dynamo_flags():
            return compiled(**inputs)

    return measure(run, model, batch, reference)


def cheapest_within(plan: roundpipe_fx.Plan) -> Callable[[int], float | None]:
    """Modelled seconds that the cheapest plan within a peak recomputes, ``None`` if there is none; searched once."""
    assert plan.operations is not None
    blocks = Blocks(plan.operations)
    found = search(blocks)
    whole = plan.frontier()[0]  # equal values are shared in it, which operations do not show

    def within(peak: int) -> float | None:
        points = [whole, *((item.peak.bytes, item.seconds) for item in refine(blocks, found, peak))]
        return min((seconds for needed, seconds in points if needed <= peak), default=None)

    return within


def beside(
    case: Case, cheapest: Callable[[int], float | None], name: str, peak: int, seconds: float, error: Any
) -> dict[str, Any]:
    """Our recomputation within the peak that a peer reaches."""
    ours = cheapest(peak)
    return {
        "model": case.name,
        "peer": name,
        "peak MB": peak / 1e6,
        "recompute ms": seconds * 1e3,
        "gradient error": error,
        "ours ms": "cannot" if ours is None else ours * 1e3,
        "ratio": None if ours is None else _ratio(ours, seconds),
        "step ratio": None,
        "step ratio, nothing recomputed": None,
        "least step ratio": None,
    }


def timed(case: Case, batch: dict[str, Any], whole: Measured, peer: Measured, pairs: int) -> dict[str, float]:
    """Our step's time over the peer's: within the peer's peak, with nothing recomputed, and the least it could be.

    The least is what passes inside PyTorch's operators while each runs once: no plan of them can take less, even if
    everything between them took no time.
    """
    clocks = {
        "peer": functools.partial(seconds_of, peer.step),
        "step ratio, nothing recomputed": functools.partial(seconds_of, whole.step),
        "least step ratio": functools.partial(seconds_in_operators, whole.step),
    }
    with contextlib.suppress(roundpipe_fx.InfeasibleBudgetError):  # the table says "cannot"
        clocks["step ratio"] = functools.partial(seconds_of, ours_at(case, batch, peer.peak)[0].step)
    paired(clocks, 0, warm_up=2)  # Dynamo's caches were emptied: everything compiles once more
    assert find_peak(peer) == peer.peak and find_peak(whole) == whole.peak
    pairs = max(pairs, round(TIMED_SECONDS / len(clocks) / seconds_of(peer.step)))
    rounds = paired(clocks, pairs, warm_up=1)
    return {name: statistics.median(took[name] / took["peer"] for took in rounds) for name in clocks if name != "peer"}


def lowest_peaks(plan: roundpipe_fx.Plan, model: str, measured: int, peers: dict[str, int]) -> dict[str, Any]:
    """The lowest peak beside the lowest of any peer, and below it what no schedule of the same operations can beat.

    The bound is held against the predicted peak: both count bytes as plans do, which is never less than is measured.
    """
    assert plan.operations is not None
    bound = lower_bound(plan.operations)
    lowest_peer = min(peers, key=lambda name: peers[name])
    return {
        "model": model,
        "ours MB": measured / 1e6,
        "lowest peer": lowest_peer,
        "its MB": peers[lowest_peer] / 1e6,
        "ours / its": measured / peers[lowest_peer],
        "lower bound MB": bound.bytes / 1e6,
        "bound / its": bound.bytes / peers[lowest_peer],
        "predicted / bound": plan.peak_bytes / bound.bytes,
        "bound by": bound.operation.node.name if bound.operation is not None else "the forward",
    }


def _ratio(ours: float, theirs: float) -> float | None:
    """``None`` where the peer recomputes nothing; then we must not either, which the milliseconds show."""
    return ours / theirs if theirs > 1e-6 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("models", nargs="*", help="names of models; none: all")
    parser.add_argument("--pairs", type=int, default=9, help="paired steps a comparison; 0: no timing")
    arguments = parser.parse_args()
    chosen = [case for case in heavy_cases() if not arguments.models or case.name in arguments.models]
    rows: list[dict[str, Any]] = []
    peer_rows: list[dict[str, Any]] = []
    lowest_rows: list[dict[str, Any]] = []
    for case in fresh(chosen):
        batch = case.make_batch()
        reference = reference_of(case, batch)
        lowest: Any = None
        whole: Any = None
        for budget in BUDGETS:
            measured, compiled = ours_at(case, batch, budget, reference)
            plan = compiled.plan
            rows.append(
                {
                    "model": case.name,
                    "budget": budget,
                    "limit MB": plan.budget / 1e6,
                    "predicted MB": plan.peak_bytes / 1e6,
                    "measured MB": measured.peak / 1e6,
                    "measured / predicted": measured.peak / plan.peak_bytes,
                    "recompute ms": plan.recompute_seconds * 1e3,
                    "bits of aot_eager": measured.error == 0,
                }
            )
            lowest = plan if budget == 0.0 else lowest
            whole = measured  # of the last budget, at which nothing is recomputed
        cheapest = cheapest_within(lowest)
        rotor = rotor_candidates(lowest.operations)
        for candidate in rotor:
            peer_rows.append(beside(case, cheapest, "rotor", candidate.peak.bytes, candidate.seconds, None))
        found = peers(case, batch, reference)
        budgeted_names = [name for name in found if name.startswith("activation")]
        lowest_peer = min(budgeted_names, key=lambda name: found[name][0].peak, default=None)
        for name, (peer, seconds) in found.items():
            row = beside(case, cheapest, name, peer.peak, seconds, peer.error)
            if arguments.pairs and name in ("eager", "checkpoint per block", lowest_peer):
                row |= timed(case, batch, whole, peer, arguments.pairs)
            peer_rows.append(row)
        peaks = {name: peer.peak for name, (peer, _) in found.items()} | {"rotor": rotor[-1].peak.bytes}
        our_lowest = round(next(r["measured MB"] for r in rows if r["model"] == case.name) * 1e6)
        lowest_rows.append(lowest_peaks(lowest, case.name, our_lowest, peaks))
        report("frontier", "a budget is a bound, predicted, at unchanged bits", rows)
        report("frontier_peers", "at the peak of each peer: our recomputation over the peer's", peer_rows)
        report("frontier_lowest", "the lowest peak, the lowest of any peer, and what no schedule can beat", lowest_rows)
    report("frontier_summary", "targets", summary(rows, peer_rows, lowest_rows))
    plot(rows, peer_rows)


def summary(
    rows: list[dict[str, Any]], peer_rows: list[dict[str, Any]], lowest_rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Each target, what was reached, and by which model it is missed."""
    models = list(dict.fromkeys(row["model"] for row in rows))

    def of(model: str, table: list[dict[str, Any]] = rows) -> list[dict[str, Any]]:
        return [row for row in table if row["model"] == model]

    over = [row["model"] for row in rows if row["measured MB"] > row["limit MB"]]
    near = [abs(row["measured / predicted"] - 1) <= 0.03 for row in rows]
    rising = [
        model
        for model in models
        for low, high in itertools.pairwise(of(model))
        if low["measured MB"] > high["measured MB"] or low["recompute ms"] < high["recompute ms"]
    ]
    ratios = [row["ratio"] for row in peer_rows if row["ratio"] is not None]
    worst = max((row for row in peer_rows if row["ratio"] is not None), key=lambda row: row["ratio"])
    timed_rows = [row for row in peer_rows if row["step ratio"] is not None]

    def steps(column: str) -> str:
        """Median and worst of all peers, and of each kind of peer."""
        kinds: dict[str, list[float]] = {}
        for row in timed_rows:
            kinds.setdefault(row["peer"].rstrip("0123456789. "), []).append(row[column])
        every = {"all": [ratio for ratios in kinds.values() for ratio in ratios], **kinds}
        return "; ".join(
            f"{kind}: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}" for kind, ratios in every.items()
        )

    def median_of(column: str) -> str:
        values = {row["model"]: row[column] for row in lowest_rows}
        each = ", ".join(f"{model} {value:.2f}" for model, value in values.items())
        return f"median {statistics.median(values.values()):.2f}: {each}"

    free = [row for row in peer_rows if row["recompute ms"] <= 1e-3 and row["ours ms"] not in (0.0,)]
    return [
        {"target": "measured peak within the budget", "found": f"{len(rows) - len(over)} of {len(rows)} {over}"},
        {"target": "within 3 % of the prediction in 95 %", "found": f"{sum(near)} of {len(near)}"},
        {"target": "peak never rises, recomputation never falls, with less budget", "found": f"broken by {rising}"},
        {"target": "bits of aot_eager", "found": f"{sum(row['bits of aot_eager'] for row in rows)} of {len(rows)}"},
        {
            "target": "lowest peak / lowest of any peer: median <= 0.7, none above 1",
            "found": median_of("ours / its"),
        },
        {"target": "what no schedule can beat / lowest of any peer", "found": median_of("bound / its")},
        {
            "target": "lowest predicted peak / what no schedule can beat",
            "found": median_of("predicted / bound"),
        },
        {
            "target": "recomputation at a peer's peak: median <= 0.8, none above 1.02",
            "found": f"median {statistics.median(ratios):.2f} of {len(ratios)}, worst {worst['ratio']:.2f} "
            f"({worst['model']} beside {worst['peer']} at {worst['peak MB']:.1f} MB)",
        },
        {"target": "where a peer recomputes nothing, nor do we", "found": f"{len(free)} rows where we do"},
        *(
            {"target": target, "found": steps(column) if timed_rows else "not timed"}
            for target, column in (
                ("step time at a peer's peak: median <= 0.8, none above 1.02", "step ratio"),
                ("the same with nothing recomputed, which bounds it", "step ratio, nothing recomputed"),
                ("what no plan can beat: seconds inside operators, each run once", "least step ratio"),
            )
        ),
    ]


def plot(rows: list[dict[str, Any]], peer_rows: list[dict[str, Any]]) -> None:
    """One picture of all models: peak bytes against modelled recomputation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, grid = pyplot.subplots(2, -(-len(models) // 2), figsize=(18, 8), squeeze=False)
    for axes, model in zip(grid.flat, models, strict=False):
        ours = [row for row in rows if row["model"] == model]
        axes.plot([r["measured MB"] for r in ours], [r["recompute ms"] for r in ours], "o-", label="roundpipe_fx")
        for name, marker in (("rotor", "s--"), ("checkpoint", "^"), ("activation_memory_budget", "x"), ("eager", "d")):
            points = [row for row in peer_rows if row["model"] == model and row["peer"].startswith(name)]
            axes.plot([r["peak MB"] for r in points], [r["recompute ms"] for r in points], marker, label=name)
        axes.set(title=model, xlabel="measured peak, MB", ylabel="modelled recomputation, ms", xlim=(0, None))
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS / "frontier.png", dpi=80)


if __name__ == "__main__":
    main()
