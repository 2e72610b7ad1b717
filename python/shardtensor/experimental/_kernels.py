"""Attention of some queries to some keys, with the log of the sum that its weights were divided by: of such parts, the attention
over all keys is a weighted mean. Which kernel runs is torch's choice; none makes the whole matrix of scores.

Queries, keys and values are [batch, heads, sequence, features], with equal heads. `causal`: a query attends to the keys up to its
own place; queries and keys then have one length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

aten = torch.ops.aten

_BLOCK = 1024  # the most queries, and keys, of which by_blocks makes the scores at once
_ALIGNED = 32  # the efficient kernel reads the logs of this many queries at once

Tensors = tuple[torch.Tensor, ...]
# Further results of a kernel's forward that its backward needs. Without dropout, they do not depend on the part.
Extras = tuple[Any, ...]


@dataclass(frozen=True)
class Kernel:
    name: str
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor, Extras]]
    # (gradient, q, k, v, out, total, extras, causal, scale): `out` and `total` are those of all keys.
    backward: Callable[..., Tensors]
    block: int | None = None  # the longest run it takes


def kernel_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Kernel:
    """The kernel that torch would use, also inside `torch.nn.attention.sdpa_kernel`. k and v may have fewer heads."""
    keys, values = (t[:, :1].expand(-1, q.size(1), -1, -1) for t in (k, v))
    choice = torch._fused_sdp_choice(q, keys, values, None, 0.0, False, scale=scale)
    return _KERNELS.get((q.device.type, choice)) or _by_blocks()


# ---- on the CPU ----


def _flash_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor, Extras]:
    out, total = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, total, ()


def _flash_cpu_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, total: torch.Tensor, extras: Extras, causal: bool, scale: float
) -> Tensors:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, total, 0.0, causal, scale=scale)  # type: ignore[no-any-return]


# ---- on CUDA ----


def _padded(t: torch.Tensor) -> torch.Tensor:
    """With the features that the flash kernel needs: a multiple of 8."""
    return F.pad(t, (0, -t.size(-1) % 8))


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor, Extras]:
    out, total, *extras, _ = aten._scaled_dot_product_flash_attention(_padded(q), _padded(k), _padded(v), 0.0, causal, scale=scale)
    return out[..., : v.size(-1)], total, tuple(extras)


def _flash_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, total: torch.Tensor, extras: Extras, causal: bool, scale: float
) -> Tensors:
    cum_q, cum_k, _, _, seed, offset = extras
    wide = [_padded(t) for t in (grad, q, k, v, out)]
    grads = aten._scaled_dot_product_flash_attention_backward(
        *wide, total.contiguous(), cum_q, cum_k, q.size(2), k.size(2), 0.0, causal, seed, offset, scale=scale
    )
    return tuple(g[..., : t.size(-1)] for g, t in zip(grads, (q, k, v), strict=True))


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor, Extras]:
    out, total, *extras = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, total[:, :, : q.size(2)], tuple(extras)


def _efficient_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, total: torch.Tensor, extras: Extras, causal: bool, scale: float
) -> Tensors:
    if torch.version.hip is None:
        total = F.pad(total, (0, -total.size(2) % _ALIGNED), value=torch.inf)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel computes its strides from its sizes
    grads = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, total.contiguous(), *extras, 0.0, [True, True, True, False], causal, scale=scale
    )
    return tuple(grads[:3])


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor, Extras]:
    out, total, *extras, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, total.squeeze(-1), tuple(extras)


def _cudnn_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, total: torch.Tensor, extras: Extras, causal: bool, scale: float
) -> Tensors:
    cum_q, cum_k, _, _, seed, offset = extras
    return aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, total.contiguous().unsqueeze(-1), seed, offset, None, cum_q, cum_k, q.size(2), k.size(2), 0.0, causal, scale=scale
    )


# ---- anywhere ----


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    scores = q.to(wide) @ k.to(wide).mT * scale
    if causal:
        future = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores


def _of_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor, Extras]:
    scores = _scores(q, k, causal, scale)
    total = scores.logsumexp(-1)
    return (scores - total.unsqueeze(-1)).exp().to(v.dtype) @ v, total, ()


def _of_block_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, total: torch.Tensor, extras: Extras, causal: bool, scale: float
) -> Tensors:
    weights = (_scores(q, k, causal, scale) - total.unsqueeze(-1)).exp()
    wide = grad.to(weights.dtype)
    through = wide @ v.to(weights.dtype).mT - (wide * out.to(weights.dtype)).sum(-1, keepdim=True)
    scores = weights * through * scale
    return (scores @ k.to(scores.dtype)).to(q.dtype), (scores.mT @ q.to(scores.dtype)).to(k.dtype), (weights.mT @ wide).to(v.dtype)


def _by_blocks() -> Kernel:
    return Kernel("by blocks", _of_block, _of_block_backward, block=_BLOCK)


_FLASH, _EFFICIENT, _CUDNN = (b.value for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION))
# By device and torch's choice.
_KERNELS = {
    ("cpu", _FLASH): Kernel("flash on the CPU", _flash_cpu, _flash_cpu_backward),
    ("cuda", _FLASH): Kernel("flash", _flash, _flash_backward),
    ("cuda", _EFFICIENT): Kernel("efficient", _efficient, _efficient_backward),
    ("cuda", _CUDNN): Kernel("cudnn", _cudnn, _cudnn_backward),
}
