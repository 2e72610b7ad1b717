"""What the other ranks notice when one rank fails, and after how long: a Markdown table, for docs/reliability.md.

    python benchmarks/faults.py [--ranks 3] [--time-out 15]

Each row starts its ranks anew. Rank 1 does as the row says and lives on without coming back (or dies, ends, is stopped); the others
make the collective. Shown are the longest time until one of those that wait raises, and how many of their errors name rank 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from shardtensor import _C, Partial, Replicate, Shard, ShardTensor, distribute_tensor
from shardtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

BAD = 1


class Collectives:
    """One of each kind; each has been made once, as in a job that has run for a while."""

    def __init__(self) -> None:
        n = dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (n,))
        self.x = distribute_tensor(torch.randn(4 * n + 1, 2 * n + 1), self.mesh, [Shard(0)])
        self.summand = ShardTensor.from_local(torch.randn(4 * n + 1, 3), self.mesh, [Partial()])
        self.whole = torch.randn(5, 3)
        self.net = parallelize_module(nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)), self.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for run in self.calls().values():
            run()

    def calls(self) -> dict[str, Callable[[], Any]]:
        return {
            "all_gather": self.x.full_tensor,
            "all_reduce": self.summand.full_tensor,
            "all_to_all": lambda: self.x.redistribute(placements=[Shard(1)]).to_local(),
            "reduce_scatter": lambda: self.summand.redistribute(placements=[Shard(0)]).to_local(),
            "scatter": lambda: distribute_tensor(self.whole, self.mesh, [Shard(0)]),
            "broadcast": lambda: distribute_tensor(self.whole, self.mesh, [Replicate()]),
            "a training step": self.step,
        }

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.ones(3, 5, requires_grad=True)).sum().backward()
        self.optimizer.step()

    def backward(self, hook: Callable[[torch.Tensor], None]) -> Callable[[], None]:
        leaf = self.x.detach().requires_grad_()
        y = leaf * 2
        y.register_hook(hook)
        return y.mean().backward


def fail(how: str, here: Collectives, call: str, backward: Callable[[], None]) -> None:
    """On rank 1. Raises, or ends the process, as the row says."""
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "runs out of memory in the move":
        _C.set_comm_listener(lambda *_: "not enough memory")
        here.calls()[call]()
    elif how == "ends its script":
        util._run_finalizers(0)  # as at the end of a process that multiprocessing has started
        os._exit(0)
    elif how == "raises and ends":
        sys.excepthook(ValueError, ValueError("the user's"), None)
        util._run_finalizers(0)
        os._exit(1)
    elif how == "destroys its groups":
        dist.destroy_process_group()
        raise InterruptedError
    elif how == "waits at a barrier":
        dist.barrier()
    elif how == "raises in a kernel":
        torch.gather(here.x, 1, torch.full_like(here.x, 99, dtype=torch.long))
    elif how == "raises in a hook of its backward":
        backward()
    elif how == "raises in its optimizer":
        here.optimizer.step()


def serve(rank: int, world: int, store: str, seconds: float, how: str, call: str, answers: Any, told: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=seconds))
    here = Collectives()
    backward = here.backward(lambda grad: 1 / 0 if rank == BAD else None)
    here.step()
    if rank == BAD and how == "raises in its optimizer":
        here.optimizer.param_groups[0]["lr"] = "fast"
    dist.barrier()
    start = time.monotonic()
    if rank == BAD:
        try:
            fail(how, here, call, backward)
        except Exception:
            told.wait()
        return
    try:
        here.calls()[call]()
        text = "no error"
    except Exception as e:
        text = str(e)
    answers.put((rank, time.monotonic() - start, text))
    told.wait()


HOWS = [
    "runs out of memory in the move",
    "raises in a kernel",
    "raises in a hook of its backward",
    "raises in its optimizer",
    "raises and ends",
    "ends its script",
    "destroys its groups",
    "waits at a barrier",
    "is killed",
    "is stopped",
]
CALLS = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter", "scatter", "broadcast", "a training step"]


def row(context: Any, world: int, seconds: float, how: str, call: str) -> tuple[float | None, int, int, str]:
    answers, told = context.Queue(), context.Event()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [context.Process(target=serve, args=(r, world, store, seconds, how, call, answers, told), daemon=True) for r in range(world)]
        for process in ranks:
            process.start()
        got = [answers.get(timeout=60 + 2 * seconds) for _ in range(world - 1)]
        told.set()
        for process in ranks:
            process.kill()
            process.join()
    got = [answer for answer in got if answer[2] != "no error"]  # a rank that sends need not wait
    signs = (f"rank {BAD} failed", f"from rank {BAD}", f"rank {BAD} has", f"rank {BAD}:")
    named = sum(any(sign in text for sign in signs) for _, _, text in got)
    return max((after for _, after, _ in got), default=None), named, len(got), got[0][2] if got else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--time-out", type=float, default=15)
    parser.add_argument("--texts", action="store_true", help="print one rank's error for each row")
    options = parser.parse_args()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["shardtensor"])
    print(f"torch {torch.__version__}, Gloo, {options.ranks} ranks, time-out {options.time_out:g} s\n")
    print("| rank 1 | the others are in | they raise after | and name rank 1 |\n|---|---|---|---|")
    for how in HOWS:
        for call in CALLS:
            after, named, n, text = row(context, options.ranks, options.time_out, how, call)
            print(f"| {how} | {call} | " + ("need not wait | |" if after is None else f"{after:.1f} s | {named} of {n} |"), flush=True)
            if options.texts:
                print(f"\n{text}\n")


if __name__ == "__main__":
    main()
