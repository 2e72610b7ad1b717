"""Writes docs/models.md: which models train in parallel as in one process, and on how many ranks, from runs of all of them.

python docs/models.py           writes the page; takes minutes, and the libraries that the page names
python docs/models.py --check   fails where the page is not what would be written
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

import conftest  # noqa: E402, F401  sets the path to the package
from model_zoo import MODELS, Model  # noqa: E402
from models import BATCH, ROWS, WAYS, Way  # noqa: E402
from pages import write_or_check  # noqa: E402
from pool import Pool, RankError  # noqa: E402

PAGE = HERE / "models.md"
ERROR = re.compile(r"^\w+(?:Error|Exception)\b.*|died|no answer", re.MULTILINE)
HEAD = """# Works with

Written by `python docs/models.py`, with {versions}; do not edit.

Each number below is a run on so many ranks (processes on the CPU, Gloo) in which a model trained as it does in one process: loss,
all gradients, clipped norm, new parameters and buffers are equal but for rounding, in float64. The models are those of their
libraries, unmodified, in small sizes with random weights: 5 or 6 heads, 37 words, 41 hidden units, a batch of {batch}. `3 to 2` means
that 3 ranks saved model and optimizer with torch.distributed.checkpoint, and 2 ranks loaded them and took the next step. Each run
is a test, which needs the model's library:

```
pytest tests/end_to_end/test_models.py
pytest tests/end_to_end/test_models.py -k "Llama and batch"
```

"""
TAIL = """
- **batch cut:** inputs cut along dim 0, {rows}; parameters whole.
- **tensor parallel:** a plan of `ColwiseParallel`, `RowwiseParallel` and `AttentionHeads` for attention and hidden units, as far
  as the model lets them be cut (`tests/model_zoo.py` has the plans). Convolutions and recurrent layers have no plan.
- **`tp_plan="auto"`:** transformers' own tensor parallelism, from a saved model, after `shardtensor.replace_dtensor()`.
- **FSDP2:** `fully_shard` for each block and the model, activation checkpointing of each block, `clip_grad_norm_`, unequal rows.
  Batch norms do not compute statistics in these runs: under FSDP2 they see their rank's rows alone, in plain torch too.
- **FSDP2 over tensor parallel:** the same on 2 x 2 ranks.
- **FSDP2 over `tp_plan="auto"`:** both by transformers, `DistributedConfig(tp_size=2, fsdp_size=2, tp_plan="auto")`; nothing is
  recomputed.
- **gathers:** ops that gathered an operand where the batch is cut: right, but slower than they need be.

## Lightning and accelerate

One command runs a script of theirs that knows nothing of shardtensor:

```
torchrun --nproc-per-node 4 -m shardtensor examples/with_lightning.py
torchrun --nproc-per-node 3 -m shardtensor examples/with_accelerate.py
```

- **Lightning** {lightning}, `ModelParallelStrategy`: parallel styles, FSDP2 and both, `gradient_clip_val`, `save_checkpoint`, and
  `ckpt_path` on another number of ranks or in another way of sharding. Without torchrun, `python -m shardtensor train.py` starts
  one rank, and Lightning the others.
- **accelerate** {accelerate}, FSDP2 (`FullyShardedDataParallelPlugin(fsdp_version=2)`) with activation checkpointing,
  `clip_grad_norm_`, `save_state` and `load_state`; and tensor parallelism (`ParallelismConfig(tp_size=...)`) of a model that
  transformers has loaded with `tp_plan="auto"`. accelerate has both on GPUs only, and no GPU has been tried here. On CPUs it
  takes DDP for FSDP2, without a word, and refuses a `ParallelismConfig`; the tests lift that. Two things do not work, with DTensor
  neither: FSDP2 over tensor parallelism (accelerate imports a class that transformers no longer has), and `save_state` of a
  tensor-parallel model (it asks for the addresses of the parameters' memory). `save_pretrained` and torch.distributed.checkpoint
  save that model.

`tests/end_to_end/test_libraries.py` has these runs, and those of TensorBoard, torchao and torchtitan.
"""


class Pools:
    def __init__(self) -> None:
        self.made: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        return self.made.setdefault(world, Pool(world))

    def stop(self) -> None:
        for pool in self.made.values():
            pool.stop()


def cell(pools: Pools, name: str, way: Way) -> str:
    """The numbers of ranks on which the model is right, and why it fails on others."""
    found = []
    for world, then in way.ranks if way.suits(MODELS[name]) else ():
        ranks = str(world) if then is None else f"{world} to {then}"
        try:
            with tempfile.TemporaryDirectory() as folder:
                way.run(pools, name, world, then, Path(folder))
            found.append(ranks)
        except RankError as error:
            found.append(f"{ranks}: **no**, {ERROR.findall(str(error))[-1]}")
    return ", ".join(found)


def row(pools: Pools, name: str, model: Model) -> str:
    ops = sorted({op for world in ROWS for found in pools(world).run("models:gathers", name) for op in found})
    cells = [model.name, model.library, *(cell(pools, name, way) for way in WAYS), ", ".join(f"`{op}`" for op in ops)]
    return f"| {' | '.join(cells)} |\n"


def version(library: str) -> str:
    return importlib.metadata.version(library).partition("+")[0]


def page() -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in dict.fromkeys(model.library for model in MODELS.values()))
    titles = ["model", "library", *(way.title for way in WAYS), "gathers"]
    pools = Pools()
    try:
        rows = [row(pools, name, model) for name, model in MODELS.items()]
    finally:
        pools.stop()
    table = f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}\n" + "".join(rows)
    cuts = " or ".join(f"{' and '.join([', '.join(map(str, n[:-1])), str(n[-1])])} rows on {world}" for world, n in ROWS.items())
    trainers = {name: version(name) for name in ("lightning", "accelerate")}
    return HEAD.format(versions=versions, batch=BATCH) + table + TAIL.format(rows=cuts, **trainers)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
