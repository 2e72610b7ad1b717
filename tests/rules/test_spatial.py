"""Convolutions and other windowed ops cut in space: each rank reads its piece and a halo, and nothing is gathered.

Random calls are compared with plain torch: even, uneven, thin and empty pieces, on meshes of one and two dims. Bytes are compared with
the halo's, counted index by index from the windows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import EVEN, UNEVEN, compare, mesh_here, shared
from oracle import place as placed
from pool import on_ranks
from shardtensor import _C, Partial, Replicate, Shard, ShardTensor, strict_mode
from shardtensor.debug import log_gathers
from shardtensor.tensor._layout import make_layout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MESHES = [(2,), (3,), (4,), (2, 2)]
SEEDS = range(3)
CALLS = 40  # per mesh and seed

Window = Callable[[int], range]  # result -> the operand's indices that it reads, with those between them; some in the padding


@dataclass
class Call:
    text: str
    function: Callable[..., Any]
    x: torch.Tensor
    parameters: list[torch.Tensor]
    windows: list[Window]  # one per dim of space; none if bytes are not compared
    exchanges: int = 1  # of a backward
    exact: bool = True  # whether a backward's bytes are compared
    quiet: bool = False  # nothing is gathered, though there are no windows


def numbers(draw: random.Random, *sizes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    return torch.randn(sizes, generator=generator, dtype=torch.float64)


def channels_last(t: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.to(memory_format=formats[t.ndim]) if t.ndim in formats else t


def draw_space(draw: random.Random) -> tuple[int, list[int]]:
    n = draw.choice((1, 2, 2, 3))
    return n, [draw.randint(1, {1: 24, 2: 12, 3: 6}[n]) for _ in range(n)]


def draw_conv(draw: random.Random, transposed: bool) -> Call | None:
    n, sizes = draw_space(draw)
    k, s, d = ([draw.randint(1, most) for _ in range(n)] for most in (4, 3, 2))
    spans = [(a - 1) * b + 1 for a, b in zip(k, d, strict=True)]
    p = [draw.randint(0, span - 1 if transposed or draw.random() < 0.8 else span + 1) for span in spans]
    groups = draw.choice((1, 1, 2))
    batch, cin, cout = draw.randint(1, 3), 2 * groups, draw.choice((1, 2)) * groups
    more = [draw.randrange(max(a, b)) if transposed else 0 for a, b in zip(s, d, strict=True)]
    if transposed:
        results = [(a - 1) * b - 2 * c + e + o for a, b, c, e, o in zip(sizes, s, p, spans, more, strict=True)]
        op = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]
        function = lambda x, w, *b: op(x, w, *b or (None,), s, p, more, groups, d)  # noqa: E731
        weight = numbers(draw, cin, cout // groups, *k)
        windows = [functools.partial(transposed_window, *a) for a in zip(s, p, spans, strict=True)]
    else:
        results = [(a + 2 * c - e) // b + 1 for a, b, c, e in zip(sizes, s, p, spans, strict=True)]
        op = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
        function = lambda x, w, *b: op(x, w, *b or (None,), s, p, d, groups)  # noqa: E731
        weight = numbers(draw, cout, cin // groups, *k)
        windows = [functools.partial(window, *a) for a in zip(s, p, spans, strict=True)]
    if min(results) < 1:
        return None
    x = numbers(draw, batch, cin, *sizes)
    x = channels_last(x) if draw.random() < 0.3 else x
    parameters = [weight, numbers(draw, cout)] if draw.random() < 0.7 else [weight]
    text = f"{'transposed ' if transposed else ''}conv {list(x.shape)} k {k} s {s} p {p} d {d} groups {groups} out {more} bias {len(parameters) - 1}"
    # The bias also needs results that no index reaches: of transposed convolutions, and those that read padding alone.
    exact = not transposed and all(c < e for c, e in zip(p, spans, strict=True))
    return Call(text, function, x, parameters, windows, exact=exact)


def window(s: int, p: int, span: int, o: int) -> range:
    return range(o * s - p, o * s - p + span)


def transposed_window(s: int, p: int, span: int, o: int) -> range:
    return range(-((span - 1 - o - p) // s), (o + p) // s + 1)


def draw_pool(draw: random.Random, kind: str) -> Call | None:
    n, sizes = draw_space(draw)
    k, s = ([draw.randint(1, most) for _ in range(n)] for most in (4, 4))
    d = [draw.randint(1, 2) if kind == "max" else 1 for _ in range(n)]
    spans = [(a - 1) * b + 1 for a, b in zip(k, d, strict=True)]
    p = [draw.randint(0, a // 2) for a in k]
    up = draw.random() < 0.5
    results = [(a + 2 * c - e + (b - 1 if up else 0)) // b + 1 for a, b, c, e in zip(sizes, s, p, spans, strict=True)]
    if min(results) < 1 or (n == 3 and any(a < e for a, e in zip(sizes, spans, strict=True))):
        return None
    taps = [[range(o * b - c, o * b - c + e, f) for o in range(r)] for b, c, e, f, r in zip(s, p, spans, d, results, strict=True)]
    if any(not any(0 <= i < size for i in w) for all_, size in zip(taps, sizes, strict=True) for w in all_[:1] + all_[-1:]):
        return None  # torch's index of a window that has no element is none of the operand's
    x = numbers(draw, draw.randint(1, 3), 2, *sizes)
    if kind == "max":
        if draw.random() < 0.2:
            x[x < 0.5] = -math.inf
        op = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
        indices = draw.random() < 0.5
        function = lambda x: op(x, k, s, p, d, up, return_indices=indices)  # noqa: E731
        more = f"indices {indices}"
    elif n == 1:
        counts = draw.random() < 0.5
        function = lambda x: F.avg_pool1d(x, k, s, p, up, counts)  # noqa: E731
        more = f"counts {counts}"
    else:
        counts, divisor = draw.random() < 0.5, draw.choice((None, None, 3))
        op = (F.avg_pool2d, F.avg_pool3d)[n - 2]
        function = lambda x: op(x, k, s, p, up, counts, divisor)  # noqa: E731
        more = f"counts {counts} divisor {divisor}"
    x = channels_last(x) if draw.random() < 0.3 else x
    text = f"{kind} pool {list(x.shape)} k {k} s {s} p {p} d {d} up {up} {more}"
    windows = [functools.partial(window, *a) for a in zip(s, p, spans, strict=True)]
    return Call(text, function, x, [], windows, exchanges=2 if kind == "max" else 1)  # gradients, and indices


def draw_fractional(draw: random.Random) -> Call | None:
    n = draw.choice((2, 2, 3))
    k = [draw.randint(1, 3) for _ in range(n)]
    results = [draw.randint(1, 5) for _ in range(n)]
    sizes = [r + a - 1 + draw.randint(n - 2, 6) for r, a in zip(results, k, strict=True)]
    x = numbers(draw, draw.randint(1, 2), 2, *sizes)
    x = x.round() if draw.random() < 0.5 else x  # many are equal: the first counts
    x[x > 1.5], x[x < -1] = draw.choice(((math.nan, -math.inf), (1.5, -1.0)))
    samples = torch.rand(x.shape[0], 2, n, generator=torch.Generator().manual_seed(draw.randrange(99)), dtype=torch.float64)
    indices, op = draw.random() < 0.5, (F.fractional_max_pool2d, F.fractional_max_pool3d)[n - 2]

    def function(x: Any) -> Any:
        return op(x, k, results, return_indices=indices, _random_samples=replicated_like(x, samples))

    return Call(f"fractional {list(x.shape)} k {k} to {results} indices {indices}", function, x, [], [], quiet=True)


def draw_unpool(draw: random.Random) -> Call | None:
    """By the indices of a pool, or by any, which may point anywhere in the plane."""
    n = draw.choice((1, 2, 2, 3))
    pool, unpool = ((F.max_pool1d, F.max_unpool1d), (F.max_pool2d, F.max_unpool2d), (F.max_pool3d, F.max_unpool3d))[n - 1]
    k = [draw.randint(1, 3) for _ in range(n)]
    sizes = [a * draw.randint(1, {1: 8, 2: 4, 3: 2}[n]) for a in k]
    x = numbers(draw, draw.randint(1, 2), 2, *sizes)
    if draw.random() < 0.5:
        return Call(f"unpool {list(x.shape)} k {k}", lambda x: unpool(*pool(x, k, k, return_indices=True), k), x, [], [], quiet=True)
    few, seed = [a // b for a, b in zip(sizes, k, strict=True)], draw.randrange(99)

    def function(x: Any) -> Any:
        values, places = pool(x, k, k, return_indices=True)
        each = torch.stack([torch.randperm(math.prod(sizes), generator=torch.Generator().manual_seed(seed + i)) for i in range(x.shape[0] * 2)])
        any_ = each[:, : math.prod(few)].reshape(places.shape)
        return unpool(values, any_ if type(x) is torch.Tensor else place(any_, x.device_mesh, places.placements, places._layout.cuts), k)

    return Call(f"unpool anywhere {sizes} k {k}", function, x, [], [], quiet=True)


def replicated_like(x: torch.Tensor, t: torch.Tensor) -> Any:
    return place(t, x.device_mesh, [Replicate()] * x.device_mesh.ndim, [None] * x.device_mesh.ndim) if isinstance(x, ShardTensor) else t


def draw_adaptive(draw: random.Random) -> Call | None:
    n = draw.choice((1, 2, 2, 3))
    results = [draw.randint(2, 6) for _ in range(n)]
    sizes = [r * draw.randint(1, 3) if draw.random() < 0.5 else draw.randint(1, 3 * r) for r in results]
    x = numbers(draw, draw.randint(1, 3), 2, *sizes)
    ops = (
        (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
        (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    )
    op, indices = draw.choice(ops)[n - 1], draw.random() < 0.5
    windows = [functools.partial(adaptive_window, size, r) for size, r in zip(sizes, results, strict=True)]
    text = f"{op.__name__} {list(x.shape)} to {results} indices {indices}"
    if "max" in op.__name__:
        x = x.round() if draw.random() < 0.5 else x  # many are equal: the first counts
        return Call(text, lambda x: op(x, results, indices), x, [], windows, exchanges=2)
    return Call(text, lambda x: op(x, results), x, [], windows)


def adaptive_window(size: int, results: int, o: int) -> range:
    return range(o * size // results, -(-(o + 1) * size // results))


def draw_global(draw: random.Random) -> Call | None:
    """One maximum along every dim, or along one of two: the ranks compare theirs."""
    n = draw.choice((1, 2, 2, 3))
    x = numbers(draw, draw.randint(1, 3), 2, *(draw.randint(1, 8) for _ in range(n)))
    x = x.round() if draw.random() < 0.5 else x
    x[x > 1], x[x < -0.5] = draw.choice(((math.nan, -math.inf), (1.0, -0.5)))
    op, indices = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[n - 1], draw.random() < 0.5
    return Call(f"{op.__name__} {list(x.shape)} to 1, indices {indices}", lambda x: op(x, 1, indices), x, [], [])


def draw_repeat(draw: random.Random) -> Call | None:
    _, sizes = draw_space(draw)
    x = numbers(draw, draw.randint(1, 3), 2, *sizes)
    times = [draw.choice((1, 2, 3, 5)) for _ in x.shape]
    times = [2, *times] if draw.random() < 0.2 else times
    return Call(f"repeat {list(x.shape)} {times}", lambda x: x.repeat(times), x, [], [])


def draw_sample(draw: random.Random) -> Call | None:
    """Grids that read near, anywhere, and beyond the edges; cut as the image, another way, or not at all."""
    n = draw.choice((2, 2, 3))
    x = numbers(draw, draw.randint(1, 2), 2, *(draw.randint(1, 9) for _ in range(n)))
    results = [draw.randint(1, 7) for _ in range(n)]
    kind = draw.choice(("near", "any", "far"))
    grid = numbers(draw, x.shape[0], *results, n)
    if kind == "near":
        theta = torch.eye(n, n + 1, dtype=torch.float64).expand(x.shape[0], n, n + 1)
        grid = F.affine_grid(theta, [x.shape[0], 2, *results], align_corners=False) + grid / 20
    elif kind == "any":
        grid = grid.tanh()
    how: dict[str, Any] = {"mode": draw.choice(("bilinear", "nearest", "bicubic") if n == 2 else ("bilinear", "nearest"))}
    how |= {"padding_mode": draw.choice(("zeros", "border", "reflection")), "align_corners": draw.random() < 0.5}
    return Call(f"sample {list(x.shape)} at {results} {kind} {how}", lambda x, g: F.grid_sample(x, g, **how), x, [grid], [])


def draw_interpolate(draw: random.Random, mode: str) -> Call | None:
    n = {"nearest": draw.randint(1, 3), "nearest-exact": draw.randint(1, 3), "bicubic": 2}.get(mode, draw.choice((1, 2, 2, 3)))
    mode = {"linear": ("linear", "bilinear", "trilinear")[n - 1]}.get(mode, mode)
    most = {1: 12, 2: 8, 3: 5}[n]
    x = numbers(draw, draw.randint(1, 2), 2, *(draw.randint(1, most) for _ in range(n)))
    x = channels_last(x) if draw.random() < 0.3 else x
    more: dict[str, Any] = {} if "nearest" in mode else {"align_corners": draw.random() < 0.1}
    if draw.random() < 0.5:
        scale = [draw.choice((1.0, 2.0, 3.0, 0.5)) for _ in range(n)]
        if any(int(size * by) < 1 for size, by in zip(x.shape[2:], scale, strict=True)):
            return None
        return Call(f"{mode} {list(x.shape)} by {scale} {more}", lambda x: F.interpolate(x, scale_factor=scale, mode=mode, **more), x, [], [])
    size = [draw.randint(1, 2 * most) for _ in range(n)]
    return Call(f"{mode} {list(x.shape)} to {size} {more}", lambda x: F.interpolate(x, size, mode=mode, **more), x, [], [])


def draw_resample(draw: random.Random) -> Call | None:
    """Ratios that no piece has: by weights."""
    n = draw.choice((1, 2, 2, 3))
    most = {1: 24, 2: 10, 3: 6}[n]
    x = numbers(draw, draw.randint(1, 2), 2, *(draw.randint(1, most) for _ in range(n)))
    size = [draw.randint(1, 2 * most) for _ in range(n)]
    kind = draw.choice(("aligned", "antialiased", "nearest", "scale", "adaptive"))
    if kind == "adaptive":
        op = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[n - 1]
        return Call(f"{op.__name__} {list(x.shape)} to {size}", lambda x: op(x, size), x, [], [])
    linear = ("linear", "bilinear", "trilinear")[n - 1]
    how: dict[str, Any] = {"mode": linear if n != 2 else draw.choice((linear, "bicubic")), "align_corners": True, "size": size}
    if kind == "antialiased":
        x = numbers(draw, 1, 2, *(draw.randint(1, 12) for _ in range(2)))
        how = {"mode": draw.choice(("bilinear", "bicubic")), "antialias": True, "size": [draw.randint(2, 20) for _ in range(2)]}
        how["align_corners"] = draw.random() < 0.2
    elif kind == "nearest":
        how = {"mode": draw.choice(("nearest", "nearest-exact")), "size": size}
    elif kind == "scale":
        how = {"mode": linear, "scale_factor": [draw.choice((0.4, 0.7, 1.3, 2.5)) for _ in range(n)]}
        size = [int(a * b) for a, b in zip(x.shape[2:], how["scale_factor"], strict=True)]
    # With a scale and equal sizes, torch's gradient is not that of its own results.
    if any(a < 1 or (kind == "scale" and a == b) for a, b in zip(size, x.shape[2:], strict=False)):
        return None
    return Call(f"{kind} {list(x.shape)} {how}", lambda x: F.interpolate(x, **how), x, [], [])


def draw_pad(draw: random.Random) -> Call | None:
    _, sizes = draw_space(draw)
    mode = draw.choice(("reflect", "replicate"))
    pad = [draw.randint(0, min(4, size - 1 if mode == "reflect" else 4)) for size in reversed(sizes) for _ in range(2)]
    x = numbers(draw, draw.randint(1, 3), 2, *sizes)
    return Call(f"{mode} {list(x.shape)} by {pad}", lambda x: F.pad(x, pad, mode), x, [], [])


def draw_turn(draw: random.Random) -> Call | None:
    _, sizes = draw_space(draw)
    x = numbers(draw, draw.randint(1, 3), 2, *sizes)
    if draw.random() < 0.5:
        by, dims = [draw.randint(-5, 5) for _ in sizes], list(range(2, x.ndim))
        return Call(f"roll {list(x.shape)} by {by}", lambda x: torch.roll(x, by, dims), x, [], [])
    pad = [draw.randint(0, min(4, size)) for size in reversed(sizes) for _ in range(2)]
    return Call(f"circular {list(x.shape)} by {pad}", lambda x: F.pad(x, pad, "circular"), x, [], [])


def draw_move(draw: random.Random) -> Call | None:
    """flip, patches, and windows as views."""
    kind = draw.choice(("flip", "patches", "fold", "windows"))
    if kind == "flip":
        _, sizes = draw_space(draw)
        x = numbers(draw, draw.randint(1, 3), 2, *sizes)
        dims = draw.sample(range(x.ndim), draw.randint(1, x.ndim))
        return Call(f"flip {list(x.shape)} {dims}", lambda x: torch.flip(x, dims), x, [], [])
    if kind == "windows":
        x = numbers(draw, draw.randint(1, 3), 2, *(draw.randint(1, 12) for _ in range(2)))
        dim, step = draw.choice((2, 3)), draw.randint(1, 4)
        size = draw.randint(1, x.shape[dim])
        return Call(f"windows {list(x.shape)} {dim} {size} {step}", lambda x: x.unfold(dim, size, step), x, [], [])
    k, s, d = ([draw.randint(1, most) for _ in range(2)] for most in (4, 3, 2))
    p = [draw.randint(0, (a - 1) * b) for a, b in zip(k, d, strict=True)]
    sizes = [draw.randint(1, 12) for _ in range(2)]
    blocks = [(a + 2 * b - (c - 1) * e - 1) // f + 1 for a, b, c, e, f in zip(sizes, p, k, d, s, strict=True)]
    if min(blocks) < 1:
        return None
    how = f"{sizes} k {k} s {s} p {p} d {d}"
    if kind == "patches":
        x = numbers(draw, draw.randint(1, 3), 2, *sizes)
        return Call(f"unfold {how}", lambda x: F.unfold(x, k, d, p, s), x, [], [])
    x = numbers(draw, draw.randint(1, 3), 2 * math.prod(k), math.prod(blocks))
    return Call(f"fold {how}", lambda x: F.fold(x, sizes, k, d, p, s), x, [], [])


DRAWN: dict[str, Callable[[random.Random], Call | None]] = {
    "conv": lambda draw: draw_conv(draw, False),
    "conv_transpose": lambda draw: draw_conv(draw, True),
    "max_pool": lambda draw: draw_pool(draw, "max"),
    "avg_pool": lambda draw: draw_pool(draw, "average"),
    "adaptive": draw_adaptive,
    "fractional": draw_fractional,
    "unpool": draw_unpool,
    "global": draw_global,
    "repeat": draw_repeat,
    "sample": draw_sample,
    "nearest": lambda draw: draw_interpolate(draw, draw.choice(("nearest", "nearest-exact"))),
    "linear": lambda draw: draw_interpolate(draw, "linear"),
    "bicubic": lambda draw: draw_interpolate(draw, "bicubic"),
    "resample": draw_resample,
    "pad": draw_pad,
    "turn": draw_turn,
    "move": draw_move,
}


# ---- where the operand is cut ----


def draw_cut(draw: random.Random, size: int, pieces: int) -> list[int] | None:
    kind = draw.randrange(4)
    if kind == 0:
        return None  # even
    if kind == 1:  # thin pieces, some of them empty; one has the rest
        rest, left, cut = draw.randrange(pieces), size, [0] * pieces
        for i in range(pieces):
            if i != rest:
                cut[i] = min(draw.randrange(3), left)
                left -= cut[i]
        cut[rest] = left
        return cut
    at = [0, *sorted(draw.randint(0, size) for _ in range(pieces - 1)), size]
    return [b - a for a, b in itertools.pairwise(at)]


def place(whole: torch.Tensor, mesh: Any, placements: Sequence[Any], cuts: Sequence[list[int] | None]) -> Any:
    """The whole tensor as a ShardTensor, without communication."""
    layout = make_layout(mesh, list(placements), whole.ndim, list(cuts), who="test")
    local = whole.detach()
    for d in range(whole.ndim):
        ((start, length),) = layout.intervals(d, whole.shape[d])
        local = local.narrow(d, start, length)
    strides = list(whole.stride())
    return _C.wrap(_C.laid(local.clone(memory_format=torch.contiguous_format), strides), layout, list(whole.shape), strides)


def place_randomly(draw: random.Random, whole: torch.Tensor, mesh: Any) -> Any:
    placements: list[Any] = []
    cuts: list[list[int] | None] = []
    for m in range(mesh.ndim):
        space = [Shard(d) for d in range(2, whole.ndim)]
        placements.append(draw.choice([*space, *space, *space, Shard(0), Replicate()] if m else space))
        is_free = placements[m].is_shard() and placements[m] not in placements[:m]
        cuts.append(draw_cut(draw, whole.shape[placements[m].dim], mesh.size(m)) if is_free else None)
    return place(whole, mesh, placements, cuts)


# ---- what must be sent ----


def hull(windows: Sequence[range]) -> tuple[int, int]:
    full = [w for w in windows if len(w)]
    return (min(w.start for w in full), max(w.stop for w in full)) if full else (0, 0)


def coordinates(mesh: Any) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(n) for n in mesh.shape)))


def bytes_of_halo(mesh: Any, source: Any, reads: Callable[[int, Sequence[int]], list[tuple[int, int]]]) -> int | None:
    """What this rank sends, if every rank gets what it lacks of `source` once. `reads`: what the rank at a coordinate reads."""
    if any(p.is_replicate() for p in source.placements):
        return None
    me = tuple(mesh.get_coordinate())

    def held(at: Sequence[int]) -> list[tuple[int, int]]:
        return [(a, a + n) for d in range(source.ndim) for a, n in source._layout.intervals(d, source.shape[d], list(at))]

    sent = 0
    for at in coordinates(mesh):
        if at != me:
            pairs = zip(held(me), reads(source.ndim, at), strict=True)
            sent += math.prod(max(0, min(b, q) - max(a, p)) for (a, b), (p, q) in pairs)
    return sent * source.element_size()


def counted(run: Callable[[], Any]) -> tuple[Any, dict[str, tuple[int, int]]]:
    _C.reset_comm_counts()
    out = run()
    return out, _C.comm_counts()


def check(call: Call, mesh: Any, x: Any) -> bool:
    """Forward and backward of one call, its layouts and its bytes. False if windows are so wide that recutting to the batch costs less."""
    text = f"{call.text} on {x._layout}"
    parameters = [place(p, mesh, [Replicate()] * mesh.ndim, [None] * mesh.ndim) for p in call.parameters]
    inputs = [t.requires_grad_() for t in (x, *parameters)]
    plain = [t.detach().clone().requires_grad_() for t in (call.x, *call.parameters)]
    y, sent = counted(lambda: call.function(*inputs))
    want = call.function(*plain)
    compare(y, want, 1e-9, f"{text}: result")
    assert not shared(y, inputs) - shared(want, plain), f"{text}: the result shares memory with an argument, plain torch's does not"
    y, want = (t[0] if isinstance(t, tuple) else t for t in (y, want))
    kept = y.placements == x.placements
    assert kept or not call.windows or wide(call, mesh, x), f"{text}: {y.placements}"

    cut = {p.dim for p in x.placements if p.is_shard() and p.dim > 1}

    def reads(ndim: int, at: Sequence[int]) -> list[tuple[int, int]]:
        out = []
        for d in range(ndim):
            t = y if d in cut else x
            ((a, n),) = t._layout.intervals(d, t.shape[d], list(at))
            out.append(hull([call.windows[d - 2](o) for o in range(a, a + n)]) if d in cut else (a, a + n))
        return out

    def readers(ndim: int, at: Sequence[int]) -> list[tuple[int, int]]:
        out = []
        for d in range(ndim):
            t = x if d in cut else y
            ((a, n),) = t._layout.intervals(d, t.shape[d], list(at))
            if d in cut:
                windows = {o: call.windows[d - 2](o) for o in range(y.shape[d])}
                out.append(hull([range(o, o + 1) for o, w in windows.items() if max(w.start, a) < min(w.stop, a + n)]))
            else:
                out.append((a, a + n))
        return out

    def check_halo(sent: dict[str, tuple[int, int]], most: int | None, exchanges: int, what: str) -> None:
        assert set(sent) <= {"all_to_all"}, f"{text}: {what} sends {sent}"
        calls, size = sent.get("all_to_all", (0, 0))
        assert calls <= exchanges, f"{text}: {what} sends {sent}"
        assert most is None or size == most * exchanges, f"{text}: {what} sends {size} bytes, the halo has {most}"

    assert not call.quiet or set(sent) <= {"all_to_all"}, f"{text} sends {sent}"
    if kept and call.windows:
        check_halo(sent, bytes_of_halo(mesh, x, reads), 1, "forward")
    upstream = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view(want.shape)
    held = [Replicate() if p.is_partial() else p for p in y.placements]
    grad = place(laid_like(upstream, want), mesh, held, y._layout.cuts)
    got, sent = counted(lambda: torch.autograd.grad(y, inputs, grad))
    expected = torch.autograd.grad(want, plain, upstream)
    for name, g, w in zip(("input", "weight", "bias"), got, expected, strict=False):
        compare(g, w, 1e-9, f"{text}: gradient of {name}")
    assert not call.quiet or set(sent) <= {"all_to_all"}, f"backward of {text} sends {sent}"
    if kept and call.windows and got[0].placements == x.placements:
        check_halo(sent, bytes_of_halo(mesh, y, readers) if call.exact else None, call.exchanges, "backward")
    return kept


def wide(call: Call, mesh: Any, x: Any) -> bool:
    """Whether the widest window is about as wide as an even piece."""
    return any(len(w(0)) + 1 >= x.shape[d + 2] / max(mesh.shape) / 2 for d, w in enumerate(call.windows))


def laid_like(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like).copy_(t)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", MESHES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("kind", DRAWN)
@on_ranks(of="shape")
def test_equals_torch(kind, shape, seed):
    mesh = init_device_mesh("cpu", shape)
    draw = random.Random(f"{kind} {seed}")
    done = kept = 0
    while done < CALLS:
        call = DRAWN[kind](draw)
        if call is not None:
            kept += check(call, mesh, place_randomly(draw, call.x, mesh))
            done += 1
    assert kept > CALLS // (2 if call.windows else 5) or kind == "global"


# ---- convolutions run on the piece while the halo travels ----

AT_ONCE, NEVER = -(1 << 50), 1 << 50  # whether a rank calls torch on its piece first, if it can: always, or never


@contextlib.contextmanager
def min_overlap_bytes(cost: int) -> Iterator[None]:
    before = _C.min_overlap_bytes()
    _C.set_min_overlap_bytes(cost)
    try:
        yield
    finally:
        _C.set_min_overlap_bytes(before)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", MESHES, ids=lambda s: "x".join(map(str, s)))
@on_ranks(of="shape")
def test_piece_first(shape, seed):
    mesh = init_device_mesh("cpu", shape)
    draw = random.Random(f"piece first {seed}")
    done = 0
    with min_overlap_bytes(AT_ONCE):
        while done < CALLS:
            call = draw_conv(draw, False)
            if call is not None:
                check(call, mesh, place_randomly(draw, call.x, mesh))
                done += 1


def gradients(inputs: list[Any], of: Sequence[int], upstream: Any, groups: int) -> list[Any]:
    x, w, b = (t.detach().requires_grad_(i in of) for i, t in enumerate(inputs))
    y = F.conv2d(x, w, b, padding=1, groups=groups)
    return [y, *torch.autograd.grad(y, [(x, w, b)[i] for i in of], upstream)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex128], ids=str)
@on_ranks(3)
def test_piece_first_in(dtype):
    mesh = init_device_mesh("cpu", (3,))
    draw = random.Random(f"{dtype}")
    for last, groups in itertools.product((False, True), (1, 2)):
        x, w, b = (numbers(draw, *sizes).to(dtype) for sizes in ((2, 4, 22, 9), (4, 4 // groups, 3, 3), (4,)))
        x = channels_last(x) if last else x
        placed = [place(x, mesh, [Shard(2)], [[9, 2, 11]]), *(place(t, mesh, [Replicate()], [None]) for t in (w, b))]
        upstream = laid_like(numbers(draw, *x.shape).to(dtype), x)
        grad = place(upstream, mesh, [Shard(2)], [[9, 2, 11]])
        for of in ((0, 1, 2), (0,), (1,), (2,), (1, 2)):
            want = gradients([x, w, b], of, upstream, groups)
            with min_overlap_bytes(AT_ONCE):
                got = gradients(placed, of, grad, groups)
            for i, (g, t) in enumerate(zip(got, want, strict=True)):
                close = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-4}.get(dtype, 1e-9)
                compare(g.detach(), t.detach(), close, f"{dtype}, channels last {last}, gradients of {of}: {i}")


@pytest.mark.parametrize("second", [AT_ONCE, NEVER])
@on_ranks((3,), (2, 2))
def test_gradients_of_any_layout(shape, second):
    """The gradient may be cut as the input is, or in some of its dims, or along others, with other cuts."""
    mesh = init_device_mesh("cpu", shape)
    draw = random.Random("bias")
    for batch, groups in ((3, 1), (1, 1), (2, 2)):
        x, w, b = (numbers(draw, *sizes) for sizes in ((batch, 4, 12, 5), (6, 4 // groups, 3, 3), (6,)))
        upstream = numbers(draw, batch, 6, 12, 5)
        want = gradients([x, w, b], (0, 1, 2), upstream, groups)
        placements = list(itertools.product(("R", "S(0)", "S(1)", "S(2)", "S(3)", "P"), repeat=len(shape)))
        kinds = [(p, kind) for p in placements for kind in (EVEN, UNEVEN) if len(set(p)) == len(p) or kind == EVEN]
        for at, weight in itertools.product(kinds, ("R", "S(0)")):
            if "S(2)" not in at[0] or "P" in at[0]:
                continue
            for to in draw.sample(kinds, min(len(kinds), 9)):
                inputs = [placed(x, mesh, *at), *(placed(t, mesh, (weight, *["R"] * (len(shape) - 1)), EVEN) for t in (w, b))]
                with min_overlap_bytes(second):
                    got = gradients(inputs, (0, 1, 2), placed(upstream, mesh, *to), groups)
                for g, t in zip(got, want, strict=True):
                    compare(g.detach(), t.detach(), 1e-9, f"{batch} {groups} input {at} weight {weight} gradient {to}")


def run_memory(cost: int) -> list[int]:
    """What ops allocate in a convolution's forward, and in its backward."""
    from torch.profiler import ProfilerActivity, profile

    mesh = init_device_mesh("cpu", (3,))
    whole = torch.ones(1, 4, 384, 128)
    x = place(whole, mesh, [Shard(2)], [None]).requires_grad_()
    w, grad = place(torch.ones(4, 4, 3, 3), mesh, [Replicate()], [None]), place(whole, mesh, [Shard(2)], [None])

    def allocated(run: Callable[[], Any]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
        return sum(max(0, e.self_cpu_memory_usage) for e in seen.events())

    with min_overlap_bytes(cost):
        y = F.conv2d(x, w, padding=1)
        return [
            allocated(lambda: F.conv2d(x, w, padding=1)),
            allocated(lambda: torch.autograd.grad(y, x, grad)),
        ]


def test_piece_is_not_joined_with_its_halo(pools):
    piece = 4 * 128 * 128 * 4
    first, joined = (pools(3).run(run_memory, cost) for cost in (AT_ONCE, NEVER))
    for few, many in zip(itertools.chain(*first), itertools.chain(*joined), strict=True):
        assert few < 1.4 * piece and many >= 2 * piece, (few, many)


# ---- flip, roll, rot90: each element goes to one place ----


def draw_moving(draw: random.Random, ndim: int) -> tuple[str, Callable[[Any], Any]]:
    kind = draw.choice(("flip", "roll", "rot90"))
    dims = draw.sample(range(ndim), 2 if kind == "rot90" else draw.randint(1, ndim))
    if kind == "flip":
        return f"flip {dims}", lambda x: x.flip(dims)
    if kind == "rot90":
        turns = draw.randint(-1, 4)
        return f"rot90 {turns} {dims}", lambda x: x.rot90(turns, dims)
    by = [draw.randint(-7, 7) for _ in dims]
    return f"roll {by} {dims}", lambda x: x.roll(by, dims)


def piece_of(whole: torch.Tensor, layout: Any, at: Sequence[int]) -> torch.Tensor:
    for d in range(whole.ndim):
        ((start, length),) = layout.intervals(d, whole.shape[d], list(at))
        whole = whole.narrow(d, start, length)
    return whole


def bytes_of_move(mesh: Any, source: Any, target: Any, moved: torch.Tensor) -> int | None:
    """What this rank sends, if every rank gets what its piece of `target` has, and its own of `source` has not. `moved`: the elements of
    `source`, by their numbers, at their places in `target`."""
    if any(p.is_replicate() for p in source.placements):
        return None
    before = torch.arange(moved.numel()).view(source.shape)
    me = tuple(mesh.get_coordinate())
    mine = set(piece_of(before, source._layout, me).flatten().tolist())
    others = [set(piece_of(moved, target._layout, at).flatten().tolist()) for at in coordinates(mesh) if at != me]
    return sum(len(mine & wanted) for wanted in others) * source.element_size()


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@on_ranks((2,), (3,), (2, 2))
def test_moves(shape, inference):
    mesh = init_device_mesh("cpu", shape)
    draw = random.Random(f"{shape}")
    for _ in range(60):
        sizes = [draw.randint(1, 9) for _ in range(draw.randint(2, 4))]
        text, function = draw_moving(draw, len(sizes))
        whole = numbers(draw, *sizes)
        whole = (channels_last(whole) if draw.random() < 0.3 else whole).requires_grad_()
        placements: list[Any] = [draw.choice([*(Shard(d) for d in range(len(sizes))), Replicate()]) for _ in shape]
        cuts = [
            draw_cut(draw, sizes[p.dim], n) if p.is_shard() and p not in placements[:m] else None
            for m, (p, n) in enumerate(zip(placements, shape, strict=True))
        ]
        x = place(whole, mesh, placements, cuts).requires_grad_()
        text = f"{text} of {x._layout}, {sizes}"
        numbered = torch.arange(whole.numel()).view(sizes)
        moved, want = function(numbered), function(whole)
        with torch.inference_mode(inference):
            y, sent = counted(lambda: function(x))  # noqa: B023
        compare(y, want.detach(), 0, text)
        steps = [(n, a, b) for n, a, b in zip(want.shape, y.stride(), want.stride(), strict=True) if n > 1]
        # On a meta tensor, torch's roll forgets the order.
        assert text.startswith("roll") or all(a == b for _, a, b in steps), text
        assert [p.is_shard() for p in y.placements] == [p.is_shard() for p in placements], f"{text}: {y._layout}"
        most = bytes_of_move(mesh, x, y, moved)
        assert set(sent) <= {"all_to_all"}, f"{text} sends {sent}"
        assert most is None or sent.get("all_to_all", (0, 0))[1] == most, f"{text} sends {sent}, {most} bytes are enough"
        if inference:
            continue
        upstream = numbers(draw, *want.shape)
        grad = place(upstream, mesh, y.placements, y._layout.cuts)
        (g,), sent = counted(lambda: torch.autograd.grad(y, x, grad))  # noqa: B023
        compare(g, torch.autograd.grad(want, whole, upstream)[0], 0, f"gradient of {text}")
        back = torch.empty_like(numbered.flatten())
        back[moved.flatten()] = torch.arange(moved.numel())
        most = bytes_of_move(mesh, y, g, back.view(sizes))
        assert g._layout == x._layout, f"gradient of {text}: {g._layout}"
        assert set(sent) <= {"all_to_all"}, f"gradient of {text} sends {sent}"
        assert most is None or sent.get("all_to_all", (0, 0))[1] == most, f"gradient of {text} sends {sent}, {most} bytes are enough"


# Exchanges at most; pads nothing at all.
QUIET: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "repeat": (lambda x: x.repeat(1, 2, 2, 2), {"all_to_all"}),
    "repeat in front": (lambda x: x.repeat(2, 1, 1, 2, 1), {"all_to_all"}),
    "pad here, crop there": (lambda x: F.pad(x, (-1, 2, 3, -2), value=0.5), set()),
    "crop and pad": (lambda x: F.pad(x, (4, -9, -3, 1)), set()),
    "nearest": (lambda x: F.interpolate(x, (7, 17)), {"all_to_all"}),
    "nearest by scale": (lambda x: F.interpolate(x, scale_factor=(0.7, 1.3), mode="nearest-exact"), {"all_to_all"}),
    "glu": (lambda x: F.glu(x, 2), {"all_to_all"}),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@on_ranks(3)
def test_nothing_is_gathered(inference):
    mesh = init_device_mesh("cpu", (3,))
    for (name, (function, kinds)), (d, cut) in itertools.product(QUIET.items(), ((2, [5, 0, 7]), (2, [4, 4, 4]), (3, [1, 8, 2]))):
        whole = numbers(random.Random(2), 1, 2, 12, 11).requires_grad_()
        x = place(whole, mesh, [Shard(d)], [cut]).requires_grad_()
        text = f"{name} of {x._layout}"
        want = function(whole)
        with torch.inference_mode(inference):
            y, sent = counted(lambda: function(x))  # noqa: B023
        compare(y, want.detach(), 1e-9, text)
        assert set(sent) <= kinds, f"{text} sends {sent}"
        if not inference:
            upstream = numbers(random.Random(3), *want.shape)
            grad = place(upstream, mesh, y.placements, y._layout.cuts)
            (g,), sent = counted(lambda: torch.autograd.grad(y, x, grad))  # noqa: B023
            compare(g, torch.autograd.grad(want, whole, upstream)[0], 1e-9, f"gradient of {text}")
            assert set(sent) <= kinds, f"gradient of {text} sends {sent}"


@on_ranks(3)
def test_flat_rolls_gather_nothing():
    """A roll without dims: of rows, what crosses a cut; of columns, two exchanges, there and into rows. Few values are gathered."""
    mesh = mesh_here()
    for d, cut in ((0, None), (0, [500, 0, 524]), (1, None), (1, [1, 0, 5])):
        whole = numbers(random.Random(2), 1024, 6).requires_grad_()
        x = place(whole, mesh, [Shard(d)], [cut]).requires_grad_()
        for by in (3, -1000):
            y, sent = counted(lambda: x.roll(by))  # noqa: B023
            text = f"roll({by}) of {x._layout} sends {sent}"
            compare(y, whole.roll(by).detach(), 0, text)
            assert set(sent) <= {"all_to_all"}, text
            assert d or sent["all_to_all"][1] <= abs(by) * whole.itemsize, text
            upstream = numbers(random.Random(3), *whole.shape)
            (g,), sent = counted(lambda: torch.autograd.grad(y, x, place(upstream, mesh, y.placements, y._layout.cuts)))  # noqa: B023
            compare(g, upstream.roll(-by), 0, f"gradient of {text}")
            assert set(sent) <= {"all_to_all"}, f"gradient of {text} sends {sent}"


# ---- ops that need whole planes: batch or channels are cut instead ----

# sizes, placement of the result
RECUT = [((4, 4, 8, 8), 0), ((1, 4, 8, 8), 1), ((1, 1, 8, 8), None)]


@pytest.mark.parametrize(("sizes", "to"), RECUT)
@on_ranks(3)
def test_whole_planes_are_recut(sizes, to):
    mesh = init_device_mesh("cpu", (3,))
    # In half precision windows are rounded too much to be known before.
    whole, samples = numbers(random.Random(1), *sizes).bfloat16().requires_grad_(), torch.full((*sizes[:2], 2), 0.4).bfloat16()
    x = place(whole, mesh, [Shard(2)], [[5, 0, 3]]).requires_grad_()
    y = F.fractional_max_pool2d(x, 3, 5, _random_samples=place(samples, mesh, [Replicate()], [None]))
    want = F.fractional_max_pool2d(whole, 3, 5, _random_samples=samples)
    assert y.placements == ((Replicate() if to is None else Shard(to)),)
    compare(y, want.detach(), 1e-9, "result")
    compare(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(want.sum(), whole)[0], 1e-9, "gradient")


# sizes of an image cut along its width, placement of its rows of patches: [batch, cells of a block, blocks]
WIDTHS = [((4, 2, 12, 9), 0), ((1, 2, 12, 9), 2), ((1, 5, 2, 9), 1)]


@pytest.mark.parametrize(("sizes", "to"), WIDTHS)
@on_ranks(3)
def test_patches_cut_along_the_width(sizes, to):
    mesh = init_device_mesh("cpu", (3,))
    whole = numbers(random.Random(1), *sizes).requires_grad_()
    x = place(whole, mesh, [Shard(3)], [[4, 0, 5]]).requires_grad_()
    y, sent = counted(lambda: F.unfold(x, (3, 2), padding=1))
    want = F.unfold(whole, (3, 2), padding=1)
    assert y.placements == (Shard(to),)
    compare(y, want.detach(), 1e-9, "result")
    columns = sizes[3] + 1

    def reads(ndim: int, at: Sequence[int]) -> list[tuple[int, int]]:
        boxes = [(0, n) for n in sizes]
        ((a, n),) = y._layout.intervals(to, y.shape[to], list(at))
        if to == 2:
            boxes[2] = hull([window(1, 1, 3, o) for o in range(a // columns, (a + n) // columns)])
        else:
            boxes[to] = (a, a + n) if to == 0 else (a // 6, (a + n) // 6)
        return boxes

    assert sent == {"all_to_all": (1, bytes_of_halo(mesh, x, reads))}, sent
    upstream = numbers(random.Random(2), *want.shape)
    (g,), sent = counted(lambda: torch.autograd.grad(y, x, place(upstream, mesh, y.placements, y._layout.cuts)))
    assert set(sent) <= {"all_to_all"}, sent
    compare(g, torch.autograd.grad(want, whole, upstream)[0], 1e-9, "gradient")


@on_ranks(3)
def test_patches_of_cut_channels():
    mesh = init_device_mesh("cpu", (3,))
    whole = numbers(random.Random(1), 2, 5, 6, 4).requires_grad_()
    x = place(whole, mesh, [Shard(1)], [[3, 0, 2]]).requires_grad_()

    def there_and_back(t: Any) -> Any:
        patches = F.unfold(t, 3, padding=1)
        assert not isinstance(patches, type(x)) or patches._layout.cuts == [[27, 0, 18]]
        return F.fold(patches * 2, (6, 4), 3, padding=1)

    y, sent = counted(lambda: there_and_back(x))
    want = there_and_back(whole)
    (g,), sent_back = counted(lambda: torch.autograd.grad(y, x, place(want.detach(), mesh, y.placements, y._layout.cuts)))
    assert not sent and not sent_back and y._layout == x._layout
    compare(y, want.detach(), 1e-9, "result")
    compare(g, torch.autograd.grad(want, whole, want.detach())[0], 1e-9, "gradient")


# ---- few bytes where values say what is read ----


@on_ranks(3)
def test_few_bytes():
    """What each call sends on three ranks with 5, 0 and 7 rows of an image [1, 2, 12, 8] of float64, in bytes: the most of any rank."""
    mesh = init_device_mesh("cpu", (3,))
    whole = numbers(random.Random(1), 1, 2, 12, 8)
    cuts = [[5, 0, 7]]
    x = place(whole, mesh, [Shard(2)], cuts).requires_grad_()
    plane, row = 2 * 8, 2 * 8 * 8
    pooled, places = F.max_pool2d(whole, 2, return_indices=True)
    half = [place(t, mesh, [Shard(2)], [[3, 0, 3]]) for t in (pooled, places)]
    grid = F.affine_grid(torch.eye(2, 3).double()[None], [1, 2, 12, 8], align_corners=False)
    g = place(grid, mesh, [Shard(1)], cuts)
    calls: dict[str, tuple[Callable[[], Any], Any, dict[str, int]]] = {
        # a maximum and its index for each channel
        "global": (lambda: F.adaptive_max_pool2d(x, 1), F.adaptive_max_pool2d(whole, 1), {"all_gather": 2 * plane}),
        "mean": (lambda: F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(whole, 1), {}),  # summands
        # half of the image, which no rank but the first has, and its first rows, to the last
        "repeat": (lambda: x.repeat(1, 1, 2, 1), whole.repeat(1, 1, 2, 1), {"all_to_all": 10 * row}),
        # how many values go to each rank, and whether all have a place; then values and places, of the row that the cuts separate
        "unpool": (lambda: F.max_unpool2d(*half, 2), F.max_unpool2d(pooled, places, 2), {"all_to_all": 4 * 8}),
        # which rows a rank reads; then a row and one to be sure
        "sample": (
            lambda: F.grid_sample(x, g, align_corners=False), F.grid_sample(whole, grid, align_corners=False),
            {"all_gather": 4 * 8, "all_to_all": 2 * row},
        ),
    }  # fmt: skip
    for name, (call, want, most) in calls.items():
        with strict_mode():
            y, sent = counted(call)
        compare(y, want, 1e-9, name)
        assert set(sent) == set(most), f"{name} sends {sent}"
        for kind, (_, size) in sent.items():
            assert size <= most[kind], f"{name} sends {sent}"
        if y.placements != (Replicate(),) and y.requires_grad:
            grad = place(torch.ones_like(want), mesh, y.placements, y._layout.cuts)
            _, sent = counted(lambda: torch.autograd.grad(y, x, grad))  # noqa: B023
            summed = whole.nbytes if y.placements == (Partial(),) else 0  # into the leaf's cut
            assert sum(size for _, size in sent.values()) <= 2 * sum(most.values()) + summed, f"backward of {name} sends {sent}"


@on_ranks(3)
def test_an_index_outside_the_plane_raises_on_all_ranks():
    mesh = init_device_mesh("cpu", (3,))
    values, places = numbers(random.Random(1), 1, 1, 6, 2), torch.arange(12).view(1, 1, 6, 2)
    places[0, 0, 5, 1] = 48  # of 0 .. 47
    x, at = (place(t, mesh, [Shard(2)], [[2, 2, 2]]) for t in (values, places))
    with pytest.raises(RuntimeError, match=r"an index of rank 2 lies outside of the planes of \[12, 4\]"):
        F.max_unpool2d(x, at, 2)
    places[0, 0, 5, 1] = 47
    at = place(places, mesh, [Shard(2)], [[2, 2, 2]])
    compare(F.max_unpool2d(x, at, 2), F.max_unpool2d(values, places, 2), 0, "the next call")


@on_ranks(3)
def test_adaptive_max_of_nan():
    mesh = init_device_mesh("cpu", (3,))
    whole = numbers(random.Random(1), 1, 2, 13, 7)
    whole[whole > 0.8], whole[whole < -0.3] = math.nan, -math.inf
    x = place(whole, mesh, [Shard(2)], [[8, 1, 4]])
    for got, want in zip(F.adaptive_max_pool2d(x, (5, 3), True), F.adaptive_max_pool2d(whole, (5, 3), True), strict=True):
        assert got.placements == (Shard(2),)
        torch.testing.assert_close(got.full_tensor(), want, equal_nan=True, rtol=0, atol=0)


@on_ranks(3)
def test_kernel_too_wide_raises_on_all_ranks():
    mesh = init_device_mesh("cpu", (3,))
    x = place(numbers(random.Random(1), 1, 1, 5, 5), mesh, [Shard(2)], [[4, 0, 1]])
    weight = place(numbers(random.Random(2), 1, 1, 8, 3), mesh, [Shard(0)], [None])
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        F.conv2d(x, weight, padding=1)


@on_ranks(3)
def test_gradients_of_a_piece_that_reaches_padding_alone():
    """What the second rank's row of a transposed convolution's input gives lies beyond the results, which other ranks have."""
    mesh = init_device_mesh("cpu", (3,))
    wholes = [numbers(random.Random(i), *sizes).requires_grad_() for i, sizes in enumerate([(2, 3, 7), (3, 4, 1), (4,)])]
    placed_as = [(Shard(2), [0, 1, 6]), (Replicate(), None), (Replicate(), None)]
    ours = [place(w.detach(), mesh, [p], [cut]).requires_grad_() for w, (p, cut) in zip(wholes, placed_as, strict=True)]
    want = F.conv_transpose1d(*wholes, stride=2, padding=5)
    got = F.conv_transpose1d(*ours, stride=2, padding=5)
    compare(got, want, 1e-9, "result")
    for g, w in zip(torch.autograd.grad(got.sum(), ours), torch.autograd.grad(want.sum(), wholes), strict=True):
        compare(g, w, 1e-9, "gradient")


@on_ranks(3)
def test_circular_in_inference_mode():
    mesh = init_device_mesh("cpu", (3,))
    whole = numbers(random.Random(1), 1, 2, 9, 4)
    x = place(whole, mesh, [Shard(2)], [[5, 0, 4]])
    with torch.inference_mode():
        y, sent = counted(lambda: F.pad(x, (1, 2, 3, 1), "circular"))
    assert set(sent) == {"all_to_all"} and y.placements == (Shard(2),)
    compare(y, F.pad(whole, (1, 2, 3, 1), "circular"), 0, "result")


# ---- the choice: halo, recut to the batch, or gather ----

# sizes of the input, rows of the kernel, mesh dims' placements of the result: four ranks, the rows cut evenly
CHOICES = [
    ((8, 2, 16, 64), 3, 2),
    ((8, 2, 16, 64), 15, 0),  # a rank would lack 12 of 16 rows: the batch is cut instead
    ((1, 2, 16, 64), 15, 2),  # no batch to cut; a gather would send as much, and end the cut
    ((8, 2, 256, 64), 15, 2),
]


@pytest.mark.parametrize(("sizes", "rows", "to"), CHOICES)
@on_ranks(4)
def test_choice(sizes, rows, to):
    mesh = init_device_mesh("cpu", (4,))
    draw = random.Random(1)
    whole, weight = numbers(draw, *sizes), numbers(draw, 2, 2, rows, 3)
    x, w = place(whole, mesh, [Shard(2)], [None]), place(weight, mesh, [Replicate()], [None])
    y = F.conv2d(x, w, padding="same")
    assert y.placements == (Shard(to),)
    compare(y, F.conv2d(whole, weight, padding="same"), 1e-9, "result")


# ---- networks: the cut passes through, and nothing is gathered ----


def unet(x: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
    """Down twice and up twice, with norms and skips."""
    act = lambda t: F.silu(F.group_norm(t, 2))  # noqa: E731
    a = act(F.conv3d(x, w[0], padding=1))
    b = act(F.conv3d(a, w[1], stride=2, padding=1))
    c = act(F.conv3d(F.max_pool3d(b, 2), w[2], padding=1))
    b = act(F.conv_transpose3d(c, w[3], stride=2)) + b
    a = torch.cat([a, F.interpolate(b, scale_factor=2, mode="trilinear")], 1)
    return F.conv3d(F.pad(a, (1, 1, 1, 1, 1, 1), "replicate"), w[4])


def run_unet(shape: tuple[int, ...], cuts: list[list[int]]) -> None:
    mesh = init_device_mesh("cpu", shape)
    draw = random.Random(1)
    kernels = [(4, 2, 3, 3, 3), (4, 4, 3, 3, 3), (4, 4, 3, 3, 3), (4, 4, 2, 2, 2), (2, 8, 3, 3, 3)]
    whole, weights = numbers(draw, 1, 2, 16, 16, 8), [numbers(draw, *k) / 4 for k in kernels]
    cut = [Shard(d) for d in (2, 3)[: len(shape)]]
    x = place(whole, mesh, cut, cuts).requires_grad_()
    w = [place(t, mesh, [Replicate()] * mesh.ndim, [None] * mesh.ndim).requires_grad_() for t in weights]
    plain = [t.requires_grad_() for t in (whole, *weights)]
    y, sent = counted(lambda: unet(x, w))
    want = unet(plain[0], plain[1:])
    assert set(sent) <= {"all_to_all", "all_reduce"}, sent  # all_reduce: the norms' sums
    assert y.placements == tuple(cut)
    compare(y, want.detach(), 1e-9, "result")
    upstream = numbers(draw, *want.shape)
    grad = place(upstream, mesh, y.placements, y._layout.cuts)
    grads, sent = counted(lambda: torch.autograd.grad(y, [x, *w], grad))
    assert set(sent) <= {"all_to_all", "all_reduce"}, sent
    for g, e in zip(grads, torch.autograd.grad(want, plain, upstream), strict=True):
        compare(g, e, 1e-9, "gradient")


UNETS = {"even": ((2,), [[8, 8]]), "uneven": ((3,), [[4, 0, 12]]), "odd": ((3,), [[5, 8, 3]]), "corners": ((2, 2), [[12, 4], [4, 12]])}


@pytest.mark.parametrize("case", UNETS)
def test_unet(pools, case):
    shape, cuts = UNETS[case]
    pools(math.prod(shape)).run(run_unet, shape, cuts)


# ---- in graphs ----


def network(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = torch.roll(F.pad(x, (1, 1, 1, 1), "circular"), 2, 2).flip(2)
    y = F.max_pool2d(F.relu(F.conv2d(x, w, b)), 3, 2, 1)
    y = F.interpolate(F.pad(y, (1, 1, 1, 1), "reflect"), scale_factor=2, mode="bilinear")
    return F.avg_pool2d(y, 3, 2, 1)


def run_compiled(ranks: list[int], cut: list[int], dynamic: bool) -> None:
    mesh = DeviceMesh("cpu", ranks)
    if mesh.get_coordinate() is None:
        return
    torch._dynamo.reset()
    draw = random.Random(3)
    function = torch.compile(network, backend="aot_eager", dynamic=dynamic)
    for width in (6, 8) if dynamic else (6,):
        whole = [numbers(draw, 2, 2, sum(cut), width), numbers(draw, 3, 2, 3, 3), numbers(draw, 3)]
        got = [place(t, mesh, [Replicate()], [None]).requires_grad_() for t in whole[1:]]
        got.insert(0, place(whole[0], mesh, [Shard(2)], [cut]).requires_grad_())
        plain = [t.requires_grad_() for t in whole]
        y, want = function(*got), network(*plain)
        assert y.placements == (Shard(2),)
        compare(y, want.detach(), 1e-9, "result")
        upstream = numbers(draw, *want.shape)
        grads = torch.autograd.grad(y, got, place(upstream, mesh, y.placements, y._layout.cuts))
        for g, w in zip(grads, torch.autograd.grad(want, plain, upstream), strict=True):
            compare(g, w, 1e-9, "gradient")


READ_BY_VALUES: dict[str, Callable[[Any, Any], Any]] = {
    "unpool": lambda x, g: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "sample": lambda x, g: F.grid_sample(x, g, align_corners=False),
    "sample by values": lambda x, g: F.grid_sample(x, g * x.mean().cos(), "bilinear", "border", False),
    "fractional": lambda x, g: F.fractional_max_pool2d(x, 2, 3, _random_samples=(g[:, :2, 0] * 0 + 0.3).detach()),
    "global": lambda x, g: F.adaptive_max_pool2d(x, 1),
    "repeat": lambda x, g: x.repeat(1, 1, 2, 1),
    "scans": lambda x, g: x.cumsum(2) + x.cumprod(2) + x.cummax(2).values,
}


# Inductor takes ten seconds a graph: it is tried on those that become `defer_call`.
@pytest.mark.parametrize(("backend", "names"), [("aot_eager", list(READ_BY_VALUES)), ("inductor", ["unpool", "sample"])])
@on_ranks(3, seconds=100)
def test_values_compiled(backend, names):
    """Where values decide what is sent, a graph makes eager mode's call when it runs: nothing is gathered."""
    mesh = init_device_mesh("cpu", (3,))
    backwards = place(torch.ones(3), DeviceMesh("cpu", torch.tensor([2, 1, 0])), [Shard(0)], [None])  # of the same group
    told: list[str] = []
    log, handler = logging.getLogger("shardtensor"), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log_gathers("once", all_ranks=True)
    for name, function in ((n, READ_BY_VALUES[n]) for n in names):
        torch._dynamo.reset()
        whole = [numbers(random.Random(1), 1, 2, 10, 6).requires_grad_(), numbers(random.Random(2), 1, 5, 4, 2).tanh()]
        x, grid = place(whole[0], mesh, [Shard(2)], [[4, 0, 6]]).requires_grad_(), place(whole[1], mesh, [Replicate()], [None])
        compiled = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)
        compiled(x, grid)
        (y, sent), want = counted(lambda: compiled(x, grid)), function(*whole)  # noqa: B023
        assert name not in ("unpool", "sample") or sent == counted(lambda: function(x, grid))[1], f"{name} sends {sent}"  # noqa: B023
        compare(y, want.detach(), 1e-9, name)
        upstream = numbers(random.Random(3), *want.shape)
        held = [Replicate() if p.is_partial() else p for p in y.placements]
        (g,) = torch.autograd.grad(y, x, place(upstream, mesh, held, y._layout.cuts))
        compare(g, torch.autograd.grad(want, whole[0], upstream)[0], 1e-9, f"gradient of {name}")
        log_gathers("once", all_ranks=True)  # again
        assert not told, (name, told)
    compare(backwards, torch.ones(3), 0, "on the other mesh")
    log_gathers("off")
    log.removeHandler(handler)


@on_ranks(3)
def test_on_meta():
    """Sizes without values: nothing can be asked of them."""
    mesh = init_device_mesh("cpu", (3,))
    whole = [numbers(random.Random(1), 1, 2, 10, 6), numbers(random.Random(2), 1, 5, 4, 2)]
    x, grid = (place(t.to("meta"), mesh, [p], [c]) for t, p, c in zip(whole, (Shard(2), Replicate()), ([4, 0, 6], None), strict=True))
    for name, function in READ_BY_VALUES.items():
        y = function(x.requires_grad_(), grid)
        assert y.is_meta and y.shape == function(*whole).shape, name
        (g,) = torch.autograd.grad(y, x, torch.empty_like(y).detach())
        assert g._layout == x._layout, f"{name}: {g._layout}"


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.flip(1).roll(2, 1).rot90(1, (1, 2)).flip(0, 2)


# Function, whether sizes are symbols, cuts of a dim of 12.
QUIET_GRAPHS: dict[str, tuple[Callable[[Any], Any], bool, list[list[int] | None]]] = {
    "turned": (turned, False, [None]),  # equal pieces
    "glu": (lambda x: F.glu(x, 1), True, [None, [5, 0, 7], [1, 10, 1]]),
}


@pytest.mark.parametrize("name", QUIET_GRAPHS)
@on_ranks(3, seconds=100)
def test_quiet_graphs(name):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    mesh, called = init_device_mesh("cpu", (3,)), []

    def keep(graph: Any, _: Any) -> Any:
        called.extend(n.target._opname for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
        return make_boxed_func(graph.forward)

    function, dynamic, cuts = QUIET_GRAPHS[name]
    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=keep), dynamic=dynamic)
    for cut in cuts:
        torch._dynamo.reset()
        called.clear()
        whole = numbers(random.Random(1), 2, 12, 4).requires_grad_()
        x = place(whole, mesh, [Shard(1)], [cut]).requires_grad_()
        y, want = compiled(x), function(whole)
        compare(y, want.detach(), 1e-12, f"{name} of {x._layout}")
        upstream = numbers(random.Random(2), *want.shape)
        (g,) = torch.autograd.grad(y, x, place(upstream, mesh, y.placements, y._layout.cuts))
        compare(g, torch.autograd.grad(want, whole, upstream)[0], 1e-12, f"gradient of {name} of {x._layout}")
        assert "all_to_all_single" in called and "all_gather_into_tensor" not in called, called


GRAPHS = {
    "all ranks": ([0, 1, 2], [9, 0, 4]),
    "thin": ([0, 1, 2], [1, 11, 1]),
    "part of the world": ([0, 2], [7, 6]),  # single messages are no ops of a graph there, so halos are gathered
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("where", GRAPHS)
def test_compiled(pools, where, dynamic):
    pools(3).run(run_compiled, *GRAPHS[where], dynamic, seconds=120)


@on_ranks((3,), (2, 2))
def test_dilated_convolutions_keep_an_even_cut(shape):
    """Convolutions of one image, dilated by less and more than a piece, and the image's mean, joined: an even cut stays even."""
    mesh = init_device_mesh("cpu", shape)
    image, small, kernel = (numbers(random.Random(i), *sizes) for i, sizes in enumerate([(2, 4, 5, 21), (3, 4, 1, 1), (3, 4, 3, 3)]))

    def pyramid(x, small, kernel):
        mean = F.conv2d(F.adaptive_avg_pool2d(x, 1), small).relu()
        parts = [F.conv2d(x, kernel, padding=d, dilation=d) for d in (1, 6, 12, 36)]
        return torch.cat([F.conv2d(x, small), *parts, F.interpolate(mean, x.shape[2:], mode="bilinear")], 1)

    rest = [Replicate()] * (mesh.ndim - 1)
    x = place(image, mesh, [*rest, Shard(3)], [None] * mesh.ndim).requires_grad_()
    y = pyramid(x, *(place(t, mesh, [*rest, Replicate()], [None] * mesh.ndim) for t in (small, kernel)))
    compare(y, pyramid(image, small, kernel), 1e-9, "pyramid")
    (g,) = torch.autograd.grad(y.sum(), x)
    assert y._layout == x._layout == g._layout, (y._layout, g._layout)


@on_ranks(3)
def test_integers_and_empties():
    """What torch computes of integers is right, and what it refuses of them, or of tensors without channels, all ranks refuse."""
    mesh = init_device_mesh("cpu", (3,))
    whole = torch.arange(-20, 28).view(1, 2, 6, 4)
    for cut in ([2, 4, 0], [0, 1, 5]):
        x = place(whole, mesh, [Shard(2)], [cut])
        for arguments in ((2, 1, 1), (3, 2, 1, True, False), (2, 1, 1, False, True, 3)):
            assert torch.equal(F.avg_pool2d(x, *arguments).full_tensor(), F.avg_pool2d(whole, *arguments)), arguments
        for refused in (
            lambda x: F.adaptive_max_pool2d(x, 1),
            lambda x: F.max_unpool2d(x, x.abs(), 1),
            lambda x: F.fractional_max_pool2d(x, 2, 3),
        ):
            with pytest.raises(NotImplementedError):
                refused(x)
    empty = place(torch.zeros(1, 0, 6, 4), mesh, [Shard(2)], [None])
    for name in ("nearest", "bilinear", "bicubic"):
        with pytest.raises(RuntimeError, match="Non-empty 4D data tensor expected"):
            F.interpolate(empty, (3, 5), mode=name)
    with pytest.raises(RuntimeError, match="Non-empty 4D data tensor expected"):
        F.interpolate(empty, (3, 5), mode="bicubic", antialias=True)
    with pytest.raises(RuntimeError, match="other non-zero dimensions for input"):
        F.unfold(empty, 2)
