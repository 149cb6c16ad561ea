"""Views, copies in another order, and what is put together."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind, table
from benchmarks.fuzz.program import Builder

_VIEWS = {
    "transpose": "{x}.transpose(1, -1)",
    "transpose_batch": "{x}.transpose(0, 1) * 2",
    "permute": "{x}.permute(0, *range({x}.dim() - 1, 0, -1))",
    "movedim": "{x}.movedim(1, -1)",
    "reshape_last": "{x}.reshape({x}.shape[0], -1)",
    "view_flat": "{x}.contiguous().view({x}.shape[0], -1)",
    "unsqueeze": "{x}.unsqueeze(1)",
    "squeeze": "{x}.unsqueeze(1).squeeze(1)",
    "expand": "{x}.unsqueeze(1).expand(-1, 2, *{x}.shape[1:])",
    "repeat": "{x}.repeat(1, 2, *[1] * ({x}.dim() - 2))",
    "tile": "{x}.tile(2)",
    "repeat_interleave": "{x}.repeat_interleave(2, dim=1)",
    "slice": "{x}[:, 1:]",
    "slice_step": "{x}[..., ::2]",
    "slice_batch": "{x}[1:] * {x}[:-1]",
    "select": "{x}[:, 0]",
    "select_last": "{x}[..., -1]",
    "index_none": "{x}[:, None, ..., None]",
    "flip": "{x}.flip(1)",
    "flip_batch": "{x}.flip(0)",
    "roll": "{x}.roll(1, 1)",
    "roll_all": "torch.roll({x}, (1, 1), (0, 1))",
    "rot90": "torch.rot90({x}, 1, (1, -1)) if {x}.dim() > 2 else {x} * 2",
    "chunk": "torch.mul(*{x}.repeat_interleave(2, 1).chunk(2, 1))",
    "split_sizes": "torch.cat({x}.split([1, {x}.shape[1] - 1], 1)[::-1], 1)",
    "unbind": "sum({x}.unbind(1))",
    "tensor_split": "torch.cat([y.tanh() for y in {x}.tensor_split(2, 1)], 1)",
    "diagonal": "{x}.diagonal(0, 0, 1)",
    "diag_embed": "torch.diag_embed({x}[:, :3] if {x}.dim() == 2 else {x}[..., 0])",
    "tril": "{x}.tril() + {x}.triu(1) * 0.5",
    "triu": "{x}.triu()",
    "unfold": "{x}.unfold(-1, 2, 1)",
    "as_strided": "{x}.contiguous().as_strided(({x}.shape[0], 2), ({x}.stride(0) if {x}.is_contiguous() else {x}.shape[1:].numel(), 1))",
    "swap_view": "{x}.mT if {x}.dim() > 2 else {x}.t().contiguous().t()",
    "view_as": "{x}.flatten().view_as({x})",
    "unflatten": "{x}.flatten(1).unflatten(1, (-1, {x}.shape[-1]))",
    "ravel": "{x}.ravel() * 0.5",
    "atleast": "torch.atleast_3d({x})",
    "cat_self": "torch.cat([{x}, {x} * 2], 1)",
    "cat_batch": "torch.cat([{x}, {x}.tanh()], 0)",
    "hstack": "torch.hstack([{x}, {x}.sin()])",
    "cat_zeros": "torch.cat([{x}, {x}.new_zeros({x}.shape)], -1)",
    "narrow": "{x}.narrow(-1, 0, 2)",
    "expand_last": "{x}[..., :1].expand_as({x})",
    "broadcast_tensors": "torch.mul(*torch.broadcast_tensors({x}, {x}[:, :1]))",
    "block_diag": "torch.block_diag({x}[0].flatten()[:3], {x}[-1].flatten()[:2]).sum(0)",
    # Its sign: the last bit is another one where sums are rounded otherwise.
    "view_dtype": "{x} + ({x}.detach().view(torch.int64 if {x}.dtype == torch.float64 else torch.int32) < 0).to({x}.dtype)",
    "view_complex": "torch.view_as_real(torch.view_as_complex(torch.stack([{x}, {x} * 2], -1)) * (1 + 0.5j)).sum(-1)",
    "fft": "torch.fft.fft({x}, norm='ortho').real",
    "fft_pair": "torch.fft.ifft(torch.fft.fft({x}) * 1.5j).imag",
    "rfft": "torch.fft.irfft(torch.fft.rfft({x}), n={x}.shape[-1]) * 2",
    "rfft_abs": "(torch.fft.rfft({x}, norm='ortho') + 0.1).abs()",
    "fft2": "torch.fft.fft2({x}, norm='ortho').abs()",
    "hfft": "torch.fft.hfft({x}.to(torch.complex64 if {x}.dtype == torch.float32 else torch.complex128), norm='ortho')",
    "fftshift": "torch.fft.fftshift({x}, dim=-1)",
    "fourier_mixing": "torch.fft.fft(torch.fft.fft({x}, dim=-1, norm='ortho'), dim=1, norm='ortho').real",
    "dct_filter": "torch.fft.irfft(torch.fft.rfft({x}, dim=1) * torch.exp(torch.tensor(0.3j)), n={x}.shape[1], dim=1)",
    "stft": "torch.stft({x}.flatten(1), 4, 2, 4, torch.hann_window(4, dtype={x}.dtype), return_complex=True).abs().square()",
    "complex_view": "torch.view_as_real(torch.complex({x}, {x}.sin())).flatten(-2)",
    "meshgrid": "torch.mul(*torch.meshgrid({x}[0].flatten()[:4], {x}[-1].flatten()[:5], indexing='ij'))",
    "cartesian": "torch.cartesian_prod({x}[0].flatten()[:3], {x}[-1].flatten()[:2]).sin()",
    "vander": "torch.vander({x}[0].flatten()[:4].tanh(), 3)",
    "pad_constant": "F.pad({x}, (1, 2), value=0.3)",
    "pad_negative": "F.pad({x}, (-1, 1))",
    "clone_strided": "{x}.transpose(1, -1).clone(memory_format=torch.preserve_format).transpose(1, -1)",
}


def _view(b: Builder, text: str) -> None:
    b.out(text.format(x=b.float(at_least=2, batched=True, fits=lambda v: v.shape[-1] > 1 and v.shape[1] > 1)))


table(_VIEWS, _view, 0.55)


@kind(0.6)
def pad_modes(b: Builder) -> None:
    x = b.image()
    mode = b.rng.choice(["reflect", "replicate", "circular"])
    b.out(f'F.pad({x}, (1, 0, 0, 1), mode="{mode}")')


@kind(0.6)
def pad_sequence_mode(b: Builder) -> None:
    x = b.sequence()
    mode = b.rng.choice(["reflect", "replicate", "circular"])
    b.out(f'F.pad({x}, (1, 1), mode="{mode}")')


@kind(0.6)
def pixel_shuffle(b: Builder) -> None:
    x = b.image()
    b.out(f"F.pixel_shuffle({x}.repeat(1, 4, 1, 1), 2)")


@kind(0.4)
def pixel_unshuffle(b: Builder) -> None:
    b.out(f"F.pixel_unshuffle(F.interpolate({b.image()}, scale_factor=2.0), 2)")


@kind(0.4)
def channel_shuffle(b: Builder) -> None:
    b.out(f"F.channel_shuffle({b.image()}.repeat(1, 2, 1, 1), 2)")


@kind(0.6)
def channels_last(b: Builder) -> None:
    b.out(f"{b.image()}.contiguous(memory_format=torch.channels_last) * 1.5")


@kind(0.5)
def fold_unfold(b: Builder) -> None:
    x = b.image()
    b.out(f"F.fold(F.unfold({x}, 2), ({x}.shape[2], {x}.shape[3]), 2)")


@kind(0.5)
def image_to_columns(b: Builder) -> None:
    b.out(f"F.unfold({b.image()}, (2, 1), stride=(2, 1))")


@kind(0.8)
def stack_of_values(b: Builder) -> None:
    x = b.float()
    b.out(f"torch.stack([{x}, {b.like(x)}, {b.like(x)}], -1).amax(-1)")


@kind(0.6)
def split_results(b: Builder) -> None:
    """Several results, not all of which need be read."""
    x = b.float(at_least=2, batched=True, fits=lambda v: v.shape[-1] >= 4 and v.dim - 1 not in v.varies)
    size = x.shape[-1]
    b.out(f"{x}.split([1, {size // 2}, {size - 1 - size // 2}], -1)", 3)


@kind(0.5)
def unbind_results(b: Builder) -> None:
    x = b.float(at_least=2, batched=True, fits=lambda v: 2 <= v.shape[1] <= 4)
    b.out(f"{x}.unbind(1)", x.shape[1])


@kind(0.6)
def heads(b: Builder) -> None:
    """As attention cuts its heads and puts them together again."""
    x = b.sequence()
    count = b._divisor(x.shape[2])
    b.out(f"{x}.unflatten(-1, ({count}, -1)).transpose(1, 2).tanh().transpose(1, 2).flatten(2)")


@kind(0.6)
def chain_of_views(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    text = str(x)
    steps = [
        ".unsqueeze(-1)",
        ".transpose(1, -1)",
        ".flatten(1)",
        ".contiguous()",
        "[:, 1:]",
        ".flip(1)",
        ".squeeze(-1)",
    ]
    for _ in range(b.size(2, 3, 4, 5)):
        text += b.rng.choice(steps)
    b.out(text)
