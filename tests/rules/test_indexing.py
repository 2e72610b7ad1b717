from __future__ import annotations

import pytest
import torch
from oracle import EVEN, MESHES, bools, case, choices, compare, ints, mesh_id, mesh_of, place, run_on
from test_joins import strictly

aten = torch.ops.aten


def permutation(n: int):
    return lambda g: torch.randperm(n, generator=g)


def no_partial(p, *rest: str) -> bool:
    return "P" not in p


def whole_rows(p, *rest: str) -> bool:
    return "P" not in p and "S(0)" not in p


def written(f):
    """f(y) writes y, a copy of x, in place. The test compares y."""

    def g(x, *rest):
        y = x.clone()
        f(y, *rest)
        return y

    return g


CASES = [
    case("gather", lambda x, i: x.gather(0, i), (5, 4), ints(5, 3, 4)),
    case("gather_smaller", lambda x, i: x.gather(-1, i), (5, 4), ints(4, 2, 3)),
    case("gather_ints", lambda x, i: x.gather(0, i), ints(9, 5, 4), ints(5, 3, 4), backward=False),
    case("gather_quiet", lambda x: x.gather(0, torch.zeros_like(x, dtype=torch.int64)), (5, 4), only=["R", "S(1)"], quiet=lambda p: True),
    case("gather_scalar", lambda x, i: x.gather(0, i), (), ints(1), limit=30),
    case("take_along_dim", lambda x, i: x.take_along_dim(i, 1), (5, 4), ints(4, 5, 2)),
    case("scatter", lambda x, i, s: x.scatter(0, i, s), (5, 3), lambda g: torch.stack([torch.randperm(5, generator=g)[:2] for _ in range(3)], 1),
         (2, 3)),
    case("scatter_value", lambda x, i: x.scatter(1, i, 2.5), (5, 4), ints(4, 5, 2)),
    case("scatter_add", lambda x, i, s: x.scatter_add(0, i, s), (5, 3), ints(5, 4, 3), (4, 3)),
    case("scatter_add_", lambda x, i, s: x.clone().scatter_add_(-1, i, s), (5, 3), ints(3, 5, 4), (5, 4)),
    case("scatter_reduce", lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), (5, 3), ints(5, 4, 3), (4, 3), backward=False),
    case("scatter_op", lambda x, i, s: x.scatter(0, i, s, reduce="multiply"), (5, 3), ints(5, 4, 3), (4, 3), backward=False),
    case("index_select", lambda x, i: x.index_select(0, i), (5, 4), ints(5, 3)),
    case("index_select_last", lambda x, i: x.index_select(-1, i), (5, 4), ints(4, 6)),
    case("index_select_bools", lambda x, i: x.index_select(0, i), bools(5, 4), ints(5, 3), backward=False),
    case("index_add", lambda x, i, s: x.index_add(0, i, s, alpha=2), (5, 3), ints(5, 4), (4, 3)),
    case("index_add_", lambda x, i, s: x.clone().index_add_(-1, i, s), (3, 5), ints(5, 4), (3, 4)),
    case("index_copy", lambda x, i, s: x.index_copy(0, i, s), (5, 3), lambda g: torch.randperm(5, generator=g)[:3], (3, 3)),
    case("index_fill", lambda x, i: x.index_fill(0, i, 1.5), (5, 3), ints(5, 2)),
    case("index", lambda x, i: x[i], (5, 4), lambda g: torch.tensor([3, -1, 0])),
    case("index_columns", lambda x, i: x[:, i], (5, 4), ints(4, 3)),
    case("index_matrix", lambda x, i: x[i], (5, 2), ints(5, 2, 3)),
    case("index_pair", lambda x, i, j: x[i, j], (5, 4), ints(5, 3), ints(4, 3)),
    case("index_pair_broadcast", lambda x, i, j: x[i, :, j], (3, 2, 4), ints(3, 2, 1), ints(4, 3)),
    case("index_mask", lambda x, m: x[m], (5, 4), bools(5, 4)),
    case("index_mask_rows", lambda x, m: x[m], (5, 4), bools(5)),
    case("index_ints", lambda x, i: x[i], ints(9, 5, 4), ints(5, 3), backward=False),
    case("index_put", lambda x, i, v: x.index_put((i,), v), (5, 3), lambda g: torch.randperm(5, generator=g)[:2], (2, 3)),
    case("index_put_add", lambda x, i, v: x.index_put((i,), v, accumulate=True), (5, 3), ints(5, 4), (4, 3)),
    case("index_put_pair", lambda x, i, j, v: x.index_put((i, j), v), (5, 4), permutation(4), permutation(4), (4,)),
    case("setitem_tensor", written(lambda y, i, v: y.__setitem__(i, v)), (5, 3), lambda g: torch.randperm(5, generator=g)[:2], (3,),
         partial=False),
    case("setitem_mask", written(lambda y: y.__setitem__(y > 0, 0.0)), (5, 4), partial=False, quiet=no_partial),
    case("setitem_mask_values", written(lambda y, m: y.__setitem__(m, 2.0)), (5, 4), bools(5), partial=False),
    case("masked_select", lambda x, m: x.masked_select(m), (5, 4), bools(5, 4), limit=30),
    case("masked_scatter", lambda x, m, s: x.masked_scatter(m, s), (5, 4), bools(5, 4), (20,), limit=30),
    case("nonzero", lambda x: x.nonzero(), bools(5, 4), backward=False),
    case("where_single", lambda x: torch.where(x), bools(5, 4), backward=False, limit=30),
    case("take", lambda x, i: x.take(i), (5, 4), ints(20, 3)),
    case("tril", lambda x: x.tril(), (5, 4), quiet=lambda p: True),
    case("triu", lambda x: x.triu(1), (5, 4), quiet=lambda p: True),
    case("tril_batch", lambda x: x.tril(-1), (2, 3, 4), quiet=lambda p: True),
    case("triu_", lambda x: x.clone().triu_(-1), (5, 4), quiet=lambda p: True),
    case("trace", torch.trace, (5, 4), backward=False, quiet=lambda p: True),
    case("unsafe_masked_index", lambda x, m, i: aten._unsafe_masked_index(x, m, [i, None], 1.5), (5, 4), bools(3, 1), ints(5, 3),
         quiet=lambda x, m, i: "P" not in x and set((m + " " + i).split()) == {"R"} and "S(0)" not in x),
    case("unsafe_masked_put", lambda x, m, i, v: aten._unsafe_masked_index_put_accumulate(x, m, [i, None], v), (5, 4), bools(3, 1), ints(5, 3),
         (3, 4)),
    case("repeat_interleave_each", strictly(lambda x, r: x.repeat_interleave(r, 0)), (3, 4), lambda g: torch.tensor([2, 0, 3]),
         replicated=(1,), quiet=lambda x, r: True),
    case("list", lambda x: x[[0, 3, 0]], (5, 4), quiet=whole_rows),
    case("list_and_slice", lambda x: x[1:, [2, 0]], (5, 4)),
    case("lists", lambda x: x[[0, 3], range(2)], (5, 4), limit=30),
    case("tuple_of_tuple", lambda x: x[(0, 3),], (5, 4), limit=30),
    case("nested_list", lambda x: x[[[0, 3], [1, 1]]], (5, 4), limit=30),
    case("one_bool", lambda x: x[True], (5, 4), limit=30),
    case("not_one", lambda x: x[False], (5, 4), limit=30),
    case("bool_of_sum", lambda x: x[x.detach().sum() < 1e9], (5, 4), limit=30),
    case("itself", lambda x: x[x.detach() < 1e9], (), limit=30),
    case("list_of_bools", lambda x: x[[True, False, True, True, False]], (5, 4), limit=30),
    case("setitem_bool", written(lambda y: y.__setitem__(y.sum() < 1e9, 2.0)), (5, 4), limit=30, partial=False),
    case("setitem_list", written(lambda y: y.__setitem__([0, 3], 2.0)), (5, 4), partial=False),
    case("setitem_list_of", written(lambda y, v: y.__setitem__([3, 0], v)), (5, 4), (2, 4), partial=False),
    case("sort_of", lambda x: x.gather(0, x.argsort(0)), (5, 4), limit=30),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


