"""Averaging: which gradients are reduced together and when, without other processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.distributed.averaging import (
    Averaging,
    GradientBucket,
    GradientReduction,
    buckets_of,
    find_late_gradients,
    reductions_of,
)
from roundpipe_fx.runtime.gradient_accumulator import GradientAccumulator
from roundpipe_fx.runtime.pipeline_program import Gradient, Source
from roundpipe_fx.schedules import Action, ActionKind

BACKWARD = ActionKind.BACKWARD


class _Alike:
    """Two replicas, of which the other one has the same gradients."""

    size = 2

    def __init__(self) -> None:
        self.started: list[torch.Tensor] = []

    def start_sum(self, value: torch.Tensor) -> Any:
        self.started.append(value)
        return SimpleNamespace(wait=lambda: value.mul_(2))


def _program(*sources: Source | None) -> Any:
    """A microbatch whose stage 0 computes the values 0 and 1 in its backward, and stage 2 the value 2."""
    steps = {(BACKWARD, stage): SimpleNamespace(outputs=numbers) for stage, numbers in ((2, (2,)), (0, (0, 1)))}
    gradients = tuple(Gradient(primal, source) for primal, source in enumerate(sources))
    return SimpleNamespace(steps=steps, gradients=gradients)


def _instruction(stage: int, batch: int, *numbers: int) -> Any:
    return SimpleNamespace(
        action=Action(BACKWARD, stage, batch), gradients=[(0, number) for number in numbers], sums=()
    )


def test_buckets_begin_with_the_last_stage_and_wait_for_the_last_microbatch() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    keys = {id(value): value for value in parameters}
    program = _program(Source("value", 0), Source("value", 1), Source("value", 2), Source("tangent", 0))
    order = [(0, 0, 0, 1), (2, 0, 2), (0, 1, 0, 1), (2, 1, 2)]  # stage 0 is done first
    instructions = [_instruction(*own) for own in order]
    programs, primals = [program, program], [parameters, parameters]
    ran = {(own.action.step, own.action.microbatch) for own in instructions}
    late = find_late_gradients(programs, primals, ran)
    assert late == {id(parameters[3])}
    first, second, third, _ = map(id, parameters)
    # Replicas may run stages in another order, so none is reduced before those of later stages.
    assert buckets_of(instructions, programs, primals, keys, late) == [
        GradientBucket(3, (third,)),
        GradientBucket(3, (first, second)),
    ]
    forwards = find_late_gradients(programs, primals, ran - {((BACKWARD, 2), 1)})
    assert forwards == {third, id(parameters[3])}  # one microbatch's is computed by an earlier run


def test_a_bucket_is_put_together_in_tensors_of_one_type_and_of_some_megabytes() -> None:
    megabyte, half = (2**18,), (2**19,)
    shapes = [megabyte, megabyte, (2**20,), (4,), megabyte, half, (3, 2)]  # 1 MiB, 1, 4, …
    dtypes = [torch.float32] * 5 + [torch.bfloat16, torch.float32]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
    keys = [id(value) for value in parameters]
    by_key, buckets = (
        dict(zip(keys, parameters, strict=True)),
        [GradientBucket(3, (keys[0],)), GradientBucket(7, (*keys[1:],))],
    )

    def found(sharded: set[int]) -> list[tuple[int, list[int], bool]]:
        reductions = reductions_of(buckets, by_key, sharded)
        return [(one.position, [keys.index(key) for key in one.keys], one.waits) for one in reductions]

    assert found(set()) == [(3, [0], False), (7, [2], False), (7, [1, 3, 4, 6], False), (7, [5], False)]
    # Sharded ones travel alone but for small ones, and each bucket waits for the one before.
    assert found({*keys[:5], keys[6]}) == [
        (3, [0], True),
        *((7, [number], number == 1) for number in (1, 2, 4)),
        (7, [3, 6], False),
        (7, [5], False),
    ]
    many = [nn.Parameter(torch.zeros(megabyte)) for _ in range(9)]
    grouped = reductions_of([GradientBucket(0, tuple(map(id, many)))], {id(value): value for value in many}, set())
    assert [len(one.keys) for one in grouped] == [4, 4, 1]


@pytest.mark.parametrize("together", [False, True])
def test_gradients_are_averaged_in_the_layout_of_their_parameter(together: bool) -> None:
    parameters = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2).t())]
    keys = [id(value) for value in parameters]
    given = [torch.arange(6.0).view(2, 3).t(), torch.tensor(3.0).expand(2), torch.arange(4.0).view(2, 2)]
    expected = [value.clone() for value in given]
    sums = GradientAccumulator()
    for position, (key, value) in enumerate(zip(keys, given, strict=True)):
        sums.give(key, value, owned=position != 2)
    parameters[2].grad = torch.ones(2, 2)
    replicas: Any = _Alike()
    run = Averaging(
        replicas=replicas,
        reductions=[
            GradientReduction(position=4, keys=of_one)
            for of_one in ([tuple(keys)] if together else [(key,) for key in keys])
        ],
        parameters=dict(zip(keys, parameters, strict=True)),
        unsynchronized=frozenset(keys[2:]),
    )
    run.after(3, sums)
    assert not replicas.started and len(sums.tensors) == 3
    run.after(4, sums)
    assert len(replicas.started) == (1 if together else 3) and not sums.tensors
    found: dict[int, torch.Tensor] = {}
    run.finish(found)
    expected[2] = expected[2] + 1
    for key, value, mean in zip(keys, parameters, expected, strict=True):
        assert torch.equal(found[key], mean) and found[key].stride() == value.stride()
    assert torch.equal(given[2], expected[2] - 1)  # it was not its own


def test_without_replicas_there_is_nothing_to_synchronize() -> None:
    model, x = roundpipe_fx.compile(nn.Linear(2, 2), num_microbatches=2), torch.ones(2, 2)
    with model.no_sync():
        model.forward_backward(x, labels=x, loss_fn=nn.functional.mse_loss)
    first = model.weight.grad.clone()
    model.forward_backward(x, labels=x, loss_fn=nn.functional.mse_loss)
    assert torch.equal(model.weight.grad, 2 * first)


def test_after_a_failure_what_was_not_started_is_reduced_with_zeros() -> None:
    parameter = nn.Parameter(torch.ones(3))
    replicas: Any = _Alike()
    second = nn.Parameter(torch.ones(2))
    reductions = [GradientReduction(position=0, keys=(id(value),)) for value in (second, parameter)]
    keys = {id(value): value for value in (second, parameter)}
    run = Averaging(replicas=replicas, reductions=reductions, parameters=keys)
    sums = GradientAccumulator()
    sums.give(id(second), torch.ones(2))
    with pytest.raises(KeyError):  # after the first was started, which is not to be started again
        run.after(0, sums)
    run.reduce_zeros()
    assert [value.tolist() for value in replicas.started] == [[0.5, 0.5], [0.0, 0.0, 0.0]]
