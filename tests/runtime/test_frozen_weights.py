"""Frozen weights cost no gradients, no inputs saved for them, and no product that is thrown away."""

from __future__ import annotations

from collections import Counter
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import roundpipe_fx

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu_backward")


class _Counted(TorchDispatchMode):
    """Counts operations that cost multiplications, and the multiplications of matrix products."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.multiplications = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__ if isinstance(func, torch._ops.OpOverload) else ""
        if name in _PRODUCTS:
            self.calls[name] += 1
            if name in ("mm", "addmm"):
                left, right = args[-2:]
                self.multiplications += left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def _adapted(targets: Any, bias: str = "none") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    lora = peft.LoraConfig(r=2, target_modules=targets, bias=bias, task_type="CAUSAL_LM")  # type: ignore[arg-type]
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def _tokens() -> torch.Tensor:
    return torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))


def _backward(model: Any) -> _Counted:
    loss = model(input_ids=_tokens(), labels=_tokens()).loss
    with _Counted() as counted:
        loss.backward()
    return counted


def _saved_eagerly(model: nn.Module) -> int:
    """Bytes of the storages that eager autograd saves, but those of the model's own tensors and of the inputs."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    tokens = _tokens()
    own.add(tokens.untyped_storage().data_ptr())
    kept: dict[int, int] = {}
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            saved.append(tensor.detach())  # so that no address is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens)
    return sum(kept.values())


@pytest.mark.parametrize("targets", [["q_proj"], ["down_proj"], ["v_proj", "up_proj"], "all-linear"])
@pytest.mark.quick_every(4)
def test_the_backward_has_the_products_of_eager_pefts(targets: Any) -> None:
    eager, own = _adapted(targets), _adapted(targets)
    model = roundpipe_fx.compile(own, memory_budget=1.0, stage_compiler="eager")
    expected = _backward(eager)
    found = _backward(model)
    assert found.calls == expected.calls
    assert found.multiplications == expected.multiplications > 0
    assert {n for n, p in own.named_parameters() if p.grad is not None} == {
        n for n, p in eager.named_parameters() if p.requires_grad
    }
    for one, other in zip(own.parameters(), eager.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or (other.grad is not None and torch.equal(one.grad, other.grad))
    assert model.plan.saved_bytes <= _saved_eagerly(eager)


@pytest.mark.long
def test_recomputation_stops_at_the_first_layer_with_an_adapter() -> None:
    last = roundpipe_fx.compile(_adapted(r".*layers\.2\..*q_proj"), memory_budget=0.0, stage_compiler="eager")
    every = roundpipe_fx.compile(_adapted(["q_proj"]), memory_budget=0.0, stage_compiler="eager")
    for model in (last, every):
        model(input_ids=_tokens(), labels=_tokens()).loss.backward()
    # Of three layers, two are not differentiated, and nothing is computed again for them.
    assert last.plan.recompute_seconds < 0.5 * every.plan.recompute_seconds
    assert _backward(last).multiplications < 0.5 * _backward(every).multiplications
