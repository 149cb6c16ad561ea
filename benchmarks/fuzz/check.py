"""What is held against what.

A program runs eagerly, by ``torch.compile(backend="aot_eager")``, and compiled here in several ways; two or three steps
each: two with the same shapes, since buffers go on and what is learned in the first step shows in the second, and one
with another batch. Of each step outputs, loss, gradients, buffers and the generator's state are one check each:

- Eager runs without checkpoints: those read in the backward what buffers are by then, and update them twice.
- ``aot_eager`` is right where it agrees with eager within rounding: then every bit must be its bit. In float32 an error
  of its own may pass for rounding: so every bit may also be eager's, or that of ``aot_eager`` without checkpoints.
- Where it is not, and with microbatches, eager decides, within rounding. Numbers that a step draws are those that eager
  draws; microbatches draw each from a stream of its own (:mod:`roundpipe_fx.runtime.random_streams`).
- Peaks are measured (:mod:`benchmarks.fuzz.meter`) in the second step and later, and held against the budget.
- With tiles, sums are rounded otherwise: then everything is held within rounding.
- Behind front doors that do not plan again, a warning with figures stands for a budget that is kept.
- Batches that are no tensors (:mod:`benchmarks.fuzz.batches`) give what their tensors give, or are refused by an error
  that names the option to give.
- A forked child (:mod:`benchmarks.fuzz.forks`) computes what its parent computes.
- Host synchronizations: no more than eager has, and none in the backward.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import roundpipe_fx
from benchmarks.fuzz.batches import Structured, parts_of, structured
from benchmarks.fuzz.case import Case
from benchmarks.fuzz.doors import Compiled, compile_by, is_told
from benchmarks.fuzz.forks import in_child
from benchmarks.fuzz.meter import AllocatorPeak, StoragePeak
from benchmarks.fuzz.operations import KINDS
from benchmarks.fuzz.options import compile_options, describe
from benchmarks.fuzz.program import Program, write_program
from benchmarks.fuzz.references import References, Skip, WithLoss
from benchmarks.fuzz.steps import Left, differences, eager_microbatches, left_by, loss_of, run_step, take_step
from roundpipe_fx.passes.stages import InvalidStageError

__all__ = ["Failure", "Result", "check_case"]

_SECONDS_OF_A_CHILD = 20.0


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
        told: warnings of the way that is tried.
    """

    checks: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    reference_differs: bool = False
    told: list[warnings.WarningMessage] = field(default_factory=list)

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
                with warnings.catch_warnings(record=True) as result.told:
                    warnings.simplefilter("always")
                    _CHECKS[way["mode"]](program, references, way, result)
            except Skip as skip:
                result.skipped.append(str(skip))
            except Exception as error:
                unread = ("has no operations", "no module named")  # what a named module makes may be read by nobody
                if isinstance(error, InvalidStageError) and any(text in str(error) for text in unread):
                    result.skipped.append(f"refused: {error}")
                    continue
                result.checks["no exception"] += 1
                result.failures.append(Failure(f"exception {type(error).__name__}", way, _text(error)))
            else:
                result.checks["no exception"] += 1
            finally:
                result.told = []
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
    states: Sequence[torch.Tensor | None],
    step: str,
) -> None:
    for kind in ("outputs", "loss", "gradients", "buffers"):
        result.check(kind, way, wrong.get(kind, "") and f"{step}: {wrong[kind]}")
    assert left.state is not None and None not in states
    known = any(state is not None and torch.equal(left.state, state) for state in states)
    result.check("generator", way, "" if known else f"{step}: the generator's state is another")


