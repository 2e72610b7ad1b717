"""Trains a small character-level language model on harbour.txt, tensor parallel and data parallel.

    torchrun --nproc-per-node 2 examples/train_transformer.py
    torchrun --nproc-per-node 2 examples/train_transformer.py --compile
    python examples/train_transformer.py          # the same model and the same losses on one process, without shardtensor

No size divides by the ranks: 5 heads, 101 hidden units, 43 characters, batches of 7. Four ranks are a mesh of 2 x 2, other
numbers of 1 x n. Gloo on the CPU, NCCL where every rank has a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

TEXT = Path(__file__).with_name("harbour.txt")
NEXT = """next: the same losses on other ranks (--nproc-per-node 3), compiled (--compile), or with torch's parallel styles
(examples/tensor_parallel.py); then the tour in README.md"""


# ---- the model: plain torch ----


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.register_buffer("future", torch.ones(context, context, dtype=torch.bool).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def split(t: torch.Tensor) -> torch.Tensor:
            return t.unflatten(-1, (-1, self.head_size)).transpose(1, 2)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = query @ key.transpose(-2, -1) * self.head_size**-0.5
        weights = scores.masked_fill(self.future, float("-inf")).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, context: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, context)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int = 40, heads: int = 5, hidden: int = 101, blocks: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, context) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ---- its pieces ----


def make_mesh(device: str):
    from shardtensor import init_device_mesh

    ranks = dist.get_world_size()
    data = 2 if ranks % 2 == 0 and ranks > 2 else 1
    return init_device_mesh(device, (data, ranks // data), mesh_dim_names=("data", "tensor"))


def partition(heads: int) -> Callable[[str, nn.Module, object], None]:
    """distribute_module calls this for each submodule: it cuts some of its parameters along the mesh dim "tensor".

    What it leaves alone is replicated.
    """
    import shardtensor as st

    def cut(module: nn.Module, name: str, dim: int, mesh, units: int | None = None) -> None:
        """Cuts a parameter; between whole units (heads) if the dim consists of units."""
        whole = getattr(module, name)
        shapes = None
        if units is not None:
            ranks, unit = mesh.size(1), whole.shape[dim] // units
            counts = [len(range(r, units, ranks)) for r in range(ranks)]  # 5 heads on 3 ranks: 2, 2, 1
            shapes = {1: [(*whole.shape[:dim], n * unit, *whole.shape[dim + 1 :]) for n in counts]}
        placements = [st.Replicate(), st.Shard(dim)]
        piece = st.distribute_tensor(whole.data, mesh, placements, sharding_shapes=shapes, src_data_rank=None)
        setattr(module, name, nn.Parameter(piece))

    def summed(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, at once: its gradient is then whole too. Without this, each op decides for itself."""
        return output.redistribute(placements=[output.placements[0], st.Replicate()])

    def apply(name: str, module: nn.Module, mesh) -> None:
        last = name.rpartition(".")[2]
        if last in ("query", "key", "value"):
            cut(module, "weight", 0, mesh, heads)
            cut(module, "bias", 0, mesh, heads)
        elif last in ("out", "down"):
            cut(module, "weight", 1, mesh, heads if last == "out" else None)
            module.register_forward_hook(summed)
        elif last in ("up", "head"):
            cut(module, "weight", 0, mesh)
            cut(module, "bias", 0, mesh)
        elif last == "token":
            cut(module, "weight", 0, mesh)
            module.register_forward_hook(summed)

    return apply


# ---- training ----

HEADS = 5


def build(context: int, dtype: torch.dtype = torch.float32, backend: str | None = None) -> tuple[LanguageModel, torch.Tensor]:
    """The model, with the same values on every rank, and the text as numbers.

    With a `backend`, the model's first call compiles it; the caller can still distribute it before.
    """
    text = TEXT.read_text()
    letters = {c: i for i, c in enumerate(sorted(set(text)))}
    torch.manual_seed(1)
    model = LanguageModel(len(letters), context, heads=HEADS).to(dtype)
    if backend is not None:
        model.compile(backend=backend)
    return model, torch.tensor([letters[c] for c in text])


