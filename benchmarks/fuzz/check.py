"""What is held against what.

A program runs eagerly, by ``torch.compile(backend="aot_eager")``, and compiled here in several ways; two or three steps
each: two with the same shapes, since buffers go on and what is learned in the first step shows in the second, and one
with another batch. Of each step outputs, loss, gradients, buffers and the generator's state are one check each:

- Eager runs without checkpoints: those read in the backward what buffers are by then, and update them twice.
- ``aot_eager`` is right where it agrees with eager within rounding: then every bit must be its bit.
- Where it is not, and with microbatches, eager decides, within rounding. Numbers that a step draws are those that eager
  draws; microbatches draw each from a stream of its own (:mod:`roundpipe_fx.runtime.random_streams`).
- Peaks are measured (:mod:`benchmarks.fuzz.meter`) in the second step and later, and held against the budget.
- With tiles, sums are rounded otherwise: then everything is held within rounding.
- Host synchronizations: no more than eager has, and none in the backward.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import roundpipe_fx
from benchmarks.fuzz.case import Case
from benchmarks.fuzz.meter import AllocatorPeak, StoragePeak
from benchmarks.fuzz.operations import KINDS
from benchmarks.fuzz.options import compile_options, describe
from benchmarks.fuzz.program import Program, write_program
from benchmarks.fuzz.references import References, Skip, WithLoss
from benchmarks.fuzz.steps import Left, differences, eager_microbatches, left_by, loss_of, take_step
from roundpipe_fx.passes.stages import InvalidStageError

__all__ = ["Failure", "Result", "check_case"]


@dataclass(frozen=True)
class Failure:
    """A check that failed.

    Attributes:
        kind: which check; for an exception its type.
        way: how it was compiled.
        text: what was found.
        size: how much it is, where that can be said (of a budget the share that is over): a smaller case should fail
            by as much.
    """

    kind: str
    way: Mapping[str, Any]
    text: str
    size: float = 0.0

    def is_like(self, other: Failure) -> bool:
        """Whether this is the same failure as another, in a smaller case."""
        return self.kind == other.kind and self.size >= other.size / 2


@dataclass
class Result:
    """What became of a case.

    Attributes:
        checks: comparisons made, by kind.
        failures: those that failed.
        skipped: why the program, or a way, could not be tried.
        kinds: of operations in the program.
        reference_differs: whether ``aot_eager`` was held wrong.
        differentiates_beside_a_loss: whether outputs are differentiated that stand beside a loss.
    """

    checks: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    reference_differs: bool = False
    differentiates_beside_a_loss: bool = False

    def check(self, kind: str, way: Mapping[str, Any], wrong: str, size: float = 0.0) -> None:
        """Count a comparison; ``wrong``: what it found, empty where all is well; ``size``: how much it is."""
        self.checks[kind] += 1
        if wrong:
            self.failures.append(Failure(kind, way, wrong, size))


def check_case(case: Case, say: Callable[[str], None] = lambda text: None) -> Result:
    """Run a case; ``say`` is told what runs next."""
    result = Result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        say("writing")
        program = write_program(case, KINDS)
        result.kinds = program.kinds
        result.differentiates_beside_a_loss = "a loss beside outputs" in program.notes
        try:
            references = References(program, say)
        except Skip as skip:
            result.skipped.append(str(skip))
            return result
        finally:
            torch._dynamo.reset()
        result.reference_differs = references.aot_is_wrong
        for way in case.ways:
            say(describe(way))
            if any(
                failure.kind.startswith("exception") and failure.way["mode"] == way["mode"]
                for failure in result.failures
            ):
                continue  # mostly the same one
            try:
                _CHECKS[way["mode"]](program, references, way, result)
            except Skip as skip:
                result.skipped.append(str(skip))
            except Exception as error:
                if isinstance(error, InvalidStageError) and "has no operations" in str(error):
                    result.skipped.append(f"refused: {error}")  # what a named module makes may be read by nobody
                    continue
                result.checks["no exception"] += 1
                result.failures.append(Failure(f"exception {type(error).__name__}", way, _text(error)))
            else:
                result.checks["no exception"] += 1
            finally:
                torch._dynamo.reset()
                gc.collect()
    return result


def _text(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    inner = [
        f for f in traceback.extract_tb(error.__traceback__) if "roundpipe_fx" in f.filename or "/passes/" in f.filename
    ]
    where = inner[-1] if inner else last
    return f"{type(error).__name__}: {str(error).strip()[:600]}\n  at {where.filename}:{where.lineno} in {where.name}"


def _held(
    result: Result,
    way: Mapping[str, Any],
    wrong: dict[str, str],
    left: Left,
    state: torch.Tensor | None,
    step: str,
) -> None:
    for kind in ("outputs", "loss", "gradients", "buffers"):
        result.check(kind, way, wrong.get(kind, "") and f"{step}: {wrong[kind]}")
    assert left.state is not None and state is not None
    result.check(
        "generator", way, "" if torch.equal(left.state, state) else f"{step}: the generator's state is another"
    )


def _check_step(program: Program, references: References, way: Mapping[str, Any], result: Result) -> None:
    net = references.make()
    options = compile_options(way, net)
    if "between" in way:
        options["memory_budget"] = _between(references, way)
        torch._dynamo.reset()
    model = roundpipe_fx.compile(net, fullgraph=True, **options)
    for place in [0, 1, 2] if way.get("third") else [0, 1]:
        try:
            _check_batch(model, net, place, references, way, result)
        except roundpipe_fx.InfeasibleBudgetError:
            if place == 2:
                return  # another batch may need more than these bytes
            raise
    if model.plans and model.plan.budget is not None and not way.get("third"):
        allocated = _allocated(model, net, references.inputs(1))
        # The generator's state is read before anything else is there: a peak of so many bytes by itself.
        peak = 0 if allocated <= torch.get_rng_state().nbytes else allocated
        _check_peak(model.plan, peak, way, result, "the allocator, in step 3", same=True)


def _check_batch(
    model: Any, net: nn.Module, place: int, references: References, way: Mapping[str, Any], result: Result
) -> None:
    inputs, (_, seed) = references.inputs(place), references.batches[place]
    storages = StoragePeak() if place else None
    left = take_step(model, net, inputs, seed, count=place == 1, meter=storages)
    rounded = "tiles" in way or _is_tiled(model)
    wrong = references.wrong(left, place, rounded=rounded, dynamic=way.get("dynamic", False))
    _held(result, way, wrong, left, references.state(place), f"step {place + 1}")
    if place == 1:
        _check_host_syncs(references, left, way, result)
    del left
    if storages is not None and model.plans:
        peak = _settled(model, net, storages, lambda meter: take_step(model, net, inputs, seed, meter=meter))
        _check_peak(model.plan, peak, way, result, f"step {place + 1}", same=place < 2)


def _is_tiled(model: Any) -> bool:
    return any(plan.tiles for plan in model.plans)


def _allocated(model: Any, net: nn.Module, inputs: list[torch.Tensor]) -> int:
    """The allocator's peak of a step in which nothing is compiled: where something is, kernels are tried as well."""
    plans = -1
    while plans != len(model.plans):
        plans = len(model.plans)
        net.zero_grad()
        gc.collect()
        torch.manual_seed(0)
        with AllocatorPeak() as allocated:
            loss_of(model(*inputs)).backward()
    return allocated.peak


