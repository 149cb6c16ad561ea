"""A pipeline over processes: this rank's part in it.

Each rank traces the whole model and plans for all devices; then it runs the instructions of its own, in one worker::

    capture, plan ──▶ agree with the other ranks ──▶ run instructions[rank] ──▶ outputs of others, sums of gradients
                          │                               └── transport: torch.distributed instead of mailboxes
                          └── at the first plan: free what others own

Replicas of the pipeline do the same with other batches, and average gradients: see
:mod:`roundpipe_fx.distributed.replication`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from roundpipe_fx.analysis.cost import tensor_bytes
from roundpipe_fx.budget import bytes_text
from roundpipe_fx.distributed.agreement import FIRST_BATCH, GATHERS, KnownStep, Statement, agree, known_to_all
from roundpipe_fx.distributed.gathering import Gathering
from roundpipe_fx.distributed.group import PipelineGroup
from roundpipe_fx.distributed.ownership import Ownership, find_remote_gradients, readers_of
from roundpipe_fx.distributed.process_transport import ProcessTransport
from roundpipe_fx.distributed.rank_plans import RankPlan, RankPlans, batch_text, shapes_text
from roundpipe_fx.distributed.replication import Replication
from roundpipe_fx.distributed.results import (
    AgreedCalls,
    broadcast_value,
    end_bytes_of,
    iterate_shared_outputs,
    replace_updates,
    run_end_of,
    sum_gradients,
)
from roundpipe_fx.distributed.run_end import EndBytes
from roundpipe_fx.distributed.transfer_orders import RankTransfers
from roundpipe_fx.pipeline.capture.captured_calls import CapturedCalls
from roundpipe_fx.pipeline.step.local import Local, ScheduledOf
from roundpipe_fx.pipeline.step.scheduled import (
    Scheduled,
    UnequalMicrobatches,
    UnequalMicrobatchesError,
    find_unreachable_read,
)
from roundpipe_fx.remat.learned_steps import StepBudgetWarning
from roundpipe_fx.runtime import random_streams
from roundpipe_fx.runtime.pipeline_program import PipelineProgram
from roundpipe_fx.runtime.pipeline_run import Finished, run_pipeline
from roundpipe_fx.runtime.worker import Workers


@dataclass(frozen=True)
class _Prepared:
    """A step that this rank has captured and planned."""

    captured: CapturedCalls
    rank_plan: RankPlan


class NewObservations(Exception):
    """Steps have shown something on some rank that no plan takes into account yet. Raised on all, before a step."""


_TRIES = 3
"""How often in all a step that was agreed on may turn out to be unknown, before it is no longer looked for."""


class ProcessPipeline(Local):
    """This rank's part in a pipeline over processes. Constructed by all ranks at the same time.

    Args:
        options: the user's options as a text, which is to be the same on all ranks.
        shard_mesh: of the replicas across which parameters are sharded; ``None``: each has all of its stages'.
        budgeted: whether the memory of a step has a bound.

    Attributes:
        ownership: the model's tensors on this rank.
        replication: what this rank has in common with those of other replicas.
        shown: returns what steps have shown on this rank; ``None``: its plans do not take it into account.
    """

    def __init__(
        self,
        model: nn.Module,
        group: PipelineGroup,
        options: str,
        shard_mesh: DeviceMesh | None = None,
        budgeted: bool = False,
    ) -> None:
        super().__init__([group.device] * group.size)
        self.group = group
        self.ownership = Ownership(model, group.rank, group.device, shard_mesh)
        if shard_mesh is not None and group.replicas is not None:
            group.replicas.prepare_gathers()
        self.replication = Replication(self.ownership, group, budgeted)
        self.shown: Callable[[], str | None] = str
        self._agreed = False
        self._tries: dict[str, int] = {}
        self._options = f"{options}\ntorch {torch.__version__}"
        self._plans = RankPlans(self.group.rank, self.ownership)
        self._warned = False

    @property
    def worker_devices(self) -> tuple[torch.device, ...]:
        """Of this rank's worker."""
        return self.devices[:1]

    @property
    def first_stream(self) -> int:
        """Of this replica's first microbatch."""
        return self.replication.first_stream

    @property
    def updatable(self) -> Collection[int]:
        """None: gradients are put together after the step."""
        return ()

    def receivers(self) -> Mapping[int, torch.Tensor]:
        """Of sharded parameters."""
        return self.ownership.receivers()

    @contextlib.contextmanager
    def calling(self, updated: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Context manager in which tensors that other ranks own look as if they were here."""
        with self.ownership.shards.traced(), self.ownership.make_writable(updated.values()):
            yield

    def agreed(
        self,
        batch: Any,
        capture: Callable[[], CapturedCalls],
        scheduled_of: ScheduledOf,
        runs: bool,
        microbatches: int,
    ) -> AgreedCalls:
        """Capture and plan on all ranks, and compare.

        Args:
            batch: the step's inputs, any tree.
            scheduled_of: returns what workers run in a whole step.
            runs: whether the step is to run, which needs a loaded model.
            microbatches: into how many a batch is split at most.

        Raises:
            NewObservations: steps have shown something to some rank that its plans do not take into account.
            UnequalMicrobatchesError: microbatches of this pipeline, or of a replica, do not fit together.
            RanksDifferError: ranks differ in options, batch, graph or plan.
            RemoteError: another rank has failed.
            BaseException: this rank has failed.
        """
        first, synchronizing = not self._agreed, self.replication.synchronizing
        # Replicas may evaluate different numbers of batches, unless they gather parameters from each other.
        alone = not (first or torch.is_grad_enabled() or self.ownership.shards.mesh is not None)
        ranks, size, parts = self.group.sharers if alone else self.group.everyone, self.group.size, self.group.parts
        texts = {"options": self._options, "no_sync()": "outside" if synchronizing else "inside"}
        among = {"batch": batch_text(batch)}
        ready = functools.partial(self._make_agreed, microbatches=microbatches, alone=alone)

        def prepare() -> tuple[CapturedCalls, Scheduled]:
            captured = capture()
            return captured, scheduled_of(captured, None)

        # Fast path: a batch like an earlier one. One exchange of a few numbers replaces three of texts.
        if not first:
            prepared = self._find_known(among["batch"], prepare, runs)
            known = None
            if prepared is not None:
                everywhere, decided = self._texts_to_compare(prepared.rank_plan, first)
                known = KnownStep(
                    global_texts=(*texts.values(), *everywhere.values()),
                    per_replica_texts=(*among.values(), prepared.rank_plan.digest, prepared.rank_plan.collectives),
                    per_pipeline_texts=(*decided.values(),),
                    generator=self._generator(prepared.captured),
                    end_bytes=end_bytes_of(prepared.captured, self.generator_device(prepared.captured)),
                )
            by_all = known_to_all(ranks, known, self.shown() if runs else "", size, parts)
            # Something new was seen on some rank: all replan first, together.
            if not by_all.shown:
                raise NewObservations
            if by_all.same:
                assert prepared is not None
                return ready(prepared.captured, generators=by_all.generators, end_bytes=by_all.end_bytes)
        # Stages are given to ranks by the first batch, so replicas must agree on its shapes.
        if first and self.group.replicas is not None:
            texts[FIRST_BATCH] = shapes_text(batch)
        agree(ranks, Statement(global_fields=texts, per_replica_fields=among), size, parts)
        # From here on a failure of one rank must reach all of them, since the others wait in the same exchange.
        try:
            prepared = self._prepare(prepare, runs)
        except BaseException as error:
            unfitting = error.unfitting if isinstance(error, UnequalMicrobatchesError) else None
            agree(ranks, Statement(failure=f"{type(error).__name__}: {error}", unfitting=unfitting), size)
            raise
        plan = prepared.rank_plan
        everywhere, decided = self._texts_to_compare(plan, first)
        state = self._generator(prepared.captured)
        among_parts = {"plan": plan.digest, "collectives": plan.collectives} if parts > 1 else {}
        generators = agree(
            ranks,
            Statement(
                global_fields=everywhere, per_pipeline_fields=decided, generator=state, per_replica_fields=among_parts
            ),
            size,
            parts,
        )
        if isinstance(generators, UnequalMicrobatches):
            raise UnequalMicrobatchesError(generators)
        all_end_bytes = ranks.gather(end_bytes_of(prepared.captured, self.generator_device(prepared.captured)))
        end_bytes = EndBytes(max(end.state for end in all_end_bytes), max(end.outputs for end in all_end_bytes))
        captured = ready(prepared.captured, generators=generators, end_bytes=end_bytes)
        # Replicas begin with equal values, and sharded parameters are cut once they do.
        if first:
            self._agreed = True
            self.replication.share_tensors(value for _, value in self.ownership.named())
            self.ownership.shard()
        self._tries.setdefault(among["batch"], _TRIES)
        return captured

    def _find_known(
        self, batch: str, prepare: Callable[[], tuple[CapturedCalls, Scheduled]], runs: bool
    ) -> _Prepared | None:
        """The run for a batch like one that was agreed on; ``None``: this rank would have to trace for it.

        A rank must not trace what others do not: from then on its graphs would differ.
        """
        if not self._tries.get(batch):
            return None
        try:
            # A cache miss here would trace on this rank alone. The stance turns it into an exception.
            with torch.compiler.set_stance("fail_on_recompile"):
                return self._prepare(prepare, runs)
        except Exception:  # what it is, all ranks are told when it is raised again, after they have agreed to trace
            self._tries[batch] -= 1
            return None

    def _prepare(self, prepare: Callable[[], tuple[CapturedCalls, Scheduled]], runs: bool) -> _Prepared:
        """Capture and plan on this rank."""
        captured, scheduled = prepare()
        readers = readers_of(scheduled.instructions, captured.programs, captured.primals)
        # With dispatching schedules any rank may run any stage, so every rank needs all parameters.
        if captured.graphs[0].pipeline.structure.schedule.dispatches:  # whatever a later batch is dispatched like
            readers = dict.fromkeys(readers, frozenset(range(self.group.size)))
        self.ownership.refuse_shared_updates(
            (
                primals[position]
                for program, primals in zip(captured.programs, captured.primals, strict=True)
                for position in program.mutations.values()
            ),
            readers,
        )
        plan = self._plans.of(captured, scheduled, None)
        self.ownership.assign_owners(readers)
        self.structure = self.structure or captured.graphs[0].pipeline.structure
        missing = self.ownership.missing_names() if runs else []
        if missing:
            raise RuntimeError(
                f"the model was built without memory, and {missing[0]!r} (of {len(missing)} tensors of this rank) "
                "has no values yet: call model.load(folder) or model.init_weights(fn) after model.trace(…)."
            )
        return _Prepared(captured, plan)

    def _texts_to_compare(self, plan: RankPlan, first: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Texts by name: what is to be the same on all ranks of all pipelines, and on those of one."""
        decided = {"graph": plan.graphs, "plan": plan.digest}
        everywhere = dict(decided) if first and self.group.parts == 1 else {}
        if plan.gathers is not None:
            everywhere[GATHERS] = plan.gathers
        if self.group.replicas is not None:
            everywhere["gradients of stages"] = plan.gradients
        return everywhere, {} if first and self.group.parts == 1 else decided

    def _generator(self, captured: CapturedCalls) -> bytes:
        return random_streams.state_of(self.generator_device(captured)).numpy().tobytes()

    def _make_agreed(
        self,
        captured: CapturedCalls,
        *,
        generators: Sequence[Sequence[Any]],
        end_bytes: EndBytes,
        microbatches: int,
        alone: bool,
    ) -> AgreedCalls:
        """A step that all ranks agree on, with the generator's state that is its pipeline's."""
        draws = any(program.draws for program in captured.programs)
        parts = self.group.parts  # of a replica, each a pipeline; all of them draw alike
        first = 0 if alone else self.group.replica * parts
        # Ranks of one pipeline that began with different states draw from the first one's.
        if draws and len({state for states in generators[first : first + parts] for state in states}) > 1:
            device = self.generator_device(captured)
            random_streams.set_state(device, self.group.sharers.share(random_streams.state_of(device), 0))
        first_states = [states[0] for states in generators[::parts]]
        self.replication.number_streams(None if alone else first_states, microbatches)
        synchronizing = self.replication.synchronizing
        return AgreedCalls(**vars(captured), alone=alone, averaged=synchronizing, end_bytes=end_bytes)

    def run(
        self,
        workers: Workers,
        captured: CapturedCalls,
        kinds: Any,
        scheduled_of: ScheduledOf,
        tangents: Sequence[Sequence[Any]],
        streams: list[random_streams.RandomStream],
        inherited: Sequence[dict[int, Any]],
        *_updates: Any,
    ) -> Finished:
        """Run this rank's instructions of a step, or of its forwards or backwards. Arguments as for :class:`Local`.

        Returns:
            outputs of all ranks, except updated buffers that others own; the gradients that belong to this rank.
        """
        assert isinstance(captured, AgreedCalls)
        scheduled = scheduled_of(captured, kinds)
        instructions = scheduled.instructions
        plan, programs, primals = self._plans.of(captured, scheduled, kinds), captured.programs, captured.primals
        budget = captured.graphs[0].pipeline.budget
        if budget is not None:
            self._warn_of_late_sends(plan.transfers, programs, budget)
        where = {
            (instruction.action.step, instruction.action.microbatch): device
            for device, device_instructions in enumerate(instructions)
            for instruction in device_instructions
        }
        # Outputs are computed on some rank and returned on all of them.
        shared_outputs = [*iterate_shared_outputs(captured, where, self.ownership.owners or {})]
        end = run_end_of(captured, where, shared_outputs, self.group, self.replication.alike, streams[0])
        transport = ProcessTransport(
            self.group,
            plan.transfers,
            streams,
            end,
            overlap=budget is None,
            collectives=[instruction.code.collectives for instruction in instructions[self.group.rank]],
        )
        differentiates = any(program.tangents for program in programs) and (kinds is None or bool(inherited))
        if differentiates:
            shared = find_remote_gradients(
                scheduled_of(captured, None).instructions, programs, primals, self._owners_of
            )
            averaging = None
            if captured.averaged:
                averaging = self.replication.averaging(instructions, programs, primals, shared)
            transport.combining(lambda gradients: sum_gradients(self.group, gradients, shared, averaging), averaging)
        rank, shards = self.group.rank, self.ownership.shards
        replicas = self.group.replicas
        if shards.by_traced:
            assert replicas is not None
            transport.gathering = Gathering(shards, replicas, self._plans.gathers(captured, scheduled, rank))
        finished = run_pipeline(
            workers,
            [instructions[rank]],
            programs,
            primals,
            tangents,
            streams,
            inherited,
            transport=transport,
            offloads=scheduled.offloads[rank : rank + 1],
        )
        if replicas is not None:
            shards.distribute(finished.gradients, captured.averaged, replicas.start_gather)
        self.ownership.distribute(finished.gradients)
        # Outputs that are too large for the end record are broadcast one by one, in the same order on all ranks.
        for output in shared_outputs:
            if output not in end.outputs:
                batch_outputs = finished.outputs[output.microbatch]
                batch_outputs[output.position] = broadcast_value(
                    self.group, batch_outputs[output.position], output.layout, output.root
                )
        replace_updates(captured, where, finished.outputs, rank)
        if differentiates and not captured.averaged:
            self.replication.note_unsynchronized(finished.gradients)
        spans = [[] if device != rank else finished.spans[0] for device in range(self.group.size)]
        return dataclasses.replace(finished, spans=spans)

    def refuse_backward_elsewhere(self, captured: CapturedCalls, scheduled_of: ScheduledOf) -> None:
        """Refuse to differentiate the outputs of a call if a rank has not seen what its backward reads.

        Raises:
            RuntimeError: so it is.
        """
        action = find_unreachable_read(scheduled_of(captured, None).instructions)
        if action is not None:
            raise RuntimeError(
                f"the schedule runs {action} on a rank that has not seen all values of the forward that it reads. When "
                "the model is called, they stay where they are until its output is differentiated: use "
                "forward_backward, which runs forward and backward in one step, or another schedule."
            )

    def _warn_of_late_sends(self, transfers: RankTransfers, programs: Sequence[PipelineProgram], budget: int) -> None:
        """Say once what a budget does not count: messages that are held until the end of the step."""
        late = [
            parcel
            for sends in transfers.sends
            for target, parcel in sends.items()
            if target in transfers.late and not self._warned
        ]
        if not late:
            return
        self._warned = True
        sent = (programs[message.microbatch].values[number] for message in late for number in message.numbers)
        held = sum(tensor_bytes([value]) for value in sent if isinstance(value, torch.Tensor))
        warnings.warn(
            f"roundpipe_fx: rank {self.group.rank} sends values whose sizes depend on data or are symbolic to ranks "
            f"{sorted(transfers.late)}, and holds what it sends there until the end of the step: up to "
            f"{bytes_text(held)} beside the memory_budget of {budget} bytes ({bytes_text(budget)}). Begin stages at "
            "modules of your choice, stages=[…], so that no such value is sent; compile with dynamic=False for batches "
            "of fixed sizes; or give a smaller budget.",
            StepBudgetWarning,
            stacklevel=2,
        )

    def _owners_of(self, key: int) -> frozenset[int]:
        """The ranks that get a tensor's gradient; all, for inputs and for tensors that are not the model's."""
        assert self.ownership.owners is not None
        return self.ownership.owners.get(key, frozenset(range(self.group.size)))

    def before_gradients(self, captured: CapturedCalls) -> None:
        """Gradients of steps inside ``no_sync()`` are averaged now, with those of this step."""
        if isinstance(captured, AgreedCalls) and captured.averaged:
            self.replication.replace_unsynchronized()

    def finish(self, captured: CapturedCalls) -> None:
        """After a step has updated buffers: replicas get the first one's."""
        if isinstance(captured, AgreedCalls) and not captured.alone:
            self.replication.share_tensors(
                primals[position]
                for program, primals in zip(captured.programs, captured.primals, strict=True)
                for position in program.mutations.values()
            )
