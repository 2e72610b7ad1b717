"""torch._decomp.decompositions: how torch takes ops apart when it makes graphs. All versions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C import DispatchKey


def patch(_: Any) -> None:
    """torch takes some ops apart before autograd when it makes a graph, which it does not in eager mode, or does otherwise. The
    parts may have no rule where the op has one. ShardTensors go eager mode's way."""
    composite = DispatchKey.CompositeImplicitAutograd
    packets = [p for p in vars(torch.ops.aten).values() if isinstance(p, torch._ops.OpOverloadPacket)]
    for op in [op for packet in packets for op in vars(packet).values() if isinstance(op, torch._ops.OpOverload)]:
        if composite in op.py_kernels or DispatchKey.Autograd in op.py_kernels:
            is_composite = _has_kernel(op, "CompositeImplicitAutograd")
            if is_composite and _has_kernel(op, "PrivateUse2"):
                continue  # a rule takes it whole
            eager = functools.partial(op._op_dk, composite if is_composite else DispatchKey.Autograd)
            for key in (DispatchKey.AutogradPrivateUse2, DispatchKey.AutogradOther):  # ours, torchs_autograd()'s
                if not op.has_kernel_for_dispatch_key(key):
                    op.py_impl(key)(eager)


def _has_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)  # type: ignore[no-untyped-call]
