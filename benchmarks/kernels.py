"""Bandwidth of the box copies that redistribution makes, as a share of the memory's bandwidth: on the CPU, and on a GPU if any.

A tensor of (rows, pieces * run) bytes is cut along its last dim, so that every piece consists of runs of `run` bytes. Packing and
unpacking all of it is set beside a plain copy of as many bytes in the same round; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shardtensor import _C

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
RUNS = [8, 16, 64, 256, 1000, 1 * KIB, 4 * KIB, 5000, 64 * KIB]  # bytes; some are not multiples of a cache line
PIECES = [2, 8, 64]
CPU_TARGET, GPU_TARGET, CHAIN_TARGET = 0.90, 0.85, 2.0
LEAST_RUN = 64  # bytes; shorter runs have no target
ROUNDS = 11

Call = Callable[[], Any]
Box = tuple[list[int], list[int]]


def boxes_of(rows: int, run: int, pieces: int) -> list[Box]:
    return [([0, i * run], [rows, run]) for i in range(pieces)]


def gigabytes(size: int, seconds: float) -> float:
    return size / seconds / 1e9


def judged(value: float, target: float | None) -> str:
    return "" if target is None else f"target {target:g}: {'reached' if value >= target else 'missed'}"


def least(calls: dict[str, Call], seconds: Callable[[Call], float]) -> dict[str, float]:
    """Takes turns, so that a busy machine slows all candidates alike."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            taken[name].append(seconds(call))
    return {name: min(t) for name, t in taken.items()}


# ---- CPU


