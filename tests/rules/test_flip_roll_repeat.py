from __future__ import annotations

import pytest
from oracle import MESHES, case, mesh_id, run_on

CASES = [
    case("repeat", lambda x: x.repeat(2, 1, 3), (5, 4), quiet=lambda p: "S(1)" not in p),
    case("tile", lambda x: x.tile(2), (3, 2), limit=30),
    case("flip", lambda x: x.flip(0), (5, 4), quiet=lambda p: "S(0)" not in p),
    case("flip_negative", lambda x: x.flip(-1, 0), (5, 4)),
    case("roll", lambda x: x.roll(2, 0), (5, 4), quiet=lambda p: "S(0)" not in p),
    case("roll_flat", lambda x: x.roll(3), (5, 4)),
    case("rot90", lambda x: x.rot90(1, (0, -1)), (3, 2, 4), quiet=lambda p: "S(0)" not in p and "S(2)" not in p),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)
