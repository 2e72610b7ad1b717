"""What windowed ops read along one dim: the arithmetic of reaches, compared with windows listed index by index, without processes."""

from __future__ import annotations

import itertools
import random

import pytest
from shardtensor import _C


def conv(size, k, s, p, d):
    """(line, results, the operand's indices that each result reads, padding among them)"""
    span = (k - 1) * d + 1
    results = (size + 2 * p - span) // s + 1
    return (s, 1, -p, span - 1 - p), results, [[o * s - p + j * d for j in range(k)] for o in range(results)]


def conv_transpose(size, k, s, p, d):
    span = (k - 1) * d + 1
    results = (size - 1) * s - 2 * p + span
    hits = [[i for i in range(-span, size + span) if 0 <= o + p - i * s < span] for o in range(results)]
    return (1, s, p - span + s, p), results, hits


def adaptive(size, results):
    windows = [range(o * size // results, -(-(o + 1) * size // results)) for o in range(results)]
    return (size, results, 0, size - 1), results, [list(w) for w in windows]


def random_op(draw):
    size = draw.randint(1, 20)
    kind = draw.choice((conv, conv_transpose, adaptive))
    if kind is adaptive:
        return size, *adaptive(size, draw.randint(1, 24))
    return size, *kind(size, draw.randint(1, 5), draw.randint(1, 4), draw.randint(0, 6), draw.randint(1, 3))


def pieces(draw, size, ranks):
    at = [0, *sorted(draw.randint(0, size) for _ in range(ranks - 1)), size]
    return list(itertools.pairwise(at))


@pytest.mark.parametrize("seed", range(4))
def test_reads_what_the_windows_hold(seed):
    draw = random.Random(seed)
    seen = 0
    while seen < 1000:
        size, line, results, windows = random_op(draw)
        if results < 1:
            continue
        seen += 1
        for a, b in pieces(draw, results, draw.randint(1, 5)):
            before, start, length, after = _C.reach_read(line, a, b - a, size)
            cells = [i for w in windows[a:b] for i in w]
            if a == b:
                assert (before, length, after) == (0, 0, 0)
            elif cells:
                assert start - before <= min(cells), (line, size, a, b)
                assert start + length + after > max(cells)
                inside = [i for i in cells if 0 <= i < size]
                assert not inside or (start <= min(inside) and max(inside) < start + length)
            assert start >= 0 or not length
            assert start + length <= size or not length
            assert not before or start <= 0 or not length
            assert not after or start + length >= size or not length


@pytest.mark.parametrize("seed", range(4))
def test_reads_no_more(seed):
    """A convolution's windows begin and end in what they read, so a run of them reads exactly from the first to the last."""
    draw = random.Random(seed)
    for _ in range(1000):
        size, k, s, p, d = draw.randint(1, 20), draw.randint(1, 5), draw.randint(1, 4), draw.randint(0, 6), draw.randint(1, 3)
        line, results, windows = conv(size, k, s, p, d)
        for a, b in pieces(draw, max(results, 0), 3):
            if a < b:
                before, start, length, after = _C.reach_read(line, a, b - a, size)
                assert (start - before, start + length + after) == (min(windows[a]), max(windows[b - 1]) + 1)


@pytest.mark.parametrize("seed", range(4))
def test_mirror_finds_the_readers(seed):
    draw = random.Random(seed)
    for _ in range(1000):
        size, line, results, _windows = random_op(draw)
        back = _C.reach_mirror(line)
        assert _C.reach_mirror(back) == list(line)
        if results < 1:
            continue
        num, den, first, last = line
        hulls = [((num * o + first) // den, (num * o + last) // den + 1) for o in range(results)]
        for p, q in pieces(draw, size, draw.randint(1, 5)):
            _, start, length, _ = _C.reach_read(back, p, q - p, results)
            readers = [o for o, (lo, hi) in enumerate(hulls) if max(lo, p) < min(hi, q)]
            assert set(readers) <= set(range(start, start + length)), (line, size, p, q)
            if readers and all(lo < hi for lo, hi in hulls):
                assert (readers[0], readers[-1] + 1) == (start, start + length)


def result_cuts(line, cuts, results):
    at = [0, *itertools.accumulate(cuts)]
    ends = [_C.reach_cut(line, c, at[-1], results) for c in at]
    return [b - a for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("seed", range(4))
def test_cuts_keep_order_sum_and_empty_pieces(seed):
    draw = random.Random(seed)
    for _ in range(2000):
        size, line, results, _ = random_op(draw)
        if results < 1:
            continue
        cuts = [b - a for a, b in pieces(draw, size, draw.randint(1, 6))]
        out = result_cuts(line, cuts, results)
        assert sum(out) == results
        assert min(out) >= 0
        assert not any(o for c, o in zip(cuts, out, strict=True) if not c)


# ---- beyond the edges lies the dim itself ----


def reflected(e, size):
    return -e if e < 0 else e if e < size else 2 * (size - 1) - e


def replicated(e, size):
    return min(max(e, 0), size - 1)


SOURCES = {"reflect": reflected, "replicate": replicated}


@pytest.mark.parametrize("beyond", SOURCES)
def test_reads_beyond_the_edges(beyond):
    draw = random.Random(beyond)
    for _ in range(3000):
        size = draw.randint(1, 12)
        left, right = (draw.randint(0, size - 1 if beyond == "reflect" else 5) for _ in range(2))
        results = size + left + right
        shows = [SOURCES[beyond](o - left, size) for o in range(results)]
        for a, b in pieces(draw, results, 4):
            if a < b:
                before, start, length, after = _C.reach_read((1, 1, -left, -left), a, b - a, size, beyond)
                assert (before, start, start + length, after) == (0, min(shows[a:b]), max(shows[a:b]) + 1, 0)
        for p, q in pieces(draw, size, 4):
            readers = [o for o, i in enumerate(shows) if p <= i < q]
            if p < q:
                _, start, length, _ = _C.reach_read((1, 1, left, left), p, q - p, results, beyond, size)
                assert (start, start + length) == (readers[0], readers[-1] + 1)


def test_reads_backwards_and_round_the_edges():
    draw = random.Random(0)
    for _ in range(3000):
        size, shift = draw.randint(1, 12), draw.randint(-15, 15)
        for a, b in pieces(draw, size, 4):
            assert a == b or _C.reach_cut((-1, 1, size - 1, size - 1), a, size, size) == a
            before, start, length, after = _C.reach_read((-1, 1, size - 1, size - 1), a, b - a, size)
            assert [*range(start, start + length)][::-1] == [size - 1 - o for o in range(a, b)]
            assert (before, after) == (0, 0)
            before, start, length, after = _C.reach_read((1, 1, -shift, -shift), a, b - a, size, "circular")
            assert [i % size for i in range(start, start + length)] == [(o - shift) % size for o in range(a, b)]
            assert (before, after) == (0, 0)


# operand's cuts, op, results' cuts
CUTS = [
    ([5, 3, 0, 12], conv(20, 3, 1, 1, 1), [5, 3, 0, 12]),
    ([5, 3, 0, 12], conv(20, 3, 1, 0, 1), [4, 3, 0, 11]),
    ([5, 3, 0, 12], conv(20, 3, 2, 1, 1), [3, 1, 0, 6]),
    ([5, 3, 0, 12], conv_transpose(20, 4, 2, 1, 1), [10, 6, 0, 24]),
    ([5, 3, 0, 12], adaptive(20, 7), [2, 1, 0, 4]),
    ([4, 8, 0, 12], conv(24, 4, 4, 0, 1), [1, 2, 0, 3]),  # patches: nothing is sent
    ([4, 8, 0, 12], conv(24, 3, 2, 1, 1), [2, 4, 0, 6]),  # halved ...
    ([2, 4, 0, 6], conv_transpose(12, 2, 2, 0, 1), [4, 8, 0, 12]),  # ... and doubled again
]


@pytest.mark.parametrize(("cuts", "op", "want"), CUTS)
def test_result_cuts(cuts, op, want):
    assert result_cuts(op[0], cuts, op[1]) == want
