"""The model of train_transformer.py, tensor and sequence parallel: between linear layers, each rank holds a part of the sequence.

    torchrun --nproc-per-node 3 examples/sequence_parallel.py

The sequence (24 characters, or what --context says) need not divide by the ranks: where it is gathered and cut again, the parts
keep their sizes.
"""

from __future__ import annotations

import torch
from shardtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from shardtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tensor_parallel import losses_of
from torch import nn
from train_transformer import build, fit, run

SEQUENCE = Shard(1)


def plan(head_size: int) -> dict[str, ParallelStyle]:
    heads = {f"blocks.*.attention.{name}": ColwiseParallel(multiple_of=head_size) for name in ("query", "key", "value")}
    whole = PrepareModuleInput(input_layouts=SEQUENCE, desired_input_layouts=Replicate())
    parts = {"output_layouts": SEQUENCE, "use_local_output": False}
    return {
        "token": RowwiseParallel(input_layouts=Replicate(), **parts),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.attention": whole,
        **heads,
        "blocks.*.attention.out": RowwiseParallel(multiple_of=head_size, **parts),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=SEQUENCE),
        "blocks.*.down": RowwiseParallel(**parts),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False),
    }


def train(
    device: str,
    *,
    context: int = 24,
    rate: float = 3e-3,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    **arguments,
) -> list[float]:
    model, data = build(context, dtype, backend)
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    parallelize_module(model.to(device), mesh, plan(model.blocks[0].attention.head_size))
    position = distribute_tensor(model.position.detach(), mesh, [Replicate()], src_data_rank=None)
    model.position = nn.Parameter(position)  # no style takes it, and it is added to parts of the sequence

    return fit(losses_of(model, device), torch.optim.AdamW(model.parameters(), lr=rate), data, context=context, **arguments)


if __name__ == "__main__":
    run(train, __doc__)