def batch_at(step: int, data: torch.Tensor, batch: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Characters and the ones that follow them, [batch, context]; every rank draws the same."""
    start = torch.randint(len(data) - context, (batch,), generator=torch.Generator().manual_seed(step)).tolist()
    return torch.stack([data[i : i + context] for i in start]), torch.stack([data[i + 1 : i + context + 1] for i in start])


def mean_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def descend(
    loss_at: Callable[[int], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    first: int = 0,
    report: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """The loss of every step. `loss_at` runs the backward pass too."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        losses.append(loss_at(step).item())
        optimizer.step()
        report(losses[-1])
    return losses


def fit(
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    data: torch.Tensor,
    *,
    steps: int = 100,
    batch: int = 7,
    context: int = 24,
    **run,
) -> list[float]:
    """The loss of every step. `loss_of` takes a batch and runs the backward pass too."""
    return descend(lambda step: loss_of(*batch_at(step, data, batch, context)), optimizer, steps=steps, **run)


def train(
    mesh=None,
    *,
    context: int = 24,
    rate: float = 3e-3,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    **run,
) -> list[float]:
    """The loss of every step; the same with and without a mesh."""
    model, data = build(context, dtype, backend)
    if mesh is not None:
        import shardtensor as st

        st.distribute_module(model, mesh, partition(HEADS))

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if mesh is not None:
            placements = [st.Shard(0), st.Replicate()]
            inputs, targets = (st.distribute_tensor(t, mesh, placements, src_data_rank=None) for t in (inputs, targets))
        loss = mean_loss(model, inputs, targets)
        loss.backward()
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return fit(loss_of, optimizer, data, context=context, **run)


def plot(losses: list[float], path: Path) -> str:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture of the losses: matplotlib is not installed (pip install matplotlib numpy)"
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per character)")
    axes.plot(losses)
    figure.savefig(path)
    return f"the losses are drawn in {path}"


class Progress:
    """A progress bar on one rank, and a line now and then. Pipes and files get the lines alone."""

    def __init__(self, steps: int, shown: bool) -> None:
        self.steps, self.shown, self.done = steps, shown, 0
        self.bar = tqdm(total=steps, unit="step", file=sys.stdout, disable=None) if tqdm is not None and shown else None

    def __call__(self, loss: float) -> None:
        self.done += 1
        every = max(1, self.steps // 10)
        line = f"step {self.done:4d}  loss {loss:.4f}"
        if self.bar is not None:
            self.bar.update()
            self.bar.set_postfix(loss=f"{loss:.4f}")
            if self.done % every == 0:
                self.bar.write(line, file=sys.stdout)
        elif self.shown and self.done % every == 0:
            print(line, flush=True)


def launch() -> str | None:
    """Joins the ranks that torchrun has started. Returns their device, or None if this process runs alone."""
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        return None
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    return "cuda" if gpus else "cpu"


def run_on_field(train: Callable[..., list[float]], description: str, cut: Callable[[int], str]) -> None:
    """The command line of the examples on a field. `cut` says how so many ranks share it."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    device = launch()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if device else (0, 1)
    if rank == 0:
        print(f"{cut(ranks)}, {device or 'cpu, without shardtensor'}")
    losses = train(device, steps=steps, report=Progress(steps, rank == 0))
    if rank == 0:
        print(f"loss {losses[0]:.6f} at first, {losses[-1]:.6f} at last")
    if device:
        dist.destroy_process_group()


def run(
    train: Callable[..., list[float]], description: str, parser: argparse.ArgumentParser | None = None, *, alone: bool = False
) -> None:
    """The command line of all examples. `train` is called with the device and the arguments, also those of `parser`; with None for
    the device if this process runs alone, which it must be able to do then."""
    parser = parser or argparse.ArgumentParser()
    parser.description = description.splitlines()[0]
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=7)
    parser.add_argument("--context", type=int, default=24)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default="float32", help="float32 or float64")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        dest="backend",
        help="use torch.compile, with this backend; inductor if none is named",
    )
    parser.add_argument("--picture", type=Path, default=Path("losses.png"))
    arguments = vars(parser.parse_args())
    picture = arguments.pop("picture")

    device = launch()
    if device is None and not alone:
        command = next(line.strip() for line in description.splitlines() if "torchrun" in line)
        sys.exit(f"this example runs on ranks, which torchrun starts: {command}")
    first_rank = device is None or dist.get_rank() == 0
    if first_rank:
        print(f"on {'one process' if device is None else f'{dist.get_world_size()} ranks, {device}'}")
    progress = Progress(arguments["steps"], first_rank)
    losses = train(device, report=progress, **arguments)
    if progress.bar is not None:
        progress.bar.close()
    if first_rank:
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last; {plot(losses, picture)}")
        print(NEXT)
    if device is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    run(lambda device, **arguments: train(device and make_mesh(device), **arguments), __doc__, alone=True)
