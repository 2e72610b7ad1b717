from __future__ import annotations

import pytest
import torch.nn.functional as F
from oracle import MESHES, case, mesh_id, positive, run_on
from test_matmul import batch_sharded


def alike_planes(x: str, samples: str) -> bool:
    """Both cut along batch or channels, on the same mesh dims."""
    return set(zip(x.split(), samples.split(), strict=True)) <= {("R", "R"), ("S(0)", "S(0)"), ("S(1)", "S(1)")}


CASES = [
    case("max_pool1d", lambda x: F.max_pool1d(x, 2), (3, 4, 5)),
    case("max_pool1d_no_grad", lambda x: F.max_pool1d(x, 2), (3, 4, 5), backward=False),
    case("max_pool2d", lambda x: F.max_pool2d(x, 2, 1, 1), (3, 4, 4, 4), quiet=batch_sharded(0, 1)),
    case("max_pool2d_indices", lambda x: F.max_pool2d(x, 2, return_indices=True), (3, 4, 4, 4)),
    case("max_pool2d_unbatched", lambda x: F.max_pool2d(x, 2), (3, 4, 4)),
    case("max_pool3d", lambda x: F.max_pool3d(x, 2), (3, 2, 3, 4, 4)),
    case("max_unpool2d", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (3, 4, 4, 4), limit=30),
    case("avg_pool1d", lambda x: F.avg_pool1d(x, 2), (3, 4, 5)),
    case("avg_pool2d", lambda x: F.avg_pool2d(x, 2, padding=1), (3, 4, 4, 4)),
    case("avg_pool3d", lambda x: F.avg_pool3d(x, 2), (3, 2, 3, 4, 4)),
    case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 2), (3, 4, 5)),
    case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), (3, 4, 5, 4), quiet=batch_sharded(0, 1)),
    case("adaptive_avg_pool2d_one", lambda x: F.adaptive_avg_pool2d(x, 1), (3, 4, 5, 4)),
    case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2), (3, 4, 5, 4), quiet=batch_sharded(0, 1)),
    case("fractional_max_pool2d", lambda x, r: F.fractional_max_pool2d(x, 2, 3, _random_samples=r.detach()), (3, 4, 5, 6), positive(3, 4, 2),
         quiet=alike_planes, cut_alike=True, partial=False),
    case("fractional_max_pool2d_one", lambda x, r: F.fractional_max_pool2d(x, 2, 3, _random_samples=r.detach()), (4, 5, 6), positive(1, 4, 2),
         partial=False),
    case("fractional_max_pool3d", lambda x, r: F.fractional_max_pool3d(x, 2, 2, _random_samples=r.detach()), (3, 4, 4, 4, 5), positive(3, 4, 3),
         quiet=alike_planes, cut_alike=True, partial=False),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)
