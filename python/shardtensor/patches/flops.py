"""torch.utils.flop_counter: formulas for two ops of ShardTensors. All versions."""

from __future__ import annotations

from typing import Any

import torch

# torch calls neither op on CPU or CUDA tensors, so it has no formulas for them. Each is two products of the forward's size.


def _linear_backward_flops(
    x: torch.Size, gradient: torch.Size, weight: torch.Size, mask: list[bool], *args: Any, **kwargs: Any
) -> int:
    return 2 * gradient.numel() * weight[-1] * (bool(mask[0]) + bool(mask[1]))


def _matmul_backward_flops(
    gradient: torch.Size, left: torch.Size, right: torch.Size, mask: list[bool], *args: Any, **kwargs: Any
) -> int:
    return 2 * gradient.numel() * left[-1] * (bool(mask[0]) + bool(mask[1]))


def patch(counter: Any) -> None:
    counter.register_flop_formula(torch.ops.aten.linear_backward)(_linear_backward_flops)
    counter.register_flop_formula(torch.ops.aten.matmul_backward)(_matmul_backward_flops)
