"""The loss outside: what a loss takes that the caller computes from a model's outputs.

Between the forward and the backward runs code that nobody traced. Where a model returns no loss, its outputs are what
the loss is computed from, and a plan leaves room for that.

- A cross-entropy holds three times their bytes: the logarithms of the softmax, the gradient of these, and the gradient
  of the outputs, which then comes in. It is the usual loss, and where outputs are large, the loss of a language model:
  one that is given nothing but numbers of words.
- The mean of a squared error that is written out, ``((output - target) ** 2).mean()``, holds five times their bytes:
  the difference, the mean's gradient, and three intermediate results of the square's. The number that ``mse_loss``
  returns stands in memory of the output's size, and is there until the backward is over. Models that are given numbers
  of another kind may be trained so.
- Where a model returns a number, that is taken to be the loss, and nothing is computed from the rest. Steps may show
  otherwise: gradients of other outputs come in. Then the next plan leaves room for a loss of all of them. So it does
  for several numbers, which somebody has to add up.
- Under autocast losses compute with four bytes a number, whatever the outputs have.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from roundpipe_fx.analysis.cost.of_node import tensor_bytes
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, tensor_values

__all__ = ["expect_loss", "lasting_bytes", "loss_bytes"]

_CROSS_ENTROPY = (3, 0)
_SQUARED_ERROR = (5, 1)
"""How many times an output's bytes a loss takes at most, and until the backward is over."""
_NUMBER = 8
"""Bytes of the loss itself, and of how many labels there are."""


def expect_loss(joint: JointGraph, autocast: Collection[str], brought: Collection[str] = ()) -> JointGraph:
    """Note how much a loss outside may take of each output.

    Args:
        joint: a captured graph.
        autocast: types of devices for which autocast is on.
        brought: names of incoming gradients that steps have brought although there is a number to be the loss.
    """
    given = [value for node in joint.primals if node not in joint.parameters for value in tensor_values(node)]
    # A model that has its own cross-entropy returns other things for another loss.
    words = bool(given) and not brought and not any(value.is_floating_point() for value in given)
    for node in joint.tangents:
        if node.name in brought:
            node.meta[Mark.BROUGHT] = True
        for value in tensor_values(node):
            wider = max(4 // value.dtype.itemsize, 1) if value.device.type in autocast else 1
            most, lasting = _CROSS_ENTROPY if words else _SQUARED_ERROR
            node.meta[Mark.LOSS_TIMES] = wider * most, wider * lasting
    return joint


def loss_bytes(tangents: Collection[fx.Node], granularity: int = 1) -> int:
    """Bytes that a loss outside takes at most at one time, before the incoming gradients are counted.

    Args:
        tangents: the incoming gradients that a step is expected to bring. If one alone is of a single number, that is
            the loss, and nothing is left to do outside.
        granularity: what the device's allocator rounds sizes up to, in bytes.
    """
    return _bytes(tangents, granularity, 0)


def lasting_bytes(tangents: Collection[fx.Node], granularity: int = 1) -> int:
    """Bytes of the loss and its gradient, which are there until the backward is over; the arguments are the same."""
    return _bytes(tangents, granularity, 1)


def _bytes(tangents: Collection[fx.Node], granularity: int, which: int) -> int:
    if not _is_outside(tangents):
        return 0
    sizes = [
        tensor_bytes([value])
        for node in tangents
        for value in tensor_values(node)
        for _ in range(node.meta.get(Mark.LOSS_TIMES, _SQUARED_ERROR)[which])
    ]
    return sum(_rounded(size, granularity) for size in (*sizes, _NUMBER, _NUMBER))


def _is_outside(tangents: Collection[fx.Node]) -> bool:
    numbers = sum(value.dim() == 0 for node in tangents for value in tensor_values(node))
    beside = any(Mark.BROUGHT in node.meta for node in tangents)
    return bool(tangents) and (numbers != 1 or beside)


def _rounded(size: int, granularity: int) -> int:
    return -(-size // granularity) * granularity
