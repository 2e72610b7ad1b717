from __future__ import annotations

import pytest
import torch.nn.functional as F
from oracle import MESHES, case, mesh_id, run_on
from test_matmul import batch_sharded

CASES = [
    case("nearest", lambda x: F.interpolate(x, scale_factor=2), (3, 4, 2, 3), quiet=batch_sharded(0, 1)),
    case("bilinear", lambda x: F.interpolate(x, size=(4, 5), mode="bilinear"), (3, 4, 2, 3), quiet=batch_sharded(0, 1)),
    case("bicubic", lambda x: F.interpolate(x, size=(4, 5), mode="bicubic"), (3, 4, 2, 3), limit=30),
    case("bilinear_aa", lambda x: F.interpolate(x, size=(4, 5), mode="bilinear", antialias=True), (3, 4, 2, 3), limit=30),
    case("linear", lambda x: F.interpolate(x, size=5, mode="linear"), (3, 4, 3), quiet=batch_sharded(0, 1)),
    case("trilinear", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (3, 2, 2, 2, 2), limit=30),
    case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (3, 8, 3, 2), quiet=batch_sharded(0, 2, 3)),
    case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (3, 2, 6, 4), quiet=batch_sharded(0, 1)),
    case("pixel_unshuffle_empty", lambda x: F.pixel_unshuffle(x, 2), (3, 0, 6, 4), backward=False),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)
