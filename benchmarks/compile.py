"""torch.compile of plain tensors, DTensor and shardtensor: the cost of a compiled call, the compile time, a training step.

    python benchmarks/compile.py                        # all parts; takes ten minutes, most of them in inductor's compiler
    python benchmarks/compile.py --part calls           # one process, world size 1
    python benchmarks/compile.py --part compile step --backends aot_eager

calls: microseconds on 8x8 CPU tensors; one output for every five inputs. compile: a cold first step of a four-block transformer,
tensor parallel on two ranks, with empty caches. step: its later steps. Plain tensors stand for one rank that does all the work.
The candidates take turns and the least time of each counts; between ranks, the slowest rank's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import logging
import math
import operator
import os
import platform
import sys
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from overhead import OURS, PLAIN, STOCK, Bench, Candidate, Row, cpu_model, load_shardtensor, measure
from stock import first_line, import_shard_tensor
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

NAMES = [PLAIN, STOCK, OURS]
STYLES = {STOCK: "torch.distributed.tensor.parallel", OURS: "shardtensor.parallel"}
UNCOMPILED = "uncompiled"
INPUTS = [1, 10, 200]
GROUP = 5  # inputs for each output
BATCH, CONTEXT, VOCABULARY = 8, 32, 64
SIZES = {"width": 64, "heads": 4, "hidden": 256, "blocks": 4}  # all divide by two: DTensor cannot cut attention heads otherwise

Times = dict[str, float]


def own_copy(function: Any, name: str) -> Any:
    """The same function with its own code object. torch.compile stores graphs in the code object, and a call tries the guards of
    all graphs there, also those of other candidates."""
    return types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)


def quiet() -> None:
    """torch 2.15 warns about a function that torch itself calls for every backward graph."""
    logging.getLogger("torch._library.opaque_object").setLevel(logging.ERROR)


def progress(text: str = "") -> None:
    print(f"\r{text:<100}", end="" if text else "\r", file=sys.stderr, flush=True)


# ---- calls


def sums(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [functools.reduce(operator.add, tensors[i : i + GROUP]) * 2 for i in range(0, len(tensors), GROUP)]


def call(backend: str, inputs: int, backward: bool = False) -> Row:
    def make(c: Candidate) -> Bench:
        function = own_copy(sums, f"sums_{inputs}")
        if backend != UNCOMPILED:
            function = torch.compile(function, backend=backend, fullgraph=True)
        tensors = [c.randn(8, 8).requires_grad_(backward) for _ in range(inputs)]
        if not backward:
            return Bench(lambda: function(*tensors))
        grads = [c.randn(8, 8) for _ in range(0, inputs, GROUP)]

        def step() -> None:
            for t in tensors:
                t.grad = None
            torch.autograd.backward(function(*tensors), grads)

        return Bench(step)

    both = ", and backward" if backward else ""
    return Row(f"{backend}, {inputs} input{'s' * (inputs > 1)}{both}", make, grad=backward)


def time_calls(args: argparse.Namespace, report: Report) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, placement = init_device_mesh("cpu", (1,)), Replicate() if args.placement == "replicate" else Shard(0)

    def stock(t: torch.Tensor, placement: Placement) -> torch.Tensor:
        return DTensor.from_local(t, mesh, [placement])

    makers = {PLAIN: lambda t, placement: t, STOCK: stock, OURS: load_shardtensor(mesh)}
    candidates = [Candidate(name, make, placement) for name, make in makers.items()]
    report.header(f"microseconds a call, 8x8, {args.placement}")
    rows = [call(backend, n) for backend in (UNCOMPILED, *args.backends) for n in INPUTS]
    rows += [call(backend, 10, backward=True) for backend in (UNCOMPILED, *args.backends)]
    for row in rows:
        torch._dynamo.reset()
        progress(f"calls: {row.name}")
        times, errors = measure(row, candidates, args.repeats)
        report.line("calls", row.name, times, errors)
    dist.destroy_process_group()


# ---- compile, step


@dataclass(frozen=True)
class Training:
    forward_backward: Callable[[], Any]
    step: Callable[[], Any]


def tensor_parallel(model: torch.nn.Module, name: str, ranks: int) -> Any:
    """Cuts the model, and returns the context that the loss needs."""
    styles = importlib.import_module(STYLES[name])
    columns, rows = styles.ColwiseParallel, styles.RowwiseParallel
    plan = {
        "token": rows(input_layouts=Replicate()),
        **{f"blocks.*.attention.{part}": columns() for part in ("query", "key", "value")},
        "blocks.*.attention.out": rows(),
        "blocks.*.up": columns(),
        "blocks.*.down": rows(),
        "head": columns(output_layouts=Shard(-1), use_local_output=False),
    }
    styles.parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    return styles.loss_parallel


def training(name: str, backend: str, ranks: int) -> Training:
    language_model = importlib.import_module("train_transformer").LanguageModel
    # Each candidate has its own class, so that dynamo finds only this candidate's graph.
    own = type("LanguageModel", (language_model,), {"forward": own_copy(language_model.forward, "forward")})
    torch.manual_seed(0)
    model = own(VOCABULARY, CONTEXT, **SIZES)
    loss_context = contextlib.nullcontext if name == PLAIN else tensor_parallel(model, name, ranks)
    if backend != UNCOMPILED:
        model.compile(backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # DTensor refuses lists that mix it with plain parameters
    inputs, targets = (torch.randint(VOCABULARY, (BATCH, CONTEXT)) for _ in range(2))

    def forward_backward() -> torch.Tensor:
        optimizer.zero_grad()
        with loss_context():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        return loss

    def step() -> None:
        forward_backward()
        optimizer.step()

    return Training(forward_backward, step)


def slowest(call: Callable[[], Any]) -> float:
    """Seconds that the slowest rank took."""
    return slowest_by(call, time.perf_counter)[0]


def cpu_seconds() -> float:
    """Of this process and of the compilers that it has started and waited for."""
    return sum(os.times()[:4])


def slowest_by(call: Callable[[], Any], *clocks: Callable[[], float]) -> list[float]:
    """What the slowest rank took, by each clock."""
    dist.barrier()
    starts = [clock() for clock in clocks]
    call()
    taken = torch.tensor([clock() - start for clock, start in zip(clocks, starts, strict=True)], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.tolist()


def warm_up(backend: str) -> None:
    """What a process pays once: imports, and checks of the C++ compiler."""
    torch.compile(lambda x: (x.relu() + 1).sum(), backend=backend)(torch.ones(8, 8, requires_grad=True)).backward()


def time_compile(args: argparse.Namespace, ranks: int, report: Report) -> None:
    report.header("seconds of the first forward and backward, empty caches")
    torch._inductor.config.compile_threads = 1  # type: ignore[attr-defined]  # compilers that this process waits for
    for backend in args.backends:
        warm_up(backend)
        times: Times = {}
        of_cpu: Times = {}
        errors: dict[str, str] = {}
        for turn in range(args.compiles):
            for name in NAMES:
                if name in errors:
                    continue
                if report.shown:
                    progress(f"compile: {backend}, {name}, {turn + 1} of {args.compiles}")
                torch._dynamo.reset()
                with fresh_cache():
                    try:
                        taken, cpu = slowest_by(training(name, backend, ranks).forward_backward, time.perf_counter, cpu_seconds)
                    except Exception as error:  # an error here occurs on all ranks
                        errors[name] = first_line(error)
                        continue
                times[name] = min(times.get(name, math.inf), taken)
                of_cpu[name] = min(of_cpu.get(name, math.inf), cpu)
        report.line("compile", backend, times, errors)
        report.line("compile", f"{backend}, CPU seconds", of_cpu, errors)


def time_step(args: argparse.Namespace, ranks: int, report: Report) -> None:
    report.header("milliseconds of a training step")
    for backend in (UNCOMPILED, *args.backends):
        torch._dynamo.reset()
        losses: Times = {}
        running: dict[str, Training] = {}
        errors: dict[str, str] = {}
        for name in NAMES:
            if report.shown:
                progress(f"step: {backend}, compiling {name}")
            try:
                running[name] = training(name, backend, ranks)
                for _ in range(3):
                    losses[name] = running[name].forward_backward().item()
                    running[name].step()
            except Exception as error:
                errors[name] = first_line(error)
                running.pop(name, None)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for what in ("forward_backward", "step"):
            times: Times = {}
            for _ in range(args.steps):
                for name, made in running.items():
                    times[name] = min(times.get(name, math.inf), slowest(getattr(made, what)) * 1e3)
            report.line("step", f"{backend}, {what.replace('_', ' and ')}", times, errors)
        again = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
        if again and report.shown:
            print(f"  compiled anew while it was timed: {again} graphs")
        if report.shown and len({round(loss, 4) for loss in losses.values()}) > 1:
            print(f"  losses differ: {losses}")


def on_rank(rank: int, ranks: int, args: argparse.Namespace, store: str, results: str) -> None:
    torch.set_num_threads(1)
    quiet()
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    import_shard_tensor()
    report = Report(shown=rank == 0)
    if "compile" in args.part:
        time_compile(args, ranks, report)
    if "step" in args.part:
        time_step(args, ranks, report)
    if rank == 0:
        Path(results).write_text(json.dumps(report.rows))
    dist.destroy_process_group()


# ---- the report


class Report:
    def __init__(self, shown: bool = True) -> None:
        self.shown = shown
        self.rows: list[dict[str, Any]] = []

    def header(self, title: str) -> None:
        if self.shown:
            cells = [*NAMES, f"{OURS}/{STOCK}", "of their overheads", f"{OURS}/{PLAIN}"]
            print(f"\n{title:<48}" + "".join(f"{cell:>21}" for cell in cells), flush=True)

    def line(self, part: str, row: str, times: Times, errors: dict[str, str]) -> None:
        self.rows.append({"part": part, "row": row, "times": times, "errors": errors})
        if not self.shown:
            return
        plain, stock, ours = (times.get(name, math.nan) for name in NAMES)
        over = (ours - plain) / (stock - plain) if stock > plain else math.nan
        cells = [f"{t:.2f}" for t in (plain, stock, ours)] + [f"{ratio:.2f}x" for ratio in (ours / stock, over, ours / plain)]
        progress()
        print(f"{row:<48}" + "".join(f"{cell.replace('nanx', '-').replace('nan', '-'):>21}" for cell in cells), flush=True)
        for name, error in errors.items():
            print(f"  error: {name}: {error}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=["calls", "compile", "step"], default=["calls", "compile", "step"])
    parser.add_argument("--backends", nargs="+", default=["eager", "aot_eager", "inductor"])
    parser.add_argument("--placement", choices=["replicate", "shard0"], default="replicate", help="the placement of the calls' tensors")
    parser.add_argument("--repeats", type=int, default=7, help="repetitions of the calls")
    parser.add_argument("--compiles", type=int, default=2, help="how often each candidate compiles")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each candidate")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    quiet()
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cpu": cpu_model(), "cores": os.cpu_count()}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    report = Report()
    if "calls" in args.part:
        time_calls(args, report)
    rows = report.rows
    if {"compile", "step"} & set(args.part):
        with tempfile.TemporaryDirectory() as scratch:
            results = f"{scratch}/results"
            mp.spawn(on_rank, (args.ranks, args, f"{scratch}/store", results), nprocs=args.ranks)
            rows = rows + json.loads(Path(results).read_text())
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
