from __future__ import annotations

from typing import Any

import pytest
import shardtensor as st
import torch
from oracle import MESHES, case, ints, mesh_id, run_on


def uncut(*dims: int):
    """Quiet where the argument is not sharded along these dims."""
    return lambda p: not any(f"S({d})" in p for d in dims)


def strictly(f: Any) -> Any:
    """f in strict mode: an op without a rule raises instead of gathering."""

    def g(*tensors: torch.Tensor) -> Any:
        with st.strict_mode():
            return f(*tensors)

    return g


CASES = [
    case("cat", lambda x, y: torch.cat([x, y]), (5, 4), (3, 4)),
    case("cat_columns", lambda x, y: torch.cat([x, y], -1), (5, 4), (5, 2)),
    case("cat_alike", lambda x: torch.cat([x, x * 2], -1), (5, 4), quiet=uncut(1)),
    case("cat_three", lambda x, y, z: torch.cat([x, y, z]), (5, 2), (0, 2), (4, 2)),
    case("cat_legacy_empty", lambda x, e: torch.cat([e, x, e]), (5, 4), (0,)),
    case("cat_of_nothing", lambda x, e: torch.cat([x, (e * 2).clone(), (e + 1)[:0]]).sum() + torch.cat([e, e]).sum(), (5,), (0,)),
    case("cat_mixed_dtypes", lambda x, i: torch.cat([x, i]), (3, 2), ints(5, 4, 2)),
    case("cat_of_split", lambda x: torch.cat(x.split(2)), (7, 3), quiet=lambda p: True),
    case("cat_of_swapped_halves", lambda x: torch.cat([x[3:], x[:3]]), (7, 3)),
    case("cat_rotary", lambda x: torch.cat((-x[..., 2:], x[..., :2]), -1), (3, 4), quiet=lambda p: "S(1)" not in p),
    case("stack", lambda x, y: torch.stack([x, y], 1), (5, 4), (5, 4)),
    case("stack_alike", lambda x: torch.stack([x, x * 2]), (5, 4), quiet=lambda p: True),
    case("stack_last", lambda x, y: torch.stack([x, y], -1), (5, 4), (5, 4)),
    case("stack_scalars", lambda x, y: torch.stack([x, y]), (), ()),
    case("hstack", lambda x, y: torch.hstack([x, y]), (5, 4), (5, 1)),
    case("vstack", lambda x, y: torch.vstack([x, y]), (4,), (4,)),
    case("repeat_interleave", lambda x: x.repeat_interleave(2, 0), (5, 4), quiet=lambda p: True),
    case("repeat_interleave_heads", lambda x: x.repeat_interleave(2, -2), (2, 3, 2), quiet=lambda p: True),
    case("block_diag", lambda x, y: torch.block_diag(x, y), (2, 3), (3,)),
    case("chunk_cat", lambda x, y: torch._chunk_cat([x, y], 1, 2), (4, 3), (4, 2, 2), backward=False, cut_alike=True,
         quiet=lambda x, y: x == y and set(x.split()) <= {"R", "S(0)", "P"}),
    case("chunk_cat_rows", lambda x, y: torch._chunk_cat([x, y], 0, 3), (4, 3), (5, 2), backward=False),
    case("chunk_cat_out", lambda x, y, o: torch._chunk_cat([x, y], 1, 2, out=o.clone()), (4, 3), (4, 2, 2), (4, 2, 4), backward=False),
    case("linspace", strictly(lambda x, y: (torch.linspace(x, y, 5), torch.linspace(2, y, 3), torch.logspace(x, 1, 3))), (), (),
         backward=False, quiet=lambda x, y: "P" not in x + y),
    case("broadcast_tensors", lambda x, y: torch.broadcast_tensors(x, y), (5, 1), (4,)),
    case("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), (5,), (3,)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)
