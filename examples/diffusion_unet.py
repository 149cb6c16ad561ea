"""Train a U-Net from diffusers to remove noise from images, with and without a budget: the same losses in less memory.

python examples/diffusion_unet.py        (needs diffusers: pip install diffusers)
"""

from __future__ import annotations

import argparse

import diffusers
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe_fx


class Denoising(nn.Module):
    """The step that is compiled: add noise, predict it, compare."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.unet = diffusers.UNet2DModel(
            sample_size=size,
            in_channels=1,
            out_channels=1,
            block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
        )
        self.schedule = diffusers.DDPMScheduler(num_train_timesteps=100)
        self.register_buffer("kept", self.schedule.alphas_cumprod.sqrt(), persistent=False)
        self.register_buffer("noisy", (1 - self.schedule.alphas_cumprod).sqrt(), persistent=False)

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """The error of the noise that is predicted, at a time for each image."""
        noise = torch.randn_like(images)
        mixed = self.kept[times, None, None, None] * images + self.noisy[times, None, None, None] * noise
        return F.mse_loss(self.unet(mixed, times).sample, noise)


def discs(count: int, size: int) -> torch.Tensor:
    """Images of discs, from -1 to 1."""
    places = torch.linspace(-1, 1, size)
    middle, radius = torch.rand(count, 2, 1, 1) - 0.5, 0.2 + 0.3 * torch.rand(count, 1, 1)
    inside = (places - middle[:, 0]) ** 2 + (places[:, None] - middle[:, 1]) ** 2 < radius**2
    return inside[:, None].float() * 2 - 1


def train(budget: str | float, steps: int, size: int, batch: int) -> tuple[list[float], int, roundpipe_fx.Plan]:
    """Losses, the measured peak of the last step in bytes, and the plan."""
    torch.manual_seed(0)
    model = roundpipe_fx.compile(Denoising(size), memory_budget=budget)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        images, times = discs(batch, size), torch.randint(100, (batch,))
        optimizer.zero_grad()
        with roundpipe_fx.measure_peak() as peak:
            loss = model(images, times)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, peak.bytes, model.plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    given = parser.parse_args()
    whole, whole_peak, _ = train(1.0, given.steps, given.size, given.batch)
    less, less_peak, plan = train(0.0, given.steps, given.size, given.batch)
    print(plan)
    print(f"losses {less[0]:.4f} to {less[-1]:.4f}, the same bits without a limit: {less == whole}")
    print(f"peak of a step: {whole_peak / 2**20:.1f} MiB, or {less_peak / 2**20:.1f} MiB at the lowest")


if __name__ == "__main__":
    main()