def plain_among_lists(layout: str) -> list[str]:
    x = place(torch.arange(20.0).view(5, 4), mesh_of((2,)), (layout,), EVEN)
    raised = []
    for f in (
        lambda: x[torch.tensor([0, 2])],
        lambda: x[torch.tensor([0, 2]), [0, 1]],
        lambda: x[[torch.tensor([0, 2]), torch.tensor([0, 1])]],
        lambda: x.__setitem__([0, 2], torch.zeros(2, 4)),
    ):
        with pytest.raises(RuntimeError) as error:
            f()
        raised.append(str(error.value))
    return raised


@pytest.mark.parametrize("layout", ["R", "S(0)"])
def test_plain_tensors_still_raise(pools, layout):
    for raised in pools(2).run(plain_among_lists, layout):
        assert all("plain torch.Tensor" in text for text in raised), raised


def out_of_range(layout: str) -> list[str]:
    mesh = mesh_of((2,))
    x = place(torch.arange(5.0), mesh, (layout,), EVEN)
    i = place(torch.tensor([5]), mesh, ("R",), EVEN)
    raised = []
    for name, f in {
        "gather": lambda: x.gather(0, i),
        "index": lambda: x[i],
        "index_select": lambda: x.index_select(0, i),
        "index_add": lambda: x.index_add(0, i, i.double().to(x.dtype)),
    }.items():
        try:
            f()
        except (RuntimeError, IndexError):
            raised.append(name)
    return raised


