from __future__ import annotations

import itertools

import pytest
import torch
import torch.utils._pytree as pytree
from oracle import MESHES, bools, case, ints, mesh_here, mesh_id, mesh_of, place, run_on
from pool import on_ranks


def always(*placements: str) -> bool:
    return True


def one_of(*dims: int):
    """Quiet where at most one of these dims of the first argument is sharded."""
    return lambda p, *rest: sum(f"S({d})" in p for d in dims) <= 1


def uncut(*dims: int):
    """Quiet where none of these dims of the first argument is sharded."""
    return lambda p, *rest: not any(f"S({d})" in p for d in dims)


CASES = [
    case("view_flatten", lambda x: x.view(20), (5, 4), quiet=uncut(1)),
    case("view_flatten_middle", lambda x: x.view(2, 12, 2), (2, 4, 3, 2), quiet=uncut(2)),
    case("view_flatten_ones", lambda x: x.view(1, 20, 1), (1, 5, 4), quiet=uncut(0, 2)),
    case("view_unflatten", lambda x: x.view(6, 2, 3), (12, 3)),
    case("view_unflatten_last", lambda x: x.view(4, 2, 6), (4, 12), quiet=uncut(1)),
    case("view_regroup", lambda x: x.view(4, 6), (6, 4), limit=30),
    case("view_minus_one", lambda x: x.view(-1, 2), (5, 4), quiet=uncut(1)),
    case("flatten_used", lambda x: x.flatten() * x.flatten(), (4, 6)),
    case("flatten_inner", lambda x: x.flatten(1), (2, 3, 4)),
    case("view_to_scalar", lambda x: x.view(()), (1, 1)),
    case("view_from_scalar", lambda x: x.view(1, 1), ()),
    case("view_none", lambda x: x.view(0, 4), (4, 0), backward=False),
    case("reshape_transposed", lambda x: x.t().reshape(20), (5, 4)),
    case("reshape_slice", lambda x: x[:, 1:3].reshape(-1), (5, 4)),
    case("flatten", lambda x: x.flatten(1), (3, 2, 4), quiet=uncut(2)),
    case("view_dtype_same", lambda x: x.view(torch.int64), (5, 4), backward=False, partial=False, quiet=always),
    case("view_dtype_narrower", lambda x: x.view(torch.int32), (5, 4), backward=False, partial=False, quiet=always),
    case("view_dtype_wider", lambda x: x.view(torch.int64), lambda g: torch.arange(40, dtype=torch.int32).view(4, 10),
         backward=False),
    case("unsqueeze", lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(1)), (5, 4), quiet=always),
    case("unsqueeze_scalar", lambda x: x.unsqueeze(0), ()),
    case("unsqueeze_", lambda x: x.clone().unsqueeze_(1) * 2, (5, 4), quiet=always),
    case("squeeze", lambda x: x.squeeze(), (1, 5, 1, 4)),
    case("squeeze_dim", lambda x: (x.squeeze(1), x.squeeze(-2)), (5, 1, 4)),
    case("squeeze_dims", lambda x: x.squeeze((0, 2, 3)), (1, 3, 1, 2)),
    case("squeeze_rows_of_one", lambda x: x.squeeze(), (2, 3), quiet=always),
    case("squeeze_", lambda x: x.clone().squeeze_(1) + 1, (5, 1, 4)),
    case("expand", lambda x: x.expand(3, 5, 4), (5, 1), quiet=uncut(1)),
    case("expand_kept", lambda x: x.expand(2, -1, -1), (5, 4), quiet=always),
    case("expand_scalar", lambda x: x.expand(3, 2), ()),
    case("broadcast_to", lambda x: torch.broadcast_to(x, (5, 4)), (4,)),
    case("select", lambda x: x[3], (5, 4), quiet=always),
    case("select_negative", lambda x: x.select(-1, -2), (5, 4), quiet=always),
    case("select_ints", lambda x: x[1], ints(9, 5, 4), backward=False),
    case("select_bools", lambda x: x[:, 1], bools(5, 4), backward=False),
    case("select_to_scalar", lambda x: x[2], (5,)),
    case("slice", lambda x: x[1:3], (5, 4), quiet=always),
    case("slice_step", lambda x: x[1::2], (7, 3), quiet=always),
    case("slice_negative", lambda x: x[-3:-1], (5, 4), quiet=always),
    case("slice_columns", lambda x: x[:, 1:3], (5, 4), quiet=always),
    case("slice_empty", lambda x: x[3:1], (5, 4), quiet=always),
    case("slice_all", lambda x: x[:], (5, 4), quiet=always),
    case("slice_both", lambda x: x[1:4, ::3], (5, 4), quiet=always),
    case("narrow", lambda x: x.narrow(0, 2, 3), (5, 4), quiet=always),
    case("split", lambda x: x.split(2), (5, 4), quiet=always),
    case("split_used", lambda x: sum(p.sum() * (i + 1) for i, p in enumerate(x.split(2, -1))), (4, 5)),
    case("split_sizes", lambda x: x.split([1, 0, 4]), (5, 4), quiet=always),
    case("chunk", lambda x: x.chunk(3), (5, 4), quiet=always),
    case("tensor_split", lambda x: x.tensor_split(3), (5, 4), quiet=always),
    case("tensor_split_at", lambda x: (x.tensor_split((1, 3)), x.tensor_split((2,), 1)), (5, 4), quiet=always),
    case("unbind", lambda x: x.unbind(-1), (5, 4), quiet=always),
    case("unbind_ints", lambda x: x.unbind(), ints(9, 5, 4), backward=False, quiet=always),
    case("unbind_bools", lambda x: x.unbind(), bools(5, 4), backward=False, quiet=always),
    case("unbind_used", lambda x: sum(row * (i + 1) for i, row in enumerate(x.unbind())), (5, 4)),
    case("unbind_copy", torch.unbind_copy, (3, 2), backward=False, limit=20),
    case("rows", lambda x: list(x), (3, 2), limit=30, quiet=always),
    case("transpose", lambda x: x.transpose(0, -1), (5, 4), quiet=always),
    case("transpose_", lambda x: x.clone().transpose_(0, 1) * 2, (5, 4), quiet=always),
    case("t_", lambda x: x.clone().t_() * 2, (5, 4), quiet=always),
    case("permute", lambda x: x.permute(2, 0, -2), (3, 2, 4), quiet=always),
    case("movedim", lambda x: x.movedim(0, 1), (5, 4), quiet=always),
    case("swapdims", lambda x: x.swapdims(0, 1), (5, 4), quiet=always),
    case("mT", lambda x: x.mT, (5, 4), quiet=always),
    case("diagonal", lambda x: x.diagonal(1), (5, 4), quiet=one_of(0, 1)),
    case("diagonal_below", lambda x: x.diagonal(-2), (5, 4), quiet=one_of(0, 1)),
    case("diagonal_none", lambda x: (x.diagonal(4), x.diagonal(-5)), (5, 4), quiet=one_of(0, 1)),
    case("diagonal_batch", lambda x: x.diagonal(0, -1, 0), (3, 2, 3), quiet=one_of(0, 2)),
    case("diagonal_used", lambda x: x.diagonal() * x.diagonal(), (5, 4), partial=False, quiet=one_of(0, 1)),
    case("diagonal_copy", torch.diagonal_copy, (5, 4), backward=False, quiet=one_of(0, 1)),
    case("diag_embed", lambda x: (x.diag_embed(), x.diag_embed(-1, 0, 1)), (3, 4), quiet=uncut(1)),
    case("unfold", lambda x: x.unfold(0, 2, 1), (5, 4), quiet=uncut(0)),
    case("view_as_real", lambda x: torch.view_as_real(torch.complex(x, 2 * x)), (5, 4)),
    case("view_as_complex", torch.view_as_complex, (5, 2), quiet=uncut(1), partial=False),
    case("real_imag", lambda x: (torch.complex(x, 2 * x).real, torch.complex(x, 2 * x).imag), (5, 4)),
    case("select_scatter", lambda x, y: torch.select_scatter(x, y, 0, 2), (5, 4), (4,), backward=False),
    case("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 0, 1, 3), (5, 4), (2, 4), backward=False),
    case("diagonal_scatter", lambda x, y: torch.diagonal_scatter(x, y, 1), (5, 4), (3,)),
    case("diagonal_scatter_below", lambda x, y: torch.diagonal_scatter(x, y, -3), (5, 4), (2,),
         quiet=lambda x, y: set(x.split()) <= {"R", "S(0)", "S(1)"} and len(set(x.split())) == 1 and set(y.split()) == {"R"}),
    case("diagonal_scatter_batch", lambda x, y: torch.diagonal_scatter(x, y, 0, -1, 0), (3, 2, 3), (2, 3),
         quiet=lambda x, y: (set(x.split()), set(y.split())) == ({"S(1)"}, {"S(0)"}), cut_alike=True),
    case("as_strided_scatter", lambda x, y: torch.as_strided_scatter(x, y, (5, 2), (4, 2), 1), (5, 4), (5, 2), cut_alike=True,
         quiet=lambda x, y: x == y and set(x.split()) <= {"R", "S(0)", "P"}),
    case("as_strided_scatter_gaps", lambda x, y: torch.as_strided_scatter(x[:, 1:5], y, (3, 2), (6, 1)), (5, 6), (3, 2), backward=False),
    case("as_strided_scatter_rows", lambda x, y: torch.as_strided_scatter(x[1:4], y, (2, 2), (4, 1), 5), (5, 4), (2, 2), backward=False),
    case("narrow_copy", lambda x: torch.narrow_copy(x, 0, 1, 3), (5, 4), backward=False, quiet=always),
    case("narrow_copy_end", lambda x: torch.narrow_copy(x, -1, -1, 1), (5, 4), backward=False, quiet=always),
    case("copies", lambda x: (torch.slice_copy(x, 0, 1, 3), torch.select_copy(x, 0, 1), torch.view_copy(x, (20,)),
                              torch.permute_copy(x, (1, 0)), torch.expand_copy(x, (2, 5, 4)), torch.squeeze_copy(x)),
         (5, 4), limit=30),
    case("heads", lambda x: x.view(2, 3, 4, 2).transpose(1, 2).reshape(2, 4, 6).transpose(1, 2), (2, 3, 8)),
]


