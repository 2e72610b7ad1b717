"""torch._functorch._aot_autograd.autograd_cache: which graphs may be cached, and under which key. All versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.tensor import _handlers
from shardtensor.tensor._compile import code, functions_in_graphs, hash_of, text_of
from shardtensor.tensor._mesh import innermost_mesh


def patch(cache: Any) -> None:
    if hasattr(cache, "check_node_safe") and hasattr(cache, "autograd_cache_key"):
        cache.check_node_safe = _take_our_functions(cache.check_node_safe)
        cache.autograd_cache_key = _key_with_what_is_not_in_the_graph(cache.autograd_cache_key, cache.BypassAOTAutogradCache)


def _take_our_functions(check: Callable[[torch.fx.Node], None]) -> Callable[[torch.fx.Node], None]:
    """Makes our functions known to torch, which does not cache graphs that call unknown functions. In torch 2.15."""

    def check_others(node: torch.fx.Node) -> None:
        if node.target not in functions_in_graphs:
            check(node)

    return check_others


def _key_with_what_is_not_in_the_graph(make_key: Callable[..., Any], bypass: type[Exception]) -> Callable[..., Any]:
    """Adds to the key what our functions read besides their arguments. A key cannot describe users' handlers, so with handlers
    no graph is cached."""

    def key(module: Any, *rest: Any, **options: Any) -> Any:
        if _handlers.any_registered():
            raise bypass("shardtensor: handlers are registered, and a cache key cannot describe them")
        of_graph, lines = make_key(module, *rest, **options)
        if any(node.target in functions_in_graphs for node in getattr(module, "gm", module).graph.nodes):
            mesh = innermost_mesh()
            read = code(), torch.distributed.get_rank(), None if mesh is None else text_of(mesh)
            of_graph += hash_of(repr(read).encode())
        return of_graph, lines

    return key
