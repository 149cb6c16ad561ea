from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate, sum_reducer

import roundpipe_fx
from benchmarks.fuzz.meter import StoragePeak
from roundpipe_fx.pipeline.batches.microbatch import check_batch_sizes, merge, split_inputs, split_labels
from tests.pipeline.steps import CPUS, Blocks, batch_of, squares


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.arange(count * torch.Size(shape).numel()).reshape(count, *shape).float()


def test_by_convention_tensors_are_split_and_the_rest_is_the_same() -> None:
    args = (rows(5, 2), 3, None, torch.tensor(7), {"a": [rows(5, 1), "text"]})
    kwargs = {"mask": rows(5) > 2, "scale": 0.5}
    pieces = split_inputs(args, kwargs, 2)
    assert [piece[0][0].shape[0] for piece in pieces] == [3, 2]
    for own_args, own_kwargs in pieces:
        assert own_args[1:3] == (3, None) and own_args[3] == 7 and own_args[4]["a"][1] == "text"
        assert own_kwargs["scale"] == 0.5
        assert own_args[0].shape[0] == own_args[4]["a"][0].shape[0] == own_kwargs["mask"].shape[0]
    assert torch.equal(torch.cat([piece[0][0] for piece in pieces]), args[0])


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.filterwarnings("ignore:roundpipe_fx. a batch of")
def test_sizes_differ_by_one_at_most(batch: int, count: int) -> None:
    pieces = split_inputs((rows(batch),), {}, count)
    sizes = [piece[0][0].shape[0] for piece in pieces]
    assert len(sizes) == min(batch, count) and sum(sizes) == batch
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_one_microbatch_is_the_batch_itself() -> None:
    x = rows(4)
    assert split_inputs((x,), {}, 1)[0][0][0] is x
    assert merge([x]) is x


@pytest.mark.parametrize(
    ("dim", "same"), [(1, None), (TensorChunkSpec(1), _Replicate), (TensorChunkSpec(1), _Replicate())]
)
def test_specifications(dim: Any, same: Any) -> None:
    args, kwargs = (rows(3, 4), rows(7)), {"x": rows(4)}
    pieces = split_inputs(args, kwargs, 2, ((dim, same), {"x": 0}))
    assert [piece[0][0].shape for piece in pieces] == [(3, 2), (3, 2)]
    assert all(piece[0][1] is args[1] for piece in pieces)
    assert split_inputs(args[:1], {}, 2, ((1,), None))[1][0][0].shape == (3, 2)
    labels = split_labels((rows(3, 4), 5), 2, (dim, same))
    assert [label[0].shape for label in labels] == [(3, 2), (3, 2)] and labels[0][1] == 5


def test_a_specification_stands_for_all_below_it() -> None:
    value = {"a": [rows(2, 4), rows(3, 4)], "b": rows(4)}
    (own,), _ = split_inputs((value,), {}, 2, (({"a": 1, "b": 0},), None))[0]
    assert own["a"][0].shape == (2, 2) and own["a"][1].shape == (3, 2) and own["b"].shape == (2,)


def test_callables() -> None:
    def by_parity(args: Any, kwargs: Any, count: int) -> Any:
        return [(args[0][i::count],) for i in range(count)], [kwargs] * count

    pieces = split_inputs((rows(4),), {"k": 1}, 2, by_parity)
    assert pieces[1][0][0].tolist() == [1.0, 3.0] and pieces[1][1] == {"k": 1}
    assert split_labels(rows(4), 2, lambda label, count: list(label.chunk(count)))[1].tolist() == [2.0, 3.0]
    assert merge([1, 2], lambda outputs: sum(outputs)) == 3
    with pytest.raises(TypeError, match="split_input must return"):
        split_inputs((rows(4),), {}, 2, lambda args, kwargs, count: 3)
    with pytest.raises(ValueError, match="returned 1 args and 2 kwargs"):
        split_inputs((rows(4),), {}, 2, lambda args, kwargs, count: ([args], [kwargs, kwargs]))


def test_outputs_are_merged_in_order() -> None:
    outputs = [{"y": rows(2, 2) + i, "loss": torch.tensor(float(i)), "n": 7} for i in range(3)]
    merged = merge(outputs)
    assert torch.equal(merged["y"], torch.cat([own["y"] for own in outputs]))
    assert merged["loss"] == 3.0 and merged["n"] == 7
    merged = merge(outputs, {"y": 1, "loss": sum_reducer, "n": None})
    assert merged["y"].shape == (2, 6) and merged["loss"] == 3.0
    with pytest.raises(ValueError, match="different structures"):
        merge([{"a": 1}, {"b": 1}])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (((3,), None), r"args\[0\] cannot be split along dimension 3: it is a tensor of 1 dimensions"),
        ((("x",), None), "does not say how to split"),
        (((True,), None), "does not say how to split"),
    ],
)
def test_specifications_that_cannot_be(spec: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        split_inputs((rows(4),), {}, 2, spec)


def test_batches_that_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="nothing to split"):
        split_inputs((1,), {"k": None}, 2)
    with pytest.raises(ValueError, match="the batch is empty"):
        split_inputs((rows(0),), {}, 2)
    with pytest.raises(ValueError, match="labels were split into 3 microbatches, but the inputs into 2"):
        split_labels(rows(3), 2, lambda label, count: list(label))
    with pytest.raises(ValueError, match="labels has 3"):
        check_batch_sizes((rows(2),), {}, rows(3), 2)
    with pytest.raises(ValueError, match=r"args\[1\] has 3.*needs a specification: split_input="):
        split_inputs((rows(2), rows(3), rows(3)), {}, 2, ((0,), None))


