from __future__ import annotations

import pytest
import torch.nn.functional as F
from oracle import MESHES, case, mesh_id, run_on

CASES = [
    case("pad", lambda x: F.pad(x, (1, 2, 0, 3)), (5, 4), quiet=lambda p: True),
    case("pad_value", lambda x: F.pad(x, (0, 0, 2, 1), value=1.5), (5, 4), quiet=lambda p: "P" not in p),
    case("pad_negative", lambda x: F.pad(x, (-1, -1, -2, 0)), (5, 4), quiet=lambda p: True),
    case("pad_mixed", lambda x: F.pad(x, (-1, 1)), (5, 4), quiet=lambda p: "S(1)" not in p),
    case("pad_reflect", lambda x: F.pad(x, (1, 2), mode="reflect"), (2, 3, 4), quiet=lambda p: "S(2)" not in p),
    case("pad_replicate", lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"), (1, 3, 3, 2)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)
