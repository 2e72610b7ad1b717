"""torch.compile: whole graphs through ShardTensors equal eager, even, uneven and empty; guards that hold; what graphs contain."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from oracle import mesh_here

# What a rank holds of the 7 rows, by the number of ranks.
CUTS = {1: [7], 2: [5, 2], 3: [5, 0, 2]}


def rows(world: int, *rest: int) -> dict[int, list[tuple[int, ...]]]:
    return {0: [(n, *rest) for n in CUTS[world]]}


def spread(t, *placements, cuts=None, grad=False):
    """Cut without communication; by default along dim 0, as CUTS says."""
    from shardtensor import Shard, distribute_tensor

    mesh = mesh_here()
    if not placements:
        placements, cuts = (Shard(0),), cuts or rows(mesh.size(), *t.shape[1:])
    return distribute_tensor(t, mesh, placements, src_data_rank=None, sharding_shapes=cuts).requires_grad_(grad)


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


def _from_local_uneven(x, w):
    from shardtensor import Shard, ShardTensor

    mesh = x.device_mesh
    return ShardTensor.from_local(x.to_local() * 2, mesh, [Shard(0)], shape=x.shape, stride=x.stride(), sharding_shapes=rows(mesh.size(), 6))


def _from_local(*placements, **options):
    def run(x, w):
        from shardtensor import ShardTensor

        return ShardTensor.from_local(w.to_local() * 2, x.device_mesh, placements, **options) + 1

    return run


def _placed(kind, *arguments):
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    return {"R": Replicate, "S": Shard, "P": Partial}[kind](*arguments)


R, P = _placed("R"), _placed("P")
S0, S1 = _placed("S", 0), _placed("S", 1)


def _move(*placements, **options):
    return lambda x, w: x.redistribute(placements=placements, **options) * 2


def _made(name, *arguments, **options):
    def run(x, w):
        import shardtensor

        made = getattr(shardtensor, name)(*arguments, device_mesh=x.device_mesh, placements=[S0], **options)
        return made * x.sum()

    return run


def _distribute(source):
    def run(x, w):
        from shardtensor import distribute_tensor

        return distribute_tensor(torch.arange(14.0).reshape(7, 2), x.device_mesh, [S0], src_data_rank=source) * x.sum()

    return run


def _set_rows(x, w):
    y = x * 1
    y[1:3] = 1.0
    return y


def _write_through_a_view(x, w):
    y = x * 1
    y[:, 1:3].mul_(2)
    return y


def _autocast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ w).float()


def _checkpointed(x, w):
    return torch.utils.checkpoint.checkpoint(lambda y: torch.relu(y @ w).softmax(0) * 2, x, use_reentrant=False)


def _checkpointed_dropout(x, w):
    return torch.utils.checkpoint.checkpoint(lambda y: F.dropout(torch.relu(y @ w), 0.5) * 2, x, use_reentrant=False)


def _attention(x, w):
    q = x.reshape(1, 7, 2, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


def _in_containers(x, w):
    pair = Pair(x * 2, [w, {"y": x + 1}])
    return pair.left + pair.right[1]["y"] + pair.right[0].sum()


def _no_grad(x, w):
    with torch.no_grad():
        scale = (x @ w).abs().amax()
    return x * scale


CASES = {
    "add": lambda x, w: x * 2 + 1,
    "relu_of_product": lambda x, w: torch.relu(x @ w),
    "vector_times_matrix": lambda x, w: (x * x).sum(0) @ w,
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "linear": lambda x, w: F.linear(x, w.t(), w[0]),
    "sum": lambda x, w: x.sum(),
    "sum_of_columns": lambda x, w: x.sum(1),
    "mean": lambda x, w: x.mean(),
    "var": lambda x, w: x.var(0),
    "amax": lambda x, w: x.amax(0),
    "max_with_index": lambda x, w: x.max(1)[0],
    "norm": lambda x, w: torch.linalg.vector_norm(x),
    "logsumexp": lambda x, w: x.logsumexp(0),
    "cumsum": lambda x, w: x.cumsum(0),
    "sort": lambda x, w: x.sort(0)[0],
    "topk": lambda x, w: x.topk(2, 0)[0],
    "softmax": lambda x, w: x.softmax(0),
    "log_softmax": lambda x, w: F.log_softmax(x @ w, -1).sum(),
    "layer_norm": lambda x, w: F.layer_norm(x, (6,)),
    "rms_norm": lambda x, w: F.rms_norm(x, (6,)),
    "gelu": lambda x, w: F.gelu(x @ w).sum(1),
    "mse_loss": lambda x, w: F.mse_loss(x, x * 2),
    "bce_loss": lambda x, w: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "attention": _attention,
    "embedding": lambda x, w: F.embedding(spread(torch.arange(6).reshape(2, 3), R), x),
    "transpose": lambda x, w: x.t() * 1,
    "view_with_an_offset": lambda x, w: x[:, 1:3],
    "output_is_an_alias": lambda x, w: x.view_as(x),
    "slice_of_the_cut_dim": lambda x, w: x[1:4],
    "row": lambda x, w: x[0],
    "rows_by_index": lambda x, w: x[[0, 2]],
    "reshape": lambda x, w: x.reshape(-1),
    "unflatten": lambda x, w: x.unflatten(1, (2, 3)),
    "expand": lambda x, w: x.unsqueeze(0).expand(3, -1, -1),
    "flip": lambda x, w: x.flip(0),
    "roll": lambda x, w: x.roll(1, 0),
    "pad": lambda x, w: F.pad(x, (1, 1, 1, 0)),
    "cat": lambda x, w: torch.cat([x, x * 2], 0),
    "stack": lambda x, w: torch.stack([x, x * 2], 0),
    "chunk": lambda x, w: x.chunk(2, 1)[1],
    "where": lambda x, w: torch.where(x > 0, x, 0.0),
    "tril": lambda x, w: x.tril(),
    "masked_fill": lambda x, w: x.masked_fill(x > 0, 1.0),
    "in_place": lambda x, w: (x * 1).add_(1).mul_(2),
    "write_through_a_view": _write_through_a_view,
    "set_rows": _set_rows,
    "to_replicate": _move(R),
    "to_other_dim": _move(S1),
    "to_even": _move(S0, sharding_shapes="chunk"),
    "to_replicate_in_bfloat16": lambda x, w: x.redistribute(
        placements=[R], forward_dtype=torch.bfloat16, backward_dtype=torch.float32
    ).float(),
    "to_replicate_async": _move(R, async_op=True),
    "summands_to_replicate": lambda x, w: x.sum(0).redistribute(placements=[R]) * 2,
    "summands_to_shard": lambda x, w: (x.t() @ x).redistribute(placements=[S0]) * 2,
    "full_tensor": lambda x, w: x.full_tensor() * 2,
    "to_local": lambda x, w: x.to_local() * 2,
    "to_local_of_summands": lambda x, w: x.redistribute(placements=[R]).to_local(grad_placements=[P]) * 2,
    "from_local_equal": _from_local(S0),
    "from_local_replicate": _from_local(R),
    "from_local_summands": _from_local(P),
    "from_local_grad_placements": _from_local(R, grad_placements=[P]),
    "from_local_cuts": _from_local_uneven,
    "distribute": _distribute(0),
    "distribute_own": _distribute(None),
    "zeros": _made("zeros", 7, 6),
    "full": _made("full", (7, 6), 2.0),
    "rand": _made("rand", 7, 6),
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "two_draws": lambda x, w: F.dropout(x, 0.5) + torch.rand_like(x) * torch.randn_like(x),
    "autocast": _autocast,
    "checkpointed": _checkpointed,
    "checkpointed_dropout": _checkpointed_dropout,
    "in_containers": _in_containers,
    "no_grad_inside": _no_grad,
}


def _whole(t):
    from shardtensor import ShardTensor

    return t.full_tensor() if isinstance(t, ShardTensor) else t


def _form(t):
    from shardtensor import ShardTensor

    layout = t._layout if isinstance(t, ShardTensor) else None
    return type(t), layout, t.shape, t.stride(), t.storage_offset(), t.dtype


def _run(function, backend):
    """The result and both gradients; compiled, if there is a backend."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    x = spread(torch.randn(7, 6), grad=True)
    w = spread(torch.randn(6, 6), R, grad=True)
    out = (torch.compile(function, backend=backend, fullgraph=True) if backend else function)(x, w)
    if out.requires_grad:
        _whole(out.square().sum()).backward()
    return out.detach(), [None if t.grad is None else _whole(t.grad) for t in (x, w)], torch.get_rng_state()


