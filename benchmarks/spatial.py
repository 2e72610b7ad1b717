"""A 3x3 convolution's step with the height cut over ranks, and causal attention with the sequence cut: by hand, by gathering, with
shardtensor, and with PhysicsNeMo's ShardTensor (if nvidia-physicsnemo is installed), side by side.

    python benchmarks/spatial.py                       # sides 64 to 512 and attention, on two and three ranks
    python benchmarks/spatial.py --side 256 --ranks 2  # one side
    python benchmarks/spatial.py --side                # attention only

The convolution's step: forward, backward, and the sum of the weights' gradients. [2, 16, side, side], 16 channels out, padding 1. By
hand: rows sent to the neighbours, received into a buffer beside the piece; backward sends the halo's gradients back and adds them.
Gathering: what a convolution does if its input must be whole.

Attention, forward and backward: [1, 8, 4096, 64] (the side is the length), and with 2 key/value heads. By hand: each rank has a part from
the front and one from the back of the sequence, so that all have the same work; keys and values go round in a ring. Its pieces lie so
from the start, while shardtensor's are one run of the sequence each. Gathering: keys and values on every rank, and a mask.

The candidates take turns. Times are of the slowest rank: the least, and the median over the turns. The ratio to `by hand` is the median
of the ratios within a turn. KiB: what a rank hands to collectives in a step without the weights' gradients, the most of all ranks.
"""

from __future__ import annotations

import argparse
import importlib
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
from stock import first_line, import_physicsnemo, import_shard_tensor
from torch import Tensor

# Fresh pages for every large tensor would be half of each time, so malloc keeps its memory. It reads this when a process starts.
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_TOP_PAD_": str(1 << 28), "OMP_NUM_THREADS": "1"}
NAMES = ["by hand", "gathering", "shardtensor"]
NEMO = "PhysicsNeMo"
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
    import_shard_tensor()
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

    made = dict(zip(NAMES, (by_hand, gathering, ours), strict=True))
    theirs = physicsnemo(piece, weight, bias)
    return made | ({NEMO: theirs} if theirs else {})


def physicsnemo(piece: Tensor, weight: Tensor, bias: Tensor) -> Callable[[], None] | None:
    """The step with PhysicsNeMo's class, if it can be imported and takes the step."""
    cls, _ = import_physicsnemo()
    if not cls:
        return None
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    def step() -> None:
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        y = F.conv2d(*leaves, padding=1)
        _, *grads = torch.autograd.grad(y, leaves, x)
        added(*(g.to_local() for g in grads))

    try:
        importlib.import_module("physicsnemo.domain_parallel").register_custom_ops()  # which it does itself only where CUDA is
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
        shapes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shapes, piece.shape)
        x = cls.from_local(piece, mesh, [Shard(2)], sharding_shapes={0: shapes})
        w, b = (cls.from_local(t, mesh, [Replicate()]) for t in (weight, bias))
        step()
    except Exception as error:
        if dist.get_rank() == 0:
            print(f"{NEMO}: {first_line(error)}")
        return None
    return step


# ---- causal attention ----

flash, flash_back = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
HEADS, FEATURES, LENGTH = 8, 64, 4096
KV_HEADS = [8, 2]


def passed_on(t: Tensor) -> tuple[list[dist.Work], Tensor]:
    me, n = dist.get_rank(), dist.get_world_size()
    out = torch.empty_like(t)
    return [w for w in (dist.isend(t, (me + 1) % n), dist.irecv(out, (me - 1) % n)) if w], out


def seen(q: Tensor, kv: Tensor, step: int) -> tuple[slice, slice]:
    """Which queries of a rank attend to which keys of the rank `step` behind it: of two runs each, the first and the last."""
    before = dist.get_rank() >= step
    q_half, k_half = q.shape[2] // 2, kv.shape[3] // 2
    return (slice(None), slice(0, k_half)) if before else (slice(q_half, None), slice(None))


