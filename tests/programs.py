"""Random programs on ShardTensors beside the same on plain tensors: views of views, writes through them, gradients.

A seed determines a program, so that every rank runs the same one. Inputs may be permuted or expanded, and a rank may hold nothing.
After each step all live tensors are compared, and at the end the gradients, which arrive in any layout. If plain torch raises,
all ranks must raise. test_programs.py runs a few programs;
`python tests/programs.py [--mesh 2x2] [--first 0] [--count 200] [--steps 25] [--grad] [--dtype float32] [--graphs]` runs any number.
With `--compile aot_eager` the whole program also runs compiled (compiled_programs.py).
"""

from __future__ import annotations

import math
import sys
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

LARGEST = 500  # elements; a larger tensor, or one with values beyond 1e4, is dropped
ALIVE = 8  # tensors at a time
BATCH = 10  # programs sent to the ranks at once


class Op(NamedTuple):
    """`run` draws its other arguments from a Random, which gives the same numbers for both kinds of tensors."""

    name: str
    run: Callable[..., torch.Tensor]  # (Random, operands...)
    ndim: int = 0  # the smallest ndim of its first operand
    operands: int = 1
    fits: Callable[..., bool] | None = None
    writes: bool = False


def _dim(r: Random, x: torch.Tensor) -> int:
    return r.randrange(-x.ndim, x.ndim)


def _along(r: Random, x: torch.Tensor, what: Callable[[int], Any]) -> tuple[Any, ...]:
    """An index: what(size) at a random dim, everything along the others."""
    d = r.randrange(x.ndim)
    return (slice(None),) * d + (what(x.shape[d]),)


def _part(r: Random, n: int) -> slice:
    start = r.randint(0, n)
    return slice(start, r.randint(start, n), r.choice([1, 1, 1, 2]))


def _one(r: Random, n: int) -> int:
    return r.randrange(-n, n) if n else 0


def _some(r: Random, n: int) -> torch.Tensor:
    return torch.tensor([_one(r, n) for _ in range(r.randint(0, 4))] if n else [], dtype=torch.long)


def _factor(r: Random, n: int) -> int:
    return r.choice([k for k in range(1, max(n, 1) + 1) if n % k == 0])


def _sizes(r: Random, n: int) -> list[int]:
    """Random sizes with n elements."""
    out = []
    while len(out) < r.randint(0, 3):
        out.append(_factor(r, n))
        n //= out[-1]
    out.append(n)
    r.shuffle(out)
    return out


def _any_of(r: Random, pieces: Any) -> torch.Tensor:
    return pieces[int(r.random() * len(pieces))]


def _places(r: Random, x: torch.Tensor, d: int) -> torch.Tensor:
    """An index for gather and scatter along dim d, alike along the others: no more places than the dim has, each once."""
    n = x.shape[d]
    places = r.sample(range(n), r.randint(0, n))
    return torch.tensor(places, dtype=torch.long).view([-1] + [1] * (x.ndim - 1 - d % x.ndim)).expand(_with(x.shape, d, len(places)))


def _with(sizes: Sequence[int], d: int, n: int) -> list[int]:
    out = list(sizes)
    out[d] = n
    return out


def _some_dims(r: Random, x: torch.Tensor) -> list[int]:
    return r.sample(range(-x.ndim, 0), r.randint(1, x.ndim))


def _sampled(r: Random, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """grid_sample of an image [N, C, H, W] at points near [h, w]."""
    points = torch.stack([grid.tanh() * 1.2, grid.detach() * 0.3], -1).expand(x.shape[0], *grid.shape, 2)
    return F.grid_sample(
        x, points, r.choice(["bilinear", "nearest", "bicubic"]), r.choice(["zeros", "border", "reflection"]), r.random() < 0.5
    )


def _unpooled(x: torch.Tensor, k: int, space: int) -> torch.Tensor:
    pool, back = ((F.max_pool1d, F.max_unpool1d), (F.max_pool2d, F.max_unpool2d))[space - 1]
    return back(*pool(x, k, k, return_indices=True), k, k, output_size=x.shape[-space:])


def _in_windows(r: Random, x: torch.Tensor) -> torch.Tensor:
    """Attention in shifted windows of two rows."""
    n = x.shape[-2]
    rows = F.pad(x, (0, 0, 0, n % 2)).roll(r.randint(0, 1), -2).unflatten(-2, (-1, 2))
    return F.scaled_dot_product_attention(rows, rows, rows).flatten(-3, -2)[..., :n, :]


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x).sum(-1)


def _row(r: Random, x: torch.Tensor) -> Any:
    """One row or a few, taken in any way; with a zero of each sign at times."""
    d = _dim(r, x)
    x = x * r.choice([1, 1, 1, 0, -1])
    n = x.shape[d]
    if r.random() < 0.3:
        return x.select(d, _one(r, n))
    ways = [lambda: x[_one(r, x.shape[0])], lambda: _any_of(r, x.unbind(d)), lambda: x[[_one(r, x.shape[0])] * 2]]
    return r.choice(ways)()


def _narrow(r: Random, x: torch.Tensor) -> torch.Tensor:
    """Integers or truth values whose sums may wrap, and their sum."""
    dtype = r.choice([torch.uint8, torch.int8, torch.int32, torch.bool])
    x = (x.detach() * 40).long().to(dtype) if dtype != torch.bool else x.detach() > 0
    return x.sum(_dim(r, x), dtype=r.choice([dtype, torch.uint8]))


def _compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """A graph for ShardTensors; f itself for plain tensors."""

    def run(r: Random, *tensors: Any) -> Any:
        if type(tensors[0]) is torch.Tensor:
            return f(*tensors)
        return torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=False)(*tensors)

    return run


def _listed(x: Any, run: Callable[[list[Any]], Any]) -> Any:
    """x, after `run` has written a list of it, a part of it and itself again."""
    run([x, x[:1], x])
    return x


class Step(NamedTuple):
    """An op and its operands: tensors are numbered in the order in which they were made."""

    run: Callable[..., torch.Tensor]
    numbers: Sequence[int]
    makes: int | None  # None if it writes


class Again:
    """Replays the numbers that a Random gave: dynamo does not trace a Random that chooses from a list."""

    def __init__(self, given: list[Any]) -> None:
        self.given, self.at = given, 0

    def next(self, *_: Any) -> Any:
        self.at += 1
        return self.given[self.at - 1]

    random = randint = randrange = choice = sample = next

    def shuffle(self, values: list[Any]) -> None:
        values[:] = self.next()


class Kept:
    """A Random that records its numbers."""

    def __init__(self, r: Random) -> None:
        self.r, self.given = r, list[Any]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def draw(*arguments: Any) -> Any:
            out = getattr(self.r, name)(*arguments)
            self.given.append(list(arguments[0]) if name == "shuffle" else out)
            return out

        return draw


# ---- the ops: of one tensor; `r` are the random numbers ----

