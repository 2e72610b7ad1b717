from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from oracle import MESHES, case, mesh_id, mesh_of, place, run_on
from shardtensor import _C, Partial, Replicate, Shard


def column_parallel(x: str, weight: str, bias: str = "") -> bool:
    """x whole, the weight's (and bias's) outputs sharded."""
    return x in ("R", "R R") and set(weight.split()) <= {"R", "S(0)"} and bias in ("", weight)


def batch_sharded(*dims: int):
    """The first operand sharded on these batch dims, the others whole."""
    allowed = {"R", *(f"S({d})" for d in dims)}
    return lambda x, *others: set(x.split()) <= allowed and all(set(o.split()) == {"R"} for o in others)


def contracted(first: int, second: int):
    """Both sharded on the contracted dim, alike on every mesh dim."""
    return lambda x, y, *_: set(zip(x.split(), y.split(), strict=False)) <= {(f"S({first})", f"S({second})"), ("R", "R")}


def second(function, *inputs):
    """The gradient of a gradient: what autograd makes of the backward ops."""
    out = function(*inputs)
    grads = torch.autograd.grad(out, inputs, (out.detach() * 0 + 1) * out.sin(), create_graph=True)
    return [g.cos() for g in grads]


CASES = [
    case("mm", torch.mm, (5, 4), (4, 3), quiet=lambda a, b: "S" not in b and b.count("P") == 0 and set(a.split()) <= {"R", "S(0)"}),
    case("mm_t", lambda a, b: a @ b.t(), (5, 4), (3, 4)),
    case("mm_out", lambda a, b, o: torch.mm(a, b, out=o.clone()), (5, 4), (4, 3), (5, 3), backward=False),
    case("bmm", torch.bmm, (3, 5, 4), (3, 4, 2)),
    case("bmm_out", lambda a, b, o: torch.bmm(a, b, out=o.clone()), (3, 5, 4), (3, 4, 2), (3, 5, 2), backward=False),
    case("mv", torch.mv, (5, 4), (4,)),
    case("dot", torch.dot, (5,), (5,)),
    case("vdot", torch.vdot, (5,), (5,)),
    case("outer", torch.outer, (5,), (4,)),
    case("addmm", torch.addmm, (5, 3), (5, 4), (4, 3)),
    case("addmm_row", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (3,), (5, 4), (4, 3)),
    case("addmm_column", torch.addmm, (5, 1), (5, 4), (4, 3)),
    case("addmm_", lambda c, a, b: c.clone().addmm_(a, b, beta=0.5), (5, 3), (5, 4), (4, 3)),
    case("addmm_out", lambda c, a, b, o: torch.addmm(c, a, b, out=o.clone()), (3,), (5, 4), (4, 3), (5, 3), backward=False),
    case("addmm_activation", torch._addmm_activation, (3,), (5, 4), (4, 3), backward=False),
    case("baddbmm", lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5), (3, 5, 2), (3, 5, 4), (3, 4, 2)),
    case("baddbmm_row", torch.baddbmm, (1, 2), (3, 5, 4), (3, 4, 2)),
    case("baddbmm_", lambda c, a, b: c.clone().baddbmm_(a, b), (3, 5, 2), (3, 5, 4), (3, 4, 2)),
    case("addbmm", torch.addbmm, (5, 2), (3, 5, 4), (3, 4, 2)),
    case("addmv", lambda c, a, b: torch.addmv(c, a, b, beta=0.5), (5,), (5, 4), (4,)),
    case("addmv_number", torch.addmv, (), (5, 4), (4,)),
    case("addr", lambda c, a, b: torch.addr(c, a, b, beta=0.5), (5, 4), (5,), (4,)),
    case("matmul_1_1", torch.matmul, (5,), (5,)),
    case("matmul_1_2", torch.matmul, (5,), (5, 4)),
    case("matmul_2_1", torch.matmul, (5, 4), (4,)),
    case("matmul_2_2", torch.matmul, (5, 4), (4, 3), quiet=contracted(1, 0), cut_alike=True),
    case("matmul_3_1", torch.matmul, (3, 5, 4), (4,), quiet=batch_sharded(0, 1)),
    case("matmul_1_3", torch.matmul, (4,), (3, 4, 5)),
    case("matmul_3_2", torch.matmul, (3, 5, 4), (4, 2), quiet=batch_sharded(0, 1)),
    case("matmul_2_3", torch.matmul, (5, 4), (3, 4, 2)),
    case("matmul_4_4", torch.matmul, (2, 3, 3, 4), (2, 3, 4, 2)),
    case("matmul_broadcast", torch.matmul, (3, 1, 3, 4), (2, 4, 2)),
    case("matmul_one", torch.matmul, (1, 5, 4), (3, 4, 1)),
    case("matmul_out", lambda a, b, o: torch.matmul(a, b, out=o.clone()), (3, 5, 4), (4, 2), (3, 5, 2), backward=False),
    case("linear_1", F.linear, (4,), (3, 4), (3,), quiet=column_parallel, cut_alike=True),
    case("linear_2", F.linear, (5, 4), (3, 4), (3,), quiet=lambda *p: column_parallel(*p) or batch_sharded(0)(*p), cut_alike=True),
    case("linear_3", F.linear, (3, 5, 4), (3, 4), (3,), quiet=lambda *p: column_parallel(*p) or batch_sharded(0, 1)(*p), cut_alike=True),
    case("linear_4", F.linear, (2, 3, 2, 4), (3, 4), (3,), quiet=batch_sharded(0, 1, 2)),
    case("linear_no_bias", F.linear, (3, 5, 4), (3, 4), quiet=lambda *p: contracted(2, 1)(*p) or batch_sharded(0, 1)(*p), cut_alike=True),
    case("linear_row_parallel", F.linear, (3, 5, 4), (3, 4), (3,), replicated=(2,), quiet=contracted(2, 1), cut_alike=True),
    case("linear_vector", F.linear, (5, 4), (4,)),
    case("linear_odd_bias", F.linear, (5, 4), (3, 4), (1,)),
    case("einsum_attention", lambda q, k: torch.einsum("bhsd,bhtd->bhst", q, k), (2, 3, 2, 4), (2, 3, 3, 4)),
    case("einsum_inner_batch", lambda x, w: torch.einsum("bixy,ioxy->boxy", x, w), (2, 3, 2, 5), (3, 2, 2, 5), cut_alike=True,
         quiet=lambda x, w: (x, w) in {(f"S({a})", p) for a in (2, 3) for p in ("R", f"S({a})")}),
    case("einsum_inner_heads", lambda q, k: torch.einsum("bshd,bthd->bhst", q, k), (2, 3, 4, 2), (2, 5, 4, 2), cut_alike=True,
         quiet=lambda q, k: q == k == "S(2)"),
    case("einsum_inner_rows", lambda x, w: torch.einsum("bhwc,cd->bhwd", x, w), (2, 3, 4, 3), (3, 2), quiet=batch_sharded(0, 1, 2)),
    case("einsum_inner_columns", lambda x, w: torch.einsum("bc,ckl", x, w), (2, 3), (3, 2, 4), quiet=lambda x, w: (x, w) == ("R", "S(2)")),
    case("einsum_inner_sum", lambda x, y: torch.einsum("zij,zkji->zk", x, y), (2, 3, 4), (2, 2, 4, 3), cut_alike=True,
         quiet=lambda x, y: (x, y) in {("S(1)", "S(3)"), ("S(2)", "S(2)")}),
    case("einsum_inner_lonely", lambda x, y: torch.einsum("xyap,xyqb->byxaq", x, y), (2, 3, 2, 2), (2, 3, 2, 3), limit=20),
    case("einsum_weight", lambda x, w: torch.einsum("bsd,dhe->bshe", x, w), (2, 3, 4), (4, 3, 2)),
    case("einsum_three", lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), (3, 4), (4, 3), (3, 2)),
    case("einsum_diagonal", lambda a: torch.einsum("ii->i", a), (4, 4)),
    case("einsum_sum", lambda a, b: torch.einsum("ijk,jk->i", a, b), (3, 4, 2), (4, 2)),
    case("einsum_dots", lambda a, b: torch.einsum("...ij,...jk->...ik", a, b), (2, 3, 4), (2, 4, 2)),
    case("kron", torch.kron, (3, 2), (2, 3)),
    case("tensordot", lambda a, b: torch.tensordot(a, b, dims=([1, 2], [0, 1])), (3, 4, 2), (4, 2, 3)),
    case("chain_matmul", lambda a, b, c: torch.linalg.multi_dot([a, b, c]), (5, 4), (4, 3), (3, 2)),
    case("inner", torch.inner, (5, 4), (3, 4)),
    case("bilinear", F.bilinear, (5, 3), (5, 2), (4, 3, 2), (4,)),
    case("cdist", torch.cdist, (5, 3), (4, 3), limit=20),
    case("inverse", lambda a: torch.linalg.inv(a @ a.t()), (4, 4), tolerance=1e-6, limit=20),
    case("second_mm", lambda a, b: second(torch.mm, a, b), (3, 4), (4, 2)),
    case("second_matmul", lambda a, b: second(torch.matmul, a, b), (2, 3, 4), (4, 2)),
    case("second_matmul_broadcast", lambda a, b: second(torch.matmul, a, b), (2, 1, 3, 4), (3, 4, 2), limit=30),
    case("second_matmul_vector", lambda a, b: second(torch.matmul, a, b), (3, 2, 4), (4,), limit=30),
    case("second_linear", lambda x, w, b: second(F.linear, x, w, b), (5, 4), (3, 4), (3,)),
    case("second_linear_3", lambda x, w, b: second(F.linear, x, w, b), (2, 3, 4), (3, 4), (3,)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


# ---- what the cases above cannot check: layouts, what is saved, modes ----


def placed(text: str, *sizes: int, seed: int = 0, cut: str = "uneven"):
    whole = torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return whole, place(whole, mesh_of((2,)), (text,), cut)


def layouts_of_linear() -> None:
    # (x, weight, bias) -> (out, grad x, grad weight, grad bias) for x [b, s, d]; nothing is sent, except backward for x = "P"
    expected = {
        ("S(0)", "R", "R"): (Shard(0), Shard(0), Partial(), Partial()),
        ("S(1)", "R", "R"): (Shard(1), Shard(1), Partial(), Partial()),
        ("R", "S(0)", "S(0)"): (Shard(2), Partial(), Shard(0), Shard(0)),
        ("S(2)", "S(1)", "R"): (Partial(), Shard(2), Shard(1), Replicate()),
        ("P", "R", "R"): (Partial(), Replicate(), Replicate(), Replicate()),
    }
    for (x_at, w_at, b_at), want in expected.items():
        x = placed(x_at, 3, 4, 6)[1].requires_grad_()
        w = placed(w_at, 5, 6)[1].requires_grad_()
        b = placed(b_at, 5)[1].requires_grad_()
        _C.reset_comm_counts()
        out = F.linear(x, w, b)
        quiet_in_backward = x_at != "P"  # the weight's gradient needs x added up
        grads = torch.autograd.grad(out, (x, w, b), torch.ones_like(out.detach()).redistribute(placements=[
            out.placements[0] if out.placements[0].is_shard() else Replicate()]))
        assert not quiet_in_backward or not _C.comm_counts(), (x_at, w_at, _C.comm_counts())
        got = tuple(t.placements[0] for t in (out, *grads))
        if quiet_in_backward:
            assert got == want, (x_at, w_at, got)
        else:
            assert got[0] == want[0]


def gradients_wanted_of_linear() -> None:
    for wants in itertools.product((False, True), repeat=3):
        plain, ours = zip(*(placed(at, *s) for at, s in (("S(0)", (3, 2, 4)), ("R", (5, 4)), ("R", (5,)))), strict=True)
        for p, o, want in zip(plain, ours, wants, strict=True):
            p.requires_grad_(want)
            o.requires_grad_(want)
        a, b = F.linear(*plain), F.linear(*ours)
        assert a.requires_grad == b.requires_grad
        if not any(wants):
            continue
        (a * a).sum().backward()
        (b * b).sum().backward()
        for p, o in zip(plain, ours, strict=True):
            assert (p.grad is None) == (o.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(o.grad.full_tensor(), p.grad)


def a_frozen_weight_saves_no_input() -> None:
    saved = []
    x, w = placed("S(0)", 3, 4)[1].requires_grad_(), placed("R", 5, 4)[1]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(tuple(t.shape)), t)[1], lambda t: t):
        F.linear(x, w)
        torch.matmul(x, w.t())
    assert saved == [(5, 4), (4, 5)], saved


