"""A batch is split by samples, or refused with the option to give; so are outputs merged."""

from __future__ import annotations

import collections
import dataclasses
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import roundpipe_fx
from roundpipe_fx.pipeline.batches.microbatch import check_batch_sizes, merge, split_inputs, split_labels


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.arange(count * torch.Size(shape).numel()).reshape(count, *shape).float()


class Fields(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "a"


class Opaque:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


RECORDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "dict": lambda x, y: {"x": x, "y": y},
    "named tuple": Fields,
    "dataclass": Record,
    "encoding": lambda x, y: transformers.BatchEncoding({"x": x, "y": y}),
    "namespace": lambda x, y: types.SimpleNamespace(x=x, y=y),
    "proxy": lambda x, y: types.MappingProxyType({"x": x, "y": y}),
}


def _of(record: Any, name: str) -> torch.Tensor:
    return getattr(record, name) if hasattr(record, name) else record[name]


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("by_name", [False, True])
def test_records_are_split_field_by_field(kind: str, by_name: bool) -> None:
    record = RECORDS[kind](rows(4, 2), rows(4))
    args, kwargs = ((), {"batch": record}) if by_name else ((record,), {})
    pieces = [kwargs["batch"] if by_name else args[0] for args, kwargs in split_inputs(args, kwargs, 2)]
    assert all(type(piece) is type(record) for piece in pieces)
    for name in ("x", "y"):
        assert torch.equal(torch.cat([_of(piece, name) for piece in pieces]), _of(record, name))
    assert [_of(label, "y").tolist() for label in split_labels(record, 2)] == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize("kind", ["dict", "named tuple", "dataclass", "encoding"])
def test_records_as_batch_and_output_of_a_step(kind: str) -> None:
    class Net(nn.Linear):
        def forward(self, batch: Any) -> Any:
            y = super().forward(_of(batch, "x"))
            return RECORDS[kind](y, (y - _of(batch, "y")[:, None]).square().mean())

    model, batch = Net(2, 1), RECORDS[kind](rows(4, 2), rows(4))
    expected = model(batch)
    gradient = torch.autograd.grad(_of(expected, "y"), model.weight)[0]
    compiled = roundpipe_fx.compile(model, num_microbatches=2)
    output = compiled(batch)
    assert type(output) is type(expected)
    torch.testing.assert_close(_of(output, "x"), _of(expected, "x"))
    torch.testing.assert_close(_of(output, "y"), _of(expected, "y"))
    _of(output, "y").backward()
    torch.testing.assert_close(model.weight.grad, gradient)


IMAGES = [torch.ones(3, size, size) for size in (4, 5, 6, 7)]
TARGETS = [{"boxes": torch.ones(count, 4), "label": torch.tensor(count)} for count in (1, 5, 2, 2)]


@pytest.mark.parametrize("make", [list, tuple, collections.deque])
def test_lists_of_samples_are_split_by_samples(make: Any) -> None:
    images, targets = make(IMAGES), make(TARGETS)
    for args, kwargs in (((images, targets), {}), ((images,), {"targets": targets}), ((targets,), {})):
        pieces = split_inputs(args, kwargs, 2)
        for index, (own_args, own_kwargs) in enumerate(pieces):
            for own in (*own_args, *own_kwargs.values()):
                assert type(own) is type(images) and len(own) == 2
            if args[0] is images:
                assert own_args[0][0] is IMAGES[2 * index]
    pieces = split_inputs((images,), {}, 2, labels=rows(4))  # the labels tell how many there are
    assert [len(own[0]) for own, _ in pieces] == [2, 2]
    assert [len(own) for own in split_labels(targets, 2, None, ((rows(4, 2),), {}))] == [2, 2]
    check_batch_sizes((images,), {}, targets, 2)