# ---- writing through views: the base sees it, on every rank, and so does autograd ----


def written(f):
    """f(y) writes y, a copy of x. The test compares y."""

    def g(x, *rest):
        y = x.clone()
        f(y, *rest)
        return y * 1

    return g


def slices(y):
    y[1:3].mul_(2)
    y[:, 0] = 5


def nested_slices(y):
    z = y[1:]
    z[::2, 1:].add_(1)
    z[1:2].zero_()


def viewed(y):
    y.view(5, 2, 2)[1:4, 1].mul_(3)
    y.t()[1:].sub_(1)
    y.unsqueeze(0).expand(1, 5, 4)[:, :2].mul_(2)


def split_halves(y):
    a, b = y.split(3)
    a.mul_(2)
    b.fill_(1)


def row_of_row(y):
    row = y[1]
    row[2].mul_(3)  # on a mesh of two dims, a copy of a copy
    row[:2].add_(1)
    y[-1] += row


def flat(y):
    y.view(-1)[::7] = 0
    y.flatten()[3] = 5
    y.view(-1, 2)[2:4, 1].mul_(3)


WRITES = [
    case("write_row", written(lambda y: y[-2].mul_(2)), (5, 4), partial=False),
    case("write_column", written(lambda y: y[:, 1].zero_()), (5, 4), partial=False),
    case("write_row_add", written(lambda y, v: y[0].add_(v)), (5, 4), (4,), partial=False),
    case("write_row_plus_is", written(lambda y, v: y.__setitem__(0, y[0].__iadd__(v))), (5, 4), (4,), partial=False),
    case("write_select_copy", written(lambda y, v: y.select(1, 2).copy_(v)), (5, 4), (5,), partial=False),
    case("write_row_of_row", written(row_of_row), (5, 4), partial=False),
    case("write_row_sigmoid", written(lambda y: y[2].sigmoid_()), (5, 4), partial=False),
    case("write_row_of_transposed", written(lambda y: y.transpose(0, 2)[1].mul_(2)), (2, 3, 4), partial=False),
    case("write_flat_any", written(flat), (5, 4), partial=False),
    case("fill_diagonal", written(lambda y: y.fill_diagonal_(5)), (5, 4), partial=False),
    case("fill_diagonal_wrap", written(lambda y: y.fill_diagonal_(5, wrap=True)), (9, 3), partial=False),
    case("fill_diagonal_cube", written(lambda y: y.fill_diagonal_(5)), (3, 3, 3), partial=False),
    case("write_slices", written(slices), (5, 4), partial=False, only=["R", "S(0)"]),
    case("write_slices_any", written(lambda y: y[1:3].mul_(2)), (5, 4), partial=False),
    case("write_columns", written(lambda y: y[:, 1:3].add_(1)), (5, 4), partial=False),
    case("write_nested", written(nested_slices), (6, 3), partial=False),
    case("write_views", written(viewed), (5, 4), partial=False, only=["R", "S(0)"]),
    case("write_transposed", written(lambda y: y.t()[1:3].mul_(2)), (5, 4), partial=False),
    case("write_flat", written(lambda y: y.view(-1).mul_(2)), (5, 4), partial=False, only=["R", "S(0)"]),
    case("setitem_slice", written(lambda y, v: y.__setitem__(slice(1, 3), v)), (5, 4), (2, 4), partial=False),
    case("setitem_column", written(lambda y, v: y.__setitem__((slice(None), 1), v)), (5, 4), (5,), partial=False),
    case("setitem_row", written(lambda y, v: y.__setitem__(3, v)), (5, 4), (4,), partial=False),
    case("setitem_element", written(lambda y: y.__setitem__((2, -1), 7.0)), (5, 4), partial=False),
    case("setitem_ellipsis", written(lambda y, v: y.__setitem__((..., 1, slice(1, 3)), v)), (2, 3, 4), (2, 2), partial=False),
    case("split_unsafe", written(lambda y: [p.mul_(i + 2) for i, p in enumerate(y.unsafe_split(2))]), (5, 4), partial=False,
         only=["R", "S(0)"], backward=False),
    case("as_strided_merged", lambda x: x.as_strided((2, 12, 2), (24, 2, 1)), (2, 4, 3, 2)),
    case("as_strided_whole", lambda x: x.as_strided((2, 3), (4, 1), 1), (5, 4)),
]
CASES += WRITES


