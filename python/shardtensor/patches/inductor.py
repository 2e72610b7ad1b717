"""torch._inductor.utils: which nodes communicate. Inductor keeps those in the graph's order, but knows only torch's collectives. All
versions; seen in torch 2.12 to 2.15."""

from __future__ import annotations

from typing import Any

import torch


def patch(utils: Any) -> None:
    if hasattr(utils, "contains_collective"):
        known = utils.contains_collective

        def contains_collective(node: Any, *more: Any, **options: Any) -> bool:
            ours = getattr(getattr(node, "node", None), "op_overload", None) is torch.ops.shardtensor.put_off.default
            return ours or known(node, *more, **options)

        utils.contains_collective = contains_collective