def _settled(model: Any, net: nn.Module, peak: StoragePeak, step: Callable[[StoragePeak], Any]) -> int:
    """A step's peak; of the same step once more where it had larger sizes than were seen before.

    Sizes that depend on data are taken to be little larger than seen so far. A step that has larger ones runs all the
    same, and the plan is remade before the next one.
    """
    while model._state_of_roundpipe_fx.learned.stale:
        state = copy.deepcopy(net.state_dict())
        peak = StoragePeak()
        step(peak)
        net.load_state_dict(state)
    return peak.peak


def _check_host_syncs(references: References, left: Left, way: Mapping[str, Any], result: Result) -> None:
    allowed = _asked_by(references, 1)
    assert left.asked is not None
    mine = _total(left.asked)
    result.check("host syncs", way, f"{mine} asked, {allowed} allowed: {left.asked}" if mine > allowed else "")
    again = {name: count for name, count in left.asked[1].items() if count}
    result.check("host syncs in the backward", way, f"{again}" if again else "")


def _asked_by(references: References, place: int) -> int:
    """Host synchronizations that a step may have: as many as eager, and what Dynamo's guards read."""
    eager = references.eager[place].asked
    assert eager is not None
    guards = references.aot[place].asked
    reads = sum(asked.get("aten._local_scalar_dense", 0) for asked in guards or ())
    return _total(eager) + max(0, reads - sum(asked.get("aten._local_scalar_dense", 0) for asked in eager))


