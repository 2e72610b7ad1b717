"""The cost of a distributed tensor beyond a plain one, in microseconds: stock DTensor, shardtensor and PhysicsNeMo's ShardTensor.

One process, world size 1, one thread, 8x8 CPU tensors: what is left is the cost of the dispatch. Under torchrun, as many ranks as it
starts, and rank 0's times. With --beside, another installation's shardtensor in a second process, which takes turns with this one.
See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat, takewhile
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from stock import first_line, import_physicsnemo, import_shard_tensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

PLAIN, STOCK, OURS, NEMO = "plain", "DTensor", "shardtensor", "PhysicsNeMo"
BARE = "bare subclass"  # does nothing: measures what torch's Python bindings cost for any subclass
BESIDE = "beside"  # another installation's shardtensor, in a process of its own
BURST = 2e-3  # seconds of one repetition; a longer call is a repetition by itself
FRESH = 25  # calls in a repetition if each call needs its own tensor
ONCE = ["add", "mul_number", "mm", "view", "sum", "softmax", "detach", "cat"]

FromLocal = Callable[[torch.Tensor, Placement], torch.Tensor]


@dataclass(frozen=True)
class Candidate:
    name: str
    from_local: FromLocal
    placement: Placement

    def randn(self, *sizes: int, placement: Placement | None = None) -> torch.Tensor:
        return self.from_local(torch.randn(*sizes), placement or self.placement)

    def weight(self, *sizes: int) -> torch.Tensor:
        return self.randn(*sizes, placement=Replicate())


@dataclass(frozen=True)
class Bench:
    step: Callable[[], Any]
    prepare: Callable[[], None] | None = None  # runs before each repetition of FRESH steps; not timed


@dataclass(frozen=True)
class Row:
    name: str
    make: Callable[[Candidate], Bench]
    grad: bool = False


# ---- the candidates


class Bare(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def detach(self) -> torch.Tensor:  # nn.Parameter needs a result of the same class
        return super().detach().as_subclass(Bare)


def load_shardtensor(mesh: DeviceMesh) -> FromLocal:
    cls = import_shard_tensor()
    return lambda t, placement: cls.from_local(t, mesh, [placement])


def load_candidates(mesh: DeviceMesh, placement: Placement) -> list[Candidate]:
    loaded: dict[str, FromLocal] = {
        PLAIN: lambda t, placement: t,
        STOCK: lambda t, placement: DTensor.from_local(t, mesh, [placement]),
        OURS: load_shardtensor(mesh),
        BARE: lambda t, placement: t.as_subclass(Bare),
    }
    nemo, why_not = import_physicsnemo()
    if nemo:
        loaded[NEMO] = lambda t, placement: nemo.from_local(t, mesh, [placement])
    else:
        print(f"{NEMO}: {why_not}")
    return [Candidate(name, from_local, placement) for name, from_local in loaded.items()]


def load_two(mesh: DeviceMesh, placement: Placement) -> list[Candidate]:
    """A plain tensor and shardtensor."""
    return [Candidate(PLAIN, lambda t, placement: t, placement), Candidate(OURS, load_shardtensor(mesh), placement)]


# ---- the rows


def op(name: str, call: Callable[..., Any], *operands: Callable[[Candidate], torch.Tensor]) -> Row:
    """One op on warm operands: x, and the given ones."""

    def make(c: Candidate) -> Bench:
        x = c.randn(8, 8)
        rest = [operand(c) for operand in operands]
        return Bench(lambda: call(x, *rest))

    return Row(name, make)


def like(c: Candidate) -> torch.Tensor:
    return c.randn(8, 8)


def matrix(c: Candidate) -> torch.Tensor:
    return c.weight(8, 8)


def vector(c: Candidate) -> torch.Tensor:
    return c.weight(8)


def new_shape(c: Candidate) -> Bench:
    sizes = iter(range(1000, 10**9))
    ready: list[torch.Tensor] = []

    def prepare() -> None:
        ready[:] = reversed([c.randn(next(sizes), 3) for _ in range(FRESH)])

    def step() -> None:
        x = ready.pop()
        x + x

    return Bench(step, prepare)


def forward_backward(c: Candidate) -> Bench:
    x, w = c.randn(8, 8).requires_grad_(), c.randn(8, 8).requires_grad_()
    grad = torch.ones_like(c.randn(8, 8).sum(1))

    def step() -> None:
        x.grad = w.grad = None
        (x * w).sum(1).backward(grad)  # type: ignore[no-untyped-call]

    return Bench(step)


class Block(nn.Module):
    def __init__(self, d: int = 32, heads: int = 4, hidden: int = 64, sdpa: bool = False) -> None:
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, d = x.shape
        q, k, v = (f(x).view(batch, seq, self.heads, d // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * (d // self.heads) ** -0.5, -1), v)
        return self.out(y.transpose(1, 2).reshape(batch, seq, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def spread(module: nn.Module, c: Candidate) -> nn.Module:
    module = copy.deepcopy(module)
    for part in module.modules():
        for key, parameter in list(part._parameters.items()):
            if parameter is not None:
                part.register_parameter(key, nn.Parameter(c.from_local(parameter.detach(), Replicate())))
    return module


def transformer(sdpa: bool) -> Callable[[Candidate], Bench]:
    def make(c: Candidate) -> Bench:
        torch.manual_seed(0)
        model = spread(nn.Sequential(*(Block(sdpa=sdpa) for _ in range(4)), nn.LayerNorm(32), nn.Linear(32, 10)), c)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        x, y = c.weight(4, 16, 32), c.from_local(torch.randint(10, (64,)), Replicate())

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x).view(64, 10), y).backward()
            optimizer.step()

        return Bench(step)

    return make


def parameters(c: Candidate) -> list[nn.Parameter]:
    made = [nn.Parameter(c.randn(8, 8)) for _ in range(100)]
    for parameter in made:
        parameter.grad = c.randn(8, 8)
    return made


def adamw(**how: Any) -> Callable[[Candidate], Bench]:
    return lambda c: Bench(torch.optim.AdamW(parameters(c), lr=1e-3, **how).step)


def clip(c: Candidate) -> Bench:
    held = parameters(c)
    return Bench(lambda: nn.utils.clip_grad_norm_(held, 1.0))


def from_local(c: Candidate) -> Bench:
    x = torch.randn(8, 8)
    return Bench(lambda: c.from_local(x, c.placement))


def redistribute(c: Candidate) -> Bench:
    x: Any = c.randn(8, 8, placement=Shard(0))
    return Bench((lambda: x) if c.name in (PLAIN, BARE) else (lambda: x.redistribute(placements=[Replicate()])))


ROWS = [
    op("add", lambda x, y: x + y, like),
    op("mul_number", lambda x: x * 2.0),
    op("mm", lambda x, w: x.mm(w), matrix),
    op("view", lambda x: x.view(4, 2, 8)),
    op("transpose", lambda x: x.transpose(0, 1)),
    op("sum", lambda x: x.sum(1)),
    op("softmax", lambda x: x.softmax(-1)),
    op("linear", F.linear, matrix, vector),
    op("layer_norm", lambda x, w, b: F.layer_norm(x, (8,), w, b), vector, vector),
    op("detach", lambda x: x.detach()),
    op("cat", lambda x, y: torch.cat((x, y), 1), like),
    op("torch.add", torch.add, like),
    op("torch.mm", torch.mm, matrix),
    op("torch.sum", lambda x: torch.sum(x, 1)),
    op("add_", lambda x, y: x.add_(y), like),
    op("mul_out", lambda x, y, out: torch.mul(x, y, out=out), like, like),
    op("mm_out", lambda x, y, out: torch.mm(x, y, out=out), like, like),
    Row("new_shape", new_shape),
    Row("forward_backward", forward_backward, grad=True),
    Row("transformer", transformer(sdpa=False), grad=True),
    Row("transformer_sdpa", transformer(sdpa=True), grad=True),
    Row("adamw_loop", adamw(foreach=False)),
    Row("adamw_foreach", adamw(foreach=True)),
    Row("adamw_fused", adamw(fused=True)),
    Row("clip_grad_norm", clip),
    Row("from_local", from_local),
    Row("redistribute", redistribute),
]


# ---- the measuring


def burst(bench: Bench, number: int) -> float:
    """Seconds per call, over one repetition."""
    if bench.prepare is not None:
        bench.prepare()
    step = bench.step
    gc.disable()
    start = time.perf_counter()
    for _ in repeat(None, number):
        step()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds / number


def slowest(seconds: float) -> float:
    """The greatest value of all ranks, so that all of them decide alike."""
    if dist.get_world_size() > 1:
        most = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.item()
    return seconds


def calibrate(bench: Bench) -> int:
    """Warms up. Returns the number of calls in a repetition."""
    if bench.prepare is not None:
        burst(bench, FRESH)
        return FRESH
    for number in (2, 2, 20):
        each = slowest(burst(bench, number))
        if each > BURST:
            return 1
    return max(1, round(BURST / each))


def measure(row: Row, candidates: list[Candidate], repeats: int, beside: Beside | None = None) -> tuple[dict[str, float], dict[str, str]]:
    """The least microseconds per call of each candidate, taking turns; and the errors of those that raised."""
    running: dict[str, Callable[[], float]] = {}  # seconds per call, over one repetition
    best: dict[str, float] = {}
    errors: dict[str, str] = {}

    def attempt(name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            gc.enable()
            errors[name] = str(error) if isinstance(error, OtherFailed) else first_line(error)
            running.pop(name, None)
            best.pop(name, None)

    def begin(c: Candidate) -> None:
        bench = row.make(c)
        number = calibrate(bench)
        running[c.name] = lambda: burst(bench, number)

    def begin_beside(other: Beside) -> None:
        other.ask(row.name)
        running[BESIDE] = lambda: other.ask("turn")

    def turn(name: str) -> None:
        best[name] = min(best.get(name, math.inf), running[name]() * 1e6)

    with torch.set_grad_enabled(row.grad):
        for c in candidates:
            attempt(c.name, lambda c=c: begin(c))  # type: ignore[misc]
        if beside is not None:
            attempt(BESIDE, lambda: begin_beside(beside))
        for _ in range(repeats):
            for name in list(running):
                attempt(name, lambda name=name: turn(name))  # type: ignore[misc]
    gc.collect()
    return best, errors


# ---- another installation, by turns


class OtherFailed(RuntimeError):
    """An error of the other process, in one line."""


class Beside:
    """A process of another Python that runs this file with --answer: its own shardtensor, the same rows.

    It reads one word per line: a row's name, to begin the row, or "turn", to repeat it once. It answers each by a line of JSON.
    """

    def __init__(self, python: str, placement: str) -> None:
        words = shlex.split(python)
        given = dict(word.split("=", 1) for word in takewhile(lambda word: "=" in word, words))
        ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it would find this installation
        command = [*words[len(given) :], __file__, "--answer", "--placement", placement]
        self._process = subprocess.Popen(command, env=ours | given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions: dict[str, str] = self._answer()

    def ask(self, word: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise OtherFailed(f"the Python of --beside has ended with {self._process.wait()}")
        said = json.loads(text)
        if "error" in said:
            raise OtherFailed(said["error"])
        return said["value"]

    def close(self) -> None:
        self._process.communicate()


def answer(candidate: Candidate, out: TextIO) -> None:
    """The other end of Beside."""
    running: tuple[Bench, int] | None = None
    rows = {row.name: row for row in ROWS}

    def reply(word: str) -> Any:
        nonlocal running
        if word != "turn":
            torch.set_grad_enabled(rows[word].grad)
            running = None  # frees the row before
            gc.collect()
            bench = rows[word].make(candidate)
            running = bench, calibrate(bench)
            return None
        assert running is not None
        return burst(*running)

    tell(out, value=versions())
    for line in sys.stdin:
        try:
            tell(out, value=reply(line.strip()))
        except Exception as error:
            tell(out, error=first_line(error))


def tell(out: TextIO, **said: Any) -> None:
    print(json.dumps(said), file=out, flush=True)


# ---- the report

Costs = dict[str, float]  # microseconds by candidate


def over(costs: Costs, name: str) -> float:
    """nan if one of the two is missing."""
    return costs.get(name, math.nan) - costs.get(PLAIN, math.nan)


def ratio(costs: Costs) -> float:
    """DTensor's overhead divided by shardtensor's; nan if one is missing."""
    stock, ours = over(costs, STOCK), over(costs, OURS)
    if math.isnan(stock) or math.isnan(ours) or stock <= 0:
        return math.nan
    return stock / ours if ours > 0 else math.inf


def number(value: float, suffix: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:.2f}{suffix}"


def columns(names: list[str]) -> dict[str, Callable[[Costs], str]]:
    """The columns after those of the candidates' times, by their titles."""
    table: dict[str, Callable[[Costs], str]] = {}
    for name in names[1:]:
        table[f"{name}-plain"] = lambda costs, name=name: number(over(costs, name))  # type: ignore[misc]
    if BESIDE in names:
        table["difference"] = lambda costs: number(costs.get(OURS, math.nan) - costs.get(BESIDE, math.nan))
    else:
        table["overheads"] = lambda costs: number(ratio(costs), "x")
    table["ours/plain"] = lambda costs: number(costs.get(OURS, math.nan) / costs.get(PLAIN, math.nan), "x")
    return table


