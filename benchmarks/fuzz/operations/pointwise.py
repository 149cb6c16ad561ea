"""Operations number by number."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind, table
from benchmarks.fuzz.program import Builder

_ONE = {
    "relu": "F.relu({x})",
    "gelu": "F.gelu({x})",
    "gelu_tanh": 'F.gelu({x}, approximate="tanh")',
    "silu": "F.silu({x})",
    "mish": "F.mish({x})",
    "elu": "F.elu({x})",
    "celu": "F.celu({x}, 0.7)",
    "selu": "F.selu({x})",
    "leaky_relu": "F.leaky_relu({x}, 0.1)",
    "softplus": "F.softplus({x}, beta=2)",
    "softplus_threshold": "F.softplus({x}, 1.0, 2.0)",
    "hardtanh": "F.hardtanh({x})",
    "hardswish": "F.hardswish({x})",
    "hardsigmoid": "F.hardsigmoid({x})",
    "relu6": "F.relu6({x} * 3)",
    "tanh": "torch.tanh({x})",
    "sigmoid": "torch.sigmoid({x})",
    "logsigmoid": "F.logsigmoid({x})",
    "tanhshrink": "F.tanhshrink({x})",
    "softsign": "F.softsign({x})",
    "softshrink": "F.softshrink({x})",
    "hardshrink": "F.hardshrink({x})",
    "threshold": "F.threshold({x}, 0.1, -0.5)",
    "sin": "torch.sin({x})",
    "cos": "torch.cos({x})",
    "sinc": "torch.sinc({x})",
    "exp": "torch.exp({x}.clamp(max=2))",
    "exp2": "torch.exp2({x}.clamp(-3, 2))",
    "expm1": "torch.expm1({x}.tanh())",
    "log1p": "torch.log1p({x}.abs())",
    "log": "torch.log({x}.square() + 0.5)",
    "sqrt": "torch.sqrt({x}.abs() + 0.1)",
    "rsqrt": "torch.rsqrt({x}.square() + 0.5)",
    "reciprocal": "torch.reciprocal(1 + {x} * {x})",
    "erf": "torch.erf({x})",
    "erfinv": "torch.erfinv({x}.tanh() * 0.8)",
    "atan": "torch.atan({x})",
    "asinh": "torch.asinh({x})",
    "sinh": "torch.sinh({x}.tanh())",
    "acos": "torch.acos({x}.tanh() * 0.9)",
    "lgamma": "torch.lgamma({x}.abs() + 1)",
    "digamma": "torch.digamma({x}.abs() + 1)",
    "i0": "torch.special.i0e({x})",
    "ndtr": "torch.special.log_ndtr({x}.clamp(-3, 3))",
    "entr": "torch.special.entr({x}.sigmoid())",
    "logit": "torch.logit({x}.sigmoid(), eps=1e-3)",
    "abs": "{x}.abs()",
    "neg": "-{x}",
    "square": "{x}.square()",
    "cube": "{x}.tanh() ** 3",
    "power": "torch.pow({x}.abs() + 0.2, 1.7)",
    "round": "{x} + {x}.round().detach() * 0.1",
    "floor": "{x} - {x}.floor()",
    "frac": "{x}.frac() + {x} * 0.1",
    "sign": "{x} * {x}.sign()",
    "clamp": "{x}.clamp(-0.8, 0.9)",
    "clamp_tensor": "{x}.clamp(min={x}.mean())",
    "nan_to_num": "torch.nan_to_num(torch.where({x} > 1, float('nan'), {x}), nan=0.3)",
    "dropout_off": "F.dropout({x}, 0.5, training=False)",
    "to_float32": "{x}.float().tanh().to({x}.dtype)",
    "to_bfloat16": "({x}.bfloat16() * 1.5).to({x}.dtype)",
    "to_half": "{x}.half().to({x}.dtype)",
    "detach": "{x} * {x}.detach()",
    "detach_scale": "{x} / ({x}.detach().abs().max() + 1)",
    "clone": "{x}.clone() * 1.5",
    "contiguous": "{x}.transpose(0, -1).contiguous().transpose(0, -1) * 2",
    "ones_like": "{x} + torch.ones_like({x})",
    "zeros": "{x} - {x}.new_zeros({x}.shape)",
    "full": "torch.full_like({x}, 0.7) * {x}",
    "arange": "{x} + torch.arange({x}.shape[-1], dtype={x}.dtype) * 0.1",
    "linspace": "{x} * torch.linspace(0.1, 1.0, {x}.shape[-1], dtype={x}.dtype)",
    "by_size": "{x} * (1.0 / {x}.shape[0]) + {x}.shape[-1] * 0.01",
    "swish_twice": "{x} * torch.sigmoid({x}) * torch.sigmoid({x})",
    "double_use": "{x} + {x} + {x} * {x}",
    "geglu": "F.gelu({x}) * {x}.sin()",
    "heaviside": "{x} * torch.heaviside({x}.detach(), {x}.new_tensor(0.5))",
}


def _one(b: Builder, text: str) -> None:
    b.out(text.format(x=b.float()))


table(_ONE, _one, 0.5)

_TWO = {
    "add": "{x} + {y}",
    "add_alpha": "torch.add({x}, {y}, alpha=0.3)",
    "sub": "{x} - {y}",
    "mul": "{x} * {y}",
    "div": "{x} / (1 + {y}.abs())",
    "floor_div": "{x} * torch.div({y}, 0.5, rounding_mode='floor').clamp(-3, 3)",
    "maximum": "torch.maximum({x}, {y})",
    "minimum": "torch.minimum({x}, {y})",
    "fmax": "torch.fmax({x}, {y} * 0.5)",
    "hypot": "torch.hypot({x}, {y} + 0.1)",
    "atan2": "torch.atan2({x}, {y} + 0.2)",
    "lerp": "torch.lerp({x}, {y}, 0.3)",
    "lerp_tensor": "torch.lerp({x}, {y}, {x}.sigmoid())",
    "addcmul": "torch.addcmul({x}, {y}, {x}, value=0.5)",
    "addcdiv": "torch.addcdiv({x}, {y}, {x}.square() + 1, value=0.5)",
    "fmod": "torch.fmod({x}, {y}.abs() + 0.5)",
    "remainder": "torch.remainder({x}, {y}.abs() + 0.5)",
    "where": "torch.where({x} > {y}, {x}, {y} * 0.5)",
    "where_scalar": "torch.where({x} > 0, {y}, 0.0)",
    "copysign": "torch.copysign({x}, {y})",
    "logaddexp": "torch.logaddexp({x}, {y})",
    "xlogy": "torch.xlogy({x}, {y}.abs() + 0.3)",
    "masked_fill": "{x}.masked_fill({y} > 0.5, -0.3)",
    "gate": "{x} * torch.sigmoid({y})",
    "heads_apart": "torch.cat([{x}.tanh(), {y}], -1)",
    "stack_sum": "torch.stack([{x}, {y}, {x} * {y}]).sum(0)",
    "interleave": "torch.stack([{x}, {y}], -1).flatten(-2)",
    "xor_mask": "{x} * (({x} > 0) ^ ({y} > 0)).to({x}.dtype)",
    "logical": "{x} * (({x} > 0) | ({y} < 0.3)) + {y} * ~({x} > 0)",
    "complex_product": "(torch.complex({x}, {y}) * torch.complex({y}, {x} * 0.5)).real",
    "polar": "torch.polar({x}.abs() + 0.1, {y}).imag",
    "complex_abs": "torch.complex({x}, {y} + 1.5).abs()",
    "complex_angle": "torch.complex({x} + 3, {y}).angle()",
}


def _two(b: Builder, text: str) -> None:
    x = b.float()
    b.out(text.format(x=x, y=b.like(x)))


table(_TWO, _two, 0.6)


@kind(1.5)
def residual(b: Builder) -> None:
    x = b.float()
    b.out(f"{x} + {b.like(x)}")


@kind()
def broadcast(b: Builder) -> None:
    """One that is a number wide somewhere, against one that is not."""
    x = b.float(at_least=2)
    axis = b.axis(x)
    y = b.like(x)
    b.out(f"{x} * {y}.narrow({axis}, 0, 1)")


@kind()
def scale_by_parameter(b: Builder) -> None:
    x = b.float(at_least=2, fits=lambda v: (v.dim - 1) not in v.varies)
    b.out(f"{x} * {b.parameter(x.shape[-1])} + {b.parameter(1)}")


@kind(0.5)
def prelu(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.out(f"{b.module(f'nn.PReLU({x.shape[1]})')}({x})")


@kind(0.5)
def glu(b: Builder) -> None:
    x = b.float(at_least=2, fits=lambda v: v.shape[-1] % 2 == 0 and (v.dim - 1) not in v.varies)
    b.out(f"F.glu({x}, -1)")


@kind(0.5)
def scalar_of_tensor(b: Builder) -> None:
    """A tensor of no dimensions against one of many."""
    x = b.float()
    b.out(f"{x} * {b.float()}.mean() + {b.float()}.std(unbiased=False)")


@kind(0.5)
def fake_quantize(b: Builder) -> None:
    b.out(f"torch.fake_quantize_per_tensor_affine({b.float()}.float(), 0.1, 0, -128, 127).to(x0.dtype)")
