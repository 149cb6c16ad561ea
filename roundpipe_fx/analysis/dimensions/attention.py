"""Fused attention: batches and heads are independent, and rows of queries where no causal mask counts them.

Where several heads of queries share one of keys, heads of queries are the product of those of keys and of the heads in
a group: with 8 heads of queries and 2 of keys, heads 0 to 3 of queries read head 0 of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundpipe_fx.analysis.dimensions.labels import CallDims, Dim, Labels, Rule, Unknown, same_size
from roundpipe_fx.analysis.dimensions.operands import Call

aten = torch.ops.aten


class _Attention:
    """Dimensions of an attention's tensors, all ``[batch, heads, rows, width]``."""

    def __init__(self, call: Call, labels: Labels) -> None:
        # Tiles would draw other random numbers than the whole.
        if call["dropout_p"] != 0.0:
            raise Unknown
        self.call, self.labels = call, labels
        query, key, value = (call.shape(name) for name in ("query", "key", "value"))
        if len(query) != 4 or not same_size(query[0], key[0]):
            raise Unknown
        batch = labels.new(query[0])
        heads, key_heads = _heads(query[1], key[1], labels)
        # A causal mask counts rows from the first.
        rows, keys = labels.new(query[2], mixed=call["is_causal"]), labels.new(key[2], mixed=True)
        width = labels.new(query[3], mixed=True)
        self.query = [batch, heads, rows, width]
        self.key = [batch, key_heads, keys, width]
        self.value = [batch, key_heads, keys, labels.new(value[3], mixed=True)]
        self.output = [batch, heads, rows, self.value[-1]]
        # Keys are mixed: a row's softmax runs over all of them.
        self.scores = [batch, heads, rows, keys]

    def statistics(self, shape: Sequence[Any]) -> list[Dim]:
        """Of the log-sum-exp, whose rows some kernels pad."""
        batch, heads, rows, _ = self.query
        # Some kernels round the number of rows up (to a multiple of 32), and then their statistics are no tile of any
        # row.
        if same_size(shape[2], self.call.shape("query")[2]):
            return [batch, heads, rows]
        self.labels.mix([rows])
        return [batch, heads, self.labels.new(shape[2], mixed=True)]

    def operands(self) -> dict[str, list[Sequence[Dim]]]:
        """Of all tensors that the call reads."""
        known = {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "out": self.output,
            "grad_out": self.output,
            "grad_out_": self.output,
        }
        operands: dict[str, list[Sequence[Dim]]] = {}
        for name in self.call.tensors:
            shape = self.call.shape(name)
            if name in ("attn_mask", "attn_bias"):
                operands[name] = [self.labels.same(shape, self.scores)]
            elif name == "logsumexp":
                operands[name] = [self.statistics(shape)]
            else:  # states of random numbers and sequence lengths are not divided
                operands[name] = [known.get(name) or self.labels.all_mixed(shape)]
        return operands


def _heads(queries: Any, keys: Any, labels: Labels) -> tuple[Dim, Dim]:
    """The dimensions of the heads of queries and of keys."""
    if same_size(queries, keys):
        heads = labels.new(queries)
        return heads, heads
    if not (isinstance(queries, int) and isinstance(keys, int) and keys and queries % keys == 0):
        return labels.new(queries, mixed=True), labels.new(keys, mixed=True)
    key_heads = labels.new(keys)
    # The second label is of the heads in a group. Gradients of keys and values do not have it: they are sums over them.
    return (*key_heads, *labels.new(queries // keys)), key_heads


def _forward(call: Call, labels: Labels) -> CallDims:
    """Label a forward's results; those after the output and the log-sum-exp have no meaning without dropout."""
    attention = _Attention(call, labels)
    _, statistics, *others = call.results
    results: list[Sequence[Dim]] = [attention.output, attention.statistics(statistics)]
    return attention.operands(), [*results, *(labels.all_mixed(shape) for shape in others)]


def _backward(call: Call, labels: Labels) -> CallDims:
    attention = _Attention(call, labels)
    gradients = [attention.query, attention.key, attention.value]
    return attention.operands(), gradients[: len(call.results)]


def _efficient_forward(call: Call, labels: Labels) -> CallDims:
    if not call["compute_log_sumexp"]:
        raise Unknown
    return _forward(call, labels)


def _efficient_backward(call: Call, labels: Labels) -> CallDims:
    if call["grad_input_mask"][3]:
        raise Unknown  # the gradient of a bias, which is broadcast
    return _backward(call, labels)


_FORWARDS: dict[object, Rule] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _forward,
    aten._scaled_dot_product_flash_attention.default: _forward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
}
_BACKWARDS: dict[object, Rule] = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward,
    aten._scaled_dot_product_flash_attention_backward.default: _backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
RULES = {**_FORWARDS, **_BACKWARDS}

ATTENTION_FORWARDS = frozenset(_FORWARDS)
"""Operators of fused attention, whose first result is the output."""
