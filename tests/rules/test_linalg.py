from __future__ import annotations

import itertools

import pytest
import torch
from oracle import EVEN, MESHES, case, compare, mesh_here, mesh_id, place, run_on
from pool import on_ranks
from shardtensor import Shard, ShardTensor
from test_matmul import batch_sharded

LIMIT = 12


def identity(x):
    return torch.ones_like(x).triu().tril()


def good(x):
    """A matrix far from singular."""
    return x + 4 * identity(x)


def positive_definite(x):
    return x @ x.mT + identity(x)


def symmetric(x):
    return x + x.mT


def batch(name, function, *sizes, backward=True, only_first=True, **options):
    """Quiet where only the batch dim is cut: of the first operand, or of all."""
    quiet = batch_sharded(0) if only_first else (lambda *p: len(set(p)) == 1 and set(p[0].split()) <= {"R", "S(0)"})
    return case(name, function, *sizes, backward=backward, quiet=quiet, cut_alike=not only_first, limit=LIMIT, **options)


def alike(name, function, *sizes, **options):
    return batch(name, function, *sizes, only_first=False, **options)


B = (5, 3, 3)  # a batch that ranks cut unevenly
CASES = [
    batch("inv", lambda x: torch.linalg.inv(good(x)), B),
    batch("inv_ex", lambda x: torch.linalg.inv_ex(good(x)).inverse, B),
    batch("inv_more_dims", lambda x: torch.linalg.inv(good(x)), (4, 3, 2, 2)),
    batch("det", lambda x: torch.linalg.det(x), B),
    batch("slogdet", lambda x: torch.linalg.slogdet(good(x)).logabsdet, B),
    batch("cholesky", lambda x: torch.linalg.cholesky(positive_definite(x)), B),
    batch("cholesky_inverse", lambda x: torch.cholesky_inverse(good(x).tril()), B),
    alike("cholesky_solve", lambda b, x: torch.cholesky_solve(b, good(x).tril()), (5, 3, 2), B),
    alike("solve", lambda x, b: torch.linalg.solve(good(x), b), B, (5, 3, 2)),
    alike("solve_vectors", lambda x, b: torch.linalg.solve(good(x), b), B, (5, 3)),
    batch("solve_one_side", lambda x, b: torch.linalg.solve(good(x), b), B, (3, 3)),
    batch("solve_left", lambda x, b: torch.linalg.solve(good(x), b, left=False), B, (2, 3), partial=False),
    alike("solve_triangular", lambda x, b: torch.linalg.solve_triangular(good(x), b, upper=True), B, (5, 3, 2)),
    case("solve_triangular_columns", lambda x, b: torch.linalg.solve_triangular(good(x), b, upper=True), (3, 3), (3, 5), limit=LIMIT,
         replicated=(0,), quiet=lambda x, b: set(b.split()) <= {"R", "S(1)", "P"}),
    alike("lu_solve", lambda x, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(good(x)), b), B, (5, 3, 2)),
    batch("lu", lambda x: torch.linalg.lu(good(x)), B),
    batch("lu_unpack", lambda x: torch.lu_unpack(*torch.linalg.lu_factor(good(x))), B),
    batch("qr", lambda x: torch.linalg.qr(good(x)).R.abs(), B),
    batch("qr_r", lambda x: torch.linalg.qr(good(x), mode="r").R.abs(), B, backward=False),
    batch("svdvals", torch.linalg.svdvals, (5, 3, 2)),
    batch("svd", lambda x: (lambda u, s, v: (u * s.unsqueeze(-2)) @ v)(*torch.linalg.svd(x, full_matrices=False)), (5, 3, 2)),
    batch("eigh", lambda x: (lambda w, v: (v * w.exp().unsqueeze(-2)) @ v.mT)(*torch.linalg.eigh(symmetric(x))), B),
    batch("eigvalsh", lambda x: torch.linalg.eigvalsh(symmetric(x)), B),
    batch("eigvals", lambda x: torch.linalg.eigvals(good(x)).abs().sort().values, B, backward=False),
    batch("eig", lambda x: torch.linalg.eig(symmetric(x)).eigenvalues.real.sum(-1), B),
    alike("lstsq", lambda x, b: torch.linalg.lstsq(x, b).solution, (5, 4, 2), (5, 4, 3)),
    alike("lstsq_by_pivots", lambda x, b: torch.linalg.lstsq(x, b), (5, 4, 2), (5, 4, 3), backward=False),
    alike("lstsq_residuals", lambda x, b: torch.linalg.lstsq(x, b, driver="gels"), (5, 4, 2), (5, 4, 3), backward=False),
    alike("lstsq_singular_values", lambda x, b: torch.linalg.lstsq(x, b, driver="gelsd"), (5, 2, 4), (5, 2, 3), backward=False),
    case("lstsq_ranks", lambda x, b: torch.linalg.lstsq(x, b, driver="gelsd"), (5, 4, 2), (5, 4, 3), backward=False, limit=LIMIT),
    alike("lstsq_vectors", lambda x, b: torch.linalg.lstsq(x, b, driver="gels"), (5, 4, 2), (5, 4), backward=False),
    batch("pinv", torch.linalg.pinv, (5, 3, 2)),
    batch("matrix_exp", torch.linalg.matrix_exp, B),
    batch("matrix_power", lambda x: torch.linalg.matrix_power(x, 3), B),
    batch("matrix_rank", torch.linalg.matrix_rank, B, backward=False),
    batch("matrix_norm", lambda x: torch.linalg.matrix_norm(x, 2), B),
    alike("cross", torch.linalg.cross, (5, 3), (5, 3)),
    case("cross_other_dim", lambda x, y: torch.linalg.cross(x, y, dim=0), (3, 5), (3, 5), limit=LIMIT),
    alike("householder_product", torch.linalg.householder_product, (5, 3, 2), (5, 2)),
    alike("ormqr", torch.ormqr, (5, 3, 2), (5, 2), (5, 3, 4)),
    alike("ormqr_right", lambda x, t, y: torch.ormqr(x, t, y, left=False), (5, 3, 2), (5, 2), (5, 4, 3)),
]


