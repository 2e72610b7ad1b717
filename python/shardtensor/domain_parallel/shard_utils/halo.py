"""A piece with rows of its neighbours, for code that works on pieces. ShardTensors' own ops do this by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

import shardtensor._C as _C
from shardtensor.tensor._compile import in_graph
from shardtensor.tensor._from_local import coordinate_at, from_everyone
from shardtensor.tensor._mesh import as_mesh
from shardtensor.tensor._swap import swap

__all__ = ["HaloConfig", "halo_padding", "unhalo_padding"]


@dataclass
class HaloConfig:
    """How wide a halo is and where: `halo_size` rows along `tensor_dim` from the neighbours along `mesh_dim`, and at the edges of the
    whole `edge_padding_size` zeros. `async_op` and `communication_method` are checked, and change nothing."""

    mesh_dim: int
    tensor_dim: int
    halo_size: int
    edge_padding_size: int = 0
    async_op: bool = False
    communication_method: Literal["p2p", "a2a"] = "a2a"

    def __post_init__(self) -> None:
        if self.communication_method not in ("p2p", "a2a"):
            raise ValueError(f"HaloConfig: argument 'communication_method' is {self.communication_method!r}; use 'p2p' or 'a2a'")
        if self.async_op and self.communication_method == "p2p":
            raise ValueError("HaloConfig: async_op=True needs communication_method='a2a'")
        if self.halo_size < 0 or self.edge_padding_size < 0:
            raise ValueError(f"HaloConfig: arguments 'halo_size' {self.halo_size} and 'edge_padding_size' {self.edge_padding_size}: not below 0")


@torch.compiler.disable(reason="halo_padding: the ranks exchange sizes")  # type: ignore[untyped-decorator, no-untyped-call]
def halo_padding(tensor: torch.Tensor, mesh: DeviceMesh, halo_config: HaloConfig) -> torch.Tensor:
    """This rank's plain piece with its halo, a plain tensor; differentiable: the halo's gradient goes back and is added.

    Pieces may have different lengths, and be thinner than the halo or empty: it is filled from further ranks. All ranks of the mesh call it.
    """
    who = "halo_padding"
    view, dim, halo = as_mesh(mesh), halo_config.tensor_dim % tensor.ndim, halo_config.halo_size
    line = _line(view, halo_config.mesh_dim)
    lengths = [n for (n,) in _of_line(from_everyone([tensor.size(dim)], view, tensor.device), line)]
    me = view.coordinate[halo_config.mesh_dim]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    n = len(lengths)
    for i in range(n):
        there = [rows for inner, rows in ((i > 0, starts[i]), (i < n - 1, starts[n] - starts[i + 1])) if inner]
        if min(there, default=halo) < halo:
            raise ValueError(
                f"{who}: the piece of rank {view.ranks[line[i]]} has {min(there)} rows before or after it, the halo {halo}; pieces have lengths "
                f"{lengths} (rank {view.rank})"
            )

    def part(of: int, at: int) -> tuple[int, int]:
        """The rows of piece `of` that the rank at `at` lacks, as a start in the piece and a length."""
        if of == at:
            return 0, 0
        low, high = (starts[at] - halo, starts[at]) if of < at else (starts[at + 1], starts[at + 1] + halo)
        low, high = max(low, starts[of]), min(high, starts[of + 1])
        return (low - starts[of], high - low) if low < high else (0, 0)

    rows = tensor.movedim(dim, 0)
    sent = [part(me, at) for at in range(n)]
    to_each, of_each = [0] * len(view.ranks), [0] * len(view.ranks)
    for i, index in enumerate(line):
        to_each[index], of_each[index] = sent[i][1], part(i, me)[1]
    got = swap(torch.cat([rows.narrow(0, *s) for s in sent]), to_each, of_each, view)
    before = sum(of_each[index] for index in line[:me])
    edge = rows.new_zeros(halo_config.edge_padding_size, *rows.shape[1:])
    first, last = me == 0, me == n - 1
    return torch.cat([edge if first else got[:before], rows, edge if last else got[before:]]).movedim(0, dim)


def unhalo_padding(tensor: torch.Tensor, mesh: DeviceMesh, halo_config: HaloConfig) -> torch.Tensor:
    """The piece without the halo that `halo_padding` has added."""
    c = halo_config
    return _without_halo(tensor, mesh, c.tensor_dim % tensor.ndim, c.mesh_dim, c.halo_size, c.edge_padding_size)


def _without_halo(tensor: torch.Tensor, mesh: DeviceMesh, dim: int, mesh_dim: int, halo: int, edge: int) -> torch.Tensor:
    view = as_mesh(mesh)
    me, n = view.coordinate[mesh_dim], view.shape[mesh_dim]
    before, after = edge if me == 0 else halo, edge if me == n - 1 else halo
    return tensor.narrow(dim, before, tensor.size(dim) - before - after)


in_graph(_without_halo)


def _line(view: _C.Mesh, mesh_dim: int) -> list[int]:
    """The indices in the mesh of the ranks along a mesh dim from this one."""
    mesh_dim %= len(view.shape)
    mine = view.coordinate
    coordinates = [coordinate_at(view, i) for i in range(len(view.ranks))]
    return [i for i, at in enumerate(coordinates) if all(a == b for m, (a, b) in enumerate(zip(at, mine, strict=True)) if m != mesh_dim)]


def _of_line(rows: list[list[int]], line: list[int]) -> list[list[int]]:
    return [rows[index] for index in line]
