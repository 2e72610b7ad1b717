"""The models of model_zoo.py in parallel: each must train as it does in one process.

A run takes steps on the ranks of a pool: forward, backward, clipped gradients, optimizer. Loss, gradients, norm, new parameters
and buffers must be a plain copy's. test_models.py has the runs as tests; docs/models.py makes the table of docs/models.md from them.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model_zoo import DTYPE, MODELS, Model
from torch import nn

BATCH = 3
ROWS = {2: [3, 0], 3: [2, 0, 1]}  # the ranks' rows of a batch: uneven, one has none
FSDP_ROWS = {2: [2, 1], 3: [1, 1, 1]}  # FSDP2 gives the model the rank's own rows as a plain tensor: most models cannot take none
OPTIONS = {"Qwen3-MoE": dict(experts_implementation="eager")}  # of from_pretrained, which a saved config does not have
# transformers computes norms and softmax in float32, whatever the model's dtype.
NEAR = dict(rtol=1e-5, atol=1e-7)

Results = dict[str, Any]


@functools.cache
def _built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].make().to(DTYPE).train()


def built(name: str) -> nn.Module:
    return copy.deepcopy(_built(name))


# ---- steps, and what they must give ----


def whole(t: Any) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def adam(model: nn.Module) -> torch.optim.Optimizer:
    # Adam's first step divides a gradient by its own size: eps keeps what is zero but for rounding from becoming a whole step.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def unwrapped(name: str) -> str:
    """A parameter's or buffer's name without the wrappers of recomputed blocks."""
    return name.replace("_checkpoint_wrapped_module.", "")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, compute_loss: Callable[[], torch.Tensor]) -> Results:
    optimizer.zero_grad()
    loss = compute_loss()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    gradients = {unwrapped(name): whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return dict(loss=whole(loss.detach()), norm=whole(norm), gradients=gradients, **state(model))


def state(model: nn.Module) -> Results:
    saved = {unwrapped(name) for name in model.state_dict()}
    return dict(
        parameters={unwrapped(name): whole(p.detach()).clone() for name, p in model.named_parameters()},
        buffers={unwrapped(name): whole(b).clone() for name, b in model.named_buffers() if unwrapped(name) in saved},
    )


@functools.cache
def plainly(name: str, steps: int = 1, training_norms: bool = True) -> Results:
    """The last of one process's steps."""
    spec, model = MODELS[name], built(name)
    if not training_norms:
        fix_statistics(model)
    optimizer = adam(model)
    return [step(model, optimizer, lambda: spec.out(model(**spec.inputs(BATCH))).square().mean()) for _ in range(steps)][-1]


def equal(ours: Results, plain: Results) -> None:
    for part, value in ours.items():
        torch.testing.assert_close(value, plain[part], **NEAR, msg=lambda text, part=part: f"{part}: {text}")


def fix_statistics(model: nn.Module) -> None:
    """Under FSDP2 a batch norm sees its rank's rows alone, in plain torch too: it must not compute statistics."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


# ---- the ways to run in parallel; each runs on all ranks ----


@functools.cache
def mesh_of(*shape: int) -> Any:
    import shardtensor

    return shardtensor.init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[: len(shape)])


def batch(name: str) -> None:
    """The batch is cut, unevenly and with an empty piece; the parameters are whole."""
    import shardtensor as st

    spec, world = MODELS[name], dist.get_world_size()
    mesh = mesh_of(world)
    model = st.distribute_module(built(name), mesh)
    cut = functools.partial(st.distribute_tensor, device_mesh=mesh, placements=[st.Shard(0)], sharding_shapes={0: ROWS[world]})
    inputs = {key: cut(value) for key, value in spec.inputs(BATCH).items()}
    with st.implicit_replication():
        equal(step(model, adam(model), lambda: spec.out(model(**inputs)).square().mean()), plainly(name))


def planned(spec: Model, name: str, mesh: Any) -> nn.Module:
    import shardtensor as st
    from shardtensor.parallel import parallelize_module

    assert spec.plan is not None
    model = built(name)
    model = parallelize_module(model, mesh, spec.plan(model))
    assert sum(isinstance(p, st.ShardTensor) and p.placements[0].is_shard() for p in model.parameters()) > 1
    return model


def tensor(name: str) -> None:
    """The plan's layers are cut; every rank has the whole batch."""
    import shardtensor as st

    spec = MODELS[name]
    model = planned(spec, name, mesh_of(dist.get_world_size()))
    with st.implicit_replication():
        equal(step(model, adam(model), lambda: spec.out(model(**spec.inputs(BATCH))).square().mean()), plainly(name))


def loaded(name: str, folder: Path, **sizes: int) -> nn.Module:
    """By transformers, from a file of the whole model, in its own tensor parallelism."""
    import shardtensor as st
    from test_libraries import as_launched
    from transformers.distributed import DistributedConfig

    as_launched()
    plain = built(name)
    if dist.get_rank() == 0:
        plain.save_pretrained(folder / "model")
    dist.barrier()
    options = dict(dtype=DTYPE) | OPTIONS.get(MODELS[name].name, {})
    distributed = DistributedConfig(**sizes, tp_plan="auto")
    model = type(plain).from_pretrained(folder / "model", distributed_config=distributed, **options)
    assert any(isinstance(p, st.ShardTensor) and p.placements[-1].is_shard() for p in model.parameters())
    return model.train()


def automatic(name: str, folder: Path) -> None:
    """transformers' tp_plan="auto"; every rank has the whole batch."""
    import shardtensor as st

    spec = MODELS[name]
    with st.replace_dtensor():
        model = loaded(name, folder, tp_size=dist.get_world_size())
        equal(step(model, adam(model), lambda: spec.out(model(**spec.inputs(BATCH))).square().mean()), plainly(name))