def test_lists_of_tensors_with_all_samples_are_split_in_each() -> None:
    levels = [rows(4, 3, 3), rows(4, 2)]
    for args in ((levels,), (rows(4), levels), ((rows(6, 2), rows(6) > 1),), ([rows(4)],)):
        (first, _), (second, _) = split_inputs(args, {}, 2)
        for own in (first[-1], second[-1]):
            assert len(own) == len(args[-1]) and all(len(part) == len(args[-1][0]) // 2 for part in own)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([rows(4, 2), rows(4, 2)],), r"args\[0\] \(clips\) is a list of 2 items whose tensors have 4"),
        (((rows(4, 2), rows(4, 2)),), r"is a tuple of 2 items"),
        ((rows(2), [rows(2), rows(2)]), r"and the batch 2 rows"),
        ((rows(4), [rows(3), rows(5)]), "tensors have 3, 5"),
        ((rows(2), ["a", "b"]), "of 2 items without tensors, as many as the batch has rows"),
        (([rows(3), rows(5)], [rows(3), rows(5), rows(6)]), "list of 2 items"),
        (([rows(3), [rows(5)]],), "list of 2 items whose tensors have 3, 5"),
    ],
)
def test_lists_that_may_be_either_are_refused(args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"{message}.*split_input=.*microbatches="):
        split_inputs(args, {}, 2, names=["clips"])


def test_what_a_specification_says_of_lists() -> None:
    lists = [rows(4, 2), rows(4, 2)]
    for spec in ((0,), ([0, 0],)):
        assert split_inputs((lists,), {}, 2, (spec, None))[1][0][0][1].shape == (2, 2)
    (own, _), _ = split_inputs((rows(2), ["a", "b"], (2, 2)), {}, 2, ((0, 0, None), None))
    assert own[1] == ["a"] and own[2] == (2, 2)
    assert split_labels([1, 0, 1, 0], 2, 0) == [[1, 0], [1, 0]]


@pytest.mark.parametrize(
    "value", [Opaque(rows(4)), {"a": Opaque(rows(4))}, np.ones(4), iter([rows(2)]), {rows(4)}, Opaque([rows(4)])]
)
def test_objects_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"args\[0\].* \(batch.*Give split_input=.*a dataclass.*microbatches="):
        split_inputs((value, rows(4)), {}, 2, names=["batch", "y"])
    with pytest.raises(TypeError, match=r"labels.*Give split_label="):
        split_labels(value, 2, None, ((rows(4),), {}))
    (own, _), _ = split_inputs((value, rows(4)), {}, 2, ((None, 0), None))
    assert own[0] is value
    assert split_inputs((value,), {}, 1) == [((value,), {})] and split_labels(value, 1) == [value]


def test_objects_without_tensors_are_the_same_for_each() -> None:
    model, config = nn.Linear(1, 1), types.SimpleNamespace(name="a")
    (own, _), _ = split_inputs((rows(4), model, config, torch.float32, rows(4).shape, "text", None), {}, 2)
    assert own[1] is model and own[2:] == (config, torch.float32, torch.Size([4]), "text", None)


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_lens_q", "offsets", "row_offsets", "kv_indptr"])
def test_offsets_of_sequences_are_refused_by_their_name(name: str) -> None:
    offsets = torch.tensor([0, 3, 4, 8])
    for args, kwargs in (((rows(4, 8),), {name: offsets}), ((rows(4, 8), offsets), {}), ((rows(1, 8), offsets), {})):
        with pytest.raises(ValueError, match=rf"{name}.* has the name of offsets.*split_input"):
            split_inputs(args, kwargs, 2, names=["x", name])
    ((_, own), *_) = split_inputs((rows(4, 8),), {name: offsets}, 2, (None, {name: None}))
    assert own[name] is offsets


