"""Plots of plans. Requires matplotlib (``pip install 'roundpipe_fx[plot]'``)."""

from __future__ import annotations

from pathlib import Path

from roundpipe_fx.report.plan import Plan


def plot_frontier(plan: Plan, path: str | Path) -> Path:
    """Plot the trade-off between peak memory and recomputation, with the plan and its budget.

    Args:
        plan: a plan that was made with a budget.
        path: the file to write; its extension gives the format (``.png``, ``.svg``, ``.pdf``).

    Returns:
        the path.

    Raises:
        ImportError: matplotlib is not installed.
        RuntimeError: the plan was made without a budget.
    """
    untiled = plan.frontier(tiles=False)
    tiled = [point for point in plan.frontier() if point not in set(untiled)]
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_frontier needs matplotlib: pip install 'roundpipe_fx[plot]'") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for points, label in ((untiled, "plans considered"), (tiled, "in tiles")):
        sizes = [size / 2**20 for size, _ in points]
        shares = [100 * seconds / max(plan.forward_seconds, 1e-12) for _, seconds in points]
        if points:
            axes.step(sizes, shares, "o-", where="pre", markersize=4, label=label)
    size, seconds = plan.point()
    axes.plot(
        [size / 2**20], [100 * seconds / max(plan.forward_seconds, 1e-12)], "D", color="tab:red", label="this plan"
    )
    if plan.budget is not None:
        axes.axvline(plan.budget / 2**20, linestyle="--", color="gray", label="budget")
    axes.set(xlabel="peak of a step, MiB", ylabel="recomputation, % of the forward (modelled)", xlim=(0, None))
    axes.set_title(f"{len(plan.stages)} stages")
    axes.grid(alpha=0.3)
    axes.legend()
    target = Path(path)
    figure.savefig(target, dpi=120)
    return target
