"""A program's steps as eager and ``aot_eager`` take them: what compiled steps are held against."""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.debugging import aot_eager

from benchmarks.fuzz.program import Program
from benchmarks.fuzz.steps import Left, differences, loss_of, take_step
from roundpipe_fx.ir.resolved_branches import keep_resolved_random_branches
from roundpipe_fx.torch_private import dynamo_flags, spell_out_recurrence

__all__ = ["References", "Skip", "WithLoss", "module_of"]

_numbers = itertools.count()

_ROUNDING = {"float64": 1e-7, "float32": 1e-3}


class Skip(Exception):
    """The reference cannot do it."""


def module_of(program: Program, plain: bool = False) -> Callable[[], nn.Module]:
    """Makes the program's module, always the same one.

    Args:
        program: what was written.
        plain: without checkpoints and scopes, which run twice what updates buffers, and read these as they are by then.
    """
    name = f"<case {program.case.seed} {program.case.number}>"
    source = program.source
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    # Dynamo looks modules up by name, and keeps what it found where the caller's globals are: so each has its own.
    module = types.ModuleType(f"fuzzed_program_{next(_numbers)}")
    sys.modules[module.__name__] = module
    exec(compile(source, name, "exec"), module.__dict__)
    if plain:
        module.__dict__.update(torch_checkpoint=_called, roundpipe_fx=_PLAIN)

    def make() -> nn.Module:
        torch.manual_seed(program.case.number)
        return module.Net().to(program.dtype)

    return make


def _called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args)


_PLAIN = types.SimpleNamespace(
    checkpoint=_called,
    gradient_checkpoint_scope=contextlib.nullcontext,
    memory_budget=contextlib.nullcontext,
)