def test_tensors_that_look_like_offsets_are_told_of() -> None:
    with pytest.warns(UserWarning, match=r"args\[1\] \(places\) is split like the batch.*looks like offsets"):
        split_inputs((rows(4, 8), torch.tensor([0, 3, 4, 8])), {}, 2, names=["x", "places"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for others in ([0, 1, 1, 3], [0, 1, 2, 3], [1, 2, 3, 8]):
            split_inputs((rows(4, 8), torch.tensor(others)), {}, 2)


def test_gradients_of_inputs_in_records_and_lists() -> None:
    class Net(nn.Linear):
        def forward(self, record: Record, samples: list[torch.Tensor]) -> torch.Tensor:
            kept = torch.stack([sample.square().sum() for sample in samples])
            return (super().forward(record.x)[:, 0] * record.y * kept).sum()

    record = Record(rows(4, 2).requires_grad_(), rows(4).requires_grad_())
    samples = [rows(size).requires_grad_() for size in (3, 3, 5, 5)]
    inputs, model = [record.x, record.y, *samples], Net(2, 1)
    expected = torch.autograd.grad(model(record, samples), inputs)
    compiled = roundpipe_fx.compile(model, num_microbatches=2, loss_reduction="sum")
    compiled(record, samples).backward()
    for value, gradient in zip(inputs, expected, strict=True):
        torch.testing.assert_close(value.grad, gradient)


# Outputs


def test_types_are_kept() -> None:
    outputs = [(1.5, "a", None, True, rows(2), Record(rows(2), torch.tensor(1.0))) for _ in range(2)]
    merged = merge(outputs, rows=[2, 2], weights=[0.5, 0.5])
    assert merged[:4] == (1.5, "a", None, True) and len(merged[4]) == 4
    assert type(merged[5]) is Record and len(merged[5].x) == 4 and merged[5].y == 1.0


@pytest.mark.parametrize("values", [(1.0, 2.0), (3, 4), (True, False), ("a", "b"), (None, 1), (1, 1.0)])
def test_numbers_that_differ_are_refused(values: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match=r"output\['n'\] is a \w+ that differs between microbatches.*merge_output="):
        merge([{"n": value, "y": rows(7)} for value in values])
    assert merge([{"n": values[0], "y": rows(7)} for _ in range(2)], rows=[7, 7])["n"] is values[0]
    assert merge([{"n": value} for value in values], {"n": None})["n"] is values[0]


def test_a_number_of_rows_is_refused() -> None:
    for count in (2, torch.Size([2, 3])):
        with pytest.raises(TypeError, match="is also the number of rows"):
            merge([{"n": count}] * 2, rows=[2, 2])
    assert merge([{"n": float("nan")}] * 2, rows=[2, 2])["n"] != 0


@pytest.mark.parametrize(
    "make", [lambda x: torch.distributions.Normal(x, 1.0), Opaque, lambda x: {"a": Opaque(x)}, lambda x: {x}]
)
def test_objects_with_tensors_are_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"the model returns an object.*merge_output="):
        merge([make(rows(2)) for _ in range(2)])
    value = make(rows(2))
    assert merge([value]) is value


def test_tensors_that_are_one_are_returned_once() -> None:
    table, scale, x = nn.Parameter(rows(3, 2)), torch.tensor(2.0), rows(4, 2)
    merged = merge([(table, scale, table.t(), own) for own in x.split(2)], rows=[2, 2])
    assert merged[0] is table and merged[1] is scale and merged[2].shape == (2, 3) and merged[3].shape == (4, 2)
    expanded = rows(1, 2).expand(4, 2)
    assert merge([own for own in expanded.split(2)], rows=[2, 2]).shape == (4, 2)


def test_a_dimension_that_is_not_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"output has 7 along its first dimension.*merge_output"):
        merge([rows(7, 7), rows(7, 7) + 1], rows=[2, 2])
    assert merge([rows(7, 7), rows(7, 7)], 0, rows=[2, 2]).shape == (14, 7)
    assert merge([rows(6), rows(6)], rows=[2, 2]).shape == (12,)  # tokens
    assert merge([rows(3), rows(5)], rows=[2, 2]).shape == (8,)  # sizes that depend on data
    with pytest.raises(TypeError, match="true or false for each"):
        merge([torch.tensor(True), torch.tensor(False)])