def sharded(model: nn.Module, block: str, mesh: Any, recompute: bool) -> nn.Module:
    import shardtensor as st
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.fsdp import fully_shard

    fix_statistics(model)
    model.to(memory_format=torch.contiguous_format)  # FSDP2 refuses others; the inputs stay as they are

    def is_block(module: nn.Module) -> bool:
        return type(module).__name__ == block

    if recompute:
        apply_activation_checkpointing(model, check_fn=is_block)
    for module in [m for m in model.modules() if is_block(m)]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(p, st.ShardTensor) for p in model.parameters())
    return model


def by_rows(name: str, model: nn.Module, mesh: Any, folder: Path) -> None:
    """The ranks along the mesh have their own rows. What the step made is saved."""
    import shardtensor as st
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    spec, rows, row = MODELS[name], FSDP_ROWS[mesh.size()], mesh.get_local_rank()
    inputs = {key: value.split(rows)[row] for key, value in spec.inputs(BATCH).items()}
    # A rank's share of the mean over all rows; FSDP2 takes the mean over the ranks.
    share, optimizer = rows[row] * len(rows) / BATCH, adam(model)
    with st.implicit_replication():
        done = step(model, optimizer, lambda: spec.out(model(**inputs)).square().mean() * share)
    loss = done.pop("loss").clone()
    dist.all_reduce(loss, group=mesh.get_group())
    equal(done | {"loss": loss / len(rows)}, plainly(name, training_norms=False))
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)


def fsdp(name: str, folder: Path) -> None:
    """FSDP2 with recomputed blocks."""
    import shardtensor as st

    with st.replace_dtensor():
        mesh = mesh_of(dist.get_world_size())
        by_rows(name, sharded(built(name), MODELS[name].blocks, mesh, recompute=True), mesh, folder)


def fsdp_over_tensor(name: str, folder: Path) -> None:
    """The same over the plan, on two rows of ranks."""
    import shardtensor as st

    with st.replace_dtensor():
        spec, mesh = MODELS[name], mesh_of(2, dist.get_world_size() // 2)
        model = sharded(planned(spec, name, mesh["tensor"]), spec.blocks, mesh["data"], recompute=True)
        by_rows(name, model, mesh["data"], folder)


def fsdp_over_automatic(name: str, folder: Path) -> None:
    """transformers shards by FSDP2 what it has cut by its plan."""
    import shardtensor as st

    with st.replace_dtensor():
        columns = dist.get_world_size() // 2
        by_rows(name, loaded(name, folder, tp_size=columns, fsdp_size=2), mesh_of(2, columns)["data"], folder)


def resume(name: str, folder: Path) -> None:
    """Under FSDP2 on these ranks, from the file of others: the next step is one process's second."""
    import shardtensor as st
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    spec, world = MODELS[name], dist.get_world_size()
    rows, rank, mesh = FSDP_ROWS[world], dist.get_rank(), mesh_of(world)
    with st.replace_dtensor():
        model = sharded(built(name), spec.blocks, mesh, recompute=False)
        optimizer = adam(model)
        saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        first = plainly(name, training_norms=False)
        equal(state(model), first)
        inputs = {key: value.split(rows)[rank] for key, value in spec.inputs(BATCH).items()}
        done = step(model, optimizer, lambda: spec.out(model(**inputs)).square().mean() * (rows[rank] * world / BATCH))
        del done["loss"]
        equal(done, plainly(name, steps=2, training_norms=False))


# ---- the table of runs ----


@dataclass(frozen=True)
class Way:
    """One way to run in parallel, on numbers of ranks. Where a second number is given, so many ranks resume from the file."""

    title: str
    function: Callable[..., None]
    ranks: tuple[tuple[int, int | None], ...]
    suits: Callable[[Model], bool] = lambda model: True
    writes: bool = False  # takes a folder

    def run(self, pools: Callable[[int], Any], name: str, world: int, then: int | None, folder: Path) -> None:
        pools(world).run(self.function, name, *([folder] if self.writes else []), seconds=100)
        if then is not None:
            pools(then).run(resume, name, folder, seconds=100)


WAYS = [
    Way("batch cut", batch, ((2, None), (3, None))),
    Way("tensor parallel", tensor, ((2, None), (3, None)), lambda model: model.plan is not None),
    Way('`tp_plan="auto"`', automatic, ((2, None), (3, None)), lambda model: model.automatic, writes=True),
    Way("FSDP2", fsdp, ((2, 3), (3, 2)), writes=True),
    Way("FSDP2 over tensor parallel", fsdp_over_tensor, ((4, 3),), lambda model: model.plan is not None, writes=True),
    Way('FSDP2 over `tp_plan="auto"`', fsdp_over_automatic, ((4, 3),), lambda model: model.automatic, writes=True),
]


def runs() -> Iterator[tuple[str, Way, int, int | None]]:
    for name, model in MODELS.items():
        for way in WAYS:
            yield from ((name, way, *ranks) for ranks in way.ranks if way.suits(model))


def gathers(name: str) -> list[str]:
    """The ops that gather an operand where the batch is cut."""
    from shardtensor.debug import log_gathers

    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("shardtensor")
    log.addHandler(handler)
    log_gathers("once", all_ranks=True)
    try:
        batch(name)
    finally:
        log_gathers("off")
        log.removeHandler(handler)
    return sorted(set(re.findall(r"aten::(\w+)", "\n".join(texts))))
