"""torch.utils.flop_counter: formulas for two ops of ShardTensors. All versions."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.patches._patch import Patch

# torch calls neither op on CPU or CUDA tensors, so it has no formulas for them. Each is two products of the forward's size.


def _linear_backward_flops(
    x: torch.Size, gradient: torch.Size, weight: torch.Size, mask: list[bool], *args: Any, **kwargs: Any
) -> int:
    return 2 * gradient.numel() * weight[-1] * (bool(mask[0]) + bool(mask[1]))


def _matmul_backward_flops(
    gradient: torch.Size, left: torch.Size, right: torch.Size, mask: list[bool], *args: Any, **kwargs: Any
) -> int:
    return 2 * gradient.numel() * left[-1] * (bool(mask[0]) + bool(mask[1]))


def _with_ours(register: Any) -> Any:
    register(torch.ops.aten.linear_backward)(_linear_backward_flops)
    register(torch.ops.aten.matmul_backward)(_matmul_backward_flops)
    return register


PATCHES = (
    Patch(
        "torch.utils.flop_counter",
        "register_flop_formula",
        _with_ours,
        why="linear_backward and matmul_backward get formulas; torch calls neither on CPU or CUDA tensors.",
        ask="the two formulas",
        without="FlopCounterMode does not count the backward of linear and matmul of ShardTensors.",
        at_import=True,  # a FlopCounterMode that is made before the first use copies the table
    ),
)
