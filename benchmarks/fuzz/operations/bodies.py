"""Operations around others: checkpoints, scopes, loops, regions with budgets of their own."""

from __future__ import annotations

import types

from benchmarks.fuzz import program as writing
from benchmarks.fuzz.operations.pool import kind
from benchmarks.fuzz.program import Builder, NoFit, Value


def _body(b: Builder, inputs: list[Value]) -> tuple[str, Value]:
    """Write the element's body as a method of the inputs; returns its name and its last value."""
    name = f"body{b.element.number}"
    arguments = [f"a{b.element.number}_{i}" for i in range(len(inputs))]
    for space in b.program.spaces:
        for argument, value in zip(arguments, inputs, strict=True):
            space[argument] = space[value.name]
    values = [
        Value(argument, (b.element.number, 50 + i), value.tensors)
        for i, (argument, value) in enumerate(zip(arguments, inputs, strict=True))
    ]
    lines: list[str] = []
    count = len(values)
    # Inputs of the whole program are not available here.
    writing._write(b.program, b.element.inside, values, lines, b.kinds)  # type: ignore[attr-defined]
    last = next((v for v in reversed(values[count:]) if v.dtype is b.program.dtype), None)
    if last is None:
        lines = ["r = " + f"{arguments[0]}.tanh()"]
        result = "r"
    else:
        ends = [v for v in values[count:] if not v.used and v is not last and v.dtype is b.program.dtype]
        result = " + ".join([str(last), *(f"{v}.mean()" for v in ends)])
    lines = [line.replace("x0.", f"{arguments[0]}.") for line in lines] + [f"return {result}"]
    if any(f"x{i}" in line.replace("(", " ").replace(",", " ").split() for i in range(9) for line in lines):
        raise NoFit
    head = f"{name}(self, {', '.join(arguments)})"
    text = f"def {head}:\n" + "\n".join(f"    {line}" for line in lines)
    for net, space in zip(b.program.nets, b.program.spaces, strict=True):
        exec(text, space)
        object.__setattr__(net, name, types.MethodType(space[name], net))
    b.program.methods[head] = lines
    return f"self.{name}", values[-1]


def _inputs(b: Builder) -> list[Value]:
    first = b.float(at_least=2, batched=True)
    return [first] if b.rng.random() < 0.6 else [first, b.float(at_least=2, batched=True)]


def _called(b: Builder, before: str, after: str = "", prefix: str = "") -> None:
    inputs = _inputs(b)
    body, _ = _body(b, inputs)
    arguments = ", ".join(map(str, inputs))
    if prefix:
        name = b._new("t")
        b.line(f"{prefix}: {name} = {body}({arguments})")
        b.out(f"{name} * 1.0")
    else:
        b.out(f"{before.format(body=body)}{arguments}{after}")


@kind(1.2, body=True)
def checkpoint(b: Builder) -> None:
    _called(b, "torch_checkpoint({body}, ", ", use_reentrant=False)")


@kind(0.8, body=True)
def own_checkpoint(b: Builder) -> None:
    _called(b, "roundpipe_fx.checkpoint({body}, ", ")")


@kind(0.3, body=True)
def checkpoint_without_state(b: Builder) -> None:
    _called(b, "roundpipe_fx.checkpoint({body}, ", ", preserve_rng_state=False)")


@kind(0.8, body=True)
def scope(b: Builder) -> None:
    _called(b, "", prefix="with roundpipe_fx.gradient_checkpoint_scope()")


@kind(0.8, body=True)
def region_budget(b: Builder) -> None:
    share = b.rng.choice([0.0, 0.3, 0.7])
    _called(b, "", prefix=f"with roundpipe_fx.memory_budget({share})")


@kind(0.8, body=True)
def plain_body(b: Builder) -> None:
    _called(b, "{body}(", ")")


@kind(0.5, body=True)
def residual_body(b: Builder) -> None:
    inputs = _inputs(b)
    body, _ = _body(b, inputs)
    b.out(f"{inputs[0]} + {body}({', '.join(map(str, inputs))}).mean()")


@kind(0.5, body=True)
def loop(b: Builder) -> None:
    """The same modules, several times."""
    x = b.float(at_least=2, batched=True)
    body, _ = _body(b, [x])
    name = b._new("t")
    b.line(f"{name} = {x}")
    b.line(f"for _ in range({b.size(2, 3)}): {name} = ({body}({name}).mean() + {name}).tanh()")
    b.out(name)


@kind(0.4, body=True)
def twice(b: Builder) -> None:
    """A body for one input, and for another."""
    x = b.float(at_least=2, batched=True)
    body, _ = _body(b, [x])
    b.out(f"{body}({x}) + {body}({b.like(x)} * 0.5)")


@kind(0.4, body=True)
def no_grad_body(b: Builder) -> None:
    _called(b, "", prefix="with torch.no_grad()")


@kind(0.3, body=True)
def autocast_body(b: Builder) -> None:
    inputs = _inputs(b)
    body, _ = _body(b, inputs)
    name = b._new("t")
    b.line(f"with torch.autocast('cpu', torch.bfloat16): {name} = {body}({', '.join(map(str, inputs))})")
    b.out(f"{name}.to(x0.dtype)")
