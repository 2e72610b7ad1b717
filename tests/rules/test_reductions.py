from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from oracle import EMPTY, EVEN, MESHES, UNEVEN, bools, case, compare, ints, mesh_id, mesh_of, place, positive, run_on
from pool import on_ranks
from shardtensor import _C


def always(*placements: str) -> bool:
    return True


def no_partial(*placements: str) -> bool:
    return all("P" not in p for p in placements)


def free_of(*dims: int):
    """Quiet where nothing is Partial and none of these dims is sharded."""
    return lambda *placements: no_partial(*placements) and all(f"S({d})" not in p for p in placements for d in dims)


def with_nan(*sizes: int):
    def make(g: torch.Generator) -> torch.Tensor:
        x = torch.randn(sizes, generator=g, dtype=torch.float64)
        return x.masked_fill(torch.rand(sizes, generator=g) < 0.2, float("nan"))

    return make


def with_ties(*sizes: int):
    return lambda g: torch.randint(0, 3, sizes, generator=g).double()


# torch 2.11 has no derivative of aminmax.
AMINMAX_BACKWARD = type(torch.ones(1, requires_grad=True).aminmax().min.grad_fn).__name__ == "AminmaxBackward0"


def complexes(*sizes: int):
    return lambda g: torch.randn(sizes, generator=g, dtype=torch.complex128)


def with_zeros(*sizes: int):
    return lambda g: torch.randn(sizes, generator=g, dtype=torch.float64) * (torch.rand(sizes, generator=g) > 0.2)


def lowest(*sizes: int):
    return lambda g: torch.full(sizes, -float("inf"), dtype=torch.float64)


vector_norm = torch.linalg.vector_norm
aten = torch.ops.aten
INF = float("inf")

SUMS = [
    case("sum", torch.sum, (5, 4), quiet=always),
    case("sum_dim", lambda x: x.sum(0), (5, 4), quiet=always),
    case("sum_negative_dim", lambda x: x.sum(-1, keepdim=True), (5, 4), quiet=always),
    case("sum_dims", lambda x: x.sum((0, 2)), (3, 4, 2), quiet=always),
    case("sum_no_dims", lambda x: x.sum([]), (5, 4), quiet=always),
    case("sum_scalar", lambda x: x.sum(), (), quiet=always),
    case("sum_scalar_dim", lambda x: x.sum(0), (), quiet=always),
    case("sum_bool", lambda x: x.sum(0), bools(5, 4), backward=False, quiet=always),
    case("sum_int", lambda x: x.to(torch.int32).sum(), ints(9, 5, 4), backward=False, quiet=always),
    case("sum_dtype", lambda x: x.sum(1, dtype=torch.float32), (5, 4), tolerance=1e-5, quiet=always),
    case("sum_to_int", lambda x: (x * 4).sum(0, dtype=torch.int64), (5, 4), backward=False),
    case("sum_complex", lambda x: x.sum(0), complexes(5, 4), backward=False, quiet=always),
    case("sum_empty", lambda x: x.sum(0), (0, 4), quiet=always),
    case("sum_out", lambda x, o: torch.sum(x, 0, out=o.clone()), (5, 4), (4,), backward=False),
    case("sum_out_keepdim", lambda x, o: torch.sum(x, 1, True, out=o.clone()), (5, 4), (5, 1), backward=False),
    case("nansum", torch.nansum, with_nan(5, 4), quiet=no_partial, partial=False),
    case("nansum_dim", lambda x: x.nansum(0), with_nan(5, 4), quiet=no_partial, partial=False),
    case("nansum_summands", lambda x: x.nansum(0), (5, 4)),
    case("nanmean", lambda x: x.nanmean(0), with_nan(5, 4), partial=False),
    case("mean", torch.mean, (5, 4), quiet=always),
    case("mean_dim", lambda x: x.mean(0), (5, 4), quiet=always),
    case("mean_dims", lambda x: x.mean((0, -1), keepdim=True), (3, 4, 2), quiet=always),
    case("mean_dtype", lambda x: x.mean(dtype=torch.float64), ints(9, 5, 4), backward=False, quiet=always),
    case("mean_half", lambda x: x.half().mul(400).mean(0), (150, 2), tolerance=2e-2, backward=False, partial=False),
    case("mean_out", lambda x, o: torch.mean(x, 0, out=o.clone()), (5, 4), (4,), backward=False),
    case("prod", torch.prod, (5, 4), quiet=no_partial),
    case("prod_dim", lambda x: x.prod(0), (5, 4), quiet=no_partial),
    case("prod_keepdim", lambda x: x.prod(-1, keepdim=True), with_zeros(5, 4), quiet=no_partial, partial=False),
    case("prod_zeros", lambda x: x.masked_fill(torch.ones_like(x).tril(-3).bool(), 0).prod(0), (5, 4), quiet=no_partial, partial=False),
    case("prod_a_zero", lambda x: torch.cat([x, x.sum(0, True) * 0]).prod(), (5, 4), partial=False),
    case("prod_int", lambda x: x.prod(0), ints(4, 5, 4), backward=False, quiet=no_partial),
    case("prod_complex", lambda x: x.prod(0), complexes(5, 4)),
    case("prod_out", lambda x, o: torch.prod(x, 0, out=o.clone()), (5, 4), (4,), backward=False),
    case("count_nonzero", torch.count_nonzero, with_zeros(5, 4), backward=False, partial=False, quiet=no_partial),
    case("count_nonzero_dim", lambda x: torch.count_nonzero(x, 0), with_zeros(5, 4), backward=False, partial=False, quiet=no_partial),
    case("count_nonzero_dims", lambda x: torch.count_nonzero(x, (0, 1)), with_zeros(5, 4, 2), backward=False, partial=False),
]