def _total(asked: tuple[dict[str, int], dict[str, int]]) -> int:
    return sum(sum(own.values()) for own in asked)


def _is_static(plan: Any) -> bool:
    """Whether no size of an incoming gradient is symbolic."""
    tangents = [node.meta["val"] for node in plan.programs[-1].inputs if node.name.startswith("tangents")]
    return all(isinstance(size, int) for value in tangents for size in getattr(value, "shape", ()))


def _check_peak(
    plan: Any, peak: int, way: Mapping[str, Any], result: Result, step: str, same: bool, share: int = 1
) -> None:
    if plan.budget is None or result.differentiates_beside_a_loss:
        return  # beside a loss nothing is taken to be differentiated: a plan does not count it
    if not same and not plan.sizes and (not _is_static(plan) or way.get("dynamic")):
        return  # a share of other sizes
    over = peak - plan.budget * share
    text = f"{step}: {peak} bytes live, the budget is {plan.budget * share} and the plan says {plan.peak_bytes}"
    result.check("budget", way, text if over > 0 else "", over / (plan.budget * share))


def _between(references: References, way: Mapping[str, Any]) -> int:
    least = _minimum(references, way)
    torch._dynamo.reset()
    net = references.make()
    model = roundpipe_fx.compile(
        net, memory_budget=1.0, stages=way.get("stages", "auto") if not isinstance(way.get("stages"), str) else "auto"
    )
    whole = model.trace(*references.inputs(0)).peak_bytes
    return least + int(way["between"] * max(0, whole - least))


def _minimum(references: References, way: Mapping[str, Any], asked: int = 1) -> int:
    net = references.make()
    options = compile_options({**way, "memory_budget": None}, net)
    torch._dynamo.reset()
    try:
        roundpipe_fx.compile(net, memory_budget=asked, **options).trace(*references.inputs(0))
    except roundpipe_fx.InfeasibleBudgetError as error:
        return _learned_minimum(references, way, error.minimum)
    raise Skip("a budget of one byte could be met")


def _learned_minimum(references: References, way: Mapping[str, Any], stated: int) -> int:
    """The least budget of the second step on.

    Of a model that returns a number, that is taken to be the loss; that other outputs are differentiated too, as they
    are here, the first step shows, and then a larger minimum may be stated.
    """
    parts = [part for part in references.eager[0].outputs if part.is_floating_point() or part.is_complex()]
    if len(parts) < 2 or all(part.dim() for part in parts):
        return stated
    while True:
        torch._dynamo.reset()
        net = references.make()
        model = roundpipe_fx.compile(net, **compile_options({**way, "memory_budget": stated}, net))
        try:
            for place in (0, 1, 1):  # what is seen in one step is planned with in the next
                take_step(model, net, references.inputs(place), references.batches[place][1])
        except roundpipe_fx.InfeasibleBudgetError as error:
            if error.minimum <= stated:
                raise
            stated = error.minimum
        else:
            return stated


