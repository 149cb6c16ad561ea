"""online_softmax: rewrites a cross entropy with sums over its classes, so that the classes can be divided into tiles.

Of the log-probabilities of a row, a loss reads the one of its label, and perhaps their sum. Once the log-sum-exp of the
row is known, the gradient of each score depends on no other score::

    log_softmax(x)[label]  =  sum(x where it is the label's)  -  logsumexp(x)
    gradient               =  (a where it is the label's)  +  b  -  exp(x - logsumexp(x)) * (a + classes * b)

with one ``a`` and one ``b`` per row, which are computed from the gradient of the loss. Sums over classes can be
accumulated over tiles of classes, and so can the exponentials of a log-sum-exp (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import CostModel, annotate_added
from roundpipe_fx.analysis.tiling.classes_in_tiles import Scaled, Uses, find_uses, summed_dims
from roundpipe_fx.ir.graph_edit import insert_call
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase
from roundpipe_fx.operators.log_sum_exp import log_sum_exp

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


def rewrite_online(
    joint: JointGraph,
    names: Collection[str],
    costs: CostModel,
    device: torch.device | None = None,
    eager: bool = True,
    present: bool = True,
) -> JointGraph:
    """Rewrite log-softmaxes with sums over their classes. Names of added nodes depend only on the log-softmax's name.

    Args:
        joint: an annotated graph; it is rewritten.
        names: log-softmaxes to rewrite, among :func:`roundpipe_fx.analysis.tiling.find_online_softmaxes`.
        costs: cost model for the added operations.
        device: the device that they run on; ``None``: not known, as are their workspaces.
        eager: whether they run without a compiler.
        present: whether the device is there.
    """
    added: set[fx.Node] = set()
    for node in joint.in_phase(Phase.FORWARD):
        if node.name in names:
            uses = find_uses(joint, node)
            assert uses is not None, f"{node.name} cannot be written with sums over its classes"
            added |= _OnlineWriter(node, uses).write()
    joint.drop_unread()
    annotate_added([node for node in joint.computed() if node in added], costs, device, eager, present)
    return joint


def log_sum_exp_of(joint: JointGraph, name: str) -> fx.Node:
    """The log-sum-exp of a log-softmax that has been rewritten with sums."""
    names = {_named(name, suffix) for suffix in ("logsumexp", "log_sum_exp")}
    return next(node for node in joint.in_phase(Phase.FORWARD) if node.name in names)


def _named(softmax: str, suffix: str) -> str:
    return f"{softmax}_{suffix}"


class _OnlineWriter:
    """Rewrites one log-softmax with sums. A *column* has the shape of the scores, with one class."""

    def __init__(self, softmax: fx.Node, uses: Uses) -> None:
        self._softmax, self._uses, self._axis = softmax, uses, uses.axis
        self._added: set[fx.Node] = set()
        self._shape = list(softmax.meta["val"].shape)
        self._column = [*self._shape]
        self._column[self._axis] = 1
        self._labels: dict[tuple[fx.Node, Any], tuple[fx.Node, fx.Node | None, fx.Node]] = {}
        self._picked: dict[fx.Node, fx.Node] = {}
        scores, self._dtype = uses.scores, softmax.meta["val"].dtype
        if scores.meta["val"].dtype is not self._dtype:
            scores = self._call(softmax, aten._to_copy.default, scores, dtype=self._dtype)
        self._scores = scores
        self._rest: fx.Node | None = None
        """What a log-sum-exp in double precision is more than one in the precision of the scores."""
        # In float64 the log-sum-exp is exact enough. Otherwise it is summed in float64 and kept as two numbers, rounded
        # and rest, so that x - logsumexp(x) is as exact as log_softmax's.
        if self._dtype is torch.float64:
            self._log_sum_exp = self._call(softmax, aten.logsumexp.default, scores, [self._axis], True)
            self._rounded = self._log_sum_exp
        else:
            self._log_sum_exp = self._call(softmax, log_sum_exp, scores, [self._axis])
            self._rounded = self._call(softmax, aten._to_copy.default, self._log_sum_exp, dtype=self._dtype)
            rest = self._call(softmax, aten.sub.Tensor, self._log_sum_exp, self._rounded)
            self._rest = self._call(softmax, aten._to_copy.default, rest, dtype=self._dtype)
        # The numbers of the classes, in the dimension of the classes: compared with a row's label they tell its score.
        count, device = self._shape[self._axis], softmax.meta["val"].device
        words = self._call(softmax, aten.arange.default, count, dtype=torch.int32, device=device, pin_memory=False)
        behind = len(self._shape) - self._axis - 1
        self._words = words
        self._classes = self._call(softmax, aten.view.default, words, [-1, *[1] * behind]) if behind else words

    def write(self) -> set[fx.Node]:
        """Replace the readers of the log-probabilities; returns the operations that were added."""
        for read in self._uses.reads:
            self._replace(read.node, read)
        for gradient, parts in self._uses.gradients:
            gradient.replace_all_uses_with(self._gradient(gradient, parts))
        return self._added

    def _call(self, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        call = insert_call(before, target, *args, **kwargs)
        call._rename(_named(self._softmax.name, target._schema.name.rpartition("::")[2]))
        call.meta[Mark.PHASE] = before.meta[Mark.PHASE]
        self._added.add(call)
        return call

    def _as_column(self, before: fx.Node, value: fx.Node) -> fx.Node:
        if list(value.meta["val"].shape) == self._column:
            return value
        return self._call(before, aten.reshape.default, value, self._column)

    def _label(self, before: fx.Node, labels: fx.Node, ignored: Any) -> tuple[fx.Node, fx.Node | None, fx.Node]:
        """For each row, its label and whether it is ignored, as columns, and a mask of the scores of other classes."""
        if (labels, ignored) not in self._labels:
            column, is_ignored = self._as_column(before, labels), None
            # An ignored label may be out of range (-100), so it is replaced by 0, and what is read there is masked out.
            if ignored is not None:
                is_ignored = self._call(before, aten.eq.Scalar, column, ignored)
                column = self._call(before, aten.masked_fill.Scalar, column, is_ignored, 0)
            # Indexing 0, 1, … with the labels returns them again, and raises for one out of range, as the loss does.
            flat = self._call(before, aten.reshape.default, column, [-1])
            column = self._as_column(before, self._call(before, aten.index_select.default, self._words, 0, flat))
            # True at all classes but the label's.
            others = self._call(before, aten.ne.Tensor, self._classes, column)
            self._labels[labels, ignored] = column, is_ignored, others
        return self._labels[labels, ignored]

    def _at_label(self, before: fx.Node, others: fx.Node) -> fx.Node:
        """The log-probabilities of the rows' labels, as a column."""
        if others not in self._picked:
            # All scores but the label's are set to zero; the sum over the classes is then the label's score, in tiles
            # too.
            alone = self._call(before, aten.masked_fill.Scalar, self._scores, others, 0.0)
            self._picked[others] = self._call(before, aten.sum.dim_IntList, alone, [self._axis], True)
        return self._subtract_log_sum_exp(before, self._picked[others])

    def _subtract_log_sum_exp(self, before: fx.Node, column: fx.Node) -> fx.Node:
        """A column less the log-sum-exp."""
        difference = self._call(before, aten.sub.Tensor, column, self._log_sum_exp)
        return (
            difference
            if self._rest is None
            else self._call(before, aten._to_copy.default, difference, dtype=self._dtype)
        )

    def _multiply(self, before: fx.Node, value: fx.Node, factor: float) -> fx.Node:
        if factor == 1:
            return value
        if factor == -1:
            return self._call(before, aten.neg.default, value)
        return self._call(before, aten.mul.Scalar, value, factor)

    def _mask_ignored(self, before: fx.Node, value: fx.Node, is_ignored: fx.Node | None) -> fx.Node:
        return value if is_ignored is None else self._call(before, aten.masked_fill.Scalar, value, is_ignored, 0.0)

    def _apply_weights(self, before: fx.Node, column: fx.Node, weight: Any, labels: fx.Node) -> fx.Node:
        """A column times the weights of the rows' labels."""
        if not isinstance(weight, fx.Node):
            return column
        flat = self._call(before, aten.reshape.default, labels, [-1])
        weights = self._as_column(before, self._call(before, aten.index_select.default, weight, 0, flat))
        return self._call(before, aten.mul.Tensor, column, weights)

    def _replace(self, node: fx.Node, value: Scaled) -> None:
        """Replace an operation of the forward that reads the log-probabilities."""
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        if packet in (aten.nll_loss_forward, aten.nll_loss2d_forward):
            self._replace_cross_entropy(node, value.factor)
            return
        if packet is aten.gather:
            *_, others = self._label(node, node.args[2], None)  # type: ignore[arg-type]
            replacement = self._at_label(node, others)
        else:
            replacement = self._summed(node, value.axis)
        replacement = self._multiply(node, replacement, value.factor)
        shape = list(node.meta["val"].shape)
        if list(replacement.meta["val"].shape) != shape:
            replacement = self._call(node, aten.reshape.default, replacement, shape)
        node.replace_all_uses_with(replacement)

    def _summed(self, node: fx.Node, axis: int) -> fx.Node:
        """The sum of the log-probabilities over all classes, and over rows if the original sum includes them."""
        total = self._call(node, aten.sum.dim_IntList, self._scores, [self._axis], True)
        # Σ (x_c - L) = Σ x_c - classes · L.
        less = self._call(node, aten.mul.Scalar, self._log_sum_exp, self._shape[self._axis])
        result = self._call(node, aten.sub.Tensor, total, less)
        if self._rest is not None:
            result = self._call(node, aten._to_copy.default, result, dtype=self._dtype)
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        shape = list(operand.meta["val"].shape)
        # A sum over further dimensions than the classes: rows are added afterwards.
        dims = sorted(summed_dims(node, len(shape)) - {axis})
        if not dims:
            return result
        shape[axis] = 1
        return self._call(node, aten.sum.dim_IntList, self._call(node, aten.reshape.default, result, shape), dims)

    def _replace_cross_entropy(self, node: fx.Node, factor: float) -> None:
        _, labels, weight, reduction, ignored = node.args
        assert isinstance(labels, fx.Node)
        label, is_ignored, others = self._label(node, labels, ignored)
        loss = self._multiply(node, self._at_label(node, others), -factor)
        loss = self._mask_ignored(node, self._apply_weights(node, loss, weight, label), is_ignored)
        if reduction == _SUM:
            loss = self._call(node, aten.sum.default, loss)
        else:
            loss = self._call(node, aten.reshape.default, loss, list(labels.meta["val"].shape))
        for item in list(node.users):
            if item.args[1] == 0:
                item.replace_all_uses_with(loss)

    def _gradient(self, node: fx.Node, parts: Sequence[Scaled]) -> fx.Node:
        """The gradient of the scores."""
        # gradient = parts - softmax(x) · Σ parts, where a part at a label counts once and one for all classes `classes`
        # times.
        classes, sums = self._shape[self._axis], []
        summands: list[fx.Node] = []
        for part in parts:
            if part.node.target.overloadpacket is aten.expand:  # type: ignore[union-attr]
                column = self._of_all(node, part)
                sums.append(self._call(node, aten.mul.Scalar, column, classes))
                summands.append(column)
            else:
                column, others = self._of_label(node, part)
                sums.append(column)
                whole = self._call(node, aten.expand.default, column, self._shape)
                summands.append(self._call(node, aten.masked_fill.Scalar, whole, others, 0.0))
        # exp(x - L) with L in two numbers.
        less = self._call(node, aten.sub.Tensor, self._scores, self._rounded)
        if self._rest is not None:
            less = self._call(node, aten.sub.Tensor, less, self._rest)
        probability = self._call(node, aten.exp.default, less)
        total = self._call(node, aten.mul.Tensor, probability, self._added_up(node, sums))
        result = self._call(node, aten.sub.Tensor, self._added_up(node, summands), total)
        dtype = node.meta["val"].dtype
        return result if dtype is self._dtype else self._call(node, aten._to_copy.default, result, dtype=dtype)

    def _added_up(self, before: fx.Node, values: Sequence[fx.Node]) -> fx.Node:
        total, *others = values
        for value in others:
            total = self._call(before, aten.add.Tensor, total, value)
        return total

    def _of_all(self, before: fx.Node, part: Scaled) -> fx.Node:
        """The gradient that all classes of a row share, as a column."""
        (source, *_), shape = part.node.args, part.shape
        shape[part.axis] = 1
        assert isinstance(source, fx.Node)
        column = source
        if list(source.meta["val"].shape) != shape:
            column = self._call(before, aten.expand.default, source, shape)
        return self._multiply(before, self._as_column(before, column), part.factor)

    def _of_label(self, before: fx.Node, part: Scaled) -> tuple[fx.Node, fx.Node]:
        """The gradient at the label of each row, as a column, and a mask of the scores of other classes."""
        if part.node.target.overloadpacket is aten.scatter_add:  # type: ignore[union-attr]
            index, column = part.node.args[2:]
            assert isinstance(index, fx.Node) and isinstance(column, fx.Node)
            *_, others = self._label(before, index, None)
            return self._multiply(before, self._as_column(before, column), part.factor), others
        gradient, _, labels, weight, reduction, ignored, total = part.node.args
        assert isinstance(gradient, fx.Node) and isinstance(labels, fx.Node)
        label, is_ignored, others = self._label(before, labels, ignored)
        # The mean divides by the total weight, which is a number that the forward has returned.
        if reduction == _MEAN:
            gradient = self._call(before, aten.div.Tensor, gradient, total)
        if reduction == _NONE:
            gradient = self._as_column(before, gradient)
        gradient = self._multiply(before, gradient, -part.factor)
        # The gradient of a sum is one number; what is ignored makes a column of it.
        return self._mask_ignored(before, self._apply_weights(before, gradient, weight, label), is_ignored), others