def thread_time(call: Call) -> float:
    """CPU time of this thread alone: other work of the machine does not count."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def cpu_rows(size: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    out = []
    print(f"CPU, one thread, {size / MIB:g} MiB, GB/s of bytes copied; ratio to the faster of memcpy and copy_")
    print(f"{'run':>8} {'pieces':>6} {'memcpy':>8} {'copy_':>8} {'pack':>8} {'unpack':>8} {'pack':>7} {'unpack':>7}")
    for run in RUNS:
        for pieces in PIECES:
            rows = max(1, size // (run * pieces))
            x = torch.randint(0, 255, (rows, run * pieces), dtype=torch.uint8)
            flat = torch.zeros(x.numel(), dtype=torch.uint8)
            boxes = boxes_of(rows, run, pieces)
            addresses, n = (flat.data_ptr(), x.data_ptr()), x.numel()
            calls: dict[str, Call] = {
                "memcpy": lambda a=addresses, n=n: ctypes.memmove(*a, n),
                "copy_": lambda x=x, flat=flat: flat.view_as(x).copy_(x),
                "pack": lambda x=x, flat=flat, boxes=boxes: _C.pack(x, boxes, flat),
                "unpack": lambda x=x, flat=flat, boxes=boxes: _C.unpack(flat, boxes, x),
            }
            rate = {name: gigabytes(n, t) for name, t in least(calls, thread_time).items()}
            best = max(rate["memcpy"], rate["copy_"])
            row: dict[str, Any] = {"device": "cpu", "bytes": n, "run": run, "pieces": pieces, "GB/s": rate}
            row["ratio"] = {name: rate[name] / best for name in ("pack", "unpack")}
            row["target"] = CPU_TARGET if run >= LEAST_RUN else None
            out.append(row)
            print(
                f"{run:8} {pieces:6} {rate['memcpy']:8.2f} {rate['copy_']:8.2f} {rate['pack']:8.2f} {rate['unpack']:8.2f} "
                f"{row['ratio']['pack']:7.2f} {row['ratio']['unpack']:7.2f}  {judged(min(row['ratio'].values()), row['target'])}",
                flush=True,
            )
    return out


# ---- GPU


def events(call: Call) -> float:
    """Seconds on the device without launch latency: the stream is busy while the calls are queued."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    repeats = 5
    torch.cuda._sleep(1_000_000)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def chain(gathered: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """DTensor's unpacking for Shard(-1): the result of the all-gather is padded, and its pieces lie along dim 0."""
    parts = torch.chunk(gathered, len(sizes), dim=0)
    return torch.cat([p.narrow(-1, 0, s) for p, s in zip(parts, sizes, strict=True)], dim=-1)


def gpu_row(size: int, run: int, pieces: int) -> dict[str, Any]:
    rows, run_floats = size // (run * pieces), run // 4
    x = torch.randn(rows, run_floats * pieces, device="cuda")
    flat = torch.zeros(x.numel(), device="cuda")
    boxes, n = boxes_of(rows, run_floats, pieces), x.numel() * 4
    # Uneven: the last piece holds half a run. DTensor pads it to a whole one.
    sizes = [run_floats] * (pieces - 1) + [run_floats // 2]
    gathered = flat.view(pieces * rows, run_floats)
    uneven = [*boxes[:-1], (boxes[-1][0], [rows, sizes[-1]])]
    whole = torch.empty(rows, sum(sizes), device="cuda")
    calls: dict[str, Call] = {
        "copy_": lambda: flat.view_as(x).copy_(x),
        "pack": lambda: _C.pack(x, boxes, flat),
        "unpack": lambda: _C.unpack(flat, boxes, x),
        "chain": lambda: chain(gathered, sizes),
        "unpack uneven": lambda: _C.unpack(flat, uneven, whole),
    }
    taken = least(calls, events)
    rate = {name: gigabytes(whole.nbytes if name in ("chain", "unpack uneven") else n, t) for name, t in taken.items()}
    return {
        "device": torch.cuda.get_device_name(),
        "bytes": n,
        "run": run,
        "pieces": pieces,
        "GB/s": rate,
        "ratio": {name: rate[name] / rate["copy_"] for name in ("pack", "unpack")},
        "target": GPU_TARGET if run >= LEAST_RUN else None,
        "over the chain": taken["chain"] / taken["unpack uneven"],
        "chain target": CHAIN_TARGET,
    }


def gpu_rows(sizes: list[int]) -> list[dict[str, Any]]:
    out = []
    print(f"{torch.cuda.get_device_name()}, GB/s of bytes copied; ratio to a device-to-device copy_; chain: chunk, narrow, cat")
    print(f"{'MiB':>6} {'run':>8} {'pieces':>6} {'copy_':>8} {'pack':>8} {'unpack':>8} {'pack':>7} {'unpack':>7} {'chain x':>8}")
    for size in sizes:
        for run in RUNS:
            for pieces in PIECES:
                row = gpu_row(size, run, pieces)
                out.append(row)
                rate, ratio = row["GB/s"], row["ratio"]
                print(
                    f"{size / MIB:6g} {run:8} {pieces:6} {rate['copy_']:8.0f} {rate['pack']:8.0f} {rate['unpack']:8.0f} "
                    f"{ratio['pack']:7.2f} {ratio['unpack']:7.2f} {row['over the chain']:8.2f}  "
                    f"{judged(min(ratio.values()), row['target'])}; chain {judged(row['over the chain'], CHAIN_TARGET)}",
                    flush=True,
                )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument("--size", type=int, default=64, help="MiB copied on the CPU")
    parser.add_argument("--gpu-sizes", type=int, nargs="*", default=[16, 256, 4096], help="MiB copied on the GPU")
    parser.add_argument("--only", choices=["cpu", "gpu"])
    args = parser.parse_args()
    rows = []
    if args.only != "gpu":
        rows += cpu_rows(args.size * MIB)
    if args.only != "cpu":
        if torch.cuda.is_available():
            rows += gpu_rows([s * MIB for s in args.gpu_sizes])
        else:
            print("GPU: left out, torch finds no CUDA device here")
    if args.json:
        about = {"torch": torch.__version__, "machine": platform.processor() or platform.machine()}
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
