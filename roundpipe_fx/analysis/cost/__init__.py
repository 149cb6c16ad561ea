"""Costs of operations: seconds, modelled or measured, and workspaces of kernels in bytes."""

from __future__ import annotations

import dataclasses

import torch

from roundpipe_fx.analysis.cost.added import annotate_added
from roundpipe_fx.analysis.cost.calibration import load_or_calibrate
from roundpipe_fx.analysis.cost.launches import count_launches, seconds_with_launches
from roundpipe_fx.analysis.cost.measured import MeasuredCosts
from roundpipe_fx.analysis.cost.model import CostModel, annotate_node, tensor_bytes
from roundpipe_fx.analysis.cost.network import Network
from roundpipe_fx.analysis.cost.operand_rules import results_on_host
from roundpipe_fx.analysis.cost.real_layout import (
    is_plainly_contiguous,
    layout_of,
    note_real_values,
    note_sparse_bytes,
    predict_real_values,
    probe_small_values,
)
from roundpipe_fx.analysis.cost.roofline import DEVICES, Roofline, count_flops, find_roofline
from roundpipe_fx.analysis.cost.workspace import COMPILED_STAGES, depends_on_data, learned_name, predict_workspaces

__all__ = [
    "COMPILED_STAGES",
    "DEVICES",
    "CostModel",
    "MeasuredCosts",
    "Roofline",
    "annotate_added",
    "annotate_node",
    "cost_model",
    "count_flops",
    "count_launches",
    "depends_on_data",
    "find_roofline",
    "is_plainly_contiguous",
    "layout_of",
    "learned_name",
    "note_real_values",
    "note_sparse_bytes",
    "predict_real_values",
    "predict_workspaces",
    "probe_small_values",
    "results_on_host",
    "seconds_with_launches",
    "tensor_bytes",
]


def cost_model(kind: str, device: torch.device, name: str | None = None, network: Network | None = None) -> CostModel:
    """The cost model of an option.

    Args:
        kind: ``"roofline"`` or ``"measured"``.
        device: the device that the work runs on; a CUDA device that is there is calibrated.
        name: name of a device in :data:`DEVICES` to model instead of ``device``.
        network: the links over which collectives of the graph run; ``None``: the usual ones of such devices.
    """
    roofline = find_roofline(device, name)
    if network is not None:
        roofline = dataclasses.replace(roofline, network=network)
    elif name is None and device.type == "cuda" and torch.cuda.is_available():
        roofline = load_or_calibrate(roofline, device)
    return roofline if kind == "roofline" else MeasuredCosts.load(roofline, device)
