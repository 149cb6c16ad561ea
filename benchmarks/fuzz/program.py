"""From a case to a program: Python source of a module, written while it is tried out.

Elements are written one after the other, each run at once on two batches of different sizes, so a later one knows what
there is to read: shapes, types, where the batch is. One that cannot run is left out. Which values an element reads
depends on its own seed and on who else is there, never on how many: so when an element is dropped, the others read
what they read before, but for what it made.
"""

from __future__ import annotations

import hashlib
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from benchmarks.fuzz.case import Case, Element

__all__ = ["Builder", "NoFit", "Program", "Value", "write_program"]

_LARGEST = 8192
"""Elements of a tensor."""


class NoFit(Exception):
    """There is nothing that an operation could read."""


@dataclass
class Value:
    """A tensor of the program.

    Attributes:
        name: in the source.
        number: the element that made it, and which of its results it is.
        tensors: what it is for either batch.
        used: whether something reads it.
    """

    name: str
    number: tuple[int, int]
    tensors: tuple[torch.Tensor, torch.Tensor]
    used: bool = False

    @property
    def shape(self) -> torch.Size:
        """For the first batch."""
        return self.tensors[0].shape

    @property
    def dim(self) -> int:
        """How many dimensions."""
        return self.tensors[0].dim()

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""
        return self.tensors[0].dtype

    @property
    def varies(self) -> tuple[int, ...]:
        """Dimensions whose size is another in another batch."""
        first, second = self.tensors
        return tuple(i for i in range(first.dim()) if first.shape[i] != second.shape[i])

    @property
    def batched(self) -> bool:
        """Whether the batch is its first dimension and no other."""
        return self.varies == (0,)

    def __str__(self) -> str:
        return self.name


