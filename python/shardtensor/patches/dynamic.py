"""torch._dynamo.variables.builder: which sizes of an input's piece are symbols. All versions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Shard, _StridedShard

import shardtensor._C as _C
from shardtensor.patches._graphs import REFUSED, refuse
from shardtensor.patches._patch import Patch
from shardtensor.tensor._layout import placements_of


def _as_the_whole(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """A cut size is a symbol of the piece if it is one of the whole, so on every rank. torch would decide by the piece's own history:
    a rank whose piece kept its size would compile more graphs than others, and reach torch's limit alone. And with dynamic=True a
    piece shares no symbol with equal sizes: the length of another tensor would become a number on one rank only.

    A size that is marked as unbacked (mark_unbacked) is taken as one that is marked as dynamic: a graph must know whether the ranks
    divide the size, and torch cannot guard that of an unbacked one."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic  # noqa: PLC0415  slow: sympy

    def as_whole(own: DimDynamic, whole: DimDynamic) -> DimDynamic:
        if whole is DimDynamic.STATIC:
            return whole
        return DimDynamic.DYNAMIC if whole in (DimDynamic.DYNAMIC, DimDynamic.DUCK) else own

    @functools.wraps(torchs)
    def automatic_dynamic(e: torch.Tensor, *args: Any, **options: Any) -> Any:
        out = torchs(e, *args, **options)
        pieces = getattr(out, "inner_contexts", {})
        if "_local_tensor" in pieces and _C.is_shard_tensor(e):
            for context in (out, pieces["_local_tensor"]):
                context.dynamic_sizes[:] = [DimDynamic.DYNAMIC if n is DimDynamic.UNBACKED else n for n in context.dynamic_sizes]
            sizes = pieces["_local_tensor"].dynamic_sizes
            for d in {p.dim for p in placements_of(_C.layout(e)) if isinstance(p, (Shard, _StridedShard))}:
                sizes[d] = as_whole(sizes[d], out.dynamic_sizes[d])
        return out

    return automatic_dynamic


PATCHES = (
    Patch(
        "torch._dynamo.variables.builder",
        "_automatic_dynamic",
        _as_the_whole,
        why="which sizes of a piece are symbols must not depend on the rank, or ranks compile different graphs.",
        ask="inner tensors of subclasses whose dynamic sizes follow the outer tensor's",
        without=REFUSED,
        turn_off=refuse,
    ),
)
