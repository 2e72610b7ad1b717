"""torch._functorch.partitioners: what of a graph goes forward and backward. Ranks run graphs of different shapes, and all must come to
the same collectives. All versions; seen in torch 2.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import _side_effectful_functions
from torch.utils.checkpoint import CheckpointPolicy


def patch(partitioners: Any) -> None:
    if hasattr(partitioners, "force_save_collectives"):
        partitioners.force_save_collectives = _keep_in_their_place(partitioners.force_save_collectives)
    if hasattr(partitioners, "fx_graph_cse"):
        partitioners.fx_graph_cse = _keep_collectives_apart(partitioners.fx_graph_cse)
    if hasattr(partitioners, "is_not_collective"):  # what one partitioner does not take away though nothing uses it
        partitioners.is_not_collective = lambda node: True


def _keep_in_their_place(keep_collectives: Callable[[Any], None]) -> Callable[[Any], None]:
    """A collective runs once, in the forward or the backward as in eager mode, on every rank. torch would put it where that costs
    this rank least, in both where something it may not drop needs it, or nowhere where nothing here does.

    So does the draw of a key, also in a checkpointed region, which draws its numbers from the key again. torch's own way, the
    generator's state, is put among a graph's results where a mesh is expected."""

    def keep(joint_module: torch.fx.GraphModule) -> None:
        for node in joint_module.graph.nodes:
            if _is_key(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        keep_collectives(joint_module)
        for node in joint_module.graph.nodes:
            if (_is_collective(node) or _is_key(node)) and node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
                backward = node.meta.get("partitioner_tag") == "is_backward"
                node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"

    return keep


def _keep_collectives_apart(merge_equal_calls: Callable[..., Any]) -> Callable[..., Any]:
    """torch makes one of two equal calls. Whether two collectives are equal calls may differ between ranks: one that has an empty
    piece of both tensors sends the same nothing twice, and would make one call where its peers make two."""

    def merge(graph: torch.fx.Graph, **options: Any) -> Any:
        collectives = {n.target for n in graph.nodes if _is_collective(n)}
        added = collectives - _side_effectful_functions
        _side_effectful_functions.update(added)
        try:
            return merge_equal_calls(graph, **options)
        finally:
            _side_effectful_functions.difference_update(added)

    return merge


def _is_collective(node: torch.fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def _is_key(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.shardtensor.next_key.default
