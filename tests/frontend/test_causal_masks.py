"""Masks that are causal, or mask nothing, are left out; others stay. Results have the bits of eager PyTorch."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import roundpipe_fx
from benchmarks.small_models import small_batch, small_model
from roundpipe_fx.frontend import capture
from roundpipe_fx.frontend.causal_masks import leave_out_causal_masks
from tests import hugging_face
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step, eager_step, train_step
from tests.frontend.dynamo_graphs import dynamo_graph
from tests.long import long_but

LENGTH = 6
Mask = Callable[[int], torch.Tensor]


def _attend(mask: Mask) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=mask(x.shape[-2]))


def _heads(length: int = LENGTH) -> torch.Tensor:
    return torch.randn(2, 3, length, 4, requires_grad=True)


def _call(module: fx.GraphModule) -> fx.Node:
    (call,) = module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    return call


def _found(mask: Mask, length: int = LENGTH, dynamic: bool = False) -> str:
    """The fate of a mask: ``"causal"`` or ``"none"`` if it is left out, else ``"left"``."""
    module = dynamo_graph(_attend(mask), _heads(length), dynamic=dynamic)
    leave_out_causal_masks(module)
    module.graph.lint()
    call = _call(module)
    if call.kwargs.get("attn_mask") is not None:
        return "left"
    return "causal" if call.kwargs["is_causal"] else "none"


def _rows(length: int) -> torch.Tensor:
    return torch.arange(length)[None, None, :, None]


def _columns(length: int) -> torch.Tensor:
    return torch.arange(length)[None, None, None, :]


def _window(size: int) -> Mask:
    return lambda n: (_columns(n) > _rows(n) - size) & (_columns(n) <= _rows(n))


def _packed(n: int) -> torch.Tensor:
    positions = torch.arange(n) % (n // 2)
    sequence = (torch.diff(positions, prepend=positions[:1] - 1) != 1).cumsum(-1)
    return (_columns(n) <= _rows(n)) & (sequence[_rows(n)] == sequence[_columns(n)])


def _one_sequence(n: int) -> torch.Tensor:
    """The causal mask as Hugging Face writes it if no positions are given."""
    positions = torch.arange(n).unsqueeze(0).expand(2, -1)
    sequence = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(2)[:, None, None, None]
    mask = _rows(n).new_ones((), dtype=torch.bool) & (_columns(n) <= _rows(n)).to("cpu")
    return (mask & (sequence[batch, _rows(n)] == sequence[batch, _columns(n)])).expand(2, -1, n, n)


def _ones_for_padding(n: int) -> torch.Tensor:
    return (_columns(n) <= _rows(n)) & torch.ones(2, n).bool()[:, None, None, :]


CAUSAL: dict[str, Mask] = {
    "compared": lambda n: _columns(n) <= _rows(n),
    "turned round": lambda n: _rows(n) >= _columns(n),
    "not after": lambda n: ~(_columns(n) > _rows(n)),
    "shifted": lambda n: _columns(n) + 3 < _rows(n) + 4,
    "one sequence": _one_sequence,
    "ones for padding": _ones_for_padding,
    "tril": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "numbers": lambda n: torch.tril(torch.ones(n, n)) == 1,
    "added": lambda n: torch.full((n, n), -torch.inf).triu(1),
    "filled": lambda n: torch.zeros(n, n).masked_fill(_columns(n)[0, 0] > _rows(n)[0, 0], -torch.inf),
    "chosen": lambda n: torch.where(_columns(n) <= _rows(n), 0.0, -torch.inf),
    "transposed": lambda n: torch.ones(n, n, dtype=torch.bool).triu().transpose(0, 1),
}
"""By name; the proof is of any length."""

ONLY_BY_VALUE: dict[str, Mask] = {
    "window of the length": _window(LENGTH),
    "wide window": _window(100),
    "cumulated": lambda n: torch.ones(n, n).cumsum(1) <= _rows(n)[0, 0] + 1,
    "prefix of one": lambda n: (_columns(n) <= _rows(n)) | (_columns(n) < 1),
    "a number a row": lambda n: torch.clamp(_columns(n) - _rows(n), min=0) == 0,
}
"""Causal at one length, or not by a rule of the forms."""

NOTHING: dict[str, Mask] = {
    "no padding": lambda n: (_rows(n) >= 0).expand(2, -1, n, n),
    "true": lambda n: torch.ones(n, n, dtype=torch.bool),
    "zeros": lambda n: torch.zeros(n, n),
    "for every row": lambda n: torch.ones(2, n).bool()[:, None, None, :],
}

OTHERS: dict[str, Mask] = {
    "narrow window": _window(LENGTH - 1),
    "packed": _packed,
    "prefix": lambda n: (_columns(n) <= _rows(n)) | (_columns(n) < 2),
    "one diagonal more": lambda n: _columns(n) <= _rows(n) + 1,
    "one diagonal less": lambda n: _columns(n) < _rows(n),
    "anticausal": lambda n: _columns(n) >= _rows(n),
    "in one head": lambda n: (_columns(n) <= _rows(n)) | (torch.arange(3)[None, :, None, None] > 0),
    "in one sequence": lambda n: (_columns(n) <= _rows(n)) | (torch.arange(2)[:, None, None, None] > 0),
    "finite": lambda n: torch.full((n, n), -1e4).triu(1),
    "least number": lambda n: torch.where(_columns(n) <= _rows(n), 0.0, torch.finfo(torch.float32).min),
    "biased": lambda n: torch.where(_columns(n) <= _rows(n), 1.0, -torch.inf),
    "random": lambda n: torch.rand(n, n) < 2,
}


@pytest.mark.parametrize("name", [*CAUSAL, *ONLY_BY_VALUE])
def test_a_causal_mask_is_left_out(name: str) -> None:
    assert _found((CAUSAL | ONLY_BY_VALUE)[name]) == "causal"


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_of_any_length_is_left_out(name: str) -> None:
    assert _found(CAUSAL[name], dynamic=True) == "causal"


@pytest.mark.parametrize("name", ONLY_BY_VALUE)
def test_a_mask_that_is_causal_at_one_length_stays_where_lengths_are_symbols(name: str) -> None:
    assert _found(ONLY_BY_VALUE[name], dynamic=True) == "left"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NOTHING)
def test_a_mask_that_masks_nothing_is_left_out(name: str, dynamic: bool) -> None:
    assert _found(NOTHING[name], dynamic=dynamic) == "none"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay(name: str, dynamic: bool) -> None:
    assert _found(OTHERS[name], dynamic=dynamic) == "left"


def _for_each_sequence(mask: Mask) -> Mask:
    return lambda n: (mask(n) & (torch.arange(2)[:, None, None, None] >= 0)).expand(2, 3, n, n)


SHARED: dict[str, Mask] = {
    "window": lambda n: (_columns(n) > _rows(n) - 4) & (_columns(n) <= _rows(n)),
    "window of one": lambda n: (_columns(n) > _rows(n) - 1) & (_columns(n) <= _rows(n)),
    "one diagonal more": OTHERS["one diagonal more"],
    "anticausal": OTHERS["anticausal"],
    "first columns": lambda n: (_columns(n) <= 3) & (_rows(n) >= 0),
    "last rows": lambda n: (_columns(n) >= 0) & (_rows(n) > 1),
    "not the first row": lambda n: (_columns(n) <= _rows(n)) & (_rows(n) > 1),
}
"""Masks that are the same in every sequence and head, and not causal."""


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_a_mask_that_sequences_share_is_made_once_for_all(name: str, dynamic: bool) -> None:
    mask, x = _for_each_sequence(SHARED[name]), _heads()
    module = dynamo_graph(_attend(mask), x, dynamic=dynamic)
    leave_out_causal_masks(module)
    module.graph.lint()
    compact = _call(module).kwargs["attn_mask"]
    assert compact.meta["example_value"].shape[:2] == (1, 1)
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    graph.graph_copy(module.graph, copies)
    graph.output(copies[compact])
    inputs = [
        x if isinstance(node.meta["example_value"], torch.Tensor) else LENGTH
        for node in graph.find_nodes(op="placeholder")
    ]
    value = fx.GraphModule(module, graph)(*inputs)
    assert torch.equal(value.expand(2, 3, LENGTH, LENGTH), mask(LENGTH))


@pytest.mark.parametrize("name", ["packed", "prefix", "in one head", "in one sequence"])
def test_a_mask_that_is_not_known_to_be_shared_stays(name: str) -> None:
    module = dynamo_graph(_attend(_for_each_sequence(OTHERS[name])), _heads())
    before = module.code
    leave_out_causal_masks(module)
    assert module.code == before


def test_attentions_share_a_mask() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        near, far = (_for_each_sequence(_window(size))(LENGTH) for size in (2, 3))
        for mask in (near, far, near, far):
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return x

    module = dynamo_graph(attend, _heads())
    leave_out_causal_masks(module)
    calls = module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    masks = [call.kwargs["attn_mask"] for call in calls]
    assert masks[0] is masks[2] and masks[1] is masks[3] and masks[0] is not masks[1]


def test_a_token_alone_sees_itself() -> None:
    assert _found(CAUSAL["compared"], length=1) == "none"


@pytest.mark.parametrize("length", [5_000, 100_000])
def test_long_masks_are_not_computed(length: int) -> None:
    x = torch.empty(1, 1, length, 1, device="meta", requires_grad=True)
    for mask, found in ((CAUSAL["one sequence"], True), (_window(4096), False), (_window(length + 1), True)):
        module = dynamo_graph(lambda x, m=mask: F.scaled_dot_product_attention(x, x, x, m(length)[:1].to("meta")), x)
        leave_out_causal_masks(module)
        assert _call(module).kwargs.get("is_causal", False) == found


def test_a_mask_that_something_writes_to_stays() -> None:
    def late(n: int) -> torch.Tensor:
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        mask.view(-1)[1] = True
        return mask

    def in_place(n: int) -> torch.Tensor:
        mask = torch.zeros(n, n)
        mask.masked_fill_(_columns(n)[0, 0] > _rows(n)[0, 0], -torch.inf)
        return mask

    assert _found(late) == _found(in_place) == "left"


def test_masks_that_are_inputs_stay() -> None:
    def attend(x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        n = x.shape[-2]
        return F.scaled_dot_product_attention(x, x, x, (_columns(n) <= _rows(n)) & padding[:, None, None, :])

    module = dynamo_graph(attend, _heads(), torch.ones(2, LENGTH, dtype=torch.bool))
    before = module.code
    leave_out_causal_masks(module)
    assert module.code == before


def test_other_lengths_of_keys_stay() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(LENGTH)[None, :] <= torch.arange(LENGTH - 2)[:, None]
        return F.scaled_dot_product_attention(x[:, :, 2:], x, x, mask)

    module = dynamo_graph(attend, _heads())
    leave_out_causal_masks(module)
    assert not _call(module).kwargs.get("is_causal", False)


def test_a_mask_that_broadcasts_the_result_stays() -> None:
    module = dynamo_graph(lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(5, 1, 1, 6, 6) > 0), _heads())
    before = module.code
    leave_out_causal_masks(module)
    assert module.code == before


def test_the_mask_is_computed_only_where_something_else_reads_it() -> None:
    def with_mask(x: torch.Tensor) -> Any:
        mask = _one_sequence(x.shape[-2])
        return F.scaled_dot_product_attention(x, x, x, mask), mask

    kept = dynamo_graph(with_mask, _heads())
    leave_out_causal_masks(kept)
    assert _call(kept).kwargs["is_causal"]
    assert torch.equal(kept(_heads())[1], _one_sequence(LENGTH))
    dropped = dynamo_graph(_attend(_one_sequence), _heads())
    leave_out_causal_masks(dropped)
    assert [node.op for node in dropped.graph.nodes] == ["placeholder", "call_function", "output"]


@pytest.mark.parametrize("length", [LENGTH, LENGTH - 2], ids=["whole", "part"])
def test_a_mask_from_outside_of_a_checkpoint_is_left_out(length: int) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        mask = _one_sequence(x.shape[-2])

        def layer(x: torch.Tensor) -> torch.Tensor:
            inner = checkpoint(lambda x: attention(x).sin(), x, use_reentrant=False)
            return inner + attention(x)

        def attention(x: torch.Tensor) -> torch.Tensor:
            x = x[:, :, :length]
            own = mask.to(x.device)[:, :, :length, :length] & (torch.ones(length, length).cumsum(1) > 0)
            return F.pad(F.scaled_dot_product_attention(x, x, x, own), (0, 0, 0, LENGTH - length))

        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    module = dynamo_graph(attend, _heads())
    leave_out_causal_masks(module)
    calls = [
        node
        for body in module.modules()
        if isinstance(body, fx.GraphModule)
        for node in body.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    ]
    assert len(calls) >= 2
    assert all(call.kwargs == {"is_causal": True} for call in calls)


def _own_copies(x: torch.Tensor) -> torch.Tensor:
    once = x[:, :1]
    copies = once[:, :, None, :, :].expand(2, 1, 3, LENGTH, 4).reshape(2, 3, LENGTH, 4)
    return F.scaled_dot_product_attention(x, copies, copies, attn_mask=_one_sequence(LENGTH))


def test_copies_of_heads_that_the_model_makes_itself_stay() -> None:
    """Eagerly it makes them too."""
    module = dynamo_graph(_own_copies, _heads())
    leave_out_causal_masks(module)
    assert _call(module).kwargs == {"is_causal": True}
    assert module.graph.find_nodes(op="call_method", target="reshape")


Term = tuple[str, int, int, bool]


def _of_terms(terms: list[Term], joined: list[str], swapped: bool) -> Mask:
    """Comparisons of ``a * column + offset`` with a row, joined by and, or."""

    def mask(n: int) -> torch.Tensor:
        result = None
        for (compare, offset, row, is_negated), join in zip(terms, joined, strict=True):
            left, right = _columns(n) + offset, _rows(n) + row
            term = getattr(operator, compare)(*((right, left) if swapped else (left, right)))
            term = ~term if is_negated else term
            result = term if result is None else getattr(operator, join)(result, term)
        assert result is not None
        return result

    return mask


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.long
def test_exactly_the_causal_of_random_masks_are_left_out(data: st.DataObject) -> None:
    number = st.integers(-2, 2)
    term = st.tuples(st.sampled_from(["le", "lt", "ge", "gt", "eq", "ne"]), number, number, st.booleans())
    terms = data.draw(st.lists(term, min_size=1, max_size=3))
    joined = data.draw(st.lists(st.sampled_from(["and_", "or_", "xor"]), min_size=len(terms), max_size=len(terms)))
    length, swapped = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    mask = _of_terms(terms, joined, swapped)
    value = mask(length)
    causal = torch.equal(value[0, 0], torch.ones(length, length, dtype=torch.bool).tril())
    expected = "none" if value.all() else "causal" if causal else "left"
    assert _found(mask, length) == expected
    if length > 1 and (found := _found(mask, length, dynamic=True)) != "left":
        longer = mask(40)[0, 0]
        assert torch.equal(longer, torch.ones(40, 40, dtype=torch.bool).tril()) == (found == "causal")
        assert longer.all() == (found == "none")


TOKENS = 70
"""More than one block of the attention kernel, in which gradients of grouped heads round otherwise with copies; and no
other size of the models."""

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": TOKENS + 1},
    "qwen3": {},
    "gemma": {},
    "phi": {"attention_dropout": 0.1},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64, "dropout": 0.1},
}


def _decoder(name: str, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **DECODERS[name], **sizes})
    return transformers.AutoModelForCausalLM.from_config(config).train()


def _batch(rows: int = 2, **more: Any) -> dict[str, Any]:
    tokens = torch.randint(128, (rows, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens, **more}


def _squares(plan: roundpipe_fx.Plan) -> list[str]:
    """Lines of the emitted code in which there is something for each pair of tokens."""
    texts = plan.sources().values()
    return [line for text in texts for line in text.splitlines() if f"{TOKENS}, {TOKENS}]" in line]


@pytest.mark.parametrize("name", long_but(DECODERS, quick={"llama", "gpt2"}))
def test_decoders_have_the_bits_of_eager(name: str) -> None:
    model, batch = _decoder(name), _batch()
    expected = eager_step(model, batch)
    for recompute in ("none", "full"):
        torch._dynamo.reset()
        step, compiled = compiled_step(model, batch, stages=2, recompute=recompute)
        assert_bitwise(step, expected)
        if name not in ("phi", "gpt2"):  # whose attention drops, for each pair
            assert not _squares(compiled.plan)


def test_tracing_alone_rounds_otherwise() -> None:
    """Else the test above would hold with nothing left out."""
    model, batch = _decoder("llama"), _batch()
    with pytest.raises(AssertionError, match="differs"):
        assert_bitwise(aot_eager_step(model, batch), eager_step(model, batch))


OF_INPUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "narrow window": ({"sliding_window": 16}, {}),
    "window of the length": ({"sliding_window": TOKENS}, {}),
    "padding": ({}, {"attention_mask": (torch.arange(TOKENS) < torch.tensor([[TOKENS], [9]])).long()}),
    "packed": ({}, {"position_ids": (torch.arange(TOKENS) % 40).expand(2, -1)}),
}


def test_a_window_is_not_made_for_each_sequence() -> None:
    plan = _planned(_decoder("mistral", sliding_window=16), _batch(rows=3))
    masks = [line for line in _squares(plan) if "bool[" in line]
    assert masks
    assert not [line for line in _squares(plan) if f"[3, 1, {TOKENS}, {TOKENS}]" in line]


@pytest.mark.parametrize("name", long_but(OF_INPUTS, quick={"narrow window", "window of the length"}))
def test_masks_that_eager_makes_too_have_its_bits(name: str) -> None:
    sizes, inputs = OF_INPUTS[name]
    model, batch = _decoder("mistral", **sizes), _batch(**inputs)
    step, _ = compiled_step(model, batch, stages=2)
    assert_bitwise(step, eager_step(model, batch))


def test_a_mask_joined_with_blocks_has_the_bits_of_eager() -> None:
    """Gemma 4's text masks allow for blocks of images also where there are none, and keys are grouped."""
    model, config = small_model("causal", "gemma4_unified")
    batch = small_batch("causal", config)
    expected = eager_step(model, batch)
    step, _ = compiled_step(model, batch, stages=2)
    assert_bitwise(step, expected)


