"""Calibration: what a CUDA device attains, measured once.

A dozen products, attention both ways, a copy, launches, and the link to the host in both directions take at most two
seconds and a GiB of the device. The rates are rounded to steps of 5 % and kept on disk for the device and PyTorch's
version, so plans are the same from run to run::

    rates of the table ──▶ file of the device ──▶ its rates
                             │ no such file
                             ▼
                           measure ──▶ round ──▶ file       out of memory, too slow: the table's rates

Only a process that drives its device alone measures: ranks that plan together need equal rates, and so does who plans
for a device that is not there. Numbers are not drawn, so generators stay as they are; memory is given back.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from roundpipe_fx.analysis.cost.probe import device_text, run_in_thread
from roundpipe_fx.analysis.cost.roofline import Roofline
from roundpipe_fx.analysis.data_files import cache_folder, is_on, read_data, write_data
from roundpipe_fx.torch_private import ForkedLock, without_modes

log = logging.getLogger(__name__)

_FORMAT = "roundpipe_fx rates 1"
_SECONDS = 2.0
_BYTES = 1 << 30
_STEPS = 48
"""Steps of a factor of ten that rates are rounded to: 5 % each."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PRODUCTS = ((4096, 4096, 4096), (8192, 2048, 2048), (2048, 2048, 8192), (4096, 1024, 4096))
"""Rows, inner size and columns: of layers, their gradients, and narrow ones."""
_PROBE = 512
_PRODUCT_SECONDS = 5e-3
"""On a slow device products are smaller, so that each takes about as long at most."""
_COPIED = 128 << 20
_SENT = 64 << 20
_LAUNCHES = 200
_calibrating = ForkedLock()
_rates: dict[Path, Mapping[str, float] | None] = {}
"""Rates of this process's devices, by file; ``None``: the table's are taken."""


class _TooSlowError(RuntimeError):
    """The device needs more than the seconds that a calibration may take."""


def load_or_calibrate(table: Roofline, device: torch.device) -> Roofline:
    """Load the rates of a CUDA device, or measure them if they are not stored.

    Args:
        table: rates of the table for it.
        device: a CUDA device that is there.

    Returns:
        The table where nothing may be measured: without files on disk, with several processes, while a graph is
        captured, or with deterministic algorithms, which are other kernels.
    """
    # Ranks must plan alike, and each would measure other rates.
    if not is_on() or _has_ranks() or torch.are_deterministic_algorithms_enabled():
        return table
    with _calibrating:
        path = _path(device)
        if path not in _rates:
            if torch.cuda.is_current_stream_capturing():
                return table
            _rates[path] = _read(path, device) or _measure_and_store(path, device)
        rates = _rates[path]
    return table if rates is None else _apply_rates(table, rates, device)


def _has_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _apply_rates(table: Roofline, rates: Mapping[str, float], device: torch.device) -> Roofline:
    halves = torch.float16, torch.bfloat16
    return dataclasses.replace(
        table,
        flops={**table.flops, **{dtype: rates[str(dtype)] for dtype in _DTYPES}},
        bandwidth=rates["memory"],
        host=rates["host"],
        # At most 1: a link that is full in one direction cannot be faster with traffic in both.
        both_ways=min(rates["host both ways"] / rates["host"], 1.0),
        overhead=rates["kernel seconds"],
        launch=rates["launch seconds"],
        attention_forward=dict.fromkeys(halves, rates["attention forward"]),
        attention_backward=dict.fromkeys(halves, rates["attention backward"]),
        rates=f"calibration of the {torch.cuda.get_device_name(device)} with PyTorch {torch.__version__}",
    )


def _header(device: torch.device) -> dict[str, str]:
    return {"format": _FORMAT, "device": device_text(device), "torch": torch.__version__, "settings": _settings()}


def _settings() -> str:
    matmul = torch.backends.cuda.matmul
    return f"{matmul.fp32_precision} {matmul.allow_fp16_accumulation}"


def _path(device: torch.device) -> Path:
    text = f"{device_text(device)}_{torch.__version__}_{_settings()}"
    return cache_folder() / f"rates_{''.join(letter if letter.isalnum() else '_' for letter in text)}.json"


