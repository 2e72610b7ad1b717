"""torch._functorch._aot_autograd.graph_capture and graph_compile: the order of a graph's nodes, and sizes that become numbers too
late. All versions."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import torch

from shardtensor.patches._graphs import REFUSED, refuse
from shardtensor.patches._patch import Patch
from shardtensor.tensor._compile import is_of_ours, numbers_from_now_on

_WAIT = "_c10d_functional::wait_tensor"
# Ops that only rearrange data that has arrived.
_ARRANGE = {
    f"aten::{name}"
    for name in ("_to_copy", "alias", "cat", "clone", "permute", "slice", "split_with_sizes", "transpose", "view", "view_as_complex")
}


def _waiting_late(trace: Any) -> Any:
    @functools.wraps(trace)
    def traced(*args: Any, **options: Any) -> Any:
        module = trace(*args, **options)
        if is_of_ours():
            _wait_late(module.graph)
            module.recompile()
        return module

    return traced


def _numbers_in_time(trace: Any) -> Any:
    """torch lists the symbols among the sizes of a graph's subclasses before it traces the backward. If the backward makes one a
    number, the list is wrong, and the graph fails when it is made or run. So the compilation starts again, with numbers."""

    @functools.wraps(trace)
    def traced(*args: Any, fw_metadata: Any, **options: Any) -> Any:
        try:
            out = trace(*args, fw_metadata=fw_metadata, **options)
        except Exception as error:
            _start_again_if_settled(fw_metadata, error)
            raise
        _start_again_if_settled(fw_metadata)
        return out

    return traced


def _start_again_if_settled(fw_metadata: Any, cause: Exception | None = None) -> None:
    listed = (fw_metadata.subclass_inp_meta, fw_metadata.subclass_fw_graph_out_meta, fw_metadata.subclass_tangent_meta)
    if is_of_ours() and any(_has_settled(meta) for metas in listed for meta in metas) and numbers_from_now_on():
        from torch._dynamo.exc import TensorifyScalarRestartAnalysis  # noqa: PLC0415  slow: dynamo

        raise TensorifyScalarRestartAnalysis(restart_reason="the backward of a ShardTensor's op needs sizes as numbers") from cause


def _has_settled(meta: Any) -> bool:
    sizes = (*getattr(meta, "outer_size", ()), *getattr(meta, "outer_stride", ()))
    return any(isinstance(n, torch.SymInt) and n.node.maybe_as_int() is not None for n in sizes)


def _wait_late(graph: torch.fx.Graph) -> None:
    """Moves each wait for a collective to the first use of its result, so that other ops run meanwhile. Not past ops that write
    memory: they might write the data that is being sent. Nor from the forward into the backward, if a graph has both: one of
    torch's partitioners treats every node before the last forward node as forward."""
    late: set[torch.fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if _name(node) == _WAIT or (inputs and late.issuperset(inputs) and (_name(node) in _ARRANGE or node.target is operator.getitem)):
            late.add(node)
    barriers = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable]
    backward = (node for node in graph.nodes if node.op != "placeholder" and node.meta.get("partitioner_tag") == "is_backward")
    barriers += itertools.islice(backward, 1)
    for node in reversed(list(graph.nodes)):
        if node not in late:
            continue
        if node.users:
            first = min(node.users)
            min([first, *(b for b in barriers if node < b < first)]).prepend(node)
        elif _name(node) != _WAIT:
            graph.erase_node(node)


def _name(node: torch.fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


PATCHES = (
    Patch(
        "torch._functorch._aot_autograd.graph_capture",
        "_create_graph",
        _waiting_late,
        why="torch waits for a collective where it is called; here other ops run until its result is used.",
        ask="a pass over a graph before it is partitioned, which a subclass may register",
        without="Graphs wait for collectives where they call them.",
    ),
    # The module that calls graph_capture's function, by a name of its own.
    Patch(
        "torch._functorch._aot_autograd.graph_compile",
        "aot_dispatch_autograd_graph",
        _numbers_in_time,
        why="torch lists the symbols of subclasses before it traces the backward, which may make numbers of them.",
        ask="listing the symbols after the backward has been traced",
        without=REFUSED,
        turn_off=refuse,
    ),
)