@pytest.mark.long
def test_symbolic_lengths_have_the_bits_of_eager() -> None:
    model = _decoder("llama")
    compiled = roundpipe_fx.compile(copy.deepcopy(model), dynamic=True)
    for _ in range(2):
        step = train_step(compiled, compiled, _batch())
        assert_bitwise(step, eager_step(model, _batch()))
    assert not _squares(compiled.plan)


@pytest.mark.long
@pytest.mark.parametrize("padded", [False, True])
def test_encoders(padded: bool) -> None:
    """Ones for padding that are an input are not known, but a mask of ones changes no bits of the CPU's kernel."""
    torch.manual_seed(0)
    model = hugging_face.bert().train()
    batch = _batch(attention_mask=torch.ones(2, TOKENS, dtype=torch.long)) if padded else _batch()
    step, _ = compiled_step(model, batch, stages=2)
    assert_bitwise(step, eager_step(model, batch))


@pytest.mark.long
def test_an_encoder_with_a_decoder_has_the_bits_of_eager() -> None:
    """Position biases make the masks of self-attention something else."""
    torch.manual_seed(0)
    model, batch = hugging_face.t5().train(), _batch()
    step, _ = compiled_step(model, batch, stages=2)
    assert_bitwise(step, eager_step(model, batch))


