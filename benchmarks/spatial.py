"""A 3x3 convolution's step with the height cut over ranks: halos by hand, by gathering, and with shardtensor, side by side.

    python benchmarks/spatial.py                       # sides 64 to 512, on two and three ranks
    python benchmarks/spatial.py --side 256 --ranks 2

The step: forward, backward, and the sum of the weights' gradients. [2, 16, side, side], 16 channels out, padding 1. By hand: rows sent
to the neighbours, received into a buffer beside the piece; backward sends the halo's gradients back and adds them. Gathering: what a
convolution does if its input must be whole.

The candidates take turns. Times are of the slowest rank: the least, and the median over the turns. The ratio to `by hand` is the median
of the ratios within a turn. KiB: what a rank hands to collectives in a step without the weights' gradients, the most of all ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

# Fresh pages for every large tensor would be half of each time, so malloc keeps its memory. It reads this when a process starts.
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_TOP_PAD_": str(1 << 28), "OMP_NUM_THREADS": "1"}
NAMES = ["by hand", "gathering", "shardtensor"]
BATCH, CHANNELS = 2, 16
SIDES, RANKS = [64, 128, 256, 512], [2, 3]
SECONDS = 4.0  # per side
FEWEST = 7  # turns


class ByHand(torch.autograd.Function):
    """Piece and halo in one buffer, then torch's kernel; backward sends the halo's gradients back."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, w: Tensor, b: Tensor) -> Tensor:
        buffer = t.new_empty(t.shape[0], t.shape[1], t.shape[2] + 2, t.shape[3])
        above, below = exchange(t[:, :, :1], t[:, :, -1:])
        buffer[:, :, 1:-1] = t
        for at, row in ((0, above), (-1, below)):
            buffer[:, :, at] = 0 if row is None else row[:, :, 0]
        ctx.save_for_backward(buffer, w)
        return F.conv2d(buffer, w, b, padding=(0, 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        buffer, w = ctx.saved_tensors
        mask = [True] * 3
        dx, dw, db = torch.ops.aten.convolution_backward(grads[0], buffer, w, [w.shape[0]], [1, 1], [0, 1], [1, 1], False, [0, 0], 1, mask)
        above, below = exchange(dx[:, :, :1], dx[:, :, -1:])
        dx = dx[:, :, 1:-1]
        if above is not None:
            dx[:, :, :1] += above
        if below is not None:
            dx[:, :, -1:] += below
        return dx, dw, db


def exchange(first: Tensor, last: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Sends a row up and a row down; returns the row from above and the row from below, if there are such ranks."""
    me, n = dist.get_rank(), dist.get_world_size()
    work, got = [], []
    for peer, row in ((me - 1, first), (me + 1, last)):
        got.append(torch.empty_like(row, memory_format=torch.contiguous_format) if 0 <= peer < n else None)
        if got[-1] is not None:
            work += [dist.isend(row.contiguous(), peer), dist.irecv(got[-1], peer)]
    for w in work:
        w.wait()
    return got[0], got[1]


def added(*grads: Tensor) -> None:
    dist.all_reduce(torch.cat([g.flatten() for g in grads]))


def steps(side: int) -> dict[str, Callable[[], None]]:
    import shardtensor as st

    torch.manual_seed(0)
    mesh = st.init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(BATCH, CHANNELS, side, side)
    weight, bias = torch.randn(CHANNELS, CHANNELS, 3, 3) / 12, torch.randn(CHANNELS)
    x = st.distribute_tensor(whole, mesh, [st.Shard(2)])
    w, b = (st.distribute_tensor(t, mesh, [st.Replicate()]) for t in (weight, bias))
    piece = x.to_local().clone()

    def by_hand() -> None:
        leaves = [t.detach().requires_grad_() for t in (piece, weight, bias)]
        _, *grads = torch.autograd.grad(ByHand.apply(*leaves), leaves, piece)
        added(*grads)

    def gathering() -> None:
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        y = F.conv2d(leaves[0].redistribute(placements=[st.Replicate()]), *leaves[1:], padding=1).redistribute(placements=[st.Shard(2)])
        torch.autograd.grad(y, leaves, x)

    def ours() -> None:
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        y = F.conv2d(*leaves, padding=1)
        _, *grads = torch.autograd.grad(y, leaves, x)
        added(*(g.to_local() for g in grads))

    return dict(zip(NAMES, (by_hand, gathering, ours), strict=True))


def sent_by(step: Callable[[], None]) -> float:
    from shardtensor import _C

    _C.reset_comm_counts()
    step()
    mine = torch.tensor(sum(size for _, size in _C.comm_counts().values()))
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item() / 1024


def measure(side: int) -> None:
    candidates = steps(side)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    end = time.monotonic() + SECONDS
    turn = 0
    while turn < FEWEST or go_on(end):
        for name, step in candidates.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= 2:  # the first ones fill caches
                times[name].append(took.item() * 1e3)
        turn += 1
    kib = {name: sent_by(step) for name, step in candidates.items()}
    if dist.get_rank() == 0:
        for name in NAMES:
            ratio = statistics.median(a / b for a, b in zip(times[name], times["by hand"], strict=True))
            sent = f"{kib[name]:8.0f}" if name != "by hand" else " " * 8
            print(f"{dist.get_world_size():5} {side:5}  {name:12} {min(times[name]):8.2f} {statistics.median(times[name]):8.2f} {ratio:7.2f} {sent}")


def go_on(end: float) -> bool:
    more = torch.tensor(time.monotonic() < end)
    dist.broadcast(more, 0)
    return bool(more)


def serve(rank: int, world: int, store: str, sides: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for side in sides:
        measure(side)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, nargs="*", default=SIDES)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in KEEP.items()):
        os.environ.update(KEEP)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    print("ranks  side  how           least ms   median   ratio      KiB")
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(serve, (world, f"{folder}/store", args.side), nprocs=world)


if __name__ == "__main__":
    main()
