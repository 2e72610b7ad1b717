"""Finds attention heads that a plan has cut, or separated from the key/value heads that they read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from torch import nn

from shardtensor.parallel._attention import KeyValueHeads, QueryHeads
from shardtensor.parallel._styles import pieces_of_features, style_of
from shardtensor.tensor._layout import _SHARD
from shardtensor.tensor._tensor import ShardTensor

# The attributes in which attention modules keep the features of a head, and the number of heads.
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_head", "key_value_proj_dim")
_HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
# The names of the layers that compute queries, keys and values, in one module, and of the layer behind attention.
PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
)
OUTPUTS = ("o_proj", "wo", "o", "out", "out_proj", "to_out", "out_lin", "dense", "proj")


def cut_heads(module: nn.Module) -> Iterator[str]:
    """A text for each linear layer."""
    for name, part in module.named_modules():
        size = number(part, HEAD_SIZES)
        for child_name, child in part.named_children():
            pieces = _pieces_of_features(child)
            if size and sum(pieces) % size == 0 and any(n % size for n in pieces):
                yield (
                    f"parallelize_module: the features of '{_inside(name, child_name)}' are cut into {pieces} over the ranks, but "
                    f"{type(part).__name__} has heads of {size}, so a view as heads will fail, or gather. To cut between heads, make the "
                    f"styles with AttentionHeads(heads=..., kv_heads=..., head_dim={size}).plan(...), or pass multiple_of={size} to "
                    "ColwiseParallel and to the RowwiseParallel behind it"
                )


def check_groups(module: nn.Module) -> None:
    """Raises if a rank has query heads and not exactly the key/value heads that these read. Every rank finds the same."""
    for name, part in module.named_modules():
        children = dict(part.named_children())
        for q, *others in PROJECTIONS:
            for other in others:
                if q in children and other in children:
                    _check_pair(name, part, q, other)


def _check_pair(name: str, part: nn.Module, q: str, other: str) -> None:
    layers = [part.get_submodule(child) for child in (q, other)]
    styles = [style_of(layer) for layer in layers]
    made = [style.heads if isinstance(style, QueryHeads) else None for style in styles]
    if made[0] is not None and made[0] == made[1] and isinstance(styles[1], KeyValueHeads):
        return  # shared out together
    if not all(getattr(style, "use_local_output", False) for style in styles):
        return  # the module computes on whole tensors
    features = [_pieces_of_features(layer) for layer in layers]
    size = _head_size(part, sum(features[0]))
    if not all(features) or not size or any(sum(pieces) % size for pieces in features):
        return
    heads, kv_heads = (sum(pieces) // size for pieces in features)
    if kv_heads == 0 or heads % kv_heads or (heads == kv_heads and any(n % size for pieces in features for n in pieces)):
        return  # no groups; cut_heads has a text for heads that are cut
    group = heads // kv_heads
    read = [n * group for n in features[1]]
    starts = [list(accumulate(pieces, initial=0)) for pieces in (features[0], read)]
    for rank, queries in enumerate(features[0]):
        together = queries == read[rank] and starts[0][rank] == starts[1][rank] and features[1][rank] % size == 0
        if queries and not together:
            out = next((child for child, layer in part.named_children() if child in OUTPUTS and isinstance(layer, nn.Linear)), "...")
            stems = next(names for names in PROJECTIONS if q in names)
            names = ", ".join(f"{key}={child!r}" for key, child in zip("qkvo", (*stems, out), strict=True))
            first, last = starts[0][rank] / size, (starts[0][rank] + queries) / size
            raise ValueError(
                f"parallelize_module: this plan gives rank {rank} the query heads {first:g} to {last:g} of '{name}' "
                f"({type(part).__name__}), of {heads}, but not the {kv_heads} key/value heads that they read: of '{other}' it has "
                f"{features[1][rank]} features from {sum(features[1][:rank])}, a head has {size} and serves {group} query heads. This "
                f"plan shares them out together: AttentionHeads(heads={heads}, kv_heads={kv_heads}, head_dim={size})"
                f".plan({name!r}, {names})"
            )


def number(part: nn.Module, names: tuple[str, ...]) -> int:
    """The first of these attributes that is a number, or 0."""
    return next((n for n in (getattr(part, attribute, None) for attribute in names) if isinstance(n, int) and n > 0), 0)


def _head_size(part: nn.Module, features: int) -> int:
    heads = number(part, _HEAD_COUNTS)
    return number(part, HEAD_SIZES) or (features // heads if heads else 0)


def _inside(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _pieces_of_features(module: nn.Module) -> list[int]:
    """Each rank's number of output features, of a Linear on a 1-d mesh that cuts them."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear) or not isinstance(weight, ShardTensor):
        return []
    layout = weight._layout
    if [(kind, dim) for kind, dim, *_ in layout.placements] != [(_SHARD, 0)]:
        return []
    return list(pieces_of_features(layout, 0, weight.shape[0]))
