"""local_map: a function of plain tensors on pieces of any size."""

from __future__ import annotations

import pytest
import torch
from oracle import EVEN, mesh_here, mesh_of, place
from pool import on_ranks
from shardtensor import _C, Partial, Replicate, Shard, ShardTensor, distribute_tensor
from shardtensor.experimental import local_map, register_sharding
from torch.distributed.device_mesh import DeviceMesh


def mapped(rows):
    mesh = mesh_here()
    x = torch.randn(rows, 4, dtype=torch.float64)
    w = torch.randn(4, 3, dtype=torch.float64)

    @local_map(out_placements=([Shard(0)], [Partial()], None), in_placements=([Shard(0)], [Replicate()], None),
               in_grad_placements=([Shard(0)], [Partial()], None), redistribute_inputs=True)
    def product(a, b, n):
        assert type(a) is torch.Tensor and type(b) is torch.Tensor
        y = (a @ b) * n
        return y, y.sum(0), n

    a = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    b = distribute_tensor(w, mesh, [Replicate()]).requires_grad_()
    _C.reset_comm_counts()
    y, total, n = product(a, b, 2)
    assert isinstance(y, ShardTensor) and y.placements == (Shard(0),) and y.shape == (rows, 3) and n == 2
    torch.testing.assert_close(y.full_tensor(), x @ w * 2)
    torch.testing.assert_close(total.full_tensor(), (x @ w * 2).sum(0))
    (y.square().sum() + total.sum()).backward()
    p, q = x.clone().requires_grad_(), w.clone().requires_grad_()
    z = p @ q * 2
    (z.square().sum() + z.sum()).backward()
    torch.testing.assert_close(a.grad.full_tensor(), p.grad)
    torch.testing.assert_close(b.grad.full_tensor(), q.grad)
    assert type(product(x, w, 2)[0]) is torch.Tensor  # plain tensors go straight through
    quiet = local_map(torch.neg, [Shard(0)])
    s = distribute_tensor(x, mesh, [Shard(0)])
    _C.reset_comm_counts()
    torch.testing.assert_close(quiet(s).to_local(), -s.to_local())
    return sum(calls for calls, _ in _C.comm_counts().values())


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("rows", [6, 5, 2])
def test_local_map(pools, world, rows):
    for calls in pools(world).run(mapped, rows):
        assert calls == (1 if rows % world else 0)  # if rows are uneven, ranks exchange the sizes of their results


def refusals():
    x = distribute_tensor(torch.ones(4, 4), mesh_here(), [Shard(0)])
    texts = []
    for f in (
        lambda: local_map(torch.neg, [Shard(0)], in_placements=([Shard(1)],))(x),
        lambda: local_map(torch.neg, [Shard(0)], in_placements=([Shard(0)], None))(x),
        lambda: local_map(torch.neg, None)(x),
        lambda: local_map(lambda t: 3, [Replicate()])(x),
        lambda: local_map(torch.neg, ([Shard(0)], [Shard(0)]))(x),
        lambda: local_map(torch.neg, [Shard(0)], in_placements=(None,))(x),
    ):
        with pytest.raises((ValueError, AssertionError)) as error:
            f()
        texts.append(str(error.value))
    return texts


def test_bad_use_says_what_is_wrong(pools):
    wanted = ["redistribute_inputs=True", "for 2 inputs, the call has 1", "None for output 0", "int, not a tensor",
              "for 2 outputs", "None for input 0"]
    for texts in pools(2).run(refusals):
        assert [w for w, t in zip(wanted, texts, strict=True) if w not in t] == []


# ---- register_sharding ----


