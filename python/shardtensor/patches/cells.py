"""torch.nn.modules.rnn's cells without a state. All versions.

torch makes their zeros with torch.zeros: a plain tensor, which an op refuses among ShardTensors, because it cannot know that it is
the same on every rank. Here they are made as a ShardTensor on the input's mesh, cut as the input is along the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardtensor.patches._patch import Patch
from shardtensor.tensor._tensor import ShardTensor


def _with_zeros(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The cell's forward() gets `count` tensors of zeros as its state if it is given none."""

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def with_zeros(self: Any, input: Any, hx: Any = None) -> Any:
            if hx is None and isinstance(input, ShardTensor):
                zeros = input.new_zeros((*input.shape[:-1], self.hidden_size))
                hx = zeros if count == 1 else (zeros,) * count
            return forward(self, input, hx)

        return with_zeros

    return around


PATCHES = tuple(
    Patch(
        "torch.nn.modules.rnn",
        f"{cell}.forward",
        _with_zeros(count),
        why="a cell without a state makes a plain tensor of zeros, which ops refuse among ShardTensors.",
        ask="`input.new_zeros` in place of `torch.zeros`",
        without="Pass the cell its first state.",
    )
    for cell, count in (("RNNCell", 1), ("GRUCell", 1), ("LSTMCell", 2))
)
