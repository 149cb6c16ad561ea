"""What users write: functions with gradients of their own, hooks, branches, containers."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind
from benchmarks.fuzz.program import Builder

_FUNCTIONS = {
    "Cubed": """\
class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-2, 2) ** 3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x.clamp(-2, 2) ** 2
""",
    "Rounded": """\
class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g * 0.5
""",
    "Reversed": """\
class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g * ctx.scale, None
""",
    "Product": """\
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        both = x * y
        ctx.save_for_backward(x, y, both)
        return both

    @staticmethod
    def backward(ctx, g):
        x, y, both = ctx.saved_tensors
        return (g * y if ctx.needs_input_grad[0] else None), g * x + both * 0
""",
    "Pair": """\
class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        s = x.sigmoid()
        ctx.save_for_backward(s)
        return s, x.tanh()

    @staticmethod
    def backward(ctx, g, h):
        (s,) = ctx.saved_tensors
        return g * s * (1 - s) + h * 0.5
""",
    "Clipped": """\
class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g / g.norm().clamp(min=0.1)
""",
    "Setup": """\
class Setup(torch.autograd.Function):
    @staticmethod
    def forward(x, power):
        return x.abs() ** power

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.power = inputs[1]

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.power * x.abs() ** (ctx.power - 1) * x.sign(), None
""",
}


def _function(b: Builder, name: str) -> str:
    return f"{b.define(name, _FUNCTIONS[name])}.apply"


@kind(0.5)
def function_cubed(b: Builder) -> None:
    b.out(f"{_function(b, 'Cubed')}({b.float()})")


@kind(0.5)
def function_rounded(b: Builder) -> None:
    b.out(f"{_function(b, 'Rounded')}({b.float()}) + {b.float()}.mean()")


@kind(0.4)
def function_reversed(b: Builder) -> None:
    b.out(f"{_function(b, 'Reversed')}({b.float()}, 0.7)")


@kind(0.4)
def function_product(b: Builder) -> None:
    x = b.float()
    b.out(f"{_function(b, 'Product')}({x}, {b.like(x)})")


@kind(0.4)
def function_pair(b: Builder) -> None:
    b.out(f"{_function(b, 'Pair')}({b.float()})", 2)


@kind(0.4)
def function_clipped(b: Builder) -> None:
    b.out(f"{_function(b, 'Clipped')}({b.float()})")


@kind(0.4)
def function_setup(b: Builder) -> None:
    b.out(f"{_function(b, 'Setup')}({b.float()} + 0.2, 2)")


@kind(0.4)
def forward_hook(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    d = x.shape[-1]
    m = b.module(f"nn.Linear({d}, {d})")
    b.init(f"{m}.register_forward_hook(lambda module, args, out: out * 1.1)")
    b.out(f"{m}({x})")


@kind(0.4)
def forward_pre_hook(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    m = b.module(f"nn.Linear({x.shape[-1]}, 4)")
    b.init(f"{m}.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))")
    b.out(f"{m}({x})")


@kind(0.4)
def parameter_hook(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    m = b.module(f"nn.Linear({x.shape[-1]}, 4)")
    b.init(f"{m}.weight.register_hook(lambda g: g * 0.5)")
    b.program.notes.add("hooks on parameters")
    b.out(f"{m}({x})")


@kind(0.3)
def full_backward_hook(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    m = b.module(f"nn.Linear({x.shape[-1]}, 4)")
    b.init(
        f"{m}.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 0.5,) if grads[0] is not None else None)"
    )
    b.out(f"{m}({x} * 1.5)")


@kind(0.3)
def tensor_hook(b: Builder) -> None:
    x = b.float(fits=lambda v: v.tensors[0].requires_grad)
    made = b.let(f"{x} * 1.2")
    b.line(f"{made}.register_hook(lambda g: g * 0.5)")
    b.out(f"{made}.sin()")


@kind(0.4)
def branch_on_training(b: Builder) -> None:
    x = b.float()
    b.out(f"({x}.tanh() if self.training else {x})")


@kind(0.4)
def branch_on_size(b: Builder) -> None:
    x = b.float(at_least=2)
    b.out(f"({x} * 2 if {x}.shape[-1] > 4 else {x}.cos())")


@kind(0.4)
def through_containers(b: Builder) -> None:
    x = b.float()
    made = b.let(f"{{'a': {x}.sin(), 'b': [{x}.cos(), None]}}['b'][0]")
    b.out(f"{made} + {x}")


@kind(0.4)
def module_list(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    d = x.shape[-1]
    layers = b.module(f"nn.ModuleList(nn.Linear({d}, {d}) for _ in range(3))")
    b.out(f"{layers}[2](F.relu({layers}[1](F.relu({layers}[0]({x})))))")


@kind(0.4)
def parameter_list(b: Builder) -> None:
    x = b.float()
    scales = b.module("nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(2)])")
    b.out(f"{x} * {scales}[0] + {scales}[1]")


@kind(0.4)
def stop_gradient_branch(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    m = b.module(f"nn.Linear({x.shape[-1]}, 4)")
    b.line("with torch.no_grad():")
    b.lines[-1] += f" target = {m}({x})" if False else " target = None"
    b.out(f"({m}({x}) - {m}({x}).detach() * 0.5)")


@kind(0.4)
def target_network(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    m = b.module(f"nn.Linear({x.shape[-1]}, 4)")
    b.line(f"with torch.no_grad(): target = {m}({x}.flip(0)).tanh()")
    b.out(f"{m}({x}) - target")


@kind(0.4)
def siamese(b: Builder) -> None:
    """One module, called twice."""
    x = b.float(at_least=2, batched=True)
    m = b.module(f"nn.Sequential(nn.Linear({x.shape[-1]}, 4), nn.Tanh())")
    b.out(f"{m}({x}) - {m}({x}.flip(0))")


@kind(0.3)
def autocast(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    m = b.module(f"nn.Linear({x.shape[-1]}, 4)")
    made = b._new("t")
    b.line(f"with torch.autocast('cpu', torch.bfloat16): {made} = {m}({x}).tanh()")
    b.out(f"{made}.to({x}.dtype)")


@kind(0.3)
def enable_grad_inside(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    made = b._new("t")
    b.line(f"with torch.no_grad(): {made} = {x}.square().mean()")
    b.out(f"{x} / ({made} + 1)")


@kind(0.3)
def vmapped(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.out(f"torch.vmap(lambda row: row.sin() * row.sum())({x})")


@kind(0.3)
def input_again(b: Builder) -> None:
    b.out("x0 * 1.0")
