"""A cut leaf keeps only its rank's part of the gradient."""

from __future__ import annotations

import itertools
import math

import pytest
import shardtensor as st
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from oracle import EMPTY, EVEN, UNEVEN, compare, mesh_here, mesh_of, place
from pool import on_ranks
from shardtensor import _C, Partial, Replicate, Shard, ShardTensor


def empty_view(x, last=False):
    y = (x.mT * 2).mT
    part = y[:0, :0]
    y.cumsum_(1)
    return part.sum() + y.sum() if last else y.sum() + part.sum()


FUNCTIONS = {
    "sum": lambda x: x.sum(),  # the gradient comes replicated
    "empty_view": empty_view,  # views that are written afterwards: torch makes plain zeros
    "empty_view_last": lambda x: empty_view(x, last=True),
    "column": lambda x: x[:, 1].sum(),
    "flat": lambda x: (x.reshape(-1) * 2).sum(),
    "square": lambda x: (x * x).sum(),
}


def kept():
    whole = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, f in FUNCTIONS.items():
        for at in ("S(0)", "S(1)", "R"):
            for cut in (EVEN, UNEVEN, EMPTY):
                for create_graph in (False, True):
                    what = f"{name} {at} {cut} {create_graph}"
                    plain = whole.clone().requires_grad_()
                    x = place(whole, mesh_here(), (at,), cut).requires_grad_()
                    seen = []
                    x.register_post_accumulate_grad_hook(lambda t, seen=seen: seen.append(t.grad._layout))
                    for _ in range(2):
                        f(plain).backward(create_graph=create_graph)
                        f(x).backward(create_graph=create_graph)
                        assert seen.pop() == x.grad._layout == x._layout, what
                        compare(x.grad, plain.grad, 1e-9, what)
    x = place(whole, mesh_here(), ("S(0)",), UNEVEN).requires_grad_()
    y = x.sum()
    ones = torch.ones_like(y)
    _C.reset_comm_counts()
    (grad,) = torch.autograd.grad(y, x, ones, retain_graph=True)
    assert grad._layout == x._layout  # as in .grad
    torch.autograd.backward(y, ones)
    assert not _C.comm_counts() and x.grad._layout == x._layout  # a slice
    return x.grad._local_tensor.untyped_storage().nbytes() == x._local_tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("world", [2, 3])
def test_leaves_keep_their_part(pools, world):
    assert all(pools(world).run(kept))


@on_ranks(2, 3)
def test_one_reduction_ends_a_sum():
    """If the backward of a product has to send something, it sends what ends the gradient's sum, instead of leaving sums of both results."""
    generator = torch.Generator().manual_seed(0)
    whole, weight, seed = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((60, 36), (48, 36), (60, 48)))
    for at, w_at in (("R", "S(1)"), ("S(1)", "S(1)"), ("S(1)", "R")):
        x, w = (place(t, mesh_here(), (p,), EVEN).requires_grad_() for t, p in ((whole, at), (weight, w_at)))
        y = F.linear(x, w)
        grad = place(seed, mesh_here(), ("P",), EVEN)
        _C.reset_comm_counts()
        grads = torch.autograd.grad(y, [x, w], grad)
        assert _C.comm_counts() == {"all_reduce": (1, seed.nbytes)}, (at, w_at, _C.comm_counts())
        for got, want in zip(grads, (seed @ weight, seed.T @ whole), strict=True):
            assert not any(p.is_partial() for p in got.placements)
            compare(got, want, 1e-9, f"{at} {w_at}")


def summands():
    """A gradient's summands are added up for a cut leaf, in one reduce-scatter. A replicated leaf keeps them as they are."""
    mesh = mesh_here()
    whole = torch.ones(6, 4, dtype=torch.float64)
    for at, want in (("S(0)", {"reduce_scatter": 1}), ("R", {})):
        x = place(whole, mesh, (at,), EVEN).requires_grad_()
        y = x * 1
        seed = st.ShardTensor.from_local(torch.ones_like(whole), mesh, [st.Partial()])
        x.register_hook(lambda grad, seed=seed: seed.clone())
        _C.reset_comm_counts()
        torch.autograd.backward(y, y.detach())
        assert {kind: calls for kind, (calls, _) in _C.comm_counts().items()} == want, at
        assert x.grad.placements == (st.Shard(0) if at == "S(0)" else st.Partial(),)
        compare(x.grad, whole * mesh.size(), 1e-9, at)


