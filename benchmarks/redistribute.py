"""Moving a tensor from one layout to another: shardtensor, stock DTensor, PhysicsNeMo's ShardTensor and collectives by hand.

First what the host does besides the collective (a process group that sends nothing), then whole redistributions over sizes,
between processes of this machine: Gloo, or NCCL where there are as many GPUs as ranks. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from stock import first_line, import_physicsnemo, import_shard_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

OURS, STOCK, NEMO, HAND = "shardtensor", "DTensor", "PhysicsNeMo", "by hand"
HOST_TARGET = 8.0  # microseconds over the bare collective
COLUMNS = 64

Call = Callable[[], Any]
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
MOVES: dict[str, tuple[Placement, Placement]] = {
    "S(0)->R": (S0, R),
    "S(1)->R": (S1, R),
    "S(0)->S(1)": (S0, S1),
    "P->R": (P, R),
    "P->S(0)": (P, S0),
}


@dataclass(frozen=True)
class Setting:
    mesh: DeviceMesh
    rank: int
    ranks: int
    device: str

    def local(self, rows: int, placement: Placement) -> torch.Tensor:
        """This rank's piece of (rows, COLUMNS) floats, cut by torch.chunk's rule."""
        whole = torch.arange(rows * COLUMNS, dtype=torch.float32, device=self.device).view(rows, COLUMNS)
        if not isinstance(placement, Shard):
            return whole
        pieces = torch.chunk(whole, self.ranks, placement.dim)
        return pieces[self.rank].contiguous() if self.rank < len(pieces) else whole.narrow(placement.dim, 0, 0)


@cache
def classes() -> dict[str, Any]:
    found: dict[str, Any] = {STOCK: DTensor, OURS: import_shard_tensor()}
    nemo, why_not = import_physicsnemo()
    if nemo:
        found[NEMO] = nemo
    elif dist.get_rank() == 0:
        print(f"{NEMO}: {why_not}")
    return found


def wrapped(name: str, s: Setting, rows: int, placement: Placement) -> Any:
    """The candidates. None of them asks other ranks for sizes."""
    known: dict[str, Any] = {"shape": (rows, COLUMNS), "stride": (COLUMNS, 1)}
    if name == NEMO:
        shapes = [replace(s, rank=rank).local(rows, placement).shape for rank in range(s.ranks)]
        known = {"sharding_shapes": {0: shapes} if isinstance(placement, Shard) else {}}
    return classes()[name].from_local(s.local(rows, placement), s.mesh, [placement], **known)


def moved(name: str, s: Setting, rows: int, source: Placement, target: Placement) -> Call:
    x = wrapped(name, s, rows, source)
    return lambda: x.redistribute(placements=[target])


def by_hand(s: Setting, rows: int, source: Placement, target: Placement) -> Call | None:
    """The collective that a careful user would call if the pieces have equal sizes."""
    x, n = s.local(rows, source), s.ranks
    if rows % n or COLUMNS % n:
        return None

    def gather_rows() -> torch.Tensor:
        out = x.new_empty(rows, COLUMNS)
        dist.all_gather_into_tensor(out, x)
        return out

    def gather_columns() -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x)
        return torch.cat(parts, 1)

    def exchange() -> torch.Tensor:
        packed = torch.cat([c.reshape(-1) for c in x.chunk(n, 1)])
        out = x.new_empty(rows, COLUMNS // n)
        dist.all_to_all_single(out.view(-1), packed)
        return out

    def reduce() -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out

    def reduce_to_pieces() -> torch.Tensor:
        out = x.new_empty(rows // n, COLUMNS)
        dist.reduce_scatter_tensor(out, x)
        return out

    calls = [gather_rows, gather_columns, exchange, reduce, reduce_to_pieces]
    return dict(zip(MOVES.values(), calls, strict=True))[(source, target)]


# ---- the host's share


def per_call(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in repeat(None, calls):
        call()
    return (time.perf_counter() - start) / calls


def host_rows(repeats: int) -> list[dict[str, Any]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    s = Setting(init_device_mesh("cpu", (2,)), 0, 2, "cpu")
    group = dist.distributed_c10d._get_default_group()
    rows = []
    print("microseconds of the host over the bare collective with its output, two ranks, a group that sends nothing")
    found = classes()
    print(f"{'':14}" + "".join(f"{name:>14}" for name in found))
    for name in ("S(0)->R", "S(0)->S(1)", "full_tensor"):
        source, target = MOVES.get(name, (S0, R))
        calls = {c: moved(c, s, 16, source, target) for c in found}
        if name == "full_tensor":
            calls = {c: wrapped(c, s, 16, S0).full_tensor for c in found}
        local, out = s.local(16, source), torch.empty(16, COLUMNS)
        # Calls the process group itself: torch.distributed's Python functions would double the cost.
        bare: Call = lambda local=local, out=out: group._allgather_base(torch.empty_like(out), local).wait()  # noqa: E731
        if name == "S(0)->S(1)":
            bare = lambda local=local: group.alltoall_base(torch.empty_like(local), local, [], []).wait()  # noqa: E731
        everyone = {HAND: bare, **calls}
        least: dict[str, float] = {}
        with torch.no_grad():
            for c, call in list(everyone.items()):
                try:
                    per_call(call, 50)
                except Exception as error:
                    print(f"{name}: {c} cannot: {first_line(error)[:100]}")
                    del everyone[c]
            for _ in range(repeats):
                for c, call in everyone.items():
                    least[c] = min(least.get(c, 1.0), per_call(call, 100))
        over = {c: (least[c] - least[HAND]) * 1e6 for c in calls if c in least}
        rows.append({"move": name, "bare us": least[HAND] * 1e6, "over us": over, "target us": HOST_TARGET})
        verdict = "reached" if over[OURS] <= HOST_TARGET else "missed"
        print(f"{name:14}" + "".join(f"{over[c]:14.1f}" if c in over else f"{'-':>14}" for c in found) + f"   target {HOST_TARGET:g}: {verdict}")
    dist.destroy_process_group()
    return rows


# ---- whole redistributions


def timed(call: Call, device: str, repeats: int) -> float:
    """The slowest rank's time; the least of the repeats."""
    call()
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        taken = torch.tensor(time.perf_counter() - start, device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        best = min(best, taken.item())
    return best


def candidates(s: Setting, rows: int, source: Placement, target: Placement) -> dict[str, Call]:
    calls = {name: moved(name, s, rows, source, target) for name in classes()}
    hand = by_hand(s, rows, source, target)
    return calls | ({HAND: hand} if hand else {})


def measure(rank: int, ranks: int, sizes: list[int], repeats: int, store: str, results: str) -> None:
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    s = Setting(init_device_mesh(device, (ranks,)), rank, ranks, device)
    out = []
    for name, (source, target) in MOVES.items():
        for size in sizes:
            even = max(ranks, size // (4 * COLUMNS) // ranks * ranks)
            for rows, kind in ((even, "even"), (even + 1, "uneven")):
                times: dict[str, float | None] = {}
                for c, call in candidates(s, rows, source, target).items():
                    try:
                        times[c] = timed(call, device, repeats)
                    except Exception as error:  # a backend refuses on all ranks or on none
                        times[c] = None
                        if rank == 0:
                            print(f"{name} {kind}: {c} cannot: {first_line(error)[:100]}")
                out.append({"move": name, "pieces": kind, "bytes": rows * COLUMNS * 4, "seconds": times, "device": device})
                if rank == 0:
                    show(out[-1], header=len(out) == 1)
    if rank == 0:
        Path(results).write_text(json.dumps(out))
    dist.destroy_process_group()


def show(row: dict[str, Any], header: bool) -> None:
    names = [OURS, STOCK, NEMO, HAND]
    if header:
        print(f"\nmicroseconds, {row['device']}\n{'':12}{'pieces':>8}{'KiB':>8}", end="")
        print("".join(f"{n:>14}" for n in names) + f"{STOCK + '/ours':>14}{HAND + '/ours':>14}")
    t = row["seconds"]
    cells = "".join(f"{t[n] * 1e6:14.0f}" if t.get(n) else f"{'-':>14}" for n in names)
    ratios = "".join(f"{t[n] / t[OURS]:13.2f}x" if t.get(n) else f"{'-':>14}" for n in (STOCK, HAND))
    print(f"{row['move']:12}{row['pieces']:>8}{row['bytes'] // 1024:8}{cells}{ratios}", flush=True)


def plot(rows: list[dict[str, Any]], path: Path) -> str:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    figure = Figure(figsize=(4 * len(MOVES), 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(MOVES), sharex=True, sharey=True)
    for i, kind in enumerate(("even", "uneven")):
        for j, move in enumerate(MOVES):
            axis = axes[i][j]
            for c in (OURS, STOCK, NEMO, HAND):
                points = [(r["bytes"], r["seconds"].get(c)) for r in rows if r["move"] == move and r["pieces"] == kind]
                points = [p for p in points if p[1]]
                if points:
                    axis.loglog([p[0] / 1024 for p in points], [p[1] * 1e6 for p in points], marker="o", label=c)
            axis.set_title(f"{move}, {kind}")
    axes[0][0].legend()
    figure.supxlabel("KiB of the global tensor")
    figure.supylabel("microseconds")
    figure.savefig(path)
    return f"picture: {path}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="*", default=[4, 64, 1024, 16384], help="KiB of the global tensor")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", choices=["host", "sizes"])
    parser.add_argument("--picture", type=Path, help="write a plot of time over size here")
    parser.add_argument("--json", type=Path, help="write every row here")
    args = parser.parse_args()
    about = {"torch": torch.__version__, "machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    host = host_rows(args.repeats) if args.only != "sizes" else []
    rows = []
    if args.only != "host":
        with tempfile.TemporaryDirectory() as scratch:
            sizes, store, results = [k * 1024 for k in args.sizes], f"{scratch}/store", f"{scratch}/results"
            mp.spawn(measure, (args.ranks, sizes, args.repeats, store, results), nprocs=args.ranks)
            rows = json.loads(Path(results).read_text())
        if args.picture:
            print(plot(rows, args.picture))
    if args.json:
        args.json.write_text(json.dumps({"about": about, "host": host, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
