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
        partitioners.force_save_collectives = _keep_keys(partitioners.force_save_collectives)
    if hasattr(partitioners, "fx_graph_cse"):
        partitioners.fx_graph_cse = _keep_collectives_apart(partitioners.fx_graph_cse)
    if hasattr(partitioners, "_extract_graph_with_inputs_outputs"):
        extract = partitioners._extract_graph_with_inputs_outputs
        partitioners._extract_graph_with_inputs_outputs = _leave_out_what_is_not_used(extract)


def _keep_keys(keep_collectives: Callable[[Any], None]) -> Callable[[Any], None]:
    """A checkpointed region keeps the keys of random numbers, as it keeps what collectives bring, and draws from them again. torch's
    own way, the generator's state, is put among a graph's results where a mesh is expected."""

    def keep(joint_module: torch.fx.GraphModule) -> None:
        keep_collectives(joint_module)
        for node in joint_module.graph.nodes:
            if _is_key(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

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


def _leave_out_what_is_not_used(extract: Callable[..., Any]) -> Callable[..., Any]:
    """torch copies into the backward all that its inputs suffice for, then drops what is not used, but no collective and no draw of
    a key. Which values are saved may differ between ranks: one alone would repeat a collective of the forward."""

    def extracted(joint: Any, inputs: Any, outputs: Any, descriptions: Any, subgraph: str | None = None, *rest: Any, **options: Any) -> Any:
        graph = extract(joint, inputs, outputs, descriptions, subgraph, *rest, **options)
        if subgraph == "backward":
            graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() and not (_is_collective(node) or _is_key(node)))
        return graph

    return extracted


def _is_collective(node: torch.fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def _is_key(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.shardtensor.next_key.default
