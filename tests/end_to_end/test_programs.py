"""Some random programs, the same at every run: eager (on three ranks in checking mode) and compiled. programs.py runs more."""

from __future__ import annotations

import programs
import pytest
from oracle import mesh_id

COUNT, STEPS = 12, 20
COMPILED = 8


@pytest.mark.parametrize("mesh", [(3, (3,)), (4, (2, 2))], ids=mesh_id)
@pytest.mark.parametrize(("dtype", "grad"), [("float64", False), ("float64", True), ("float32", True), ("int64", False)])
def test_programs(pools, mesh, dtype, grad):
    world, shape = mesh
    outcomes = pools(world).run(programs.run_programs, 0, COUNT, STEPS, shape, grad, dtype, check=world == 3)
    assert all(o == outcomes[0] for o in outcomes)
    assert outcomes[0]["right"] > 0.6 * outcomes[0].total() > 60, outcomes[0]


@pytest.mark.parametrize("grad", [False, True])
def test_compiled(pools, grad):
    """Each program as one graph."""
    outcomes = pools(3).run(programs.run_programs, 0, COMPILED, 10, (3,), grad, "float64", "aot_eager")
    assert all(o == outcomes[0] for o in outcomes)
    assert outcomes[0]["compiled"] > 0.5 * COMPILED, outcomes[0]
