"""Updates stage by stage: an optimizer steps for some parameters while the step's backward still runs for others.

Torch's optimizers compute the update of each parameter from its own gradient and state. So one step for all parameters
may be made as several steps, each for the parameters whose gradients are complete, with the same bits. They run in a
thread of their own, beside the workers: on the host, where an offloaded model's parameters lie, the backward of earlier
stages goes on meanwhile. Of the jobs that wait, the latest runs first, since the next forward reads the first stages
first, and their backward ends last::

    worker      B2      B1      B0 │ F0 of the next step, which waits for the update of w0 only
    submitted       w2      w1      w0
    updates         [     w2     ][  w0  ][  w1  ]       w1 has waited longer than w0, and comes later

DeepSpeed's ZeRO-Offload (Ren et al., 2021) and RoundPipe (thustorage/RoundPipe) overlap the two with parameters that
are one step old; here no read of a parameter precedes its update.

Each step is made by another optimizer of the same class, whose parameters share memory and state with the user's
optimizer's: so hyperparameters are those of the time when the updates began, and ``.grad`` is the user's.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe_fx import torch_private

_BY_PARAMETER = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Classes whose step treats every parameter by itself. Subclasses may not."""

FORKED_WITHIN = (
    "this process was forked while an optimizer was updating the model's parameters in another thread, so here only "
    "some of them may be updated: call model.synchronize() before processes are started."
)
"""The text of an error."""


def check_optimizer(optimizer: Any) -> None:
    """Check that an object is an optimizer that can step with gradients that are there already.

    Raises:
        TypeError: it is none, or its step requires a closure, which computes the loss several times.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
    # LBFGS: it needs a closure, so the backward cannot precede it.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__} steps with a closure that computes the loss several times: call "
            "optimizer.step(closure), with forward_backward in the closure."
        )


def is_by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer treats every parameter by itself."""
    return type(optimizer) in _BY_PARAMETER


def updates_by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether several steps for some parameters each are a step for all of them."""
    return is_by_parameter(optimizer) and not torch_private.step_is_watched(optimizer)


@dataclass(kw_only=True)
class _Update:
    """The update of one parameter.

    Attributes:
        memory: the model's parameter's memory. ``parameter.data`` may be exchanged while a step is captured.
        target: what the optimizer steps: the model's parameter itself, or its copy in another dtype.
        group: number of its group.
        parts: its gradient, in parts that are added up, each with whether it may be written to.
        before: the gradient that it had before the step; ``None``: none.
    """

    parameter: torch.Tensor
    memory: torch.Tensor
    target: torch.Tensor
    group: int
    parts: list[tuple[torch.Tensor, bool]]
    before: torch.Tensor | None

    def sum(self) -> None:
        """Add up the parts, as they would be without an optimizer, in the parameter's layout."""
        if not self.parts:
            return
        total, is_owned = self.parts[0]
        # In the order of the parts, and in place only where the memory is the step's own: the bits of a sum depend on
        # the order.
        for part, _ in self.parts[1:]:
            total, is_owned = (total.add_(part) if is_owned else total + part), True
        if self.before is not None:
            self.before.add_(total)
        elif is_owned and total.stride() == self.memory.stride():
            # Autograd would keep such a gradient as it is, and copy any other one into the parameter's layout.
            self.before = total
        else:
            self.before = torch.empty_like(self.memory).copy_(total)
        self.parts = []


@dataclass
class _Job:
    """Updates that begin together, once what they wait for has happened."""

    step: StepUpdates
    updates: list[_Update]
    waits: Sequence[Callable[[], None]]
    done: threading.Event = field(default_factory=threading.Event)


