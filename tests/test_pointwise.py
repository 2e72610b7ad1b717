from __future__ import annotations

import pytest
import torch
from oracle import MESHES, bools, case, mesh_id, positive, run_on


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
