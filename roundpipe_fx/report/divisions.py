"""The table of the ways to divide devices among which a plan's was chosen."""

from __future__ import annotations

from roundpipe_fx.budget import bytes_text
from roundpipe_fx.ir.decisions import PlannedDivision, PlannedMesh

__all__ = ["division_lines"]


def division_lines(mesh: PlannedMesh, most: int | None = None) -> list[str]:
    """The table: the chosen division, then by seconds those that fit, then the others by bytes.

    Args:
        mesh: any; without divisions there is no table.
        most: number of divisions that are listed at most; ``None``: all.
    """
    if not mesh.divisions:
        return []
    ordered = sorted(mesh.divisions, key=_key)
    devices = f"{ordered[0].pipeline * ordered[0].replicas} "
    devices += f"groups of {mesh.tensor_parallel} devices" if mesh.tensor_parallel > 1 else "devices"
    planned = sum(division.planned for division in ordered)
    shown = ordered if most is None else ordered[:most]
    lines = [
        f"ways to divide {devices}: {len(ordered)}, of which {planned} planned; {_proof(ordered)}",
        "    replicas x devices          stages  schedule         ms a step  fullest device",
        *map(_row, shown),
    ]
    return lines if len(shown) == len(ordered) else [*lines, f"  … {len(ordered) - len(shown)} more: plan.details()"]


def _key(division: PlannedDivision) -> tuple[bool, bool, float, int, int]:
    seconds = division.seconds if division.seconds is not None else 0.0
    return not division.chosen, not division.fits, seconds, division.bytes, division.pipeline


def _proof(ordered: list[PlannedDivision]) -> str:
    """Whether a division that was not planned may have a shorter step."""
    chosen = ordered[0].seconds or 0.0
    open_ones = [
        division
        for division in ordered
        if not division.planned and division.seconds is not None and division.seconds < chosen
    ]
    if open_ones:
        return f"{len(open_ones)} that were not planned may take less"
    return "the others take longer at the least (≥), or do not fit"


def _row(division: PlannedDivision) -> str:
    least = "" if division.planned else "≥ "
    seconds = f"{least}{division.seconds * 1e3:.3f}" if division.seconds is not None else "does not fit"
    size = f"{least}{bytes_text(division.bytes)}"
    mesh = f"{division.replicas} x {division.pipeline}"
    mark, share = "*" if division.chosen else " ", "sharded" if division.sharded else ""
    return f"  {mark} {mesh:>18}  {share:<7}  {division.stages:>6}  {division.schedule:<12} {seconds:>13}  {size:>14}"