class References:
    """A program's steps as eager and ``aot_eager`` take them."""

    def __init__(self, program: Program, say: Callable[[str], None]) -> None:
        self.program = program
        self.make, self.make_plain = module_of(program), module_of(program, plain=True)
        self._plain: dict[bool, list[Left]] = {}
        self.tolerance = _ROUNDING[program.case.dtype]
        self.use = program.case.use
        self.random = "random" in program.notes
        self.batches = [(program.case.batch[0], 1), (program.case.batch[0], 2), (program.case.batch[1], 3)]
        if not any(way.get("third") for way in program.case.ways):
            del self.batches[2]  # another batch is traced with symbols for sizes, which takes long
        say("eager")
        self.eager = self._by_eager()
        if not all(map(_is_finite, self.eager)):
            raise Skip("eager: not finite")
        again = self._by_eager()
        if any(differences(one, other, self.tolerance * 1e-3) for one, other in zip(again, self.eager, strict=True)):
            raise Skip("eager: two runs differ")
        if not any(g is not None for g in self.eager[0].gradients.values()):
            raise Skip("eager: no gradients")
        say("aot_eager")
        self.aot = self._by_aot_eager()
        if self.use != "all" and not all(map(_is_finite, self.aot)):
            raise Skip("aot_eager: not finite with zeros for the gradients of outputs that nobody differentiates")
        self.aot_is_wrong = any(
            differences(one, other, self.tolerance) for one, other in zip(self.aot, self.eager, strict=True)
        )

    def draws_in_vain(self, loss_alone: bool) -> bool:
        """Whether a compiled program draws less than eager: what nobody reads is not drawn, and the rest differs then.

        Args:
            loss_alone: only the loss is read.
        """
        if not self.random:
            return False
        compiled = self._by_aot_eager(part=WithLoss) if loss_alone else self.aot
        return any(
            not torch.equal(one.state, other.state)  # type: ignore[arg-type]
            for one, other in zip(compiled, self.eager, strict=True)
        )

    @property
    def loss_is_outside(self) -> bool:
        """Whether the program returns other than one number."""
        outputs = self.eager[0].outputs
        return len(outputs) != 1 or outputs[0].dim() > 0 or outputs[0].is_complex()

    @functools.cached_property
    def _dynamic(self) -> list[Left]:
        return self._by_aot_eager(dynamic=True)

    def without_checkpoints(self, dynamic: bool = False) -> list[Left]:
        """The steps by ``aot_eager`` of the program without checkpoints and scopes.

        It rounds like ``aot_eager`` of the program itself, but reads buffers as they were in the forward. Nothing is
        reset, so it may run between two steps of a compiled program.

        Args:
            dynamic: traced with symbols for sizes.
        """
        if dynamic not in self._plain:
            # A module of its own: Dynamo would use what it compiled for another.
            make = module_of(self.program, plain=True)
            try:
                self._plain[dynamic] = self._traced(make, dynamic=dynamic or None)
            except Skip:
                self._plain[dynamic] = self._dynamic if dynamic else self.aot
        return self._plain[dynamic]

    def _by_eager(self) -> list[Left]:
        try:
            return self._steps(self.make_plain(), lambda net: net)
        except Exception as error:
            raise Skip(f"eager: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}") from None

    def _by_aot_eager(
        self, dynamic: bool | None = None, part: Callable[[nn.Module], nn.Module] = lambda net: net
    ) -> list[Left]:
        torch._dynamo.reset()
        return self._traced(self.make, dynamic, part)

    def _traced(
        self,
        make: Callable[[], nn.Module],
        dynamic: bool | None = None,
        part: Callable[[nn.Module], nn.Module] = lambda net: net,
    ) -> list[Left]:
        recurrent = "rnn" in self.program.notes
        with dynamo_flags(), torch._dynamo.config.patch(allow_rnn=True) if recurrent else contextlib.nullcontext():
            try:
                return self._steps(
                    make(), lambda net: torch.compile(part(net), backend=_aot_eager, fullgraph=True, dynamic=dynamic)
                )
            except Exception as error:
                raise Skip(f"aot_eager: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}") from None

    def _steps(self, net: nn.Module, compiled: Callable[[nn.Module], Any]) -> list[Left]:
        run = compiled(net)
        return [self.step(run, net, place, count=place == 1) for place in range(len(self.batches))]

    def step(
        self,
        run: Callable[..., Any],
        net: nn.Module,
        place: int,
        meter: AbstractContextManager[Any] | None = None,
        count: bool = False,
    ) -> Left:
        """A step that uses outputs as the case says; ``place``: of its batch; the rest is for :func:`take_step`."""
        return take_step(run, net, self.inputs(place), self.batches[place][1], count, meter, self.use)

    def inputs(self, place: int) -> list[torch.Tensor]:
        rows, seed = self.batches[place]
        return self.program.inputs(rows, seed)

    def states(self, place: int) -> list[torch.Tensor | None]:
        """The generator's, after a step: draws follow the order of memory, which tracing may take for another."""
        return [self.aot[place].state, self.eager[place].state]

    def wrong(self, left: Left, place: int, rounded: bool = False, dynamic: bool = False) -> dict[str, str]:
        """How a step differs from what it is held against.

        Args:
            left: what the step left.
            place: which step it is.
            rounded: sums may be rounded otherwise.
            dynamic: it is traced with symbols for sizes.
        """
        eager = self.eager[place]
        bits = differences(left, self.aot[place], self.tolerance if rounded else None)
        if bits and dynamic:  # some operators are traced otherwise
            bits = differences(left, self._dynamic[place], self.tolerance if rounded else None)
        if not bits:
            # Bits of a reference that is wrong in float64 are wrong, unless it draws other numbers than eager.
            sure = self.aot_is_wrong and self.program.case.dtype == "float64" and not self.draws_in_vain(False)
            return differences(left, eager, self.tolerance) if sure else {}
        if self.aot_is_wrong:
            return differences(left, eager, self.tolerance)
        if rounded:
            return bits
        # A reference whose error is below what float32 rounds is not seen to be wrong. Right are then all bits of
        # eager, or all bits that are traced where no checkpoint reads buffers too late.
        if not differences(left, eager, None) or not differences(left, self.without_checkpoints()[place], None):
            return {}
        return bits if not dynamic or differences(left, self.without_checkpoints(dynamic=True)[place], None) else {}


def _is_finite(left: Left) -> bool:
    tensors = [*left.outputs, left.loss, *left.gradients.values(), *left.buffers.values()]
    return all(torch.isfinite(value).all() for value in tensors if value is not None and not value.is_complex())


class WithLoss(nn.Module):
    """A program that returns its loss alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return loss_of(self.net(*inputs))


def _aot_eager(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    # oneDNN's LSTM rounds otherwise, and AOTAutograd cannot save what it returns.
    spell_out_recurrence(module)
    keep_resolved_random_branches(module)
    with torch._functorch.config.patch(donated_buffer=False):  # which a second backward would miss
        return aot_eager(module, inputs)