def _check_step(program: Program, references: References, way: Mapping[str, Any], result: Result) -> None:
    net = references.make()
    options = compile_options(way, net)
    if "between" in way:
        options["memory_budget"] = _between(references, way)
        torch._dynamo.reset()
    compiled = compile_by(_door(way), net, fullgraph=True, **options)
    for place in [0, 1, 2] if way.get("third") else [0, 1]:
        try:
            _check_batch(compiled, net, place, references, way, result)
        except roundpipe_fx.InfeasibleBudgetError:
            if place == 2 or (place and "between" in way and references.use.startswith("twice")):
                return  # another batch, or both backwards, may need more than these bytes
            raise
    if compiled.plans and compiled.plan.budget is not None and not way.get("third"):
        allocated = _allocated(compiled, net, references)
        # The generator's state is read before anything else is there: a peak of so many bytes by itself.
        peak = 0 if allocated <= torch.get_rng_state().nbytes else allocated
        _check_peak(compiled.plan, peak, references, way, result, "the allocator, in step 3", same=True)


def _door(way: Mapping[str, Any]) -> str:
    return way.get("door", "compile")


def _check_batch(
    compiled: Compiled, net: nn.Module, place: int, references: References, way: Mapping[str, Any], result: Result
) -> None:
    storages = StoragePeak() if place else None
    left = references.step(compiled.run, net, place, storages, count=place == 1)
    rounded = "tiles" in way or compiled.is_tiled
    wrong = references.wrong(left, place, rounded=rounded, dynamic=way.get("dynamic", False))
    _held(result, way, wrong, left, references.states(place), f"step {place + 1}")
    if place == 1:
        _check_host_syncs(references, left, way, result)
    del left
    if storages is not None and compiled.plans:
        peak = _settled(compiled, net, storages, references, place)
        _check_peak(compiled.plan, peak, references, way, result, f"step {place + 1}", same=place < 2)


def _allocated(compiled: Compiled, net: nn.Module, references: References, use: str | None = None) -> int:
    """The allocator's peak of a step in which nothing is compiled: where something is, kernels are tried as well."""
    plans, inputs = -1, references.inputs(1)
    while plans != len(compiled.plans):
        plans = len(compiled.plans)
        net.zero_grad()
        gc.collect()
        torch.manual_seed(0)
        with AllocatorPeak() as allocated:
            run_step(compiled.run, inputs, use or references.use)
    return allocated.peak


def _settled(compiled: Compiled, net: nn.Module, peak: StoragePeak, references: References, place: int) -> int:
    """As :func:`_settled_by`, of a step that the user differentiates: backwards of one call are learned likewise."""
    learning = compiled.replans and references.use.startswith("twice")
    return _settled_by(
        compiled, net, peak, lambda meter: references.step(compiled.run, net, place, meter), learning=learning
    )


def _settled_by(
    compiled: Compiled, net: nn.Module, peak: StoragePeak, step: Callable[[StoragePeak], Any], learning: bool = False
) -> int:
    """A step's peak; of the same step once more where it showed what only the next one is planned for.

    Sizes that depend on data are taken to be little larger than seen so far. A step that has larger ones runs all the
    same, and the plan is remade before the next one.
    """
    while compiled.is_stale or learning:
        learning = False
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
    """Host synchronizations that a step may have: as many as eager, and what Dynamo's guards read; or as many as
    ``aot_eager``, whose backward also computes what eager's autograd sees that nobody needs."""
    eager = references.eager[place].asked
    assert eager is not None
    traced = references.aot[place].asked
    reads = sum(asked.get("aten._local_scalar_dense", 0) for asked in traced or ())
    guards = max(0, reads - sum(asked.get("aten._local_scalar_dense", 0) for asked in eager))
    return max(_total(eager) + guards, 0 if traced is None else _total(traced))


def _total(asked: tuple[dict[str, int], dict[str, int]]) -> int:
    return sum(sum(own.values()) for own in asked)


def _is_static(plan: Any) -> bool:
    """Whether no size of an incoming gradient is symbolic."""
    tangents = [node.meta["val"] for node in plan.programs[-1].inputs if node.name.startswith("tangents")]
    return all(isinstance(size, int) for value in tangents for size in getattr(value, "shape", ()))


def _check_peak(
    plan: Any, peak: int, references: References, way: Mapping[str, Any], result: Result, step: str, same: bool
) -> None:
    if references.eager[0].is_planned_for:
        _check_budget(plan, peak, way, result, step, same)


