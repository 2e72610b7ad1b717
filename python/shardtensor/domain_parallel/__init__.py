"""physicsnemo.domain_parallel's names over ShardTensors: its users change an import. docs/from-physicsnemo.md says what differs.

Importing it allows plain tensors among ShardTensors, as there: `set_promotion_mode("replicate")`.
"""

from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardtensor.domain_parallel._shard_tensor import ShardTensor, TensorPromotionMode
from shardtensor.domain_parallel._sync import sync_module_over_mesh
from shardtensor.domain_parallel.shard_utils.halo import HaloConfig, halo_padding, unhalo_padding
from shardtensor.domain_parallel.shard_utils.ring import RingPassingConfig, perform_ring_iteration, perform_ring_iteration_async
from shardtensor.tensor._factories import distribute_module, distribute_tensor, scatter_tensor
from shardtensor.tensor._modes import set_promotion_mode
from shardtensor.tensor._tensor import ShardTensorSpec

set_promotion_mode("replicate")

__all__ = [
    "HaloConfig",
    "Partial",
    "Replicate",
    "RingPassingConfig",
    "Shard",
    "ShardTensor",
    "ShardTensorSpec",
    "TensorPromotionMode",
    "distribute_module",
    "distribute_tensor",
    "halo_padding",
    "perform_ring_iteration",
    "perform_ring_iteration_async",
    "scatter_tensor",
    "sync_module_over_mesh",
    "unhalo_padding",
]