def header(names: list[str]) -> str:
    return f"{'microseconds':17s}" + "".join(f"{title:>20s}" for title in (*names, *columns(names)))


def line(row: str, names: list[str], costs: Costs, errors: dict[str, str]) -> str:
    cells = ["error" if name in errors else number(costs[name]) for name in names]
    cells += [cell(costs) for cell in columns(names).values()]
    return f"{row:17s}" + "".join(f"{cell:>20s}" for cell in cells)


def targets(table: dict[str, dict[str, float]], ratios: dict[str, float]) -> Iterator[tuple[str, float, bool]]:
    """Each target, the measured value, and whether it is met. Skips targets whose rows were not measured."""
    for row in ONCE:
        yield f"{row}: at most 0.8 us over plain", (us := over(table.get(row, {}), OURS)), us <= 0.8
    yield "new_shape: at most 3 us over plain", (us := over(table.get("new_shape", {}), OURS)), us <= 3
    for row, most in (("transformer", 1.35), ("transformer_sdpa", 1.35), ("adamw_foreach", 1.15)):
        costs = table.get(row, {})
        times = costs.get(OURS, math.nan) / costs.get(PLAIN, math.nan)
        yield f"{row}: at most {most}x plain", times, times <= most
    if ratios:
        yield "median row: DTensor's overhead at least 8x ours", (x := statistics.median(ratios.values())), x >= 8
        yield f"worst row, {min(ratios, key=ratios.__getitem__)}: DTensor's overhead at least 5x ours", (x := min(ratios.values())), x >= 5


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")), platform.processor())


