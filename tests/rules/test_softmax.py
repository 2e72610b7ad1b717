from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import EMPTY, MESHES, UNEVEN, bools, case, mesh_id, mesh_of, place, run_on
from shardtensor import _C
from test_reductions import free_of

aten = torch.ops.aten


def masked_rows(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(m, -float("inf"))


CASES = [
    case("softmax", lambda x: x.softmax(0), (5, 4), quiet=free_of(0)),
    case("softmax_last", lambda x: x.softmax(-1), (5, 4), quiet=free_of(1)),
    case("softmax_3d", lambda x: x.softmax(1), (3, 4, 2), quiet=free_of(1)),
    case("softmax_scalar", lambda x: x.softmax(0), ()),
    case("softmax_dtype", lambda x: x.float().softmax(0, dtype=torch.float64), (5, 4), tolerance=1e-5, quiet=free_of(0)),
    case("softmax_large", lambda x: (x * 500).softmax(0), (5, 4), partial=False),
    case("softmax_masked", lambda x, m: masked_rows(x, m).softmax(1), (6, 4), bools(6, 4), backward=False),
    case("softmax_bfloat16", lambda x: x.bfloat16().softmax(0).double(), (7, 4), tolerance=1e-2, backward=False),
    case("softmax_out", lambda x, o: aten._softmax.out(x, 0, False, out=o.clone()), (5, 4), (5, 4), backward=False),
    case("softmax_int_out", lambda x, o: aten.softmax.int_out(x, 0, out=o.clone()), (5, 4), (5, 4), backward=False, limit=30),
    case("log_softmax", lambda x: x.log_softmax(0), (5, 4), quiet=free_of(0)),
    case("log_softmax_last", lambda x: x.log_softmax(-1), (5, 4), quiet=free_of(1)),
    case("log_softmax_3d", lambda x: x.log_softmax(-2), (3, 4, 2), quiet=free_of(1)),
    case("log_softmax_large", lambda x: (x * 500).log_softmax(0), (5, 4), partial=False),
    case("log_softmax_out", lambda x, o: aten._log_softmax.out(x, 0, False, out=o.clone()), (5, 4), (5, 4), backward=False),
    case("softmin", lambda x: F.softmin(x, 0), (5, 4)),
    case("safe_softmax", lambda x: aten._safe_softmax(x, 0), (5, 4)),
    case("safe_softmax_masked", lambda x, m: aten._safe_softmax(masked_rows(x, m), 1), (6, 2), bools(6, 2), backward=False),
    case("masked_softmax", lambda x, m: aten._masked_softmax(x, m, 1), (6, 4), bools(6, 4), backward=False),
    case("masked_softmax_all_dims", lambda x, m: aten._masked_softmax(x, m), (2, 6), bools(2, 6), backward=False),
    case("backward", lambda g, x: aten._softmax_backward_data(g, x.softmax(0), 0, torch.float64), (5, 4), (5, 4),
         backward=False),
    case("backward_out", lambda g, x, o: aten._softmax_backward_data.out(g, x.softmax(0), 0, torch.float64, grad_input=o.clone()),
         (5, 4), (5, 4), (5, 4), backward=False),
    case("log_backward_out",
         lambda g, x, o: aten._log_softmax_backward_data.out(g, x.log_softmax(0), 0, torch.float64, out=o.clone()),
         (5, 4), (5, 4), (5, 4), backward=False),
    case("nested", lambda x: x.softmax(0).log_softmax(1), (5, 4)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


def _bytes(name, cut):
    mesh = mesh_of((dist.get_world_size(),))
    x = place(torch.randn(60, 4, dtype=torch.float64), mesh, ("S(0)",), cut).requires_grad_()
    seed = place(torch.randn(60, 4, dtype=torch.float64), mesh, ("S(0)",), cut)
    _C.reset_comm_counts()
    y = getattr(x, name)(0)
    forward = _C.comm_counts()
    _C.reset_comm_counts()
    y.backward(seed)
    return forward, _C.comm_counts()


@pytest.mark.parametrize("cut", [UNEVEN, EMPTY])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_two_small_reductions_and_one_backward(pools, name, cut):
    row = 4 * 8
    for counts in pools(3).run(_bytes, name, cut):
        assert counts == ({"all_reduce": (2, 2 * row)}, {"all_reduce": (1, row)})
