"""Causal masks: replace an attention mask that is causal, or masks nothing, by ``is_causal`` or no mask.

Hugging Face's models leave a causal mask out where they run eagerly, and pass ``is_causal=True``; a mask that masks
nothing they leave out too. While Dynamo traces they cannot look at values, so they build every mask as a tensor of
length times length, and attention runs with kernels that read it. Here the mask is left out again. This is done in
Dynamo's graph, where attention is still one call, so that PyTorch chooses its kernel as eagerly: results have the bits
of eager PyTorch.

The proof is from the graph alone. A mask counts only if all that it is computed from are constants and sizes, through
operations that only read their operands (:func:`roundpipe_fx.frontend.index_forms.pure_operation`), and if nothing
writes to any of them. Then it is causal

- if its form says so (:mod:`roundpipe_fx.frontend.index_forms`): for any length, symbolic ones included;
- or if its values say so, where the sizes are known and modest.

Causal is ``True`` or 0 where the column is at most the row and ``False`` or minus infinity elsewhere, in a square.
Finite numbers such as -10,000 are not minus infinity. Padding masks and positions that are inputs are not known, and
masks with windows shorter than the sequence, prefixes or several sequences are not causal: these stay.

    mask = columns <= rows                                              # dropped, unless something else reads it
    key = key[:, :, None].expand(2, 2, 4, 16, 8).reshape(2, 8, 16, 8)   # dropped
    scaled_dot_product_attention(query, key, value, attn_mask=mask)
    scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)   # what eager calls

Heads of keys that Hugging Face copies for a group of queries, because there is a mask, it does not copy without one;
gradients then are summed in another order. So these copies are left out where its own rule leaves them out, and only
copies that it makes.
"""

from __future__ import annotations

import inspect
import operator
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from roundpipe_fx.frontend.affine_forms import Affine, Choice, IndexForm
from roundpipe_fx.frontend.index_forms import index_form, pure_operation, run_on_host
from roundpipe_fx.frontend.shared_masks import SharedMasks, write_shared_mask
from roundpipe_fx.ir.source import find_source
from roundpipe_fx.torch_private import checkpoint_body, without_modes

_Kind = Literal["causal", "nothing masked"]

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

_MOST_BYTES = 1 << 24
"""Of one value that is computed to read a mask; beyond it, only the form of a mask is read."""


def leave_out_causal_masks(module: fx.GraphModule) -> None:
    """Let attention whose mask is causal, or masks nothing, run without a mask, in place. Drop masks nobody reads."""
    if not torch.is_inference_mode_enabled():  # whose tensors do not count what writes to them
        _rewrite_graph(module, {}, {}, {})


@dataclass(frozen=True)
class _Mask:
    """A mask that is computed from constants and sizes alone.

    Attributes:
        kind: ``None`` if it masks something else than a causal one, or what it masks is not known.
        form: ``None`` if it has none that is known.
        sources: all values that it is computed from.
    """

    kind: _Kind | None
    form: IndexForm | None
    sources: tuple[fx.Node, ...]


def _rewrite_graph(
    module: fx.GraphModule,
    outside: Mapping[fx.Node, Any],
    classified: dict[fx.Node, _Mask | None],
    written: SharedMasks,
) -> None:
    """As :func:`leave_out_causal_masks`, for a checkpoint's body too.

    Args:
        outside: what inputs of a body are, in the graph around it.
        classified: masks that were classified, which layers share; extended.
        written: masks that were written once for all sequences; extended.
    """
    changed = False
    for node in [*module.graph.nodes]:
        # Bodies of checkpoints are graphs of their own; their inputs stand for values outside.
        body = checkpoint_body(module, node)
        if body is not None:
            inputs = body.graph.find_nodes(op="placeholder")
            _rewrite_graph(body, {**outside, **dict(zip(inputs, node.args[1:], strict=True))}, classified, written)
        elif node.target is F.scaled_dot_product_attention:
            changed |= _rewrite_call(node, outside, classified, written)
    if changed:
        module.recompile()