@pytest.mark.parametrize("mesh", MESHES[1:], ids=mesh_id)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_equals_torch(pools, name, mesh):
    run_on(pools, mesh, __name__, name)


# torch's kernels and formulas ask whether matrices are contiguous: pieces may be where the whole is not, and the reverse.
SLICES = {
    "one": lambda x: x[1, :, :, :3],
    "some": lambda x: x[1:3, 2:3, :, :3],
    "last": lambda x: x[1:2, 2:3, :, 1:4],
    "transposed": lambda x: x[..., :3].mT,
    "permuted": lambda x: x[:, :2, :, :3].contiguous().transpose(0, 1),
}
FACTORED = {
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x).logabsdet,
    "solve": lambda x: torch.linalg.solve(x, x.mT[..., :2]),
    "inv": torch.linalg.inv,
}


@on_ranks(2)
def test_slices():
    mesh, generator = mesh_here(), torch.Generator().manual_seed(0)
    whole = torch.randn(4, 6, 3, 5, dtype=torch.float64, generator=generator)
    for (name, f), (part, view) in itertools.product(FACTORED.items(), SLICES.items()):
        plain = whole.clone().requires_grad_()
        y = f(view(plain))
        grad = torch.randn(y.shape, dtype=y.dtype, generator=generator)
        (want,) = torch.autograd.grad(y, plain, grad)
        for at in ("R", "S(0)", "S(1)", "S(2)", "S(3)"):
            x = place(whole, mesh, (at,), EVEN).requires_grad_()
            out = f(view(x))
            for to in ("R", "S(0)") if y.ndim else ("R",):
                (got,) = torch.autograd.grad(out, x, place(grad, mesh, (to,), EVEN), retain_graph=True)
                compare([out, got], [y, want], 1e-9, f"{name} of {part} of {at}, gradient {to}")
        columns = whole[..., :3]
        plain = columns.clone().requires_grad_()
        (want,) = torch.autograd.grad(f(plain).sum(), plain)
        piece = whole.chunk(mesh.size())[mesh.get_local_rank()][..., :3]  # with gaps
        x = ShardTensor.from_local(piece, mesh, [Shard(0)], shape=columns.shape, stride=plain.stride()).requires_grad_()
        (got,) = torch.autograd.grad(f(x).sum(), x)
        compare(got, want, 1e-9, f"{name} of a slice of a local tensor")
