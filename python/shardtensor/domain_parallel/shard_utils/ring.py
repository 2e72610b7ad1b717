"""One step of a ring: each rank sends a plain tensor to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.domain_parallel.shard_utils.halo import _line
from shardtensor.tensor._mesh import as_mesh
from shardtensor.tensor._swap import swap

__all__ = ["RingPassingConfig", "perform_ring_iteration", "perform_ring_iteration_async"]


@dataclass
class RingPassingConfig:
    """Along which mesh dim, and in which direction. `mesh_size` and `communication_method` are checked, and change nothing."""

    mesh_dim: int
    mesh_size: int
    ring_direction: Literal["forward", "backward"] = "forward"
    communication_method: Literal["p2p", "a2a"] = "a2a"

    def __post_init__(self) -> None:
        if self.communication_method not in ("p2p", "a2a"):
            raise ValueError(f"RingPassingConfig: argument 'communication_method' is {self.communication_method!r}; use 'p2p' or 'a2a'")
        if self.ring_direction not in ("forward", "backward"):
            raise ValueError(f"RingPassingConfig: argument 'ring_direction' is {self.ring_direction!r}; use 'forward' or 'backward'")


def perform_ring_iteration(
    tensor: torch.Tensor, mesh: DeviceMesh, ring_config: RingPassingConfig, recv_shape: Sequence[int] | None = None
) -> torch.Tensor:
    """Sends `tensor` to the next rank along the mesh dim and returns that of the rank before, of sizes `recv_shape` (default: those of
    `tensor`). Differentiable. All ranks of the mesh call it."""
    view = as_mesh(mesh)
    line = _line(view, ring_config.mesh_dim)
    if ring_config.mesh_size != len(line):
        raise ValueError(f"perform_ring_iteration: the config's 'mesh_size' is {ring_config.mesh_size}, mesh dim {ring_config.mesh_dim} has {len(line)} ranks")
    me = view.coordinate[ring_config.mesh_dim]
    step = 1 if ring_config.ring_direction == "forward" else -1
    shape = list(tensor.shape if recv_shape is None else recv_shape)
    to_each, of_each = [0] * len(view.ranks), [0] * len(view.ranks)
    to_each[line[(me + step) % len(line)]] = tensor.numel()
    of_each[line[(me - step) % len(line)]] = prod(shape)
    return swap(tensor.reshape(-1), to_each, of_each, view).view(shape)


def perform_ring_iteration_async(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    ring_config: RingPassingConfig,
    recv_tensor: torch.Tensor | None = None,
    recv_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, list[Any]]:
    """The same, with a list of handles to wait for. The list is empty: the tensor has arrived when the function returns. As in
    PhysicsNeMo, only for the method "p2p"."""
    if ring_config.communication_method != "p2p":
        raise ValueError(
            "perform_ring_iteration_async only supports p2p communication: argument 'ring_config' has the communication_method "
            f"{ring_config.communication_method!r}. Use perform_ring_iteration, or communication_method='p2p'"
        )
    if recv_tensor is not None:
        recv_tensor.copy_(perform_ring_iteration(tensor, mesh, ring_config, recv_tensor.shape))
        return recv_tensor, []
    return perform_ring_iteration(tensor, mesh, ring_config, recv_shape), []
