"""Losses, in the middle of a program as at its end."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind, table
from benchmarks.fuzz.program import Builder

_LOSSES = {
    "mse_loss": "F.mse_loss({x}, {x}.detach().roll(1, 1), reduction='{r}')",
    "l1_loss": "F.l1_loss({x}, {x}.detach() * 0.5, reduction='{r}')",
    "smooth_l1_loss": "F.smooth_l1_loss({x}, {x}.detach().roll(1, 1), beta=0.5, reduction='{r}')",
    "huber_loss": "F.huber_loss({x}, {x}.flip(1), delta=0.7, reduction='{r}')",
    "cross_entropy": "F.cross_entropy({x}, {x}.flip(1).argmax(1), reduction='{r}')",
    "cross_entropy_smooth": "F.cross_entropy({x}, {x}.flip(1).argmax(1), label_smoothing=0.1, reduction='{r}')",
    "cross_entropy_ignore": "F.cross_entropy({x}, {x}.flip(1).argmax(1), ignore_index=0, reduction='sum')",
    "cross_entropy_weight": "F.cross_entropy({x}, {x}.flip(1).argmax(1), weight=torch.ones({x}.shape[1], dtype={x}.dtype) * 0.7)",
    "cross_entropy_soft": "F.cross_entropy({x}, {x}.flip(1).softmax(1), reduction='{r}')",
    "nll_loss": "F.nll_loss({x}.log_softmax(1), {x}.argmin(1), reduction='{r}')",
    "bce_loss": "F.binary_cross_entropy({x}.sigmoid() * 0.98 + 0.01, ({x} > 0.3).to({x}.dtype), reduction='{r}')",
    "bce_logits": "F.binary_cross_entropy_with_logits({x}, ({x} > 0.3).to({x}.dtype), reduction='{r}')",
    "bce_pos_weight": "F.binary_cross_entropy_with_logits({x}, {x}.sigmoid().detach(), pos_weight={x}.new_tensor(2.0))",
    "kl_div": "F.kl_div({x}.log_softmax(1), {x}.detach().roll(1, 1).softmax(1), reduction='{r}')",
    "kl_div_log": "F.kl_div({x}.log_softmax(1), {x}.flip(1).log_softmax(1), reduction='batchmean', log_target=True)",
    "hinge_embedding": "F.hinge_embedding_loss({x}, ({x} > 0).to({x}.dtype) * 2 - 1, reduction='{r}')",
    "soft_margin": "F.soft_margin_loss({x}, ({x}.roll(1, 1) > 0).to({x}.dtype) * 2 - 1, reduction='{r}')",
    "margin_ranking": "F.margin_ranking_loss({x}, {x}.flip(1), ({x} > 0).to({x}.dtype) * 2 - 1, margin=0.1)",
    "cosine_embedding": "F.cosine_embedding_loss({x}, {x}.flip(1), ({x}[:, 0] > 0).to({x}.dtype) * 2 - 1)",
    "triplet": "F.triplet_margin_loss({x}, {x}.roll(1, 1), {x}.flip(1) + 0.3)",
    "gaussian_nll": "F.gaussian_nll_loss({x}, {x}.detach().flip(1), {x}.square() + 0.2)",
    "poisson_nll": "F.poisson_nll_loss({x}.tanh(), {x}.detach().abs(), reduction='{r}')",
    "multi_margin": "F.multi_margin_loss({x}, {x}.flip(1).argmax(1), reduction='{r}')",
    "multilabel_margin": "F.multilabel_soft_margin_loss({x}, ({x} > 0).to({x}.dtype))",
    "ctc": "F.ctc_loss({x}[:, :, None].expand(-1, -1, 4).transpose(0, 1).cumsum(-1).log_softmax(-1), torch.ones({x}.shape[0], 1, dtype=torch.long), torch.full(({x}.shape[0],), {x}.shape[1]), torch.ones({x}.shape[0], dtype=torch.long))",
    "contrastive": "F.cross_entropy({x} @ {x}.t() * 0.3, torch.arange({x}.shape[0]))",
    "focal": "((1 - {x}.sigmoid()) ** 2 * F.softplus({x})).mean()",
    "dice": "1 - 2 * ({x}.sigmoid() * ({x} > 0)).sum() / ({x}.sigmoid().sum() + ({x} > 0).sum() + 1)",
}


def _loss(b: Builder, text: str) -> None:
    x = b.rows()
    b.out(text.format(x=x, r=b.rng.choice(["mean", "sum", "none"])))


table(_LOSSES, _loss, 0.35)


@kind(0.4)
def image_cross_entropy(b: Builder) -> None:
    x = b.image()
    b.out(f"F.cross_entropy({x}, {x}.detach().flip(1).argmax(1))")


@kind(0.3)
def linear_cross_entropy(b: Builder) -> None:
    """As language models end."""
    x = b.sequence()
    head = b.module(f"nn.Linear({x.shape[2]}, 7, bias=False)")
    b.out(
        f"F.cross_entropy({head}({x}).flatten(0, 1).float(), torch.arange({x}.shape[0] * {x}.shape[1]) % 7).to({x}.dtype)"
    )
