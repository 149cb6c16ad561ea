"""Random numbers."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind, table
from benchmarks.fuzz.program import Builder

_RANDOM = {
    "dropout": "F.dropout({x}, 0.3)",
    "dropout_half": "F.dropout({x}, 0.5)",
    "dropout_in_place": "F.dropout({x} * 2, 0.2, inplace=True)",
    "dropout_twice": "F.dropout(F.dropout({x}, 0.2).tanh(), 0.2)",
    "alpha_dropout": "F.alpha_dropout({x}, 0.2, training=True)",
    "feature_alpha_dropout": "F.feature_alpha_dropout({x}, 0.2, training=True)",
    "rand_like": "{x} * torch.rand_like({x})",
    "randn_like": "{x} + torch.randn_like({x}) * 0.1",
    "randn": "{x} * torch.randn({x}.shape[-1], dtype={x}.dtype)",
    "rand_batch": "{x} * torch.rand({x}.shape[0], *[1] * ({x}.dim() - 1), dtype={x}.dtype)",
    "bernoulli": "{x} * torch.bernoulli(torch.full_like({x}, 0.7))",
    "bernoulli_of": "{x} * torch.bernoulli({x}.detach().sigmoid())",
    "bernoulli_p": "{x} * torch.empty_like({x}).bernoulli_(0.6)",
    "normal_in_place": "{x} + torch.empty_like({x}).normal_(0, 0.1)",
    "uniform_in_place": "{x} + {x}.new_empty({x}.shape).uniform_(-0.1, 0.1)",
    "exponential_in_place": "{x} * torch.empty_like({x}).exponential_(1.5).clamp(max=3)",
    "log_normal": "{x} * torch.empty_like({x}).log_normal_(0, 0.2)",
    "normal_of": "torch.normal({x}.detach(), 0.1) + {x}",
    "rrelu": "F.rrelu({x}, training=True)",
    "gumbel_softmax": "F.gumbel_softmax({x}, dim=-1)",
    "gumbel_hard": "F.gumbel_softmax({x}, hard=True, dim=-1)",
    "randperm": "{x}[torch.randperm({x}.shape[0])]",
    "randint": "{x} * torch.randint(1, 3, {x}.shape)",
    "multinomial": "{x}.flatten(1).gather(1, torch.multinomial({x}.detach().flatten(1).softmax(1), 2))",
    "categorical": "{x} * torch.multinomial({x}.detach().flatten(1).softmax(1), 1).view(-1, *[1] * ({x}.dim() - 1))",
    "mixup": "torch.lerp({x}, {x}[torch.randperm({x}.shape[0])], torch.rand(1, dtype={x}.dtype))",
    "drop_path": "{x} + {x}.tanh() * (torch.rand({x}.shape[0], *[1] * ({x}.dim() - 1)) < 0.8) / 0.8",
    "noise_on_weights": "{x} * (1 + torch.randn(1, dtype={x}.dtype) * 0.1)",
    "poisson": "{x} + torch.poisson({x}.detach().abs()) * 0.1",
    "cauchy": "{x} + torch.empty_like({x}).cauchy_().clamp(-1, 1) * 0.1",
    "geometric": "{x} * torch.empty_like({x}).geometric_(0.5).clamp(max=4)",
    "reparametrize": "{x} + ({x} * 0.5).exp().clamp(max=2) * torch.randn_like({x})",
}


def _random(b: Builder, text: str) -> None:
    b.program.notes.add("random")
    b.out(text.format(x=b.float(at_least=2, batched=True)))


table(_RANDOM, _random, 0.22)


@kind(0.6)
def dropout_module(b: Builder) -> None:
    b.program.notes.add("random")
    x = b.float(at_least=2, batched=True)
    b.out(f"{b.module(f'nn.Dropout({b.rng.choice([0.1, 0.5, 0.0])})')}({x})")


@kind(0.3)
def dropout2d(b: Builder) -> None:
    b.program.notes.add("random")
    b.out(f"F.dropout2d({b.image()}, 0.4)")


@kind(0.2)
def dropout1d(b: Builder) -> None:
    b.program.notes.add("random")
    b.out(f"F.dropout1d({b.sequence()}, 0.4)")


@kind(0.2)
def attention_dropout(b: Builder) -> None:
    b.program.notes.add("random")
    q = b.let(f"{b.sequence()}.unsqueeze(1)")
    b.out(f"F.scaled_dot_product_attention({q}, {q}.tanh(), {q}, dropout_p=0.3).squeeze(1)")


@kind(0.2)
def fractional_max_pool(b: Builder) -> None:
    b.program.notes.add("random")
    b.out(f"F.fractional_max_pool2d({b.image()}, 2, output_ratio=0.6)")