def _rewrite_call(
    call: fx.Node, outside: Mapping[fx.Node, Any], classified: dict[fx.Node, _Mask | None], written: SharedMasks
) -> bool:
    """Rewrite a call of attention if its mask is not needed, or not for each sequence; returns whether it was."""
    arguments = dict(zip(_PARAMETERS, call.args, strict=False)) | call.kwargs
    argument = arguments.get("attn_mask")
    if not isinstance(argument, fx.Node) or arguments.get("is_causal", False):
        return False
    node: Any = argument
    # Follow a mask that enters a body to the node that computes it.
    while node in outside:
        node = outside[node]
    if node not in classified:
        classified[node] = _classify(node, outside)
    mask = classified[node]
    if mask is None:
        return False
    if mask.kind is None or not _fits(node.meta["example_value"], mask.kind, arguments):
        shared = write_shared_mask(call, argument, mask.form, arguments, written)
        if shared is None:
            return False
        call.replace_input_with(argument, shared)
        _drop_unread([argument])
        return True
    key, value = arguments["key"], arguments["value"]
    assert isinstance(key, fx.Node) and isinstance(value, fx.Node)
    uncopied = _find_repeated_heads(key), _find_repeated_heads(value)
    # Keys and values that were repeated for groups of queries: eagerly they are passed as they are, and attention
    # groups them.
    if None not in uncopied and _is_grouped_eagerly(call, key, value, mask.sources):
        arguments = arguments | {"key": uncopied[0], "value": uncopied[1], "enable_gqa": True}
    call.args = (arguments["query"], arguments["key"], arguments["value"])
    kept = {name: argument for name, argument in arguments.items() if name not in _PARAMETERS[:4]}
    # A token alone sees all there is: that mask masks nothing, and is not causal eagerly either.
    call.kwargs = kept | {"is_causal": mask.kind == "causal"}
    _drop_unread([argument, key, value])
    return True


def _drop_unread(nodes: Iterable[fx.Node]) -> None:
    """Erase pure operations whose results nothing reads, and then those that they alone read."""
    # Erasing a node may leave its operands unread as well.
    for node in dict.fromkeys(nodes):
        if pure_operation(node) is not None and not node.users:
            operands = node.all_input_nodes
            node.graph.erase_node(node)
            _drop_unread(operands)


def _collect_sources(mask: fx.Node, outside: Mapping[fx.Node, Any]) -> dict[fx.Node, fx.Node] | None:
    """All values that a mask is computed from and the mask itself, in order; ``None`` if they are not all known.

    Sizes, which are numbers or symbols and not tensors, are not among them.

    Returns:
        each with the node that computes it: itself, unless it is an input of a body.
    """
    sources: dict[fx.Node, fx.Node] = {}
    # Depth first; operands come before their readers in the result, so forms are computed in this order.
    waiting = [(mask, False)]
    while waiting:
        node, is_done = waiting.pop()
        value = node.meta.get("example_value")
        if node in sources or isinstance(value, _SIZES):
            continue
        computed = outside.get(node, node)
        if is_done:
            sources[node] = computed
            continue
        if not isinstance(value, torch.Tensor) or value.requires_grad or not isinstance(computed, fx.Node):
            return None
        if value.is_inference() or value._version > 0:  # something has written to its memory
            return None
        if computed is node and pure_operation(node) is None:
            return None
        waiting.append((node, True))
        waiting += [(operand, False) for operand in (node.all_input_nodes if computed is node else [computed])]
    return sources


_SIZES = (int, torch.SymInt)


def _classify(mask: fx.Node, outside: Mapping[fx.Node, Any]) -> _Mask | None:
    """Prove what a mask masks; ``None`` if it depends on inputs."""
    sources, value = _collect_sources(mask, outside), mask.meta.get("example_value")
    if sources is None or not isinstance(value, torch.Tensor) or value.dim() < 2:
        return None
    with without_modes(), torch.device("cpu"), torch.no_grad():
        forms: dict[fx.Node, IndexForm | None] = {}
        # By form first, which holds for all sizes; by values only where all sizes are known.
        for node, computed in sources.items():
            forms[node] = index_form(node, forms) if computed is node else forms[computed]
        kind = _classify_form(forms[mask], value.dtype)
        if kind is None:
            values = _compute_values(sources)
            kind = _classify_values(values[mask]) if values is not None else None
    return _Mask(kind, forms[mask], tuple(sources))


def _fits(mask: torch.Tensor, kind: _Kind, arguments: Mapping[str, Any]) -> bool:
    """Tell if a call without a mask has a result of the same shape, and by a causal one the same triangle."""
    query, key = arguments["query"].meta["example_value"], arguments["key"].meta["example_value"]
    scores = (*query.shape[:-1], key.shape[-2])
    if mask.dim() > len(scores):
        return False
    pairs = [*zip(reversed(mask.shape), reversed(scores), strict=False)]
    # A mask of other sizes would broadcast the result.
    same_result = all(_is_equal(size, 1) or _is_equal(size, score_size) for size, score_size in pairs)
    square = _is_equal(scores[-2], scores[-1]) and all(_is_equal(size, score_size) for size, score_size in pairs[:2])
    return same_result and (square or kind != "causal")


