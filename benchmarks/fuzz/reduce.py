"""Making a failing case smaller, and printing it as a program that fails by itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.fuzz.case import Case, Element
from benchmarks.fuzz.check import Failure
from benchmarks.fuzz.operations import KINDS
from benchmarks.fuzz.options import compile_options, describe, simpler
from benchmarks.fuzz.program import write_program
from benchmarks.fuzz.references import module_of

__all__ = ["reduced", "script"]


def reduced(
    case: Case, failure: Failure, fails: Callable[[Case], Failure | None], seconds: float = 120.0
) -> tuple[Case, Failure]:
    """The smallest case that is found to fail in the same way.

    Args:
        case: one that fails.
        failure: how.
        fails: runs a case of one way; returns a failure of the same kind, or ``None``.
        seconds: how long to look.
    """
    until = time.monotonic() + seconds
    best, found = dataclasses.replace(case, ways=(failure.way,)), failure
    progress = True
    while progress and time.monotonic() < until:
        progress = False
        for smaller in _smaller(best):
            if time.monotonic() > until:
                break
            again = fails(smaller)
            if again is not None:
                best, found, progress = smaller, again, True
                break
    return best, found


def _smaller(case: Case) -> Iterator[Case]:
    """Cases that are a little less, the boldest first."""
    elements = case.elements
    size = len(elements) // 2
    while size:
        for start in range(len(elements) - size, -1, -size):
            yield dataclasses.replace(case, elements=elements[:start] + elements[start + size :])
        size //= 2
    for place, element in enumerate(elements):
        for less in _less_inside(element):
            yield dataclasses.replace(case, elements=(*elements[:place], less, *elements[place + 1 :]))
    for way in simpler(case.ways[0]):
        yield dataclasses.replace(case, ways=(way,))
    if len(case.inputs) > 1:
        yield dataclasses.replace(case, inputs=case.inputs[:1])
    if case.returns != "loss":
        yield dataclasses.replace(case, returns="loss")
    if case.use != "all":
        yield dataclasses.replace(case, use="all")
    if case.use.endswith(", dropped"):
        yield dataclasses.replace(case, use=case.use.removesuffix(", dropped"))
    if case.differentiable_inputs:
        yield dataclasses.replace(case, differentiable_inputs=False)
    if case.dtype != "float32":
        yield dataclasses.replace(case, dtype="float32")
    for place, shape in enumerate(case.inputs):
        for less in ((4,), (2, 4), (2, 2, 2)):
            if len(less) == len(shape) and less != shape:
                yield dataclasses.replace(case, inputs=(*case.inputs[:place], less, *case.inputs[place + 1 :]))


def _less_inside(element: Element) -> Iterator[Element]:
    for place, inner in enumerate(element.inside):
        yield dataclasses.replace(element, inside=element.inside[:place] + element.inside[place + 1 :])
        for less in _less_inside(inner):
            yield dataclasses.replace(element, inside=(*element.inside[:place], less, *element.inside[place + 1 :]))


def script(case: Case, failure: Failure) -> str:
    """The case as a program that shows the failure."""
    program = write_program(case, KINDS)
    way = failure.way
    net = module_of(program)()
    options = compile_options(way, net)
    kind, door = way.get("batch"), way.get("door", "compile")
    steps = "\n".join(
        f"    ([torch.randn({rows}, *shape, generator=torch.Generator().manual_seed({seed}), dtype=torch.float64)"
        f".to(torch.{case.dtype}) for shape in {list(case.inputs)!r}], {seed}),"
        for rows, seed in ((case.batch[0], 1), (case.batch[0], 2), *(((case.batch[1], 3),) if way.get("third") else ()))
    )
    lines = [
        f"# {failure.kind}: " + failure.text.replace("\n", "\n# "),
        f"# way: {describe(way)}",
        f"# found by: python -m benchmarks.fuzz --seed {case.seed} --case {case.number}",
        "# ruff: noqa",
        "",
        *(["from benchmarks.fuzz.batches import Structured, parts_of, structured"] if kind else []),
        "from benchmarks.fuzz.doors import compile_by",
        "",
        program.source,
        "",
        _LOSS,
        "",
        f"STEPS = [\n{steps}\n]",
        "",
        "",
        "def train(compiled):",
        f"    torch.manual_seed({case.number})",
        f"    net = Net().to(torch.{case.dtype})",
        f"    whole = {f'Structured(net, {kind!r}, {len(case.inputs)})' if kind else 'net'}",
        "    run = compiled(whole)",
        "    for inputs, seed in STEPS:",
        f"        inputs = [x.clone().requires_grad_({case.differentiable_inputs}) for x in inputs]",
        "        net.zero_grad()",
        "        torch.manual_seed(seed)",
        *_call(way, case.use),
        "        gradients = [p.grad for p in (*net.parameters(), *inputs)]",
        "        yield run, loss.detach(), gradients, [b.clone() for b in net.buffers()]",
        "",
        "",
        _COMPARE,
        "",
        f"options = {options!r}",
        *([_BETWEEN] if "between" in way else []),
        'if __name__ == "__main__":',
        f"    compare(train(lambda net: net), train(lambda net: compile_by({door!r}, net, **options).run))",
        "",
    ]
    return "\n".join(lines)


def _call(way: Any, use: str) -> list[str]:
    kind = way.get("batch")
    if way.get("call") == "forward_backward":
        piece, whole = "net(*piece)", "*inputs, loss_fn=loss_of"
        if kind:
            whole = f"*structured(inputs, {kind!r}), loss_fn=lambda output: loss_of(parts_of(output, {kind!r}))"
        return [
            "        if run is whole:  # one microbatch after the other",
            f"            pieces = zip(*(x.tensor_split({way['microbatches']}) for x in inputs))",
            f"            loss = sum(backward({piece}, len(piece[0]) / len(inputs[0])) for piece in pieces)",
            "        else:",
            f"            loss = run.forward_backward({whole})",
        ]
    output = f"parts_of(run(*structured(inputs, {kind!r})), {kind!r})" if kind else "run(*inputs)"
    if way["mode"] == "fork":
        return [
            "        import os",
            "",
            "        with torch.no_grad():",
            f"            output = {output}",
            "        child = os.fork()",
            "        if not child:",
            "            with torch.no_grad():",
            f"                output = {output}",
            "            os._exit(0)",
            "        os.waitpid(child, 0)  # waits for ever where the child does",
            "        loss = torch.zeros(())",
        ]
    which = use.partition(",")[0]
    parts = "[part for part in leaves(output) if part.requires_grad]"
    losses = {
        "first": [f"        loss = loss_of({parts}[:1])"],
        "last": [f"        loss = loss_of({parts}[-1:])"],
        "twice": [
            f"        parts = {parts}",
            "        loss, other = loss_of(parts[:1]), loss_of(parts[1:] or parts)",
            "        del parts",
        ],
    }.get(which, ["        loss = loss_of(output)"])
    return [
        f"        output = {output}",
        *losses,
        *(["        del output"] if use.endswith("dropped") else []),
        *(["        loss.backward(retain_graph=True)", "        other.backward()"] if which == "twice" else []),
        *(["        loss.backward()"] if which != "twice" else []),
    ]


_BETWEEN = "# a budget in bytes between the stated minimum and what nothing recomputed needs: set memory_budget to it"

_LOSS = '''
def leaves(output):
    from torch.utils._pytree import tree_leaves

    return [part for part in tree_leaves(output) if isinstance(part, torch.Tensor)]


def loss_of(output):
    """A number for whatever is returned."""
    from torch.utils._pytree import tree_leaves

    parts = [(i, p) for i, p in enumerate(tree_leaves(output)) if isinstance(p, torch.Tensor) and p.requires_grad]
    if len(parts) == 1 and not parts[0][1].dim() and not parts[0][1].is_complex():
        return parts[0][1]
    total = 0
    for place, part in parts:
        real = part.abs() if part.is_complex() else part
        total = total + (real.square().mean() if place % 2 == 0 else real.sum() * 0.01)
    return total


def backward(output, weight):
    loss = loss_of(output) * weight
    loss.backward()
    return loss.detach()
'''

_COMPARE = """
def compare(eager, ours):
    for step, (expected, found) in enumerate(zip(eager, ours), 1):
        print("step", step, "loss", expected[1].item(), found[1].item())
        for name, left, right in (("gradient", expected[2], found[2]), ("buffer", expected[3], found[3])):
            for i, (a, b) in enumerate(zip(left, right)):
                if a is None or b is None:
                    if not (a is None and b is None):
                        print(f"  {name} {i}: eager {a}, compiled {b}")
                elif not torch.equal(a, b):
                    worst, top = (a.double() - b.double()).abs().max(), a.double().abs().max()
                    print(f"  {name} {i} differs by {worst:.1e} of {top:.1e}")
        for plan in roundpipe_fx.plans(found[0])[-1:]:
            if plan.budget is not None:
                print("  budget", plan.budget, "planned", plan.peak_bytes)
"""
