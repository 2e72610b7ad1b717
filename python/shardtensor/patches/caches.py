"""torch._functorch._aot_autograd.autograd_cache: which graphs may be cached, and under which key. All versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.patches._graphs import REFUSED, refuse
from shardtensor.patches._patch import Patch
from shardtensor.tensor import _handlers
from shardtensor.tensor._compile import code, functions_in_graphs, hash_of, text_of
from shardtensor.tensor._mesh import innermost_mesh


def _take_our_functions(check: Callable[[torch.fx.Node], None]) -> Callable[[torch.fx.Node], None]:
    """Makes our functions known to torch, which does not cache graphs that call unknown functions. In torch 2.15."""

    def check_others(node: torch.fx.Node) -> None:
        if node.target not in functions_in_graphs:
            check(node)

    return check_others


def _key_with_what_is_not_in_the_graph(make_key: Callable[..., Any]) -> Callable[..., Any]:
    """Adds to the key what our functions read besides their arguments. A key cannot describe users' handlers, so with handlers
    no graph is cached."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache  # noqa: PLC0415  slow: dynamo

    def key(module: Any, *rest: Any, **options: Any) -> Any:
        if _handlers.any_registered():
            raise BypassAOTAutogradCache("shardtensor: handlers are registered, and a cache key cannot describe them")
        of_graph, lines = make_key(module, *rest, **options)
        if any(node.target in functions_in_graphs for node in getattr(module, "gm", module).graph.nodes):
            mesh = innermost_mesh()
            read = code(), torch.distributed.get_rank(), None if mesh is None else text_of(mesh)
            of_graph += hash_of(repr(read).encode())
        return of_graph, lines

    return key


_CACHE = "torch._functorch._aot_autograd.autograd_cache"
PATCHES = (
    Patch(
        _CACHE,
        "check_node_safe",
        _take_our_functions,
        why="torch caches no graph that calls functions unknown to it.",
        ask="a public list of functions that may be in a cached graph, each with its part of the key",
        without="Graphs of ShardTensors are not cached between processes.",
    ),
    Patch(
        _CACHE,
        "autograd_cache_key",
        _key_with_what_is_not_in_the_graph,
        why="a graph of ShardTensors depends on the rank, the mesh and the version of shardtensor, which torch's key does not contain.",
        ask="the same list",
        without=REFUSED,
        turn_off=refuse,
    ),
)
