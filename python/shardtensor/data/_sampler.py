"""Which samples of a dataset each rank reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement
from torch.utils.data import Sampler

from shardtensor.data._where import check_placements, part_of_rows


class ShardSampler(Sampler[int]):
    """Gives each rank its part of a dataset: each sample to one rank, none twice.

    torch's DistributedSampler repeats or drops samples until all parts have one length. Here the parts' lengths may differ, and
    `shard_batches` takes them as they are. The first five arguments and the order of the samples are those of torch's.

    mesh, placements: as for `shard_batches`, instead of num_replicas and rank. Ranks along a mesh dim that replicates get the
    same samples.
    contiguous: each rank reads samples that follow each other in the order, instead of every n-th.
    shares: how many samples in turn each part gets, one number per part; by default 1 each. If these are the ranks' batch
    sizes, the samples of each batch of all ranks follow each other in the order.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        *,
        mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        contiguous: bool = False,
        shares: Sequence[int] | None = None,
    ) -> None:
        who = "ShardSampler"
        if mesh is not None:
            if num_replicas is not None or rank is not None:
                raise ValueError(f"{who}: argument 'mesh' says which part this rank has; leave out 'num_replicas' and 'rank'")
            num_replicas, rank = part_of_rows(mesh, check_placements(mesh, placements, who))
        elif placements is not None:
            raise ValueError(f"{who}: argument 'placements' needs 'mesh'")
        if num_replicas is None or rank is None:
            if not dist.is_initialized():
                raise RuntimeError(f"{who}: no process group is initialised; pass 'mesh', or 'num_replicas' and 'rank'")
            num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
            rank = dist.get_rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(f"{who}: argument 'rank' is {rank}; with {num_replicas} parts use 0 to {num_replicas - 1}")
        shares = [1] * num_replicas if shares is None else [int(n) for n in shares]
        if len(shares) != num_replicas or min(shares) < 0 or not sum(shares):
            raise ValueError(f"{who}: argument 'shares' is {shares}; give one number from 0 on for each of {num_replicas} parts")
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.seed, self.epoch, self.start = shuffle, seed, 0, 0
        self.contiguous, self.shares = contiguous, shares

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Chooses the order of the samples; call it before each epoch. `start` resumes in the middle of an epoch: the number of
        its samples that all ranks together have read."""
        if start and self.contiguous:
            raise ValueError("ShardSampler.set_epoch: argument 'start': with contiguous=True, what was read is not the start of the order")
        if not 0 <= start <= len(self.dataset):
            raise ValueError(f"ShardSampler.set_epoch: argument 'start' is {start}, but the dataset has {len(self.dataset)} samples")
        self.epoch, self.start = epoch, start

    def _places(self) -> list[int]:
        """This rank's places in the order."""
        total, before = sum(self.shares), sum(self.shares[: self.rank])
        after, size = before + self.shares[self.rank], len(self.dataset)
        if self.contiguous:
            return list(range(size * before // total, size * after // total))
        return [i for turn in range(self.start, size, total) for i in range(turn + before, min(turn + after, size))]

    def __len__(self) -> int:
        return len(self._places())

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)
        if not self.shuffle:
            return iter(self._places())
        order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        return iter([order[i] for i in self._places()])