def equal_compiled(names, backend):
    for name in names:
        (want, want_grads, want_state), (got, got_grads, state) = _run(CASES[name], None), _run(CASES[name], backend)
        assert _form(got) == _form(want), f"{name}: {_form(got)} instead of {_form(want)}"
        torch.testing.assert_close(_whole(got), _whole(want), msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(got_grads, want_grads, msg=lambda m, name=name: f"{name}, gradients: {m}")
        assert torch.equal(state, want_state), f"{name}: draws another number of random keys than eager"


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_eager(pools, name, world):
    pools(world).run(f"{__name__}:equal_compiled", [name], "aot_eager")


@pytest.mark.parametrize("world", [1, 3])
def test_equals_eager_in_dynamo_alone(pools, world):
    # Of plain tensors, too, this backend draws anew where a checkpointed region runs again.
    names = [name for name in CASES if name != "checkpointed_dropout"]
    pools(world).run(f"{__name__}:equal_compiled", names, "eager")


DEEP = ["relu_of_product", "softmax", "to_other_dim", "summands_to_shard", "from_local_cuts", "two_draws", "set_rows", "attention"]


@pytest.mark.parametrize("world", [2, 3])
def test_equals_eager_by_inductor(pools, world):
    pools(world).run(f"{__name__}:equal_compiled", DEEP, "inductor")
