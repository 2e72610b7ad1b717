"""torch._inductor.utils: which nodes communicate. Inductor keeps those in the graph's order, but knows only torch's collectives. All
versions; seen in torch 2.12 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.patches._graphs import REFUSED, refuse
from shardtensor.patches._patch import Patch


def _or_ours(known: Callable[..., bool]) -> Callable[..., bool]:
    def contains_collective(node: Any, *more: Any, **options: Any) -> bool:
        ours = getattr(getattr(node, "node", None), "op_overload", None) is torch.ops.shardtensor.defer_call.default
        return ours or known(node, *more, **options)

    return contains_collective


PATCHES = (
    Patch(
        "torch._inductor.utils",
        "contains_collective",
        _or_ours,
        why="inductor keeps collectives in order, but knows only its own.",
        ask="a tag of an op (torch.Tag) that says that it communicates",
        without=REFUSED,
        turn_off=refuse,
        by_name=True,
    ),
)