@pytest.mark.parametrize("world", [2, 3])
def test_summands_of_a_leaf(pools, world):
    pools(world).run(summands)


@on_ranks(2, 3)
def test_products_with_the_hessian():
    """Forward over reverse: a tangent beside the gradient that a sum expands."""
    g = torch.Generator().manual_seed(0)
    plain = [torch.randn(7, 4, dtype=torch.float64, generator=g) for _ in range(2)]

    def product(x, t):
        with forward_ad.dual_level():
            x = x.clone().requires_grad_()
            dual = forward_ad.make_dual(x, t)
            (grad,) = torch.autograd.grad((dual.sin() * dual).sum(), x, create_graph=True)
            return forward_ad.unpack_dual(grad).tangent.detach()

    for at in ("S(0)", "S(1)", "R"):
        for tangent in ("S(0)", "S(1)", "R"):
            for cut in (EVEN, UNEVEN, EMPTY):
                ours = [place(t, mesh_here(), (p,), cut) for t, p in zip(plain, (at, tangent), strict=True)]
                compare(product(*ours), product(*plain), 1e-9, f"{at} {tangent} {cut}")


PARTS = {  # kernels of torch that read contiguous memory, whatever their operands' strides; each with the sizes of its arguments
    "layer_norm": (lambda x, w, b, _: F.layer_norm(x, (8,), w, b), [(4, 6, 8), (8,), (8,)]),
    "group_norm": (lambda x, w, b, _: F.group_norm(x, 2, w, b), [(4, 6, 8), (6,), (6,)]),
    "fractional_max_pool2d": (lambda x, s: F.fractional_max_pool2d(x, 2, output_size=(3, 3), _random_samples=s), [(2, 6, 8, 8)]),
}


def parts():
    """The operands are whole or cut along one dim, the gradient along another: the backward takes parts of the whole ones."""
    generator = torch.Generator().manual_seed(0)
    mesh, one = mesh_here(), lambda at: (at, *["R"] * (mesh_here().ndim - 1))
    samples = torch.rand(2, 6, 2, dtype=torch.float64, generator=generator)
    for name, (f, sizes) in PARTS.items():
        plain = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in sizes]
        y = f(*plain, samples)
        grad = torch.randn(y.shape, dtype=y.dtype, generator=generator)
        wanted = torch.autograd.grad(y, plain, grad)
        for start in ("R", *(f"S({d})" for d in range(plain[0].dim()))):
            for to in (f"S({d})" for d in range(y.dim())):
                for cut in (EVEN, UNEVEN, EMPTY):
                    first = place(plain[0].detach(), mesh, one(start), cut)
                    xs = [t.requires_grad_() for t in (first, *(place(p.detach(), mesh, one("R"), EVEN) for p in plain[1:]))]
                    out = f(*xs, place(samples, mesh, one("R"), EVEN)) + place(torch.zeros_like(y), mesh, one(to), cut)
                    got = torch.autograd.grad(out, xs, place(grad, mesh, one(to), cut))
                    for g, w in zip(got, wanted, strict=True):
                        compare(g, w, 1e-9, f"{name} {start} {to} {cut}")
    return True


@pytest.mark.parametrize("world", [2, 3])
def test_a_backward_of_parts_of_whole_operands(pools, world):
    assert all(pools(world).run(parts))