def _check_minimum(program: Program, references: References, way: Mapping[str, Any], result: Result) -> None:
    stated = _minimum(references, way, way["asked"])
    net = references.make()
    torch._dynamo.reset()
    try:
        model = roundpipe_fx.compile(net, memory_budget=stated)
        left = take_step(model, net, references.inputs(0), references.batches[0][1])
    except roundpipe_fx.InfeasibleBudgetError as error:
        result.check(
            "stated minimum", way, f"asked for {way['asked']}, told {stated}; asked for {stated}, told {error.minimum}"
        )
        return
    result.check("stated minimum", way, "")
    _held(result, way, references.wrong(left, 0, _is_tiled(model)), left, references.state(0), "step 1 at the minimum")
    del left
    peak = StoragePeak()
    left = take_step(model, net, references.inputs(1), references.batches[1][1], meter=peak)
    _held(result, way, references.wrong(left, 1, _is_tiled(model)), left, references.state(1), "step 2 at the minimum")
    top = _settled(
        model,
        net,
        peak,
        lambda meter: take_step(model, net, references.inputs(1), references.batches[1][1], meter=meter),
    )
    _check_peak(model.plan, top, way, result, "step 2 at the minimum", same=True)


def _check_tiling(program: Program, references: References, way: Mapping[str, Any], result: Result) -> None:
    """At a budget that tiles meet: gradients within rounding, peaks, and that the least budget is met."""
    options = {name: value for name, value in way.items() if name != "between"}
    if "between" in way:
        with_tiles = _minimum(references, options)
        without = _minimum(references, {**options, "tiling": "never"})
        worse = f"{with_tiles} with tiles, {without} without" if with_tiles > without else ""
        result.check("least budget with tiles", way, worse)
        options["memory_budget"] = with_tiles + int(way["between"] * max(0, without - with_tiles))
    torch._dynamo.reset()
    net = references.make()
    model = roundpipe_fx.compile(net, fullgraph=True, **compile_options(options, net))
    for place in (0, 1):
        inputs, (_, seed) = references.inputs(place), references.batches[place]
        storages = StoragePeak() if place else None
        left = take_step(model, net, inputs, seed, meter=storages)
        wrong = references.wrong(left, place, rounded=True)
        _held(result, way, wrong, left, references.state(place), f"step {place + 1}")
        del left
        if storages is not None and model.plans:
            peak = _settled(
                model,
                net,
                storages,
                lambda meter: take_step(model, net, inputs, seed, meter=meter),  # noqa: B023
            )
            _check_peak(model.plan, peak, way, result, f"step {place + 1}", same=True)


def _check_shares(program: Program, references: References, way: Mapping[str, Any], result: Result) -> None:
    peaks = []  # of the allocator: a plan counts what kernels take for themselves
    for share in way["shares"]:
        torch._dynamo.reset()
        net = references.make()
        model = roundpipe_fx.compile(net, memory_budget=share)
        take_step(model, net, references.inputs(0), references.batches[0][1])
        peak = StoragePeak()
        left = take_step(model, net, references.inputs(1), references.batches[1][1], meter=peak)
        _held(result, way, references.wrong(left, 1), left, references.state(1), f"step 2 with a share of {share}")
        top = _settled(
            model,
            net,
            peak,
            lambda meter: take_step(model, net, references.inputs(1), references.batches[1][1], meter=meter),  # noqa: B023
        )
        _check_peak(model.plan, top, way, result, f"step 2 with a share of {share}", same=True)
        if not references.loss_is_outside:
            peaks.append(_allocated(model, net, references.inputs(1)))
        else:  # what it takes, and what comes in from it, is less than a plan expects of it
            torch._dynamo.reset()
            net = references.make()
            peaks.append(
                _allocated(roundpipe_fx.compile(WithLoss(net), memory_budget=share), net, references.inputs(1))
            )
    result.check("smaller budget, lower peak", way, "" if peaks == sorted(peaks) else f"{way['shares']}: {peaks}")


