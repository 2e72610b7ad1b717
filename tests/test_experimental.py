"""local_map: a function of plain tensors on pieces of any size."""

from __future__ import annotations

import pytest
import torch
from oracle import mesh_here


def mapped(rows):
    from shardtensor import _C, Partial, Replicate, Shard, ShardTensor, distribute_tensor
    from shardtensor.experimental import local_map

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
    for calls in pools(world).run(f"{__name__}:mapped", rows):
        assert calls == (1 if rows % world else 0)  # how large the others' results are, where they are not alike


def refusals():
    from shardtensor import Replicate, Shard, distribute_tensor
    from shardtensor.experimental import local_map

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
    for texts in pools(2).run(f"{__name__}:refusals"):
        assert [w for w, t in zip(wanted, texts, strict=True) if w not in t] == []
