"""Products and linear algebra, of matrices that are well conditioned."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind, table
from benchmarks.fuzz.program import Builder

_SQUARE = {
    "inverse": "torch.linalg.inv({a})",
    "inverse_ex": "torch.linalg.inv_ex({a})[0]",
    "cholesky": "torch.linalg.cholesky({a} @ {a}.mT)",
    "solve": "torch.linalg.solve({a}, {a}.tanh())",
    "solve_vector": "torch.linalg.solve({a}, {a}[..., 0])",
    "triangular_solve": "torch.linalg.solve_triangular({a}.tril(), {a}[..., :2], upper=False)",
    "qr": "torch.linalg.qr({a})[1].abs()",
    "qr_both": "torch.matmul(*torch.linalg.qr({a} + {a}.tril()))",
    "matrix_exp": "torch.linalg.matrix_exp({a} * 0.2)",
    "det": "torch.linalg.det({a} * 0.4)",
    "slogdet": "torch.linalg.slogdet({a})[1]",
    "logdet": "torch.logdet({a} @ {a}.mT)",
    "svdvals": "torch.linalg.svdvals({a}).sum(-1)",
    "eigvalsh": "torch.linalg.eigvalsh({a} + {a}.mT).square().sum(-1)",
    "matrix_power": "torch.linalg.matrix_power({a} * 0.3, 3)",
    "pinv": "torch.linalg.pinv({a})",
    "matrix_norm": "torch.linalg.matrix_norm({a})",
    "nuclear_norm": "torch.linalg.matrix_norm({a}, 'nuc')",
    "trace": "{a}.diagonal(0, -2, -1).sum(-1)",
    "lu_solve": "torch.linalg.lu_solve(*torch.linalg.lu_factor({a}), {a}[..., :1])",
    "cholesky_solve": "torch.cholesky_solve({a}[..., :1], torch.linalg.cholesky({a} @ {a}.mT))",
    "cholesky_inverse": "torch.cholesky_inverse(torch.linalg.cholesky({a} @ {a}.mT))",
    "householder": "torch.linalg.householder_product({a}.tril(-1) * 0.1 + torch.eye(3, dtype={a}.dtype), {a}[..., 0] * 0.1)",
    "multi_dot": "torch.linalg.multi_dot([{a}[0], {a}[-1], {a}[0]])",
    "kron": "torch.kron({a}[0], {a}[-1])",
    "lstsq": "torch.linalg.lstsq({a}, {a}[..., :1] + 1).solution",
    "ldl": "torch.linalg.solve({a} @ {a}.mT, {a}.sum(-1, keepdim=True))",
}


def _square(b: Builder, text: str) -> None:
    x = b.rows()
    a = b.let(
        f"{b.module(f'nn.Linear({x.shape[1]}, 9)')}({x}).tanh().view(-1, 3, 3) * 0.5 + 4 * torch.eye(3, dtype=x0.dtype)"
    )
    b.out(text.format(a=a))


table(_SQUARE, _square, 0.25)

_PRODUCTS = {
    "einsum_pairs": "torch.einsum('bld,bmd->blm', {x}, {x} * 0.5)",
    "einsum_sum": "torch.einsum('bld,bld->bl', {x}, {x}.sin())",
    "einsum_outer": "torch.einsum('bi,bj->bij', {x}[:, 0], {x}[:, -1])",
    "einsum_diagonal": "torch.einsum('bii->bi', {x} @ {x}.mT)",
    "bmm": "torch.bmm({x}, {x}.mT) * 0.3",
    "baddbmm": "torch.baddbmm({x} @ {x}.mT, {x}, {x}.mT, beta=0.5, alpha=0.2)",
    "matmul_batch": "{x} @ {x}[0].mT",
    "matmul_vector": "{x} @ {x}[0, 0]",
    "tensordot": "torch.tensordot({x}, {x}[0].mT, dims=([2], [0]))",
    "inner": "torch.inner({x}, {x}[0])",
    "outer": "torch.outer({x}[:, 0, 0], {x}[0, 0])",
    "addmm": "torch.addmm({x}[0, 0], {x}[:, 0], {x}[0].mT @ {x}[0], beta=0.5)",
    "addmv": "torch.addmv({x}[:, 0, 0], {x}[:, -1], {x}[0, 0])",
    "addbmm": "torch.addbmm({x}[0] @ {x}[0].mT, {x}, {x}.mT, alpha=0.1)",
    "chain_product": "({x} @ {x}.mT).tanh() @ {x}",
    "vecdot": "torch.linalg.vecdot({x}, {x}.roll(1, -1))",
    "cross": "torch.linalg.cross({x}[..., :3], {x}[..., :3].roll(1, 0)) if {x}.shape[2] >= 3 else {x} * 2",
    "gram": "torch.einsum('bld,ble->bde', {x}, {x}) / {x}.shape[1]",
    "linear_attention": "F.elu({x}) @ (({x}.softmax(1)).mT @ {x})",
}


def _product(b: Builder, text: str) -> None:
    b.out(text.format(x=b.sequence()))


table(_PRODUCTS, _product, 0.5)


@kind(0.8)
def matmul_parameter(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.out(f"{x} @ {b.parameter(x.shape[-1], b.size(3, 4, 8))}")


@kind(0.6)
def batched_parameter(b: Builder) -> None:
    x = b.sequence()
    w = b.parameter(x.shape[1], x.shape[2], 4)
    b.out(f"torch.einsum('bld,ldk->blk', {x}, {w})")


@kind(0.5)
def parameter_alone(b: Builder) -> None:
    """Computed from parameters only: the same for every row."""
    w = b.parameter(4, 4)
    b.out(f"torch.linalg.matrix_norm({w} @ {w}.t() + torch.eye(4, dtype=x0.dtype)) * {b.float()}")


@kind(0.4)
def kalman_gain(b: Builder) -> None:
    w = b.parameter(3, 3)
    cov = b.let(f"{w} @ {w}.t() + torch.eye(3, dtype=x0.dtype)")
    x = b.rows()
    b.out(f"{b.module(f'nn.Linear({x.shape[1]}, 3)')}({x}) @ torch.linalg.inv({cov}).t()")


@kind(0.4)
def gaussian_log_prob(b: Builder) -> None:
    x = b.rows()
    w = b.let(f"torch.linalg.cholesky({b.parameter(3, 3)}.square() * 0.1 + 2 * torch.eye(3, dtype=x0.dtype)).tril()")
    b.out(f"(F.pad({x}, (0, 3))[:, :3] @ {w}).square().sum(-1) + {w}.diagonal().log().sum()")