def test_lists_among_outputs() -> None:
    detections = [[{"box": rows(count, 4)} for count in counts] for counts in ((1, 3), (4, 1))]
    assert [len(own["box"]) for own in merge(detections, rows=[2, 2])] == [1, 3, 4, 1]
    assert merge([["a", "b", "c"], ["d", "e"]], rows=[3, 2]) == ["a", "b", "c", "d", "e"]
    levels = [[rows(2, 3), rows(2), rows(2, 5)] for _ in range(2)]
    assert [own.shape[0] for own in merge(levels, rows=[2, 2])] == [4, 4, 4]
    for either in ([rows(2), rows(2)], ["a", "b"]):
        with pytest.raises(ValueError, match=r"as many items as a microbatch has rows.*merge_output="):
            merge([either, either], rows=[2, 2])
    assert merge([(torch.tensor(1.0), rows(2)) for _ in range(2)], rows=[2, 2])[1].shape == (4,)


class _Outputs(nn.Module):
    """Returns what is its own beside what is computed."""

    def __init__(self, make: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.table, self.make = nn.Linear(2, 3), nn.Parameter(rows(5, 2)), make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self, self.linear(x))


def test_a_parameter_that_is_returned() -> None:
    model = _Outputs(lambda self, y: {"y": y, "table": self.table, "name": "net", "scale": 0.5})
    compiled, x = roundpipe_fx.compile(model, num_microbatches=2), rows(4, 2)
    for output in (compiled(x), compiled(x)):
        assert output["y"].shape == (4, 3) and output["table"].shape == (5, 2)
        assert (output["name"], output["scale"]) == ("net", 0.5)
    (output["y"].sum() + output["table"].sum()).backward()
    assert torch.equal(model.table.grad, torch.ones(5, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2])
def test_an_object_as_the_output(count: int) -> None:
    model = _Outputs(lambda self, y: torch.distributions.Normal(y, 1.0, validate_args=False))
    x = rows(4, 2)
    compiled = roundpipe_fx.compile(
        model, num_microbatches=count, merge_output=None if count == 1 else lambda outputs: outputs
    )
    outputs = compiled(x)
    means = [outputs.mean] if count == 1 else [own.mean for own in outputs]
    torch.cat(means).square().sum().backward()
    (expected,) = torch.autograd.grad(model(x).mean.square().sum(), [model.linear.weight])
    torch.testing.assert_close(model.linear.weight.grad, expected)
    if count == 2:
        refusing = roundpipe_fx.compile(model, num_microbatches=count)
        with pytest.raises(TypeError, match="merge_output"):
            refusing(x)
        model.zero_grad()
        with pytest.raises(TypeError, match="merge_output"):
            refusing.forward_backward(x, loss_fn=lambda output: output.mean.sum(), return_outputs=True)
        assert model.linear.weight.grad is None


def test_a_cache_of_a_language_model() -> None:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    model, tokens = transformers.LlamaForCausalLM(config).eval(), torch.randint(32, (4, 6))
    compiled = roundpipe_fx.compile(model, num_microbatches=2)
    with torch.no_grad():
        output, expected = compiled(tokens, use_cache=True), model(tokens, use_cache=True)
    assert type(output) is type(expected) and type(output.past_key_values) is type(expected.past_key_values)
    for own, layer in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(own.keys, layer.keys)
        torch.testing.assert_close(own.values, layer.values)


def test_specifications_of_fields() -> None:
    record = Record(rows(3, 4), rows(4))
    (own, _), _ = split_inputs((record,), {}, 2, (({"x": 1, "y": 0, "name": None},), None))
    assert own[0].x.shape == (3, 2) and own[0].y.shape == (2,)
    with pytest.raises(ValueError, match=r"no such part. Fields of dataclasses and named tuples are specified by name"):
        split_inputs((Fields(rows(4), rows(4)),), {}, 2, (((0, None),), None))
