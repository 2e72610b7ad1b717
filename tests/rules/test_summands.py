"""Ops on summands of every kind that torch knows, not only sums, together with values that are replicated, cut, or summands of
another kind."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest
import shardtensor as st
import torch
from oracle import MESHES, Joint, compare, mesh_id, mesh_of, place, random_summands, with_summands
from pool import on_ranks
from shardtensor import _C, Partial

KINDS = ["sum", "avg", "product", "min", "max", "norm"]
OPS = {
    "clone": lambda x, y: x.clone(),
    "transpose": lambda x, y: x.t(),
    "row": lambda x, y: x[1],
    "rows": lambda x, y: x[1:3],
    "flatten": lambda x, y: x.flatten(),
    "expand": lambda x, y: x[:, None].expand(4, 2, 3),
    "flip": lambda x, y: x.flip(0),
    "roll": lambda x, y: x.roll(1, 1),
    "tril": lambda x, y: x.tril(),
    "float": lambda x, y: x.float(),
    "neg": lambda x, y: -x,
    "half": lambda x, y: x * 0.5,
    "exp": lambda x, y: x.exp(),
    "sum": lambda x, y: x.sum(0),
    "mean": lambda x, y: x.mean(),
    "amax": lambda x, y: x.amax(1),
    "amin": lambda x, y: x.amin(0),
    "prod": lambda x, y: x.prod(1),
    "norm": lambda x, y: torch.linalg.vector_norm(x, dim=1),
    "norm_1": lambda x, y: torch.linalg.vector_norm(x, 1, dim=0),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "maximum": lambda x, y: torch.maximum(x, y),
    "mm": lambda x, y: x @ y.t(),
    "cat": lambda x, y: torch.cat((x, y, x)),
    "cat_1": lambda x, y: torch.cat((y, x), 1),
    "stack": lambda x, y: torch.stack((x, y), 1),
    "where": lambda x, y: torch.where(y > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -1),
    "copied_to": lambda x, y: y.clone().copy_(x),
    "copied_from": lambda x, y: x.clone().copy_(y.abs()),
    "added_to": lambda x, y: x.clone().add_(y * y),
    "doubled": lambda x, y: x.clone().mul_(2),
    "clamped": lambda x, y: x.clone().clamp_(min=0.25),
    "row_written": lambda x, y: _written(x.clone(), 1, y[2].abs() * 0.5),
    "row_moved": lambda x, y: _written(x.clone(), 1, x[3].clone() * 0.5),
    "number_moved": lambda x, y: _written(x[:, 1].clone(), 0, x[3, 1].clone() * 0.5),
    "row_stacked": lambda x, y: torch.stack((x[1], y[1])),
    "sum_joined": lambda x, y: torch.cat((x.sum(0), y[0])),
}


LIMIT = 64  # combinations tried per op and mesh


def _written(x, at, value):
    x[at] = value
    return x


def through(name, mesh_shape):
    mesh = mesh_of(mesh_shape)
    g = torch.Generator().manual_seed(0)
    x = torch.rand(4, 3, generator=g, dtype=torch.float64) + 0.5
    y = torch.randn(4, 3, generator=g, dtype=torch.float64)
    single = [(p,) * mesh.ndim for p in ("R", "S(0)", "S(1)", "P")]
    at = [*single, ("S(0)", "P"), ("P", "R")] if mesh.ndim > 1 else single
    rests = ["R", "S(0)", "S(1)"] if mesh.ndim > 1 else ["R"]
    combos = list(itertools.product(KINDS, range(mesh.ndim), rests, at))
    joint = Joint()
    for kind, mesh_dim, rest, at_y in random.Random(name).sample(combos, min(len(combos), LIMIT)):
        want = OPS[name](x.clone(), y.clone())
        ours = with_summands(x, mesh, mesh_dim, kind, rest), place(y, mesh, at_y, "even")
        compare(OPS[name](*ours), want, 1e-6, f"{name} of {kind} on mesh dim {mesh_dim}, {rest}; {at_y}", joint)
    joint.compare()


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", OPS)
def test_through(pools, name, mesh):
    world, shape = mesh
    pools(world).run(through, name, shape)


@on_ranks(2)
def test_norms_written():
    """A norm is never negative: a write that would make it negative is refused on all ranks, and the old value stays."""
    mesh = mesh_of((2,))
    whole = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
    x = with_summands(whole, mesh, 0, "norm", "R")
    with pytest.raises(RuntimeError, match="a negative value cannot be kept as summands of a norm"):
        x.sub_(5)
    torch.testing.assert_close(x.full_tensor(), whole)
    torch.testing.assert_close((x - 5).full_tensor(), whole - 5)


# Summands of integers that wrap, of bools. `a` and `b` hold them; `w` and `f` are
# of 64-bit integers and of floating-point numbers.
WRAPPING = {
    "double": lambda a, b, w, f: a.double(),
    "long": lambda a, b, w, f: a.long(),
    "complex": lambda a, b, w, f: a.to(torch.complex64),
    "bool": lambda a, b, w, f: a.bool(),
    "narrower": lambda a, b, w, f: a.to(torch.int8),
    "neg": lambda a, b, w, f: (-a).float(),
    "times_fraction": lambda a, b, w, f: a * 2.5,
    "times_fraction_0d": lambda a, b, w, f: a * torch.tensor(2.5),
    "times_long": lambda a, b, w, f: a * w,
    "times_own": lambda a, b, w, f: (a * 3).double(),
    "times_float": lambda a, b, w, f: a * f,
    "add_long": lambda a, b, w, f: a + w,
    "add_float": lambda a, b, w, f: a + f,
    "add_own": lambda a, b, w, f: (a + b).double(),
    "rsub": lambda a, b, w, f: 2.5 - a,
    "div": lambda a, b, w, f: a / 4,
    "div_by": lambda a, b, w, f: a / f,
    "addcmul": lambda a, b, w, f: torch.addcmul(f, a, f),
    "where": lambda a, b, w, f: torch.where(f > 0, a, w),
    "where_float": lambda a, b, w, f: torch.where(f > 0, a, f),
    "where_number": lambda a, b, w, f: torch.where(f > 0, a, 0.5),
    "where_own": lambda a, b, w, f: torch.where(f > 0, a, b).double(),
    "cat": lambda a, b, w, f: torch.cat((a, w)),
    "cat_float": lambda a, b, w, f: torch.cat((f, a), 1),
    "cat_complex": lambda a, b, w, f: torch.cat((f.to(torch.complex128), a)),
    "cat_own": lambda a, b, w, f: torch.cat((a, b)).double(),
    "stack": lambda a, b, w, f: torch.stack((a, w)),
    "block_diag": lambda a, b, w, f: torch.block_diag(a, f),
    "copied": lambda a, b, w, f: w.clone().copy_(a),
    "copied_float": lambda a, b, w, f: f.clone().copy_(a),
    "select_scatter": lambda a, b, w, f: w.select_scatter(a[0], 0, 1),
    "slice_scatter": lambda a, b, w, f: f.slice_scatter(a, 0, 0, 4),
    "diagonal_scatter": lambda a, b, w, f: f.diagonal_scatter(a[0]),
    "as_strided_scatter": lambda a, b, w, f: w.as_strided_scatter(a[0], (3,), (1,), 3),
    "written": lambda a, b, w, f: _written(w.clone(), 1, a[2]),
    "sum": lambda a, b, w, f: a.sum(0),
    "sum_float": lambda a, b, w, f: a.sum(0, dtype=torch.float64),
    "sum_own": lambda a, b, w, f: a.sum(0, dtype=a.dtype).double(),
    "mean": lambda a, b, w, f: a.mean(0, dtype=torch.float64),
    "cumsum": lambda a, b, w, f: a.cumsum(0),
    "prod": lambda a, b, w, f: a.prod(0),
    "trace": lambda a, b, w, f: a.trace(),
    "fft": lambda a, b, w, f: torch.fft.fft(f + a),
    "padded": lambda a, b, w, f: torch.nn.functional.pad(a, (1, 1)).double(),
    "diag_embed": lambda a, b, w, f: a.diag_embed().double(),
    "zeroed": lambda a, b, w, f: a.clone().zero_().double(),
    "doubled": lambda a, b, w, f: a.clone().mul_(2).double(),
    "foreach_mul": lambda a, b, w, f: torch._foreach_mul([a, b], 2.5),
    "foreach_add": lambda a, b, w, f: torch._foreach_add([a, b], [w, f]),
    "max": lambda a, b, w, f: torch.maximum(a, w),
}


REDUCTIONS = {
    "sum": lambda x, y: x | y if x.dtype == torch.bool else x + y,
    "product": lambda x, y: x * y,
    "max": torch.maximum,
    "min": torch.minimum,
    "band": lambda x, y: x & y,
    "bor": lambda x, y: x | y,
    "bxor": lambda x, y: x ^ y,
}


def _split(whole: torch.Tensor, n: int, mesh_dim: int) -> list[torch.Tensor]:
    if whole.is_floating_point():
        return random_summands(whole, n, mesh_dim)
    g = torch.Generator().manual_seed(mesh_dim)
    parts = [torch.randint(-50, 50, whole.shape, generator=g).to(whole.dtype) for _ in range(n - 1)]
    return [*parts, whole - sum(parts)]


def _outcome(f, *tensors):
    try:
        out = f(*tensors)
    except Exception as e:
        return e
    return [t.full_tensor() if isinstance(t, st.ShardTensor) else t for t in (out if isinstance(out, (list, tuple)) else [out])]


def wrapping(name: str, mesh_shape: tuple[int, ...]) -> None:
    """The op on summands gives what it gives on the values that they sum up to in their own dtype, and raises where that raises."""
    mesh = mesh_of(mesh_shape)
    g = torch.Generator().manual_seed(0)
    n = mesh.size(0)
    for dtype, reduces, least, most in (
        (torch.uint8, ("sum", "product", "max", "min"), 0, 256),
        (torch.int32, ("sum", "product", "max", "band", "bor", "bxor"), -(2**31), 2**31 - 1),
        (torch.int64, ("sum", "max"), -100, 100),
        (torch.bool, ("sum", "bor", "band"), 0, 2),
        (torch.float64, ("sum", "max"), -100, 100),
    ):
        for reduce in reduces:
            parts = [torch.randint(least, most, (2, 4, 3), generator=g).to(dtype) * (0.5 if dtype.is_floating_point else 1) for _ in range(n)]
            parts = [p.to(dtype) for p in parts]
            a, b = functools.reduce(REDUCTIONS[reduce], parts).unbind()
            where = [st.Partial(reduce), *[st.Replicate()] * (mesh.ndim - 1)]
            ours = [st.ShardTensor.from_local(t.clone(), mesh, where) for t in parts[mesh.get_local_rank(0)].unbind()]
            w = torch.randint(-100, 100, (4, 3), generator=g)
            f = torch.randn(4, 3, generator=g, dtype=torch.float64)
            want = _outcome(WRAPPING[name], a, b, w, f)
            for at in ("R", "S(0)", "P"):
                others = [place(t, mesh, (at,) * mesh.ndim, "even", summands=_split) for t in (w, f)]
                got = _outcome(WRAPPING[name], *ours, *others)
                what = f"{name} of {reduce} of {dtype}, others {at}"
                if isinstance(want, Exception) or isinstance(got, Exception):
                    assert isinstance(want, Exception) and isinstance(got, Exception), f"{what}: {got!r} instead of {want!r}"
                    continue
                for x, y in zip(got, want, strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, msg=lambda m, what=what: f"{what}: {m}")


@pytest.mark.parametrize("mesh", [MESHES[0], MESHES[2]], ids=mesh_id)
@pytest.mark.parametrize("name", WRAPPING)
def test_wrapping(pools, name, mesh):
    world, shape = mesh
    pools(world).run(wrapping, name, shape)


# What is read from places that other ranks hold.
READS = {
    "row": lambda x, i: x[1],
    "last_row": lambda x, i: x[-1],
    "column": lambda x, i: x[:, 2],
    "element": lambda x, i: x[3, 1],
    "zero_element": lambda x, i: x[0, 1],
    "rows": lambda x, i: x.unbind(0),
    "columns": lambda x, i: x.unbind(1),
    "copied": lambda x, i: torch.select_copy(x, 0, 2),
    "indexed": lambda x, i: x[i],
    "indexed_twice": lambda x, i: x[i, i],
    "index_select": lambda x, i: x.index_select(1, i),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(3, 6)),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x),
}

# What is done with it. A rank that holds nothing of it has zeros, which must not count: not times infinity, not negated.
USES = {
    "inverse": lambda t, c: 1 / t,
    "negative": lambda t, c: -t,
    "times_number": lambda t, c: t * -1,
    "times_tensor": lambda t, c: t * c(-math.inf),
    "times_list": lambda t, c: torch._foreach_mul([t], [c(math.inf)])[0],
    "over_tensor": lambda t, c: t / c(0.0),
    "times_added": lambda t, c: torch.addcmul(c(-0.0), t, c(math.inf)),
    "product": lambda t, c: t.reshape(-1, 1) @ c(math.inf).reshape(1, 1),
    "sign": lambda t, c: torch.copysign(c(1.0), t),
    "chosen": lambda t, c: torch.where(t == t, t, c(1.0)),
    "joined": lambda t, c: torch.cat([t.reshape(-1), t.reshape(-1).isnan(), t.reshape(-1).float()]),
    "added": lambda t, c: t + t,
    "twice": lambda t, c: t[None].clone().expand(2, *t.shape).half(),
    "written": lambda t, c: t.clone().mul_(c(-math.inf)),
    "added_up": lambda t, c: t.nan_to_num(0, 1, -1).sum() * c(2.0),
}


def reads(name: str, mesh_shape: tuple[int, ...]) -> None:
    """Signs of zeros, infinities and NaN come as they are."""
    mesh = mesh_of(mesh_shape)
    values = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.5, -2.0])
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool):
        x = values[torch.arange(30) % 7].reshape(5, 6)
        x = torch.complex(x, x.flip(0)) if dtype.is_complex else x.nan_to_num(0, 3, -3).to(dtype) if not dtype.is_floating_point else x.to(dtype)
        i = torch.tensor([4, 0, 1])
        want = READS[name](x, i)
        for at in itertools.product(("R", "S(0)", "S(1)"), repeat=mesh.ndim):
            cuts = ("even", "uneven", "empty") if len({*at} - {"R"}) == len([a for a in at if a != "R"]) else ("even",)
            for cut in cuts:
                got = READS[name](place(x, mesh, at, cut), place(i, mesh, ("R",) * mesh.ndim, "even"))
                for g, w in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, want)), strict=True):
                    _same_bits(g, w, f"{name} of {dtype}, {at} {cut}")
                    _same_bits(g.clone().reshape(-1), w.reshape(-1), f"{name} of {dtype}, {at} {cut}, flattened")
                    if dtype == torch.float64:
                        for use, f in USES.items() if cut == cuts[-1] else [("inverse", USES["inverse"])]:
                            ours = f(g, lambda v: place(torch.tensor(v, dtype=torch.float64), mesh, ("R",) * mesh.ndim, "even"))
                            _same_bits(ours, f(w, lambda v: torch.tensor(v, dtype=torch.float64)), f"{use} of {name}, {at} {cut}")


def _same_bits(got, want, what):
    got = got.full_tensor()
    assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape}, {got.dtype}"
    bits = [torch.view_as_real(t) if t.is_complex() else t for t in (got, want)]
    torch.testing.assert_close(*bits, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}")
    if bits[0].is_floating_point():
        signs = [t.signbit() & (t == 0) for t in bits]
        assert torch.equal(*signs), f"{what}: {got} instead of {want}"


@pytest.mark.parametrize("mesh", [MESHES[0], MESHES[2]], ids=mesh_id)
@pytest.mark.parametrize("name", READS)
def test_reads(pools, name, mesh):
    world, shape = mesh
    pools(world).run(reads, name, shape)


INFINITE = {
    "times": lambda t: t[0] * math.inf,
    "times_left": lambda t: -math.inf * t[1],
    "times_scalar_op": lambda t: torch.ops.aten.mul.Scalar(t[0], math.inf),
    "times_in_place": lambda t: t[0].clone().mul_(math.inf),
    "times_sum": lambda t: t.sum() * math.inf,
    "divide": lambda t: t[3] / 0,
    "divide_scalar_op": lambda t: torch.ops.aten.div.Scalar(t[1], 0.0),
    "divide_in_place": lambda t: t[1].clone().div_(0.0),
    "alpha": lambda t: torch.sub(t[0], t[1], alpha=math.inf),
    "lerp": lambda t: torch.lerp(t[0], t[3], math.inf),
    "foreach": lambda t: torch._foreach_mul([t[0].clone()], math.inf)[0],
    "foreach_list": lambda t: torch._foreach_div([t[0].clone(), t[1].clone()], [0.0, 2.0])[0],
    "complex": lambda t: (t[0] * complex(math.inf, 0)).abs(),
}


def infinite(mesh_shape: tuple[int, ...]) -> None:
    """Where one rank has the element, the others have zeros."""
    whole = torch.tensor([2.0, -3.0, 0.5, 5.0, 7.0])
    mesh = mesh_of(mesh_shape)
    x = place(whole, mesh, ("S(0)",) * len(mesh_shape), "even")
    for name, f in INFINITE.items():
        for _ in range(2):
            torch.testing.assert_close(f(x).full_tensor(), f(whole), equal_nan=True, msg=name)
        graph = torch.compile(f, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(graph(x).full_tensor(), f(whole), equal_nan=True, msg=f"{name} in a graph")
    total = x.sum()
    _C.reset_comm_counts()
    for finite in (total * 2.5, total / 3, total * 0, torch.sub(total, total, alpha=2)):
        assert finite.placements == (Partial("sum"),) * len(mesh_shape)
    assert not _C.comm_counts()


@pytest.mark.parametrize("mesh", [MESHES[0], MESHES[2]], ids=mesh_id)
def test_infinite_numbers(pools, mesh):
    world, shape = mesh
    pools(world).run(infinite, shape)
