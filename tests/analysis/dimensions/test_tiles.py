"""What is claimed of operators holds: tiles put together equal the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.analysis.dimensions.of_node import RULES
from roundpipe_fx.analysis.dimensions.pointwise import is_pointwise, pointwise
from tests.analysis.dimensions.pointwise_samples import tagged_sample
from tests.analysis.dimensions.sample_sizes import Sizes
from tests.analysis.dimensions.samples import EXACT, NEED_A_DEVICE, SAMPLES, WITHOUT_VALUES
from tests.analysis.dimensions.tiles import assert_divides

aten = torch.ops.aten

SIZES = st.builds(Sizes, *[st.integers(1, 6)] * 4)


def test_every_rule_has_a_sample() -> None:
    assert not [str(operator) for operator in RULES.keys() - SAMPLES.keys() - NEED_A_DEVICE]


def _name(operator: Any) -> str:
    return str(operator)


@pytest.mark.parametrize("operator", SAMPLES, ids=_name)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(sizes=SIZES, seed=st.integers(0, 1 << 30))
@pytest.mark.quick_every(11)
def test_tiles_put_together_are_the_whole(operator: Any, sizes: Sizes, seed: int) -> None:
    for sample in SAMPLES[operator]:
        torch.manual_seed(seed)
        assert_divides(operator, sample(sizes), operator in EXACT, operator not in WITHOUT_VALUES)


@pytest.mark.parametrize("operator", SAMPLES, ids=_name)
def test_every_operator_is_described_in_some_form(operator: Any) -> None:
    sizes = Sizes(4, 3, 5, 2)
    torch.manual_seed(0)
    assert any(assert_divides(operator, sample(sizes), False, False) for sample in SAMPLES[operator])


def _tagged() -> list[Any]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace in ("aten", "prims"):
            packet, _, overload = rest.partition(".")
            try:
                found.append(getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default"))
            except AttributeError:  # removed operators keep their name
                continue
    return sorted({operator for operator in found if is_pointwise(operator)} - SAMPLES.keys(), key=str)


TAGGED = [
    operator
    for operator in _tagged()
    if not operator._schema.is_mutable and torch.Tag.nondeterministic_seeded not in operator.tags
]

NOT_SAMPLED = {aten.equal.default}  # returns no tensor


@pytest.mark.parametrize("operator", [op for op in TAGGED if op not in NOT_SAMPLED], ids=_name)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(sizes=SIZES, seed=st.integers(0, 1 << 30))
@pytest.mark.quick_every(4)
def test_operators_tagged_as_pointwise_are(operator: Any, sizes: Sizes, seed: int) -> None:
    for integers in (False, True):
        torch.manual_seed(seed)
        call = tagged_sample(operator, integers)(sizes)
        try:
            operator(*call.args, **call.kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # not of this kind of numbers
        assert assert_divides(operator, call, False) is not None
        return
    raise AssertionError("neither takes floating-point numbers nor integers")


WRONG = [
    (aten._softmax.default, pointwise),
    (aten.cumsum.default, pointwise),
    (aten.flip.default, pointwise),
    (aten.mean.dim, RULES[aten.sum.dim_IntList]),
    (aten.amax.default, RULES[aten.sum.dim_IntList]),
]


@pytest.mark.parametrize(("operator", "rule"), WRONG, ids=[str(operator) for operator, _ in WRONG])
def test_a_wrong_claim_is_found(monkeypatch: pytest.MonkeyPatch, operator: Any, rule: Any) -> None:
    monkeypatch.setitem(RULES, operator, rule)
    torch.manual_seed(0)
    sample = SAMPLES[operator][0]
    with pytest.raises((AssertionError, RuntimeError)):
        assert_divides(operator, sample(Sizes(4, 5, 6, 3)), False)
