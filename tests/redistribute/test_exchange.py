"""Moves data from one list of boxes on ranks to another. No layout could describe these boxes."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from shardtensor import _C
from shardtensor.tensor._mesh import group_mesh

WHOLE = (6, 7)


def whole(dtype=torch.float32):
    return torch.arange(WHOLE[0] * WHOLE[1]).view(WHOLE).to(dtype)


def at(t, offsets, sizes):
    return t[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


def cut_randomly(draw, box, depth):
    """Cuts a box into parts that tile it, some of them empty."""
    offsets, sizes = box
    if depth == 0:
        return [box]
    d = draw.randrange(len(sizes))
    n = draw.randint(0, sizes[d])
    first = (offsets, [*sizes[:d], n, *sizes[d + 1 :]])
    second = ([*offsets[:d], offsets[d] + n, *offsets[d + 1 :]], [*sizes[:d], sizes[d] - n, *sizes[d + 1 :]])
    return cut_randomly(draw, first, depth - 1) + cut_randomly(draw, second, depth - 1)


def placed(draw, ranks, depth):
    return [(draw.choice(ranks), o, n) for o, n in cut_randomly(draw, ([0, 0], list(WHOLE)), depth)]


def needed(held, wanted, me):
    """The fewest elements that others must send to this rank."""
    mine = torch.zeros(WHOLE, dtype=torch.bool)
    for rank, o, n in held:
        if rank == me:
            at(mine, o, n).fill_(True)
    return sum(int((~at(mine, o, n)).sum()) for rank, o, n in wanted if rank == me)


def exchange(pieces, held, wanted, group=None, dtype=torch.float32):
    return _C.exchange_boxes(pieces, held, wanted, group_mesh(group, "cpu"), dtype, torch.device("cpu"))


def check(held, wanted, dtype=torch.float32):
    me = dist.get_rank()
    pieces = [at(whole(dtype), o, n).clone() for rank, o, n in held if rank == me]
    _C.reset_comm_counts()
    out = exchange(pieces, held, wanted, dtype=dtype)
    sent = sum(b for _, b in _C.comm_counts().values())
    expected = [at(whole(dtype), o, n) for rank, o, n in wanted if rank == me]
    assert len(out) == len(expected)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(out, expected, strict=True))
    totals = torch.tensor([sent, needed(held, wanted, me) * torch.empty((), dtype=dtype).element_size()])
    dist.all_reduce(totals)
    assert totals[0] == totals[1]


def exchanges_of_random_boxes():
    ranks = list(range(dist.get_world_size()))
    for seed in range(25):
        draw = random.Random(seed)
        held = placed(draw, ranks, draw.randint(0, 4))
        check(held, placed(draw, ranks, draw.randint(0, 4)), draw.choice([torch.float32, torch.bool, torch.int16]))
        # Held twice, with other owners and cuts the second time. Wanted whole: by all ranks, and by one twice.
        everyone = [(rank, [0, 0], list(WHOLE)) for rank in ranks]
        check(held + placed(draw, ranks, 3), everyone)
        check(held, [everyone[-1], everyone[-1]])
        check(held, [])


def values_are_cast():
    rank, n = dist.get_rank(), dist.get_world_size()
    held = [(r, [r], [1]) for r in range(n)]
    (out,) = exchange([torch.tensor([rank + 0.5])], held, [(r, [0], [n]) for r in range(n)], dtype=torch.float64)
    assert out.dtype == torch.float64 and out.tolist() == [r + 0.5 for r in range(n)]


def errors_come_on_all_ranks():
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = [torch.zeros(2)] if rank == 0 else []
    with pytest.raises(RuntimeError, match=r"no rank holds 1 elements of offsets \[1\], sizes \[2\] on rank 1"):
        exchange(mine, [(0, [0], [2])], [(1, [1], [2])])
    with pytest.raises(RuntimeError, match=f"held: offsets .* on rank {n}, a rank that is not in"):
        exchange([], [(n, [0], [2])], [])
    with pytest.raises(RuntimeError, match="as many offsets and sizes as it has dims"):
        exchange(mine, [(0, [0], [2]), (1, [0, 0], [1, 1])], [])
    with pytest.raises(RuntimeError, match=r"wanted: .*as many offsets and sizes as it has dims"):
        exchange(mine, [(0, [0], [2])], [(1, [0, 0], [1, 1])])


def in_a_group_of_some_ranks():
    n = dist.get_world_size()
    groups = [dist.new_group([0, n - 1]), dist.new_group([1])]  # all ranks make all groups
    for group, ranks in zip(groups, ([0, n - 1], [1]), strict=True):
        if dist.get_rank() in ranks:
            half = 3
            held = [(ranks[0], [0, 0], [half, 7]), (ranks[-1], [half, 0], [6 - half, 7])]
            me = dist.get_rank()
            pieces = [at(whole(), o, s) for rank, o, s in held if rank == me]
            wanted = [(rank, [0, 0], list(WHOLE)) for rank in ranks]
            (out,) = exchange(pieces, held, wanted, group)
            assert torch.equal(out, whole())


CASES = [exchanges_of_random_boxes, values_are_cast, errors_come_on_all_ranks, in_a_group_of_some_ranks]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=[f.__name__ for f in CASES])
def test_exchange(pools, world, case):
    pools(world).run(case)