EXTREMES = [
    case("amax", lambda x: x.amax(0), (5, 4), quiet=no_partial),
    case("amax_all", lambda x: x.amax(), with_ties(5, 4), partial=False, quiet=no_partial),
    case("amax_dims", lambda x: x.amax((0, -1), keepdim=True), (3, 4, 2), quiet=no_partial),
    case("amax_nan", lambda x: x.amax(0), with_nan(5, 4), partial=False, backward=False),
    case("amax_int", lambda x: x.amax(0), ints(9, 5, 4), backward=False, quiet=no_partial),
    case("amax_scalar", lambda x: x.amax(0), (), quiet=no_partial),
    case("amax_twice", lambda x: x.amax(0, True).amax(1), (5, 4), quiet=no_partial),
    case("amax_out", lambda x, o: torch.amax(x, 0, out=o.clone()), (5, 4), (4,), backward=False),
    case("amin", lambda x: x.amin(1), (5, 4), quiet=no_partial),
    case("amin_nan", lambda x: x.amin((0, 1)), with_nan(5, 4), partial=False, backward=False),
    case("amin_float", lambda x: x.float().amin(0), (5, 4), tolerance=1e-6, backward=False),
    case("amin_bool", lambda x: x.amin(0), bools(5, 4), backward=False, quiet=no_partial),
    case("max", torch.max, with_ties(5, 4), partial=False, quiet=no_partial),
    case("min", torch.min, (5, 4), quiet=no_partial),
    case("max_out", lambda x, o: torch.ops.aten.max.unary_out(x, out=o.clone()), (5, 4), (), backward=False),
    case("max_other", torch.max, (5, 4), (5, 4), limit=30),
    case("max_dim", lambda x: tuple(x.max(0)), (5, 4), quiet=free_of(0)),
    case("max_dim_ties", lambda x: tuple(x.max(-1, keepdim=True)), with_ties(3, 7), partial=False, quiet=free_of(1)),
    case("max_dim_nan", lambda x: tuple(x.max(0)), with_nan(5, 4), partial=False, backward=False),
    case("max_dim_lowest", lambda x: tuple(x.max(0)), lowest(5, 4), partial=False, backward=False),
    case("max_dim_bool", lambda x: tuple(x.max(0)), bools(5, 4), backward=False),
    case("max_dim_out", lambda x, v, i: torch.max(x, 0, out=(v.clone(), i.clone())), (5, 4), (4,), ints(9, 4), backward=False),
    case("min_dim", lambda x: tuple(x.min(1)), (5, 4), quiet=free_of(1)),
    case("min_dim_ties", lambda x: tuple(x.min(0)), with_ties(7, 3), partial=False, quiet=free_of(0)),
    case("min_dim_scalar", lambda x: tuple(x.min(0)), (), quiet=no_partial),
    case("argmax", torch.argmax, (5, 4), backward=False),
    case("argmax_ties", lambda x: x.argmax(keepdim=True), with_ties(5, 4), partial=False, backward=False),
    case("argmax_dim", lambda x: x.argmax(0), with_ties(7, 3), partial=False, backward=False, quiet=free_of(0)),
    case("argmax_nan", lambda x: x.argmax(), with_nan(5, 4), backward=False, partial=False),
    case("argmax_3d", lambda x: x.argmax(), (3, 4, 2), backward=False),
    case("argmin", lambda x: x.argmin(-1, keepdim=True), (5, 4), backward=False, quiet=free_of(1)),
    case("argmin_out", lambda x, o: torch.argmin(x, 0, out=o.clone()), (5, 4), ints(9, 4), backward=False),
    case("aminmax", lambda x: tuple(torch.aminmax(x)), (5, 4), quiet=no_partial, backward=AMINMAX_BACKWARD),
    case("aminmax_dim", lambda x: tuple(torch.aminmax(x, dim=0, keepdim=True)), (5, 4), quiet=no_partial, backward=AMINMAX_BACKWARD),
    case("aminmax_out", lambda x, a, b: torch.aminmax(x, dim=0, out=(a.clone(), b.clone())), (5, 4), (4,), (4,), backward=False),
    case("median", torch.median, (5, 4), limit=20),
    case("median_dim", lambda x: tuple(x.median(0)), (5, 4), quiet=free_of(0)),
    case("nanmedian_dim", lambda x: tuple(x.nanmedian(1)), with_nan(5, 4), partial=False, backward=False, quiet=free_of(1)),
    case("mode", lambda x: tuple(x.mode(0)), with_ties(5, 4), quiet=free_of(0), partial=False),
    case("kthvalue", lambda x: tuple(x.kthvalue(2, 0, True)), (5, 4), quiet=free_of(0)),
]

