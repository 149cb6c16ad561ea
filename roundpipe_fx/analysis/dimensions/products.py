"""Matrix products: the dimension that both operands share is summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roundpipe_fx.analysis.dimensions.labels import CallDims, Dim, Labels, Rule, Unknown
from roundpipe_fx.analysis.dimensions.operands import Call

aten = torch.ops.aten


def product(equation: str, names: Sequence[str], added: str = "") -> Rule:
    """The rule of an operator that an einsum describes.

    Args:
        equation: a letter for each dimension, as for ``torch.einsum``.
        names: the arguments that it multiplies.
        added: an argument that is broadcast and added to the result; then nothing is summed, since each tile would add
            it again.
    """
    left, result = equation.replace(" ", "").split("->")
    terms = left.split(",")

    def rule(call: Call, labels: Labels) -> CallDims:
        by_letter: dict[str, Dim] = {}
        for name, term in zip(names, terms, strict=True):
            # The first operand with a letter gives its size: in "ik, kj -> ij" the left one gives k, which the right
            # one must have, too.
            for letter, size in zip(term, call.shape(name), strict=True):
                if letter not in by_letter:
                    by_letter[letter] = labels.new(size)
        operands = {
            name: [tuple(by_letter[letter] for letter in term)] for name, term in zip(names, terms, strict=True)
        }
        dims = [by_letter[letter] for letter in result]
        if added:
            operands[added] = [labels.same(call.shape(added), dims)]
            # A summed dimension may be divided, but then the added operand would be added once per tile; so it is
            # mixed.
            labels.mix([dim for letter, dim in by_letter.items() if letter not in result])
        return operands, [dims]

    return rule


def _linear(call: Call, labels: Labels) -> CallDims:
    rows, (out, inner) = call.shape("input")[:-1], call.shape("weight")
    # ``y[…, o] = Σ_i x[…, i] w[o, i] + b[o]``: rows and outputs are independent, inputs are summed.
    dims, summed = labels.of((*rows, out)), labels.new(inner)
    operands = {"input": [(*dims[:-1], summed)], "weight": [(dims[-1], summed)]}
    if call["bias"] is not None:
        operands["bias"] = [(dims[-1],)]
        labels.mix([summed])
    return operands, [dims]


def _dot(call: Call, labels: Labels) -> CallDims:
    # ``vdot`` conjugates its first operand, which changes nothing for real ones.
    if call["self"].is_complex():
        raise Unknown
    return product("i, i ->", [*call.tensors])(call, labels)


RULES: dict[object, Rule] = {
    aten.mm.default: product("ik, kj -> ij", ("self", "mat2")),
    aten.bmm.default: product("bik, bkj -> bij", ("self", "mat2")),
    aten.mv.default: product("ik, k -> i", ("self", "vec")),
    aten.dot.default: _dot,
    aten.vdot.default: _dot,
    aten.outer.default: product("i, j -> ij", ("self", "vec2")),
    aten.addmm.default: product("ik, kj -> ij", ("mat1", "mat2"), added="self"),
    aten.addbmm.default: product("bik, bkj -> ij", ("batch1", "batch2"), added="self"),
    aten.baddbmm.default: product("bik, bkj -> bij", ("batch1", "batch2"), added="self"),
    aten.addmv.default: product("ik, k -> i", ("mat", "vec"), added="self"),
    aten.addr.default: product("i, j -> ij", ("vec1", "vec2"), added="self"),
    aten.linear.default: _linear,
}
