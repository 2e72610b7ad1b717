from __future__ import annotations

import pytest
import shardtensor as st
import torch
from oracle import MESHES, bools, case, mesh_here, mesh_id, positive, run_on
from pool import on_ranks


def no_partial(*placements: str) -> bool:
    return all("P" not in p for p in placements)


CASES = [
    case("relu", torch.relu, (5, 4), quiet=no_partial),
    case("exp", torch.exp, (5, 4), quiet=no_partial),
    case("log", torch.log, positive(5, 4), partial=False, quiet=no_partial),
    case("neg", torch.neg, (5, 4), quiet=lambda p: True),
    case("add", torch.add, (5, 4), (5, 4)),
    case("add_alpha", lambda x, y: torch.add(x, y, alpha=2), (5, 4), (5, 4)),
    case("add_broadcast", torch.add, (5, 4), (4,)),
    case("add_one_row", torch.add, (5, 4), (1, 4)),
    case("add_number", lambda x: x + 1, (5, 4)),
    case("mul", torch.mul, (5, 4), (5, 4)),
    case("mul_number", lambda x: x * 2.5, (5, 4), quiet=lambda p: True),
    case("div", torch.div, (5, 4), positive(5, 4)),
    case("floor_divide_", lambda x: x.clone().floor_divide_(0.3), (5, 4), backward=False, quiet=no_partial),
    case("floor_divide_tensors", lambda x, y: x.clone().floor_divide_(y), (5, 4), positive(5, 4), backward=False, cut_alike=True,
         quiet=lambda p, q: p == q and "P" not in p),
    case("where", torch.where, bools(5, 4), (5, 4), (5, 4)),
    case("clamp", lambda x: x.clamp(-0.5, 0.5), (5, 4)),
    case("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5), (5, 4), (5, 4), (4,)),
    case("lerp", torch.lerp, (5, 4), (5, 4), (5, 4)),
    case("maximum", torch.maximum, (5, 4), (5, 4)),
    case("to_float", lambda x: x.float(), (5, 4), tolerance=1e-5, quiet=lambda p: True),
    case("add_", lambda x, y: x.clone().add_(y), (5, 4), (5, 4)),
    case("mul_", lambda x, y: x.clone().mul_(y), (5, 4), (5, 4)),
    case("mul_out", lambda x, y: torch.mul(x.detach(), y.detach(), out=torch.zeros_like(x)), (5, 4), (5, 4), backward=False),
    case("addcmul_", lambda x, y, z: x.clone().addcmul_(y, z), (5, 4), (5, 4), (5, 4)),
    case("relu_", lambda x: x.clone().relu_(), (5, 4)),
    case("fill_", lambda x: x.clone().fill_(2.0), (5, 4)),
    case("zero_", lambda x: x.clone().zero_(), (5, 4)),
    case("zeros_like", torch.zeros_like, (5, 4), backward=False, quiet=lambda p: True),
    case("ones_like", torch.ones_like, (5, 4), backward=False, quiet=lambda p: True),
    case("new_zeros_of_other_sizes", lambda x: x.new_zeros(3, 2, 7), (5, 4), backward=False, quiet=lambda p: True),
    case("new_zeros_of_some_sizes", lambda x: (x.new_zeros(5, 7), x.new_full((2, 4), 3.0)), (5, 4), backward=False, quiet=lambda p: True),
    case("copy_", lambda x, y: x.clone().copy_(y), (5, 4), (5, 4)),
    case("gelu", torch.nn.functional.gelu, (5, 4)),
    case("silu", torch.nn.functional.silu, (5, 4)),
    case("sigmoid", torch.sigmoid, (5, 4)),
    case("tanh", torch.tanh, (5, 4)),
    case("pow", lambda x: x**3, (5, 4)),
    case("compare", lambda x, y: x > y, (5, 4), (5, 4), backward=False),
    case("masked_fill", lambda x, m: x.masked_fill(m, 1.5), (5, 4), bools(5, 4)),
    case("glu", lambda x: torch.nn.functional.glu(x, -1), (5, 4), quiet=lambda p: "P" not in p and "S(1)" not in p),
    case("glu_rows", lambda x: torch.nn.functional.glu(x, 0), (4, 3)),
    case("prelu", torch.nn.functional.prelu, (5, 4), (4,)),
    case("mixed_dtypes", lambda x: x + torch.tensor(2), (5, 4)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


@on_ranks(2)
def test_orders():
    """Results have their dims in the order that torch's kernel gives, also where torch's meta kernel gives another."""
    x = torch.rand(2, 3, 4, 5) + 0.1
    last, turned, thin = x.to(memory_format=torch.channels_last), x.transpose(1, 2).contiguous().transpose(1, 2), x[:, :1]
    functions = {
        "copysign": torch.copysign,
        "floor_divide": torch.floor_divide,
        "xlogy": torch.xlogy,
        "heaviside": torch.heaviside,
        "logaddexp": torch.logaddexp,
        "remainder": torch.remainder,
        "atan2": torch.atan2,
        "where": lambda a, b: torch.where(a > 0.5, a, b),
        "elu_backward": lambda a, b: torch.ops.aten.elu_backward(a, 1, 1, 1, False, b),
        "hardtanh_backward": lambda a, b: torch.ops.aten.hardtanh_backward(a, b, 0.2, 0.5),
        "roll": lambda a, b: a.roll(1, -3),
        "roll_two": lambda a, b: a.roll((1, 3), (-2, -1)),
        "roll_by_none": lambda a, b: a.roll((0, 5), (-2, -1)),
        "pad_reflect": lambda a, b: torch.nn.functional.pad(a, (1, 1, 1, 1), mode="reflect"),
        "pad_replicate": lambda a, b: torch.nn.functional.pad(a, (1, 0, 2, 1), mode="replicate"),
        "expanded": lambda a, b: a.expand(2, *a.shape) + 1,
        "expanded_and_turned": lambda a, b: a.transpose(-1, -2).expand(2, *a.mT.shape) + 1,
    }
    for a, b in ((last, x), (x, last), (last, turned), (turned, x), (thin, last), (last, thin), (x[0], last)):
        for dim in (None, 0, 2, 3):
            ours = []
            for t in (a, b):
                at = None if dim is None else dim - 4 + t.dim()
                ours.append(st.distribute_tensor(t, mesh_here(), [st.Replicate() if at is None or at < 0 else st.Shard(at)]))
                assert ours[-1].stride() == t.stride() or t is thin
            for name, f in functions.items():
                want, got = f(a, b), f(*ours)
                assert got.stride() == want.stride(), (name, a.stride(), b.stride(), dim)
                torch.testing.assert_close(got.full_tensor(), want)