def _define_scaled_rows():
    """A custom op with a derivative. It returns x @ w and the norms of x's rows, both times a factor."""

    @torch.library.custom_op("shardtensor_test::scaled_rows", mutates_args=())
    def scaled_rows(x: torch.Tensor, w: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        norms = x.norm(dim=1)
        return (x @ w) * factor, norms * factor

    @scaled_rows.register_fake
    def _(x, w, factor):
        return x.new_empty(x.shape[0], w.shape[1]), x.new_empty(x.shape[0])

    def backward(ctx, grad, _):
        x, w = ctx.saved_tensors
        return grad @ w.T * ctx.factor, x.T @ grad * ctx.factor, None

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.factor = inputs[2]

    scaled_rows.register_autograd(backward, setup_context=setup)
    return torch.ops.shardtensor_test.scaled_rows.default


def _backward(mesh):
    """The same ranks, the last one first."""
    return DeviceMesh("cpu", mesh.mesh.flatten().flip(0).view(mesh.mesh.shape))


@pytest.mark.parametrize(
    ("mesh_shape", "first", "second", "cut", "quiet"),
    [
        ((2,), ["S(0)"], ["R"], "even", True),
        ((3,), ["S(0)"], ["R"], "uneven", True),
        ((3,), ["R"], ["S(1)"], "empty", True),
        ((2,), ["S(0)"], ["S(1)"], "uneven", False),
        ((3,), ["P"], ["S(0)"], "uneven", False),
        ((2, 2), ["S(0)", "R"], ["R", "S(1)"], "uneven", True),
        ((2, 2), ["S(0)", "S(0)"], ["R", "S(0)"], "even", False),
    ],
)
@on_ranks(of="mesh_shape")
def test_register_sharding(mesh_shape, first, second, cut, quiet):
    op = _define_scaled_rows()
    seen = []

    @register_sharding(op)
    def rule(x, w, factor):
        seen.append((tuple(x.shape), w.ndim, factor))
        return [
            ([Replicate(), Replicate()], [Replicate(), Replicate(), None]),
            ([Shard(0), Shard(0)], [Shard(0), Replicate(), None]),
            ([Shard(1), Replicate()], [Replicate(), Shard(1), None]),
        ]

    try:
        mesh = mesh_of(mesh_shape)
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(*sizes, dtype=torch.float64, generator=generator) for sizes in ((7, 4), (4, 5))]
        plain = [t.clone().requires_grad_() for t in whole]
        ours = [place(t, mesh, p, cut).requires_grad_() for t, p in zip(whole, (first, second), strict=True)]
        want, norms = op(*plain, 0.5)
        _C.reset_comm_counts()
        got, ours_norms = op(*ours, 0.5)
        assert bool(_C.comm_counts()) != quiet, (got._layout, _C.comm_counts())
        if quiet and first[0] == "S(0)":
            cut_of = [t._spec.sharding_shapes()[0] for t in (got, ours[0])]
            assert [a[0] for a in cut_of[0]] == [b[0] for b in cut_of[1]]
        torch.testing.assert_close(got.full_tensor(), want)
        torch.testing.assert_close(ours_norms.full_tensor(), norms)
        weight = torch.randn(want.shape, dtype=torch.float64, generator=generator)
        (want * weight).sum().backward()
        (got * place(weight, mesh, ("R",) * mesh.ndim, "even")).sum().backward()
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad)
        op(*ours, 0.5)
        assert seen == [((7, 4), 2, 0.5)]  # asked once
        there = ours[0].redistribute(_backward(mesh), [Replicate()] * mesh.ndim)
        with pytest.raises(RuntimeError, match=r"different meshes: .* of ranks \[0, 1.*\] and .* of ranks \[\d, .*0\]; redistribute"):
            op(ours[0].redistribute(placements=[Replicate()] * mesh.ndim), there, 0.5)
    finally:
        ShardTensor.unregister_handler(op)

    softmax, x = torch.ops.aten._softmax.default, place(whole[0], mesh, ("R",) * mesh.ndim, "even")
    try:
        register_sharding(softmax)(lambda x, dim, half: [([Shard(0)], [Shard(0), None, None])])
        torch.testing.assert_close(torch._softmax(x, 1, False).full_tensor(), whole[0].softmax(1))
        register_sharding(softmax)(lambda x, dim, half: [([Shard(0)], [Shard(0), Shard(0)])])
        with pytest.raises(ValueError, match="placements for 1 results and 2 tensors; the call has 1 and 1"):
            torch._softmax(x, 1, False)
        register_sharding(softmax)(lambda x, dim, half: [([Partial()], [Partial(), None])])
        with pytest.raises(RuntimeError, match="no acceptable sharding for"):
            torch._softmax(x, 1, False)
    finally:
        ShardTensor.unregister_handler(softmax)
    torch.testing.assert_close(torch._softmax(x, 1, False).full_tensor(), whole[0].softmax(1))
    with pytest.raises(NotImplementedError, match="writes its arguments"):
        register_sharding(torch.ops.aten.add_.Tensor)(rule)


@on_ranks(2)
def test_register_sharding_in_graphs():
    """A graph of a user's rule serves all even lengths; another one serves all others."""
    from torch._dynamo.testing import CompileCounterWithBackend

    register_sharding(torch.ops.aten.sin.default)(lambda x: [([p], [p]) for p in (Replicate(), Shard(0), Shard(1))])
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: x.sin() * 2, backend=counter, fullgraph=True, dynamic=True)
    try:
        mesh, frames = mesh_here(), []
        for n in (4 * mesh.size(), 6 * mesh.size(), 8 * mesh.size() + 1, 10 * mesh.size() + 1):
            whole = torch.arange(3.0 * n).reshape(n, 3)
            ours = place(whole, mesh, ("S(0)",), EVEN).requires_grad_()
            out = compiled(ours)
            torch.testing.assert_close(out.full_tensor(), whole.sin() * 2)
            out.sum().full_tensor().backward()
            torch.testing.assert_close(ours.grad.full_tensor(), whole.cos() * 2)
            frames.append(counter.frame_count)
    finally:
        ShardTensor.unregister_handler(torch.ops.aten.sin.default)
    assert frames == [1, 1, 2, 2], frames