VIEWS: dict[str, tuple[int, Callable[..., Any]]] = {
    "part": (1, lambda r, x: x[_along(r, x, lambda n: _part(r, n))]),
    "parts": (2, lambda r, x: x[_part(r, x.shape[0]), _part(r, x.shape[1])]),
    "one": (1, lambda r, x: x[_along(r, x, lambda n: _one(r, n))]),
    "transpose": (1, lambda r, x: x.transpose(_dim(r, x), _dim(r, x))),
    "permute": (1, lambda r, x: x.permute(r.sample(range(x.ndim), x.ndim))),
    "movedim": (1, lambda r, x: x.movedim(_dim(r, x), _dim(r, x))),
    "mT": (2, lambda r, x: x.mT),
    "reshape": (0, lambda r, x: x.reshape(_sizes(r, x.numel()))),
    "view": (0, lambda r, x: x.view(_sizes(r, x.numel()))),
    "flatten": (0, lambda r, x: x.flatten()),
    "flatten_some": (2, lambda r, x: x.flatten(*sorted(r.sample(range(x.ndim), 2)))),
    "unflatten": (1, lambda r, x: (lambda d: x.unflatten(d, (_factor(r, x.shape[d]), -1)))(_dim(r, x))),
    "unsqueeze": (0, lambda r, x: x.unsqueeze(r.randrange(-x.ndim - 1, x.ndim + 1))),
    "squeeze": (0, lambda r, x: x.squeeze()),
    "squeeze_one": (1, lambda r, x: x.squeeze(_dim(r, x))),
    "expand": (1, lambda r, x: x.expand([n if n != 1 else r.randint(0, 3) for n in x.shape])),
    "split": (1, lambda r, x: (lambda d: _any_of(r, x.split(r.randint(1, x.shape[d] + 1), d)))(_dim(r, x))),
    "chunk": (1, lambda r, x: _any_of(r, x.chunk(r.randint(1, 4), _dim(r, x)))),
    "unbind": (1, lambda r, x: _any_of(r, x.unbind(_dim(r, x)))),
    "diagonal": (2, lambda r, x: x.diagonal(r.randint(-1, 1), -2, -1)),
    "unfold": (1, lambda r, x: x.unfold(_dim(r, x), r.randint(1, 3), r.randint(1, 2))),
    "view_as": (0, lambda r, x: x.view(x.shape)),
    "contiguous": (0, lambda r, x: x.contiguous()),
    "detach": (0, lambda r, x: x.detach()),
}  # fmt: skip

