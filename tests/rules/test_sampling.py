from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from oracle import MESHES, mesh_here, mesh_id, place, run_on
from pool import on_ranks
from test_im2col_distance import together

CASES = [
    together("grid_sample", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), (4, 2, 3, 3), (4, 2, 3, 2)),
    together("grid_sample_3d", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), (4, 2, 2, 3, 3), (4, 2, 2, 1, 3)),
    together("affine_grid", lambda t: F.affine_grid(t, [4, 2, 3, 3], align_corners=False), (4, 2, 3)),
]


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float", "double"])
@on_ranks(2)
def test_points_far_away(dtype):
    """Points far outside of the image, on its edges, between pixels, infinite, not a number: with the image and the grid cut. Where
    torch's own kernels read outside of the image (and may die), there is nothing to compare."""
    image = torch.arange(2 * 9 * 5, dtype=dtype).view(1, 2, 9, 5).sin()
    edge = [n / 18 for n in range(-27, 28, 3)]
    far = [sign * (base + step) for sign in (1, -1) for base in (1e3, 1e7, 3e7, 1e9) for step in (0, 0.3, 7.7)]
    huge = [1e15, -1e15, 3e38, -3e38, float("inf"), -float("inf"), float("nan")]
    for points, mode, padding, aligned in itertools.product(
        (edge, far, huge), ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (False, True)
    ):
        if points is huge and padding != "zeros":
            continue
        rows = torch.tensor(points, dtype=dtype)
        grid = torch.stack([rows.flip(0).clamp(-2, 2), rows], -1).view(1, 1, -1, 2)
        grid = torch.cat([grid, grid.flip(-1)], 1)
        x, at = image.clone().requires_grad_(), grid.clone().requires_grad_()
        want = F.grid_sample(x, at, mode, padding, aligned)
        want.sum().backward()
        for layout, cut, of_grid in (("S(2)", "even", "R"), ("S(2)", [7, 2], "S(2)"), ("S(3)", [0, 5], "S(1)")):
            ours = place(image, mesh_here(), (layout,), cut).requires_grad_()
            g = place(grid, mesh_here(), (of_grid,), "even").requires_grad_()
            got = F.grid_sample(ours, g, mode, padding, aligned)
            got.sum().backward()
            what = f"{mode} {padding} {aligned} {layout} {cut} {of_grid} {points[:2]}"
            for a, b in ((got, want), (ours.grad, x.grad), (g.grad, at.grad)):
                torch.testing.assert_close(a.full_tensor(), b, equal_nan=True, rtol=1e-4, atol=1e-5, msg=lambda m, what=what: f"{what}: {m}")
