"""Random numbers on ShardTensors.

The value of an element depends only on the seed and the element's global index. The same program gives the same global
tensors on one rank, two or five, with any placements and any cuts, on CPU or GPU (on GPU, except for the last digits of
logarithms and cosines). Plain torch draws other numbers from the same seed.

Each random op (`uniform_`, `normal_`, dropout, `rand_like`, ...) takes 64 bits from its `generator` argument, or else from
torch's default CPU generator, also for CUDA tensors, and numbers the elements with a counter-based generator (Philox).
`torch.manual_seed`, `torch.random.fork_rng` and activation checkpointing work as usual.

The contract: all ranks of a mesh run the same random ops in the same order, with generators in the same state. Give all ranks
the same seed, by `torch.manual_seed(seed)` on every rank or by `manual_seed` below, and use separate generators for numbers
that should differ between ranks (such as data loading). The first random op on a mesh compares the ranks' default generators.
If they differ, it copies the first rank's state and warns. A state that `fork_rng` restores later is not compared again.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

import shardtensor._C as _C
from shardtensor.tensor._mesh import as_mesh, given_mesh

__all__ = ["is_rng_supported_mesh", "manual_seed"]


def is_rng_supported_mesh(device_mesh: DeviceMesh) -> bool:
    """Whether random ops work on ShardTensors of this mesh: on CPU and CUDA."""
    return device_mesh.device_type in ("cpu", "cuda")


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None) -> None:
    """Seeds torch's generators on every rank of the mesh, which must all call this with the same seed.

    If the seeds differ, raises on every rank. Also raises on a rank outside the mesh.
    """
    device_mesh = given_mesh(device_mesh, "manual_seed")
    if device_mesh.get_coordinate() is None:
        raise RuntimeError(
            f"manual_seed: argument 'device_mesh' does not hold rank {device_mesh.get_rank()}; call it on the ranks of the mesh"
        )
    mesh = as_mesh(device_mesh)
    seeds = torch.tensor([int(seed) % 2**64 - (2**64 if int(seed) % 2**64 >= 2**63 else 0)], device=device_mesh.device_type)
    for mesh_dim, n in enumerate(mesh.shape):
        pieces = [torch.empty_like(seeds) for _ in range(n)]
        seeds = torch.cat(_C.all_gather(pieces, seeds, mesh, mesh_dim))
    if (seeds != seeds[0]).any():
        raise RuntimeError(
            f"manual_seed: argument 'seed' must be the same on all ranks of the mesh, but they pass {sorted(set(seeds.tolist()))} "
            f"(rank {mesh.rank}: {seed})"
        )
    torch.manual_seed(seed)
    _C.mark_random_agreed(mesh)