class StageUpdates:
    """The updates of a model's parameters that are on their way."""

    _failed_within = False

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None
        self._waiting: list[_Job] = []
        self._latest: dict[int, _Job] = {}
        self._steps: list[StepUpdates] = []
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._thread: int | None = None
        torch_private.when_forked(self, StageUpdates._forget_thread, before=StageUpdates._rest)

    def _rest(self) -> None:
        """Wait for updates before the process is forked, so that the child's parameters are all updated or none is."""
        # The updating thread itself may fork (a data loader); it cannot wait for itself.
        if threading.get_ident() != self._thread:
            for job in [*self._latest.values()]:
                job.done.wait()

    def _forget_thread(self) -> None:
        """In a process that was forked: the thread is the parent's, and so are updates that have begun since."""
        self._worker, self._waiting = None, []
        # What the parent's thread had not finished at the fork is half done in the child.
        for job in (job for step in self._steps for job in step.jobs):
            is_over, job.done = job.done.is_set(), threading.Event()
            job.done.set()
            if not is_over:
                job.step.failure = job.step.failure or RuntimeError(FORKED_WITHIN)

    def begin(
        self, optimizer: torch.optim.Optimizer, targets: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> StepUpdates:
        """Begin a step: its parameters' gradients are taken out of ``.grad`` until they are applied.

        Args:
            optimizer: of a class that updates by parameter.
            targets: the model's parameters with what the optimizer steps in their place, by identity of the former.

        Raises:
            BaseException: raised by an update of the step before.
        """
        if any(step.failure is not None for step in self._steps):
            self.synchronize()
        step = StepUpdates(self, optimizer, targets)
        self._steps.append(step)
        return step

    # A stack, not a queue: the backward completes the last stages first, and the next forward reads the first stages
    # first.
    def submit(self, job: _Job) -> None:
        """Start a job, once the thread has time for it. The last one comes first: the next forward reads it first."""
        keys = [id(update.parameter) for update in job.updates]
        # Two updates of one parameter never run at a time: the earlier one is waited for.
        self.wait_for(keys)
        self._worker = self._worker or ThreadPoolExecutor(1, "roundpipe_fx optimizer")
        self._latest.update(dict.fromkeys(keys, job))
        job.step.jobs.append(job)
        self._waiting.append(job)
        self._worker.submit(self._run_last)

    def _run_last(self) -> None:
        self._thread = threading.get_ident()
        job = self._waiting.pop()
        try:
            job.step.run(job)
        finally:
            job.done.set()

    def wait_for(self, keys: Iterable[int]) -> None:
        """Wait for the updates of some parameters, by identity.

        Raises:
            BaseException: raised by their update, or by one before it.
        """
        # Workers call this before each action: only parameters that the action reads are waited for.
        for key in keys if self._latest else ():
            job = self._latest.get(key)
            if job is not None:
                job.done.wait()
                if job.step.failure is not None:
                    raise job.step.failure

    def finish(self, all_but: StepUpdates | None = None) -> BaseException | None:
        """Wait for updates. Gradients that were not applied are in ``.grad`` again then.

        Args:
            all_but: a step whose updates are not waited for.

        Returns:
            what an update has raised; it is returned once.
        """
        # A step's own updates go on while those of the step before are waited for.
        over = [step for step in self._steps if step is not all_but]
        for job in (job for step in over for job in step.jobs):
            job.done.wait()
        self._steps = [step for step in self._steps if step is all_but]
        self._latest = {key: job for key, job in self._latest.items() if job.step is all_but}
        for step in over:
            step.give_back()
        return next((step.failure for step in over if step.failure is not None), None)

    def synchronize(self) -> None:
        """Wait for all updates.

        Raises:
            BaseException: raised by an update.
        """
        failure = self.finish()
        if failure is not None:
            raise failure

    def repeatable(self) -> bool:
        """Return whether the current step has updated nothing yet; asked once, when it has failed."""
        failed, self._failed_within = self._failed_within, False
        return not failed

    def fail(self, step: StepUpdates, error: BaseException, complete: bool) -> None:
        """End a step that has failed: no other update begins, and the user is told if there were any.

        Args:
            error: why it has failed.
            complete: whether all gradients were complete, so that those not applied are kept in ``.grad``.
        """
        step.stop(complete)
        self.finish()
        self._failed_within = step.applied > 0
        if step.applied and error is not step.failure:
            rest = "the gradients of the others are in .grad" if complete else "the others have their old values"
            error.add_note(
                f"roundpipe_fx: the optimizer had already updated {step.applied} parameters in this step; {rest}."
            )

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer's ``state_dict`` and ``load_state_dict`` wait for updates."""
        if optimizer not in self._watched:
            self._watched.add(optimizer)
            optimizer.register_state_dict_pre_hook(lambda _: self.synchronize())
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.synchronize())


