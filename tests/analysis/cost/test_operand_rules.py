"""What planning runs on made-up operands is named, gets operands that cannot end the process, and leaves no trace."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import roundpipe_fx
from benchmarks.made_up_operands import Watch, pool_cases
from roundpipe_fx.analysis.cost import measured, operand_rules, predict_workspaces, probe, real_layout, synthetic
from roundpipe_fx.analysis.cost.measured import MeasuredCosts
from roundpipe_fx.analysis.cost.operand_rules import ANY_NUMBERS, RULES, kinds_of_operator, may_run_alone
from roundpipe_fx.analysis.cost.roofline import DEVICES
from roundpipe_fx.analysis.cost.synthetic import UnsafeOperandsError, synthetic_operands
from roundpipe_fx.ir.joint_graph import Mark
from roundpipe_fx.torch_private import fakes_on
from tests import hugging_face
from tests.long import long_but

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")


def node_of(target: Any, *arguments: Any, **named: Any) -> fx.Node:
    """A node that calls an operator; tensors among its arguments become fake ones."""
    mode = torch._subclasses.fake_tensor.FakeTensorMode()
    graph = fx.Graph()

    def operand(value: Any) -> Any:
        if isinstance(value, list):
            return [operand(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        made = graph.placeholder("x")
        made.meta["val"] = mode.from_tensor(value)
        return made

    args = tuple(operand(value) for value in arguments)
    node = graph.call_function(target, args, {name: operand(value) for name, value in named.items()})
    node.meta["val"] = mode.from_tensor(torch.empty(2))
    return node


def _large(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(1 if tensor.dtype is torch.bool else 100)


def _made(node: fx.Node) -> list[Any]:
    args, kwargs = synthetic_operands(node, CPU, _large)
    return [*args, *kwargs.values()]


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


X = torch.ones(5, 3)
LARGEST: dict[str, tuple[fx.Node, dict[int, int]]] = {
    "embedding": (node_of(aten.embedding.default, X, ints(7)), {1: 4}),
    "its gradient": (node_of(aten.embedding_dense_backward.default, X, ints(5), 9, -1, False), {1: 8}),
    "gather": (node_of(aten.gather.default, X, -1, ints(5, 2)), {2: 2}),
    "scatter": (node_of(aten.scatter_add.default, X, 0, ints(2, 3), X), {2: 4}),
    "loss": (node_of(aten.nll_loss_forward.default, X, ints(5), None, 1, -100), {1: 2}),
    "loss of images": (
        node_of(aten.nll_loss2d_forward.default, torch.ones(2, 4, 3, 3), ints(2, 3, 3), None, 1, -1),
        {1: 3},
    ),
    "take": (node_of(aten.take.default, X, ints(4)), {1: 14}),
    "unpooling": (node_of(aten.max_unpool2d.default, torch.ones(1, 1, 2, 2), ints(1, 1, 2, 2), [4, 4]), {1: 15}),
    "bags": (node_of(aten._embedding_bag.default, X, ints(8), ints(2)), {1: 4, 2: 0}),
    "several": (node_of(aten.repeat_interleave.Tensor, ints(4), output_size=10), {0: 3}),
    "pivots": (node_of(aten.linalg_lu_solve.default, torch.ones(4, 4), ints(4).int(), torch.ones(4, 1)), {1: 4}),
    "weights": (node_of(aten.multinomial.default, X, 1), {0: 1}),
    "probabilities": (node_of(aten.bernoulli.default, X), {0: 1}),
    "an expanded table": (node_of(aten.gather.default, X, 0, ints(1, 1).expand(5, 3)), {2: 4}),
}


@pytest.mark.parametrize("name", LARGEST)
def test_operands_are_within_what_kernels_accept(name: str) -> None:
    node, largest = LARGEST[name]
    made = _made(node)
    assert {place: int(made[place].max()) for place in largest} == largest


def test_what_is_made_up_is_accepted() -> None:
    made = _made(LARGEST["several"][0])
    assert made[0].sum() == 10 and made[0].min() >= 0
    pivots = _made(LARGEST["pivots"][0])[1]
    assert pivots.tolist() == [1, 2, 3, 4]


def test_an_index_after_a_mask_is_of_the_dimension_that_it_indexes() -> None:
    mask = torch.ones(6, 2, dtype=torch.bool)
    node = node_of(aten.index.Tensor, torch.ones(6, 2, 4), [mask, ints(12)])
    assert _made(node)[1][1].max() == 3
    assert _made(node_of(aten.index.Tensor, torch.ones(6, 2), [None, ints(3)]))[1][1].max() == 1


REFUSED: dict[str, Callable[[], fx.Node]] = {
    "index of an empty table": lambda: node_of(aten.embedding.default, torch.ones(0, 3), ints(7)),
    "index of an empty dimension": lambda: node_of(aten.gather.default, torch.ones(5, 0), 1, ints(5, 1)),
    "counts of nothing": lambda: node_of(aten.repeat_interleave.Tensor, ints(0), output_size=3),
    "assertion": lambda: node_of(aten._functional_assert_async.msg, torch.ones(()), "text", torch.ones(())),
    "recurrent layer of cuDNN": lambda: node_of(
        aten._cudnn_rnn.default, X, [X], 1, None, X, X, 2, 3, 0, 1, True, 0.0, True, False, [], None
    ),
    "CTC": lambda: node_of(aten._ctc_loss.default, X, ints(1, 2), [1], [1]),
    "CTC of cuDNN": lambda: node_of(aten._cudnn_ctc_loss.default, X, ints(2), [1], [1], 0, False, False),
    "packed sequences": lambda: node_of(
        aten._flash_attention_forward.default, X, X, X, ints(2), ints(2), 2, 2, 0.0, False, False
    ),
    "gradient of packed sequences": lambda: node_of(
        aten._scaled_dot_product_flash_attention_backward.default,
        *(X, X, X, X, X, X, ints(3), ints(3), 2, 2, 0.0, False, ints(2), ints()),
    ),
    "segments": lambda: node_of(aten.segment_reduce.default, X, "sum", offsets=ints(3)),
    "jagged": lambda: node_of(aten._jagged_to_padded_dense_forward.default, X, [ints(3)], [4]),
    "grouped": lambda: node_of(aten._grouped_mm.default, X, X, ints(2).int()),
    "opaque memory": lambda: node_of(aten.cudnn_batch_norm_backward.default, X, X, X, None, None, X, X, 1e-5, X),
    "written in place": lambda: node_of(aten.cumsum_.default, X, 0),
    "a user's operator": lambda: node_of(torch.ops.roundpipe_fx_tests.harmful.default, X),
}


@torch.library.custom_op("roundpipe_fx_tests::harmful", mutates_args=())
def harmful(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("it is run")


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_refused(name: str) -> None:
    node = REFUSED[name]()
    assert not may_run_alone(node)
    with pytest.raises(UnsafeOperandsError):
        synthetic_operands(node, CPU, torch.Tensor.zero_)
    if kinds_of_operator(node.target) is None:
        with pytest.raises(UnsafeOperandsError):
            synthetic.run_alone(node.target, node.args, node.kwargs)


def test_an_index_without_elements_is_of_anything() -> None:
    assert may_run_alone(node_of(aten.embedding.default, torch.ones(0, 3), ints(0)))


def _attention(dropout: float = 0.1) -> fx.GraphModule:
    """Memory-efficient attention and its gradient, as fake CUDA kernels describe them."""
    fake = fakes_on("cuda")
    q = fake(torch.ones(2, 4, 16, 8))

    def run(q: torch.Tensor) -> torch.Tensor:
        out, sums, seed, offset = aten._scaled_dot_product_efficient_attention(q, q, q, None, True, dropout)
        made = aten._scaled_dot_product_efficient_attention_backward(
            out, q, q, q, None, out, sums, seed, offset, dropout, [True, True, True, False]
        )
        return made[0]

    with q.fake_mode:
        return make_fx(run)(q)


def _one(module: fx.GraphModule, target: Any) -> fx.Node:
    (node,) = [node for node in module.graph.nodes if node.target is target]
    return node


def test_the_seed_of_attention_is_on_the_host() -> None:
    """The meta device stands for the one that is not there."""
    node = _one(_attention(), aten._scaled_dot_product_efficient_attention_backward.default)
    args, _ = synthetic_operands(node, META, lambda tensor: tensor)
    devices = [value.device.type for value in args if isinstance(value, torch.Tensor)]
    assert devices == ["meta"] * 6 + ["cpu"] * 2


def test_every_name_is_an_operator_and_every_rule_of_an_argument() -> None:
    """Of one of the supported versions of PyTorch; those that others lack are few."""
    names = ANY_NUMBERS.split()
    assert len({*names, *RULES}) == len(names) + len(RULES)
    lacking = [name for name in (*names, *RULES) if not hasattr(aten, name)]
    assert len(lacking) <= 3, lacking
    for name, kinds in RULES.items():
        if name not in lacking:
            packet = getattr(aten, name)
            schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
            known = {argument.name for schema in schemas for argument in schema.arguments}
            assert kinds.keys() <= known, name


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_probed", {})


def _planned(watch: Watch, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    torch._dynamo.reset()
    with watch:
        roundpipe_fx.compile(model)(*args, **kwargs)


@pytest.mark.parametrize("name", long_but(hugging_face.MODELS, quick={"gpt2", "resnet"}))
@pytest.mark.usefixtures("untried")
def test_only_named_operators_of_models_are_run(name: str) -> None:
    make, make_batch = hugging_face.MODELS[name]
    watch = Watch()
    _planned(watch, make(), **make_batch())
    assert watch.graphs and len(watch.ran) > 5 and not watch.unnamed


@pytest.mark.parametrize("part", range(8))
@pytest.mark.usefixtures("untried")
@pytest.mark.long
def test_only_named_operators_of_the_fuzzers_pool_are_run(part: int) -> None:
    """All of it: ``python -m benchmarks.made_up_operands pool``."""
    watch = Watch()
    for _, make in list(pool_cases())[part::8]:
        model, args, kwargs = make()
        try:
            _planned(watch, model, *args, **kwargs)
        except Exception:  # some kinds refuse some inputs
            logging.getLogger(__name__).info("a program cannot be compiled", exc_info=True)
    assert watch.graphs > 5 and len(watch.ran) > 20 and not watch.unnamed


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).logsumexp(-1).square().sum()


def test_what_is_not_named_is_learned_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_probed", {})
    monkeypatch.setattr(operand_rules, "_PLAIN", operand_rules._PLAIN - {"logsumexp"})
    kinds_of_operator.cache_clear()
    model, watch, x = Summed(), Watch(), torch.randn(40, 16)
    reference = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=1.0, fullgraph=True)
    try:
        with watch:
            for _ in range(2):
                model.zero_grad()
                compiled(x).backward()
    finally:
        kinds_of_operator.cache_clear()
    assert "aten.logsumexp.default" in watch.untried and "aten.logsumexp.default" not in watch.ran
    assert compiled.plan.assumed["workspace of aten.logsumexp.default"] >= 40 * 32 * 4
    reference(x).backward()
    assert torch.equal(model.layer.weight.grad, reference.layer.weight.grad)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The operators that are run on synthetic operands."""
    found: list[Any] = []
    run = synthetic.run_alone

    def noted(target: Any, args: Any, kwargs: Any) -> Any:
        found.append(target)
        return run(target, args, kwargs)

    for module in (probe, real_layout, measured):
        monkeypatch.setattr(module, "run_alone", noted)
    monkeypatch.setattr(probe, "_probed", {})
    yield found


