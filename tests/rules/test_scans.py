from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from oracle import MESHES, UNEVEN, case, compare, ints, mesh_id, mesh_of, place, positive, run_on
from pool import on_ranks
from shardtensor import _C
from test_reductions import always, complexes, free_of, lowest, with_nan, with_ties, with_zeros

SCANS = [
    case("cumsum", lambda x: x.cumsum(0), (7, 4), quiet=free_of(0)),
    case("cumsum_free", lambda x: x.cumsum(1), (5, 4), only=["R", "S(0)", "P"], quiet=always),
    case("cumsum_negative_dim", lambda x: x.cumsum(-1), (3, 5, 4), quiet=free_of(2)),
    case("cumsum_int", lambda x: x.to(torch.int32).cumsum(0), ints(9, 7, 2), backward=False, quiet=free_of(0)),
    case("cumsum_dtype", lambda x: x.cumsum(0, dtype=torch.float64), ints(9, 7, 2), backward=False),
    case("cumsum_complex", lambda x: x.cumsum(0), complexes(5, 2), backward=False),
    case("cumsum_scalar", lambda x: x.cumsum(0), ()),
    case("cumsum_", lambda x: x.clone().cumsum_(0), (5, 4), backward=False),
    case("cumsum_out", lambda x, o: torch.cumsum(x, 0, out=o.clone()), (5, 4), (5, 4), backward=False),
    case("cumprod", lambda x: x.cumprod(0), (7, 4), quiet=free_of(0)),
    case("cumprod_zeros", lambda x: x.cumprod(1), with_zeros(3, 7), partial=False, quiet=free_of(1)),
    case("cumprod_many_zeros", lambda x: x.cumprod(0), lambda g: torch.randn(9, 3, generator=g).double().clamp_min(-0.5) + 0.5, partial=False,
         quiet=free_of(0)),
    case("cumprod_", lambda x: x.clone().cumprod_(0), (5, 4), backward=False),
    case("logcumsumexp", lambda x: x.logcumsumexp(0), (7, 4), quiet=free_of(0)),
    case("logcumsumexp_lowest", lambda x: x.logcumsumexp(0), lowest(5, 4), partial=False, backward=False),
    case("cummax", lambda x: tuple(x.cummax(0)), (7, 4), quiet=free_of(0)),
    case("cummax_ties", lambda x: tuple(x.cummax(1)), with_ties(3, 8), partial=False, quiet=free_of(1)),
    case("cummax_nan", lambda x: tuple(x.cummax(0)), with_nan(7, 4), partial=False, backward=False),
    case("cummax_lowest", lambda x: tuple(x.cummax(0)), lowest(5, 4), partial=False, backward=False),
    case("cummax_out", lambda x, v, i: torch.cummax(x, 0, out=(v.clone(), i.clone())), (5, 2), (5, 2), ints(9, 5, 2),
         backward=False, limit=30),
    case("cummin", lambda x: tuple(x.cummin(0)), (7, 4), quiet=free_of(0)),
    case("cummin_int", lambda x: tuple(x.cummin(-1)), ints(4, 3, 8), backward=False, quiet=free_of(1)),
    case("diff", lambda x: x.diff(dim=0), (5, 4), limit=20),
    case("cumulative_trapezoid", lambda x: torch.cumulative_trapezoid(x, dim=0), (5, 4), limit=20),
]