def _check_pipeline(program: Program, references: References, way: Mapping[str, Any], result: Result) -> None:
    call = way["call"]
    if "outputs without a batch" in program.notes and way["microbatches"] > 1:
        call = "forward_backward"
    if references.draws_in_vain(call == "forward_backward"):
        raise Skip("microbatches: numbers are drawn that nobody reads")
    mirror = references.make_plain()
    places = [0, 1, 2] if way.get("third") else [0, 1]
    expected = []
    for place in places:
        _, seed = references.batches[place]
        try:
            expected.append(eager_microbatches(mirror, references.inputs(place), seed, way["microbatches"], call))
        except Exception as error:
            raise Skip(f"microbatches: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}") from None
        left = expected[-1]
        tensors = [*left.outputs, left.loss, *left.gradients.values(), *left.buffers.values()]
        if not all(torch.isfinite(t).all() for t in tensors if t is not None and not t.is_complex()):
            raise Skip("microbatches: not finite")
    net = references.make()
    try:
        model = roundpipe_fx.compile(net, **compile_options(way, net))
    except ValueError as error:
        raise Skip(f"refused: {str(error)[:80]}") from None
    for place in places:
        inputs, (_, seed) = references.inputs(place), references.batches[place]
        peak = StoragePeak() if place else None
        left = _pipelined(model, net, inputs, seed, call, peak)
        if call == "forward_backward":
            left.outputs, left.structure = expected[place].outputs, expected[place].structure
        wrong = differences(left, expected[place], references.tolerance)
        if way["microbatches"] == 1 and not references.aot_is_wrong and call == "autograd" and "tiles" not in way:
            wrong = differences(left, references.aot[place], None)
        _held(result, way, wrong, left, expected[place].state, f"step {place + 1}")
        # A share of microbatches of two sizes is a budget for each of them alone, and the latest plan is not for all.
        alike = not any(rows % way["microbatches"] for rows, _ in (references.batches[0], references.batches[place]))
        if peak is not None and alike:
            top = _settled(
                model,
                net,
                peak,
                lambda meter: _pipelined(model, net, inputs, seed, call, meter),  # noqa: B023
            )
            _check_peak(model.plan, top, way, result, f"step {place + 1}", place < 2, max(1, way["devices"]))
        if place == 1:
            _check_pipelined_host_syncs(model, net, references, expected[place], way, call, result)
        del left


def _check_pipelined_host_syncs(
    model: Any, net: nn.Module, references: References, eager: Left, way: Mapping[str, Any], call: str, result: Result
) -> None:
    state = copy.deepcopy(net.state_dict())
    with roundpipe_fx.count_host_syncs() as asked:
        _pipelined(model, net, references.inputs(1), references.batches[1][1], call)
    net.load_state_dict(state)
    assert eager.asked is not None
    total = asked.total - asked.by_operator["aten._local_scalar_dense"]  # guards ask too, for each microbatch
    allowed = _total(eager.asked) - sum(own.get("aten._local_scalar_dense", 0) for own in eager.asked)
    result.check("host syncs", way, f"{asked.by_operator} asked, eager {eager.asked}" if total > allowed else "")


def _pipelined(
    model: Any, net: nn.Module, inputs: list[torch.Tensor], seed: int, call: str, meter: StoragePeak | None = None
) -> Left:
    if call == "autograd":
        return take_step(model, net, inputs, seed, meter=meter)
    net.zero_grad()
    torch.manual_seed(seed)
    with meter or contextlib.nullcontext():
        loss = model.forward_backward(*inputs, loss_fn=loss_of)
    return left_by(net, inputs, None, loss)


_CHECKS: dict[str, Callable[[Program, References, Mapping[str, Any], Result], None]] = {
    "step": _check_step,
    "pipeline": _check_pipeline,
    "shares": _check_shares,
    "minimum": _check_minimum,
    "tiling": _check_tiling,
}
