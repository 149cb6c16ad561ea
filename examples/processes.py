"""Train a small language model over the processes that torchrun starts, and save a checkpoint of all ranks.

::

    torchrun --nproc-per-node 2 examples/processes.py --steps 20 --folder /tmp/trained
    torchrun --nproc-per-node 4 examples/processes.py --replicas 2

The model is built without allocating memory. Each rank initializes and trains the parameters of its own stages.
Replicas of the pipeline train on different rows, and average their gradients.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import roundpipe_fx

WORDS, WIDTH, LENGTH = 64, 64, 32


class Model(nn.Module):
    """A causal language model whose head is tied to its embedding: the first and the last stage read it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of each next token."""
        x = self.embed(tokens)
        mask = torch.full((tokens.shape[1], tokens.shape[1]), float("-inf"), device=tokens.device).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


def loss_fn(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each next token."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def initial(name: str, tensor: torch.Tensor) -> None:
    """Initial values of a parameter."""
    if tensor.dim() > 1:
        nn.init.normal_(tensor, std=0.1)
    else:
        tensor.fill_("norm" in name and name.endswith("weight"))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1, help="how many pipelines; it divides the number of ranks")
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if kind == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    stages = dist.get_world_size() // arguments.replicas
    mesh = init_device_mesh(kind, (arguments.replicas, stages), mesh_dim_names=("dp", "pp"))

    torch.manual_seed(0)  # the same batches on every rank of a pipeline
    starts = torch.randint(WORDS, (16, 1))
    tokens = ((starts + 3 * torch.arange(LENGTH)) % WORDS).to(kind)
    tokens = tokens.chunk(arguments.replicas)[mesh["dp"].get_local_rank()]
    with torch.device("meta"):
        model = Model(arguments.layers)
    model = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=4, memory_budget="1GiB")
    model.trace(tokens, labels=tokens, loss_fn=loss_fn)
    model.init_weights(initial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(arguments.steps):
        loss = model.forward_backward(tokens, labels=tokens, loss_fn=loss_fn)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    own = sum(parameter.numel() for parameter in model.parameters())
    print(f"rank {dist.get_rank()} has {own} parameters", flush=True)
    if arguments.folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=arguments.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
