"""The box copies behind redistribution: on CPU against torch's own indexing, on a GPU against the CPU."""

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shardtensor import _C

Box = tuple[list[int], list[int]]

DTYPES = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(), (7,), (40,), (6, 5), (5, 64), (3, 4, 5), (2, 3, 4, 6), (2, 3, 2, 3, 4)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def values(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Random, with NaN-free bits in every dtype."""
    if dtype == torch.bool:
        return (torch.rand(shape) > 0.5).to(device)
    if dtype.is_complex or dtype.is_floating_point:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return (torch.randn(shape, dtype=wide) * 4).to(dtype).to(device)
    return torch.randint(-100, 100, shape).to(dtype).to(device)


# Each makes a tensor of the given shape whose memory is laid out in its own way.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() else x.clone(),
    "strided": lambda x: spread(x, 2),
    "unaligned": lambda x: shifted(x),
    "rows": lambda x: padded_rows(x),
}


def spread(x: torch.Tensor, step: int) -> torch.Tensor:
    y = torch.empty([s * step for s in x.shape], dtype=x.dtype, device=x.device)[(slice(None, None, step),) * x.dim()]
    return y.copy_(x)


def shifted(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def padded_rows(x: torch.Tensor) -> torch.Tensor:
    if not x.dim():
        return x.clone()
    return torch.empty([*x.shape[:-1], x.shape[-1] + 3], dtype=x.dtype, device=x.device)[..., : x.shape[-1]].copy_(x)


def random_boxes(shape: tuple[int, ...], count: int, rng: random.Random) -> list[Box]:
    """Anywhere, overlapping too; some empty, some whole along a dim."""
    boxes = []
    for _ in range(count):
        offsets, sizes = [], []
        for s in shape:
            low = rng.choice([0, rng.randint(0, s)])
            offsets.append(low)
            sizes.append(rng.choice([s - low, rng.randint(0, s - low)]))
        boxes.append((offsets, sizes))
    return boxes


def disjoint_boxes(shape: tuple[int, ...], rng: random.Random) -> list[Box]:
    """Cuts the whole unevenly: every element is in exactly one box."""
    boxes: list[Box] = [([], [])]
    for s in shape:
        cuts = sorted(rng.randint(0, s) for _ in range(rng.randint(0, 3)))
        runs = list(zip([0, *cuts], [*cuts, s], strict=True))
        boxes = [([*o, a], [*n, b - a]) for o, n in boxes for a, b in runs]
    rng.shuffle(boxes)
    return boxes


def part(x: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        x = x.narrow(dim, offset, size)
    return x


def numel(boxes: list[Box]) -> int:
    return sum(functools.reduce(operator.mul, sizes, 1) for _, sizes in boxes)


def packed(x: torch.Tensor, boxes: list[Box]) -> torch.Tensor:
    pieces = [part(x, b).reshape(-1) for b in boxes]
    return torch.cat(pieces) if pieces else x.new_empty(0)


def unpacked(flat: torch.Tensor, boxes: list[Box], target: torch.Tensor) -> torch.Tensor:
    out, at = target.clone(), 0
    for b in boxes:
        n = numel([b])
        part(out, b).copy_(flat[at : at + n].view(b[1]))
        at += n
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    if a.dtype == torch.float8_e4m3fn:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def new_flat(n: int, x: torch.Tensor, ahead: int = 0) -> torch.Tensor:
    return values((n + ahead,), x.dtype, x.device.type)[ahead:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_and_unpack(dtype: torch.dtype, layout: str, device: str) -> None:
    rng = random.Random(f"{dtype}{layout}")
    for shape in SHAPES:
        x = LAYOUTS[layout](values(shape, dtype, device))
        boxes = random_boxes(shape, 5, rng)
        flat = new_flat(numel(boxes), x, rng.randint(0, 3))
        _C.pack(x, boxes, flat)
        same(flat, packed(x, boxes))
        boxes = disjoint_boxes(shape, rng)
        boxes = boxes[: len(boxes) // 2 + 1]  # elements outside the boxes must not change
        flat = new_flat(numel(boxes), x, rng.randint(0, 3))
        expected = unpacked(flat, boxes, x)
        _C.unpack(flat, boxes, x)
        same(x, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_with_gaps(dtype: torch.dtype, device: str) -> None:
    """The boxes of each part start at a multiple of some elements. What lies between the parts is not written."""
    rng = random.Random(f"gaps {dtype}")
    for shape in SHAPES:
        for elements in (1, 4, 16):
            x = values(shape, dtype, device)
            lists = [random_boxes(shape, rng.randint(0, 3), rng) for _ in range(4)]
            parts, boxes = [numel(some) for some in lists], [box for some in lists for box in some]
            starts = [sum(-(-n // elements) * elements for n in parts[:i]) for i in range(5)]
            flat = new_flat(starts[4], x)
            want = flat.clone()
            for start, n, some in zip(starts, parts, lists, strict=False):
                want[start : start + n] = packed(x, some)
            _C.pack(x, boxes, flat, parts, elements)
            same(flat, want)
            lists = [[box] for box in disjoint_boxes(shape, rng)]
            parts, boxes = [numel(some) for some in lists], [some[0] for some in lists]
            starts = [sum(-(-n // elements) * elements for n in parts[:i]) for i in range(len(parts) + 1)]
            flat = new_flat(starts[-1], x)
            compact = [flat[start : start + n] for start, n in zip(starts, parts, strict=False)]
            expected = unpacked(torch.cat(compact) if compact else flat, boxes, x)
            _C.unpack(flat, boxes, x, parts, elements)
            same(x, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_boxes(dtype: torch.dtype, device: str) -> None:
    rng = random.Random(str(dtype))
    for shape in SHAPES:
        source_shape = tuple(s + 2 for s in shape)
        for layout in LAYOUTS.values():
            source, target = layout(values(source_shape, dtype, device)), layout(values(shape, dtype, device))
            to = disjoint_boxes(shape, rng)[1:]
            start = [([rng.randint(0, 2) + o for o in offsets], sizes) for offsets, sizes in to]
            expected = unpacked(packed(source, start), to, target)
            _C.copy_boxes(source, start, target, to)
            same(target, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_expanded_conjugated_and_negated_sources(device: str) -> None:
    x = values((4, 5), torch.complex64, device)
    boxes: list[Box] = [([0, 0, 0], [3, 4, 5]), ([1, 1, 2], [2, 1, 3]), ([2, 0, 1], [1, 4, 4])]
    for source in (x.expand(3, 4, 5), x[:, :1].expand(3, 4, 5), x.conj().expand(3, 4, 5), x.conj().imag.expand(3, 4, 5)):
        flat = new_flat(numel(boxes), source)
        _C.pack(source, boxes, flat)
        same(flat, packed(source.resolve_conj().resolve_neg(), boxes))
    target = values((3, 4, 5), torch.complex64, device)
    flat = new_flat(60, x).conj()
    _C.unpack(flat, boxes[:1], target)
    same(target, flat.resolve_conj().view(3, 4, 5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("count", [60, 90, 5000])  # boxes fit in the kernel's arguments, or not
def test_many_boxes(count: int, dtype: torch.dtype, device: str) -> None:
    rng = random.Random(count)
    x = values((count, 3, 8), dtype, device)
    boxes = [([i, 0, rng.randint(0, 3)], [1, rng.randint(0, 3), rng.randint(0, 5)]) for i in range(count)]
    flat = new_flat(numel(boxes), x)
    _C.pack(x, boxes, flat)
    same(flat, packed(x, boxes))
    back = torch.zeros_like(x)
    _C.unpack(flat, boxes, back)
    same(back, unpacked(flat, boxes, torch.zeros_like(x)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 400_001), (400_001, 3), (1200, 17, 61), (1_200_000,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_boxes_of_many_tiles(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    rng = random.Random(str(shape))
    x = torch.arange(functools.reduce(operator.mul, shape), device=device).view(shape).to(dtype)
    boxes = [([0] * len(shape), list(shape)), *random_boxes(shape, 3, rng)]
    flat = new_flat(numel(boxes), x)
    _C.pack(x, boxes, flat)
    same(flat, packed(x, boxes))
    boxes = disjoint_boxes(shape, rng)
    flat = new_flat(numel(boxes), x)
    target = x.movedim(0, -1).contiguous().movedim(-1, 0)
    _C.unpack(flat, boxes, target)
    same(target, unpacked(flat, boxes, x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", [0, 1])  # on a cache line or not
@pytest.mark.parametrize("run", [1, 3, 16, 32, 100, 128, 200, 1024])
def test_rows_too_many_for_a_cache(run: int, start: int, device: str) -> None:
    rows, pieces = 1_400_000 // (5 * run), 5
    x = torch.arange(rows * pieces * run, dtype=torch.float32, device=device).view(rows, pieces * run)
    boxes = [([0, i * run], [rows, run]) for i in range(pieces)]
    flat = torch.zeros(x.numel() + start, device=device)[start:]
    _C.pack(x, boxes, flat)
    same(flat, packed(x, boxes))
    back = torch.zeros(x.numel() + start, device=device)[start:].view_as(x)
    _C.unpack(flat, boxes, back)
    same(back, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(16))
def test_uneven_boxes_too_many_for_a_cache(seed: int, device: str) -> None:
    rng = random.Random(seed)
    dtype = rng.choice([torch.uint8, torch.int16, torch.float32, torch.complex128])
    numel_wanted = rng.randint(5 << 20, 6 << 20) // dtype.itemsize  # too large to be copied through the caches
    inner = [rng.choice([1, 2, 5, 40, 64, 128, 300, 512, 4096]) for _ in range(rng.choice([0, 1, 1, 2]))]
    shape = (numel_wanted // math.prod(inner) + 1, *inner)
    x = padded_rows(torch.arange(math.prod(shape), device=device).view(shape).to(dtype))
    few = disjoint_boxes(shape, rng)
    many = [([*o[:-1], o[-1] + i], [*n[:-1], 1]) for o, n in few for i in range(n[-1])] if inner and inner[-1] <= 64 else few
    for boxes in (few, many, random_boxes(shape, 3, rng)):
        flat = new_flat(numel(boxes), x, ahead=rng.choice([0, 1, 64]))
        _C.pack(x, boxes, flat)
        same(flat, packed(x, boxes))
    for boxes in (few, many):
        flat = packed(x, boxes)
        target = torch.zeros_like(x)
        _C.unpack(flat, boxes, target)
        same(target, x)
        target = shifted(torch.zeros_like(x))
        _C.copy_boxes(x, boxes, target, boxes)
        same(target, x)


@pytest.mark.parametrize("device", DEVICES)
def test_eight_dims_with_gaps(device: str) -> None:
    shape = (2, 3, 2, 2, 3, 2, 2, 2)
    x = spread(values(shape, torch.float32, device), 2)
    boxes = random_boxes(shape, 20, random.Random(8))
    flat = new_flat(numel(boxes), x)
    _C.pack(x, boxes, flat)
    same(flat, packed(x, boxes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8], ids=str)
def test_casts(source: torch.dtype, to: torch.dtype, device: str) -> None:
    rng = random.Random(f"{source}{to}")
    for shape in [(), (37,), (5, 64), (3, 5, 7)]:
        for layout in LAYOUTS.values():
            x, target = layout(values(shape, source, device)), layout(values(shape, to, device))
            boxes = disjoint_boxes(shape, rng)
            flat = new_flat(numel(boxes), target)
            _C.pack(x, boxes, flat)
            same(flat, packed(x, boxes).to(to))
            flat = new_flat(numel(boxes), x)
            expected = unpacked(flat.to(to), boxes, target)
            _C.unpack(flat, boxes, target)
            same(target, expected)
            _C.copy_boxes(x, boxes, target, boxes)
            same(target, x.to(to))


# ---- reductions

ARITHMETIC: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
}
ORDER = {"min": torch.minimum, "max": torch.maximum}
BITS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REDUCTIONS = [
    *((op, t) for op in [*ARITHMETIC, *ORDER] for t in FLOATS),
    *((op, t) for op in ARITHMETIC for t in (torch.complex64, torch.complex128)),
    *((op, t) for op in [*ARITHMETIC, *ORDER, *BITS] for t in INTEGERS),
    *((op, torch.bool) for op in [*ARITHMETIC, *ORDER, *BITS]),
]


def reduced(op: str, pieces: torch.Tensor) -> torch.Tensor:
    """Reduces in the order of the parts: half types in float, integers in int64."""
    dtype = pieces.dtype
    if dtype == torch.bool:
        op = {"sum": "bor", "avg": "bor", "product": "band", "min": "band", "max": "bor"}.get(op, op)
    elif dtype in (torch.float16, torch.bfloat16):
        pieces = pieces.float()
    elif not (dtype.is_floating_point or dtype.is_complex):
        pieces = pieces.long()
    out = functools.reduce({**ARITHMETIC, **ORDER, **BITS}[op], pieces.unbind())
    if op == "avg":
        integer = not (dtype.is_floating_point or dtype.is_complex)
        out = torch.div(out, len(pieces), rounding_mode="trunc") if integer else out / len(pieces)
    return out.to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=str)
def test_unpack_reduce(op: str, dtype: torch.dtype, device: str) -> None:
    rng = random.Random(f"{op}{dtype}")
    for shape in [(), (41,), (5, 64), (3, 5, 7)]:
        for name, parts in [("contiguous", 1), ("transposed", 2), ("strided", 3), ("unaligned", 5), ("contiguous", 8)]:
            target = LAYOUTS[name](values(shape, dtype, device))
            boxes = disjoint_boxes(shape, rng)[:7]
            flat = new_flat(numel(boxes) * parts, target)
            if dtype.is_floating_point and flat.numel():
                flat[rng.randrange(flat.numel())] = torch.nan
            expected = unpacked(reduced(op, flat.view(parts, -1)), boxes, target)
            _C.unpack_reduce(flat, parts, boxes, op, target)
            if dtype.is_complex:  # torch may round products and quotients differently
                torch.testing.assert_close(target, expected)
            else:
                same(target, expected)


def test_a_reduction_of_many_tiles() -> None:
    flat = torch.randn(3 * 700 * 1001)
    target = torch.zeros(701, 1002)
    _C.unpack_reduce(flat, 3, [([1, 1], [700, 1001])], "sum", target)
    same(target[1:, 1:], reduced("sum", flat.view(3, 700, 1001)))
    assert not target[0].any() and not target[:, 0].any()


# ---- errors: each names the argument, and comes before anything is written

X = torch.zeros(4, 6)
WHOLE: list[Box] = [([0, 0], [4, 6])]
ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "flat too small": (lambda: _C.pack(X, WHOLE, torch.zeros(23)), "`flat` has 23 elements where the boxes have 24"),
    "parts of other boxes": (lambda: _C.pack(X, WHOLE, torch.zeros(40), [20], 16), r"the parts have \[20\] elements where the boxes have 24"),
    "flat too small for gaps": (lambda: _C.pack(X, WHOLE, torch.zeros(24), [24], 16), "`flat` has 24 elements where the boxes have 32"),
    "flat of 2 dims": (lambda: _C.pack(X, WHOLE, torch.zeros(4, 6)), "`flat` must be 1-d and contiguous"),
    "flat with gaps": (lambda: _C.unpack(torch.zeros(48)[::2], WHOLE, X), "`flat` must be 1-d and contiguous"),
    "box too large": (lambda: _C.pack(X, [([1, 0], [4, 6])], torch.zeros(24)), "box 0 of `source`"),
    "negative offset": (lambda: _C.pack(X, [([0, -1], [4, 6])], torch.zeros(24)), "box 0 of `source`"),
    "negative size": (lambda: _C.pack(X, [*WHOLE, ([0, 0], [-4, -6])], torch.zeros(48)), "box 1 of `source`"),
    "huge offset": (lambda: _C.pack(X, [([0, 2**63 - 1], [4, 6])], torch.zeros(24)), "box 0 of `source`"),
    "box of 1 dim": (lambda: _C.unpack(torch.zeros(24), [([0], [4])], X), "box 0 of `target`"),
    "other device": (lambda: _C.pack(X.to("meta"), WHOLE, torch.zeros(24)), "`source` is on meta and `flat` on cpu"),
    "expanded target": (lambda: _C.unpack(torch.zeros(24), WHOLE, torch.zeros(6).expand(4, 6)), "`target`.* expanded"),
    "conjugate target": (
        lambda: _C.unpack(torch.zeros(24, dtype=torch.complex64), WHOLE, torch.zeros(4, 6, dtype=torch.complex64).conj()),
        "`target`.*conjugate",
    ),
    "complex to real": (lambda: _C.pack(X.to(torch.complex64), WHOLE, torch.zeros(24)), "`source`.*cannot be cast to `flat`"),
    "box counts": (lambda: _C.copy_boxes(X, WHOLE, X.clone(), []), "`from` has 1 boxes and `to` has 0"),
    "box sizes": (lambda: _C.copy_boxes(X, WHOLE, X.clone(), [([0, 0], [4, 5])]), "box 0 has sizes .4, 6. in `from`"),
    "onto itself": (lambda: _C.copy_boxes(X, WHOLE, X, WHOLE), "memory"),
    "sparse": (lambda: _C.pack(X.to_sparse(), WHOLE, torch.zeros(24)), "`source` must be a dense tensor"),
    "no parts": (lambda: _C.unpack_reduce(torch.zeros(24), 0, WHOLE, "sum", X), "`parts` is 0"),
    "parts too small": (lambda: _C.unpack_reduce(torch.zeros(47), 2, WHOLE, "sum", X), "`flat` has 47 elements"),
    "reduced and cast": (lambda: _C.unpack_reduce(torch.zeros(24).double(), 1, WHOLE, "sum", X), "`flat` has dtype Double"),
    "bits of floats": (lambda: _C.unpack_reduce(torch.zeros(24), 1, WHOLE, "band", X), "`op` band is not defined for Float"),
    "order of complex": (
        lambda: _C.unpack_reduce(torch.zeros(24, dtype=torch.complex64), 1, WHOLE, "max", X.to(torch.complex64)),
        "`op` max is not defined for ComplexFloat",
    ),
    "unknown reduction": (lambda: _C.unpack_reduce(torch.zeros(24), 1, WHOLE, "mean", X), "'mean' is unknown"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, says = ERRORS[name]
    with pytest.raises((RuntimeError, ValueError), match=says):
        call()


def test_meta_tensors_pass() -> None:
    _C.pack(X.to("meta"), WHOLE, torch.zeros(24, device="meta"))


# ---- only a GPU can show these


@needs_gpu
@pytest.mark.parametrize("count", [3, 500])  # boxes fit in one launch's arguments, or need several launches
def test_in_a_cuda_graph(count: int) -> None:
    x = values((count, 4, 8), torch.float32, "cuda")
    boxes: list[Box] = [([i, 1, 2], [1, 3, 5]) for i in range(count)]
    flat, back = torch.zeros(numel(boxes), device="cuda"), torch.zeros_like(x)
    total = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _C.pack(x, boxes, flat)
        _C.unpack(flat, boxes, back)
        _C.unpack_reduce(flat, 1, boxes, "sum", total)
    for _ in range(2):
        x.copy_(values(tuple(x.shape), torch.float32))
        graph.replay()
        same(flat, packed(x, boxes))
        same(back, unpacked(flat, boxes, torch.zeros_like(x)))
        same(total, back)


@needs_gpu
def test_on_the_current_stream() -> None:
    x = torch.zeros(1 << 22, device="cuda")
    flat = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(1)
        _C.pack(x, [([0], [x.numel()])], flat)
    stream.synchronize()
    assert bool((flat == 1).all())


@needs_gpu
@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS, ids=str)
def test_twins_reduce_alike(op: str, dtype: torch.dtype) -> None:
    parts, boxes = 7, [([1, 3], [30, 64]), ([40, 0], [9, 129])]
    flat = values((parts * numel(boxes),), dtype)
    here, there = torch.zeros(50, 130, dtype=dtype), torch.zeros(50, 130, dtype=dtype, device="cuda")
    _C.unpack_reduce(flat, parts, boxes, op, here)
    _C.unpack_reduce(flat.cuda(), parts, boxes, op, there)
    same(there.cpu(), here)


@needs_gpu
def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 16 << 30:
        pytest.skip("a GPU of less than 16 GiB")
    n = 2**31 + 5
    x = torch.zeros(2, n, dtype=torch.uint8, device="cuda")
    x[1, -3:] = 7
    flat = torch.ones(n + 3, dtype=torch.uint8, device="cuda")
    _C.pack(x, [([1, 0], [1, n]), ([1, n - 3], [1, 3])], flat)
    assert flat[:-6].count_nonzero() == 0 and flat[-6:].tolist() == [7] * 6
