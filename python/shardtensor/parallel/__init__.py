"""torch.distributed.tensor.parallel for ShardTensors: the same names, for sizes that need not divide by the ranks."""

from torch.distributed.tensor.parallel import ParallelStyle

from shardtensor.parallel._attention import AttentionHeads
from shardtensor.parallel._hooks import input_reshard, loss_parallel
from shardtensor.parallel._parallelize import parallelize_module
from shardtensor.parallel._styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "AttentionHeads",
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "input_reshard",
    "loss_parallel",
    "parallelize_module",
]
