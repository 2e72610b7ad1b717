from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import MESHES, case, mesh_here, mesh_id, place, positive, run_on
from pool import on_ranks
from test_matmul import batch_sharded, second


def batch_norm(x, w, b, m, v):
    """The result and the new running statistics."""
    m, v = m.detach().clone(), v.detach().clone()
    out = F.batch_norm(x, m, v, w, b, training=True, momentum=0.3)
    return out, m, v


def module_batch_norm(x):
    norm = torch.nn.BatchNorm2d(4, dtype=x.dtype)
    return F.batch_norm(x, None, None, None, None, True, 0.1, norm.eps)


CASES = [
    case("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), (3, 5, 4), (4,), (4,), quiet=batch_sharded(0, 1)),
    case("layer_norm_two", lambda x, w, b: F.layer_norm(x, (5, 4), w, b), (3, 5, 4), (5, 4), (5, 4), quiet=batch_sharded(0)),
    case("layer_norm_bare", lambda x: F.layer_norm(x, (4,)), (3, 5, 4), quiet=batch_sharded(0, 1)),
    case("layer_norm_all", lambda x: F.layer_norm(x, (5, 4)), (5, 4)),
    case("layer_norm_weight", lambda x, w: F.layer_norm(x, (4,), w), (5, 4), (4,)),
    case("layer_norm_second", lambda x, w, b: second(lambda *a: F.layer_norm(a[0], (4,), *a[1:]), x, w, b), (5, 4), (4,), (4,)),
    case("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), (3, 5, 4), (4,), quiet=batch_sharded(0, 1)),
    case("rms_norm_two", lambda x, w: F.rms_norm(x, (5, 4), w, eps=1e-3), (3, 5, 4), (5, 4), quiet=batch_sharded(0)),
    case("rms_norm_bare", lambda x: F.rms_norm(x, (4,)), (3, 5, 4), quiet=batch_sharded(0, 1)),
    case("rms_norm_second", lambda x, w: second(lambda a, b: F.rms_norm(a, (4,), b), x, w), (5, 4), (4,)),
    case("group_norm", lambda x, w, b: F.group_norm(x, 3, w, b), (3, 6, 4), (6,), (6,), quiet=batch_sharded(0)),
    case("group_norm_2d", lambda x, w, b: F.group_norm(x, 2, w, b), (2, 4, 3, 2), (4,), (4,), quiet=batch_sharded(0)),
    case("group_norm_bare", lambda x: F.group_norm(x, 3), (2, 6, 4), quiet=batch_sharded(0)),
    case("group_norm_flat", lambda x, w, b: F.group_norm(x, 2, w, b), (3, 4), (4,), (4,)),
    case("batch_norm_training", batch_norm, (5, 4, 3), (4,), (4,), (4,), positive(4)),
    case("batch_norm_2d", batch_norm, (4, 3, 3, 2), (3,), (3,), (3,), positive(3)),
    case("batch_norm_flat", batch_norm, (5, 4), (4,), (4,), (4,), positive(4)),
    case("batch_norm_no_stats", module_batch_norm, (3, 4, 2, 2)),
    case(
        "batch_norm_eval", lambda x, w, b, m, v: F.batch_norm(x, m.detach(), v.detach(), w, b), (5, 4, 3), (4,), (4,), (4,), positive(4),
        quiet=batch_sharded(0, 2),
    ),
    case(
        "batch_norm_channels", batch_norm, (5, 4, 3), (4,), (4,), (4,), positive(4), only=("R", "S(1)"), replicated=(1, 2, 3, 4),
    ),
    case("batch_norm_second", lambda x, w, b: second(lambda *a: F.batch_norm(a[0], None, None, *a[1:], True), x, w, b), (4, 3), (3,), (3,)),
    case(
        "with_update", lambda x, w, b, m, v: torch.ops.aten._batch_norm_with_update(
            x, w, b, m.detach().clone(), v.detach().clone(), 0.1, 1e-5)[:3],
        (5, 4, 3), (4,), (4,), (4,), positive(4), backward=False,
    ),
    case("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (3, 4, 5), (4,), (4,)),
    case("local_response_norm", lambda x: F.local_response_norm(x, 2), (3, 4, 5), limit=30),
    case("normalize", lambda x: F.normalize(x, dim=1), (5, 4)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


@on_ranks(2)
def test_order_of_batch_norm():
    """As torch's kernel: contiguous, unless the input is channels_last."""
    x = torch.randn(4, 6, 8, 5, generator=torch.Generator().manual_seed(1))
    forms = (lambda t: t, lambda t: t.contiguous(memory_format=torch.channels_last), lambda t: t.transpose(1, 2), lambda t: t[:, ::2])
    for form in forms:
        want = F.batch_norm(form(x), None, None, training=True)
        for at in ("R", "S(0)", "S(2)", "S(3)"):
            got = F.batch_norm(form(place(x, mesh_here(), (at,), "even")), None, None, training=True)
            assert got.stride() == want.stride(), at
            torch.testing.assert_close(got.full_tensor(), want)
