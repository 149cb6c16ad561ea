"""Rates of devices have sources, follow PyTorch's settings, and count launches that a device does not hide."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from roundpipe_fx.analysis.cost import DEVICES, annotate_node, find_roofline, seconds_with_launches
from roundpipe_fx.analysis.cost.device_rates import ARCHITECTURES, Rate
from roundpipe_fx.ir.joint_graph import Mark, Phase
from roundpipe_fx.passes.annotate import annotate
from tests.capturing import capture_joint

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), matmul.allow_fp16_accumulation
    yield
    torch.set_float32_matmul_precision(before[0])
    matmul.allow_fp16_accumulation = before[1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_rate_has_a_source_and_is_below_its_peak(name: str) -> None:
    peaks, shares = ARCHITECTURES[name]
    for field in dataclasses.fields(shares):
        rate = getattr(shares, field.name)
        assert isinstance(rate, Rate) and rate.source
        assert 0 < rate.value < (1e-4 if field.name.endswith("seconds") else 1)
    roofline = DEVICES[name]
    assert roofline.flops[torch.bfloat16] < peaks.half and roofline.bandwidth < peaks.memory
    assert roofline.host < peaks.host and roofline.rates == f"table of the {name}"


def test_products_are_those_of_the_settings() -> None:
    peaks, shares = ARCHITECTURES["RTX 4090"]
    plain = find_roofline(CUDA, "RTX 4090")
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    other = find_roofline(CUDA, "RTX 4090")
    assert other.rates == "table of the RTX 4090, TF32, sums in float16"
    assert other.flops[torch.float16] == shares.products.value * peaks.half_sums > 1.9 * plain.flops[torch.float16]
    assert other.flops[torch.bfloat16] == plain.flops[torch.bfloat16]
    assert other.attention_forward == plain.attention_forward  # kernels of attention sum in float32
    assert find_roofline(CUDA, "A100").flops[torch.float32] == pytest.approx(8 * DEVICES["A100"].flops[torch.float32])
    assert find_roofline(CUDA, "cpu") == DEVICES["cpu"]


def test_who_takes_the_rates_of_another_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    assert find_roofline(CUDA).rates == "table of the A100, which the NVIDIA B200 is taken to be like"
    assert find_roofline(CUDA, "H100").rates == "table of the H100"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert find_roofline(CUDA) == DEVICES["H200"]


@pytest.mark.parametrize("name", ["cpu", "H200"])
@pytest.mark.parametrize("size", [1, 1 << 26])
def test_launches_count_where_the_device_does_not_hide_them(name: str, size: int) -> None:
    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x.sin()
        return x

    device = DEVICES[name]
    joint = annotate(capture_joint(many, torch.empty(size, requires_grad=True)), device)
    nodes = list(joint.in_phase(Phase.FORWARD))
    assert len(nodes) == 20
    work = sum(node.meta[Mark.SECONDS] for node in nodes)
    together = seconds_with_launches(nodes, device, eager=True)
    if name == "H200" and size == 1:
        assert together == pytest.approx(20 * device.launch) and together > work
    else:
        assert together == work


def test_rows_of_a_table_are_read_and_not_all_of_it() -> None:
    def look_up(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(rows, weight)

    weight, rows = torch.empty(1 << 20, 64, requires_grad=True), torch.zeros(8, dtype=torch.long)
    joint = annotate(capture_joint(look_up, weight, rows), DEVICES["H200"])
    (node,) = (node for node in joint.in_phase(Phase.FORWARD) if "embedding" in node.name)
    assert node.meta[Mark.SECONDS] == DEVICES["H200"].seconds(0, 2 * 8 * 64 * 4 + 8 * 8)
    annotate_node(node, DEVICES["cpu"])
    assert node.meta[Mark.SECONDS] > weight.nbytes / DEVICES["cpu"].bandwidth
