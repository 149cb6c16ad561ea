"""Values of pipelines whose model lies on CUDA devices leave for the host."""

from __future__ import annotations

import _thread
import contextlib
import copy
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import roundpipe_fx
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.runtime.device_streams import AcceleratorDeviceStreams
from roundpipe_fx.runtime.host_buffers import HostBuffers
from roundpipe_fx.runtime.value_offloading import ValueOffloading
from tests.comparison import Step, assert_bitwise
from tests.compat.checkpointing.models import BATCH, Model, Selective
from tests.golden_models import GOLDEN
from tests.long import long_but
from tests.pipeline.steps import Blocks, assert_close, left_behind, squares

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]

WIDTH, ROWS = 64, 8192


def _devices() -> list[list[str] | None]:
    return [None, *([["cuda:0", "cuda:1"]] if torch.cuda.device_count() > 1 else [])]


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator).cuda() for _ in range(2))
    return x, y


def _compiled(model: nn.Module, **options: Any) -> roundpipe_fx.CompiledModule:
    kwargs = {"num_microbatches": 8, "tiling": "never", "stage_compiler": "eager", "dynamic": False, **options}
    return roundpipe_fx.compile(model, **kwargs)


def _stepped(model: nn.Module, steps: int = 3, **options: Any) -> tuple[Step, roundpipe_fx.Plan, list[int]]:
    """The last step's gradients, the plan, and the most bytes on each device during that step."""
    own = copy.deepcopy(model)
    x, y = _batch()
    compiled = _compiled(own, **options)
    for _ in range(steps):
        own.zero_grad()
        torch.manual_seed(0)
        with contextlib.ExitStack() as stack:
            peaks = [
                stack.enter_context(roundpipe_fx.measure_peak(f"cuda:{device}"))
                for device in range(torch.cuda.device_count())
            ]
            loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
    return left_behind(own, loss), compiled.plan, [peak.bytes for peak in peaks]


def _between(model: nn.Module, ample: roundpipe_fx.Plan, share: float, **options: Any) -> int:
    """A budget between what is needed without a host at the least, and what an ample plan takes."""
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        _stepped(model, memory_budget=1, host_budget=0, **options)
    return int(refused.value.minimum + share * (max(ample.timing.peak_bytes) - refused.value.minimum))


@pytest.mark.parametrize(
    "schedule",
    long_but(
        ["gpipe", "1f1b", "interleaved", "zero_bubble", "roundpipe", "auto"], quick={"1f1b", "zero_bubble", "roundpipe"}
    ),
)
def test_values_leave_within_a_budget_with_the_same_bits(schedule: str, pools: list[HostBuffers]) -> None:
    model = Blocks(WIDTH, 8, dropout=0.1).cuda()
    for devices in _devices()[-1:] if schedule != "1f1b" else _devices():
        options = {"devices": devices, "schedule": schedule}
        reference, ample, _ = _stepped(model, **options)
        assert ample.timing.offloads == () and not ample.host_bytes
        budget = _between(model, ample, 0.05, **options)
        without_bits, without, _ = _stepped(model, memory_budget=budget, host_budget=0, **options)
        assert without.timing.offloads == ()
        pools.clear()
        found, plan, measured = _stepped(model, memory_budget=budget, **options)
        # Which device RoundPipe's dispatch runs a stage on depends on what is recomputed, and so does where sums begin.
        compare = assert_close if schedule in ("roundpipe", "auto") else assert_bitwise
        compare(found, reference)
        compare(without_bits, reference)
        for device, peak in enumerate(plan.timing.peak_bytes):
            assert measured[device] <= peak <= budget
        assert plan.pipeline.makespan <= without.pipeline.makespan
        assert sum(pool.bytes for pool in pools) <= plan.host_bytes == plan.pipeline.host_value_bytes
        if schedule in ("gpipe", "1f1b"):
            assert plan.timing.offloads and plan.pipeline.makespan < without.pipeline.makespan
            assert devices is not None or plan.recompute_seconds < without.recompute_seconds


def test_values_are_on_the_host_while_a_loss_is_computed_outside(pools: list[HostBuffers]) -> None:
    """A call runs all forwards, and what its output's backward reads waits for it on the host."""
    model = Blocks(WIDTH, 8, dropout=0.1).cuda()
    x, y = _batch()
    steps = []
    needed = 0
    for share in (None, 0.3, 0.3):
        own = copy.deepcopy(model)
        compiled = _compiled(own, memory_budget=None if share is None else int(share * needed))
        for seed in (1, 0):
            own.zero_grad()
            torch.manual_seed(seed)
            with roundpipe_fx.measure_peak("cuda") as peak:
                loss = squares(compiled(x), y)
                loss.backward()
        steps.append(left_behind(own, loss))
        needed = needed or max(compiled.plan.timing.peak_bytes)
        assert peak.bytes <= compiled.plan.timing.peak_bytes[0]
        assert bool(compiled.plan.timing.offloads) == (share is not None)
        assert sum(pool.bytes for pool in pools) <= compiled.plan.host_bytes
        pools.clear()
    for step in steps[1:]:
        assert_bitwise(step, steps[0])


