"""A transformer's training step with collectives by hand, with torch's DTensor and with shardtensor, side by side.

    python benchmarks/training.py --table                                 # all rows, on two and four ranks; ten minutes
    python benchmarks/training.py --d 256 --ranks 2 --how tensor --pieces uneven

The step: blocks of a transformer, a mean square error, backward, AdamW. tensor: attention heads and hidden features are cut.
sequence: also the sequence, between the linear layers. fsdp: the batch and all parameters. both: tensor inside pairs of ranks, fsdp
across. Uneven: the ranks divide neither the heads, nor the hidden features, nor the sequence.

The candidates take turns. Times are of the slowest rank, medians over the turns; the ratios to `by hand` are medians of the ratios
within a turn, so other work on the machine disturbs them less. Host: CPU time of the thread that runs the step. Calls: collectives
that a rank starts in a step. KiB sent: what the ranks write to their sockets, on average (Linux). Peak: memory of tensors at its
highest during a step, over what was held before.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler says on stderr that it starts and stops

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from by_hand import FlatShards, sequence_parallel, sum_gradients, tensor_parallel, whole_parameters
from overhead import OURS, STOCK, cpu_model
from stock import first_line, import_shard_tensor, making
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

HAND = "by hand"
NAMES = [HAND, STOCK, OURS]
HOW = ["tensor", "sequence", "fsdp", "both"]
BATCH, BLOCKS = 4, 1
WARM_UP = 3  # steps: the first ones fill caches and make the optimizer's state
FEWEST, MOST = 5, 400  # turns


@dataclass(frozen=True)
class Sizes:
    """Of the model. The ranks divide all of them, or none but `d` and the batch."""

    d: int
    uneven: bool

    @property
    def head(self) -> int:
        return max(8, self.d // 8)

    @property
    def heads(self) -> int:
        return 7 if self.uneven else 8

    @property
    def hidden(self) -> int:
        return 4 * self.d + self.uneven

    @property
    def sequence(self) -> int:
        return 32 + self.uneven


# ---- the model, and how it is cut


class Attention(nn.Module):
    """Uses as many heads as this rank's features hold."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.head = s.head
        self.q, self.k, self.v = (nn.Linear(s.d, s.heads * s.head) for _ in range(3))
        self.out = nn.Linear(s.heads * s.head, s.d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [sequence, batch, d]
        q, k, v = (f(x).unflatten(-1, (-1, self.head)).permute(1, 2, 0, 3) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.permute(2, 0, 1, 3).flatten(2))


class MLP(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(s.d, s.hidden), nn.Linear(s.hidden, s.d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(s.d), nn.LayerNorm(s.d)
        self.attention, self.mlp = Attention(s), MLP(s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, s: Sizes, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(s) for _ in range(blocks))
        self.norm = nn.LayerNorm(s.d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def plan(styles: Any, sequence: bool, whole_heads: dict[str, Any]) -> dict[str, Any]:
    """The usual plan, of torch's styles or of shardtensor's, which also cut between heads if these do not divide."""
    columns, rows = styles.ColwiseParallel, styles.RowwiseParallel
    linears = {f"blocks.*.attention.{name}": columns(**whole_heads) for name in "qkv"}
    if not sequence:
        return {
            **linears,
            "blocks.*.attention.out": rows(**whole_heads),
            "blocks.*.mlp.up": columns(),
            "blocks.*.mlp.down": rows(),
        }
    parts = {"output_layouts": Shard(0), "use_local_output": False}
    gathered = styles.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    return {
        **linears,
        "blocks.*.norm1": styles.SequenceParallel(sequence_dim=0),
        "blocks.*.attention": gathered,
        "blocks.*.attention.out": rows(**whole_heads, **parts),
        "blocks.*.norm2": styles.SequenceParallel(sequence_dim=0),
        "blocks.*.mlp": gathered,
        "blocks.*.mlp.up": columns(),
        "blocks.*.mlp.down": rows(**parts),
        "norm": styles.SequenceParallel(sequence_dim=0, use_local_output=True),
    }


# ---- the candidates


@dataclass
class Training:
    """A candidate's model. step() returns this rank's part of the loss."""

    model: nn.Module
    inputs: Any
    targets: torch.Tensor
    elements: int  # that the loss is a mean of
    optimizer: torch.optim.Optimizer
    before_step: Callable[[], None] = lambda: None
    context: Callable[[], Any] = contextlib.nullcontext

    def step(self) -> torch.Tensor:
        with self.context():
            self.optimizer.zero_grad()
            loss = (self.model(self.inputs) - self.targets).square().sum() / self.elements
            loss.backward()
            self.before_step()
            self.optimizer.step()
        return loss


@dataclass(frozen=True)
class Row:
    sizes: Sizes
    ranks: int
    how: str

    @property
    def name(self) -> str:
        return f"{self.how}, {self.ranks} ranks, d = {self.sizes.d}, {'uneven' if self.sizes.uneven else 'even'}"


def by_mesh(parameters: Any) -> list[dict[str, Any]]:
    """Parameter groups: DTensor refuses lists that mix it with plain tensors, or meshes."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for p in parameters:
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return [{"params": group} for group in groups.values()]


def training(name: str, row: Row, blocks: int) -> Training:
    """The candidate `name`, with the same values as the others."""
    s, rank = row.sizes, dist.get_rank()
    torch.manual_seed(0)
    model = Model(s, blocks)
    x, y = torch.randn(2, s.sequence, BATCH, s.d)
    data, tensor = meshes(row)
    if data is not None:  # each rank of the mesh has its part of the batch
        x, y = (t.chunk(data.size(), 1)[data.get_local_rank()].contiguous() for t in (x, y))
    elements = x.numel()
    sequence = row.how == "sequence"
    if sequence:
        y = y.chunk(row.ranks)[rank]

    if name == HAND:
        before_step: Callable[[], None] = lambda: None  # noqa: E731
        parameters: Any = model.parameters()
        if tensor is not None:
            tensor_parallel(model, tensor.get_group(), s.head)
        if sequence:
            group = dist.group.WORLD
            x = sequence_parallel(model, group, x)
            whole = [p for m in model.modules() for p in whole_parameters(m)]
            before_step = lambda: sum_gradients(whole, group)  # noqa: E731
        if data is not None:
            parameters = [FlatShards(m, data.get_group()).shard for m in (*model.blocks, model.norm)]
        return Training(model, x, y, elements, torch.optim.AdamW(parameters, lr=1e-3, foreach=True), before_step)

    context: Callable[[], Any] = contextlib.nullcontext
    if name == OURS and data is not None:
        context = partial(making, import_shard_tensor())
    with context():
        if tensor is not None:
            library = "shardtensor.parallel" if name == OURS else "torch.distributed.tensor.parallel"
            styles = importlib.import_module(library)
            whole_heads = {"multiple_of": s.head} if name == OURS else {}
            styles.parallelize_module(model, tensor, plan(styles, sequence, whole_heads))
        if sequence:
            tensors = importlib.import_module("shardtensor" if name == OURS else "torch.distributed.tensor")
            x = tensors.distribute_tensor(x, tensor, [Shard(0)], src_data_rank=None)
        if data is not None:
            from torch.distributed.fsdp import fully_shard

            for module in (*model.blocks, model):
                fully_shard(module, mesh=data, reshard_after_forward=False)
        groups = by_mesh(model.parameters()) if name == STOCK else model.parameters()
        optimizer = torch.optim.AdamW(groups, lr=1e-3, foreach=True)
    return Training(model, x, y, elements, optimizer, context=context)


_meshes: dict[str, DeviceMesh] = {}


def meshes(row: Row) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The meshes of the batch and of the tensors."""
    if row.how == "both":
        mesh = _meshes.setdefault(row.how, _meshes.get(row.how) or init_device_mesh("cpu", (row.ranks // 2, 2), mesh_dim_names=("data", "tensor")))
        return mesh["data"], mesh["tensor"]
    mesh = _meshes.setdefault("one", _meshes.get("one") or init_device_mesh("cpu", (row.ranks,)))
    return (mesh, None) if row.how == "fsdp" else (None, mesh)


# ---- the measuring


@dataclass
class Costs:
    ms: float
    host_ms: float
    calls: float
    kib: float
    peak_kib: float
    ratio: float = 1.0  # to by hand, of the times
    host_ratio: float = 1.0


class Calls(TorchDispatchMode):
    """Counts collectives: those that go through torch's dispatcher, and shardtensor's own."""

    _LIBRARIES = ("c10d", "_c10d_functional", "_dtensor")
    _NONE = ("wait_tensor", "barrier")

    def __enter__(self) -> Calls:
        self.calls = 0
        self._extension = importlib.import_module("shardtensor")._C
        self._extension.reset_comm_counts()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.calls += sum(calls for calls, _ in self._extension.comm_counts().values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, _, name = func._schema.name.partition("::")
        if library in self._LIBRARIES and name not in self._NONE and not self._extension.is_calling():
            self.calls += 1
        return func(*args, **(kwargs or {}))


def written() -> float:
    """Bytes that this process has written, to sockets and files."""
    try:
        return float(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])
    except (OSError, IndexError):
        return float("nan")


def over_ranks(value: float, how: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> float:
    t = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(t, how)
    return t.item()


def traffic(made: Training) -> tuple[float, float, float]:
    """Of a step: calls, KiB sent and the peak of the memory."""
    calls = Calls()
    with calls:
        made.step()
    steps = 2  # Gloo's threads send the last bytes of one step during the next
    dist.barrier()
    before = written()
    for _ in range(steps):
        made.step()
    sent = (written() - before) / steps / 1024
    return over_ranks(calls.calls), over_ranks(sent, dist.ReduceOp.SUM) / dist.get_world_size(), over_ranks(peak_of(made.step)) / 1024


def peak_of(step: Callable[[], Any]) -> float:
    """How many bytes of CPU memory tensors hold at most during the step, over those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


def measure(row: Row, args: argparse.Namespace, tell: Callable[[str], None]) -> tuple[dict[str, Costs], dict[str, str]]:
    running: dict[str, Training] = {}
    errors: dict[str, str] = {}
    losses: dict[str, float] = {}
    each = 0.0
    for name in NAMES:
        tell(f"{row.name}: {name}")
        try:
            running[name] = training(name, row, args.blocks)
            for _ in range(WARM_UP):
                start = time.perf_counter()
                loss = running[name].step()
                last = time.perf_counter() - start
        except Exception as error:  # an error here occurs on all ranks
            errors[name] = first_line(error)
            running.pop(name, None)
            continue
        each += over_ranks(last)
        losses[name] = over_ranks(float(loss.detach()), dist.ReduceOp.SUM)
    if max(losses.values()) - min(losses.values()) > 1e-3 * max(losses.values()):
        raise RuntimeError(f"{row.name}: the candidates' losses differ: {losses}")
    costs = {name: Costs(0, 0, *traffic(made)) for name, made in running.items()}
    times: dict[str, list[float]] = {name: [] for name in running}
    host: dict[str, list[float]] = {name: [] for name in running}
    names, turns = list(running), max(FEWEST, min(MOST, round(args.seconds / each)))
    for turn in range(turns):
        if turn % max(1, turns // 20) == 0:
            tell(f"{row.name}: turn {turn} of {turns}")
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            made = running[name]
            dist.barrier()
            cpu, start = time.thread_time(), time.perf_counter()
            made.step()
            took, busy = time.perf_counter() - start, time.thread_time() - cpu
            times[name].append(over_ranks(took) * 1e3)
            host[name].append(over_ranks(busy) * 1e3)
    for name, c in costs.items():
        c.ms, c.host_ms = statistics.median(times[name]), statistics.median(host[name])
        c.ratio = statistics.median(a / b for a, b in zip(times[name], times[HAND], strict=True))
        c.host_ratio = statistics.median(a / b for a, b in zip(host[name], host[HAND], strict=True))
    return costs, errors


# ---- the report

COLUMNS = ["ms", "by hand", "host ms", "by hand", "calls", "KiB sent", "peak KiB"]


def header() -> str:
    return f"{'':14}" + "".join(f"{c:>10}" for c in COLUMNS)


def line(name: str, c: Costs) -> str:
    cells = [f"{c.ms:.2f}", f"{c.ratio:.2f}x", f"{c.host_ms:.2f}", f"{c.host_ratio:.2f}x", f"{c.calls:.0f}", f"{c.kib:.1f}", f"{c.peak_kib:.0f}"]
    return f"  {name:12}" + "".join(f"{cell:>10}" for cell in cells)


def table(results: list[dict[str, Any]]) -> str:
    """In Markdown, one line for each row. Times of DTensor and shardtensor are multiples of those by hand."""
    short = {HAND: "by hand", STOCK: "DTensor", OURS: "shardtensor"}
    others = [short[STOCK], short[OURS]]
    head = ["cut", "by hand, ms", *others, "host by hand, ms", *others]
    head += [f"{what} ({', '.join(short.values())})" for what in ("calls", "KiB sent", "peak KiB")]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for result in results:
        costs = result["costs"]

        def of(name: str, key: str, form: str, costs: dict[str, Any] = costs) -> str:
            return format(costs[name][key], form) + ("x" if "ratio" in key else "") if name in costs else "raises"

        cells = [result["row"]]
        for ms, ratio in (("ms", "ratio"), ("host_ms", "host_ratio")):
            cells += [of(HAND, ms, ".2f"), of(STOCK, ratio, ".2f"), of(OURS, ratio, ".2f")]
        cells += [", ".join(of(name, key, ".0f") if name in costs else "-" for name in NAMES) for key in ("calls", "kib", "peak_kib")]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


class Bar:
    """On one line of the terminal: how many rows are done, and what runs now."""

    def __init__(self, rows: int, shown: bool) -> None:
        self.rows, self.done, self.shown = rows, 0, shown and sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self.shown:
            full = 20 * self.done // self.rows
            print(f"\r[{'#' * full}{'.' * (20 - full)}] {self.done} of {self.rows}  {text:<70}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            print(f"\r{'':<110}\r", end="", file=sys.stderr, flush=True)


def on_rank(rank: int, rows: list[Row], args: argparse.Namespace, store: str, results: str, done: int, total: int, began: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=rows[0].ranks, timeout=timedelta(seconds=120))
    import_shard_tensor()
    bar, out = Bar(total, rank == 0), []
    for i, row in enumerate(rows):
        bar.done = done + i
        costs, errors = measure(row, args, bar)
        gc.collect()
        out.append({"row": row.name, "costs": {name: asdict(c) for name, c in costs.items()}, "errors": errors})
        if rank == 0:
            bar.clear()
            print(f"\n{row.name}  ({bar.done + 1} of {total}, {time.time() - began:.0f} s)\n{header()}")
            for name in NAMES:
                print(line(name, costs[name]) if name in costs else f"  {name:12}raises {errors[name]:.120}", flush=True)
    if rank == 0:
        Path(results).write_text(json.dumps(out))
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, nargs="+", default=[64, 256, 512, 1024], help="the width of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--how", nargs="+", choices=HOW, default=HOW)
    parser.add_argument("--pieces", nargs="+", choices=["even", "uneven"], default=["even", "uneven"])
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--seconds", type=float, default=3.0, help=f"for the turns of a row; {FEWEST} to {MOST} turns")
    parser.add_argument("--table", action="store_true", help="print all rows once more at the end, as a table in Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    return parser.parse_args()


def main() -> None:
    args, began = arguments(), time.time()
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cpu": cpu_model(), "cores": os.cpu_count()}
    print(", ".join(f"{key} {value}" for key, value in machine.items()) + f", load {os.getloadavg()[0]:.1f}")
    runs = [
        [Row(Sizes(d, pieces == "uneven"), ranks, how) for how in args.how for d in args.d for pieces in args.pieces if how != "both" or ranks % 4 == 0]
        for ranks in args.ranks
    ]
    done, total, results = 0, sum(map(len, runs)), []
    for rows in filter(None, runs):
        with tempfile.TemporaryDirectory() as scratch:
            path = f"{scratch}/results"
            mp.spawn(on_rank, (rows, args, f"{scratch}/store", path, done, total, began), nprocs=rows[0].ranks)
            results += json.loads(Path(path).read_text())
        done += len(rows)
    if args.table:
        print(f"\n{table(results)}")
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