def _by_compile(model: nn.Module, batch: dict[str, Any]) -> roundpipe_fx.Plan:
    compiled = roundpipe_fx.compile(model)
    compiled(**batch).loss.backward()
    return compiled.plan


def _by_backend(model: nn.Module, batch: dict[str, Any]) -> roundpipe_fx.Plan:
    torch.compile(model, backend="roundpipe_fx")(**batch).loss.backward()
    return roundpipe_fx.plans(model)[-1]


def _in_place(model: nn.Module, batch: dict[str, Any]) -> roundpipe_fx.Plan:
    model.compile(backend="roundpipe_fx")
    model(**batch).loss.backward()
    return roundpipe_fx.plans(model)[-1]


def _planned(model: nn.Module, batch: dict[str, Any]) -> roundpipe_fx.Plan:
    return roundpipe_fx.plan(model, **batch)


def _in_a_pipeline(model: nn.Module, batch: dict[str, Any]) -> roundpipe_fx.Plan:
    compiled = roundpipe_fx.compile(model, stages=2, num_microbatches=2, devices=["cpu", "cpu"], schedule="1f1b")
    compiled.forward_backward(**batch)
    return compiled.plan


FRONT_DOORS = {
    "compile": _by_compile,
    "backend": _by_backend,
    "in place": _in_place,
    "plan": _planned,
    "pipeline": _in_a_pipeline,
}


@pytest.mark.parametrize("name", FRONT_DOORS)
@pytest.mark.quick_every(4)
def test_every_front_door_leaves_masks_out(name: str) -> None:
    torch._dynamo.reset()
    plan = FRONT_DOORS[name](_decoder("llama"), _batch(rows=2))
    assert not _squares(plan)


def test_no_step_holds_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    without = _planned(_decoder("llama"), _batch())
    monkeypatch.setattr(capture, "leave_out_causal_masks", lambda module: None)
    torch._dynamo.reset()
    with_mask = _planned(_decoder("llama"), _batch())
    assert _squares(with_mask)
    assert without.peak_bytes < with_mask.peak_bytes