def _sum() -> fx.Node:
    node = node_of(aten.cumsum.default, torch.ones(40, 8, dtype=torch.bool), 0)
    with node.args[0].meta["val"].fake_mode:
        node.meta["val"] = torch.empty(40, 8, dtype=torch.int64)
    return node


def test_nothing_is_tried_for_which_there_is_no_memory(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    node = _sum()
    with monkeypatch.context() as patched:
        patched.setattr(synthetic, "available_memory", lambda device: 1000)
        patched.setattr(synthetic, "_SMALL", 0)
        assert predict_workspaces([node], CPU) == {} and predict_workspaces(
            [node], CPU, learned={str(node.target): 7}
        ) == {node: 7}
        assert MeasuredCosts(DEVICES["cpu"], CPU).node_seconds(node, 10, 10, torch.float32) > 0
        assert node.meta[Mark.UNTRIED] and not runs
    predict_workspaces([node], CPU)  # there is memory again
    assert runs and Mark.UNTRIED not in node.meta


def test_running_out_of_memory_is_not_kept(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any) -> Any:
        raise torch.OutOfMemoryError("there is none")

    node = _sum()
    with monkeypatch.context() as patched:
        patched.setattr(probe, "run_alone", exhausted)
        assert probe.probe_in_thread(node, CPU) is None
    assert probe.probe_in_thread(node, CPU) is not None


@pytest.mark.usefixtures("untried")
def test_errors_leave_the_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of kernels included, which are raised when the device is waited for."""

    def failing(*_: Any) -> Any:
        torch.rand(3)
        raise RuntimeError("device-side assert")

    node, state = _sum(), torch.get_rng_state()
    monkeypatch.setattr(probe, "run_alone", failing)
    monkeypatch.setattr(measured, "run_alone", failing)
    assert probe.probe_in_thread(node, CPU) is None
    assert MeasuredCosts(DEVICES["cpu"], CPU).node_seconds(node, 10, 10, torch.float32) > 0
    assert torch.equal(state, torch.get_rng_state())
    monkeypatch.undo()
    monkeypatch.setattr(probe, "_probed", {})
    monkeypatch.setattr(probe, "_synchronize", failing)
    assert probe.probe_in_thread(node, CPU) is None
    assert torch.equal(state, torch.get_rng_state())


def test_measuring_costs_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    node = node_of(aten.sin.default, X)
    assert MeasuredCosts(DEVICES["cpu"], CPU).node_seconds(node, 10, 10, torch.float32) > 0
    assert torch.equal(state, torch.get_rng_state())


SWITCHES: dict[str, tuple[Callable[[bool], Any], Callable[[], bool]]] = {
    "flash": (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled),
    "memory-efficient": (torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.mem_efficient_sdp_enabled),
    "cuDNN": (torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled),
    "math": (torch.backends.cuda.enable_math_sdp, torch.backends.cuda.math_sdp_enabled),
    "benchmark": (
        lambda on: setattr(torch.backends.cudnn, "benchmark", on),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "deterministic": (
        lambda on: setattr(torch.backends.cudnn, "deterministic", on),
        lambda: torch.backends.cudnn.deterministic,
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_what_kernels_depend_on_is_in_the_key(name: str) -> None:
    switch, is_on = SWITCHES[name]
    before, settings = is_on(), probe.kernel_settings()
    try:
        switch(not before)
        assert probe.kernel_settings() != settings
    finally:
        switch(before)
    assert probe.kernel_settings() == settings


def test_sizes_among_arguments_do_not_make_small_tensors_large(runs: list[Any]) -> None:
    x = torch.ones(2, 2)
    assert real_layout.probe_small_values(node_of(aten.new_zeros.default, x, [2**20, 2**20])) is None
    assert real_layout.probe_small_values(node_of(aten.full.default, [2**20, 2**20], 1.0)) is None
    assert not runs


def test_small_tensors_are_within_rules(runs: list[Any]) -> None:
    node = node_of(aten.embedding.default, torch.ones(1, 2), ints(2))
    with node.args[0].meta["val"].fake_mode:
        node.meta["val"] = torch.empty(2, 2)
    assert real_layout.probe_small_values(node) is not None
    assert runs == [aten.embedding.default]
