"""The model of train_transformer.py in Lightning: ModelParallelStrategy, torch's parallel styles, FSDP2 over them on four ranks.

    pip install lightning
    torchrun --nproc-per-node 2 -m shardtensor examples/with_lightning.py
    torchrun --nproc-per-node 4 -m shardtensor examples/with_lightning.py

The script knows torch.distributed.tensor alone; `-m shardtensor` makes its DTensors ShardTensors. So 101 hidden units and 43
characters need not divide by the ranks. The attention layers are left whole: AttentionHeads (tensor_parallel.py) would cut them.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from train_transformer import batch_at, build, run

PLAN = {
    "token": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


class Training(lightning.LightningModule):
    def __init__(self, model: torch.nn.Module, rate: float, report: Callable[[float], None]) -> None:
        super().__init__()
        self.model, self.rate, self.report = model, rate, report
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Lightning calls it with the mesh in place."""
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], PLAN)
        if self.device_mesh["data_parallel"].size() > 1:
            for module in (*self.model.blocks, self.model):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        rows = self.device_mesh["data_parallel"]
        inputs, targets = (t[rows.get_local_rank() :: rows.size()] for t in batch)
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / batch[1].numel()
        whole = loss.detach().clone()
        dist.all_reduce(whole, group=rows.get_group())
        self.losses.append(whole.item())
        self.report(self.losses[-1])
        return loss * rows.size()  # FSDP averages the rows' gradients, but the rows have unequal parts of the batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


def train(
    device: str,
    *,
    steps: int = 100,
    batch: int = 7,
    context: int = 24,
    rate: float = 3e-3,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    report: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    model, data = build(context, dtype, backend)
    training = Training(model, rate, report)
    ranks = dist.get_world_size()
    rows = 2 if ranks % 2 == 0 and ranks > 2 else 1
    trainer = lightning.Trainer(
        accelerator=device,
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=rows, tensor_parallel_size=ranks // rows),
        max_epochs=1,
        use_distributed_sampler=False,  # the rows of ranks share one batch
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = [batch_at(step, data, batch, context) for step in range(steps)]
    trainer.fit(training, DataLoader(batches, batch_size=None))
    return training.losses


if __name__ == "__main__":
    run(train, __doc__)
