"""Finds attention heads that a plan has cut."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shardtensor.tensor._layout import _SHARD
from shardtensor.tensor._tensor import ShardTensor

# The attributes in which attention modules keep the features of a head.
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_head", "key_value_proj_dim")


def cut_heads(module: nn.Module) -> Iterator[str]:
    """A text for each linear layer."""
    for name, part in module.named_modules():
        size = next((n for n in (getattr(part, attribute, None) for attribute in _HEAD_SIZES) if isinstance(n, int) and n > 0), 0)
        for child_name, child in part.named_children():
            pieces = _pieces_of_features(child)
            if size and sum(pieces) % size == 0 and any(n % size for n in pieces):
                yield (
                    f"parallelize_module: the features of '{name and name + '.'}{child_name}' are cut into {pieces} over the ranks, but "
                    f"{type(part).__name__} has heads of {size}, so a view as heads will fail, or gather. To cut between heads, pass "
                    f"multiple_of={size} to ColwiseParallel and to the RowwiseParallel behind it; README.md has the plan for fewer "
                    "key/value heads than query heads."
                )


def _pieces_of_features(module: nn.Module) -> list[int]:
    """Each rank's number of output features, of a Linear on a 1-d mesh that cuts them."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear) or not isinstance(weight, ShardTensor):
        return []
    layout = weight._layout
    if [(kind, dim) for kind, dim, *_ in layout.placements] != [(_SHARD, 0)]:
        return []
    return [layout.local_sizes(list(weight.shape), [rank])[0] for rank in range(layout.mesh.shape[0])]