@pytest.mark.parametrize(("world", "shape"), [(2, (2,)), (3, (3,)), (4, (2, 2))])
@on_ranks()
def test_derivatives_of_summands(shape):
    """Second and third derivatives with respect to each rank's summand, beside those of plain summands that one process adds up."""
    mesh, generator = mesh_of(shape), torch.Generator().manual_seed(0)
    coordinate = mesh.get_coordinate()
    for placements in itertools.product(("sum", "avg", "R", "S"), repeat=mesh.ndim):
        if len(set(placements) & {"sum", "avg"}) != 1:
            continue
        sizes = [1 if p in ("R", "S") else n for p, n in zip(placements, shape, strict=True)]
        cut = [n if p == "S" else 1 for p, n in zip(placements, shape, strict=True)]
        rows = 2 * math.prod(cut)
        summands = torch.randn(*sizes, rows, 3, dtype=torch.float64, generator=generator).requires_grad_()
        weights = torch.randn(2, *summands.shape, dtype=torch.float64, generator=generator)
        over = list(range(mesh.ndim))
        added = summands.mean(over) if "avg" in placements else summands.sum(over)

        def derivatives(y, x, first, second):
            (one,) = torch.autograd.grad((y**4).sum(), x, create_graph=True)
            (two,) = torch.autograd.grad((one * first).sum(), x, create_graph=True)
            return one, two, *torch.autograd.grad((two**2 * second).sum(), x)

        def mine(t, placements=placements):
            for m, (p, n) in enumerate(zip(placements, shape, strict=True)):
                t = t[coordinate[m] if p in ("sum", "avg") else 0]
                t = t.chunk(n, -2)[coordinate[m]] if p == "S" else t
            return t

        wanted = derivatives(added, summands, *weights)
        x = mine(summands).detach().clone().requires_grad_()
        kinds = {"R": Replicate(), "S": Shard(0), "sum": Partial(), "avg": Partial("avg")}
        y = ShardTensor.from_local(x, mesh, [kinds[p] for p in placements])
        for number, (got, want) in enumerate(zip(derivatives(y, x, *(mine(w) for w in weights)), wanted, strict=True)):
            compare(got, mine(want), 1e-9, f"{placements}, derivative {number + 1}")


def slope(f):
    return lambda x: torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]


# torch makes these gradients as zeros of a size that it remembers.
ZEROS = {
    "sgn": torch.sgn,
    "abs, twice": slope(torch.abs),
    "l1_loss, twice": slope(lambda x: F.l1_loss(x, x.detach() * 2)),
    "copysign": lambda x: torch.copysign(torch.ones_like(x), x),
    "nextafter": lambda x: torch.nextafter(x.detach(), x),
    **{name: lambda x, name=name: getattr(x * 1, name)(*([0.25] if name != "sgn_" else [])) for name in
       ("sgn_", "lt_", "le_", "gt_", "ge_", "eq_", "ne_")},
    "lt_ of tensors": lambda x: (x * 1).lt_(x),
    "lt_ of a view": lambda x: (lambda y: (y[1].lt_(0.25), y)[1])(x * 1),
    "eq_ of a column": lambda x: (lambda y: (y[:, 1:].eq_(0.25), y)[1])(x * 1),
    "used twice": lambda x: x.sgn() + x,
}  # fmt: skip


@on_ranks(2, 3)
def test_gradients_that_torch_makes_as_zeros():
    whole = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, f in ZEROS.items():
        for at in ("S(0)", "S(1)", "R", "P"):
            for cut in (EVEN, UNEVEN, EMPTY):
                what = f"{name} {at} {cut}"
                plain = whole.clone().requires_grad_()
                f(plain).sum().backward()
                x = place(whole, mesh_here(), (at,), cut).requires_grad_()
                (got,) = torch.autograd.grad(f(x).sum(), x)
                f(x).sum().backward()
                for g in (got, x.grad):
                    assert isinstance(g, st.ShardTensor) and g._layout.is_sharded == x._layout.is_sharded, what
                    compare(g, plain.grad, 1e-12, what)


WINDOWED = {
    **{f"{mode} {n}d {how}": (n, lambda x, mode=mode, how=how: F.interpolate(x, mode=mode, **how))
       for n, modes in ((1, ["nearest", "nearest-exact", "linear"]), (2, ["nearest", "bilinear", "bicubic"]), (3, ["nearest", "trilinear"]))
       for mode in modes for how in ({"scale_factor": 2.0}, {"scale_factor": 0.5}, {"size": 3})},
    "antialiased": (2, lambda x: F.interpolate(x, 3, mode="bilinear", antialias=True)),
    "max_pool2d": (2, lambda x: F.max_pool2d(x, 2)),
    "avg_pool3d": (3, lambda x: F.avg_pool3d(x, 2)),
    "reflect": (1, lambda x: F.pad(x, (1, 1), "reflect")),
}  # fmt: skip


