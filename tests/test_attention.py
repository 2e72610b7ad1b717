from __future__ import annotations

import pytest
import torch.nn.functional as F
from oracle import MESHES, bools, case, mesh_id, run_on
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