TRUTHS = [
    case("any", torch.any, bools(5, 4), backward=False, quiet=always),
    case("any_dim", lambda x: x.any(0), bools(5, 4), backward=False, quiet=always),
    case("any_dims", lambda x: torch.any(x, dim=(0, 1), keepdim=True), bools(5, 4), backward=False, quiet=always),
    case("any_no_dims", lambda x: torch.any(x, dim=()), bools(5, 4), backward=False, quiet=always),
    case("any_float", lambda x: x.any(1), with_zeros(5, 4), backward=False, partial=False, quiet=no_partial),
    case("any_byte", lambda x: x.to(torch.uint8).any(0), bools(5, 4), backward=False, quiet=always),
    case("any_out", lambda x, o: torch.any(x, 0, out=o.clone()), bools(5, 4), bools(4), backward=False),
    case("all", torch.all, bools(5, 4), backward=False, quiet=always),
    case("all_dim", lambda x: (x | x.logical_not()).all(-1, keepdim=True), bools(5, 4), backward=False, quiet=always),
    case("all_dims", lambda x: torch.all(x, dim=(0, 1)), bools(5, 4, 2), backward=False, quiet=always),
    case("all_out", lambda x, o: torch.all(x, 0, out=o.clone()), bools(5, 4), bools(4), backward=False),
    case("equal_itself", lambda x: torch.equal(x, x.clone()), (5, 4), backward=False),
    case("equal", lambda x, y: torch.equal(x, y), (5, 4), (5, 4), backward=False),
    case("equal_but_one", lambda x, y: torch.equal(x, x + (y == y.amax())), (5, 4), (5, 4), backward=False, partial=False),
    case("equal_other_sizes", lambda x, y: torch.equal(x, y), (5, 4), (5, 1), backward=False, quiet=always),
    case("item", lambda x: x.sum().double().item(), ints(9, 5, 4), backward=False),
    case("bool", lambda x: bool(x.any()), bools(5, 4), backward=False),
    case("allclose", lambda x, y: torch.allclose(x, y), (5, 4), (5, 4), backward=False, limit=20),
    case("allclose_itself", lambda x: torch.allclose(x, x + 1e-12), (5, 4), backward=False),
    case("isclose", lambda x, y: torch.isclose(x, y, rtol=0.5), (5, 4), (5, 4), backward=False, limit=20),
]

