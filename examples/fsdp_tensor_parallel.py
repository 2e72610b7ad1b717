"""The model of train_transformer.py: tensor parallel inside each row of ranks, FSDP2 between the rows.

    torchrun --nproc-per-node 4 examples/fsdp_tensor_parallel.py

The plan is tensor_parallel.py's; `fully_shard` is torch's and shards what the plan has cut a second time, over the mesh dim
"data". Each row of ranks reads its own part of the batch, 4 and 3 sequences of 7. With --compile, every block is compiled by
itself, because FSDP2 gathers the parameters block by block.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shardtensor.parallel import loss_parallel, parallelize_module
from tensor_parallel import plan
from torch.distributed.fsdp import fully_shard
from train_transformer import build, fit, make_mesh, run


def train(
    device: str,
    *,
    context: int = 24,
    rate: float = 3e-3,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    **arguments,
) -> list[float]:
    model, data = build(context, dtype)
    mesh = make_mesh(device)
    parallelize_module(model.to(device), mesh["tensor"], plan(model.blocks[0].attention.head_size))
    for block in model.blocks if backend is not None else ():
        block.compile(backend=backend)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["data"])
    rows, row = mesh["data"].size(), mesh["data"].get_local_rank()

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mine = slice(row, None, rows)
        with loss_parallel():
            logits = model(inputs[mine].to(device))
            # FSDP averages the rows' gradients, but the rows have unequal parts of the batch.
            share = F.cross_entropy(logits.flatten(0, 1), targets[mine].flatten().to(device), reduction="sum") / targets.numel()
            (share * rows).backward()
        loss = share.detach().full_tensor()
        dist.all_reduce(loss, group=mesh["data"].get_group())
        return loss

    return fit(loss_of, torch.optim.AdamW(model.parameters(), lr=rate), data, context=context, **arguments)


if __name__ == "__main__":
    run(train, __doc__)
