"""How long Gloo takes to move pieces of any size, by each of several ways. csrc/comm chooses by these figures.

    python benchmarks/collectives.py [--ranks 2 4] [--repeats 20]

Times are medians over repeats of the slowest rank, in microseconds. Size: what one rank holds before an all-gather, or sends in
all in an all-to-all.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

SIZES = {"1 KiB": 2**10, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24}


def ways(rank: int, world: int, size: int) -> dict[str, dict[str, Callable[[], Any]]]:
    import torch
    import torch.distributed as dist

    mine = torch.ones(size, dtype=torch.uint8)
    whole = torch.empty(size * world, dtype=torch.uint8)
    pieces = list(whole.chunk(world))
    out = torch.empty(size, dtype=torch.uint8)
    parts_in, parts_out = list(mine.chunk(world)), list(out.chunk(world))
    others = [r for r in range(world) if r != rank]

    def wait(works: list[Any]) -> None:
        for work in works:
            work.wait()

    def broadcasts() -> None:
        pieces[rank].copy_(mine)
        wait([dist.broadcast(pieces[r], r, async_op=True) for r in range(world)])

    def point_to_point(sends: list[Any], receives: list[Any]) -> None:
        works = [dist.irecv(receives[r], r) for r in others]
        wait(works + [dist.isend(sends[r], r) for r in others])

    def gather_point_to_point() -> None:
        pieces[rank].copy_(mine)
        point_to_point([mine] * world, pieces)

    def exchange_point_to_point() -> None:
        parts_out[rank].copy_(parts_in[rank])
        point_to_point(parts_in, parts_out)

    def exchange_broadcasts() -> None:  # every rank receives all pieces
        wait([dist.broadcast(mine if r == rank else pieces[r], r, async_op=True) for r in range(world)])

    return {
        "all-gather": {
            "all_gather (even only)": lambda: dist.all_gather(pieces, mine),
            "broadcasts": broadcasts,
            "all_to_all": lambda: dist.all_to_all_single(whole, mine.repeat(world)),
            "send and recv": gather_point_to_point,
        },
        "all-to-all": {
            "all_to_all": lambda: dist.all_to_all_single(out, mine),
            "broadcasts": exchange_broadcasts,
            "send and recv": exchange_point_to_point,
        },
    }


def measure(rank: int, world: int, store: str, repeats: int, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for label, size in SIZES.items():
        for what, table in ways(rank, world, size).items():
            for way, call in table.items():
                times = []
                for _ in range(repeats + 3):
                    dist.barrier()
                    start = time.perf_counter()
                    call()
                    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                    dist.all_reduce(took, dist.ReduceOp.MAX)
                    times.append(took.item() * 1e6)
                if rank == 0:
                    results.put((what, way, label, statistics.median(times[3:])))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    context = mp.get_context("spawn")
    for world in arguments.ranks:
        results = context.Queue()
        store = os.path.join(tempfile.mkdtemp(), "store")
        ranks = [context.Process(target=measure, args=(r, world, store, arguments.repeats, results)) for r in range(world)]
        for process in ranks:
            process.start()
        rows: dict[tuple[str, str], dict[str, float]] = {}
        for _ in range(len(SIZES) * 7):
            what, way, label, took = results.get(timeout=600)
            rows.setdefault((what, way), {})[label] = took
        for process in ranks:
            process.join()
        print(f"{world} ranks, microseconds{'':18}" + "".join(f"{label:>10}" for label in SIZES))
        for (what, way), row in sorted(rows.items()):
            print(f"{what}: {way:<28}" + "".join(f"{row[label]:>10.0f}" for label in SIZES))


if __name__ == "__main__":
    main()