NORMS = [
    case("vector_norm", vector_norm, (5, 4), quiet=no_partial),
    case("vector_norm_dim", lambda x: vector_norm(x, 2, 0), (5, 4), quiet=no_partial),
    case("vector_norm_1", lambda x: vector_norm(x, 1, (0, 1), True), (5, 4), quiet=no_partial),
    case("vector_norm_3", lambda x: vector_norm(x, 3, -1), (5, 4), quiet=no_partial),
    case("vector_norm_0", lambda x: vector_norm(x, 0, 0), with_zeros(5, 4), partial=False, quiet=no_partial),
    case("vector_norm_half", lambda x: vector_norm(x, 0.5, 0), positive(5, 4), quiet=no_partial, partial=False),
    case("vector_norm_-2", lambda x: vector_norm(x, -2, 0), positive(5, 4), partial=False),
    case("vector_norm_inf", lambda x: vector_norm(x, INF, 0), (5, 4), quiet=no_partial),
    case("vector_norm_-inf", lambda x: vector_norm(x, -INF), (5, 4), quiet=no_partial),
    case("vector_norm_dtype", lambda x: vector_norm(x.float(), 2, 0, dtype=torch.float64), (5, 4), tolerance=1e-5),
    case("vector_norm_complex", lambda x: vector_norm(x, 2, 0), complexes(5, 4), backward=False, quiet=no_partial),
    case("vector_norm_inf_complex", lambda x: vector_norm(x, INF, 0), complexes(5, 4), backward=False, quiet=no_partial),
    case("vector_norm_twice", lambda x: vector_norm(vector_norm(x, 2, 0, True), 2), (5, 4), quiet=no_partial),
    case("vector_norm_1_twice", lambda x: vector_norm(vector_norm(x, 1, 1), 1), (5, 4), quiet=no_partial),
    case("vector_norm_orders", lambda x: vector_norm(vector_norm(x, 1, 1), 2), (5, 4)),
    case("vector_norm_scalar", lambda x: vector_norm(x, 2), (), quiet=no_partial),
    case("vector_norm_out", lambda x, o: vector_norm(x, 2, 0, out=o.clone()), (5, 4), (4,), backward=False),
    case("norm", torch.norm, (5, 4), quiet=no_partial),
    case("norm_scalar", lambda x: aten.norm.Scalar(x, 3), (5, 4)),
    case("norm_dim", lambda x: aten.norm.ScalarOpt_dim(x, None, [0], True), (5, 4), quiet=no_partial),
    case("norm_no_dims", lambda x: aten.norm.ScalarOpt_dim(x, INF, []), (5, 4), quiet=no_partial),
    case("norm_dtype", lambda x: aten.norm.ScalarOpt_dtype(x, 2, dtype=torch.float64), (5, 4), quiet=no_partial),
    case("linalg_norm", lambda x: torch.linalg.norm(x, 2, 0), (5, 4), quiet=no_partial),
    case("normalize", lambda x: torch.nn.functional.normalize(x, dim=0), (5, 4)),
    case("renorm", lambda x: x.renorm(2, 0, 1.5), (5, 4), quiet=free_of(1)),
    case("renorm_3", lambda x: x.renorm(3, 1, 0.5), (5, 4), quiet=free_of(0), backward=False),
    case("renorm_", lambda x: x.clone().renorm_(1, 1, 0.5), (5, 4), backward=False),
    case("dist", lambda x, y: torch.dist(x, y, 3), (5, 4), (5, 4), limit=30),
    case("cosine_similarity", lambda x, y: torch.cosine_similarity(x, y, 0), (5, 4), (5, 4), limit=30),
    case("pairwise_distance", torch.pairwise_distance, (5, 4), (5, 4), limit=30),
]