@on_ranks((2,), (2, 2))
def test_windows_of_no_batch(shape):
    mesh = mesh_of(shape)
    for name, (n, f) in WINDOWED.items():
        whole = torch.zeros(0, 1, *(4, 6, 4)[:n], dtype=torch.float64)
        plain = whole.clone().requires_grad_()
        y = f(plain)
        (want,) = torch.autograd.grad(y.sum(), plain)
        rest = ("R",) * (mesh.ndim - 1)
        for at, cut, grad_at in itertools.product(("R", f"S({n + 1})"), (UNEVEN, EMPTY), ("S(0)", "S(1)", f"S({n + 1})")):
            x = place(whole, mesh, (at, *rest), cut).requires_grad_()
            (got,) = torch.autograd.grad(f(x), x, place(torch.zeros_like(y), mesh, (*rest, grad_at), cut))
            compare(got, want, 0, f"{name} {at} {cut} {grad_at}")


VIEWED = {
    "row": lambda a: a[1],
    "element": lambda a: a[1, 2],
    "unbind": lambda a: a.unbind(0)[1],
    "slice": lambda a: a[1:3],
    "split": lambda a: a.split(2)[1],
    "column": lambda a: a[:, 2],
    "flat": lambda a: a.view(24),
    "diagonal": lambda a: a.diagonal(),
    "unfold": lambda a: a.unfold(0, 2, 1),
    "expand": lambda a: a[:1].expand(3, 6),
    "written": lambda a: (lambda y: (y[1].mul_(a[0]), y)[1])(a.clone()),
    "view of a product": lambda a: (a * a.sum(0))[1:],
}


@on_ranks((2,), (2, 2))
def test_tangents_of_views(shape):
    mesh = mesh_of(shape)
    generator = torch.Generator().manual_seed(0)
    whole, along = (torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    given = {"a * a": lambda a, _: a * a, "ones": lambda a, _: torch.ones_like(a), "own layout": lambda a, t: t}

    def tangent(f, a, t):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(a, t))).tangent

    layouts = [("R", EVEN), ("P", EVEN), ("S(0)", UNEVEN), ("S(1)", EVEN), ("S(1)", EMPTY)]
    for name, f in VIEWED.items():
        for of, make in given.items():
            want = tangent(f, whole, make(whole, along))
            for (at, cut), (to, other) in itertools.product(layouts, layouts if of == "own layout" else layouts[:1]):
                rest = ("R",) * (mesh.ndim - 1)
                a = place(whole, mesh, (at, *rest), cut)
                got = tangent(f, a, make(a, place(along, mesh, (*rest, to), other)))
                compare(got, want, 1e-12, f"{name} of {at} {cut} along {of} {to} {other}")


def with_gaps(x):
    """Writes rows of a copy that keeps the gaps of a sliced tensor."""
    y = torch.select_scatter(x[:, 1:], x[0, 1:] * 2, 0, 1)
    y[2] = y[0].sum() * x[1, 1:]
    return y


@on_ranks(2, 3)
def test_writes_beside_gaps():
    whole, seed = (torch.randn(s, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for s in ((4, 5), (4, 4)))
    plain = whole.clone().requires_grad_()
    (want,) = torch.autograd.grad(with_gaps(plain), plain, seed)
    for at, arrives in itertools.product(("R", "S(0)", "S(1)", "P"), repeat=2):
        x = place(whole, mesh_here(), (at,), UNEVEN).requires_grad_()
        (grad,) = torch.autograd.grad(with_gaps(x), x, place(seed, mesh_here(), (arrives,), UNEVEN))
        compare(grad, want, 1e-9, f"{at}, the gradient {arrives}")
