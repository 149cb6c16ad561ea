"""Step calls: records which calls of a model are alive at the same time.

A call is alive from its forward until its saved values are freed: its backward has run, or can no longer run. This is
observed rather than counted: autograd holds the saved values that the forward program returned, and a weak reference to
one of their storages dies with it, whether a backward reads it, the output is dropped, or an exception ends the step. A
step lasts from a forward that finds no call alive until no call is alive. For ``b(a(x))`` and its backward::

    event                    alive    recorded
    forward of a             a        (FORWARD, 0)
    forward of b             a, b     (FORWARD, 1); b reads the output of a: no loss is computed from that
    backward of b            a        (BACKWARD, 1), (FREED, 1)
    backward of a            none     (BACKWARD, 0), (FREED, 0): the step is over, and is reported
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx import torch_private
from roundpipe_fx.analysis.step_of_calls import Footprint, NotedCall, NotedEvent, NotedStep, is_usual
from roundpipe_fx.runtime.stage_compiler import Boxed

_MOST = 1000
"""At most this many calls of a step are recorded."""


@dataclass(frozen=True, kw_only=True)
class NotedGraph:
    """A compiled graph whose calls are recorded.

    Attributes:
        name: name of the graph.
        footprint: footprint of its plan, in bytes.
        outputs: number of its results that the caller gets.
        parameters: positions of inputs that are allocated anyway.
        differentiated: numbers of the outputs that have incoming gradients.
        training: whether it has a backward. Otherwise its calls neither begin nor end a step.
    """

    name: str
    footprint: Footprint
    outputs: int
    parameters: frozenset[int]
    differentiated: frozenset[int]
    training: bool = True


@dataclass(kw_only=True)
class _Call:
    graph: NotedGraph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    new_input_bytes: int
    token: weakref.ref[Any] | None = None
    returned: bool = False
    """Whether only outputs are held, so that the token is one of them."""
    over: bool = False
    """Whether it is no longer alive."""
    ending: bool = False
    """Whether its outputs, which were all that is held, were freed in a backward, so that its own may follow."""


class StepCalls:
    """The calls of a model's current step.

    Args:
        on_step: called when a step is over, with whether it is the usual one (one call, which went backward at most
            once and kept nothing for another backward) and a function that returns the step.
        on_backward: called before the first backward of a step, with a function that returns the step as it will be if
            calls go backward in the opposite order of their forwards.
    """

    def __init__(
        self,
        on_step: Callable[[bool, Callable[[], NotedStep]], None],
        on_backward: Callable[[Callable[[], NotedStep]], None] = lambda _: None,
    ) -> None:
        self._on_step = on_step
        self._on_backward = on_backward
        self._lock = torch_private.ForkedLock()
        self._clear()

    def _clear(self) -> None:
        self._calls: list[_Call] = []
        self._events: list[tuple[NotedEvent, int]] = []
        self._is_backward = False

    def forward(self, run: Boxed, graph: NotedGraph) -> Boxed:
        """Wrap a forward program so that its calls are recorded."""
        position: int | None = None

        def call(arguments: list[Any]) -> tuple[Any, ...]:
            nonlocal position
            inputs = tuple(map(_storage, arguments))
            with self._lock:
                # A step is over if all its calls are; that is noticed when the next call begins.
                self.report()
                number = self._begin(graph, inputs, arguments)
                step = self._calls
            if number is None:
                return run(arguments)
            try:
                results = run(arguments)
            except BaseException:
                with self._lock:
                    step[number].over = True
                raise
            outputs = tuple(map(_storage, results[: graph.outputs]))
            # The token is the storage whose life stands for the call's: a saved value if there is one, else an output.
            # Chosen once, since each call returns the same kinds of results.
            if position is None:
                storages = tuple(map(_storage, results))
                mine = [i for i, key in enumerate(storages) if key and key not in inputs]
                kept = [i for i in mine if storages[i] not in outputs]
                position = next(iter((*kept, *mine)), -1)
            token = results[position].untyped_storage() if position >= 0 else None
            with self._lock:
                self._ran(step, number, outputs, token, token is not None and token._cdata in outputs)
            return results

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def backward(self, run: Boxed, graph: NotedGraph) -> Boxed:
        """Wrap the backward program of a graph whose calls are recorded."""

        def call(arguments: list[Any]) -> tuple[Any, ...]:
            with self._lock:
                # The latest call of this graph whose token is among the arguments: several calls of one graph may wait
                # for their backwards.
                number = self._call_of(graph, arguments)
                step = self._calls
                if self._calls and not self._is_backward:
                    self._is_backward = True
                    self._on_backward(self._expected)
                retained = torch_private.graph_is_kept()
                if number is not None:
                    self._events.append((NotedEvent.RETAINED if retained else NotedEvent.BACKWARD, number))
            results = run(arguments)
            with self._lock:
                if number is not None:
                    self._went_back(step, number, retained)
                self._finish()
            return results

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _expected(self) -> NotedStep:
        training = [number for number, call in enumerate(self._calls) if call.graph.training and not call.over]
        # Backwards run in the reverse order of the forwards, as autograd runs them.
        backwards = [(event, n) for n in reversed(training) for event in (NotedEvent.BACKWARD, NotedEvent.FREED)]
        return NotedStep(tuple(_noted(self._calls)), (*self._events, *backwards))

    def _begin(self, graph: NotedGraph, inputs: tuple[int, ...], arguments: Sequence[Any]) -> int | None:
        if len(self._calls) == _MOST or not (graph.training or self._calls):
            return None
        number = len(self._calls)
        new_input_bytes = 0
        if number:
            # Inputs that earlier calls have read or returned are alive anyway; parameters too.
            known = {storage for call in self._calls for storage in (*call.inputs, *call.outputs)}
            sizes = {
                key: min(value.untyped_storage().nbytes(), value.nbytes)
                for position, (key, value) in enumerate(zip(inputs, arguments, strict=True))
                if key and key not in known and position not in graph.parameters
            }
            new_input_bytes = sum(sizes.values())
        self._calls.append(_Call(graph=graph, inputs=inputs, outputs=(), new_input_bytes=new_input_bytes))
        self._events.append((NotedEvent.FORWARD, number))
        return number

    # Threads that share the model may begin another step while a program runs, so the two below are given theirs.

    def _ran(self, step: list[_Call], number: int, outputs: tuple[int, ...], token: Any, returned: bool) -> None:
        call = step[number]
        call.outputs, call.returned = outputs, returned
        if token is None:
            call.over = True  # it holds nothing
            return
        call.token = weakref.ref(token, functools.partial(_token_freed, self, step, number))

    def _token_freed(self, step: list[_Call], number: int) -> None:
        # Called wherever the last reference dies: in the backward, in a garbage collection, in another thread.
        with self._lock:
            if step is not self._calls:
                return
            # Inside a backward, outputs may be freed right before the program of their own call runs, so the end is
            # only noted.
            if step[number].returned and torch_private.in_backward():
                step[number].ending = True
            else:
                self._freed(number)

    def _call_of(self, graph: NotedGraph, arguments: Sequence[Any]) -> int | None:
        """Number of the latest call that a backward belongs to; ``None`` if it was not recorded."""
        for number in range(len(self._calls) - 1, -1, -1):
            call = self._calls[number]
            if call.graph is graph and not call.over:
                token = call.token() if call.token is not None else None
                if call.returned or (token is not None and token._cdata in map(_storage, arguments)):
                    return number
        return None

    def _went_back(self, step: list[_Call], number: int, retained: bool) -> None:
        if step is not self._calls:
            return
        call = step[number]
        # Autograd has freed the saved values when the program returns, unless the graph is retained.
        kept = retained or (not torch_private.in_backward() and not call.returned)
        # Others may free it later: threads of gloo hold what they communicate, and ranks would observe different steps.
        if not kept or call.token is None or call.token() is None:
            self._freed(number)

    def _freed(self, number: int) -> None:
        call = self._calls[number]
        if not call.over:
            call.over = True
            self._events.append((NotedEvent.FREED, number))

    def are_alive(self) -> bool:
        """Test for calls that are alive, so that the next one belongs to their step."""
        with self._lock:
            self.report()
            return bool(self._calls)

    def report(self) -> None:
        """Report the step if it is over: outputs that end it may have been dropped since the last call."""
        with self._lock:
            self._end_of_backward()
            self._finish()

    def _end_of_backward(self) -> None:
        for number, call in enumerate(self._calls):
            if call.ending:
                self._freed(number)

    def _finish(self) -> None:
        """If no call is alive, report the step and start a new one."""
        # Calls without a backward do not hold a step open.
        if not all(call.over for call in self._calls if call.graph.training):
            return
        calls, events = self._calls, self._events
        self._clear()
        if calls:
            self._on_step(is_usual(len(calls), events), lambda: NotedStep(tuple(_noted(calls)), tuple(events)))


@torch.compiler.disable(reason="a tensor may die anywhere, also in a function that is being compiled")
def _token_freed(calls: StepCalls, step: list[_Call], number: int, _reference: Any) -> None:
    calls._token_freed(step, number)


def _noted(calls: Sequence[_Call]) -> list[NotedCall]:
    read = [set(call.inputs) for call in calls]
    noted = []
    for number, call in enumerate(calls):
        # Consumed: all differentiated outputs are read by later calls, so the caller need not hold them.
        later = set().union(*read[number + 1 :])
        differentiated = [
            call.outputs[position] for position in call.graph.differentiated if position < len(call.outputs)
        ]
        consumed = bool(differentiated) and later.issuperset(differentiated)
        graph = call.graph
        noted.append(
            NotedCall(
                graph=graph.name,
                inputs=call.inputs,
                outputs=call.outputs,
                new_input_bytes=call.new_input_bytes,
                consumed=consumed,
                footprint=graph.footprint,
            )
        )
    return noted


def _storage(value: Any) -> int:
    """Identity of a tensor's storage; 0 for values without one."""
    try:
        return value.untyped_storage()._cdata
    except (AttributeError, RuntimeError):  # it is none, or sparse
        return 0