MOMENTS = [
    case("var", torch.var, (5, 4)),
    case("var_dim", lambda x: x.var(0), (5, 4), quiet=free_of(0)),
    case("var_correction", lambda x: x.var((0, 2), correction=2, keepdim=True), (3, 4, 2), quiet=free_of(0, 2)),
    case("var_biased", lambda x: x.var(1, unbiased=False), (5, 4), quiet=free_of(1)),
    case("var_stable", lambda x: (x + 1e7).var(0), (5, 4), partial=False, tolerance=1e-6, backward=False),
    case("var_complex", lambda x: x.var(0), complexes(5, 4), backward=False),
    case("var_too_few", lambda x: x.var(0, correction=9), (5, 4), partial=False, backward=False),
    case("var_out", lambda x, o: torch.var(x, 0, correction=1, keepdim=False, out=o.clone()), (5, 4), (4,), backward=False),
    case("var_mean", lambda x: torch.var_mean(x, 0), (5, 4), quiet=free_of(0)),
    case("var_mean_keepdim", lambda x: torch.var_mean(x, -1, correction=0, keepdim=True), (5, 4), quiet=free_of(1)),
    case("std", torch.std, (5, 4)),
    case("std_dim", lambda x: x.std(0, keepdim=True), (5, 4), quiet=free_of(0)),
    case("std_mean", lambda x: torch.std_mean(x, (0, 1)), (5, 4)),
    case("std_scalar", lambda x: x.std(correction=0), (), backward=False),
    case("logsumexp", lambda x: x.logsumexp(0), (5, 4), quiet=free_of(0)),
    case("logsumexp_dims", lambda x: x.logsumexp((0, -1), keepdim=True), (3, 4, 2), quiet=free_of(0, 2)),
    case("logsumexp_lowest", lambda x: x.logsumexp(0), lowest(5, 4), partial=False, backward=False),
    case("logsumexp_int", lambda x: x.logsumexp(0), ints(5, 5, 4), backward=False, tolerance=1e-5),
    case("logsumexp_out", lambda x, o: torch.logsumexp(x, 0, out=o.clone()), (5, 4), (4,), backward=False),
]


def segments(reduce: str, **options):
    lengths = torch.tensor([[1, 2, 2], [3, 1, 1], [0, 4, 1]])
    offsets = torch.nn.functional.pad(lengths.cumsum(-1), (1, 0))

    def quiet(x: str, counts: str) -> bool:
        along = set(zip(x.split(), counts.split(), strict=True))
        return along <= {("R", "R"), ("S(2)", "R"), ("S(0)", "S(0)")}

    return [
        case(f"segment_{reduce}_{name}", lambda x, c, name=name: torch.segment_reduce(x, reduce, **{name: c}, axis=1, **options),
             (3, 5, 2), lambda g, counts=counts: counts, quiet=quiet, cut_alike=True)
        for name, counts in (("lengths", lengths), ("offsets", offsets))
    ]


SEGMENTS = [*segments("sum"), *segments("mean", unsafe=True), *segments("max", initial=0.5), *segments("min"), *segments("prod")]

HASHES = [
    case("hash", torch.hash_tensor, (5, 4), backward=False, quiet=no_partial),
    case("hash_dim", lambda x: torch.hash_tensor(x, 0), (5, 4), backward=False, quiet=no_partial),
    case("hash_dims", lambda x: torch.hash_tensor(x, (0, -1), keepdim=True), ints(99, 3, 4, 2), backward=False, quiet=always),
]

# Writes with summands as operands: the written tensor must hold the same values as the result.
WRITTEN = [
    case("neg_out", lambda x, o: torch.neg(x, out=o.clone()), (5, 4), (5, 4), backward=False),
    case("mul_by_summands", lambda x, y: x.clone().mul_(y), (5, 4), (5, 4)),
    case("mul_out", lambda x, y, o: torch.mul(x, y, out=o.clone()), (5, 4), (5, 4), (5, 4), backward=False),
]

CASES = SUMS + EXTREMES + TRUTHS + NORMS + MOMENTS + SEGMENTS + HASHES + WRITTEN


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


