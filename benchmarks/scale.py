"""What one rank of many computes before a move: layout, plan, counts, and whom it sends what. Nothing is sent, no process is started.

By ranks: for a size that was never seen, and for one that was (the plan and its messages are kept). Then whole redistributions on a
group that sends nothing, and `explain`. Targets: at most twice the time of 8 ranks plus 10 ns for each rank that takes part; `explain`
of 1,024 ranks in 50 ms; layout, plan and messages of one rank of 16,384 in 5 ms. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shardtensor import _C

PER_PEER = 10e-9  # seconds
EXPLAIN, LARGEST = 50e-3, 5e-3  # seconds
R, S0, S1, P = (0, -1, 1, "sum", 2.0), (1, 0, 1, "sum", 2.0), (1, 1, 1, "sum", 2.0), (2, -1, 1, "sum", 2.0)
_fresh = itertools.count(2)

# Placements before and after; None: the second mesh, half of whose ranks are others.
MOVES = {
    "S(0)->S(1)": (S0, S1, False),
    "P->S(0)": (P, S0, False),
    "P->S(1)": (P, S1, False),
    "S(0)->R": (S0, R, False),
    "S(1)->R": (S1, R, False),
    "recut S(0)": (S0, S0, False),
    "to other ranks": (S0, S0, True),
    "to other ranks, S(1)": (S0, S1, True),
}


def uneven(n: int, turn: int) -> list[int]:
    """Four indices a rank on average: thin, thick and empty pieces."""
    return [(i + turn) % 3 * 4 for i in range(n // 3 * 3)] + [4] * (n % 3)


def layout(mesh: Any, placement: Any, cut: list[int] | None) -> Any:
    return _C.Layout(mesh, [placement], [cut if placement[0] == 1 else None])


def ends(name: str, pieces: str, n: int, turn: int = 0) -> tuple[Any, Any]:
    """The layouts before and after, as a rank in the middle sees them."""
    before, after, elsewhere = MOVES[name]
    here = _C.Mesh("cpu", [n], range(n), [], [""], n // 2)
    there = _C.Mesh("cpu", [n], range(n // 2, n // 2 + n), [], [""], n // 2) if elsewhere else here
    recut = name == "recut S(0)"
    return (
        layout(here, before, uneven(n, turn) if pieces == "uneven" or recut else None),
        layout(there, after, uneven(n, turn + 1) if pieces == "uneven" else None),
    )


def least(call: Callable[[], Any], repeats: int, calls: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def prepared(ranks: list[int], repeats: int) -> list[dict[str, Any]]:
    rows = []
    print(f"microseconds of one rank\n{'':22}{'pieces':>8}{'ranks':>8}{'peers':>8}{'new size':>11}{'kept':>9}   new size, kept")
    for name, pieces in itertools.product(MOVES, ("even", "uneven")):
        if name == "recut S(0)" and pieces == "even":
            continue
        first: dict[str, float] = {}
        for n in ranks:
            source, target = ends(name, pieces, n)
            rows_of = sum(source.cuts[0] or target.cuts[0] or [4 * n])

            def new(source: Any = source, target: Any = target, size: int = rows_of) -> int:
                return _C.prepare(source, target, [size, size, next(_fresh)], 4)

            def seen(source: Any = source, target: Any = target, size: int = rows_of) -> int:
                return _C.prepare(source, target, [size, size, 1], 4)

            calls = max(1, 256 // n)
            peers = seen()
            new()
            times = {"new size": least(new, repeats, calls), "kept": least(seen, repeats, 32)}
            first = first or times
            met = {k: t <= 2 * first[k] + PER_PEER * peers for k, t in times.items()}
            rows.append({"move": name, "pieces": pieces, "ranks": n, "peers": peers, "seconds": times, "met": met})
            verdict = ", ".join("met" if m else "NOT MET" for m in met.values())
            print(f"{name:22}{pieces:>8}{n:8}{peers:8}{times['new size'] * 1e6:11.1f}{times['kept'] * 1e6:9.1f}   {verdict}", flush=True)
    return rows


def from_nothing(n: int, repeats: int) -> list[dict[str, Any]]:
    """A layout that no one has made before, its plan and its messages."""
    rows = []
    print(f"\nmilliseconds of one of {n} ranks: mesh known; layouts, plan and messages new; target {LARGEST * 1e3:g}")
    for name, pieces in itertools.product(MOVES, ("even", "uneven")):
        source, target = ends(name, pieces, n)  # keeps the meshes
        turns = itertools.count()

        def once(name: str = name, pieces: str = pieces, turns: Any = turns) -> None:
            source, target = ends(name, pieces, n, next(turns)) if pieces == "uneven" or name == "recut S(0)" else ends(name, pieces, n)
            size = sum(source.cuts[0] or target.cuts[0] or [4 * n])
            _C.prepare(source, target, [size, size, next(_fresh)], 4)

        seconds = least(once, repeats, 1)
        rows.append({"move": name, "pieces": pieces, "ranks": n, "seconds": seconds, "met": seconds <= LARGEST})
        print(f"{name:22}{pieces:>8}{seconds * 1e3:9.2f}   {'met' if seconds <= LARGEST else 'NOT MET'}", flush=True)
        del source, target
    return rows


def explained(n: int, repeats: int) -> list[dict[str, Any]]:
    from shardtensor import Replicate, Shard, explain
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.arange(n), _init_backend=False, _rank=0)
    rows = []
    print(f"\nmilliseconds of explain, {n} ranks; target {EXPLAIN * 1e3:g}")
    for name, before, after in (("S(0)->S(1)", Shard(0), Shard(1)), ("S(0)->R", Shard(0), Replicate()), ("R->S(0)", Replicate(), Shard(0))):
        call = lambda b=before, a=after: str(explain((mesh, [b], (4 * n, 4 * n), torch.float32), [a]))  # noqa: E731
        seconds = least(call, repeats, 1)
        rows.append({"move": name, "ranks": n, "seconds": seconds, "met": seconds <= EXPLAIN})
        print(f"{name:22}{seconds * 1e3:9.2f}   {'met' if seconds <= EXPLAIN else 'NOT MET'}")
    return rows


def moved(ranks: list[int], repeats: int) -> list[dict[str, Any]]:
    """x.redistribute() with pieces of a few bytes: the host's whole work, copies and torch's call included."""
    from shardtensor import Partial, Replicate, Shard, ShardTensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    pairs: dict[str, tuple[Any, Any, tuple[int, int], tuple[int, int]]] = {  # sizes: n times the first, plus the second
        "S(0)->S(1)": (Shard(0), Shard(1), (2, 4), (0, 0)),
        "P->S(1)": (Partial(), Shard(1), (0, 4), (16, 0)),
        "S(0)->R": (Shard(0), Replicate(), (4, 0), (0, 16)),
        "S(1)->R": (Shard(1), Replicate(), (0, 4), (16, 0)),
    }
    rows = []
    print("\nmicroseconds of x.redistribute() on a group that sends nothing, pieces of a few rows or columns")
    print(f"{'':22}" + "".join(f"{name:>12}" for name in pairs))
    for n in ranks:
        dist.init_process_group("fake", rank=0, world_size=n, store=FakeStore())
        mesh = init_device_mesh("cpu", (n,))
        times = {}
        for name, (before, after, each, fixed) in pairs.items():
            shape = [n * e + f for e, f in zip(each, fixed, strict=True)]
            local = [size // n if isinstance(before, Shard) and before.dim == d else size for d, size in enumerate(shape)]
            x = ShardTensor.from_local(torch.zeros(local), mesh, [before], shape=torch.Size(shape), stride=(shape[1], 1))
            with torch.no_grad():
                x.redistribute(placements=[after])
                times[name] = least(lambda x=x, after=after: x.redistribute(placements=[after]), repeats, 4)
        rows.append({"ranks": n, "seconds": times})
        print(f"{n:22}" + "".join(f"{t * 1e6:12.1f}" for t in times.values()), flush=True)
        dist.destroy_process_group()
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> str:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, kind in zip(figure.subplots(1, 2, sharex=True, sharey=True), ("new size", "kept"), strict=True):
        for name, pieces in dict.fromkeys((r["move"], r["pieces"]) for r in rows):
            points = [(r["ranks"], r["seconds"][kind] * 1e6) for r in rows if (r["move"], r["pieces"]) == (name, pieces)]
            axis.loglog(*zip(*points, strict=True), marker="o", linestyle="-" if pieces == "even" else "--", label=f"{name}, {pieces}")
        axis.set_title(kind)
    axis.legend(fontsize="small")
    figure.supxlabel("ranks")
    figure.supylabel("microseconds of one rank")
    figure.savefig(path)
    return f"picture: {path}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512, 2048, 16384])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=["prepared", "new", "explain", "moves"])
    parser.add_argument("--picture", type=Path, help="write a plot of time over ranks here")
    parser.add_argument("--json", type=Path, help="write every row here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = {"torch": torch.__version__, "machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    out: dict[str, Any] = {"about": about}
    if args.only in (None, "prepared"):
        out["prepared"] = prepared(args.ranks, args.repeats)
        if args.picture:
            print(plot(out["prepared"], args.picture))
    if args.only in (None, "new"):
        out["new"] = from_nothing(max(args.ranks), args.repeats)
    if args.only in (None, "explain"):
        out["explain"] = explained(1024, args.repeats)
    if args.only in (None, "moves"):
        out["moves"] = moved([n for n in args.ranks if n <= 2048], args.repeats)
    if args.json:
        args.json.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