def test_sizes_that_specifications_make_differ() -> None:
    """Rows and their flattened tokens are split alike; what is not is an error that asks for no specification."""
    tokens = torch.arange(12)
    pieces = split_inputs((rows(4), tokens), {"k": rows(4)[None]}, 2, ((0, 0), {"k": 1}))
    assert [piece[0][1].tolist() for piece in pieces] == [list(range(6)), list(range(6, 12))]
    assert [piece[1]["k"].tolist() for piece in pieces] == [[[0, 1]], [[2, 3]]]
    check_batch_sizes((rows(4),), {}, tokens, 2, ((0,), None), 0)
    check_batch_sizes((rows(4),), {}, rows(5), 2, ((0,), None), None)  # labels follow the convention, for themselves
    check_batch_sizes((rows(4),), {}, rows(5), 2, ((0,), None), lambda label, count: [label] * count)
    for sizes, count in (((4, 6), 2), ((3, 6), 2)):
        with pytest.raises(ValueError, match="as specified they cannot be split alike into 2") as raised:
            split_inputs(tuple(map(rows, sizes)), {}, count, ((0, 0), None))
        assert "needs a specification" not in str(raised.value)
    with pytest.raises(ValueError, match="labels 6 along dimension 0, so as specified"):
        check_batch_sizes((rows(4),), {}, rows(6), 2, ((0,), None), 0)


def test_a_step_with_its_own_specifications() -> None:
    class Scaled(Blocks):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return super().forward(x.T) * table

    model, (x, y), table = Scaled(), batch_of(8), torch.randn(16)
    expected = model(x.T, table)
    compiled = roundpipe_fx.compile(
        model,
        devices=CPUS,
        num_microbatches=4,
        loss_reduction="sum",
        split_input=((1, None), None),
        split_label=0,
        merge_output=lambda outputs: torch.cat(outputs),
    )
    loss, output = compiled.forward_backward(x.T, table, labels=y, loss_fn=squares, return_outputs=True)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(loss, squares(expected, y).detach())


def test_outputs_that_are_not_to_be_merged() -> None:
    with pytest.raises(TypeError, match=r"merge_output=False: merge_output=list gives"):
        merge([torch.ones(2), torch.ones(2)], False)
    assert merge([1, 2], list) == [1, 2]


@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x.transpose(1, 2), lambda x: x[:, 1:], lambda x: x.unsqueeze(0)]
)
@pytest.mark.parametrize("kind", ["plain", "slice", "expanded"])
def test_views_of_an_input_are_put_together_without_a_copy(view: Any, kind: str) -> None:
    x = {"plain": rows(5, 3, 4), "slice": rows(9, 3, 4)[2:7], "expanded": rows(1, 3, 4).expand(5, 3, 4)}[kind]
    dim = 1 if view(x).dim() == 4 else 0
    merged = merge([view(piece[0][0]) for piece in split_inputs((x,), {}, 2)], dim)
    assert torch.equal(merged, view(x))
    assert [own for own, size in zip(merged.stride(), merged.shape, strict=True) if size > 1] == [
        own for own, size in zip(view(x).stride(), merged.shape, strict=True) if size > 1
    ]
    assert merged.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_an_input_is_put_together_to_itself() -> None:
    x = rows(5, 3).requires_grad_()
    assert merge([piece[0][0] for piece in split_inputs((x,), {}, 2)]) is x


def test_other_tensors_of_one_storage_are_copied() -> None:
    x = rows(6, 2)
    for parts in ([x[3:], x[:3]], [x[:2], x[3:]], [x[:3], x[:3]], [x[:3], x[3:].clone()], [x[:3], x[3:].double()]):
        merged = merge(parts)
        assert torch.equal(merged, torch.cat(parts))
        assert merged.untyped_storage()._cdata != x.untyped_storage()._cdata


class _AnInputToo(torch.nn.Module):
    def __init__(self, view: Any) -> None:
        super().__init__()
        self.linear, self.view = torch.nn.Linear(4, 1), view

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.view(x)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.transpose(1, 2)])
@pytest.mark.parametrize("differentiated", [False, True])
def test_an_input_that_is_returned_takes_no_memory(view: Any, differentiated: bool) -> None:
    model = _AnInputToo(view)
    compiled = roundpipe_fx.compile(model, num_microbatches=2, stages=1)
    x = rows(6, 3, 4).requires_grad_(differentiated)
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        output, same = compiled(x)
        assert torch.equal(same, view(x))
        if not differentiated:
            assert same.untyped_storage()._cdata == x.untyped_storage()._cdata
        (output.square().sum() + (same.square().sum() if differentiated else 0)).backward()
    expected = torch.autograd.grad(
        model(x)[0].square().sum() + (x.square().sum() if differentiated else 0),
        [*model.parameters(), *([x] if differentiated else [])],
    )
    found = [parameter.grad for parameter in model.parameters()] + ([x.grad] if differentiated else [])
    for left, right in zip(found, expected, strict=True):
        assert left is not None
        torch.testing.assert_close(left, right)


class _OutputsWithoutGradients(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.linear(x), x.exp().repeat(1, 32), x.sin().repeat(1, 16)


def test_outputs_that_are_put_together_are_planned_for() -> None:
    """They exist twice for a moment; a loss outside needs less, since nothing flows back to them."""
    compiled = roundpipe_fx.compile(_OutputsWithoutGradients(), num_microbatches=4, stages=1)
    x = rows(64, 4)
    for _ in range(2):
        with StoragePeak() as measured:
            compiled(x)[0].sum().backward()
    assert compiled.plan.pipeline is not None
    assert measured.peak <= compiled.plan.pipeline.peak_bytes[0] <= 1.03 * measured.peak
