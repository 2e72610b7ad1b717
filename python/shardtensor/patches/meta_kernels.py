"""torch._meta_registrations: kernels for fake tensors. All versions so far lack some whose ops have rules: graphs should hold them
for all sizes, and ranks outside a mesh ask them for the sizes of results."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.patches._patch import Patch

_library: torch.library.Library | None = None  # its kernels live as long as it does


def _with_more(registrations: Any) -> Any:
    global _library
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in ("multi_margin_loss_backward", "multilabel_margin_loss_backward"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):  # type: ignore[no-untyped-call]
            _library.impl(name, _like_input, "Meta")  # type: ignore[no-untyped-call]
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::matmul_backward", "Meta"):  # type: ignore[no-untyped-call]
        _library.impl("matmul_backward", _like_both, "Meta")  # type: ignore[no-untyped-call]
    return registrations


def _like_input(grad: torch.Tensor, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _like_both(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return torch.empty_like(x) if mask[0] else None, torch.empty_like(y) if mask[1] else None


PATCHES = (
    Patch(
        "torch._meta_registrations",
        "",
        _with_more,
        why="ranks outside a mesh, and graphs, ask these kernels for the sizes of results; torch lacks three.",
        ask="meta kernels of multi_margin_loss_backward, multilabel_margin_loss_backward and matmul_backward",
    ),
)
