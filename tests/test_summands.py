"""Ops on summands of every kind that torch knows, not only sums, together with values that are replicated, cut, or summands of
another kind."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from oracle import MESHES, Joint, compare, mesh_id, mesh_of, place, with_summands

KINDS = ["sum", "avg", "product", "min", "max", "norm"]
OPS = {
    "clone": lambda x, y: x.clone(),
    "transpose": lambda x, y: x.t(),
    "row": lambda x, y: x[1],
    "rows": lambda x, y: x[1:3],
    "flatten": lambda x, y: x.flatten(),
    "expand": lambda x, y: x[:, None].expand(4, 2, 3),
    "flip": lambda x, y: x.flip(0),
    "roll": lambda x, y: x.roll(1, 1),
    "tril": lambda x, y: x.tril(),
    "float": lambda x, y: x.float(),
    "neg": lambda x, y: -x,
    "half": lambda x, y: x * 0.5,
    "exp": lambda x, y: x.exp(),
    "sum": lambda x, y: x.sum(0),
    "mean": lambda x, y: x.mean(),
    "amax": lambda x, y: x.amax(1),
    "amin": lambda x, y: x.amin(0),
    "prod": lambda x, y: x.prod(1),
    "norm": lambda x, y: torch.linalg.vector_norm(x, dim=1),
    "norm_1": lambda x, y: torch.linalg.vector_norm(x, 1, dim=0),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "maximum": lambda x, y: torch.maximum(x, y),
    "mm": lambda x, y: x @ y.t(),
    "cat": lambda x, y: torch.cat((x, y, x)),
    "cat_1": lambda x, y: torch.cat((y, x), 1),
    "stack": lambda x, y: torch.stack((x, y), 1),
    "where": lambda x, y: torch.where(y > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -1),
    "copied_to": lambda x, y: y.clone().copy_(x),
    "copied_from": lambda x, y: x.clone().copy_(y.abs()),
    "added_to": lambda x, y: x.clone().add_(y * y),
    "doubled": lambda x, y: x.clone().mul_(2),
    "clamped": lambda x, y: x.clone().clamp_(min=0.25),
    "row_written": lambda x, y: _written(x.clone(), 1, y[2].abs() * 0.5),
    "row_moved": lambda x, y: _written(x.clone(), 1, x[3].clone() * 0.5),
    "number_moved": lambda x, y: _written(x[:, 1].clone(), 0, x[3, 1].clone() * 0.5),
    "row_stacked": lambda x, y: torch.stack((x[1], y[1])),
    "sum_joined": lambda x, y: torch.cat((x.sum(0), y[0])),
}


LIMIT = 64  # combinations tried per op and mesh


def _written(x, at, value):
    x[at] = value
    return x


def through(name, mesh_shape):
    mesh = mesh_of(mesh_shape)
    g = torch.Generator().manual_seed(0)
    x = torch.rand(4, 3, generator=g, dtype=torch.float64) + 0.5
    y = torch.randn(4, 3, generator=g, dtype=torch.float64)
    single = [(p,) * mesh.ndim for p in ("R", "S(0)", "S(1)", "P")]
    at = [*single, ("S(0)", "P"), ("P", "R")] if mesh.ndim > 1 else single
    rests = ["R", "S(0)", "S(1)"] if mesh.ndim > 1 else ["R"]
    combos = list(itertools.product(KINDS, range(mesh.ndim), rests, at))
    joint = Joint()
    for kind, mesh_dim, rest, at_y in random.Random(name).sample(combos, min(len(combos), LIMIT)):
        want = OPS[name](x.clone(), y.clone())
        ours = with_summands(x, mesh, mesh_dim, kind, rest), place(y, mesh, at_y, "even")
        compare(OPS[name](*ours), want, 1e-6, f"{name} of {kind} on mesh dim {mesh_dim}, {rest}; {at_y}", joint)
    joint.compare()


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", OPS)
def test_through(pools, name, mesh):
    world, shape = mesh
    pools(world).run(f"{__name__}:through", name, shape)


def norms_written() -> None:
    """A norm is never negative: a write that would make it negative is refused on all ranks, and the old value stays."""
    mesh = mesh_of((2,))
    whole = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
    x = with_summands(whole, mesh, 0, "norm", "R")
    with pytest.raises(RuntimeError, match="a negative value cannot be kept as summands of a norm"):
        x.sub_(5)
    torch.testing.assert_close(x.full_tensor(), whole)
    torch.testing.assert_close((x - 5).full_tensor(), whole - 5)


def test_norms_written(pools):
    pools(2).run(f"{__name__}:norms_written")
