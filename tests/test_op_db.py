"""torch's own op database: every op in it, on samples of its own, with arguments cut and summed in ways drawn by a fixed seed.

Whatever an op does, all ranks do it: none may wait for another that has raised.
"""

from __future__ import annotations

import opinfo
import pytest
import torch

if torch.__version__ < "2.15":
    pytest.skip("the database is another one in an earlier torch", allow_module_level=True)

# What raises NotImplementedError, and why. Everything else is right.
UNSUPPORTED = {
    "resize_": "a ShardTensor's pieces cannot be given another memory in place",
    "resize_as_": "a ShardTensor's pieces cannot be given another memory in place",
    "sparse.mm.reduce": "its first argument is sparse",
    "sparse.sampled_addmm": "its first argument is sparse",
    "to_sparse": "its result is sparse",
}
OPS = opinfo.database()
WITHOUT_CPU = [name for name, op in OPS.items() if not op.supported_dtypes("cpu")]


def test_lists_name_ops_that_exist():
    assert not (set(UNSUPPORTED) | set(opinfo.NOT_COMPARABLE)) - set(OPS)
    assert len(WITHOUT_CPU) < 10


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", [name for name in OPS if name not in WITHOUT_CPU])
def test_equals_torch(pools, name, world):
    answers = pools(world).run("opinfo:run_op", name)
    right, unsupported = answers[0]
    assert [(r, len(u)) for r, u in answers] == [(right, len(unsupported))] * world, f"the ranks differ: {answers}"
    if name in UNSUPPORTED:
        assert unsupported and "ShardTensor" in unsupported[0]
    else:
        assert right and not unsupported, unsupported[:1]