def ring(q: Tensor, kv: Tensor, grad: Tensor) -> None:
    n = dist.get_world_size()
    out, log = flash(q, *shown(kv, q), 0.0, True)
    now = kv
    work, coming = passed_on(now)
    for step in range(1, n):
        for w in work:
            w.wait()
        now = coming
        work, coming = passed_on(now) if step + 1 < n else ([], now)
        rows, keys = seen(q, kv, step)
        part, log_part = flash(q[:, :, rows], *shown(now[:, :, :, keys], q), 0.0, False)
        both = torch.logaddexp(log[:, :, rows], log_part)
        out[:, :, rows] *= (log[:, :, rows] - both).exp().unsqueeze(-1)
        out[:, :, rows] += part * (log_part - both).exp().unsqueeze(-1)
        log[:, :, rows] = both
    work, coming = passed_on(kv)
    dq, *own = flash_back(grad, q, *shown(kv, q), out, log, 0.0, True)
    dkv = summed(own, kv)
    for step in range(1, n):
        work_back, coming_back = passed_on(dkv)
        for w in work:
            w.wait()
        now = coming
        work, coming = passed_on(now) if step + 1 < n else ([], now)
        rows, keys = seen(q, kv, step)
        cut = [t[:, :, rows] for t in (grad, q)]
        part, *of = flash_back(*cut, *shown(now[:, :, :, keys], q), out[:, :, rows], log[:, :, rows].contiguous(), 0.0, False)
        dq[:, :, rows] += part
        for w in work_back:
            w.wait()
        dkv = coming_back
        dkv[:, :, :, keys] += summed(of, kv)
    work, _ = passed_on(dkv)
    for w in work:
        w.wait()


def shown(kv: Tensor, q: Tensor) -> list[Tensor]:
    """Keys and values for each query head."""
    return [t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in kv]


def summed(grads: list[Tensor], kv: Tensor) -> Tensor:
    return torch.stack([g if g.shape[1] == kv.shape[2] else g.unflatten(1, (kv.shape[2], -1)).sum(2) for g in grads])


def attention(kv_heads: int) -> dict[str, Callable[[], None]]:
    import_shard_tensor()
    import shardtensor as st

    torch.manual_seed(0)
    n, me = dist.get_world_size(), dist.get_rank()
    mesh = st.init_device_mesh("cpu", (n,))
    length = LENGTH // (2 * n) * 2 * n
    whole = [torch.randn(1, heads, length, FEATURES) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    sharded = [st.distribute_tensor(t, mesh, [st.Shard(2)]) for t in whole]
    front_and_back = [torch.cat([t.chunk(2 * n, 2)[i] for i in (me, 2 * n - 1 - me)], 2) for t in whole]
    kv = torch.stack(front_and_back[1:3])
    rows = slice(me * length // n, (me + 1) * length // n)
    mask = torch.ones(length, length, dtype=torch.bool).tril()[rows]
    pieces = [t[:, :, rows].contiguous() for t in whole]

    def gathering() -> None:
        held = torch.stack(pieces[1:3])
        parts = [torch.empty_like(held) for _ in range(n)]
        dist.all_gather(parts, held)
        leaves = [t.detach().requires_grad_() for t in (pieces[0], *torch.cat(parts, 3))]
        y = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
        _, *grads = torch.autograd.grad(y, leaves, pieces[3])
        dist.all_reduce(torch.stack(grads))

    def ours() -> None:
        leaves = [t.detach().requires_grad_() for t in sharded[:3]]
        y = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        torch.autograd.grad(y, leaves, sharded[3])

    return dict(zip(NAMES, (lambda: ring(front_and_back[0], kv, front_and_back[3]), gathering, ours), strict=True))


# ---- measuring ----


def sent_by(step: Callable[[], None]) -> float:
    from shardtensor import _C

    _C.reset_comm_counts()
    step()
    mine = torch.tensor(sum(size for _, size in _C.comm_counts().values()))
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item() / 1024


def measure(what: str, size: int, candidates: dict[str, Callable[[], None]]) -> None:
    times: dict[str, list[float]] = {name: [] for name in candidates}
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
        for name in candidates:
            ratio = statistics.median(a / b for a, b in zip(times[name], times["by hand"], strict=True))
            sent = f"{kib[name]:8.0f}" if kib[name] else ""  # what does not go through shardtensor is not counted
            print(f"{dist.get_world_size():5} {what:11} {size:5}  {name:12} {min(times[name]):8.2f} {statistics.median(times[name]):8.2f} {ratio:7.2f} {sent}")


def go_on(end: float) -> bool:
    more = torch.tensor(time.monotonic() < end)
    dist.broadcast(more, 0)
    return bool(more)


def serve(rank: int, world: int, store: str, sides: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for side in sides:
        measure("convolution", side, steps(side))
    for kv_heads in KV_HEADS:
        measure(f"{kv_heads} kv heads", LENGTH, attention(kv_heads))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, nargs="*", default=SIDES)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in KEEP.items()):
        os.environ.update(KEEP)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    print("ranks what         side  how           least ms   median   ratio      KiB")
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(serve, (world, f"{folder}/store", args.side), nprocs=world)


if __name__ == "__main__":
    main()