@on_ranks(2)
def test_elements_of_unbind_are_not_written():
    from oracle import EVEN, mesh_of, place

    x = place(torch.randn(4), mesh_of((2,)), ("S(0)",), EVEN)
    with torch.no_grad(), pytest.raises(RuntimeError, match="comes from a view that had to move data"):
        x.unbind()[1].add_(1)


@on_ranks(2, 4)
def test_rows_of_unbind_follow_on_all_ranks():
    """All ranks take the rows for views, also those whose piece has no elements."""
    import torch.distributed as dist
    from oracle import EMPTY, EVEN, mesh_of, place

    world, whole = dist.get_world_size(), torch.arange(16.0).view(4, 4)
    for shape, dim, cut in itertools.product(((1, world), (world // 2, 2)), (0, 1), (EMPTY, EVEN)):
        x = place(whole, mesh_of(shape), (f"S({dim})", f"S({1 - dim})"), cut)
        rows = x.unbind(dim)
        x.add_(1)
        assert torch.equal((rows[1] + 0).full_tensor(), whole.select(dim, 1) + 1)
        with torch.no_grad():
            x.unbind(dim)[1].add_(1)
        want = whole + 1
        want.select(dim, 1).add_(1)
        assert torch.equal(torch.stack([row.full_tensor() for row in x.unbind(dim)], dim), want) and torch.equal(x.full_tensor(), want)


@on_ranks(2, 4)
def test_rows_of_a_cut_dim_are_views():
    """A row of a cut dim is a view of its owner's piece, on ranks without elements too."""
    from oracle import EMPTY, EVEN, UNEVEN, compare, mesh_here, mesh_of, place
    from shardtensor import _C

    whole = torch.arange(24.0).view(4, 2, 3)
    square = [(mesh_of((2, 2)), ("S(0)", "S(1)")), (mesh_of((2, 2)), ("S(0)", "S(0)"))] if torch.distributed.get_world_size() == 4 else []
    for mesh, places in [(mesh_here(), ("S(0)",)), (mesh_here(), ("S(1)",)), *square]:
        for cut in (EVEN, UNEVEN, EMPTY)[: 3 if len({*places}) == len(places) else 1]:
            x, want = place(whole, mesh, places, cut), whole.clone()
            dim = int(places[0] == "S(1)")
            rows, plain = x.unbind(dim), want.unbind(dim)
            with torch.no_grad():
                for t, r in ((x, rows), (want, plain)):
                    t.mul_(2)
                    r[1].add_(1)
                    t.select(dim, 0).copy_(r[1])
                    torch._foreach_add_([r[0], r[1]], 1.0)
            _C.reset_comm_counts()
            sizes = [row.to_local().shape for row in rows]
            assert not _C.comm_counts() and len(sizes) == len(plain)
            compare(x, want, 0, f"{places} {cut}")
            for row, p in zip(rows, plain, strict=True):
                compare(row, p, 0, f"{places} {cut}")


def _same_bits(got, want) -> bool:
    """Nan counts as nan: its sign and payload may differ."""
    return got.shape == want.shape and bool(((got == want) & (got.signbit() == want.signbit()) | got.isnan() & want.isnan()).all())


@on_ranks(2, 3, 4)
def test_rows_of_cut_dims_are_exact(world):
    """What is computed of a row of a cut dim has plain's values to the bit: no other rank adds to it. Gradients too."""
    from oracle import EMPTY, EVEN, UNEVEN, mesh_of, place, whole

    inf, nan = float("inf"), float("nan")
    values = torch.tensor([-0.0, 0.0, 2.0, -3.0, inf, nan, 1.0, -inf, 5.0, -0.0, 7.0, -1.0]).view(4, 3).repeat(1, 2).view(4, 3, 2)
    factor = torch.tensor([[inf, 2.0], [-0.0, -1.0], [nan, 1.0]])
    taken = {
        "select": lambda x: x[1], "negative": lambda x: x.select(0, -1), "unbind": lambda x: x.unbind(0)[2], "copy": lambda x: torch.select_copy(x, 0, 1),
        "transposed": lambda x: x.transpose(0, 1)[:, 2], "strided": lambda x: x.as_strided((3, 2), (2, 1), 6), "part": lambda x: x[3][1:, :1],
    }  # fmt: skip
    used = {
        "times": lambda row, f: row * f[: row.shape[0], : row.shape[1]], "reciprocal": lambda row, f: 1 / row, "negative": lambda row, f: 1 / -row,
        "atan2": lambda row, f: torch.atan2(row, torch.full_like(row, -1.0)), "where": lambda row, f: torch.where(row > 0, row, 1 / row),
        "cast": lambda row, f: (row * 0.5).double(), "cat": lambda row, f: 1 / torch.cat([row, row]), "sum": lambda row, f: row.sum(-1),
    }  # fmt: skip
    meshes = [((world,), ("S(0)",))] if world < 4 else [((2, 2), p) for p in (("S(0)", "S(1)"), ("S(1)", "S(0)"), ("S(0)", "S(0)"), ("R", "S(0)"))]
    for shape, places in meshes:
        for cut in (EVEN, UNEVEN, EMPTY)[: 1 if places == ("S(0)", "S(0)") else 3]:
            mesh = mesh_of(shape)
            for (t, take), (u, use) in itertools.product(taken.items(), used.items()):
                x, plain = place(values, mesh, places, cut).requires_grad_(), values.clone().requires_grad_()
                got, want = use(take(x), place(factor, mesh, ("R",) * len(shape), EVEN)), use(take(plain), factor)
                what = f"{t} {u} {places} {cut}"
                assert _same_bits(whole(got), want), f"{what}: {whole(got)} {want}"
                got.sum().backward()
                want.sum().backward()
                assert x.grad._layout == x._layout, what
                torch.testing.assert_close(whole(x.grad), plain.grad, rtol=0, atol=0, equal_nan=True, msg=lambda m, what=what: f"{what}: {m}")


@on_ranks(2, 3)
def test_rows_send_nothing():
    """A row is taken, computed with and its gradient put back without a message; it moves as any cut tensor does."""
    from oracle import EVEN, mesh_here, place
    from shardtensor import _C

    x = place(torch.arange(24.0).view(6, 4), mesh_here(), ("S(0)",), EVEN).requires_grad_()
    _C.reset_comm_counts()
    row = x[4]
    out = (row * 2).relu()
    out.backward(torch.ones_like(out))
    assert not _C.comm_counts() and x.grad._layout == x._layout and row.to_local().numel() in (0, 4)
    assert torch.equal(row.full_tensor(), torch.arange(16.0, 20.0))
    assert torch.equal(x.grad.full_tensor()[4], torch.full((4,), 2.0))


@on_ranks(2, 3)
def test_all_ranks_write_through_windows_or_none():
    """Through a view that reads other ranks' rows, and through views of it. Only some ranks fetch rows, or have windows."""
    import torch.distributed as dist
    from oracle import mesh_here, place

    data = torch.arange(1.0, 43.0).reshape(7, 3, 2)
    after = {"itself": lambda y: y, "element": lambda y: y[0], "squeezed": lambda y: y.squeeze().unsqueeze(0), "merged": lambda y: y.flatten(0, 1)}
    for dim, size, step, cut, name in itertools.product((0, 1), (1, 2, 3), (1, 2, 7), ("even", "uneven", "empty"), after):
        if (n := data.shape[dim]) and cut == "empty":
            cut = [n] + [0] * (dist.get_world_size() - 1)
        x = place(data, mesh_here(), (f"S({dim})",), cut)
        try:
            after[name](x.unfold(dim, size, step)).mul_(0.5)
            outcome = "written"
        except RuntimeError as error:
            assert "comes from a view" in str(error), error
            outcome = "refused"
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        assert len(set(outcomes)) == 1, (dim, size, step, cut, name, outcomes)
        want = data.clone()
        if outcome == "written":
            after[name](want.unfold(dim, size, step)).mul_(0.5)
        assert torch.equal(x.full_tensor(), want), (dim, size, step, cut, name, outcome)


PUT_BACK = {
    "select": lambda x: x[3].add_(1),
    "detached": lambda x: x[3].detach().add_(1),
    "data": lambda x: x.data[3].data.add_(1),
    "reshaped": lambda x: x[3].unsqueeze_(0).add_(1),
    "list": lambda x: torch._foreach_mul_([x[3], x[1]], 2.0),
    "out": lambda x: torch.mul(x[2], 2, out=x[3]),
    "moved": lambda x: x.as_strided((3, 3), (5, 1)).fill_(0),
    "two_views": lambda x: (lambda row: (row[:2].mul_(2), row[1:].add_(1)))(x[2]),
    "noise": lambda x: x[1].bernoulli_(1.0),
}


@pytest.mark.parametrize("name", PUT_BACK)
@on_ranks(2)
def test_a_written_view_that_moved_data_is_put_back(name):
    """A write to a view that had to move data reaches the base and the view, on all ranks."""
    from oracle import EVEN, UNEVEN, compare, mesh_of, place

    whole = torch.randn(4, 4)
    for at in ("S(0)", "S(1)", "R", "P"):
        for cut in (EVEN, UNEVEN):
            x, want = place(whole, mesh_of((2,)), (at,), cut), whole.clone()
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    x, want = x.clone(), want.clone()
                    PUT_BACK[name](x)
                    PUT_BACK[name](want)
                    compare(x, want, 1e-6, f"{name} {at} {cut}")


OLD = {
    "select": (lambda x: x[3], lambda x: x.add_(1)),
    "view_of_it": (lambda x: x[3].unsqueeze(0), lambda x: x.add_(1)),
    "detached": (lambda x: x[3].detach(), lambda x: x.zero_()),
    "unbind": (lambda x: x.unbind()[0], lambda x: x.mul_(2)),
    "moved": (lambda x: x.as_strided((3, 3), (5, 1)), lambda x: x.mul_(2)),
    "through_a_view": (lambda x: x[3], lambda x: x[:2].mul_(2)),
    "out": (lambda x: x[3], lambda x: torch.mul(x, 2, out=x)),
    "list": (lambda x: x[3], lambda x: torch._foreach_mul_([x], 2.0)),
    "lists": (lambda x: x[3], lambda x: torch._foreach_add_([x], [x])),
    "inference": (lambda x: x[3], lambda x: x.add_(1)),
}


@pytest.mark.parametrize("name", OLD)
@on_ranks(2)
def test_a_view_that_moved_data_is_not_read_once_it_is_old(name):
    from oracle import UNEVEN, mesh_of, place

    view, write = OLD[name]
    x = place(torch.randn(16), mesh_of((2,)), ("S(0)",), UNEVEN)
    with torch.inference_mode(name == "inference"):
        x = x.clone()
        taken, kept = view(x), view(x).clone()
        before = taken.full_tensor()
        write(x)
        assert torch.equal(kept.full_tensor(), before)
        assert torch.equal(view(x).full_tensor(), view(x.full_tensor()))
        for use in (lambda: taken * 2, lambda: taken.full_tensor(), lambda: taken.to_local(), lambda: torch._foreach_abs([taken])):
            try:
                use()
            except RuntimeError as error:
                assert "is read after its base tensor was written" in str(error), error
            else:
                raise AssertionError("read old values")


@on_ranks(2)
def test_other_writes_leave_it_readable():
    """Writes that such a view cannot see, or that come before its use, leave it as it is."""
    from oracle import EVEN, mesh_of, place

    def check(f):
        whole = torch.arange(16.0).view(4, 4)
        x = place(whole, mesh_of((2,)), ("S(0)",), EVEN)
        want = f(whole)
        got = f(x)
        assert torch.equal(got.full_tensor(), want), (got, want)

    def itself(x):
        x[1:3] = x[0]
        x[:2].sub_(x[3])
        return x

    def another(x):
        row, y = x[3], x.clone()
        y.add_(1)
        return row + y[0]

    def reshaped(x):
        row = x[3]
        row.unsqueeze_(0)
        return row * 2

    check(itself)
    check(another)
    check(reshaped)


# For autograd, these write the base y.
SEEN_AS_WRITES = {
    "reshaped": lambda y: y.unsqueeze_(0),
    "view_reshaped": lambda y: y[:, :1].unsqueeze_(0),
    "copy_reshaped": lambda y: y[3].unsqueeze_(0),
    "nothing_written": lambda y: y[3][1:1].zero_(),
}


@pytest.mark.parametrize("name", SEEN_AS_WRITES)
@on_ranks(2)
def test_copies_of_views_do_not_outlive_what_autograd_takes_for_a_write(name):
    """A view that moved data has no place in its base. Autograd would look for one and send the gradient elsewhere."""
    from oracle import EVEN, mesh_of, place

    x = place(torch.randn(4, 4), mesh_of((2,)), ("S(0)",), EVEN).requires_grad_()
    y = x * 1
    moved = y.as_strided((3, 3), (5, 1))
    SEEN_AS_WRITES[name](y)
    with pytest.raises(RuntimeError, match="is read after its base tensor was written"):
        (moved * 2).sum()
    (grad,) = torch.autograd.grad((y.view(4, 4)[2] * 2).sum(), x)
    assert torch.equal(grad.full_tensor(), torch.tensor([0.0, 0.0, 2.0, 0.0])[:, None].expand(4, 4))


THROUGH_VIEWS = {
    "row": lambda y: y[1].mul_(3),
    "column": lambda y: y[:, 2].sigmoid_(),
    "last": lambda y: y[..., -1].zero_(),
    "rows": lambda y: y[1:3].mul_(y[2:4].detach().clone()),
    "every_second": lambda y: y[:, ::2].mul_(2),
    "diagonal": lambda y: y.diagonal(0, -2, -1).mul_(3),
    "transposed": lambda y: y.transpose(0, 2)[1:].exp_(),
    "flat": lambda y: y.view(-1, 4)[3:].mul_(3),
    "single": lambda y: y[:, :1].unsqueeze(0).mul_(3),
    "empty": lambda y: y[:, 2:2].mul_(3),
}


def through_views(name: str) -> int:
    """The gradient of a write through a view, arriving in any layout. Returns the number of pairs of layouts."""
    from oracle import EVEN, UNEVEN, mesh_of, place

    write, mesh, done = THROUGH_VIEWS[name], mesh_of((2,)), 0
    options = [("R", EVEN), ("P", EVEN), *((f"S({d})", cut) for d in range(3) for cut in (EVEN, UNEVEN))]
    whole, seed = torch.randn(2, 4, 5, 4, dtype=torch.float64)
    p = whole.clone().requires_grad_()
    want = p * 1
    write(want)
    (want_grad,) = torch.autograd.grad(want, p, seed)
    for at, cut in options:
        for seed_at, seed_cut in options:
            x = place(whole, mesh, (at,), cut).requires_grad_()
            y = x * 1
            write(y)
            torch.testing.assert_close(y.detach().full_tensor(), want.detach())
            (grad,) = torch.autograd.grad(y, x, place(seed, mesh, (seed_at,), seed_cut))
            torch.testing.assert_close(grad.full_tensor(), want_grad)
            done += 1
    return done


@pytest.mark.parametrize("name", THROUGH_VIEWS)
def test_gradients_through_written_views(pools, name):
    assert min(pools(2).run(through_views, name)) == 64


@on_ranks(2)
def test_gradients_of_views_are_written():
    """Gradients that come out of views which moved data are accumulated, scaled and zeroed like any other."""
    from oracle import EVEN, mesh_of, place

    def steps(p, q, r):
        for _ in range(3):
            y = torch.stack((p, q)).flatten() * torch.cat((r, r)).flatten()
            (y * y).sum().backward()
            torch.nn.utils.clip_grad_norm_([p, q, r], 1.0)
            with torch.no_grad():
                for t in (p, q, r):
                    t.sub_(t.grad)
        for t in (p, q, r):
            t.grad.zero_()
        return p, q, r

    torch.manual_seed(0)
    whole = [torch.randn(4, 6, dtype=torch.float64) for _ in range(3)]
    want = steps(*(t.clone().requires_grad_() for t in whole))
    for placement in ("S(0)", "S(1)"):
        got = steps(*(place(t, mesh_of((2,)), (placement,), EVEN).requires_grad_() for t in whole))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.detach().full_tensor(), w.detach())


@on_ranks(2)
def test_a_flattened_inner_shard_is_exchanged():
    """The cut moves from a dim that must be whole to another dim. This sends less than a gather."""
    from oracle import EVEN, mesh_of, place
    from shardtensor import _C

    whole = torch.randn(4, 6, 3)
    for f, placement in ((lambda t: t.flatten(), "S(1)"), (lambda t: t.flatten(0, 1), "S(1)"), (lambda t: t.flatten(1), "S(2)")):
        x = place(whole, mesh_of((2,)), (placement,), EVEN)
        _C.reset_comm_counts()
        y = f(x)
        assert set(_C.comm_counts()) == {"all_to_all"}, (placement, _C.comm_counts())
        assert torch.equal(y.full_tensor(), f(whole))


@on_ranks(2)
def test_reshapes_of_strided_pieces():
    """The tensor is contiguous, but not all of its pieces are: one rank can view its piece, another must copy it."""
    import torch.distributed as dist
    from oracle import mesh_of
    from shardtensor import DTensor, Shard

    whole = torch.arange(24.0).view(4, 3, 2)
    mine = whole.chunk(2)[dist.get_rank()]
    if dist.get_rank() == 1:
        mine = mine.transpose(0, 2).contiguous().transpose(0, 2)
        assert not mine.is_contiguous()
    x = DTensor.from_local(mine, mesh_of((2,)), [Shard(0)], shape=whole.shape, stride=whole.stride())
    for f in (
        lambda t: t.view(24),
        lambda t: t.view(4, 6),
        lambda t: t.flatten(0, 1),
        lambda t: t.reshape(2, 12),
        lambda t: torch.ops.aten._unsafe_view(t, [12, 2]),
        lambda t: torch.ops.aten._reshape_alias(t, [12, 2], [2, 1]),
        lambda t: torch.view_copy(t, (24,)),
    ):
        torch.testing.assert_close(f(x).full_tensor(), f(whole))
        assert f(x).stride() == f(whole).stride()


@on_ranks(2)
def test_views_lie_where_torch_puts_them():
    """Strides and offsets are those of the same views of a plain tensor: autograd relies on them."""
    from oracle import UNEVEN, mesh_of, place

    whole = torch.randn(6, 4, 3, dtype=torch.float64)
    for placement in ("R", "S(0)", "P"):
        x = place(whole, mesh_of((2,)), (placement,), UNEVEN)
        for f in (
            lambda t: t[1:5:2],
            lambda t: t[:, 1:],
            lambda t: t.transpose(0, 2)[1:],
            lambda t: t.permute(1, 0, 2)[:, 2:, 1:],
            lambda t: t.split(4)[1],
            lambda t: t.view(6, 2, 2, 3)[2:],
            lambda t: t.unsqueeze(1).expand(6, 5, 4, 3)[1:],
            lambda t: t.detach()[2:].detach(),
            lambda t: t[2:].squeeze(),
            lambda t: t.diagonal(0, 2, 1)[1:],
            lambda t: t.diagonal(1),
            lambda t: t.unbind(1)[2],
            lambda t: t[None],
            lambda t: t[:, None],
            lambda t: t[..., None],
            lambda t: t[None, 1:3, :, None, 1:],
            lambda t: t.transpose(0, 2)[None],
            lambda t: t.transpose(0, 2).unsqueeze(2),
            lambda t: t[:1].expand(4, 4, 3).unsqueeze(1),
            lambda t: t[:0].unsqueeze(1),
            lambda t: t[:0, :1].transpose(0, 2).exp(),
            lambda t: t[:1, :, :1].transpose(0, 1).exp(),
        ):
            got, want = f(x), f(whole)
            assert (got.stride(), got.storage_offset()) == (want.stride(), want.storage_offset()), (placement, got.shape)


@on_ranks(2)
def test_copies_with_a_source_lie_as_torchs():
    """A source written into a copy of self: torch copies the memory, with its gaps, and with elements that share memory."""
    from oracle import UNEVEN, mesh_of, place

    whole = torch.randn(4, 6, 8, dtype=torch.float64)
    forms = {
        "transposed": lambda t: t.transpose(0, 1),
        "sliced": lambda t: t[:, ::2],
        "sliced and permuted": lambda t: t[1:, :, 2:].permute(2, 0, 1),
        "column": lambda t: t[:, :1].transpose(0, 2),
        "row": lambda t: t[1:2].transpose(0, 2),
        "expanded": lambda t: t[:1].expand(3, 6, 8),
        "expanded and permuted": lambda t: t[:1].expand(3, 6, 8).permute(2, 0, 1),
        "windows": lambda t: t[0, :4].unfold(1, 3, 1),
        "windows of rows": lambda t: t[:, 0].unfold(0, 3, 1),
        "windows further apart": lambda t: t[..., 0].unfold(1, 3, 2),
        "turned windows": lambda t: t[1].unfold(1, 4, 3).transpose(0, 1),
        "none": lambda t: t[:0, ::2],
    }

    def new(t, *sizes):
        return t.new_full(sizes, -1.0)

    ops = {
        "select": lambda t: torch.select_scatter(t, new(t, *t.shape[:1], *t.shape[2:]), 1, -1),
        "select 0": lambda t: torch.select_scatter(t, new(t, *t.shape[1:]), 0, 0) if len(t) else t,
        "slice": lambda t: torch.slice_scatter(t, new(t, *t.shape[:2], 2), 2, 1, 3) if t.shape[2] > 2 else t,
        "diagonal": lambda t: torch.diagonal_scatter(t, new(t, *t.diagonal().shape)),
        "diagonal 1": lambda t: torch.diagonal_scatter(t, new(t, *t.diagonal(1, 1, 2).shape), 1, 1, 2),
        "as_strided": lambda t: torch.as_strided_scatter(t, new(t, 2), (2,), (3,), t.storage_offset() + 1) if len(t) else t,
        "as_strided, here": lambda t: torch.as_strided_scatter(t, new(t, 1, 2), (1, 2), (1, 1)) if len(t) else t,
        "cat": lambda t: torch.cat((t, t), 1),
        "stack": lambda t: torch.stack((t, t)),
        "add": lambda t: t + 1,
        "clone": lambda t: t.clone(),
    }
    for placement in ("R", "S(0)", "S(1)", "S(2)", "P"):
        x = place(whole, mesh_of((2,)), (placement,), UNEVEN)
        for (form, f), (name, op) in itertools.product(forms.items(), ops.items()):
            got, want = op(f(x)), op(f(whole))
            what = f"{name} of {form} {placement}"
            assert got.stride() == want.stride() or want.numel() == 0, f"{what}: {got.stride()}, not {want.stride()}"
            torch.testing.assert_close(got.full_tensor(), want, msg=lambda m, what=what: f"{what}: {m}")
            torch.testing.assert_close(x.full_tensor(), whole)


LAZY = {
    "conj": lambda x: x.conj(),
    "conj of conj": lambda x: x.conj().conj(),
    "adjoint": lambda x: x.mH,
    "real": lambda x: x.conj().real,
    "imag": lambda x: x.conj().imag,
    "row": lambda x: x.conj()[1],
    "rows": lambda x: x[:2].conj(),
    "column of imag": lambda x: x.conj().imag[:, -1],
    "flat": lambda x: x.conj().view(-1),
    "resolved": lambda x: (x.conj().resolve_conj(), x.conj().imag.resolve_neg()),
    "clone": lambda x: (x.conj().clone(), x.conj() + 1, x.conj().imag * 2, torch.zeros_like(x.conj())),
    "matmul": lambda x: (x.conj() @ x.mT, x.mH @ x, torch.einsum("ij,ij->i", x.conj(), x)),
    "cat": lambda x: torch.cat([x.conj(), x]),
    "sum": lambda x: (x.conj().sum(0), x.conj().imag.sum(1)),
}


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@on_ranks(of=lambda mesh: mesh[0])
def test_lazy_conjugates_and_negatives(mesh):
    """Lazy conjugates and negatives are what plain torch says, views of what they view, on ranks with empty pieces too."""
    shape = mesh[1]
    import shardtensor as st

    whole = torch.randn(3, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    mesh, sharded = mesh_of(shape), ["S(0)", "S(1)"]
    for placements in itertools.product(["R", *sharded], repeat=len(shape)):
        for cut in ("even", "uneven", "empty"):
            if len(set(placements) & set(sharded)) < sum(p in sharded for p in placements):
                continue
            for name, f in LAZY.items():
                if name == "flat" and "S(1)" in placements:
                    continue  # a copy, which moves
                x, p = place(whole, mesh, placements, cut), whole.clone()
                got, want = pytree.tree_leaves(f(x)), pytree.tree_leaves(f(p))
                what = f"{name} {placements} {cut}"
                for a, b in zip(got, want, strict=True):
                    assert (a.is_conj(), a.is_neg(), a.stride()) == (b.is_conj(), b.is_neg(), b.stride()), what
                    torch.testing.assert_close(a.full_tensor(), b.resolve_conj().resolve_neg(), msg=lambda m, what=what: f"{what}: {m}")
                if len(want) == 1 and want[0]._is_view():
                    got[0].mul_(3).add_(1)
                    want[0].mul_(3).add_(1)
                    torch.testing.assert_close(x.full_tensor(), p, msg=lambda m, what=what: f"{what}, written: {m}")
                x, p = place(whole, mesh, placements, cut).requires_grad_(), whole.clone().requires_grad_()
                sum(t.abs().square().sum() for t in pytree.tree_leaves(f(x))).backward()
                sum(t.abs().square().sum() for t in pytree.tree_leaves(f(p))).backward()
                torch.testing.assert_close(x.grad.full_tensor(), p.grad, msg=lambda m, what=what: f"{what}, gradient: {m}")
            x = place(whole, mesh, placements, cut)
            with pytest.raises(RuntimeError, match="unresolved conjugated"):
                torch.view_as_real(x.conj())
    mine = whole.conj() if mesh.get_rank() == 0 else whole
    assert not st.ShardTensor.from_local(mine, mesh_here(), [st.Shard(0)]).is_conj()  # only this rank's is


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)