def _check_budget(
    plan: Any, peak: int, way: Mapping[str, Any], result: Result, step: str, same: bool, devices: int = 1
) -> None:
    if plan is None or plan.budget is None:
        return
    if not same and not plan.sizes and (not _is_static(plan) or way.get("dynamic")):
        return  # a share of other sizes
    budget = plan.budget * devices
    over = peak - budget
    if over > 0 and _door(way) != "compile" and is_told(result.told):
        result.check("budget, or told", way, "")
        return
    text = f"{step}: {peak} bytes live, the budget is {budget} and the plan says {plan.peak_bytes}"
    result.check("budget", way, text if over > 0 else "", over / budget)


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

    Of a model that returns a number, that is taken to be the loss; that other outputs are differentiated too, or that
    there are two backwards, the first step shows, and then a larger minimum may be stated.
    """
    parts = [part for part in references.eager[0].outputs if part.is_floating_point() or part.is_complex()]
    alone = len(parts) < 2 or all(part.dim() for part in parts)
    if _door(way) != "compile" or (alone and not references.use.startswith("twice")):
        return stated
    while True:
        torch._dynamo.reset()
        net = references.make()
        model = roundpipe_fx.compile(net, **compile_options({**way, "memory_budget": stated}, net))
        try:
            for place in (0, 1, 1):  # what is seen in one step is planned with in the next
                references.step(model, net, place)
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
        compiled = compile_by(_door(way), net, memory_budget=stated)
        left = references.step(compiled.run, net, 0)
    except roundpipe_fx.InfeasibleBudgetError as error:
        result.check(
            "stated minimum", way, f"asked for {way['asked']}, told {stated}; asked for {stated}, told {error.minimum}"
        )
        return
    result.check("stated minimum", way, "")
    wrong = references.wrong(left, 0, compiled.is_tiled)
    _held(result, way, wrong, left, references.states(0), "step 1 at the minimum")
    del left
    peak = StoragePeak()
    left = references.step(compiled.run, net, 1, peak)
    wrong = references.wrong(left, 1, compiled.is_tiled)
    _held(result, way, wrong, left, references.states(1), "step 2 at the minimum")
    del left
    top = _settled(compiled, net, peak, references, 1)
    _check_peak(compiled.plan, top, references, way, result, "step 2 at the minimum", same=True)


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
    compiled = compile_by("compile", net, fullgraph=True, **compile_options(options, net))
    for place in (0, 1):
        storages = StoragePeak() if place else None
        left = references.step(compiled.run, net, place, storages)
        wrong = references.wrong(left, place, rounded=True)
        _held(result, way, wrong, left, references.states(place), f"step {place + 1}")
        del left
        if storages is not None and compiled.plans:
            peak = _settled(compiled, net, storages, references, place)
            _check_peak(compiled.plan, peak, references, way, result, f"step {place + 1}", same=True)


def _check_shares(program: Program, references: References, way: Mapping[str, Any], result: Result) -> None:
    peaks = []  # of the allocator: a plan counts what kernels take for themselves
    door = _door(way)
    for share in way["shares"]:
        torch._dynamo.reset()
        net = references.make()
        compiled = compile_by(door, net, memory_budget=share)
        references.step(compiled.run, net, 0)
        peak = StoragePeak()
        left = references.step(compiled.run, net, 1, peak)
        _held(result, way, references.wrong(left, 1), left, references.states(1), f"step 2 with a share of {share}")
        del left
        top = _settled(compiled, net, peak, references, 1)
        _check_peak(compiled.plan, top, references, way, result, f"step 2 with a share of {share}", same=True)
        if not references.loss_is_outside:
            peaks.append(_allocated(compiled, net, references))
        else:  # what it takes, and what comes in from it, is less than a plan expects of it
            torch._dynamo.reset()
            net = references.make()
            peaks.append(_allocated(compile_by(door, WithLoss(net), memory_budget=share), net, references, "all"))
    if references.use.startswith("twice") and not compiled.replans:
        return  # told of, and not planned for: no plan counts what a second backward keeps
    result.check("smaller budget, lower peak", way, "" if peaks == sorted(peaks) else f"{way['shares']}: {peaks}")


def _check_pipeline(program: Program, references: References, way: Mapping[str, Any], result: Result) -> None:
    call = way["call"]
    if "outputs without a batch" in program.notes and way["microbatches"] > 1:
        call = "forward_backward"
    if references.draws_in_vain(call == "forward_backward"):
        raise Skip("microbatches: numbers are drawn that nobody reads")
    kind, count = way.get("batch"), way["microbatches"]
    use = references.use.replace("twice", "all")  # the backward of a pipeline runs once
    mirror = references.make_plain()
    places = [0, 1, 2] if way.get("third") else [0, 1]

    def batch(place: int) -> list[torch.Tensor]:
        inputs = references.inputs(place)
        return [x.detach() for x in inputs] if kind == "samples" else inputs  # rows are no leaves

    expected = []
    for place in places:
        try:
            seed = references.batches[place][1]
            expected.append(eager_microbatches(mirror, batch(place), seed, count, call, use))
        except Exception as error:
            raise Skip(f"microbatches: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}") from None
        left = expected[-1]
        tensors = [*left.outputs, left.loss, *left.gradients.values(), *left.buffers.values()]
        if not all(torch.isfinite(t).all() for t in tensors if t is not None and not t.is_complex()):
            raise Skip("microbatches: not finite")
        if kind == "samples":  # rows are stacked: what a program updates is a copy
            left.buffers |= {f"input {i}": x for i, x in enumerate(batch(place))}
    net = references.make()
    whole = net if kind is None else Structured(net, kind, len(program.case.inputs))
    try:
        compiled = compile_by("compile", whole, **compile_options(way, whole))
    except ValueError as error:
        raise Skip(f"refused: {str(error)[:80]}") from None

    def step(place: int, meter: StoragePeak | None = None) -> Left:
        return _pipelined(compiled.run, net, batch(place), references.batches[place][1], call, meter, use, kind)

    for place in places:
        peak = StoragePeak() if place else None
        try:
            left = step(place, peak)
        except (TypeError, ValueError) as error:
            if kind is None or isinstance(error, roundpipe_fx.InfeasibleBudgetError):
                raise
            names = "split_input" in str(error) or "merge_output" in str(error)
            result.check("refused by the option's name", way, "" if names else _text(error))
            result.skipped.append(f"refused: {kind}")
            return
        if call == "forward_backward":
            left.outputs, left.structure = expected[place].outputs, expected[place].structure
        if kind is not None:
            left.structure = expected[place].structure  # of a list of parts
        if kind == "number" and left.outputs:  # a step that dropped them has none left
            _check_number(left.outputs.pop(), expected[place].outputs[0], way, result)
        wrong = differences(left, expected[place], references.tolerance)
        if count == 1 and not references.aot_is_wrong and call == "autograd" and use == references.use:
            wrong = wrong if "tiles" in way or kind else references.wrong(left, place)
        _held(result, way, wrong, left, [expected[place].state], f"step {place + 1}")
        del left
        # A share of microbatches of two sizes is a budget for each of them alone, and the latest plan is not for all.
        alike = not any(rows % count for rows, _ in (references.batches[0], references.batches[place]))
        if peak is not None and alike and (call == "forward_backward" or expected[place].is_planned_for):
            top = _settled_by(compiled, net, peak, functools.partial(step, place))
            _check_budget(compiled.plan, top, way, result, f"step {place + 1}", place < 2, max(1, way["devices"]))
        if place == 1 and kind != "number":
            _check_pipelined_host_syncs(lambda: step(1), net, expected[place], way, result)


def _check_number(number: torch.Tensor, output: torch.Tensor, way: Mapping[str, Any], result: Result) -> None:
    mean = output.real.double().mean()
    right = torch.allclose(number, mean, rtol=1e-3, atol=1e-6)
    result.check("number among outputs", way, "" if right else f"{number.item()}, expected {mean.item()}")


def _check_pipelined_host_syncs(
    step: Callable[[], Left], net: nn.Module, eager: Left, way: Mapping[str, Any], result: Result
) -> None:
    state = copy.deepcopy(net.state_dict())
    with roundpipe_fx.count_host_syncs() as asked:
        step()
    net.load_state_dict(state)
    assert eager.asked is not None
    total = asked.total - asked.by_operator["aten._local_scalar_dense"]  # guards ask too, for each microbatch
    allowed = _total(eager.asked) - sum(own.get("aten._local_scalar_dense", 0) for own in eager.asked)
    result.check("host syncs", way, f"{asked.by_operator} asked, eager {eager.asked}" if total > allowed else "")


def _pipelined(
    model: Any,
    net: nn.Module,
    inputs: list[torch.Tensor],
    seed: int,
    call: str,
    meter: StoragePeak | None,
    use: str,
    kind: str | None,
) -> Left:
    """A step of a pipeline; ``kind``: of its batches, as in :mod:`benchmarks.fuzz.batches`."""
    if call == "autograd":
        run = model if kind is None else lambda *inputs: parts_of(model(*structured(inputs, kind)), kind)
        return take_step(run, net, inputs, seed, meter=meter, use=use)
    batch = inputs if kind is None else structured(inputs, kind)
    loss_fn = loss_of if kind is None else lambda output: loss_of(parts_of(output, kind))
    net.zero_grad()
    torch.manual_seed(seed)
    with meter or contextlib.nullcontext():
        loss = model.forward_backward(*batch, loss_fn=loss_fn)
    return left_by(net, inputs, None, loss)


def _check_fork(program: Program, references: References, way: Mapping[str, Any], result: Result) -> None:
    """A child that is forked after a step, and after a call without gradients, calls the model likewise."""
    if not hasattr(os, "fork"):
        raise Skip("no fork here")
    net = references.make()
    try:
        compiled = compile_by(_door(way), net, **compile_options(way, net))
    except ValueError as error:
        raise Skip(f"refused: {str(error)[:80]}") from None
    inputs, (_, seed) = references.inputs(0), references.batches[0]
    inputs = [x.detach() for x in inputs]
    with torch.no_grad():
        try:
            count = min(way.get("microbatches", 1), len(inputs[0]))
            for part in zip(*(x.tensor_split(count) for x in inputs), strict=True):
                references.make()(*(x.clone() for x in part))
        except Exception as error:  # whatever the program does without gradients, or with fewer rows
            raise Skip(f"eager without gradients: {type(error).__name__}: {str(error)[:60]}") from None

    def call() -> str:
        state = copy.deepcopy(net.state_dict())
        own = [x.clone() for x in inputs]  # a program may update them
        torch.manual_seed(seed)
        with torch.no_grad():
            output = compiled.run(*own)
        tensors = [part for part in tree_leaves((output, own)) if isinstance(part, torch.Tensor)]
        values = [(str(part.dtype), part.resolve_conj().tolist()) for part in tensors]
        net.load_state_dict(state)
        return "it returned " + hashlib.sha256(repr(values).encode()).hexdigest()

    call()
    if way.get("trained"):
        batch = references.inputs(0)  # a program may have no parameters: its loss depends on the inputs
        if "microbatches" in way:
            compiled.run.forward_backward(*batch, loss_fn=loss_of)  # type: ignore[attr-defined]
        else:
            take_step(compiled.run, net, batch, seed, use=references.use)
        torch.manual_seed(seed)
    mine, theirs = call(), in_child(call, _SECONDS_OF_A_CHILD)
    result.check("forked child", way, "" if mine == theirs else f"{theirs}, but in the parent {mine}")


_CHECKS: dict[str, Callable[[Program, References, Mapping[str, Any], Result], None]] = {
    "step": _check_step,
    "pipeline": _check_pipeline,
    "shares": _check_shares,
    "minimum": _check_minimum,
    "tiling": _check_tiling,
    "fork": _check_fork,
}
