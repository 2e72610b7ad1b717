"""torch.distributed.tensor.placement_types, under this package's name."""

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