def test_several_calls_have_values_on_the_host_at_once(pools: list[HostBuffers]) -> None:
    model = Blocks(WIDTH, 8, dropout=0.1).cuda()
    x, y = _batch()
    compiled = _compiled(model)
    torch.manual_seed(0)
    losses = [squares(compiled(part), y) for part in (x, x.flip(0))]
    sum(losses).backward()
    reference = left_behind(model, losses[1])
    needed = max(compiled.plan.timing.peak_bytes)
    model.zero_grad()
    compiled = _compiled(model, memory_budget=needed * 3 // 10)
    output = compiled(x)
    held = sum(pool.bytes for pool in pools)
    del output  # and what its backward would have read
    assert held > sum(pool.bytes for pool in pools) == 0
    torch.manual_seed(0)
    with pytest.warns(roundpipe_fx.StepBudgetWarning, match="2 calls of a pipelined model"):
        losses = [squares(compiled(part), y) for part in (x, x.flip(0))]
    assert sum(pool.bytes for pool in pools) == 2 * held
    sum(losses).backward()
    assert_bitwise(left_behind(model, losses[1]), reference)
    assert sum(pool.bytes for pool in pools) <= 2 * compiled.plan.host_bytes


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[HostBuffers]:
    """The buffers that were taken from, by device."""
    known: list[HostBuffers] = []
    take = HostBuffers.take

    def taken(self: HostBuffers, size: int) -> torch.Tensor:
        if self not in known:
            known.append(self)
        return take(self, size)

    monkeypatch.setattr(HostBuffers, "take", taken)
    return known


@pytest.mark.parametrize(
    "name",
    long_but(["tied_transformer", "mixture_of_experts", "encoder_decoder", "unet"], quick={"tied_transformer", "unet"}),
)
def test_bits_of_models_with_skips_decisions_and_buffers(name: str) -> None:
    make, make_batch, _ = GOLDEN[name]
    torch.manual_seed(0)
    model = make().cuda()
    batch = {key: torch.cat([value] * 3).cuda() for key, value in make_batch().items()}
    sent = 0
    for devices in _devices():
        steps: list[Step] = []
        peak = None
        for part in (None, 0.9, 0.7):
            own = copy.deepcopy(model)
            budget = 1.0 if part is None or peak is None else int(part * peak)
            try:
                compiled = _compiled(own, devices=devices, num_microbatches=3, memory_budget=budget)
                torch.manual_seed(0)
                steps.append(left_behind(own, compiled.forward_backward(**batch)))
            except roundpipe_fx.InfeasibleBudgetError as refused:
                compiled = _compiled(own, devices=devices, num_microbatches=3, memory_budget=refused.minimum)
                torch.manual_seed(0)
                steps.append(left_behind(own, compiled.forward_backward(**batch)))
            peak = peak or max(compiled.plan.timing.peak_bytes)
            sent += len(compiled.plan.timing.offloads)
        for step in steps[1:]:
            assert_bitwise(step, steps[0])
    assert sent


def test_a_host_budget_is_kept_by_recomputing(pools: list[HostBuffers]) -> None:
    model = Blocks(WIDTH, 8).cuda()
    reference, ample, _ = _stepped(model)
    budget = _between(model, ample, 0.2)
    _, free, _ = _stepped(model, memory_budget=budget)
    for room in (free.host_bytes // 2, free.host_bytes // 8, 1):
        pools.clear()
        found, plan, _ = _stepped(model, memory_budget=budget, host_budget=room)
        assert_bitwise(found, reference)
        assert plan.host_bytes <= room and sum(pool.bytes for pool in pools) <= room
        assert plan.recompute_seconds > free.recompute_seconds


def test_the_least_budget_that_is_named_can_be_met() -> None:
    model = Blocks(WIDTH, 8).cuda()
    reference, *_ = _stepped(model)
    least = {}
    for room in (0, None):
        with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
            _stepped(model, memory_budget=1, host_budget=room)
        least[room] = refused.value.minimum
        found, plan, measured = _stepped(model, memory_budget=least[room], host_budget=room)
        assert_bitwise(found, reference)
        assert measured[0] <= max(plan.timing.peak_bytes) <= least[room]
    assert least[None] <= least[0]


@pytest.mark.skipif(not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="of a later version of PyTorch")
def test_policies_that_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {name: value.cuda() for name, value in BATCH.items()}

    def stepped(model: nn.Module, **options: Any) -> tuple[Step, roundpipe_fx.Plan]:
        torch._dynamo.reset()
        model = model.cuda()
        compiled = _compiled(model, num_microbatches=4, stages=4, **options)
        torch.manual_seed(0)
        return left_behind(model, compiled.forward_backward(**batch)), compiled.plan

    reference, plan = stepped(Model(plain=True))
    assert not plan.timing.offloads
    for name in ("MUST_SAVE", "PREFER_CPU_OFFLOAD"):
        monkeypatch.setattr(Selective, "named", getattr(CheckpointPolicy, name))
        found, plan = stepped(Selective())
        assert_bitwise(found, reference)
        assert not plan.timing.offloads
    monkeypatch.setattr(Selective, "named", CheckpointPolicy.MUST_CPU_OFFLOAD)
    for options in ({"recompute": "full"}, {"memory_budget": 1.0}, {"host_budget": 0}):
        found, plan = stepped(Selective(), **options)
        assert_bitwise(found, reference)
        assert plan.timing.offloads and plan.host_bytes > 0


def test_a_step_after_one_that_failed_has_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Blocks(WIDTH, 8).cuda()
    reference, ample, _ = _stepped(model)
    own = copy.deepcopy(model)
    compiled = _compiled(own, memory_budget=_between(model, ample, 0.2))
    x, y = _batch()
    reload, left = ValueOffloading.reload, [20]

    def failing(self: ValueOffloading, place: int) -> None:
        left[0] -= bool(self._at(place).reloads)
        if left[0] < 0:
            raise OSError("a device was lost")
        reload(self, place)

    with monkeypatch.context() as patched:
        patched.setattr(ValueOffloading, "reload", failing)
        with pytest.raises(OSError, match="a device was lost"):
            compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert all(parameter.grad is None for parameter in own.parameters())
    torch.manual_seed(0)
    loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert compiled.plan.timing.offloads
    assert_bitwise(left_behind(own, loss), reference)


def test_a_step_after_an_interrupted_one_has_its_bits(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Its copies are still on their way when the caller is interrupted, into memory that is freed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    model = Blocks(WIDTH, 8).cuda()
    reference, ample, _ = _stepped(model)
    own = copy.deepcopy(model)
    compiled = _compiled(own, memory_budget=_between(model, ample, 0.2))
    x, y = _batch()
    interrupted: list[int] = []
    synchronized: list[torch.device] = []
    reload, synchronize = ValueOffloading.reload, AcceleratorDeviceStreams.synchronize_copies

    def interrupting(self: ValueOffloading, place: int) -> None:
        reload(self, place)
        if self._at(place).reloads and not interrupted:
            interrupted.append(place)
            _thread.interrupt_main()
            time.sleep(0.5)  # until it has noticed

    def counting(self: AcceleratorDeviceStreams) -> None:
        synchronized.append(self.device)
        synchronize(self)

    with monkeypatch.context() as patched:
        patched.setattr(ValueOffloading, "reload", interrupting)
        patched.setattr(AcceleratorDeviceStreams, "synchronize_copies", counting)
        with pytest.raises(KeyboardInterrupt):
            compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert synchronized
    assert all(parameter.grad is None for parameter in own.parameters())
    torch.manual_seed(0)
    loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert compiled.plan.timing.offloads
    assert_bitwise(left_behind(own, loss), reference)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_slow_link_makes_no_step_longer_than_without_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where recomputation has filled the waits of the devices: plans for the link leave less of it to fill."""
    monkeypatch.setattr(Pipelining, "host_bandwidth", lambda self, bandwidth: 1e8)
    model = Blocks(WIDTH, 4).cuda()
    x = _batch()[0][:1024].clone()

    def planned(budget: int | None, **options: Any) -> roundpipe_fx.Plan:
        own = copy.deepcopy(model)
        compiled = _compiled(
            own,
            num_microbatches=2,
            devices=["cuda:0", "cuda:1"],
            schedule="gpipe",
            memory_budget=budget,
            **options,
        )
        return compiled.trace(x, labels=x, loss_fn=squares)

    top = max(planned(None).timing.peak_bytes)
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        planned(1, host_budget=0)
    least = refused.value.minimum
    for share in (0.1, 0.3, 0.5, 0.7):
        budget = int(least + share * (top - least))
        without = planned(budget, host_budget=0)
        assert planned(budget).pipeline.makespan <= without.pipeline.makespan


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")
def test_who_made_what_another_device_reads_does_not_keep_it() -> None:
    """Between forwards and backwards a value is where it is read next; the model is on the host here."""
    model = Blocks(32, 8)
    x, y = (value[:, :32] for value in _batch())
    x, y = x[:510].cpu(), y[:510].cpu()

    def compiled_for(budget: int) -> roundpipe_fx.CompiledModule:
        devices = ["cuda:0", "cuda:1", "cuda:2"]
        own = copy.deepcopy(model)
        return _compiled(own, num_microbatches=3, devices=devices, schedule="interleaved", memory_budget=budget)

    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        compiled_for(1)(x)
    for budget in (refused.value.minimum, refused.value.minimum * 11 // 10):
        compiled = compiled_for(budget)
        for _ in range(2):
            compiled.zero_grad()
            with contextlib.ExitStack() as stack:
                peaks = [stack.enter_context(roundpipe_fx.measure_peak(f"cuda:{device}")) for device in range(3)]
                squares(compiled(x), y).backward()
        assert all(peak.bytes <= planned for peak, planned in zip(peaks, compiled.plan.timing.peak_bytes, strict=True))
        assert max(compiled.plan.timing.peak_bytes) <= budget
