"""Trains a network of spherical convolutions on a field that is cut over ranks by latitude and by longitude. Nothing is gathered.

    torchrun --nproc-per-node 4 examples/sphere_parallel.py
    python examples/sphere_parallel.py            # the same network and the same losses on one process, without shardtensor

The network learns how heat spreads on a globe. Each layer turns the field into spherical harmonics and back: Fourier transforms along
the longitudes, sums with Legendre functions along the latitudes. Either needs one dim whole, so before it the channels are cut in place
of that dim, and after it the orders and degrees of the harmonics: exchanges within a row or a column of the mesh.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from train_transformer import descend, run_on_field

LATITUDES, LONGITUDES, DEGREES = 19, 33, 13  # no number of ranks divides them


def gauss(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sines of Gauss's latitudes, and their weights."""
    k = torch.arange(1, n, dtype=torch.float64)
    beside = k / (4 * k**2 - 1).sqrt()
    sines, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return sines, 2 * vectors[0] ** 2


def legendre(sines: torch.Tensor, degrees: int) -> torch.Tensor:
    """The normalised functions, [order, degree, latitude]."""
    table = torch.zeros(degrees, degrees, len(sines), dtype=torch.float64)
    table[0, 0] = math.sqrt(1 / (4 * math.pi))
    for m in range(degrees):
        if m:
            table[m, m] = math.sqrt(1 + 1 / (2 * m)) * (1 - sines**2).sqrt() * table[m - 1, m - 1]
        for n in range(m + 1, degrees):
            before = math.sqrt(((n - 1) ** 2 - m**2) / (4 * (n - 1) ** 2 - 1)) * table[m, n - 2] if n > m + 1 else 0
            table[m, n] = math.sqrt((4 * n**2 - 1) / (n**2 - m**2)) * (sines * table[m, n - 1] - before)
    return table


def cut(x: torch.Tensor, *dims: int) -> torch.Tensor:
    """Cut along one dim per mesh dim; a plain tensor stays."""
    if not hasattr(x, "placements"):
        return x
    from shardtensor import Shard

    return x.redistribute(placements=[Shard(d) for d in dims])


class Harmonics(nn.Module):
    """From [batch, channel, latitude, longitude] to [batch, channel, degree, order], and back."""

    table: torch.Tensor
    weighted: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        sines, weights = gauss(LATITUDES)
        table = legendre(sines, DEGREES)
        self.register_buffer("table", table.to(torch.complex128))
        self.register_buffer("weighted", (2 * math.pi * weights * table).to(torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        orders = torch.fft.rfft(cut(x, 2, 1), norm="forward")[..., :DEGREES]  # longitudes are whole
        return cut(torch.einsum("bckm,mlk->bclm", cut(cut(orders, 2, 3), 1, 3), self.weighted), 2, 3)  # latitudes are whole

    def back(self, x: torch.Tensor) -> torch.Tensor:
        orders = torch.einsum("bclm,mlk->bckm", cut(x, 1, 3), self.table)  # degrees are whole
        return cut(torch.fft.irfft(cut(cut(orders, 2, 3), 2, 1), n=LONGITUDES, norm="forward"), 2, 3)  # orders are whole


class Layer(nn.Module):
    """Multiplies the harmonics of each degree by weights: a convolution that knows no direction."""

    def __init__(self, width: int, harmonics: Harmonics) -> None:
        super().__init__()
        self.harmonics, self.skip = harmonics, nn.Conv2d(width, width, 1)
        self.weight = nn.Parameter(torch.randn(width, width, DEGREES) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bilm,iol->bolm", self.harmonics(x), self.weight.to(self.harmonics.table.dtype))
        return F.gelu(self.skip(x) + self.harmonics.back(y))


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(1)
    harmonics = Harmonics()
    return nn.Sequential(nn.Conv2d(1, width, 1), Layer(width, harmonics), Layer(width, harmonics), nn.Conv2d(width, 1, 1))


def cut_weights(name: str, module: nn.Module, mesh: Any) -> None:
    """By degree, as the harmonics that they multiply: so their gradients stay where they are made."""
    import shardtensor as st

    if isinstance(module, Layer):
        module.weight = nn.Parameter(st.distribute_tensor(module.weight, mesh, [st.Shard(2), st.Replicate()]))


def fields(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some of all degrees, before and after heat has spread: plain torch."""
    generator, harmonics = torch.Generator().manual_seed(2), Harmonics()
    sizes = (n, 1, DEGREES, DEGREES)
    waves = torch.complex(*(torch.randn(sizes, generator=generator, dtype=torch.float64) for _ in range(2))).tril()
    degree = torch.arange(DEGREES, dtype=torch.float64)[:, None]
    return harmonics.back(waves), harmonics.back(waves * torch.exp(-degree * (degree + 1) / 20))


def rows_and_columns(ranks: int) -> tuple[int, int]:
    rows = max(n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0)
    return ranks // rows, rows


def train(device: str | None, *, steps: int = 60, rate: float = 1e-2, report: Callable[[float], None] = lambda loss: None) -> list[float]:
    """The loss of every step; the same with ranks and without (`device` None)."""
    model = network().double()
    data: Any = fields(8)
    modes = contextlib.ExitStack()
    if device is not None:
        import shardtensor as st

        mesh = st.init_device_mesh(device, rows_and_columns(dist.get_world_size()), mesh_dim_names=("latitude", "longitude"))
        model = st.distribute_module(model.to(device), mesh, cut_weights)
        data = [st.distribute_tensor(t, mesh, [st.Shard(2), st.Shard(3)]) for t in data]
        modes.enter_context(st.strict_mode())  # an op that would gather raises

    def loss_at(step: int) -> torch.Tensor:
        at = slice(step % 4 * 2, step % 4 * 2 + 2)
        loss = ((model(data[0][at]) - data[1][at]) ** 2).mean()
        loss.backward()
        return loss

    with modes:
        return descend(loss_at, torch.optim.AdamW(model.parameters(), lr=rate), steps=steps, report=report)


if __name__ == "__main__":
    run_on_field(train, __doc__, lambda n: f"{LATITUDES} x {LONGITUDES} points on {' x '.join(map(str, rows_and_columns(n)))} ranks")