def _is_equal(first: Any, second: Any) -> bool:
    return bool(statically_known_true(first == second))


def _classify_form(form: IndexForm | None, dtype: torch.dtype) -> _Kind | None:
    kept, masked = (True, False) if dtype is torch.bool else (0, -torch.inf)
    if isinstance(form, Affine) and form.is_constant and form.offset == kept:
        return "nothing masked"
    # Exactly one condition, and the constants of a mask: anything else is no causal mask.
    if not isinstance(form, Choice) or (form.inside, form.outside) != (kept, masked) or len(form.conditions) > 1:
        return None
    (condition,) = form.conditions
    across = (0,) * (len(condition.slopes) - 2)
    return "causal" if condition == Affine((*across, -1, 1), 0) else None


def _compute_values(sources: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, torch.Tensor] | None:
    """Compute values on the CPU; ``None`` if they are large, or depend on symbols."""
    examples = [node.meta["example_value"] for node in sources]
    if any(isinstance(size, torch.SymInt) for value in examples for size in (*value.shape, *value.stride())):
        return None
    if any(value.untyped_storage().nbytes() > _MOST_BYTES for value in examples):
        return None
    if any(isinstance(source.meta.get("example_value"), _SIZES) for node in sources for source in node.all_input_nodes):
        return None
    values: dict[fx.Node, torch.Tensor] = {}
    for node, computed in sources.items():
        values[node] = run_on_host(node, values) if computed is node else values[computed]
    return values


def _classify_values(mask: torch.Tensor) -> _Kind | None:
    kept = mask if mask.dtype is torch.bool else mask == 0
    if mask.dtype is not torch.bool and not bool((kept | (mask == -torch.inf)).all()):
        return None
    if bool(kept.all()):
        return "nothing masked"
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return "causal" if bool((kept == causal).all()) else None


def _find_repeated_heads(copies: fx.Node) -> fx.Node | None:
    """The keys or values of which each head was copied for a group of queries; ``None`` if they are no such copies.

    ``heads[:, :, None, :, :].expand(batch, heads, group, length, size).reshape(batch, heads * group, length, size)``
    """
    expanded = copies.args[0] if copies.op == "call_method" and copies.target == "reshape" else None
    if not isinstance(expanded, fx.Node) or (expanded.op, expanded.target) != ("call_method", "expand"):
        return None
    indexed = expanded.args[0]
    if not isinstance(indexed, fx.Node) or indexed.target is not operator.getitem:
        return None
    heads, index = indexed.args
    full = slice(None)
    if not isinstance(heads, fx.Node) or index != (full, full, None, full, full):
        return None
    batch, count, group, *trailing = expanded.meta["example_value"].shape
    shape = copies.meta["example_value"].shape
    same = len(shape) == 4 and all(map(_is_equal, shape, (batch, count * group, *trailing)))
    return heads if same and _is_equal(count, heads.meta["example_value"].shape[1]) else None


def _has_number(node: fx.Node, number: Any) -> bool:
    return any(_is_equal(argument, number) for argument in node.args if type(argument) is int)


def _is_grouped_eagerly(call: fx.Node, key: fx.Node, value: fx.Node, sources: Iterable[fx.Node]) -> bool:
    """Tell if Hugging Face, without a mask, makes this call of attention without copies of heads."""
    transformers = sys.modules.get("transformers.integrations.sdpa_attention")
    rule = getattr(transformers, "use_gqa_in_sdpa", None)
    if rule is None or os.path.join("transformers", "integrations", "sdpa_attention.py") not in find_source(call):
        return False
    examples = {"attention_mask": None, "key": key.meta["example_value"], "value": value.meta["example_value"]}
    names = inspect.signature(rule).parameters
    # A window as long as the sequence masks nothing more, but there is a mask eagerly.
    length = examples["key"].shape[-2]
    windows = [node for node in sources if pure_operation(node) in ("sub", "floordiv", "floor_divide")]
    if names.keys() - examples.keys() or any(_has_number(node, length) for node in windows):
        return False
    # A mask of blocks (of images) that is joined to the causal one may change nothing, but there is a mask eagerly.
    if any(pure_operation(node) in ("or", "logical_or") for node in sources):
        return False
    return bool(rule(**{name: examples[name] for name in names}))