def versions() -> dict[str, str]:
    return {
        "shardtensor": importlib.import_module("shardtensor").__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], help="the rows to measure; default: all")
    parser.add_argument("--placement", choices=["replicate", "shard0"], default="replicate")
    parser.add_argument("--repeats", type=int, default=40, help="repetitions of each candidate; the least counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    parser.add_argument(
        "--beside",
        metavar="PYTHON",
        help="an interpreter, after variables for it if need be ('PYTHONPATH=/elsewhere/python python'): the shardtensor that it "
        "imports runs the same rows by turns",
    )
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.repeats < 1:
        parser.error("argument --repeats: must be at least 1")
    if parsed.beside is not None and "WORLD_SIZE" in os.environ:
        parser.error("argument --beside: only in one process, without torchrun")
    return parsed


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    placement = Replicate() if args.placement == "replicate" else Shard(0)
    if args.answer:
        out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    if "WORLD_SIZE" in os.environ and not args.answer:
        dist.init_process_group("gloo")
        if dist.get_rank():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if args.answer:
        answer(load_two(mesh, placement)[1], out)
        return
    candidates = load_candidates(mesh, placement) if args.beside is None else load_two(mesh, placement)
    names = [c.name for c in candidates]
    machine = versions() | {"cpu": cpu_model(), "placement": args.placement, "ranks": str(dist.get_world_size())}
    beside = None
    if args.beside is not None:
        beside = Beside(args.beside, args.placement)
        names.append(BESIDE)
        machine |= {f"{BESIDE}: {key}": value for key, value in beside.versions.items()}
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    table: dict[str, Costs] = {}
    failed: dict[str, dict[str, str]] = {}
    print("\n" + header(names))
    for row in ROWS:
        if args.rows is None or row.name in args.rows:
            table[row.name], failed[row.name] = measure(row, candidates, args.repeats, beside)
            print(line(row.name, names, table[row.name], failed[row.name]), flush=True)
    if beside is not None:
        beside.close()
    for name, errors in failed.items():
        for candidate, error in errors.items():
            print(f"error: {name}, {candidate}: {error}")
    ratios = {name: r for name, costs in table.items() if not math.isnan(r := ratio(costs))}
    if ratios:
        middle, worst = statistics.median(ratios.values()), min(ratios.values())
        print(f"\noverheads, DTensor / shardtensor: median {middle:.1f}x, worst {worst:.1f}x, {len(ratios)} rows")
    judged = [(text, value, met) for text, value, met in targets(table, ratios) if not math.isnan(value)]
    for text, value, met in judged:
        print(f"{'met' if met else 'NOT MET':8s} {text}: {value:.2f}")
    if args.json is not None and dist.get_rank() == 0:
        result = {"machine": machine, "microseconds": table, "errors": failed, "targets": [*map(list, judged)]}
        args.json.write_text(json.dumps(result, indent=1).replace("Infinity", "null") + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