@dataclass
class Program:
    """What was written so far.

    Attributes:
        case: what it is written from.
        prelude: definitions before the module, by name.
        init: lines of ``__init__``.
        methods: of each body its lines.
        lines: of ``forward``.
        values: what ``forward`` made.
        kinds: the kinds that were written.
        result: what ``forward`` returns.
        needs_eager: whether ``torch.compile`` is known not to trace it whole.
        notes: facts that checks heed.
    """

    case: Case
    prelude: dict[str, str] = field(default_factory=dict)
    init: list[str] = field(default_factory=list)
    methods: dict[str, list[str]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    result: str = ""
    notes: set[str] = field(default_factory=set)
    nets: tuple[nn.Module, nn.Module] = field(default_factory=lambda: (nn.Module(), nn.Module()))
    spaces: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and inputs."""
        return getattr(torch, self.case.dtype)

    @property
    def source(self) -> str:
        """The module as Python."""
        inputs = ", ".join(f"x{i}" for i in range(len(self.case.inputs)))
        parts = [*self.prelude.values()] if self.prelude else []
        init = "\n".join(f"        {line}" for line in ("super().__init__()", *self.init))
        body = "\n".join(f"        {line}" for line in (*self.lines, f"return {self.result}"))
        methods = "".join(
            f"\n    def {head}:\n" + "\n".join(f"        {line}" for line in lines) + "\n"
            for head, lines in self.methods.items()
        )
        module = (
            f"class Net(nn.Module):\n    def __init__(self):\n{init}\n{methods}\n"
            f"    def forward(self, {inputs}):\n{body}\n"
        )
        return "\n\n".join([HEADER, *parts, module])

    def inputs(self, rows: int, seed: int) -> list[torch.Tensor]:
        """Inputs of a batch."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for shape in self.case.inputs:
            # Twice the numbers: of float32 the first half of the digits, so that another type draws the same.
            x = torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(self.dtype)
            made.append(x.requires_grad_(self.case.differentiable_inputs))
        return made

    def do_init(self, line: str) -> None:
        """Write a line of ``__init__`` and run it."""
        for net, space in zip(self.nets, self.spaces, strict=True):
            exec(line, space, {"self": net})
            net.to(self.dtype)
        self.init.append(line)


HEADER = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import roundpipe_fx"""


class Builder:
    """What an operation writes itself with.

    Attributes:
        program: what it is written into.
        element: what it is written from.
        rng: what it draws from.
        values: what it may read.
        lines: where its lines go.
    """

    def __init__(self, program: Program, element: Element, values: list[Value], lines: list[str], prefix: str) -> None:
        self.program = program
        self.element = element
        self.rng = random.Random(element.seed)
        self.values = values
        self.lines = lines
        self.prefix = prefix
        self.made: list[Value] = []
        self._picks = 0
        self._names = 0

    def pick(self, fits: Callable[[Value], bool]) -> Value:
        """One of the values that fit: which is a matter of this element's seed and the values' numbers alone."""
        self._picks += 1
        best, least = None, math.inf
        for value in self.values:
            if not fits(value):
                continue
            text = f"{self.element.seed} {self._picks} {value.number}"
            share = (int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little") + 1) / (2**48 + 1)
            age = max(0, self.element.number - value.number[0])
            score = -math.log(share) * (1 + 0.3 * age)  # the smallest of exponential draws: the young are likelier
            if score < least:
                best, least = value, score
        if best is None:
            raise NoFit
        best.used = True
        return best

    def float(
        self,
        dim: int | None = None,
        at_least: int = 0,
        batched: bool = False,
        fits: Callable[[Value], bool] | None = None,
    ) -> Value:
        """A value of the program's own type, of so many dimensions."""
        return self.pick(
            lambda v: (
                v.dtype is self.program.dtype
                and (dim is None or v.dim == dim)
                and v.dim >= at_least
                and v.tensors[0].numel() > 0
                and (v.batched or not batched)
                and (fits is None or fits(v))
            )
        )

    def like(self, other: Value) -> Value:
        """A value that has another's shape, which may be that one."""
        return self.float(fits=lambda v: all(a.shape == b.shape for a, b in zip(v.tensors, other.tensors, strict=True)))

    def rows(self) -> Value:
        """A value of (batch, features)."""
        value = self.float(at_least=2, batched=True)
        return value if value.dim == 2 else self.let(f"{value}.flatten(1)")

    def sequence(self) -> Value:
        """A value of (batch, length, features)."""
        value = self.float(at_least=2, batched=True)
        if value.dim == 2:
            return self.let(f"{value}.unflatten(1, ({self._divisor(value.shape[1])}, -1))")
        return value if value.dim == 3 else self.let(f"{value}.flatten(1, -2)")

    def image(self) -> Value:
        """A value of (batch, channels, height, width)."""
        try:
            if self.rng.random() < 0.8:
                return self.float(dim=4, batched=True)
        except NoFit:
            pass
        value = self.rows()
        features = value.shape[1]
        channels, height, width = self.rng.choice([2, 4, 8]), self.rng.choice([2, 5, 7]), self.rng.choice([4, 6, 8])
        if self.rng.random() < 0.3 and features % 4 == 0 and features >= 16:
            return self.let(f"{value}.reshape({value}.shape[0], -1, 2, {self.rng.choice([2, 2, 1])})")
        linear = self.module(f"nn.Linear({features}, {channels * height * width})")
        return self.let(f"{linear}({value}).view(-1, {channels}, {height}, {width})")

    def _divisor(self, size: int) -> int:
        return self.rng.choice([d for d in (1, 2, 3, 4, 5, 7, 8) if size % d == 0])

    def size(self, *sizes: int) -> int:
        """One of the sizes."""
        return self.rng.choice(sizes)

    def axis(self, value: Value, but_batch: bool = True) -> int:
        """A dimension; not the batch, unless it is the only one."""
        dims = [d for d in range(value.dim) if d not in value.varies or not but_batch]
        if not dims:
            raise NoFit
        return self.rng.choice(dims)

    def module(self, text: str) -> str:
        """A submodule; returns how it is read."""
        return self._state("m", text)

    def parameter(self, *shape: int, scale: float = 0.5) -> str:
        """A parameter."""
        return self._state("p", f"nn.Parameter(torch.randn({', '.join(map(str, shape))}) * {scale})")

    def buffer(self, text: str) -> str:
        """A buffer."""
        name = self._new("b")
        self.program.do_init(f'self.register_buffer("{name}", {text})')
        return f"self.{name}"

    def _state(self, letter: str, text: str) -> str:
        name = self._new(letter)
        self.program.do_init(f"self.{name} = {text}")
        return f"self.{name}"

    def _new(self, letter: str) -> str:
        self._names += 1
        return f"{letter}{self.element.number}" + (f"_{self._names}" if self._names > 1 else "")

    def init(self, line: str) -> None:
        """A line of ``__init__``."""
        self.program.do_init(line)

    def define(self, name: str, text: str) -> str:
        """A definition before the module."""
        if name not in self.program.prelude:
            for space in self.program.spaces:
                exec(text, space)
            self.program.prelude[name] = text
        return name

    def line(self, text: str) -> None:
        """A line that makes no value."""
        for space in self.program.spaces:
            exec(text, space)
        self.lines.append(text)

    def let(self, text: str) -> Value:
        """A value for this element alone."""
        name = self._new("t")
        self.line(f"{name} = {text}")
        first, second = (space[name] for space in self.program.spaces)
        return Value(name, (self.element.number, 100 + self._names), (first, second))

    def out(self, text: str, count: int = 1) -> Value:
        """A value for those that follow, or several."""
        start = len(self.made)
        names = [f"v{self.element.number}" + (f"_{start + i}" if start + i else "") for i in range(count)]
        self.line(f"{', '.join(names)} = {text}")
        for i, name in enumerate(names):
            self.keep(name, start + i)
        return self.made[start]

    def keep(self, name: str, place: int) -> None:
        """A name as a value for those that follow, scaled where it is large."""
        first, second = (space[name] for space in self.program.spaces)
        if not isinstance(first, torch.Tensor) or first.numel() > _LARGEST:
            raise NoFit
        if first.is_floating_point() or first.is_complex():
            if not (torch.isfinite(first).all() and torch.isfinite(second).all()):
                raise NoFit
            top = max(first.detach().abs().max().item(), second.detach().abs().max().item()) if first.numel() else 0
            if top > 20:
                scaled = name + "s"
                self.line(f"{scaled} = {name} * {2.0 ** -math.ceil(math.log2(top / 4))}")
                name = scaled
                first, second = (space[name] for space in self.program.spaces)
        self.made.append(Value(name, (self.element.number, place), (first, second)))


def write_program(case: Case, kinds: dict[str, Callable[[Builder], None]]) -> Program:
    """Write the module of a case; ``kinds``: the pool's functions."""
    program = Program(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(case.number)
        _begin(program)
        _write(program, case.elements, program.values, program.lines, kinds)
        _finish(program)
    program.nets = (nn.Module(), nn.Module())
    program.spaces = ({}, {})
    for value in program.values:
        value.tensors = (torch.empty(0), torch.empty(0))
    return program


def _begin(program: Program) -> None:
    names = [f"x{i}" for i in range(len(program.case.inputs))]
    inputs = [program.inputs(rows, 0) for rows in program.case.batch]
    for net, space, values in zip(program.nets, program.spaces, inputs, strict=True):
        exec(HEADER, space)
        space.update({"self": net, **dict(zip(names, values, strict=True))})
    if not program.values:
        program.values += [Value(name, (-1, i), (inputs[0][i], inputs[1][i])) for i, name in enumerate(names)]


def _write(
    program: Program,
    elements: tuple[Element, ...],
    values: list[Value],
    lines: list[str],
    kinds: dict[str, Callable[[Builder], None]],
) -> None:
    for element in elements:
        marks = len(lines), len(program.init), set(program.prelude), set(program.methods), len(program.kinds)
        before = [(value, value.used) for value in values]
        builder = Builder(program, element, values, lines, "")
        builder.kinds = kinds  # type: ignore[attr-defined]
        try:
            program.kinds.append(element.kind)
            kinds[element.kind](builder)
        except Exception as error:
            if isinstance(error, (KeyboardInterrupt, MemoryError)):
                raise
            _take_back(program, lines, marks)
            for value, used in before:
                value.used = used
        else:
            values.extend(builder.made)


def _take_back(program: Program, lines: list[str], marks: Any) -> None:
    del lines[marks[0] :], program.init[marks[1] :], program.kinds[marks[4] :]
    for name in set(program.prelude) - marks[2]:
        del program.prelude[name]
    for name in set(program.methods) - marks[3]:
        del program.methods[name]


def _finish(program: Program) -> None:
    """Choose what is returned: all that nobody read, so that nothing was drawn in vain."""
    rng = random.Random(f"{program.case.seed} {program.case.number} result")
    ends = [v for v in program.values if not v.used and v.number[0] >= 0] or program.values[-1:]
    floats = [v for v in ends if v.dtype is program.dtype or v.dtype.is_complex]
    floats = [v for v in floats if v.tensors[0].requires_grad] or floats
    returns = program.case.returns

    def share(value: Value) -> str:
        text = f"{value}.abs()" if value.dtype.is_complex else str(value)
        pattern = ["{}.square().mean()", "{}.mean()", "{}.tanh().mean()", "({}.sum() * 0.01)", "{}.sin().mean()"]
        mine = hashlib.sha256(f"{program.case.number} {value.number}".encode()).digest()[0]
        return pattern[mine % len(pattern)].format(text)

    if not floats:
        floats = [v for v in program.values if v.dtype is program.dtype][-1:]
    if returns == "loss":
        program.result = " + ".join(share(v) for v in floats)
        return
    if returns in ("beside", "losses"):
        halves = [floats] if returns == "beside" else [floats[::2], floats[1::2] or floats[:1]]
        inner = [v for v in program.values if v.batched and v.number[0] >= 0 and v.dtype is program.dtype]
        others = [v for v in floats if v.batched] or inner
        others += rng.sample(inner, min(len(inner), 1))  # as hidden states are
        names = [" + ".join(share(v) for v in half) for half in halves]
        names += [str(v) for v in others[: rng.choice([1, 2, 4])]] if returns == "beside" or rng.random() < 0.4 else []
        program.result = "(" + ", ".join(names) + ",)"
        return
    tensors = [v for v in floats if v.batched]
    numbers = [share(v) for v in floats if not v.batched]
    if returns == "tensor" or (tensors and rng.random() < 0.7):
        # Numbers go into a tensor: of a model that returns one, the rest is taken not to be differentiated.
        main, *more = map(str, tensors or floats[:1])
        first = [" + ".join([main, *(numbers if tensors else numbers[1:])]), *more]
        if not tensors:
            program.notes.add("outputs without a batch")
    else:
        first = [*map(str, tensors), *numbers]
    if returns == "tensor":
        program.result = " + ".join([first[0], *(share(v) for v in tensors[1:])])
        return
    extra = []
    if rng.random() < 0.3:
        extra.append("x0")
    if rng.random() < 0.2:
        extra.append("None")
    others = [v for v in ends if v not in floats][:3]
    extra += [str(v) for v in others if v.batched or not v.dim]
    if not all(v.batched for v in others):
        program.notes.add("outputs without a batch")
    names = first + extra
    if returns == "tuple":
        program.result = "(" + ", ".join(names) + ",)"
    else:
        program.result = "{" + ", ".join(f'"o{i}": {name}' for i, name in enumerate(names)) + "}"


_ = (F, roundpipe_fx)