def _read(path: Path, device: torch.device) -> Mapping[str, float] | None:
    try:
        rates = read_data(path, _header(device))
        if set(rates) != set(_names()) or not all(0 < float(value) < math.inf for value in rates.values()):
            raise ValueError("it has other rates")
        return {name: float(value) for name, value in rates.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.info("the file of rates %s is ignored: %s", path, error)
        return None


def _names() -> tuple[str, ...]:
    others = ("memory", "host", "host both ways", "kernel seconds", "launch seconds")
    return (*map(str, _DTYPES), "attention forward", "attention backward", *others)


def _measure_and_store(path: Path, device: torch.device) -> Mapping[str, float] | None:
    """Measure and store; ``None``: it was not possible, which the log says."""
    reserved = torch.cuda.memory_reserved(device)
    rates, failure = None, ""
    try:
        rates = {name: _round_rate(rate) for name, rate in _measure(device).items()}
    except (RuntimeError, NotImplementedError) as error:  # memory ran out, or a kernel is missing
        failure = str(error)
    # Outside the handler nothing holds tensors any more.
    # Blocks that the measurement has left in the allocator are returned, and others that nothing uses with them.
    if torch.cuda.memory_reserved(device) > reserved:
        torch.cuda.empty_cache()
    if rates is None:
        log.warning("%s is not calibrated, so the table's rates are used: %s", device, failure)
        return None
    try:
        write_data(path, _header(device), rates)
    except OSError as error:
        log.warning("the rates of %s are not stored: %s", device, error)
    return rates


def _round_rate(rate: float) -> float:
    """The nearest step."""
    # Steps of 5 %: ``10**(1/48)`` is 1.049. Noise between runs rarely crosses a step, and then plans stay the same.
    return float(f"{10 ** (round(_STEPS * math.log10(rate)) / _STEPS):.4g}")


def _measure(device: torch.device) -> dict[str, float]:
    free, _ = torch.cuda.mem_get_info(device)
    if free < _BYTES:
        raise torch.OutOfMemoryError(f"{free} bytes of it are free, and it would take up to {_BYTES}")
    with without_modes(), torch.inference_mode(False), torch.accelerator.device_index(device.index):
        return _Clock(device, time.perf_counter() + _SECONDS).rates()


@dataclasses.dataclass(frozen=True)
class _Clock:
    """Times work on a device until a deadline.

    Attributes:
        deadline: as ``time.perf_counter`` tells the time.
    """

    device: torch.device
    deadline: float

    def rates(self) -> dict[str, float]:
        """All rates, as measured.

        Raises:
            _TooSlowError: the deadline has passed.
        """
        with torch.no_grad():
            rates = {str(dtype): self._time_products(dtype) for dtype in _DTYPES}
            # In a thread, which has none of the caller's hooks and transforms. Autograd's thread lets go of gradients a
            # little later; other work follows, so they are gone at the end.
            rates |= run_in_thread(functools.partial(self._time_attention, rates[str(torch.bfloat16)]))
            rates |= self._time_memory_and_launches()
            return rates | self._time_link()

    def _time_run(self, run: Callable[[], Any], times: int = 4) -> float:
        """Seconds of a run on the device, once it has run before."""
        # The first run loads kernels and chooses algorithms.
        run()
        if time.perf_counter() > self.deadline:
            raise _TooSlowError(f"it takes longer than {_SECONDS:g} s")
        start, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end) * 1e-3 / times, 1e-9)

    def _draw_numbers(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Numbers of both signs: products of zeros take less power, and are faster."""
        return torch.arange(math.prod(shape), device=self.device, dtype=torch.float32).sin_().to(dtype).view(shape)

    def _time_products(self, dtype: torch.dtype) -> float:
        """Operations per second of all products together."""
        # ``2 n³`` operations of a small product give a first idea of the rate, and so of the sizes that take
        # `_PRODUCT_SECONDS`.
        probe = self._draw_numbers(_PROBE, _PROBE, dtype=dtype)
        rate = 2 * _PROBE**3 / self._time_run(lambda: probe @ probe)
        flops, seconds = 0, 0.0
        for sizes in _PRODUCTS:
            # Each side is divided by the cube root, so that the product has as many operations fewer.
            smaller = max(1.0, 2 * math.prod(sizes) / rate / _PRODUCT_SECONDS) ** (1 / 3)
            rows, inner, columns = (max(32, int(size / smaller) // 32 * 32) for size in sizes)
            left = self._draw_numbers(rows, inner, dtype=dtype)
            right = self._draw_numbers(columns, inner, dtype=dtype).t()
            duration = self._time_run(functools.partial(torch.mm, left, right))
            flops, seconds = flops + 2 * rows * inner * columns, seconds + duration
            # Later sizes are chosen by the best rate so far: the probe is too small to keep the device busy.
            rate = max(rate, 2 * rows * inner * columns / duration)
        return flops / seconds

    def _time_attention(self, rate: float) -> dict[str, float]:
        """Operations per second of attention, causal as most models have it."""
        tokens, heads, width = 2048, 16, 128
        # Seven products of the forward and the backward, of which a causal mask halves the scores.
        while tokens > 64 and 7 * 2 * heads * tokens**2 * width / 2 > rate * _PRODUCT_SECONDS:
            tokens //= 2
        queries, keys, values = (self._draw_numbers(2, heads, tokens, width, dtype=torch.bfloat16) for _ in range(3))
        attend = functools.partial(scaled_dot_product_attention, queries, keys, values, is_causal=True)
        flops = 2 * 4 * heads * width * tokens * (tokens + 1) // 2
        with torch.accelerator.device_index(self.device.index), torch.nn.attention.sdpa_kernel(_FUSED):
            with torch.no_grad():
                forward = self._time_run(attend)
            with torch.enable_grad():
                leaves = [value.requires_grad_() for value in (queries, keys, values)]
                result = attend()
                incoming = result.detach()
                backward = self._time_run(lambda: torch.autograd.grad(result, leaves, incoming, retain_graph=True))
        # The backward has five products where the forward has two.
        return {"attention forward": flops / forward, "attention backward": 5 * flops / 2 / backward}

    def _time_memory_and_launches(self) -> dict[str, float]:
        source, target, number = (
            torch.zeros(size, dtype=torch.uint8, device=self.device) for size in (_COPIED, _COPIED, 1)
        )
        copy = self._time_run(lambda: target.copy_(source))

        def launch() -> None:
            for _ in range(_LAUNCHES):
                number.add_(1)

        launch()
        torch.cuda.synchronize(self.device)
        # The host's seconds: launches return before the device has run them.
        began = time.perf_counter()
        launch()
        host = (time.perf_counter() - began) / _LAUNCHES
        torch.cuda.synchronize(self.device)
        # Behind copies that take longer than the launches, the device never waits for the host.
        start, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        for _ in range(min(math.ceil(2 * host * _LAUNCHES / copy), _LAUNCHES)):
            target.copy_(source)
        start.record()
        launch()
        end.record()
        end.synchronize()
        kernel = max(start.elapsed_time(end) * 1e-3 / _LAUNCHES, 1e-9)
        # A copy reads and writes each byte.
        return {"memory": 2 * _COPIED / copy, "launch seconds": host, "kernel seconds": min(kernel, host)}

    def _time_link(self) -> dict[str, float]:
        """Bytes per second of each direction of the link to the host, alone and both at once."""
        on_device = [torch.zeros(_SENT, dtype=torch.uint8, device=self.device) for _ in range(2)]
        streams = [torch.Stream(self.device) for _ in range(2)]
        with _page_lock(_SENT) as source, _page_lock(_SENT) as target:

            def send(stream: torch.Stream, to: torch.Tensor, content: torch.Tensor) -> None:
                stream.wait_stream(torch.accelerator.current_stream(self.device))
                with stream:
                    to.copy_(content, non_blocking=True)

            def join(*used: torch.Stream) -> None:
                for stream in used:
                    torch.accelerator.current_stream(self.device).wait_stream(stream)

            def incoming() -> None:
                send(streams[0], on_device[0], source)
                join(streams[0])

            def outgoing() -> None:
                send(streams[1], target, on_device[1])
                join(streams[1])

            def both() -> None:
                send(streams[0], on_device[0], source)
                send(streams[1], target, on_device[1])
                join(*streams)

            try:
                # The slower direction: a plan copies in both.
                alone = max(self._time_run(incoming), self._time_run(outgoing))
                return {"host": _SENT / alone, "host both ways": _SENT / self._time_run(both)}
            finally:
                torch.cuda.synchronize(self.device)  # before the host's memory is freed


_FUSED = [
    torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION,
    torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
]


@contextmanager
def _page_lock(size: int) -> Iterator[torch.Tensor]:
    """Memory of the host that a device copies from by itself. PyTorch's own would stay allocated."""
    cudart: Any = torch.cuda.cudart()
    memory = torch.zeros(size, dtype=torch.uint8)
    code = int(cudart.cudaHostRegister(memory.data_ptr(), size, 0))
    if code:
        raise RuntimeError(f"memory of the host cannot be page-locked: error {code}")
    try:
        yield memory
    finally:
        cudart.cudaHostUnregister(memory.data_ptr())
