from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from oracle import MESHES, bools, case, compare, mesh_id, mesh_of, place, run_on
from pool import on_ranks
from shardtensor import _C, Replicate, Shard
from shardtensor.tensor._layout import make_layout
from torch.nn.attention import SDPBackend, sdpa_kernel

sdpa = F.scaled_dot_product_attention


def alike(*dims: int):
    """Quiet where query, key and value are sharded alike, on these dims only, and masks are replicated."""
    allowed = {"R", *(f"S({d})" for d in dims)}
    return lambda q, k, v, *mask: q == k == v and set(q.split()) <= allowed and all(set(m.split()) == {"R"} for m in mask)


def math(q, k, v, **how):
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, **how)


def masked(q, k, v, mask):
    return sdpa(q, k, v, attn_mask=mask.detach())


def with_true(*sizes: int):
    def make(g):
        mask = bools(*sizes)(g)
        mask[..., 0] = True  # no row without a key
        return mask

    return make


def multi_head(x, w_in, b_in, w_out, b_out):
    return F.multi_head_attention_forward(
        x, x, x, 4, 2, w_in, b_in, None, None, False, 0.0, w_out, b_out, need_weights=False
    )[0]


QKV = ((3, 4, 5, 2), (3, 4, 3, 2), (3, 4, 3, 2))
CASES = [
    case("sdpa", sdpa, *QKV, quiet=alike(0, 1), cut_alike=True),
    case("sdpa_heads", sdpa, *QKV, quiet=alike(0, 1), cut_alike=True, only=("R", "S(0)", "S(1)")),
    case("sdpa_query", sdpa, *QKV, quiet=lambda q, k, v: set(q.split()) <= {"R", "S(2)"} and set((k + v).split()) <= {"R"}, only=("R", "S(2)")),
    case("sdpa_causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), (2, 3, 4, 2), (2, 3, 4, 2), (2, 3, 4, 2)),
    case("sdpa_causal_short", lambda q, k, v: sdpa(q, k, v, is_causal=True), (2, 3, 2, 2), (2, 3, 5, 2), (2, 3, 5, 2), limit=30),
    case("sdpa_scale", lambda q, k, v: sdpa(q, k, v, scale=0.3), *QKV, limit=30),
    case("sdpa_mask", masked, *QKV, (3, 4, 5, 3)),
    case("sdpa_mask_heads", masked, *QKV, (3, 1, 5, 3), quiet=alike(1), cut_alike=True, only=("R", "S(0)", "S(1)")),
    case("sdpa_mask_2d", masked, *QKV, (5, 3), quiet=alike(0, 1), cut_alike=True, only=("R", "S(0)", "S(1)")),
    case("sdpa_mask_bool", masked, *QKV, with_true(5, 3)),
    case("sdpa_gqa", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), (2, 6, 4, 2), (2, 3, 4, 2), (2, 3, 4, 2)),
    case("sdpa_gqa_even", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), (2, 8, 4, 2), (2, 4, 4, 2), (2, 4, 4, 2), only=("R", "S(1)")),
    case("sdpa_math", math, *QKV),
    case("sdpa_3d", sdpa, (4, 5, 2), (4, 3, 2), (4, 3, 2)),
    case("sdpa_3d_causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), (4, 3, 2), (4, 5, 2), (4, 5, 2)),
    case("sdpa_math_causal", lambda q, k, v: math(q, k, v, is_causal=True), (3, 4, 3, 2), (3, 4, 3, 2), (3, 4, 3, 2)),
    case("sdpa_broadcast_causal", lambda q, k, v: sdpa(q, k, v, is_causal=True), (4, 3, 2), (2, 4, 5, 2), (2, 4, 5, 2)),
    case("sdpa_no_queries", sdpa, (3, 4, 0, 2), (3, 4, 3, 2), (3, 4, 3, 2)),
    case("sdpa_no_keys", sdpa, (3, 4, 5, 2), (3, 4, 0, 2), (3, 4, 0, 2)),
    case("sdpa_no_batch", lambda q, k, v: sdpa(q, k, v, is_causal=True), (0, 4, 5, 2), (0, 4, 3, 2), (0, 4, 3, 2)),
    case("sdpa_no_keys_mask_bool", masked, (3, 4, 5, 2), (3, 4, 0, 2), (3, 4, 0, 2), bools(5, 0)),
    case("multi_head", multi_head, (3, 2, 4), (12, 4), (12,), (4, 4), (4,)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


@on_ranks(4)
def test_cut_twice(draws=60):
    """Any dims may be cut along both mesh dims, by sizes that follow no rule."""
    mesh, draw = mesh_of((2, 2)), random.Random("cut twice")

    def halves(n):
        first = draw.randint(0, n)
        return [first, n - first]

    def placed(t, like=None):
        dims = [draw.choice((2, 2, 1, 0, 3, None)) for _ in range(2)]
        cuts = [None if d is None else halves(t.shape[d]) for d in dims]
        if cuts[0] and dims[0] == dims[1]:
            cuts[1] = [n for half in cuts[0] for n in halves(half)]
        layout = make_layout(mesh, [Replicate() if d is None else Shard(d) for d in dims], t.ndim, cuts, who="test") if like is None else like
        piece = t.detach()
        for d in range(t.ndim):
            ((start, length),) = layout.intervals(d, t.shape[d])
            piece = piece.narrow(d, start, length)
        return _C.wrap(piece.clone(memory_format=torch.contiguous_format), layout, list(t.shape), list(t.stride()))

    for _ in range(draws):
        queries, keys = draw.choice(((9, 9), (9, 7), (12, 12), (2, 9)))
        plain = [torch.randn(2, 3, n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (queries, keys, keys)]
        q, k = placed(plain[0]), placed(plain[1])
        v = placed(plain[2], k._layout if draw.random() < 0.6 else None)
        ours, plain = [t.requires_grad_() for t in (q, k, v)], [t.requires_grad_() for t in plain]
        for causal in (False, True):
            out, want = (F.scaled_dot_product_attention(*t, is_causal=causal) for t in (ours, plain))
            grad = torch.ones_like(want).cumsum(-1)
            got = torch.autograd.grad(out, ours, place(grad, mesh, ("S(0)", "R"), "even"))
            what = f"causal {causal}: {[str(t._layout) for t in ours]} of {queries} and {keys}"
            compare([out, *got], [want, *torch.autograd.grad(want, plain, grad)], 1e-9, what)