@pytest.mark.parametrize("layout", ["R", "S(0)"])
def test_an_index_out_of_range_raises(pools, layout):
    for raised in pools(2).run(out_of_range, layout):
        assert raised == ["gather", "index", "index_select", "index_add"]


def _mask(*sizes):
    return torch.arange(torch.Size(sizes).numel()).view(sizes) % 3 != 0


# What is read lies, partly, in what is written; torch allows it. Each makes its masks with `m`.
OWN = {
    "masked_scatter_ of itself": lambda x, m: x.masked_scatter_(m(_mask(4, 6)), x),
    "of its transpose": lambda x, m: x.masked_scatter_(m(_mask(4, 6)), x.t()),
    "of a transpose": lambda x, m: x.t().masked_scatter_(m(_mask(6, 4)), x),
    "of a row": lambda x, m: x.masked_scatter_(m(_mask(4, 6) & (torch.arange(6) == 1)), x[0]),
    "of a column": lambda x, m: x.masked_scatter_(m(_mask(4, 6) & (torch.arange(6) == 1)), x[:, 1]),
    "of rows before": lambda x, m: x[1:].masked_scatter_(m(_mask(3, 6)), x[:2]),
    "of more": lambda x, m: x[1:3].masked_scatter_(m(_mask(2, 6)), x),
    "of columns": lambda x, m: x[:, 1:].masked_scatter_(m(_mask(4, 5)), x),
    "of a flat part": lambda x, m: x.view(-1)[2:20].masked_scatter_(m(_mask(18)), x),
    "of a conjugate": lambda x, m: torch.view_as_complex(x.view(4, 3, 2)).masked_scatter_(m(_mask(4, 3)), torch.view_as_complex(x.view(4, 3, 2)).conj()),
    "x[mask] = element": lambda x, m: x.__setitem__(m(_mask(4, 6)), x[0, 0]),
    "x[mask] = one of a row": lambda x, m: x.__setitem__(m(_mask(4, 6)), x[1, 1:2]),
    "fill_": lambda x, m: x[:2].fill_(x[1, 3]),
    "masked_fill_": lambda x, m: x.masked_fill_(m(_mask(4, 6)), x[1, 1]),
    "index_fill_": lambda x, m: x.index_fill_(0, m(torch.tensor([0, 2])), x[2, 1]),
}


def writes_of_own_elements(shape):
    mesh = mesh_of(shape)
    whole = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, write in OWN.items():
        want = whole.clone()
        write(want, lambda t: t)
        for placements, cut in choices(whole, mesh.ndim, True)[:: mesh.ndim]:
            with pytest.raises(RuntimeError, match="same dtype"):
                y = place(whole, mesh, placements, cut)
                y.masked_scatter_(place(_mask(4, 6), mesh, ("R",) * mesh.ndim, EVEN), y.view(torch.int64))
            for of_mask in ("R", "S(0)"):
                x = place(whole, mesh, placements, cut)
                write(x, lambda t, of_mask=of_mask: place(t, mesh, (of_mask,) * mesh.ndim, EVEN))
                compare(x, want, 1e-12, f"{name} {placements} {cut} {of_mask}")


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
def test_writes_of_own_elements(pools, mesh):
    world, shape = mesh
    pools(world).run(writes_of_own_elements, shape)
