"""Layers: linear, convolutions, norms, pooling, attention, recurrence, embeddings."""

from __future__ import annotations

from benchmarks.fuzz.operations.pool import kind
from benchmarks.fuzz.program import Builder


@kind(2.5)
def linear(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    bias = b.rng.choice(["", "", ", bias=False"])
    b.out(f"{b.module(f'nn.Linear({x.shape[-1]}, {b.size(4, 8, 10, x.shape[-1])}{bias})')}({x})")


@kind()
def mlp(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    d, act = x.shape[-1], b.rng.choice(["ReLU", "GELU", "SiLU", "Tanh"])
    b.out(f"{x} + {b.module(f'nn.Sequential(nn.Linear({d}, {4 * d}), nn.{act}(), nn.Linear({4 * d}, {d}))')}({x})")


@kind()
def block(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    d = x.shape[-1]
    norm = b.module(f"nn.LayerNorm({d})")
    b.out(f"{x} + {b.module(f'nn.Linear({d}, {d})')}(F.gelu({norm}({x})))")


@kind(0.5)
def tied_linear(b: Builder) -> None:
    """One weight, read twice, once transposed."""
    x = b.float(at_least=2, batched=True)
    m = b.module(f"nn.Linear({x.shape[-1]}, {b.size(4, 8)}, bias=False)")
    b.out(f"F.linear(torch.tanh({m}({x})), {m}.weight.t())")


@kind(0.5)
def tied_parameter(b: Builder) -> None:
    """Two modules with one parameter."""
    x = b.float(at_least=2, batched=True)
    d = x.shape[-1]
    one, other = b.module(f"nn.Linear({d}, {d})"), b.module(f"nn.Linear({d}, {d})")
    b.init(f"{other}.weight = {one}.weight")
    b.out(f"{other}(F.silu({one}({x})))")


@kind(0.6)
def frozen_linear(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    m = b.module(f"nn.Linear({x.shape[-1]}, {b.size(4, 8)}).requires_grad_(False)")
    b.out(f"{m}({x})")


@kind(0.4)
def lora(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    d = x.shape[-1]
    m = b.module(f"nn.Linear({d}, {d}).requires_grad_(False)")
    b.out(f"{m}({x}) + {x} @ {b.parameter(d, 2)} @ {b.parameter(2, d)}")


@kind(0.5)
def bilinear(b: Builder) -> None:
    x = b.rows()
    b.out(f"{b.module(f'nn.Bilinear({x.shape[1]}, {x.shape[1]}, 4)')}({x}, {x}.sin())")


@kind(0.6)
def unused_parameter(b: Builder) -> None:
    b.module("nn.Linear(3, 3)")
    b.out(f"{b.float()} * {b.parameter(1)}")


@kind(0.6)
def weight_norm(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.out(f"{b.module(f'nn.utils.parametrizations.weight_norm(nn.Linear({x.shape[-1]}, 4))')}({x})")


@kind(0.5)
def spectral_norm(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.out(f"{b.module(f'nn.utils.parametrizations.spectral_norm(nn.Linear({x.shape[-1]}, 4))')}({x})")


@kind(0.4)
def orthogonal(b: Builder) -> None:
    x = b.float(at_least=2, batched=True, fits=lambda v: v.shape[-1] <= 16)
    d = x.shape[-1]
    b.out(f"{b.module(f'nn.utils.parametrizations.orthogonal(nn.Linear({d}, {d}))')}({x})")


@kind(0.4)
def user_parametrization(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.define(
        "Symmetric",
        "class Symmetric(nn.Module):\n    def forward(self, w):\n        return w.triu() + w.triu(1).transpose(-1, -2)\n",
    )
    d = x.shape[-1]
    m = b.module(f"nn.Linear({d}, {d})")
    b.init(f'nn.utils.parametrize.register_parametrization({m}, "weight", Symmetric())')
    b.out(f"{m}({x})")


# Convolutions.


@kind(1.5)
def conv2d(b: Builder) -> None:
    x = b.image()
    c, out = x.shape[1], b.size(2, 4, 8)
    groups = b.rng.choice([g for g in (1, 1, 2, 4) if c % g == 0 and out % g == 0])
    k, s, p, d = b.size(1, 2, 3, 3), b.size(1, 1, 2), b.size(0, 1, 2), b.size(1, 1, 2)
    mode = (
        b.rng.choice(["", "", "", ', padding_mode="circular"', ', padding_mode="reflect"']) if p == 1 and k == 3 else ""
    )
    conv = b.module(f"nn.Conv2d({c}, {out}, {k}, {s}, {p}, {d}, {groups}{mode})")
    if b.rng.random() < 0.25:
        b.init(f"{conv}.to(memory_format=torch.channels_last)")
    b.out(f"{conv}({x})")


@kind(0.6)
def conv2d_channels_last(b: Builder) -> None:
    x = b.image()
    conv = b.module(
        f"nn.Conv2d({x.shape[1]}, {b.size(4, 8)}, 3, {b.size(1, 2)}, 1).to(memory_format=torch.channels_last)"
    )
    b.out(f"{conv}({x}.contiguous(memory_format=torch.channels_last))")


@kind(0.6)
def depthwise(b: Builder) -> None:
    x = b.image()
    c = x.shape[1]
    b.out(f"{b.module(f'nn.Conv2d({c}, {c}, 3, padding=1, groups={c})')}({x})")


@kind(0.6)
def conv1d(b: Builder) -> None:
    x = b.sequence()
    b.out(f"{b.module(f'nn.Conv1d({x.shape[1]}, {b.size(3, 4, 8)}, {b.size(1, 2, 3)}, padding={b.size(0, 1)})')}({x})")


@kind(0.5)
def causal_conv1d(b: Builder) -> None:
    x = b.sequence()
    d = x.shape[2]
    conv = b.module(f"nn.Conv1d({d}, {d}, 3, groups={d})")
    b.out(f"{conv}(F.pad({x}.transpose(1, 2), (2, 0))).transpose(1, 2)")


@kind(0.4)
def conv3d(b: Builder) -> None:
    x = b.image()
    b.out(f"{b.module('nn.Conv3d(1, 2, (1, 2, 2), padding=(0, 1, 0))')}({x}.unsqueeze(1)).flatten(1, 2)")


@kind(0.7)
def conv_transpose2d(b: Builder) -> None:
    x = b.image()
    k, s = b.rng.choice([(2, 2), (3, 2), (3, 1), (4, 2)])
    extra = ", output_padding=1" if (k, s) == (3, 2) and b.rng.random() < 0.5 else ""
    groups = b.rng.choice([g for g in (1, 1, 2) if x.shape[1] % g == 0])
    b.out(f"{b.module(f'nn.ConvTranspose2d({x.shape[1]}, 4, {k}, {s}, {b.size(0, 1)}, groups={groups}{extra})')}({x})")


@kind(0.4)
def conv_transpose1d(b: Builder) -> None:
    x = b.sequence()
    b.out(f"{b.module(f'nn.ConvTranspose1d({x.shape[1]}, 3, 3, 2)')}({x})")


@kind(0.4)
def conv_by_input(b: Builder) -> None:
    """The weight is computed."""
    x = b.image()
    c = x.shape[1]
    b.out(f"F.conv2d({x}, torch.tanh({b.parameter(4, c, 1, 1)}) * {x}.mean(), padding=0)")


# Norms.


@kind()
def batch_norm2d(b: Builder) -> None:
    x = b.image()
    more = b.rng.choice(["", "", ", momentum=None", ", affine=False", ", track_running_stats=False", ", momentum=0.3"])
    b.out(f"{b.module(f'nn.BatchNorm2d({x.shape[1]}{more})')}({x})")


@kind(0.7)
def batch_norm1d(b: Builder) -> None:
    x = b.rows() if b.rng.random() < 0.5 else b.sequence()
    more = b.rng.choice(["", "", ", momentum=None", ", affine=False", ", track_running_stats=False"])
    b.out(f"{b.module(f'nn.BatchNorm1d({x.shape[1]}{more})')}({x})")


@kind(0.5)
def batch_norm_eval(b: Builder) -> None:
    x = b.image()
    b.out(f"{b.module(f'nn.BatchNorm2d({x.shape[1]}).eval()')}({x})")


@kind(0.5)
def batch_norm_functional(b: Builder) -> None:
    x = b.rows()
    mean = b.buffer(f"torch.zeros({x.shape[1]})")
    var = b.buffer(f"torch.ones({x.shape[1]})")
    b.out(f"F.batch_norm({x}, {mean}, {var}, training={b.rng.choice(['True', 'True', 'False'])}, momentum=0.2)")


@kind(0.6)
def batch_norm_relu(b: Builder) -> None:
    x = b.image()
    c = x.shape[1]
    bn = b.module(f"nn.BatchNorm2d({c})")
    b.out(f"F.relu({bn}({b.module(f'nn.Conv2d({c}, {c}, 3, padding=1, bias=False)')}({x})), inplace=True)")


@kind(0.5)
def batch_norm_channels_last(b: Builder) -> None:
    x = b.image()
    bn = b.module(f"nn.BatchNorm2d({x.shape[1]})")
    b.out(f"{bn}({x}.contiguous(memory_format=torch.channels_last))")


@kind(0.4)
def batch_norm_twice(b: Builder) -> None:
    """One layer, called twice: its statistics are updated twice."""
    x = b.rows()
    bn = b.module(f"nn.BatchNorm1d({x.shape[1]})")
    b.out(f"{bn}({bn}({x}).tanh())")


@kind(0.6)
def instance_norm(b: Builder) -> None:
    x = b.image()
    more = b.rng.choice(["", ", affine=True", ", affine=True, track_running_stats=True"])
    b.out(f"{b.module(f'nn.InstanceNorm2d({x.shape[1]}{more})')}({x})")


@kind(0.7)
def group_norm(b: Builder) -> None:
    x = b.image()
    c = x.shape[1]
    groups = b.rng.choice([g for g in (1, 2, 4) if c % g == 0])
    b.out(f"{b.module(f'nn.GroupNorm({groups}, {c})')}({x})")


@kind()
def layer_norm(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    more = b.rng.choice(["", "", ", elementwise_affine=False", ", bias=False"])
    b.out(f"{b.module(f'nn.LayerNorm({x.shape[-1]}{more})')}({x})")


@kind(0.5)
def layer_norm_transposed(b: Builder) -> None:
    x = b.sequence()
    b.out(f"{b.module(f'nn.LayerNorm({x.shape[1]})')}({x}.transpose(1, 2))")


@kind(0.5)
def layer_norm_image(b: Builder) -> None:
    x = b.image()
    b.out(f"{b.module(f'nn.LayerNorm([{x.shape[2]}, {x.shape[3]}])')}({x})")


@kind(0.7)
def rms_norm(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    b.out(f"{b.module(f'nn.RMSNorm({x.shape[-1]})')}({x})")


@kind(0.5)
def rms_norm_by_hand(b: Builder) -> None:
    x = b.float(at_least=2, batched=True)
    weight = b.parameter(x.shape[-1])
    b.out(f"{weight} * ({x}.float() * torch.rsqrt({x}.float().pow(2).mean(-1, keepdim=True) + 1e-3)).to({x}.dtype)")


@kind(0.4)
def local_response_norm(b: Builder) -> None:
    b.out(f"F.local_response_norm({b.image()}, 2)")


# Pooling and sampling.


@kind(0.7)
def max_pool2d(b: Builder) -> None:
    b.out(f"F.max_pool2d({b.image()}, 2, {b.size(1, 2)}, {b.size(0, 1)})")


@kind(0.5)
def max_pool_indices(b: Builder) -> None:
    x = b.image()
    pooled, where = (
        b.let(f"F.max_pool2d({x}, 2, return_indices=True)[0]"),
        b.let(f"F.max_pool2d({x}, 2, return_indices=True)[1]"),
    )
    b.out(f"F.max_unpool2d({pooled} * 2, {where}, 2, output_size={x}.shape[-2:])")


@kind(0.4)
def max_pool1d(b: Builder) -> None:
    b.out(f"F.max_pool1d({b.sequence()}, 2, 1)")


@kind(0.6)
def avg_pool2d(b: Builder) -> None:
    b.out(f"F.avg_pool2d({b.image()}, 2, 1, {b.size(0, 1)}, count_include_pad={b.rng.choice(['True', 'False'])})")


@kind(0.6)
def adaptive_avg_pool2d(b: Builder) -> None:
    b.out(f"F.adaptive_avg_pool2d({b.image()}, ({b.size(1, 2, 3)}, {b.size(1, 2)}))")


@kind(0.5)
def adaptive_max_pool2d(b: Builder) -> None:
    b.out(f"F.adaptive_max_pool2d({b.image()}, {b.size(1, 2)})")


@kind(0.4)
def adaptive_pool1d(b: Builder) -> None:
    b.out(f"F.adaptive_{b.rng.choice(['avg', 'max'])}_pool1d({b.sequence()}, 2)")


@kind(0.4)
def lp_pool(b: Builder) -> None:
    b.out(f"F.lp_pool2d({b.image()}.abs() + 0.1, 2, 2)")


@kind(0.4)
def avg_pool3d(b: Builder) -> None:
    b.out(f"F.{b.rng.choice(['avg', 'max'])}_pool3d({b.image()}.unsqueeze(1), (2, 1, 2), 1).squeeze(1)")


@kind(0.8)
def interpolate(b: Builder) -> None:
    x = b.image()
    mode = b.rng.choice(["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
    how = b.rng.choice(["scale_factor=2.0", "size=(3, 5)", "scale_factor=0.5"])
    corners = ", align_corners=True" if mode in ("bilinear", "bicubic") and b.rng.random() < 0.5 else ""
    b.out(f'F.interpolate({x}, {how}, mode="{mode}"{corners})')


@kind(0.4)
def interpolate1d(b: Builder) -> None:
    mode = b.rng.choice(["nearest", "linear"])
    b.out(f'F.interpolate({b.sequence()}, scale_factor=2.0, mode="{mode}")')


@kind(0.5)
def grid_sample(b: Builder) -> None:
    x = b.image()
    theta = b.let(f"torch.eye(2, 3, dtype={x}.dtype).expand({x}.shape[0], 2, 3) * (1 + {x}.mean().tanh())")
    mode = b.rng.choice(["bilinear", "nearest", "bicubic"])
    b.out(
        f"F.grid_sample({x}, F.affine_grid({theta}, [{x}.shape[0], {x}.shape[1], 3, 4], align_corners=False), "
        f'mode="{mode}", align_corners=False)'
    )


# Attention.


@kind()
def attention(b: Builder) -> None:
    x = b.sequence()
    d = x.shape[2]
    qkv = b.module(f"nn.Linear({d}, {3 * d})")
    heads_ = b._divisor(d)
    parts = b.let(f"{qkv}({x}).unflatten(-1, (3, {heads_}, -1)).permute(2, 0, 3, 1, 4)")
    how = b.rng.choice(
        ["", ", is_causal=True", ", scale=0.3", f", attn_mask=torch.ones({x.shape[1]}, {x.shape[1]}).tril().bool()"]
    )
    b.out(f"F.scaled_dot_product_attention(*{parts}.unbind(0){how}).transpose(1, 2).flatten(2)")


@kind(0.6)
def attention_by_hand(b: Builder) -> None:
    x = b.sequence()
    mask = b.let(f"torch.ones({x}.shape[1], {x}.shape[1], dtype=torch.bool).triu(1)")
    scores = b.let(f"({x} @ {x}.transpose(1, 2) / {x}.shape[-1] ** 0.5).masked_fill({mask}, float('-inf'))")
    b.out(f"{scores}.softmax(-1) @ {x}")


@kind(0.5)
def attention_bias(b: Builder) -> None:
    x = b.sequence()
    bias = b.parameter(x.shape[1], x.shape[1])
    q = b.let(f"{x}.unsqueeze(1)")
    b.out(f"F.scaled_dot_product_attention({q}, {q} * 0.5, {q}.sin(), attn_mask={bias}).squeeze(1)")


@kind(0.4)
def attention_gqa(b: Builder) -> None:
    x = b.sequence()
    d = x.shape[2]
    q = b.let(f"{b.module(f'nn.Linear({d}, 16)')}({x}).unflatten(-1, (4, 4)).transpose(1, 2)")
    k = b.let(f"{b.module(f'nn.Linear({d}, 8)')}({x}).unflatten(-1, (2, 4)).transpose(1, 2)")
    b.out(f"F.scaled_dot_product_attention({q}, {k}, {k}.tanh(), enable_gqa=True).transpose(1, 2).flatten(2)")


@kind(0.6)
def multihead_attention(b: Builder) -> None:
    x = b.sequence()
    d = x.shape[2]
    need = b.rng.choice(["True", "False"])
    attn = b.module(f"nn.MultiheadAttention({d}, {b._divisor(d)}, batch_first=True)")
    b.out(f"{attn}({x}, {x}, {x}, need_weights={need})[0]")


@kind(0.5)
def encoder_layer(b: Builder) -> None:
    x = b.sequence()
    d, p = x.shape[2], b.rng.choice([0.0, 0.1])
    first = b.rng.choice(["True", "False"])
    text = f"nn.TransformerEncoderLayer({d}, {b._divisor(d)}, {2 * d}, {p}, batch_first=True, norm_first={first})"
    b.out(f"{b.module(text)}({x})")


@kind(0.4)
def decoder_layer(b: Builder) -> None:
    x = b.sequence()
    d = x.shape[2]
    text = f"nn.TransformerDecoderLayer({d}, {b._divisor(d)}, {2 * d}, 0.0, batch_first=True)"
    b.out(f"{b.module(text)}({x}, {x}.roll(1, 1))")


@kind(0.5)
def rotary(b: Builder) -> None:
    x = b.sequence()
    if x.shape[2] % 2:
        x = b.let(f"F.pad({x}, (0, 1))")
    angle = b.let(
        f"torch.arange({x}.shape[1], dtype={x}.dtype)[:, None] * torch.arange({x}.shape[2] // 2, dtype={x}.dtype)"
    )
    first, second = b.let(f"{x}[..., ::2]"), b.let(f"{x}[..., 1::2]")
    b.out(
        f"torch.cat([{first} * {angle}.cos() - {second} * {angle}.sin(), "
        f"{first} * {angle}.sin() + {second} * {angle}.cos()], -1)"
    )


# Recurrence.


@kind(0.25)
def lstm(b: Builder) -> None:
    x = b.sequence()
    more = b.rng.choice(["", ", num_layers=2", ", bidirectional=True"])
    b.program.notes.add("rnn")
    b.out(f"{b.module(f'nn.LSTM({x.shape[2]}, 4, batch_first=True{more})')}({x})[0]")


@kind(0.25)
def gru(b: Builder) -> None:
    x = b.sequence()
    b.program.notes.add("rnn")
    layer = b.module(f"nn.{b.rng.choice(['GRU', 'RNN'])}({x.shape[2]}, 4, batch_first=True)")
    b.out(f"{layer}({x})[1].transpose(0, 1)")


@kind(0.5)
def lstm_cell(b: Builder) -> None:
    x = b.sequence()
    cell = b.module(f"nn.LSTMCell({x.shape[2]}, 3)")
    b.line("h = c = x0.new_zeros(x0.shape[0], 3)")
    for step in range(min(3, x.shape[1])):
        b.line(f"h, c = {cell}({x}[:, {step}], (h, c))")
    b.out("h + c")


@kind(0.5)
def gru_cell(b: Builder) -> None:
    x = b.sequence()
    cell = b.module(f"nn.{b.rng.choice(['GRUCell', 'RNNCell'])}({x.shape[2]}, 3)")
    b.line("h = None")
    for step in range(min(3, x.shape[1])):
        b.line(f"h = {cell}({x}[:, {step}], h)")
    b.out("h")


@kind(0.5)
def linear_recurrence(b: Builder) -> None:
    x = b.sequence()
    decay = b.parameter(x.shape[2])
    b.line("h = 0")
    b.line("hs = []")
    for step in range(min(4, x.shape[1])):
        b.line(f"h = h * torch.sigmoid({decay}) + {x}[:, {step}]")
        b.line("hs.append(h)")
    b.out("torch.stack(hs, 1)")


# Embeddings.


@kind(0.7)
def embedding(b: Builder) -> None:
    x = b.rows()
    more = b.rng.choice(["", ", padding_idx=0", ", scale_grad_by_freq=True", ", max_norm=1.0"])
    table_ = b.module(f"nn.Embedding(6, {b.size(4, 8)}{more})")
    b.out(f"{table_}(({x}.detach() * 2).long().clamp(0, 5))")


@kind(0.6)
def embedding_bag(b: Builder) -> None:
    x = b.rows()
    mode = b.rng.choice(["sum", "mean", "max"])
    bag = b.module(f'nn.EmbeddingBag(6, {b.size(4, 8)}, mode="{mode}")')
    b.out(f"{bag}(({x}.detach() * 2).long().clamp(0, 5))")


@kind(0.4)
def embedding_bag_weights(b: Builder) -> None:
    x = b.rows()
    bag = b.module('nn.EmbeddingBag(6, 4, mode="sum")')
    b.out(f"{bag}(({x}.detach() * 2).long().clamp(0, 5), per_sample_weights={x}.sigmoid())")


@kind(0.4)
def embedding_bag_offsets(b: Builder) -> None:
    x = b.rows()
    bag = b.module('nn.EmbeddingBag(6, 4, mode="mean")')
    ids = b.let(f"({x}.detach() * 2).long().clamp(0, 5).flatten()")
    b.out(f"{bag}({ids}, torch.arange({x}.shape[0]) * {x}.shape[1])")


@kind(0.5)
def tied_embedding(b: Builder) -> None:
    """A language model's table, at both ends."""
    x = b.rows()
    table_ = b.module("nn.Embedding(6, 4)")
    b.out(f"F.linear(torch.tanh({table_}(({x}.detach() * 2).long().clamp(0, 5))), {table_}.weight)")


@kind(0.4)
def positions(b: Builder) -> None:
    x = b.sequence()
    table_ = b.module(f"nn.Embedding({x.shape[1]}, {x.shape[2]})")
    b.out(f"{x} + {table_}(torch.arange({x}.shape[1]))")


@kind(0.4)
def position_parameter(b: Builder) -> None:
    x = b.sequence()
    b.out(f"{x} + {b.parameter(1, x.shape[1], x.shape[2])}")


@kind(0.4)
def class_token(b: Builder) -> None:
    x = b.sequence()
    b.out(f"torch.cat([{b.parameter(1, 1, x.shape[2])}.expand({x}.shape[0], -1, -1), {x}], 1)")


@kind(0.5)
def squeeze_excite(b: Builder) -> None:
    x = b.image()
    c = x.shape[1]
    b.out(f"{x} * {b.module(f'nn.Linear({c}, {c})')}({x}.mean((2, 3))).sigmoid()[:, :, None, None]")