def modes() -> None:
    x, ours = placed("S(1)", 3, 4, 6)
    w, our_w = placed("R", 5, 6, seed=1)
    b, our_b = placed("R", 5, seed=2)
    our_wt = our_w.t()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = F.linear(ours, our_w, our_b)
            assert not out.requires_grad
            torch.testing.assert_close(out.full_tensor(), F.linear(x, w, b))
            torch.testing.assert_close((ours @ our_wt).full_tensor(), x @ w.t())
    # autocast: the handler sees what autocast has cast
    leaves = [t.float().requires_grad_() for t in (x, w, b)]
    our_leaves = [t.float().requires_grad_() for t in (ours, our_w, our_b)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, got = F.linear(*leaves), F.linear(*our_leaves)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.full_tensor(), plain)
    plain.float().square().sum().backward()
    got.float().square().sum().backward()
    for p, o in zip(leaves, our_leaves, strict=True):
        torch.testing.assert_close(o.grad.full_tensor(), p.grad, rtol=2e-2, atol=2e-2)
    # a graph used twice frees what it saved
    out = F.linear(ours.clone().requires_grad_(), our_w.clone().requires_grad_()).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


@pytest.mark.parametrize("check", [layouts_of_linear, gradients_wanted_of_linear, a_frozen_weight_saves_no_input, modes])
def test_on_two_ranks(pools, check):
    pools(2).run(check)