class StepUpdates:
    """The updates of one step.

    Attributes:
        failure: what an update has raised; no other one begins after it.
        applied: number of parameters that have been updated.
        jobs: its updates so far.
    """

    def __init__(
        self,
        updates: StageUpdates,
        optimizer: torch.optim.Optimizer,
        targets: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.failure: BaseException | None = None
        self.applied = 0
        self.jobs: list[_Job] = []
        self._updates = updates
        self._optimizer = optimizer
        # Hyperparameters are those of this moment: the user may change the learning rate before the updates have run.
        self._settings = [settings_of_group(group) for group in optimizer.param_groups]
        self._groups = {
            id(trained): index for index, group in enumerate(optimizer.param_groups) for trained in group["params"]
        }
        self._targets = targets
        # `.grad` of before is set aside: the updates decide whether it is added, replaced or given back.
        self._before = {key: parameter.grad for key, (parameter, _) in targets.items()}
        for parameter, _ in targets.values():
            parameter.grad = None
        self._left: list[_Update] = []
        self._stopped, self._keep = False, True

    @property
    def keys(self) -> Collection[int]:
        """Identities of the model's parameters."""
        return self._targets.keys()

    def submit(
        self,
        gradients: Mapping[int, list[tuple[torch.Tensor, bool]]],
        waits: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Begin the updates of parameters whose gradients are complete and which this step does not read any more.

        Args:
            gradients: parts of their gradients, by identity of the model's parameter, each with whether it may be
                written to. Empty if there are none: a parameter is updated then if it had a gradient before.
            waits: functions that wait until the parts have arrived.
        """
        # Parameters with no gradient at all are left out, as `optimizer.step()` leaves them out.
        begun = []
        for key, parts in gradients.items():
            parameter, target = self._targets[key]
            before = self._before.pop(key)
            if parts or before is not None or target.grad is not None:
                begun.append(
                    _Update(
                        parameter=parameter,
                        memory=parameter.detach(),
                        target=target,
                        group=self._groups[id(target)],
                        parts=parts,
                        before=before,
                    )
                )
        if begun:
            self._updates.submit(_Job(self, begun, waits))

    def finish(self, others: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Begin the updates of all that is left, since the backward is over. Those of the step before must be, too.

        Args:
            others: parameters that could not be updated earlier; their gradients are in ``.grad``.
        """
        for key, (parameter, _) in others.items():
            self._before[key] = parameter.grad
            parameter.grad = None
        # Parameters outside of the pipeline (frozen in the graph, but in the optimizer with a gradient) are updated
        # now.
        self._targets = {**self._targets, **others}
        self.submit({key: [] for key in [*self._before]})
        torch_private.note_optimizer_step(self._optimizer)
        failure = self._updates.finish(all_but=self)
        if failure is not None:
            raise failure

    def stop(self, keep: bool) -> None:
        """Let no other update begin.

        Args:
            keep: whether gradients are kept, or lost, as those of any step that fails before they are complete.
        """
        self._stopped, self._keep = True, keep

    def give_back(self) -> None:
        """Put gradients that were not applied into ``.grad``: those of before a step that was stopped, or all."""
        for update in self._left:
            update.sum()
            _add(update.parameter, update.before)
        for key, gradient in self._before.items():
            _add(self._targets[key][0], gradient)
        self._left, self._before = [], {}

    def run(self, job: _Job) -> None:
        """Make the updates of a job. Never raises: what is raised is noted."""
        updates = job.updates
        try:
            for wait in job.waits:
                wait()
            # The step was broken off: its gradients are dropped, those of before are given back.
            if not self._keep:
                for update in updates:
                    update.parts = []
            for update in updates:
                update.sum()
            if self.failure is None and not self._stopped:
                # Copies one by one, so that the gradient of only one exists beside that of its parameter.
                themselves = [update for update in updates if update.target is update.parameter]
                copied = [[update] for update in updates if update.target is not update.parameter]
                for together in ([themselves] if themselves else []) + copied:
                    self._apply(together)
                    self.applied += len(together)
                return
        except BaseException as error:  # handed to the caller's thread
            self.failure = self.failure or error
        self._left += updates

    def _apply(self, updates: Sequence[_Update]) -> None:
        members: dict[int, list[nn.Parameter]] = {}
        # A shadow optimizer of the same class with these parameters alone: its `step` is the user's optimizer's, and
        # its state is moved in and out.
        shadows: list[tuple[_Update, nn.Parameter]] = []
        for update in updates:
            shadow = nn.Parameter(update.memory if update.target is update.parameter else update.target.detach())
            if update.target is update.parameter:
                shadow.grad = update.before
            else:
                # Optimizers over copies in another dtype (master weights): the gradient is converted, the result is
                # copied back.
                shadow.grad = update.target.grad
                if update.before is not None:
                    moved = update.before.to(device=shadow.device, dtype=shadow.dtype)
                    shadow.grad = moved if shadow.grad is None else shadow.grad + moved
            members.setdefault(update.group, []).append(shadow)
            shadows.append((update, shadow))
        groups = [{**self._settings[index], "params": params} for index, params in members.items()]
        part = type(self._optimizer)(groups)  # type: ignore[call-arg]
        state = self._optimizer.state
        for update, shadow in shadows:
            # State is shared by reference: the shadow updates the user's `exp_avg` in place.
            if update.target in state:
                part.state[shadow] = state[update.target]
        part.step()
        # A parameter that had no state gets it only now, so that one whose update has failed begins without.
        for update, shadow in shadows:
            if shadow in part.state:
                state[update.target] = part.state[shadow]
            update.before = None
            if update.target is not update.parameter:
                update.target.grad = None
                with torch.no_grad():
                    update.memory.copy_(shadow)


def settings_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters as they are now."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def _add(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
