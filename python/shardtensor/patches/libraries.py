"""Other libraries' ops (torch.library.custom_op, TORCH_LIBRARY). All versions.

A kernel for all backends (CompositeExplicitAutograd, as custom_op registers it) serves our dispatch key too, and so comes before
the key's fallback, which gathers. Such a kernel may read memory, so the handler is registered for the op itself: when Python
registers the kernel, or for a C++ library when its op is first looked up. torch's own kernels of this kind call other ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

import shardtensor._C as _C
from shardtensor.patches._patch import Patch
from shardtensor.tensor._handlers import register_below

_TORCHS = {
    *("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "aten", "c10d", "c10d_functional", "coor", "debug_mode_ops"),
    *("flex_gemm", "flex_lib", "fsdp", "inductor", "mempool", "mkldnn", "onednn", "onnx", "onnx_symbolic", "prim", "prims"),
    *("profiler", "quantized", "quantized_decomposed", "rngprims", "shardtensor", "sparse", "streams", "symm_mem"),
}


def _settle(name: str) -> None:
    """`name` as "namespace::op.overload"."""
    if name.partition("::")[0] in _TORCHS:
        return
    op, _, overload = name.partition(".")
    register_below(name, lambda: _C.update_foreign_op(op, overload))


def _after_impl(impl: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        out = impl(self, op_name, fn, dispatch_key, **options)
        if (dispatch_key or self.dispatch_key or "Composite").startswith("Composite"):
            name = str(op_name._schema.name) if isinstance(op_name, OpOverload) else str(op_name)
            if isinstance(op_name, OpOverload) and op_name._schema.overload_name:
                name += "." + op_name._schema.overload_name
            _settle(name if "::" in name else f"{self.ns}::{name}")
        return out

    return wrapped


def _after_lookup(lookup: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, name: str) -> Any:
        packet = lookup(self, name)
        if self.name not in _TORCHS:
            for overload in packet.overloads():
                _settle(f"{self.name}::{name}" + ("" if overload == "default" else "." + overload))
        return packet

    return wrapped


def _settle_all(ops: Any) -> Any:
    for name in torch._C._dispatch_get_all_op_names():
        _settle(name)
    return ops


PATCHES = (
    Patch(
        "torch._ops",
        "",
        _settle_all,
        why="a kernel for all backends would come before the handler of ShardTensors, and read memory that they do not have.",
        ask="a fallback of a key that comes before CompositeExplicitAutograd kernels",
    ),
    Patch("torch.library", "Library.impl", _after_impl, why="the same for kernels that Python registers later.", ask="the same"),
    Patch("torch._ops", "_OpNamespace.__getattr__", _after_lookup, why="the same for C++ libraries that are loaded later.", ask="the same"),
)
