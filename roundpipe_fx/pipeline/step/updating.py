"""Updates within a step: which parameters an optimizer may step for before the step's backward has ended, and what
happens if something fails."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch

from roundpipe_fx.pipeline.capture.captured_calls import CapturedCalls
from roundpipe_fx.pipeline.step.gradients import has_hooks
from roundpipe_fx.runtime.complete_gradients import updatable_in_step
from roundpipe_fx.runtime.optimizer_parameters import OptimizerParameters
from roundpipe_fx.runtime.stage_updates import StepUpdates, updates_by_parameter


@contextlib.contextmanager
def update_during_step(
    parameters: OptimizerParameters,
    optimizer: torch.optim.Optimizer | None,
    synchronize: bool,
    captured: CapturedCalls,
    updatable: Collection[int] | None,
) -> Iterator[StepUpdates | None]:
    """Context manager around a step, from before it runs until its gradients are in ``.grad``.

    Args:
        parameters: the model's, as its optimizer sees them.
        optimizer: steps in this step; ``None``: none does.
        synchronize: whether to wait for the updates at the end.
        updatable: identities of tensors of the model that are on the host; ``None``: all that are.

    Returns:
        the updates, for workers to begin; ``None`` if there are none before the end.

    Raises:
        BaseException: what the step or an update has raised. Gradients that an update has not applied are in ``.grad``.
    """
    updates = parameters.updates
    if optimizer is None or not updates_by_parameter(optimizer):
        try:
            yield None
        except BaseException:
            updates.finish()
            raise
        if optimizer is not None:
            parameters.step(optimizer, is_async=False)
        return
    targets = parameters.targets(optimizer)
    early = updatable_in_step(captured.programs, captured.primals)
    within = {
        key: (parameter, target)
        for key, (parameter, target) in targets.items()
        if key in early
        and (updatable is None or key in updatable)
        and parameter.device.type == target.device.type == "cpu"
        and parameter.is_leaf
        and not has_hooks(parameter)
    }
    step = updates.begin(optimizer, within)
    if not synchronize:
        updates.watch(optimizer)
    complete = False
    try:
        yield step
        complete = True
        step.finish({key: update_target for key, update_target in targets.items() if key not in within})
        if not synchronize:
            return
        updates.wait_for([*targets])
    except BaseException as error:
        updates.fail(step, error, complete)
        raise
    updates.synchronize()
