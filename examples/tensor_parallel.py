"""The model of train_transformer.py, tensor parallel by torch's parallel styles.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 3 examples/tensor_parallel.py

Only the imports differ from a script for torch.distributed.tensor, and `AttentionHeads`: 5 heads are shared in whole heads, 101
hidden units and 43 characters as they come. The loss is taken of logits that stay cut by character.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from shardtensor import Replicate, Shard, init_device_mesh
from shardtensor.parallel import AttentionHeads, ColwiseParallel, ParallelStyle, RowwiseParallel, loss_parallel, parallelize_module
from torch import nn
from train_transformer import HEADS, build, fit, mean_loss, run


def plan(head_size: int) -> dict[str, ParallelStyle]:
    """How each module is cut, by name. Between the modules, tensors are plain, and each rank holds all of them."""
    attention = AttentionHeads(heads=HEADS, head_dim=head_size)
    return {
        "token": RowwiseParallel(input_layouts=Replicate()),
        **attention.plan("blocks.*.attention", q="query", k="key", v="value", o="out"),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def losses_of(model: nn.Module, device: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            loss = mean_loss(model, inputs.to(device), targets.to(device))
            loss.backward()
        return loss

    return loss_of


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

    return fit(losses_of(model, device), torch.optim.AdamW(model.parameters(), lr=rate), data, context=context, **arguments)


if __name__ == "__main__":
    run(train, __doc__)
