from __future__ import annotations

import pytest
import torch.nn.functional as F
from oracle import MESHES, case, mesh_id, run_on
from test_matmul import batch_sharded, second

CASES = [
    case("conv1d", F.conv1d, (3, 4, 6), (5, 4, 3), (5,), quiet=batch_sharded(0)),
    case("conv2d", lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), (3, 4, 5, 4), (3, 4, 3, 3), (3,), quiet=batch_sharded(0)),
    case("conv2d_no_bias", lambda x, w: F.conv2d(x, w, dilation=2), (3, 2, 5, 5), (3, 2, 2, 2), quiet=batch_sharded(0)),
    case("conv2d_groups", lambda x, w, b: F.conv2d(x, w, b, groups=2), (3, 4, 4, 4), (6, 2, 2, 2), (6,), quiet=batch_sharded(0)),
    case("conv2d_unbatched", F.conv2d, (4, 4, 4), (3, 4, 2, 2), (3,)),
    case("conv1d_without_channels", F.conv1d, (3, 0, 6), (2, 0, 3), limit=30),
    case("conv2d_without_channels", F.conv2d, (3, 0, 5, 4), (3, 0, 2, 2), (3,), limit=30),
    case("conv3d", F.conv3d, (3, 2, 3, 3, 3), (3, 2, 2, 2, 2), (3,), limit=30),
    case("conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), (3, 4, 3, 3), (4, 3, 2, 2), (3,), quiet=batch_sharded(0)),
    case("conv2d_second", lambda x, w: second(F.conv2d, x, w), (2, 2, 3, 3), (3, 2, 2, 2), limit=20),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)
