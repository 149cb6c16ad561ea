"""Random options: the ways in which a program is compiled."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from benchmarks.fuzz.batches import BATCHES
from benchmarks.fuzz.case import FEATURES
from benchmarks.fuzz.doors import DOORS
from benchmarks.fuzz.tiles import tiled_passes

__all__ = ["compile_options", "describe", "draw_ways", "simpler"]

_SHARES = [0.0, 0.0, 0.1, 0.3, 0.6, 1.0]


def draw_ways(seed: int, number: int, count: int = 3, among: Collection[str] = FEATURES) -> tuple[dict[str, Any], ...]:
    """The ways of a case; ``among``: those of :data:`FEATURES` that they may have.

    A way is plain data. ``mode``: ``"step"``: loss and backward by the user; ``"pipeline"``: microbatches;
    ``"shares"``: peaks of several shares beside each other; ``"minimum"``: the least budget that is stated is tried;
    ``"fork"``: a forked child calls the model, after a step where it is ``trained``. ``door``: one of
    :data:`benchmarks.fuzz.doors.DOORS`; ``batch``: one of :data:`benchmarks.fuzz.batches.BATCHES`.
    ``tiles``: into how many everything is divided that can be; ``tiling``: the option, with a budget ``between`` the
    least with and without tiles, or a share.
    """
    rng = random.Random(f"{seed} {number} ways")
    ways: list[dict[str, Any]] = [_step(rng), _pipeline(rng) if rng.random() < 0.75 else _step(rng)]
    ways = ways[:count]
    while len(ways) < count:
        drawn = rng.random()
        if drawn < 0.15:
            ways.append({"mode": "shares", "shares": sorted(rng.sample([0.0, 0.05, 0.2, 0.5, 0.8, 1.0], 3))})
        elif drawn < 0.35:
            ways.append({"mode": "minimum", "asked": rng.choice([1, 17, 1000])})
        else:
            ways.append(_step(rng) if rng.random() < 0.6 else _pipeline(rng))
    for way in ways:
        if way["mode"] in ("step", "pipeline") and rng.random() < 0.25:
            way["tiles"] = rng.choice([2, 2, 3, 5, 64])
            way["by_class"] = rng.random() < 0.5
    if rng.random() < 0.3:
        ways[-1] = _tiled(rng)
    if rng.random() < 0.65:  # another batch takes long: few programs, but then in most ways
        ways = [{name: value for name, value in way.items() if name not in ("third", "dynamic")} for way in ways]
    own = random.Random(f"{seed} {number} doors")  # apart, so that what a run leaves out changes nothing else
    return tuple(_with_features(way, own, among) for way in ways)


def _with_features(way: dict[str, Any], rng: random.Random, among: Collection[str]) -> dict[str, Any]:
    drawn = {
        "doors": (rng.random() < 0.45, rng.choice(DOORS[1:])),
        "batches": (rng.random() < 0.4, rng.choice(BATCHES)),
        "forks": (rng.random() < 0.08, rng.random() < 0.5),
    }
    chosen = {name: value for name, (is_drawn, value) in drawn.items() if is_drawn and name in among}
    if way["mode"] in ("step", "shares", "minimum") and "doors" in chosen:
        way = {**way, "door": chosen["doors"]}
    if way["mode"] == "pipeline" and "batches" in chosen:
        way = {**way, "batch": chosen["batches"]}
        if way["batch"] == "number":
            way["call"] = "autograd"
    if way["mode"] in ("step", "pipeline") and "forks" in chosen:
        left_out = ("between", "third", "dynamic", "batch", "call")
        way = {name: value for name, value in way.items() if name not in left_out}
        way = {**way, "mode": "fork", "trained": chosen["forks"]}
    return way


def _stages(rng: random.Random) -> Any:
    return rng.choice(["auto", 1, 2, 2, 3, 4, f"names {rng.getrandbits(16)}"])


def _step(rng: random.Random) -> dict[str, Any]:
    way: dict[str, Any] = {"mode": "step", "stages": _stages(rng), "third": rng.random() < 0.7}
    kind = rng.random()
    if kind < 0.2:
        way["recompute"] = rng.choice(["none", "full", "full"])
    elif kind < 0.75:
        way["memory_budget"] = rng.choice(_SHARES)
    elif kind < 0.9:
        way["between"] = rng.choice([0.0, 0.05, 0.2, 0.5, 0.9, 1.0])  # of the way from the minimum, in bytes
    if rng.random() < 0.15:
        way["dynamic"] = True
        way["third"] = True
    return way


def _tiled(rng: random.Random) -> dict[str, Any]:
    way: dict[str, Any] = {"mode": "tiling", "stages": _stages(rng)}
    if rng.random() < 0.7:
        way["between"] = rng.choice([0.0, 0.0, 0.2, 0.6, 0.99])
    else:
        way["memory_budget"], way["tiling"] = rng.choice(_SHARES), "auto"
    return way


def _pipeline(rng: random.Random) -> dict[str, Any]:
    devices = rng.choice([0, 1, 1, 2, 2])
    schedule = rng.choice(["gpipe", "1f1b", "interleaved", "zero_bubble", "roundpipe", None])
    way: dict[str, Any] = {
        "mode": "pipeline",
        "devices": devices,
        "microbatches": rng.choice([1, 2, 2, 3, 4]),
        "schedule": schedule,
        "call": rng.choice(["forward_backward", "forward_backward", "autograd"]),
        "third": rng.random() < 0.6,
    }
    if schedule != "roundpipe":
        stages = rng.choice(["auto", 2, 3, 4, f"names {rng.getrandbits(16)}"])
        way["stages"] = max(stages, devices) if isinstance(stages, int) else stages
    kind = rng.random()
    if kind < 0.3:
        way["memory_budget"] = rng.choice(_SHARES)
    elif kind < 0.5:
        way["checkpoint"] = rng.choice(["always", "except_last", "never"])
    elif kind < 0.6:
        way["recompute"] = rng.choice(["none", "full"])
    return way


def compile_options(way: Mapping[str, Any], net: nn.Module) -> dict[str, Any]:
    """What ``roundpipe_fx.compile`` is given."""
    options = {
        name: way[name]
        for name in ("recompute", "memory_budget", "dynamic", "schedule", "checkpoint", "tiling")
        if way.get(name) is not None
    }
    if way.get("tiles"):
        options["passes"] = tiled_passes(way["tiles"], way.get("by_class", False))
    stages = way.get("stages", "auto")
    if isinstance(stages, str) and stages.startswith("names"):
        called = [
            name for name, child in net.named_children() if not isinstance(child, (nn.ModuleList, nn.ParameterList))
        ]
        rng = random.Random(stages)
        stages = (
            sorted(rng.sample(called[1:], min(len(called) - 1, rng.randint(1, 3))), key=called.index)
            if called[1:]
            else 2
        )
        if isinstance(stages, list) and len(stages) + 1 < way.get("devices", 0):
            stages = 2
    if way.get("schedule") != "roundpipe":
        options["stages"] = stages
    if "microbatches" in way:
        options["num_microbatches"] = way["microbatches"]
        if way["devices"]:
            options["devices"] = ["cpu"] * way["devices"]
    return options


def simpler(way: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ways that say less."""
    found = []
    plain: dict[str, Any] = {
        "stages": "auto",
        "third": False,
        "dynamic": None,
        "recompute": None,
        "memory_budget": None,
        "between": None,
        "tiles": None,
        "checkpoint": None,
        "schedule": None,
        "devices": 0,
        "call": "autograd",
        "door": None,
        "batch": None,
        "trained": False,
    }
    for name, value in plain.items():
        if name in way and way[name] != value:
            changed = {**way, name: value}
            if value is None:
                del changed[name]
            found.append(changed)
    if way.get("microbatches", 1) > 1:
        found += [{**way, "microbatches": count} for count in (1, 2) if count < way["microbatches"]]
    if way.get("devices", 0) > 1:
        found.append({**way, "devices": 1})
    if isinstance(way.get("memory_budget"), float) and way["memory_budget"] > 0:
        found.append({**way, "memory_budget": 0.0})
    if isinstance(way.get("stages"), int) and way["stages"] > 2:
        found.append({**way, "stages": 2})
    if len(way.get("shares", ())) > 2:
        shares = way["shares"]
        found += [{**way, "shares": [s for s in shares if s != left]} for left in shares]
    return found


def describe(way: Mapping[str, Any]) -> str:
    """A way as text."""
    return ", ".join(f"{name}={value!r}" for name, value in way.items())
