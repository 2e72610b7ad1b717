"""The model of train_transformer.py in Hugging Face's accelerate: FSDP2 with activation checkpointing and clipped gradients.

    pip install accelerate
    torchrun --nproc-per-node 3 -m shardtensor examples/with_accelerate.py

The script knows accelerate alone; `-m shardtensor` makes FSDP2's DTensors ShardTensors. accelerate has FSDP2 on GPUs only. On CPUs
it replicates the model by DDP, without a word: the losses are the same, but nothing is sharded.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from train_transformer import build, fit, run


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
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
    )
    accelerator = Accelerator(cpu=device == "cpu", fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=rate))
    mine = slice(accelerator.process_index, None, accelerator.num_processes)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        own, wanted = inputs[mine].to(accelerator.device), targets[mine].to(accelerator.device)
        # The ranks' gradients are averaged, but the ranks have unequal parts of the batch.
        share = F.cross_entropy(model(own).flatten(0, 1), wanted.flatten(), reduction="sum") / targets.numel()
        accelerator.backward(share * accelerator.num_processes)
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        loss = share.detach()
        dist.all_reduce(loss)
        return loss

    return fit(loss_of, optimizer, data, context=context, **arguments)


if __name__ == "__main__":
    run(train, __doc__)
