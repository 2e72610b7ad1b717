"""torch._decomp.decompositions: how torch decomposes ops when it makes graphs. All versions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C import DispatchKey

from shardtensor.patches._patch import Patch


def _as_in_eager_mode(decompositions: Any) -> Any:
    """When torch makes a graph, it decomposes some ops before autograd that it does not decompose, or decomposes differently,
    in eager mode. The parts may have no rule although the op has one. So ShardTensors take eager mode's path."""
    composite = DispatchKey.CompositeImplicitAutograd
    packets = [p for p in vars(torch.ops.aten).values() if isinstance(p, torch._ops.OpOverloadPacket)]
    for op in [op for packet in packets for op in vars(packet).values() if isinstance(op, torch._ops.OpOverload)]:
        if composite in op.py_kernels or DispatchKey.Autograd in op.py_kernels:
            is_composite = _has_kernel(op, "CompositeImplicitAutograd")
            if is_composite and _has_kernel(op, "PrivateUse2"):
                continue  # the op itself has a rule
            eager = functools.partial(op._op_dk, composite if is_composite else DispatchKey.Autograd)
            for key in (DispatchKey.AutogradPrivateUse2, DispatchKey.AutogradOther):  # ours, torchs_autograd()'s
                if not op.has_kernel_for_dispatch_key(key):
                    op.py_impl(key)(eager)
    return decompositions


def _has_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)  # type: ignore[no-untyped-call]


PATCHES = (
    Patch(
        "torch._decomp.decompositions",
        "",
        _as_in_eager_mode,
        why="when torch makes a graph it decomposes ops before autograd that it does not decompose in eager mode.",
        ask="decompositions in Python that are chosen per dispatch key",
    ),
)
