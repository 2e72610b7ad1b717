"""torch's op database, with gradients in other layouts than the results: each op, each placement of each argument, each of the
gradient, arguments that are whole tensors, slices or transposes. Values and gradients are compared with plain torch's.

A new op of the database is in it without a line here. A run of all tests (SHARDTENSOR_TEST_ALL=1) tries all calls; other runs try some.
"""

from __future__ import annotations

import opinfo
import pytest
from oracle import TRIES_ALL, mesh_id, share

# Ranks, the mesh's shape; every so many-th op, and of its calls every so many-th. At most MOST calls of an op's sample are drawn.
MESHES = [(2, (2,), 1, 150), (4, (2, 2), 4, 400)]
MOST = 400
PARTS = 16 if TRIES_ALL else 1
_WRITES_A_VIEW = "torch's formula writes through a view that has to move data, which raises"
EXCEPT = {
    "as_strided_scatter": _WRITES_A_VIEW,
    "linalg.qr": f"{_WRITES_A_VIEW} if rows and columns are both cut",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "torch's kernel is wrong for a transposed query",
}
NAMES = [name for name in opinfo.database() if name not in EXCEPT]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("world", "shape", "ops", "calls"), MESHES, ids=[mesh_id(m) for m in MESHES])
def test_gradients_of_any_layout(pools, world, shape, ops, calls, part):
    names = share(NAMES, ops)[part::PARTS]
    right, wrong = pools(world).run(opinfo.run_gradient_layouts, names, shape, calls, MOST, seconds=3000 if TRIES_ALL else 110)[0]
    assert not wrong, "\n".join(wrong)
    assert right > len(names) // 2


def test_lists_name_ops_that_exist():
    assert not set(EXCEPT) - set(opinfo.database())
