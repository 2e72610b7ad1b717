"""Many random moves in two threads of each rank, over Gloo: some results are kept and compared, others dropped in flight. By hand:

    python tests/soak.py --moves 100000

Each thread has a process group of its own; one of the two also moves between some of the ranks. Each rank drops what it likes. Prints
memory as it goes, and fails if it has grown by more than --most MiB since the first tenth, if a value is wrong, or if something is
left in flight.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import sys
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


def resident() -> float:
    """MiB in use, after the allocator has given back what it can."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Pool:
    """Results in flight of one thread."""

    def __init__(self, seed: int, rank: int) -> None:
        self.kept: list[tuple[Any, torch.Tensor | None]] = []
        self.random = random.Random(1000 * seed + rank)
        self.dropped = 0

    def take(self, y: Any, want: torch.Tensor | None) -> None:
        if self.random.random() < 0.5:
            self.kept.append((y, want))
        else:
            self.dropped += 1
        while len(self.kept) > 8 or (self.kept and self.random.random() < 0.5):
            self.check(*self.kept.pop(self.random.randrange(len(self.kept))))

    def check(self, y: Any, want: torch.Tensor | None) -> None:
        assert want is None or torch.equal(y.to_local(), want), (y.placements, y.shape)


def run(mesh: Any, between: Any, moves: int, seed: int, errors: list[BaseException], seen: list[int]) -> None:
    from oracle import place
    from shardtensor import Replicate, Shard

    try:
        me, world = dist.get_rank(), dist.get_world_size()
        to = {"R": Replicate(), "S(0)": Shard(0), "S(1)": Shard(1)}
        alike, pool = random.Random(seed), Pool(seed, me)
        for i in range(moves):
            sizes = [alike.randint(1, 12), alike.randint(1, 12)]
            data = torch.arange(sizes[0] * sizes[1], dtype=torch.float64).view(sizes) * alike.random()
            if between and alike.random() < 0.2:
                some, others = between
                y = place(data, some, ("S(0)",), "even").redistribute(others, [Shard(0)], async_op=True)
                pieces = data.chunk(2) if sizes[0] > 1 else (data, data[1:])
                want = {1: pieces[0], world - 1: pieces[1]}.get(me)
            else:
                start = alike.choice(["P", *to])
                end = alike.choice([p for p in to if p != start])
                cut = alike.choice(["even", "uneven", "empty"])
                x = place(data, mesh, (start,), cut if start[0] == "S" else "even")
                y = x.redistribute(placements=[to[end]], async_op=True)
                want = None if start == "P" else place(data, mesh, (end,), "even").to_local()  # sums differ by rounding
            pool.take(y, want)
            del y
            seen[0] = i
        for kept in pool.kept:
            pool.check(*kept)
        seen[1] = pool.dropped
    except BaseException as e:
        errors.append(e)


def rank(me: int, args: Any, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=me, world_size=args.ranks)
    import shardtensor as st
    from shardtensor import _C

    meshes = [st.DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]
    between = [st.DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [1, args.ranks - 1])] if args.ranks > 2 else None
    errors: list[BaseException] = []
    seen = [[0, 0], [0, 0]]
    threads = [
        threading.Thread(target=run, args=(mesh, between if t == 0 else None, args.moves // 2, t, errors, seen[t]))
        for t, mesh in enumerate(meshes)
    ]
    for thread in threads:
        thread.start()
    began, first = time.monotonic(), None
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(args.every / 2)
        done = sum(n for n, _ in seen)
        if first is None and done > args.moves / 10:
            first = resident()
        if me == 0:
            print(f"{time.monotonic() - began:6.0f} s {done:8} moves {resident():8.1f} MiB {_C.dropped_in_flight():4} in flight, dropped", flush=True)
        if errors:
            break
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    _C.drain_dropped()
    last = resident()
    assert first is not None and _C.dropped_in_flight() == 0
    print(f"rank {me}: {sum(n for _, n in seen)} of {args.moves} dropped; {first:.1f} MiB after a tenth, {last:.1f} at the end", flush=True)
    assert last - first < args.most, "memory has grown"
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=100_000, help="of each rank, in both threads")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--every", type=float, default=20, help="seconds from one report to the next")
    parser.add_argument("--most", type=float, default=16, help="MiB")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (args, os.path.join(folder, "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
