"""Trains a convolutional network on a field that is cut over ranks by its height, in uneven parts; no rank holds the whole field.

    torchrun --nproc-per-node 3 examples/space_parallel.py
    python examples/space_parallel.py             # the same network and the same losses on one process, without shardtensor

The field is a warm spot on a globe, which the wind carries round while it spreads; the network learns one step of that. Convolutions,
also strided and transposed ones, fetch the rows that they need across the cuts. The weights stay plain tensors, the same on all ranks.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from train_transformer import descend, run_on_field

HEIGHT, WIDTH = 52, 40


def simulate(steps: int) -> torch.Tensor:
    """The field at each step, [steps, height, width]: plain torch."""
    rows, columns = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    field = torch.exp(-((rows - 20.0) ** 2 + (columns - 11.0) ** 2) / 30)
    fields = [field]
    for _ in range(steps - 1):
        around = sum(field.roll(by, dim) for by in (-1, 1) for dim in (0, 1)) / 4
        field = (0.6 * field + 0.4 * around).roll(1, 1)
        fields.append(field)
    return torch.stack(fields)


def network() -> nn.Module:
    torch.manual_seed(1)
    round_ = {"padding": 1, "padding_mode": "circular"}
    down, up = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
    return nn.Sequential(nn.Conv2d(1, 8, 3, **round_), nn.GELU(), down, nn.GroupNorm(4, 16), nn.GELU(), up, nn.GELU(), nn.Conv2d(8, 1, 3, **round_))


def rows_of(ranks: int) -> list[int]:
    """The later a rank, the more rows it has."""
    ends = [HEIGHT * r * (r + 1) // (ranks * (ranks + 1)) for r in range(ranks + 1)]
    return [b - a for a, b in itertools.pairwise(ends)]


def train(
    device: str | None,
    *,
    steps: int = 60,
    rate: float = 5e-3,
    dtype: torch.dtype = torch.float32,
    folder: str | Path = ".",
    report: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """The loss of every step; the same with ranks and without (`device` None)."""
    model = network().to(dtype)
    if device is None:
        fields = simulate(steps + 1).to(dtype)
    else:
        import numpy
        from shardtensor import Shard, init_device_mesh, set_promotion_mode
        from shardtensor.data import read
        from shardtensor.domain_parallel import sync_module_over_mesh

        set_promotion_mode("replicate")  # plain weights among ShardTensors
        file = Path(folder) / "fields.npy"
        if dist.get_rank() == 0:
            numpy.save(file, simulate(steps + 1).numpy())
        dist.barrier()
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        fields = read(file, mesh, [Shard(1)], sharding_shapes={0: rows_of(mesh.size())}, dtype=dtype)  # each rank its rows
        sync_module_over_mesh(model.to(device), mesh)

    def loss_at(step: int) -> torch.Tensor:
        now, then = fields[step][None, None], fields[step + 1][None, None]
        loss = ((model(now) - then) ** 2).mean()
        loss.backward()
        return loss

    return descend(loss_at, torch.optim.AdamW(model.parameters(), lr=rate), steps=steps, report=report)


def train_in_scratch(device: str | None, **more: Any) -> list[float]:
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        if device:
            dist.broadcast_object_list(folder)  # the first rank's
        losses = train(device, folder=folder[0], **more)
        if device:
            dist.barrier()
    return losses


if __name__ == "__main__":
    run_on_field(train_in_scratch, __doc__, lambda ranks: f"{HEIGHT} rows in parts of {rows_of(ranks)} on {ranks} ranks")