SORTS = [
    case("sort", lambda x: tuple(x.sort(0)), (5, 4), quiet=free_of(0)),
    case("sort_last", lambda x: tuple(x.sort(descending=True)), (5, 4), quiet=free_of(1)),
    case("sort_stable", lambda x: tuple(x.sort(dim=0, stable=True)), with_ties(7, 3), partial=False, quiet=free_of(0)),
    case("sort_scalar", lambda x: tuple(x.sort(0)), ()),
    case("sort_out", lambda x, v, i: torch.sort(x, 0, out=(v.clone(), i.clone())), (5, 4), (5, 4), ints(9, 5, 4),
         backward=False, limit=30),
    case("argsort", lambda x: x.argsort(0), (5, 4), backward=False, quiet=free_of(0)),
    case("msort", lambda x: x.msort(), (5, 4), quiet=free_of(0)),
    case("topk", lambda x: tuple(x.topk(2, 0)), (7, 4), quiet=free_of(0)),
    case("topk_smallest", lambda x: tuple(x.topk(3, 1, largest=False)), (5, 4), quiet=free_of(1)),
    case("topk_all", lambda x: tuple(x.topk(5, 0)), (5, 4), quiet=free_of(0)),
    case("topk_none", lambda x: tuple(x.topk(0, 0)), (5, 4), backward=False),
    case("topk_unsorted", lambda x: x.topk(2, 0, sorted=False).values.sort(0).values, (7, 4)),
    case("topk_out", lambda x, v, i: torch.topk(x, 2, 0, out=(v.clone(), i.clone())), (5, 3), (2, 3), ints(9, 2, 3),
         backward=False, limit=30),
    case("unique", lambda x: torch.unique(x, return_inverse=True, return_counts=True), ints(4, 5, 4), backward=False),
    case("unique_dim", lambda x: torch.unique(x, dim=0), ints(2, 5, 2), backward=False),
    case("unique_consecutive", torch.unique_consecutive, ints(2, 9), backward=False),
    case("searchsorted", lambda s, x: torch.searchsorted(s.sort().values, x), (6,), (5, 4), backward=False),
    case("searchsorted_rows", lambda s, x: torch.searchsorted(s.sort().values, x), (5, 6), (5, 4), backward=False),
    case("searchsorted_number", lambda s: torch.searchsorted(s.sort().values, 0.1), (6,), backward=False),
    case("bucketize", lambda x, b: torch.bucketize(x, b.sort().values, right=True), (5, 4), (6,), backward=False),
    case("bucketize_quiet", torch.bucketize, (5, 4), lambda g: torch.arange(4).double(), replicated=(1,), backward=False,
         quiet=free_of()),
    case("histc", lambda x: torch.histc(x, 5, -1, 1), (5, 4), backward=False, quiet=free_of()),
    case("histc_open", lambda x: torch.histc(x, 5), (5, 4), backward=False),
    case("histogram", lambda x: torch.histogram(x, 4), (5, 4), backward=False),
    case("histogram_range", lambda x, w: torch.histogram(x, 4, range=(-1, 1), weight=w), (5, 4), (5, 4), backward=False,
         quiet=lambda x, w: x == w and "P" not in x, cut_alike=True),
    case("histogram_density", lambda x, w: torch.histogram(x, 4, weight=w, density=True), (5, 4), positive(5, 4), backward=False),
    case("histogram_bins", lambda x, b: torch.histogram(x, b), (5, 4), lambda g: torch.tensor([-1.0, 0.0, 0.5, 2.0]).double(), backward=False,
         replicated=(1,), quiet=free_of()),
    case("histogramdd", lambda x, w: torch.histogramdd(x, [2, 3], weight=w), (3, 4, 2), (3, 4), backward=False),
    case("histogramdd_range", lambda x: torch.histogramdd(x, [2, 3], range=[-1, 1, 0, 2]), (3, 4, 2), backward=False, quiet=free_of(2)),
    case("histogramdd_density", lambda x: torch.histogramdd(x, [2, 3], density=True), (3, 4, 2), backward=False),
    case("histogramdd_bins", lambda x, b, c: torch.histogramdd(x, [b, c]), (5, 2), lambda g: torch.tensor([-1.0, 0.0, 2.0]).double(),
         lambda g: torch.tensor([-2.0, 0.5, 1.0]).double(), backward=False, replicated=(1, 2), quiet=lambda x, *_: "P" not in x and "S(1)" not in x),
    case("bincount", torch.bincount, ints(6, 9), backward=False),
    case("bincount_minlength", lambda x: torch.bincount(x.to(torch.uint8), minlength=8), ints(6, 9), backward=False),
    case("bincount_none", lambda x: torch.bincount(x, minlength=2), ints(6, 0), backward=False),
    case("bincount_weights", torch.bincount, ints(6, 9), positive(9), backward=False),
    case("bincount_weights_float", lambda x, w: torch.bincount(x, w.float()), ints(6, 9), positive(9), partial=False, backward=False,
         tolerance=1e-6),
]

CASES = SCANS + SORTS


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


def _bytes():
    x = place(torch.randn(60, 4, dtype=torch.float64), mesh_of((dist.get_world_size(),)), ("S(0)",), UNEVEN)
    out = {}
    for name, function in {
        "cumsum": lambda: x.cumsum(0),
        "cummax": lambda: x.cummax(0),
        "topk": lambda: x.topk(2, 0),
        "bincount": lambda: torch.bincount((x[:, 0] > 0).long()),
    }.items():
        _C.reset_comm_counts()
        function()
        out[name] = _C.comm_counts()
    x.requires_grad_()
    for name in ("cumsum", "cumprod", "cummax"):
        y = getattr(x, name)(0)
        y = y if name != "cummax" else y.values
        grad = place(torch.ones(60, 4, dtype=torch.float64), mesh_of((dist.get_world_size(),)), ("S(0)",), UNEVEN)
        _C.reset_comm_counts()
        (g,) = torch.autograd.grad(y, x, grad)
        assert g._layout == x._layout
        out[f"{name} backward"] = _C.comm_counts()
    return out


def test_a_slice_a_rank_is_gathered_never_the_data(pools):
    row = 4 * 8
    assert pools(3).run(_bytes)[0] == {
        "cumsum": {"all_gather": (1, row)},
        "cummax": {"all_gather": (2, 2 * row)},
        "topk": {"all_gather": (2, 4 * row)},
        "bincount": {"all_reduce": (1, 8)},  # the greatest number
        "cumsum backward": {"all_gather": (1, row)},
        "cumprod backward": {"all_gather": (3, 3 * row), "all_reduce": (1, row)},
        "cummax backward": {"all_gather": (2, 2 * row)},
    }


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=lambda s: "x".join(map(str, s)))
@on_ranks(of=lambda shape: 4 if len(shape) > 1 else 2)
def test_second_derivatives_at_zeros(shape):
    """cumprod's: torch's formula writes into plain zeros."""
    mesh = mesh_of(shape)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.complex128):
        whole, first, second = (torch.randn(5, 4, dtype=dtype, generator=generator) for _ in range(3))
        whole[1, 0] = whole[2, 2] = whole[4, 2] = whole[0, 3] = 0

        def twice(x, g, h, dim):
            (once,) = torch.autograd.grad(x.cumprod(dim), x, g, create_graph=True)
            return once, *torch.autograd.grad(once, (x, g), h)

        for dim in (0, -1):
            want = twice(whole.clone().requires_grad_(), first.clone().requires_grad_(), second, dim)
            for at in ("R", "S(0)", "S(1)", "P"):
                places = ("R",) * (mesh.ndim - 1) + (at,)
                x, g = (place(t, mesh, places, UNEVEN).requires_grad_() for t in (whole, first))
                compare(twice(x, g, place(second, mesh, places, UNEVEN), dim), want, 1e-9, f"{dtype} {dim} {at}")