VALUES: dict[str, tuple[int, Callable[..., Any]]] = {
    "clone": (0, lambda r, x: x.clone()),
    "exp": (0, lambda r, x: x.clamp(-3, 3).exp()),
    "neg": (0, lambda r, x: -x),
    "abs": (0, lambda r, x: x.abs()),
    "tanh": (0, lambda r, x: x.tanh()),
    "sigmoid": (0, lambda r, x: x.sigmoid()),
    "gelu": (0, lambda r, x: F.gelu(x)),
    "silu": (0, lambda r, x: F.silu(x) * F.softplus(x) - F.leaky_relu(x)),
    "elu": (0, lambda r, x: F.hardtanh(x) + F.elu(x)),
    "affine": (0, lambda r, x: x * 0.5 + 1),
    "float": (0, lambda r, x: x.float().to(x.dtype)),
    "mixed": (0, lambda r, x: (x.float() * x).to(x.dtype)),
    "int": (0, lambda r, x: (x.detach() * 2).int().to(x.dtype)),
    "compared": (0, lambda r, x: ((x > 0) & (x < 1) | ~(x > -1)).to(x.dtype)),
    "where": (0, lambda r, x: torch.where(x > 0, x, -x * 2)),
    "masked_fill": (0, lambda r, x: x.masked_fill(x > 0.3, 0.1)),
    "masked": (0, lambda r, x: x[x > 0]),
    "masked_select": (0, lambda r, x: x.masked_select(x > 0.1)),
    "masked_scatter": (0, lambda r, x: x.masked_scatter(x > 0, x.flatten())),
    "nonzero": (0, lambda r, x: (x > 0.3).nonzero().to(x.dtype)),
    "nan_to_num": (0, lambda r, x: torch.nan_to_num(torch.where(x > 0, x, float("nan")), 0.5)),
    "addcmul": (0, lambda r, x: torch.addcmul(x, x, x.tanh(), value=0.3)),
    "clamp_by": (0, lambda r, x: x.clamp(x.detach().mean(), x.detach().mean() + 1)),
    "new_full": (0, lambda r, x: x.new_full(x.shape, 0.5) * x),
    "sum": (0, lambda r, x: x.sum()),
    "mean": (0, lambda r, x: x.mean()),
    "norm": (0, lambda r, x: torch.linalg.vector_norm(x + 2, r.choice([1, 2, 3, math.inf]))),
    "sum_dim": (1, lambda r, x: x.sum(_dim(r, x), keepdim=r.random() < 0.5)),
    "mean_dim": (1, lambda r, x: x.mean(_dim(r, x), keepdim=r.random() < 0.5)),
    "amax": (1, lambda r, x: x.amax(_dim(r, x), keepdim=r.random() < 0.5)),
    "amin": (1, lambda r, x: x.amin(_dim(r, x), keepdim=r.random() < 0.5)),
    "max": (1, lambda r, x: x.max(_dim(r, x)).values),
    "aminmax": (1, lambda r, x: torch.aminmax(x, dim=_dim(r, x)).max),
    "prod": (1, lambda r, x: x.prod(_dim(r, x))),
    "logsumexp": (1, lambda r, x: x.logsumexp(_dim(r, x))),
    "var": (1, lambda r, x: x.var(_dim(r, x), correction=0)),
    "var_mean": (1, lambda r, x: torch.var_mean(x, _dim(r, x), correction=0)[1]),
    "norm_dim": (1, lambda r, x: (x * x + 1).norm(dim=_dim(r, x))),
    "any": (1, lambda r, x: (x > 0.2).any(_dim(r, x)).to(x.dtype)),
    "all": (1, lambda r, x: (x > -1).all(_dim(r, x)).to(x.dtype)),
    "count": (1, lambda r, x: torch.count_nonzero(x > 0.1, _dim(r, x)).to(x.dtype)),
    "sum_long": (1, lambda r, x: (x * 3).detach().long().sum(_dim(r, x)).to(x.dtype)),
    "median": (1, lambda r, x: x.median(_dim(r, x)).values),
    "kthvalue": (1, lambda r, x: x.kthvalue(1, _dim(r, x)).values),
    "quantile": (1, lambda r, x: x.quantile(0.3, _dim(r, x))),
    "softmax": (1, lambda r, x: x.softmax(_dim(r, x))),
    "log_softmax": (1, lambda r, x: x.log_softmax(_dim(r, x))),
    "cumsum": (1, lambda r, x: x.cumsum(_dim(r, x))),
    "cummax": (1, lambda r, x: x.cummax(_dim(r, x)).values),
    "cumprod": (1, lambda r, x: (x.tanh() + 1.5).cumprod(_dim(r, x)).tanh()),
    "logcumsumexp": (1, lambda r, x: x.logcumsumexp(_dim(r, x))),
    "flip": (1, lambda r, x: x.flip(_dim(r, x))),
    "roll": (1, lambda r, x: x.roll(r.randint(-3, 3), _dim(r, x))),
    "sort": (1, lambda r, x: x.sort(_dim(r, x)).values),
    "sorted_by": (1, lambda r, x: (lambda d: torch.take_along_dim(x * 2, x.argsort(d), d))(_dim(r, x))),
    "topk": (1, lambda r, x: (lambda d: x.topk(r.randint(0, x.shape[d]), d).values)(_dim(r, x))),
    "largest": (1, lambda r, x: (lambda d: x.gather(d, x.argmax(d, keepdim=True)))(_dim(r, x))),
    "diff": (1, lambda r, x: x.diff(dim=_dim(r, x))),
    "tril": (2, lambda r, x: x.tril(r.randint(-2, 2))),
    "triu": (2, lambda r, x: x.triu(r.randint(-2, 2))),
    "trace": (2, lambda r, x: x.trace()),
    "diag": (1, lambda r, x: x.diag()),
    "diag_embed": (1, lambda r, x: x.diag_embed()),
    "rot90": (2, lambda r, x: x.rot90()),
    "pad": (1, lambda r, x: F.pad(x, (r.randint(-1, 2), r.randint(0, 2)))),
    "pad_reflect": (2, lambda r, x: F.pad(x, (1, 1), mode="reflect")),
    "pad_circular": (2, lambda r, x: F.pad(x, (1, 1), mode="circular")),
    "repeat": (1, lambda r, x: x.repeat([r.randint(1, 2) for _ in x.shape])),
    "repeat_each": (1, lambda r, x: x.repeat_interleave(2, _dim(r, x))),
    "tile": (0, lambda r, x: x.tile(2)),
    "hstack": (0, lambda r, x: torch.hstack([x, x * 2])),
    "index_select": (1, lambda r, x: (lambda d: x.index_select(d, _some(r, x.shape[d]).abs()))(_dim(r, x))),
    "rows": (1, lambda r, x: x[_some(r, x.shape[0])]),
    "take": (1, lambda r, x: x.take(_some(r, x.numel()))),
    "index_add": (1, lambda r, x: torch.zeros_like(x).index_add(0, torch.zeros(x.shape[0], dtype=torch.long), x)),
    "index_put": (1, lambda r, x: x.index_put((torch.tensor([0, x.shape[0] - 1]),), x[:1] * 2)),
    "index_put_added": (1, lambda r, x: x.index_put((torch.tensor([0, 0]),), x[:1] * 2, accumulate=True)),
    "scatter_add": (1, lambda r, x: x.scatter_add(0, torch.zeros_like(x, dtype=torch.long), x)),
    "scatter_max": (1, lambda r, x: x.scatter_reduce(0, torch.zeros_like(x, dtype=torch.long), x * 2, "amax")),
    "layer_norm": (1, lambda r, x: F.layer_norm(x, x.shape[-1:])),
    "rms_norm": (1, lambda r, x: F.rms_norm(x, x.shape[-1:], eps=1e-5)),
    "batch_norm": (2, lambda r, x: F.batch_norm(x, None, None, training=True)),
    "group_norm": (2, lambda r, x: F.group_norm(x, _factor(r, x.shape[1]))),
    "normalize": (1, lambda r, x: F.normalize(x + 2, dim=_dim(r, x))),
    "renorm": (2, lambda r, x: x.renorm(2, 0, 1.0)),
    "glu": (1, lambda r, x: F.glu(x, _dim(r, x))),
    "prelu": (2, lambda r, x: F.prelu(x, x.flatten()[:1])),
    "gram": (2, lambda r, x: (x @ x.mT).softmax(-1) @ x),
    "addmm": (2, lambda r, x: torch.addmm(x, x, x.mT @ x).tanh()),
    "baddbmm": (3, lambda r, x: torch.baddbmm(x, x, x.mT @ x).tanh()),
    "einsum": (2, lambda r, x: torch.einsum("...ij,...kj->...ik", x, x).tanh()),
    "einsum_rows": (1, lambda r, x: torch.einsum("i...,i...->...", x, x).tanh()),
    "linear": (2, lambda r, x: F.linear(x, x[:2], x[:2, 0]).tanh()),
    "kron": (1, lambda r, x: torch.kron(x, x[:1])),
    "cov": (2, lambda r, x: x.cov(correction=0)),
    "cdist": (2, lambda r, x: torch.cdist(x, x + 1)),
    "similarity": (1, lambda r, x: F.cosine_similarity(x, x + 1, dim=_dim(r, x))),
    "conv1d": (3, lambda r, x: F.conv1d(x, x[:2, :, :2] * 0.3, padding=r.randint(0, 2), stride=r.randint(1, 2)).tanh()),
    "conv2d": (3, lambda r, x: F.conv2d(x[None], x[None, :, :2, :2] * 0.3, padding=r.randint(0, 1)).tanh()[0]),
    "max_pool": (3, lambda r, x: (lambda k: F.max_pool1d(x, k, r.randint(1, 3), padding=k // 2))(r.randint(1, 3))),
    "avg_pool": (3, lambda r, x: F.avg_pool1d(x, r.randint(1, 3), 1)),
    "adaptive_pool": (3, lambda r, x: F.adaptive_avg_pool1d(x, r.randint(1, 3))),
    "interpolate": (3, lambda r, x: F.interpolate(x, scale_factor=2.0, mode="nearest")),
    "image_unfold": (3, lambda r, x: F.unfold(x[None], 2)[0]),
    "pixel_unshuffle": (3, lambda r, x: F.pixel_unshuffle(x[None], 2)[0]),
    "cross_entropy": (2, lambda r, x: F.cross_entropy(x, x.detach().argmax(1), reduction=r.choice(["none", "mean", "sum"]))),
    "cross_entropy_soft": (2, lambda r, x: F.cross_entropy(x, x.detach().softmax(1), label_smoothing=0.1)),
    "embedding": (2, lambda r, x: F.embedding(x.detach()[0].abs().long().clamp(0, x.shape[0] - 1), x)),
    "attention": (3, lambda r, x: F.scaled_dot_product_attention(*[x[None]] * 3, is_causal=r.random() < 0.5)[0]),
    "smooth_l1": (0, lambda r, x: F.smooth_l1_loss(x, x * 2, reduction="none")),
    "bce": (1, lambda r, x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid())),
    "bucketize": (0, lambda r, x: torch.bucketize(x.detach(), torch.tensor([-1.0, 0.0, 1.0]).to(x.dtype)).to(x.dtype)),
    "searchsorted": (1, lambda r, x: (lambda v: torch.searchsorted(v.sort(-1).values, v).to(x.dtype))((x.detach() * 8).round())),
    "complex": (0, lambda r, x: torch.complex(x, x * 2).abs()),
    "fft": (1, lambda r, x: torch.view_as_real(torch.fft.fft(x, dim=-1)).sum(-1)),
    "svdvals": (2, lambda r, x: torch.linalg.svdvals(x)),
    "unique": (0, lambda r, x: x.detach().round().unique()),
    # Across cuts: scans, order, places, windows, waves.
    "cummin": (1, lambda r, x: x.cummin(_dim(r, x))[r.choice([0, 1])].to(x.dtype)),
    "cummax_at": (1, lambda r, x: x.cummax(_dim(r, x)).indices.to(x.dtype)),
    "cumsum_back": (1, lambda r, x: (lambda d: x.flip(d).cumsum(d).flip(d))(_dim(r, x))),
    "diff_more": (1, lambda r, x: (lambda d: x.diff(r.randint(1, 3), d, prepend=x.narrow(d, 0, 1) * 2))(_dim(r, x))),
    "gradient": (1, lambda r, x: torch.gradient(x, dim=_dim(r, x), edge_order=r.randint(1, 2))[0]),
    "trapezoid": (1, lambda r, x: torch.cumulative_trapezoid(x, dim=_dim(r, x))),
    "kth": (1, lambda r, x: (lambda d: x.kthvalue(r.randint(1, max(x.shape[d], 1)), d).values)(_dim(r, x))),
    "smallest": (1, lambda r, x: (lambda d: x.topk(r.randint(0, x.shape[d]), d, largest=False).values)(_dim(r, x))),
    "sort_down": (1, lambda r, x: x.sort(_dim(r, x), descending=True, stable=True)[r.choice([0, 1])].to(x.dtype)),
    "nanmedian": (1, lambda r, x: x.nanmedian(_dim(r, x)).values),
    "mode": (1, lambda r, x: (x.detach() * 2).round().mode(_dim(r, x)).values),
    "gather": (1, lambda r, x: (lambda d: x.gather(d, _places(r, x, d)))(_dim(r, x))),
    "scatter": (1, lambda r, x: (lambda d: x.scatter(d, _places(r, x, d), x * 2))(_dim(r, x))),
    "scatter_to": (1, lambda r, x: (lambda d: torch.zeros_like(x).scatter_add(d, _places(r, x, d), x))(_dim(r, x))),
    "scatter_mean": (
        1,
        lambda r, x: (lambda d: x.scatter_reduce(d, _places(r, x, d), x * 2, "mean", include_self=r.random() < 0.5))(_dim(r, x)),
    ),
    "index_copy": (1, lambda r, x: (lambda d: x.index_copy(d, torch.arange(min(2, x.shape[d])), x.narrow(d, 0, 2) * 2))(_dim(r, x))),
    "index_add_dim": (1, lambda r, x: (lambda d: x.index_add(d, torch.zeros(x.shape[d], dtype=torch.long), x))(_dim(r, x))),
    "index_put_two": (2, lambda r, x: x.index_put((torch.arange(min(x.shape[:2])), torch.tensor(0)), x[: min(x.shape[:2]), 0] * 2)),
    "rows_of_both": (2, lambda r, x: x[_some(r, x.shape[0])[:, None], _some(r, x.shape[1])]),
    "columns": (2, lambda r, x: x[:, _some(r, x.shape[1])]),
    "select_scatter": (1, lambda r, x: (lambda d: x.select_scatter(x.select(d, 0) * 2, d, -1))(_dim(r, x))),
    "slice_scatter": (1, lambda r, x: (lambda d: x.slice_scatter(x.narrow(d, 0, x.shape[d] // 2) * 2, d, 0, x.shape[d] // 2))(_dim(r, x))),
    "repeat_more": (1, lambda r, x: x.repeat([r.randint(1, 2), *(r.choice([1, 1, 3, 5]) for _ in x.shape)])),
    "repeat_by": (1, lambda r, x: (lambda d: x.repeat_interleave(torch.tensor([k % 3 for k in range(x.shape[d])]), d))(_dim(r, x))),
    "roll_two": (2, lambda r, x: x.roll((r.randint(-3, 3), r.randint(-3, 3)), (-2, -1))),
    "fftshift": (1, lambda r, x: torch.fft.fftshift(x, _dim(r, x))),
    "fft_dim": (1, lambda r, x: _real(torch.fft.fft(x, dim=_dim(r, x), norm=r.choice(["forward", "backward", "ortho"])))),
    "fft_long": (1, lambda r, x: (lambda d: _real(torch.fft.fft(x, r.randint(1, 9), d)))(_dim(r, x))),
    "fftn": (1, lambda r, x: _real(torch.fft.fftn(x, dim=_some_dims(r, x)))),
    "ifft2": (2, lambda r, x: _real(torch.fft.ifft2(torch.complex(x, x.cos())))),
    "rfftn": (1, lambda r, x: _real(torch.fft.rfftn(x, dim=_some_dims(r, x)))),
    "irfft": (1, lambda r, x: torch.fft.irfft(torch.complex(x, x.cos()), dim=_dim(r, x))),
    "irfftn": (2, lambda r, x: torch.fft.irfftn(torch.complex(x, x.cos()), [r.randint(2, 6), r.randint(2, 6)], r.sample(range(-x.ndim, 0), 2))),
    "spectrum": (1, lambda r, x: (lambda d: torch.fft.irfftn(torch.fft.rfftn(x, dim=d).mul(0.5), [x.shape[k] for k in d], d))(_some_dims(r, x))),
    "stft": (2, lambda r, x: _real(torch.stft(x[0].flatten(), 4, r.randint(1, 3), window=torch.ones(4, dtype=x.dtype), return_complex=True))),
    "conv1d_grouped": (3, lambda r, x: F.conv1d(x, x[0, :, None, :3] * 0.3, padding=r.randint(0, 2), dilation=r.randint(1, 2), groups=x.shape[1])),
    "conv2d_far": (
        3,
        lambda r, x: F.conv2d(x[:, None], x[:1, None, :3, :2] * 0.3, None, r.randint(1, 3), r.randint(0, 2), r.randint(1, 2)).tanh()[:, 0],
    ),
    "conv3d": (3, lambda r, x: F.conv3d(x[None, None], x[None, None, :2, :2, :3] * 0.3, padding=(0, 1, 1)).tanh()[0, 0]),
    "conv_transpose1d": (
        3,
        lambda r, x: (lambda s: F.conv_transpose1d(x, x.transpose(0, 1)[:, :2, :3] * 0.3, None, s, r.randint(0, 1), r.randint(0, s - 1)))(
            r.randint(1, 3)
        ).tanh(),
    ),
    "conv_transpose2d": (
        3, lambda r, x: F.conv_transpose2d(x[None], x[:, None, :2, :3] * 0.3, None, r.randint(1, 2), r.randint(0, 1)).tanh()[0],
    ),
    "max_pool2d": (3, lambda r, x: F.max_pool2d(x, r.randint(1, 3), r.randint(1, 3), 0, r.randint(1, 2), r.random() < 0.5)),
    "max_pool_at": (3, lambda r, x: F.max_pool2d(x[None], 2, 1, 1, return_indices=True)[1][0].to(x.dtype)),
    "avg_pool2d": (3, lambda r, x: F.avg_pool2d(x, (2, 3), r.randint(1, 2), 1, r.random() < 0.5, r.random() < 0.5)),
    "lp_pool1d": (3, lambda r, x: F.lp_pool1d(x.abs() + 0.1, 3, r.randint(1, 3), r.randint(1, 2), r.random() < 0.5)),
    "lp_pool2d": (3, lambda r, x: F.lp_pool2d(x.abs() + 0.1, 2, (2, 1), r.randint(1, 2))),
    "adaptive_max_pool": (3, lambda r, x: F.adaptive_max_pool1d(x, r.randint(1, 4))),
    "adaptive_max_pool2d": (3, lambda r, x: F.adaptive_max_pool2d(x, (r.randint(1, 3), r.randint(1, 4)))),
    "adaptive_avg_pool2d": (3, lambda r, x: F.adaptive_avg_pool2d(x, (r.randint(1, 4), r.randint(1, 3)))),
    "fractional_pool": (
        3,
        lambda r, x: F.fractional_max_pool2d(
            x, 2, (max(x.shape[1] // 2, 1), max(x.shape[2] - 1, 1)), _random_samples=torch.full((1, x.shape[0], 2), r.random(), dtype=x.dtype)
        ),
    ),
    "max_unpool1d": (3, lambda r, x: _unpooled(x, r.randint(1, 3), 1)),
    "max_unpool2d": (3, lambda r, x: _unpooled(x, r.randint(1, 2), 2)),
    "grid_sample": (3, lambda r, x: _sampled(r, x[None], x[0])[0]),
    "grid_sample_of_one": (3, lambda r, x: _sampled(r, x[:, None], x[0, :2])[:, 0]),
    "interpolate_nearest": (3, lambda r, x: F.interpolate(x, r.randint(1, 8), mode=r.choice(["nearest", "nearest-exact", "area"]))),
    "interpolate_linear": (3, lambda r, x: F.interpolate(x, r.randint(1, 8), mode="linear", align_corners=r.random() < 0.5)),
    "interpolate_scaled": (3, lambda r, x: F.interpolate(x, scale_factor=r.choice([0.5, 1.3, 2.5]), mode=r.choice(["linear", "area", "nearest-exact"]))),
    # torch's antialiased kernel is wrong for one column.
    "interpolate2d": (
        3,
        lambda r, x: (
            lambda size: F.interpolate(x[None], size, mode=r.choice(["bilinear", "bicubic"]), antialias=size[1] > 1 and r.random() < 0.5)
        )((r.randint(1, 6), r.randint(1, 6)))[0],
    ),
    "interpolate2d_scaled": (3, lambda r, x: F.interpolate(x[:, None], scale_factor=(1.5, 0.7), mode="bicubic", align_corners=r.random() < 0.5)[:, 0]),
    "interpolate3d": (3, lambda r, x: F.interpolate(x[None, None], (r.randint(1, 4), 3, r.randint(1, 4)), mode="trilinear")[0, 0]),
    "local_response_norm": (3, lambda r, x: F.local_response_norm(x, r.randint(1, 3))),
    "instance_norm": (3, lambda r, x: F.instance_norm(x)),
    "pixel_shuffle": (3, lambda r, x: F.pixel_shuffle(torch.cat([x] * 4, -3), 2)),
    "channel_shuffle": (3, lambda r, x: F.channel_shuffle(x, _factor(r, x.shape[1]))),
    "pad_reflect2d": (3, lambda r, x: F.pad(x, (1, 0, r.randint(0, 2), 1), mode="reflect")),
    "pad_replicate": (2, lambda r, x: F.pad(x, (r.randint(0, 3), r.randint(0, 2)), mode="replicate")),
    "pad_circular2d": (3, lambda r, x: F.pad(x, (1, 0, r.randint(0, 2), 1), mode="circular")),
    "image_unfold_far": (3, lambda r, x: F.unfold(x[None], (2, 1), r.randint(1, 2), r.randint(0, 1), r.randint(1, 2))[0]),
    "image_fold": (3, lambda r, x: F.fold(F.unfold(x[None], 2), x.shape[1:], 2)[0]),
    "in_windows": (2, _in_windows),
    "image_loss": (3, lambda r, x: F.cross_entropy(x, x.detach().argmax(1), reduction=r.choice(["none", "mean"]))),
    "attention_of_few": (3, lambda r, x: F.scaled_dot_product_attention(x[:, :2], x, x)),
    "embedding_bag": (2, lambda r, x: F.embedding_bag(torch.zeros(3, dtype=torch.long), x, torch.tensor([0, 1]), mode=r.choice(["sum", "mean"]))),
    # One rank's rows, used again; sums that wrap, widened; graphs.
    "row_times_inf": (1, lambda r, x: _row(r, x) * torch.tensor(r.choice([math.inf, -math.inf, math.nan, 2]), dtype=x.dtype)),
    "row_over": (1, lambda r, x: 1 / _row(r, x)),
    "row_by": (1, lambda r, x: _row(r, x) / _row(r, x)),
    "row_angle": (1, lambda r, x: torch.atan2(_row(r, x), torch.tensor(-1.0, dtype=x.dtype))),
    "row_cast": (1, lambda r, x: _row(r, x).to(r.choice([torch.float64, torch.float32, torch.int32, torch.bool])).to(x.dtype)),
    "row_where": (1, lambda r, x: (lambda row: torch.where(row > 0, row, torch.tensor(r.choice([-0.5, 7]), dtype=x.dtype)))(_row(r, x))),
    "row_cat": (1, lambda r, x: (lambda row: torch.cat([row.flatten(), row.flatten().detach() > 0, row.flatten().int()]))(_row(r, x))),
    "row_exp": (1, lambda r, x: _row(r, x).clamp(-3, 3).exp() + _row(r, x).sum()),
    "wrapped": (1, lambda r, x: _narrow(r, x).to(x.dtype)),
    "wrapped_neg": (1, lambda r, x: (-_narrow(r, x)).to(x.dtype)),
    "wrapped_times": (1, lambda r, x: (_narrow(r, x) * r.choice([2.5, 3])).to(x.dtype)),
    "wrapped_plus": (1, lambda r, x: (_narrow(r, x) + torch.tensor([300])).to(x.dtype)),
    "wrapped_less": (1, lambda r, x: (torch.tensor(1000) - _narrow(r, x)).to(x.dtype)),
    "wrapped_where": (1, lambda r, x: (lambda s: torch.where(s > 3, s, torch.tensor([-7])).to(x.dtype))(_narrow(r, x))),
    "wrapped_cat": (1, lambda r, x: (lambda s: torch.cat([s.flatten(), s.flatten().long(), s.flatten() > 1]).to(x.dtype))(_narrow(r, x))),
    "wrapped_prod": (1, lambda r, x: (x.detach() * 3).int().prod(_dim(r, x), dtype=torch.uint8).to(x.dtype)),
    "graph": (1, _compiled(lambda x: x[-1] * x.sigmoid() + x.sum(0))),
    "graph_of_view": (2, _compiled(lambda x: x.transpose(0, 1)[1:].flatten() * 2)),
}  # fmt: skip

WRITES: dict[str, tuple[int, Callable[..., Any]]] = {
    "zero_": (0, lambda r, x: x.zero_()),
    "fill_": (0, lambda r, x: x.fill_(0.7)),
    "mul_number_": (0, lambda r, x: x.mul_(0.5)),
    "clamp_": (0, lambda r, x: x.clamp_(-1, 1)),
    "relu_": (0, lambda r, x: x.relu_()),
    "masked_fill_": (0, lambda r, x: x.masked_fill_(x > 0.5, 0.2)),
    "part_set": (1, lambda r, x: _set(x, _along(r, x, lambda n: _part(r, n)), 0.25)),
    "one_moved": (1, lambda r, x: (lambda n: _set(x, _one(r, n), x[_one(r, n)].clone() * 0.5))(x.shape[0])),
    "rows_set": (1, lambda r, x: _set(x, _some(r, x.shape[0]), 0.5)),
    "mask_set": (0, lambda r, x: _set(x, x > 1, 0.9)),
    "transpose_": (1, lambda r, x: x.transpose_(_dim(r, x), _dim(r, x))),
    "unsqueeze_": (0, lambda r, x: x.unsqueeze_(r.randint(0, x.ndim))),
    "squeeze_": (0, lambda r, x: x.squeeze_()),
    "less_largest": (1, lambda r, x: x.sub_(x.amax(-1, keepdim=True))),
    "index_fill_": (1, lambda r, x: x.index_fill_(_dim(r, x), torch.tensor([0] * x.numel())[:1], 0.3)),
    "cumsum_": (1, lambda r, x: x.cumsum_(_dim(r, x))),
    "tril_": (2, lambda r, x: x.tril_()),
    "diagonal_halved": (2, lambda r, x: (x.diagonal(0, -2, -1).mul_(0.5), x)[1]),
    "scatter_": (1, lambda r, x: (lambda d: x.scatter_(d, _places(r, x, d), 0.3))(_dim(r, x))),
    "index_add_": (1, lambda r, x: (lambda d: x.index_add_(d, torch.arange(x.shape[d]), x.clone() * 0.5))(_dim(r, x))),
    "index_put_": (1, lambda r, x: x.index_put_((_some(r, x.shape[0]),), torch.tensor(0.25, dtype=x.dtype), accumulate=r.random() < 0.5)),
    "shifted_added": (1, lambda r, x: (x[1:].add_(x[:-1].clone() * 0.5), x)[1]),
    "flipped_copied": (1, lambda r, x: x.copy_(x.flip(_dim(r, x)))),
    "rolled_set": (1, lambda r, x: _set(x, slice(1, None), x.roll(1, 0)[1:] * 0.5)),
    "pooled_added": (3, lambda r, x: x.add_(F.avg_pool1d(x, 3, 1, 1) * 0.2)),
    "row_set": (1, lambda r, x: _set(x, _one(r, x.shape[0]), _row(r, x).sum())),
    "list_add_": (1, lambda r, x: _listed(x, lambda xs: torch._foreach_add_(xs, 1))),
    "list_sub_": (1, lambda r, x: _listed(x, lambda xs: torch._foreach_sub_(xs, [t.clone() for t in xs]))),
    "list_copy_": (1, lambda r, x: _listed(x, lambda xs: torch._foreach_copy_(xs[::-1], [t * 2 for t in xs[::-1]]))),
    "list_by_row": (1, lambda r, x: _listed(x, lambda xs: torch._foreach_sub_(xs[1:], xs[:2]) if x.shape[0] == 1 else torch._foreach_neg_(xs))),
    "graph_add_": (0, _compiled(lambda x: x.add_(1))),
    "graph_row_set": (1, _compiled(lambda x: _set(x, 0, x[-1] * 2))),
    "graph_after": (1, _compiled(lambda x: (x.copy_(x.flip(0)), x)[1])),
}  # fmt: skip


def _set(x: Any, at: Any, value: Any) -> Any:
    x[at] = value
    return x


# ---- of two ----


def _broadcast(x: torch.Tensor, y: torch.Tensor) -> bool:
    try:
        return math.prod(torch.broadcast_shapes(x.shape, y.shape)) <= LARGEST
    except RuntimeError:
        return False


def _alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape


def _product(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(x.ndim and y.ndim) and x.ndim + y.ndim <= 6 and x.shape[-1] == y.shape[-2 if y.ndim > 1 else 0]


def _joint_dims(x: torch.Tensor, y: torch.Tensor) -> list[int]:
    differ = [d for d in range(x.ndim) if x.shape[d] != y.shape[d]]
    return differ if differ else list(range(x.ndim))


def _joins(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.ndim == y.ndim > 0 and (_alike(x, y) or len(_joint_dims(x, y)) == 1)


def _filters(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.ndim == y.ndim == 3 and x.shape[1] == y.shape[1]


PAIRS: dict[str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    "add": (_broadcast, lambda r, x, y: x + y),
    "mul": (_broadcast, lambda r, x, y: x * y.clamp(-2, 2)),
    "div": (_broadcast, lambda r, x, y: x / (y * y + 1)),
    "maximum": (_broadcast, lambda r, x, y: torch.maximum(x, y)),
    "lerp": (_broadcast, lambda r, x, y: torch.lerp(x, y, 0.3)),
    "logaddexp": (_broadcast, lambda r, x, y: torch.logaddexp(x, y)),
    "choose": (_broadcast, lambda r, x, y: torch.where(y > 0, x, y)),
    "mse": (_alike, lambda r, x, y: F.mse_loss(x, y)),
    "matmul": (_product, lambda r, x, y: (x @ y).tanh()),
    "linear_of": (lambda x, y: y.ndim == 2 and _product(x, y.t()), lambda r, x, y: F.linear(x, y).tanh()),
    "outer": (lambda x, y: x.ndim == y.ndim == 1, lambda r, x, y: torch.outer(x, y)),
    "cat": (_joins, lambda r, x, y: torch.cat([x, y, x], r.choice(_joint_dims(x, y)))),
    "stack": (_alike, lambda r, x, y: torch.stack([x, y], r.randint(0, x.ndim))),
    "gather_by": (_alike, lambda r, x, y: (lambda d: x.gather(d, y.detach().long().abs() % max(x.shape[d], 1)))(_dim(r, x))),
    "scatter_of": (_alike, lambda r, x, y: (lambda d: x.scatter(d, _places(r, x, d), y))(_dim(r, x))),
    "added_by": (
        _alike, lambda r, x, y: (lambda d: x.scatter_add(d, y.detach().long().abs() % max(x.shape[d], 1), y))(_dim(r, x)),
    ),
    "filtered": (_filters, lambda r, x, y: F.conv1d(x, y * 0.3, padding=r.randint(0, 2), stride=r.randint(1, 2)).tanh()),
    "filtered_back": (_filters, lambda r, x, y: F.conv_transpose1d(x, y.transpose(0, 1) * 0.3, stride=r.randint(1, 3)).tanh()),
    "sampled": (lambda x, y: x.ndim == y.ndim == 3 and x.shape[0] == y.shape[0], lambda r, x, y: _sampled(r, x[None], y[0])[0]),
    "attends": (lambda x, y: _filters(x, y) and y.shape[0] > 0, lambda r, x, y: F.scaled_dot_product_attention(x.mT, y[-1:].mT, y[-1:].mT).mT),
}  # fmt: skip

PAIR_WRITES: dict[str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    "copy_": (_broadcast, lambda r, x, y: x.copy_(y)),
    "add_": (_broadcast, lambda r, x, y: x.add_(y)),
    "mul_": (_broadcast, lambda r, x, y: x.mul_(y.clamp(-2, 2))),
    "set_where": (_alike, lambda r, x, y: _set(x, y > 0, 0.4)),
    "lists_swapped": (_alike, lambda r, x, y: (torch._foreach_copy_([x, y], [y, x]), x)[1]),
    "lists_added": (_alike, lambda r, x, y: (torch._foreach_add_([x, x], [y, y], alpha=2), x)[1]),
    "graph_added": (_alike, _compiled(lambda x, y: x.add_(y * 2))),
}  # fmt: skip

# Right for rows and elements that one rank holds, also with -0.0 and infinity. A user's own summands are not exact.
EXACT = {"row_times_inf", "row_over", "row_by", "row_angle"}

# Each compiles something, which takes a second. `--graphs` tries them too.
GRAPHS = {name for ops in (VALUES, WRITES, PAIR_WRITES) for name in ops if "graph" in name}

# Views, pairs and writes make programs; they come as often as the many ops on values.
OPS = [
    [Op(name, run, ndim) for name, (ndim, run) in VIEWS.items()],
    [Op(name, run, ndim) for name, (ndim, run) in VALUES.items()],
    [Op(name, run, 0, 2, fits) for name, (fits, run) in PAIRS.items()],
    [Op(name, run, ndim, writes=True) for name, (ndim, run) in WRITES.items()]
    + [Op(name, run, 0, 2, fits, writes=True) for name, (fits, run) in PAIR_WRITES.items()],
]


# ---- programs ----

# Errors for a view that had to move data, for a norm's summands, and torch's own for a graph that writes one of several tensors
# on the same memory: all ranks raise alike.
REFUSED = ("comes from a view", "summands of a norm", "Encountered aliased inputs that are mutated")
# A write to memory that several elements share: pieces may share memory differently.
SHARED = "memory location"
# Mixed dtypes, which torch does not notice if there are no elements.
UNCHECKED = "expected one dtype"
# A view of a result with another order in memory: strides are not guaranteed.
STRIDES = "view size is not compatible"


def _windows(t: torch.Tensor) -> bool:
    """Whether elements overlap in memory and torch does not notice: the result of a write then depends on its order."""
    held = t.untyped_storage().nbytes() // t.element_size()
    places = torch.arange(held).as_strided(t.shape, t.stride(), t.storage_offset())
    return places.unique().numel() < t.numel() and all(n == 1 or step for n, step in zip(t.shape, t.stride(), strict=True))


class Program:
    def __init__(self, seed: int, mesh: Any, grad: bool, dtype: torch.dtype, without: Collection[str] = ()) -> None:
        self.rng = Random(seed)
        self.mesh, self.grad, self.dtype, self.without = mesh, grad, dtype, without
        self.tolerance = 1e-5 if dtype.itemsize == 8 else 1e-3
        self.generator = torch.Generator().manual_seed(seed)
        self.plain: list[torch.Tensor] = []
        self.ours: list[Any] = []
        self.numbers: list[int] = []  # of the live tensors
        self.made = 0
        self.makers: list[Callable[[], Any]] = []  # make the leaves with their first values
        self.steps: list[Step] = []
        self.lines: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.without_gradients = False
        for _ in range(3):
            self._leaf()
        self.leaves = list(zip(self.plain, self.ours, strict=True))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if not self.plain:
                return
            if self.rng.random() < 0.12:
                self._redistribute()
            else:
                self._step()
            self._forget()
        if self.grad:
            self._gradients()

    def _leaf(self) -> None:
        from oracle import place, with_summands

        r = self.rng
        sizes = [r.randint(1, 7) for _ in range(r.randint(1, 3))]
        if r.random() < 0.1:
            sizes[r.randrange(len(sizes))] = 0
        whole = torch.randn(sizes, generator=self.generator, dtype=torch.float64).mul(1 if self.dtype.is_floating_point else 3)
        whole = whole.to(self.dtype)
        if r.random() < 0.3:  # transposed, channels last
            whole = whole.permute(r.sample(range(whole.ndim), whole.ndim))
        if r.random() < 0.15 and self.dtype.is_floating_point:
            whole = whole.abs() + 0.5
            kind, m = r.choice(["avg", "product", "min", "max", "norm"]), r.randrange(self.mesh.ndim)
            where = f"{kind} on mesh dim {m}"
            self.makers.append(lambda: with_summands(whole, self.mesh, m, kind, "R").requires_grad_(self.grad))
        else:
            where = self._anywhere(whole)
            self.makers.append(lambda: place(whole, self.mesh, *where).requires_grad_(self.grad))
        self.lines.append(f"{len(self.ours)} = {list(whole.shape)} {whole.stride()} {where}")
        self._keep(whole.clone().requires_grad_(self.grad), self.makers[-1]())

    def _anywhere(self, whole: torch.Tensor) -> tuple[tuple[str, ...], str]:
        from oracle import EVEN, ONE, choices

        placements, cut = self.rng.choice(choices(whole, self.mesh.ndim, True))
        return placements, ONE if cut != EVEN and self.rng.random() < 0.3 else cut

    def _redistribute(self) -> None:
        from shardtensor import Replicate, Shard

        r = self.rng
        i = r.randrange(len(self.ours))
        dims = [r.randint(0, self.plain[i].ndim) for _ in range(self.mesh.ndim)]
        to = [Replicate() if d == self.plain[i].ndim else Shard(d) for d in dims]
        self.lines.append(f"{len(self.ours)} = {i}.redistribute({to})")
        # The result may be new or the same tensor, with strides of its own, so it is copied.
        copied = lambda x: x.clone(memory_format=torch.contiguous_format)  # noqa: E731
        moved = lambda x: copied(x.redistribute(placements=to))  # noqa: E731
        self._both("redistribute", lambda x: moved(x) if x is self.ours[i] else copied(x), [i], False, moved)

    def _step(self) -> None:
        r = self.rng
        op = r.choice(r.choice(OPS))
        if op.name in self.without:
            return
        suited = [t for t in range(len(self.plain)) if self.plain[t].ndim >= op.ndim]
        operands = [(i,) for i in suited]
        if op.fits:
            operands = [(i, k) for i in suited for k in suited if op.fits(self.plain[i], self.plain[k])]
        if not operands:
            return
        at = list(r.choice(operands))
        # Under autograd most writes raise, or hide other errors. torch's own gradient of a write to an empty view is plain.
        if op.writes and self.grad and (r.random() < 0.7 or not self.plain[at[0]].numel()):
            return
        # torch guesses a plain gradient for what a graph has written, and refuses a subclass's.
        if op.writes and self.grad and "graph" in op.name:
            return
        if op.writes and _windows(self.plain[at[0]]):
            return
        if op.name in EXACT and any(p.is_partial() for p in self.ours[at[0]].placements):
            return
        draws = r.random()
        self.lines.append(f"{'' if op.writes else f'{len(self.ours)} = '}{op.name} of {', '.join(self._described(i) for i in at)}")
        kept = Kept(Random(draws))
        first = self.ours[at[0]]
        run = lambda x, *rest: op.run(Random(draws) if x is first else kept, x, *rest)  # noqa: E731
        self._both(op.name, run, at, op.writes, lambda *tensors: op.run(Again(kept.given), *tensors))

    def _described(self, i: int) -> str:
        return f"{i} {list(self.plain[i].shape)} {self.ours[i].placements}"

    def _both(self, name: str, run: Callable[..., Any], at: list[int], writes: bool, again: Callable[..., Any]) -> None:
        got = self.together(name, lambda: run(*(self.ours[i] for i in at)), NotImplementedError, *REFUSED)
        if isinstance(got, Exception) and (isinstance(got, NotImplementedError) or any(t in str(got) for t in REFUSED)):
            return
        try:
            want = run(*(self.plain[i] for i in at))
        except Exception as error:
            if SHARED in str(error):
                raise _EndsHere from error
            lenient = STRIDES in str(error) or isinstance(error, NotImplementedError)  # a dtype
            assert isinstance(got, Exception) or lenient, f"torch alone raises {error!r}"
            return
        if isinstance(got, Exception):
            if SHARED in str(got):
                raise _EndsHere from got
            if UNCHECKED in str(got) and not all(self.plain[i].numel() for i in at):
                return
            raise got
        self.steps.append(Step(again, [self.numbers[i] for i in at], None if writes else self.made))
        if writes:
            for k in reversed(range(len(self.ours))):
                self._compare(k)
        else:
            self._keep(want, got)
            self._compare(len(self.ours) - 1)

    def _keep(self, plain: torch.Tensor, ours: Any) -> None:
        self.plain.append(plain)
        self.ours.append(ours)
        self.numbers.append(self.made)
        self.made += 1

    def _compare(self, k: int) -> None:
        """Drops a tensor that can no longer be read."""
        import shardtensor as st

        ours, plain = self.ours[k], self.plain[k]
        assert isinstance(ours, st.ShardTensor), f"{k} is {type(ours)}"
        assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype), f"{k}: {ours.shape} {ours.dtype}"
        read = self.together("read", lambda: ours.detach().full_tensor(), *REFUSED)
        if isinstance(read, Exception) or _unreadable(plain):
            assert not _unreadable(plain) or _unreadable(ours), f"{k}: torch alone refuses its grad_fn"
            self._drop(k)
            return
        tolerance = self.tolerance
        torch.testing.assert_close(
            read, plain.detach(), rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"tensor {k}: {m}"
        )
        assert ours.requires_grad == plain.requires_grad, f"{k}: requires_grad is {ours.requires_grad}"
        assert ours.is_leaf == plain.is_leaf, f"{k}: is_leaf is {ours.is_leaf}"

    def together(self, name: str, run: Callable[[], Any], *known: Any) -> Any:
        """Returns the result or the error of `run`, which must be of one kind on all ranks. Raises an unknown error."""
        try:
            out = run()
            outcome = "compiled" if name == "compiled" else "right"
        except Exception as error:
            out, outcome = error, next((f"refused: {t}" for t in known if isinstance(t, str) and t in str(error)), "raises")
            if isinstance(error, NotImplementedError):
                outcome = f"unsupported: {name}"
            elif name == "read" and outcome == "raises":
                raise
        mine = torch.tensor([zlib.crc32(outcome.encode())])
        both = torch.cat([mine, -mine])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        assert both.sum() == 0, f"{name}: the ranks disagree, here it is {outcome}: {out}"
        self.outcomes[outcome] += name != "read" or outcome != "right"
        return out

    def _drop(self, k: int) -> None:
        del self.ours[k], self.plain[k], self.numbers[k]
        self.lines.append(f"forget {k}")

    def _forget(self) -> None:
        while len(self.ours) > ALIVE:
            self._drop(self.rng.randrange(len(self.ours)))
        for k in reversed(range(len(self.plain))):
            t = self.plain[k].detach()
            if t.numel() > LARGEST or t.ndim > 5 or not t.isfinite().all() or (t.numel() and t.abs().max() > 1e4):
                self._drop(k)

    def _gradients(self) -> None:
        from oracle import place

        results = []
        for k, (plain, ours) in enumerate(zip(self.plain, self.ours, strict=True)):
            if plain.requires_grad and plain.is_floating_point():
                seed = torch.randn(plain.shape, generator=self.generator, dtype=plain.dtype)
                where = self._anywhere(seed)
                self.lines.append(f"gradient of {k} arrives {where}")
                results.append((plain, ours, seed, place(seed, self.mesh, *where)))
        if not results:
            return
        of_plain, of_ours, seeds, our_seeds = zip(*results, strict=True)
        leaves, our_leaves = zip(*self.leaves, strict=True)
        self.lines.append("backward")
        got = self.together("backward", lambda: torch.autograd.grad(of_ours, our_leaves, our_seeds, allow_unused=True), *REFUSED)
        try:
            want = torch.autograd.grad(of_plain, leaves, seeds, allow_unused=True, retain_graph=True)
        except RuntimeError as error:
            assert isinstance(got, Exception), f"torch alone raises {error!r}"
            self.without_gradients = True
            return
        if isinstance(got, NotImplementedError):
            self.without_gradients = True
            return
        if isinstance(got, Exception):
            raise got
        for k, (g, w) in enumerate(zip(got, want, strict=True)):
            assert (g is None) == (w is None), f"gradient {k}: {g} instead of {w}"
            if g is not None:
                tolerance = self.tolerance
                torch.testing.assert_close(
                    g.full_tensor(), w, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, k=k: f"gradient {k}: {m}"
                )


class _EndsHere(Exception):
    """Later steps cannot be compared."""


def _unreadable(t: Any) -> bool:
    """Whether autograd raises when the tensor is read: one of several views (split, unbind) was written."""
    try:
        t.grad_fn  # noqa: B018
    except RuntimeError:
        return True
    return False


def run_programs(
    first: int,
    count: int,
    steps: int,
    mesh_shape: tuple[int, ...],
    grad: bool,
    dtype: str,
    backend: str | None = None,
    check: bool = False,
    without: Collection[str] = tuple(GRAPHS),
) -> Counter[str]:
    """Called on every rank. Counts the results of the steps; with a backend, also those of the whole programs, compiled."""
    import compiled_programs
    import shardtensor as st
    from oracle import checking, mesh_of

    outcomes: Counter[str] = Counter()
    without = {*without, *(compiled_programs.NOT_TRACED if backend else ())}
    for seed in range(first, first + count):
        program = Program(seed, mesh_of(mesh_shape), grad, getattr(torch, dtype), without)
        try:
            with st.implicit_replication(), checking(check):
                program.run(steps)
                if backend:
                    compiled_programs.compare(program, backend, dynamic=seed % 2 == 1)
        except _EndsHere:
            pass
        except Exception as error:
            text = "".join(traceback.format_exception(error))[-1500:]
            raise AssertionError("\n".join([f"program {seed}:", *program.lines, text])) from None
        outcomes += program.outcomes
    return outcomes


def main() -> None:
    import argparse

    from pool import Pool, RankError, parse_mesh

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", type=parse_mesh, default="3", help="its shape, such as 2x2")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--grad", action="store_true")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--compile", metavar="BACKEND")
    parser.add_argument("--graphs", action="store_true", help="compile single ops, too")
    options = parser.parse_args()
    without = () if options.graphs and not options.compile else tuple(GRAPHS)
    shape = options.mesh
    pool = Pool(math.prod(shape))
    outcomes: Counter[str] = Counter()
    failed = 0
    for first in range(options.first, options.first + options.count, BATCH):
        arguments = first, BATCH, options.steps, shape, options.grad, options.dtype, options.compile, False, without
        try:
            outcomes += pool.run("programs:run_programs", *arguments, seconds=120)[0]
        except RankError as error:
            failed += 1
            print(str(error).split("--- rank 1 ---")[0][-4000:], flush=True)
    pool.stop()
    for outcome, count in outcomes.most_common():
        print(count, outcome)
    sys.exit(failed)


if __name__ == "__main__":
    sys.path.insert(0, __file__.rsplit("/", 1)[0])
    main()
