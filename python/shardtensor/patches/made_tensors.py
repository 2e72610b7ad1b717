"""torch.nn functions in Python that make tensors of their own and use them beside their arguments: nn.MultiheadAttention's
add_zero_attn, nn.init.sparse_. All versions.

An op refuses such a plain tensor among ShardTensors, because it cannot know that it is the same on every rank. Zeros are. The places
that sparse_ draws are not, so a ShardTensor draws its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from shardtensor.patches._patch import Patch
from shardtensor.tensor._modes import implicit_replication
from shardtensor.tensor._tensor import ShardTensor

_ADD_ZERO_ATTN = 9  # its place among multi_head_attention_forward's arguments


def _attention(function: Callable[..., Any]) -> Callable[..., Any]:
    """Its zeros count as replicated. A user's plain tensor does not: ops still refuse it."""

    @functools.wraps(function)
    def attention(*args: Any, **kwargs: Any) -> Any:
        zeros = args[_ADD_ZERO_ATTN] if len(args) > _ADD_ZERO_ATTN else kwargs.get("add_zero_attn")
        if not zeros:
            return function(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not all(isinstance(t, ShardTensor) for t in tensors):
            return function(*args, **kwargs)
        with implicit_replication():
            return function(*args, **kwargs)

    return attention


def _sparse(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def sparse_(tensor: torch.Tensor, sparsity: float, std: float = 0.01, generator: torch.Generator | None = None) -> Any:
        if not isinstance(tensor, ShardTensor) or tensor.ndim != 2:
            return function(tensor, sparsity, std, generator)
        with torch.no_grad():
            tensor.normal_(0, std, generator=generator)
            places = torch.empty_like(tensor, dtype=torch.float64).uniform_(generator=generator).argsort(0).argsort(0)
            return tensor.masked_fill_(places < math.ceil(sparsity * tensor.shape[0]), 0)

    return sparse_


PATCHES = (
    Patch(
        "torch.nn.functional",
        "multi_head_attention_forward",
        _attention,
        why="add_zero_attn makes plain zeros, which ops refuse among ShardTensors.",
        ask="`new_zeros` in place of `torch.zeros`",
        without="Do not use add_zero_attn.",
        by_name=True,
    ),
    Patch(
        "torch.nn.init",
        "sparse_",
        _sparse,
        why="it draws the places of its zeros with a plain tensor, otherwise on each rank.",
        ask="an out-of-place form of sparse_ on the tensor itself",
        without="Initialise with nn.init.sparse_ before distributing.",
        by_name=True,
    ),
)