def _layouts():
    """The layouts of reductions' results on a mesh of all ranks, as text."""
    mesh = mesh_of((dist.get_world_size(),))
    x = place(torch.arange(20.0).reshape(5, 4), mesh, ("S(0)",), UNEVEN)
    bits = place(torch.arange(20).reshape(5, 4) % 3 == 0, mesh, ("S(0)",), EVEN)
    results = {
        "sum": x.sum(),
        "amax": x.amax(0),
        "amin": x.amin(0),
        "prod": x.prod(),
        "any": bits.any(),
        "all": bits.all(0),
        "norm": vector_norm(x),
        "norm_of_norms": vector_norm(vector_norm(x, 2, 0), 2),
        "norm_inf": vector_norm(x, INF),
        "free": x.sum(1),
        "max_dim": x.max(0).values,
    }
    return {k: str(v._layout).split(" on ")[0] for k, v in results.items()}


def test_what_stays_partial(pools):
    assert pools(2).run(_layouts)[1] == {
        "sum": "P(sum)",
        "amax": "P(max)",
        "amin": "P(min)",
        "prod": "P(product)",
        "any": "P(max)",
        "all": "P(min)",
        "norm": "P(norm)",
        "norm_of_norms": "P(norm)",
        "norm_inf": "P(max)",
        "free": "S(0)[1,4]",
        "max_dim": "R",
    }


@on_ranks(2, 3)
def test_second_derivatives_of_products():
    """Second derivatives of a product whose lines have no zero, one, or two; and what the first ones send."""
    mesh = mesh_of((dist.get_world_size(),))
    whole = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole[2, 1] = whole[0, 2] = whole[4, 2] = 0
    for f in (torch.prod, lambda t: t.prod(0), lambda t: t.prod(1, keepdim=True)):
        for at in ("S(0)", "S(1)", "R"):
            derivatives = []
            for x in (whole.clone(), place(whole, mesh, (at,), UNEVEN)):
                x.requires_grad_()
                _C.reset_comm_counts()
                (plain,) = torch.autograd.grad(f(x).sum(), x)
                assert "all_gather" not in _C.comm_counts()
                (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
                (second,) = torch.autograd.grad((first * first).sum() + first.sum(), x)
                derivatives.append((plain, first.detach(), second))
            for ours, theirs in zip(derivatives[1], derivatives[0], strict=True):
                compare(ours, theirs, 1e-9, at)


def _bytes():
    """What the kernels send: small tensors, whatever the size of the data."""
    mesh = mesh_of((dist.get_world_size(),))
    x = place(torch.randn(50, 4, dtype=torch.float64), mesh, ("S(0)",), UNEVEN)
    out = {}
    for name, function in {
        "max_dim": lambda: x.max(0),
        "argmax": lambda: x.argmax(),
        "var_mean": lambda: torch.var_mean(x, 0),
        "logsumexp": lambda: x.logsumexp(0),
        "equal": lambda: torch.equal(x, x),
    }.items():
        _C.reset_comm_counts()
        function()
        out[name] = _C.comm_counts()
    return out


def test_kernels_send_little(pools):
    assert pools(3).run(_bytes)[0] == {
        "max_dim": {"all_reduce": (2, 64)},
        "argmax": {"all_reduce": (2, 16)},
        "var_mean": {"all_reduce": (2, 64)},
        "logsumexp": {"all_reduce": (2, 64)},
        "equal": {"all_reduce": (1, 1)},
    }


def _half_norm():
    mesh = mesh_of((dist.get_world_size(),))
    return vector_norm(place(torch.full((8,), 300.0, dtype=torch.float16), mesh, ("S(0)",), EVEN)).item()


def test_half_norm_does_not_overflow(pools):
    want = vector_norm(torch.full((8,), 300.0, dtype=torch.float16)).item()
    assert pools(2).run(_half_norm) == [pytest.approx(want, rel=2e-3)] * 2


def test_item_is_the_same_on_every_rank(pools):
    assert len(set(pools(3).run(_item))) == 1


def _item():
    mesh = mesh_of((dist.get_world_size(),))
    x = place(torch.arange(7.0), mesh, ("S(0)",), EMPTY)
    return x.sum().item(), x.argmax().item(), torch.equal(x, x), x.var().item()
