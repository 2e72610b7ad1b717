"""torch._functorch.partitioners: which parts of a graph run forward and backward. Ranks' graphs have different sizes, and each
rank's torch splits its own. These patches keep the collectives as in eager mode, in the order of tracing. Graphs without
ShardTensors do not change. All versions; seen in torch 2.12 to 2.15."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from shardtensor.patches._graphs import REFUSED, refuse
from shardtensor.patches._patch import Patch
from shardtensor.tensor._compile import may_be_of_ours


def _keep_saved(choose: Callable[..., Any]) -> Callable[..., Any]:
    """With `activation_memory_budget = 0` torch saves nothing but a graph's inputs. What must be saved (see below) still is. With a
    budget between 0 and 1 torch sums up sizes, and raises at a mesh, which has no memory."""
    from torch._functorch import config  # noqa: PLC0415  comes with the partitioners

    meshes = {name: True for name in ("unsafe_treat_script_objects_as_zero_size",) if hasattr(config, name)}

    @functools.wraps(choose)
    def chosen(graph: Any, info: Any, memory_budget: float = 1, **options: Any) -> Any:
        if memory_budget == 1 or not may_be_of_ours():
            return choose(graph, info, memory_budget=memory_budget, **options)
        with config.patch(meshes if memory_budget else {"aggressive_recomputation": True}):
            return choose(graph, info, memory_budget=memory_budget or 1, **options)

    return chosen


def _keep_in_place(keep_collectives: Callable[[Any], None]) -> Callable[[Any], None]:
    """Runs each collective once, in the forward or in the backward. torch would put it where it costs this rank least, or into
    both graphs if a node that must not be dropped needs it. A checkpointed region saves the results of collectives instead of
    calling them again.

    It also saves the keys of random numbers, and draws from them again. torch would instead save the generator's state, as a
    graph output at a place where a mesh is expected."""

    def keep(joint_module: torch.fx.GraphModule) -> None:
        keep_collectives(joint_module)
        if not may_be_of_ours():
            return
        for node in joint_module.graph.nodes:
            if _is_collective(node) or _is_key(node):
                backward = node.meta.get("partitioner_tag") == "is_backward"
                node.meta["partitioner_tag"] = "must_be_in_backward" if backward else "must_be_in_forward"
                parts = () if backward else (user for user in node.users if user.target is operator.getitem)
                for result in (node, *parts):  # a list is saved as its parts
                    result.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    return keep


def _keep_unused(is_not_collective: Callable[[torch.fx.Node], bool]) -> Callable[[torch.fx.Node], bool]:
    """Makes torch's partitioner keep unused collectives: one of torch's partitioners drops unused nodes for which
    `is_not_collective` is false."""
    return lambda node: may_be_of_ours() or is_not_collective(node)


def _keep_order(reorder: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the backward's collectives in order. torch moves each node to its first use, and drops unused nodes."""

    def reordered(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        after = reorder(module)
        calls = [node for node in module.graph.nodes if _is_collective(node)]
        if not calls or not may_be_of_ours():
            return after  # type: ignore[no-any-return]
        return torch.fx.GraphModule(module, _sorted(calls, list(module.graph.nodes), [node.name for node in after.graph.nodes]))

    return reordered


def _sorted(calls: list[torch.fx.Node], nodes: list[torch.fx.Node], order: list[str]) -> torch.fx.Graph:
    """The graph with its nodes in the order of the names, and with all `calls`, one after the other."""
    places = {name: place for place, name in enumerate(order)}
    inputs = {node: list(node.all_input_nodes) for node in nodes}
    for first, second in itertools.pairwise([*calls, nodes[-1]]):
        inputs[second].append(first)
    out, copies = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    known = {node.name: node for node in nodes}
    for name in order:
        waiting = [known[name]]
        while waiting:
            node = waiting[-1]
            missing = [other for other in inputs[node] if other not in copies]
            if missing:  # the first one is on top
                waiting += sorted(missing, key=lambda other: places.get(other.name, -1), reverse=True)
                continue
            waiting.pop()
            if node not in copies:
                copies[node] = out.node_copy(node, lambda other: copies[other])
    return out


def _keep_collectives_apart(merge_equal_calls: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps torch from merging equal collectives. Whether two collectives are equal may differ between ranks: a rank with empty
    pieces of both tensors makes two equal calls, and would make one call while its peers make two."""

    from torch._functorch import compile_utils  # noqa: PLC0415  comes with the partitioners

    never_merged: list[Any] = compile_utils.rand_ops  # torch's list of random ops

    def merge(graph: torch.fx.Graph, **options: Any) -> Any:
        collectives = {n.target.overloadpacket for n in graph.nodes if _is_collective(n)} if may_be_of_ours() else set()
        before = len(never_merged)
        never_merged.extend(collectives)
        try:
            return merge_equal_calls(graph, **options)
        finally:
            del never_merged[before:]

    return merge


def _is_collective(node: torch.fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "_c10d_functional" or node.target is torch.ops.shardtensor.defer_call.default


def _is_key(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.shardtensor.next_key.default


def _patch(name: str, wrap: Callable[..., Any], why: str, ask: str) -> Patch:
    return Patch("torch._functorch.partitioners", name, wrap, why, ask, without=REFUSED, turn_off=refuse)


_ORDER = "collectives as effects: run once, where they are called, in order"
PATCHES = (
    _patch("force_save_collectives", _keep_in_place, "a collective runs once, in the forward or in the backward, on all ranks alike.", _ORDER),
    _patch("fx_graph_cse", _keep_collectives_apart, "equal collectives are not merged: they may be equal on one rank only.", _ORDER),
    _patch("is_not_collective", _keep_unused, "unused collectives stay: they may be unused on one rank only.", _ORDER),
    _patch("reordering_to_mimic_autograd_engine", _keep_order, "the backward's collectives stay in the order of tracing.", _ORDER),
    _patch(
        "choose_saved_values_set",
        _keep_saved,
        "a budget of memory must not change which collectives run, nor raise at a mesh.",
        "values that must be saved with every budget; sizes of opaque objects",
    ),
)
