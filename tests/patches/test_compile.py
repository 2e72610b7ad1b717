"""torch.compile: whole graphs through ShardTensors equal eager, even, uneven and empty; guards that hold; what graphs contain."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools

import pytest
import shardtensor
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compiled import FAMILIES, LONGER, LONGER_UNEVEN, OTHER_LAYOUT, RAISES, RIGHT, agree, names_of, run_placed
from compiled import frames as frames_of
from compiled import run as run_cases
from oracle import EMPTY, EVEN, UNEVEN, mesh_here, place, share
from pool import on_ranks
from shardtensor import _C, DeviceMesh, ShardTensor, distribute_module, distribute_tensor, init_device_mesh
from shardtensor.experimental import local_map
from shardtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardtensor.tensor import _compile
from torch.distributed.fsdp import fully_shard
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.12 and newer compile functions of ShardTensors")

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


def _from_local_chunk(x, w):
    even = x.redistribute(placements=[S0], sharding_shapes="chunk")
    return ShardTensor.from_local(even.to_local() * 2, x.device_mesh, [S0], shape=x.shape, sharding_shapes="chunk") + 1


def _from_local(*placements, **options):
    def run(x, w):
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
        made = getattr(shardtensor, name)(*arguments, device_mesh=x.device_mesh, placements=[S0], **options)
        return made * x.sum()

    return run


def _distribute(source):
    def run(x, w):
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


def _checkpointed_collectives(x, w):
    def region(y):
        return torch.relu(F.layer_norm(y.t(), (7,)).t() @ w).softmax(0) * 2

    return torch.utils.checkpoint.checkpoint(region, torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False), use_reentrant=False)


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
    "norm_of_rows": lambda x, w: torch.linalg.vector_norm(x, dim=0),
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
    "alias_as_complex": lambda x, w: torch.view_as_complex(x.unflatten(1, (3, 2))),
    "alias_of_a_part_as_complex": lambda x, w: torch.view_as_complex(x.unflatten(1, (3, 2)))[:, 1:],
    "alias_as_real": lambda x, w: torch.view_as_real(torch.view_as_complex(x.unflatten(1, (3, 2)))),
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
    "from_local_chunk": _from_local_chunk,
    "distribute": _distribute(0),
    "distribute_own": _distribute(None),
    "zeros": _made("zeros", 7, 6),
    "full": _made("full", (7, 6), 2.0),
    "rand": _made("rand", 7, 6),
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "two_draws": lambda x, w: F.dropout(x, 0.5) + torch.rand_like(x) * torch.randn_like(x),
    "autocast": _autocast,
    "checkpointed": _checkpointed,
    "checkpointed_collectives": _checkpointed_collectives,
    "checkpointed_dropout": _checkpointed_dropout,
    "in_containers": _in_containers,
    "no_grad_inside": _no_grad,
}


def _whole(t):
    return t.full_tensor() if isinstance(t, ShardTensor) else t


def _form(t):
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
        _whole((out.abs() if out.is_complex() else out).square().sum()).backward()
    return out.detach(), [None if t.grad is None else _whole(t.grad) for t in (x, w)], torch.get_rng_state()


def equal_compiled(names, backend, cases=CASES):
    near = {"rtol": 1e-5, "atol": 1e-5} if backend == "inductor" else {}  # its kernels round otherwise than torch's, by the CPU's kind
    for name in names:
        (want, want_grads, want_state), (got, got_grads, state) = _run(cases[name], None), _run(cases[name], backend)
        assert _form(got) == _form(want), f"{name}: {_form(got)} instead of {_form(want)}"
        torch.testing.assert_close(_whole(got), _whole(want), **near, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(got_grads, want_grads, **near, msg=lambda m, name=name: f"{name}, gradients: {m}")
        assert torch.equal(state, want_state), f"{name}: draws another number of random keys than eager"


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, n in ((3, 1), (2, 2), (1, 4)) for name in share(CASES, n)])
def test_equals_eager(pools, world, name):
    pools(world).run(equal_compiled, [name], "aot_eager")


@pytest.mark.parametrize("world", share([3, 1], 2))
def test_equals_eager_in_dynamo_alone(pools, world):
    # For plain tensors too, this backend draws new numbers when a checkpointed region runs again.
    names = [name for name in CASES if name != "checkpointed_dropout"]
    pools(world).run(equal_compiled, names, "eager", seconds=110)


DEEP = ["relu_of_product", "softmax", "to_other_dim", "summands_to_shard", "from_local_cuts", "two_draws", "set_rows", "attention"]


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, n in ((2, 1), (3, 3)) for name in share(DEEP, n)])
def test_equals_eager_by_inductor(pools, world, name):
    pools(world).run(equal_compiled, [name], "inductor", seconds=110)


# ---- every family's table of cases ----

CTC = [
    "ctc_loss_one",
    *(f"ctc_loss{form}_{r}" for form in ("", "_tensors", "_joined", "_joined_tensors") for r in ("none", "mean", "sum")),
]
# By why they raise.
REFUSED = {
    "torch.autograd.grad inside the function, which dynamo does not trace": [
        "batch_norm_second", "conv2d_second", "layer_norm_second", "rms_norm_second", "second_mm", "second_matmul", "second_matmul_broadcast",
        "second_matmul_vector", "second_linear", "second_linear_3",
    ],
    "nn.Parameter made inside the function, which dynamo does not trace": ["batch_norm_no_stats"],
    "sizes or branches that depend on values": [
        "bool_of_sum", *CTC, "embedding_max_norm", "embedding_renorm_",
        "gaussian_nll_loss_mean", "gaussian_nll_loss_none", "gaussian_nll_loss_sum", "index_mask", "index_mask_rows", "itself",
        "list_of_bools", "lstsq", "lstsq_by_pivots", "lstsq_ranks", "lstsq_residuals", "lstsq_singular_values", "lstsq_vectors",
        "masked_select", "one_hot_inferred", "repeat_interleave_each", "setitem_bool", "where_single",
    ],
    "values decide: equal, allclose": [
        "allclose", "allclose_itself", "equal_but_one", "equal_itself", "equal_other_sizes", "reductions.equal", "uneven_list.equal",
    ],
    "values decide how many elements there are, and a gradient is asked for": [
        "uneven_list.mask_elements", "uneven_list.mask_rows", "uneven_list.masked_select",
    ],
    "torch's fake kernel gives it another shape before 2.14": ["multilabel_margin_one_none"] if torch.__version__ < "2.14" else [],
    "torch's own kernel draws, by values": ["multinomial_replacement", "poisson"],
    "dynamo does not trace it of plain tensors either": [
        "generator", "random_", "random_from_to", "random_to", "trunc_normal_", "uneven_list.adamw", "uneven_list.clip_grad_norm_",
        "uneven_list.sgd",
    ],
}
# Whole, or cut along another dim, where torch takes the op apart before it comes here. (roll_flat: a reshape of uneven columns gathers.)
LAID_OUT_OTHERWISE = [
    "diagonal", "diagonal_batch", "diagonal_below", "einsum_diagonal", "safe_softmax", "safe_softmax_masked", "sdpa_broadcast_causal",
    *(["sdpa_3d"] if torch.__version__ < "2.14" else []), "roll_flat", "sdpa_no_batch",
    "sdpa_no_keys", "sdpa_no_keys_mask_bool", "slice_empty",
    "uneven_list.diagonal_columns", "uneven_list.diagonal_rows", "uneven_list.reshape", "uneven_list.unfold_columns",
]
LEFT_OUT = [
    "split_unsafe",  # writes into what unsafe_split returns, which reaches the base in no graph of torch
    "batch_norm_eval",  # running statistics that require gradients, which of plain tensors torch refuses
]


@pytest.mark.parametrize(("family", "part"), [(family, part) for family, parts in FAMILIES.items() for part in range(parts)])
def test_tables_of_cases(pools, family, part):
    """compiled.py tries more of their layouts, and more ranks."""
    names = [n for n in pools(2).run(names_of, family, (2,))[0] if not _listed(family, n, LEFT_OUT)]
    names = names[part :: FAMILIES[family]]
    alone = [n for n in names if _expected(family, n) != RIGHT]
    outcomes = pools(2).run(run_cases, family, names, (2,), together=8, alone=alone, seconds=110)[0]
    unexpected = [o for o in outcomes if o.kind != _expected(family, o.name)]
    assert outcomes and not unexpected, "\n".join(f"{o.name}: {o.kind} instead of {_expected(family, o.name)}, {o.text}" for o in unexpected)


# Of these the backward's collectives were called by some ranks alone: twice, or in another order.
PARTED = [
    ("indexing", "index_put_pair", "S(1) empty, S(0) empty, S(0) empty, S(0) even"),
    ("normalization", "layer_norm_two", "S(2) even, S(1) empty, S(1) uneven"),
    ("reductions", "vector_norm_dim", "S(0) uneven"),
]


@pytest.mark.parametrize(("family", "name", "where"), PARTED)
def test_ranks_call_the_same_collectives(pools, family, name, where):
    outcome = pools(3).run(run_placed, family, name, where, (3,))[0]
    assert outcome.kind == RIGHT, outcome


def _listed(family, name, names):
    return name in names or f"{family}.{name}" in names


def _expected(family, name):
    if any(_listed(family, name, names) for names in REFUSED.values()):
        return RAISES
    return OTHER_LAYOUT if _listed(family, name, LAID_OUT_OTHERWISE) else RIGHT


# ---- guards ----


def _counting(function, backend="aot_eager", **options):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def other_sizes():
    """Compiled for 8 rows, called with others: the ranks compile together, however many of their own rows change."""

    def loss(x):
        return x.softmax(0).sum(1) + x.mean()

    compiled, counter = _counting(loss)
    frames = []
    for n in (8, 7, 12, 1, 8):
        whole = torch.randn(n, 6, generator=torch.Generator().manual_seed(n))
        plain, ours = whole.clone().requires_grad_(), spread(whole, S0, grad=True)
        want, got = loss(plain), compiled(ours)
        torch.testing.assert_close(_whole(got), want)
        want.square().sum().backward()
        _whole(got.square().sum()).backward()
        torch.testing.assert_close(_whole(ours.grad), plain.grad)
        frames.append(counter.frame_count)
    agree(frames, "graphs")
    assert frames[0] == 1 and frames[1] == 2


def other_cuts():
    compiled, counter = _counting(lambda x: x.redistribute(placements=[R]) * 2)
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    frames = []
    for cut in ([4, 4], [5, 3], [8, 0], [0, 8], [4, 4]) if dist.get_world_size() == 2 else ([3, 3, 2], [4, 2, 2], [0, 8, 0], [3, 3, 2]):
        out = compiled(spread(whole, S0, cuts={0: [(n, 6) for n in cut]}))
        torch.testing.assert_close(out.full_tensor(), whole * 2)
        frames.append(counter.frame_count)
    assert frames[:3] == [1, 2, 3] and frames[-1] == frames[-2]  # the first cut again is the first graph


def other_modes():
    x, plain = spread(torch.ones(8, 6), S0), torch.full((6,), 2.0)
    compiled, _ = _counting(lambda x, y: x * y)
    with shardtensor.implicit_replication():
        torch.testing.assert_close(compiled(x, plain).full_tensor(), torch.full((8, 6), 2.0))
    with pytest.raises(Exception, match=r"plain torch\.Tensor"):
        compiled(x, plain)
    gathers, _ = _counting(lambda x: torch.linalg.matrix_exp(x @ x.t()))
    gathers(x)
    with shardtensor.strict_mode(), pytest.raises(Exception, match="strict mode forbids"):
        gathers(x)


def other_handlers():
    x = spread(torch.ones(8, 6), S0)
    compiled, _ = _counting(lambda x: x.sin())
    torch.testing.assert_close(compiled(x).full_tensor(), torch.ones(8, 6).sin())
    ShardTensor.register_dispatch_handler(torch.ops.aten.sin.default, lambda t: t * 3)
    try:
        torch.testing.assert_close(compiled(x).full_tensor(), torch.full((8, 6), 3.0))
    finally:
        ShardTensor.unregister_handler(torch.ops.aten.sin.default)
    torch.testing.assert_close(compiled(x).full_tensor(), torch.ones(8, 6).sin())


def other_offset():
    compiled, counter = _counting(lambda x: x[:, 1:3] * 2)
    base = spread(torch.arange(56.0).reshape(7, 8), S0)
    for start, frames in ((0, 1), (2, 2), (0, 2)):
        part = compiled(base[:, start : start + 6])
        torch.testing.assert_close(_whole(part), torch.arange(56.0).reshape(7, 8)[:, start + 1 : start + 3] * 2)
        assert counter.frame_count == frames


def other_mesh():
    """What is given no mesh takes the innermost `with mesh:`, or all ranks in a row."""
    rank, world = mesh_here().get_rank(), mesh_here().size()
    row, reverse = DeviceMesh("cpu", list(range(world))), DeviceMesh("cpu", list(reversed(range(world))))
    compiled, counter = _counting(lambda t: ShardTensor.from_local(t, placements=[S0]).full_tensor() * 2)
    up = torch.arange(float(world)) * 2
    for mesh, want, frames in ((row, up, 1), (reverse, up.flip(0), 2), (None, up, 3), (row, up, 3)):
        with mesh or contextlib.nullcontext():
            torch.testing.assert_close(compiled(torch.tensor([float(rank)])), want)
        assert counter.frame_count == frames


def equal_layouts():
    """One graph: a layout may have two objects in Python."""
    whole = torch.arange(42.0).reshape(7, 6)
    compiled, counter = _counting(lambda x: x.redistribute(placements=[R]) * 2)
    x = spread(whole)
    first = x._layout
    torch.testing.assert_close(compiled(x).full_tensor(), whole * 2)
    second = _C.Layout(first.mesh, first.placements, first.cuts)
    y = spread(whole)
    assert y._layout is second is not first
    torch.testing.assert_close(compiled(y).full_tensor(), whole * 2)
    assert counter.frame_count == 1


GUARDS = ["equal_layouts", "other_cuts", "other_handlers", "other_mesh", "other_modes", "other_offset", "other_sizes"]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", GUARDS)
def test_guards(pools, name, world):
    pools(world).run(globals()[name])


# ---- dynamic shapes ----

# One graph for all lengths; every other op is compiled for each.
DYNAMIC = {
    "mul": lambda x, w: x * 2,
    "relu": lambda x, w: torch.relu(x) + x * x,
    "mm": lambda x, w: x @ w,
    "sum": lambda x, w: x.sum(),
    "sum_of_columns": lambda x, w: x.sum(1),
    "mean": lambda x, w: x.mean(),
    "mean_of_columns": lambda x, w: x.mean(1),
    "mean_of_rows": lambda x, w: x.mean(0),
    "var_of_columns": lambda x, w: x.var(1),
    "var_of_rows": lambda x, w: x.var(0),
    "amax_of_rows": lambda x, w: x.amax(0),
    "amax_of_columns": lambda x, w: x.amax(1),
    "max": lambda x, w: x.max(1)[0],
    "max_of_rows": lambda x, w: x.max(0)[0],
    "norm": lambda x, w: torch.linalg.vector_norm(x),
    "softmax": lambda x, w: x.softmax(1),
    "log_softmax_of_rows": lambda x, w: x.log_softmax(0),
    "layer_norm": lambda x, w: F.layer_norm(x, (6,)),
    "rms_norm": lambda x, w: F.rms_norm(x, (6,)),
    "mse_loss": lambda x, w: F.mse_loss(x, x * 2),
    "huber_loss": lambda x, w: F.huber_loss(x, x * 2, reduction="sum"),
    "cross_entropy": lambda x, w: F.cross_entropy(x, x.argmax(1)),
    "attention": lambda x, w: _attention(torch.stack([x, x * 2]).view(2, -1, 2, 3).transpose(1, 2)),
    "attention_of_one_head": lambda x, w: _attention(x[None, None]),
    "attention_of_batches": lambda x, w: _attention(x.view(-1, 1, 2, 3)),
    "linear": lambda x, w: F.linear(x, w.t()),
    "zeros_like": lambda x, w: torch.zeros_like(x) + x,
    "gelu_sum": lambda x, w: F.gelu(x @ w).sum(1),
    "transpose": lambda x, w: x.t() * 1,
    "permute": lambda x, w: x.permute(1, 0) * 1,
    "reshape": lambda x, w: x.reshape(-1, 2, 3),
    "reshape_to_rows": lambda x, w: x.view(-1, 2, 3).view(-1, 3),
    "flatten": lambda x, w: x.flatten() * 2,
    "unsqueeze": lambda x, w: x[:, None] * w,
    "expand": lambda x, w: x[:, None].expand(-1, 2, -1) * 2,
    "row": lambda x, w: x[0],
    "first_rows": lambda x, w: x[1:3],
    "row_written": lambda x, w: _with_row(x * 1),
    "rows_written": lambda x, w: (x * 1).slice_scatter(x[:2] * w[:2], 0, 1, 3),
    "columns": lambda x, w: x[:, 1:3],
    "last_column": lambda x, w: x[:, -1],
    "last_columns": lambda x, w: x[:, -2:],
    "split": lambda x, w: x.split(2, 1)[1],
    "cat": lambda x, w: torch.cat([x, x * 2], 1),
    "stack": lambda x, w: torch.stack([x, x * 2]),
    "repeat": lambda x, w: x.repeat(1, 2),
    "flip": lambda x, w: x.flip(1),
    "flip_of_rows": lambda x, w: x.flip(0),
    "roll": lambda x, w: x.roll(1, 1),
    "roll_of_rows": lambda x, w: x.roll(1, 0),
    "cat_of_rows": lambda x, w: torch.cat([x, x]),
    "cat_of_rows_and_a_row": lambda x, w: torch.cat([w[:1], x]) * 2,
    "rows": lambda x, w: x[1:-1],
    "second_half_of_rows": lambda x, w: x.chunk(2)[1] * 2,
    "every_second_row": lambda x, w: x[1::2] * 2,
    "rows_apart": lambda x, w: sum(part.sum() for part in x.split([2, x.shape[0] - 2])),
    "pad_of_rows": lambda x, w: F.pad(x, (0, 0, 1, 2)),
    "cropped_rows": lambda x, w: F.pad(x, (0, 0, -1, -1)),
    "roll_back": lambda x, w: x.roll(-2, 0),
    "rolled": lambda x, w: x.roll((1, 1), (0, 1)),
    "gather": lambda x, w: x.gather(1, x.argsort(1)),
    "index": lambda x, w: x[:, [2, 0]],
    "index_select": lambda x, w: x.index_select(1, x[0].argsort()),
    "sort": lambda x, w: x.sort(1)[0],
    "sort_of_rows": lambda x, w: x.sort(0)[0],
    "topk": lambda x, w: x.topk(2, 1)[0],
    "masked_fill": lambda x, w: x.masked_fill(x > 0, 1.0),
    "where": lambda x, w: torch.where(x > 0, x, x.mean()),
    "in_place": lambda x, w: (x * 2).add_(1).mul_(x),
    "to_replicate": _move(R),
    "to_other_dim": _move(S1),
    "from_replicate": lambda x, w: w.redistribute(placements=[S0]) * x.sum(),
    "summands": lambda x, w: x.sum(0).redistribute(placements=[R]),
}
# Also these, if no gradient is needed.
DYNAMIC_FORWARD = {
    "argmax": lambda x, w: x.argmax(1),
    "argmax_of_all": lambda x, w: x.argmax(),
    "argsort": lambda x, w: x.argsort(1),
    "cumsum": lambda x, w: x.cumsum(1),
    "any": lambda x, w: (x > 0).any(0),
    "isnan": lambda x, w: x.isnan(),
    "var_of_complex_rows": lambda x, w: torch.complex(x, x * 2).var(0),
}
# Calls of every family that the list above lacks.
DYNAMIC_FAMILIES = {
    "logsumexp_of_rows": lambda x, w: x.logsumexp(0),
    "std": lambda x, w: x.std(),
    "renorm": lambda x, w: x.renorm(2, 0, 1.0),
    "cumsum_of_rows": lambda x, w: x.cumsum(0),
    "logcumsumexp_of_rows": lambda x, w: x.logcumsumexp(0),
    "cummax_of_rows": lambda x, w: x.cummax(0)[0],
    "topk_of_rows": lambda x, w: x.topk(2, 0)[0],
    "median": lambda x, w: x.median(1)[0],
    "tril": lambda x, w: x.tril(),
    "triu": lambda x, w: x.triu(1),
    "embedding": lambda x, w: F.embedding(x.argmax(1), w) * x,
    "embedding_of_cut_rows": lambda x, w: F.embedding(w.argmax(1), x),
    "embedding_bag": lambda x, w: F.embedding_bag(x.argsort(1), w),
    "one_hot": lambda x, w: F.one_hot(x.argmax(1), 6) * x,
    "rows_by_index": lambda x, w: x[[2, 0, 1], [1, 2, 3]],
    "index_select_of_rows": lambda x, w: x.index_select(0, w[:3].argmax(1)),
    "gather_of_rows": lambda x, w: x.gather(0, w[:3].argsort(1)),
    "index_put_of_rows": lambda x, w: x.index_put((w[:3].argmax(1),), w[:3]),
    "index_add_of_rows": lambda x, w: x.index_add(0, w[:3].argmax(1), w[:3]),
    "scatter_add_of_rows": lambda x, w: x.scatter_add(0, w[:3].argsort(1), w[:3]),
    "columns_written": lambda x, w: _with_columns(x * 1),
    "pad": lambda x, w: F.pad(x, (1, 2)),
    "chunk": lambda x, w: x.chunk(2, 1)[1],
    "unbind": lambda x, w: x.unbind(1)[1],
    "unfold": lambda x, w: x.unfold(1, 2, 2),
    "diagonal": lambda x, w: x.view(-1, 2, 3).diagonal(1, 1, 2),
    "diag_embed": lambda x, w: x.diag_embed(),
    "new_zeros": lambda x, w: x.new_zeros(x.shape) + x,
    "einsum": lambda x, w: torch.einsum("ij,ik->jk", x, x),
    "bilinear": lambda x, w: F.bilinear(x, x, w[None]),
    "solve": lambda x, w: torch.linalg.solve(w, x.t()),
    "cholesky": lambda x, w: torch.linalg.cholesky(x.view(-1, 3, 2).mT @ x.view(-1, 3, 2) + w[:2, :2]),
    "det": lambda x, w: torch.linalg.det(x.view(-1, 2, 3) @ x.view(-1, 3, 2)),
    "cdist": lambda x, w: torch.cdist(x, w),
    "foreach": lambda x, w: torch._foreach_add([x, x * 2], torch._foreach_mul([x, x], [x, x]))[1],
    "multi_margin_loss": lambda x, w: F.multi_margin_loss(x, x.detach().argmax(1)),
    "multilabel_margin_loss": lambda x, w: F.multilabel_margin_loss(x, x.detach().argsort(1)),
    "nll_of_one_sample": lambda x, w: F.nll_loss(x[:, 0], w[0].argmax()),
    "dist": lambda x, w: torch.dist(x, x * 2 + 1),
    "written_into": lambda x, w: torch.mul(x.detach(), 2, out=torch.zeros_like(x)) + x,
    "as_complex": lambda x, w: torch.view_as_complex(x.view(-1, 3, 2)).abs(),
    "as_real": lambda x, w: torch.view_as_real(torch.complex(x, x * 2)).sum(2),
    "bits": lambda x, w: x.detach().view(torch.int32).view(torch.float64) * x,
    "transposed_in_place": lambda x, w: (x * 1).t_(),
    "bce": lambda x, w: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "kl_div": lambda x, w: F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
    "cosine_similarity": lambda x, w: F.cosine_similarity(x, x * 2 + 1),
    "group_norm": lambda x, w: F.group_norm(x[:, :, None], 2),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x, w: F.instance_norm(x.view(-1, 2, 3)),
    "conv2d": lambda x, w: F.conv2d(_images(x), w[:2, :4].view(2, 2, 1, 2), padding=1),
    "conv2d_channels_last": lambda x, w: F.conv2d(_images(x).to(memory_format=torch.channels_last), w[:2, :2, None, None]),
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x.view(-1, 2, 3), w[:2, :4].view(2, 2, 2)),
    "max_pool": lambda x, w: F.max_pool2d(_images(x), 2),
    "avg_pool": lambda x, w: F.avg_pool2d(_images(x), 2),
    "adaptive_pool": lambda x, w: F.adaptive_avg_pool2d(_images(x), (1, 2)),
    "grid_sample": lambda x, w: F.grid_sample(x.view(-1, 1, 2, 3), x.view(-1, 1, 3, 2).sigmoid(), align_corners=False),
    "attention_of_groups": lambda x, w: _attention_of_groups(torch.stack([x, x * 2]).view(2, -1, 6, 1).transpose(1, 2)),
    "causal_attention": lambda x, w: _attention(torch.stack([x, x * 2]).view(2, -1, 2, 3).transpose(1, 2), is_causal=True),
}
# Where torch's own code reads sizes: ours does not, or reads those of dims that do not grow.
DYNAMIC_READ = {
    "gru_cell": lambda x, w: torch.gru_cell(x, x[:, :2], w, w[:, :2]),
    "lstm_cell": lambda x, w: torch.cat(torch.lstm_cell(x, (x[:, :3], x[:, 3:]), torch.cat([w, w]), torch.cat([w, w])[:, :3]), 1),
    "trace": lambda x, w: (x @ x.t()).trace(),
    "masked_index_of_rows": lambda x, w: torch.ops.aten._unsafe_masked_index(x, w[:3, :1] > 1, [w[:3].argmax(1), None], 1.5),
    "cross_entropy_of_rows": lambda x, w: F.cross_entropy(x.t(), x.detach().argmax(0), x.detach()[:, 0].exp(), label_smoothing=0.1),
}
if torch.__version__ < "2.14":  # it loses track of a product of symbols
    del DYNAMIC_FAMILIES["diag_embed"]
if torch.__version__ < "2.13":  # it solves and factors for each length
    del DYNAMIC_FAMILIES["cholesky"], DYNAMIC_FAMILIES["det"]
# Calls that need numbers along a cut dim: cuts that are no formula of a length, and sizes that torch's own code reads as
# numbers.
SPECIALISED = {
    "prod_of_rows": lambda x, w: x.prod(0),
    "interpolate": lambda x, w: F.interpolate(x[:, None], scale_factor=2),
}


def _attention(x, **options):
    return F.scaled_dot_product_attention(x, x, x, **options)


def _attention_of_groups(x):
    return F.scaled_dot_product_attention(x, x[:, ::3], x[:, 1::3], enable_gqa=True)


def _images(x):
    return torch.stack([x.view(-1, 2, 3)] * 2, 1)


def _with_columns(x):
    x[:, 1:3] = 1.0
    return x


def _with_row(x):
    x[1] = 1.0
    return x


def dynamic(functions, one_graph, grad=True, uneven=False):
    """`uneven`: lengths of all remainders by the number of ranks but 0."""
    several, world = [], mesh_here().size()
    left_out = [*NUMBERS_IF_UNEVEN, *(BY_REMAINDER if world > 2 else [])] if uneven else []
    tried = [(n, f) for n, f in globals()[functions].items() if n not in left_out]
    lengths = [(8 + 6 * i) * world + 1 + i % (world - 1) for i in range(max(world - 1, 2))] if uneven else [n * world for n in (4, 6, 10)]
    tried = share(tried, {2: 2, 3: 4}.get(world, 9), int(uneven))
    for name, function in tried:
        compiled, counter = _counting(function, dynamic=True)
        for n in lengths:
            whole = torch.randn(n, 6, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
            weight = torch.eye(6, dtype=torch.float64) + 1
            results = []
            for run in (function, compiled):
                x, w = spread(whole, S0, grad=grad), spread(weight, R, grad=grad)
                out = run(x, w)
                if grad:
                    _whole(out.sum()).backward()
                results.append((_form(out), _whole(out.detach()), _whole(x.grad) if grad else None))
            assert results[0][0] == results[1][0], f"{name}, {n} rows: {results[1][0]} instead of {results[0][0]}"
            torch.testing.assert_close(results[1][1:], results[0][1:], msg=lambda m, name=name: f"{name}: {m}")
        if counter.frame_count > 1:
            several.append((name, counter.frame_count))
    assert not (one_graph and several), several


@pytest.mark.parametrize("world", [2, 3])
def test_one_graph_for_all_lengths(pools, world):
    pools(world).run(dynamic, "DYNAMIC", True, seconds=110)


def test_one_graph_for_all_lengths_in_every_family(pools):
    pools(2).run(dynamic, "DYNAMIC_FAMILIES", True, seconds=110)


@pytest.mark.parametrize("uneven", [False, True])
def test_one_graph_where_torch_reads_sizes(pools, uneven):
    pools(2).run(dynamic, "DYNAMIC_READ", True, uneven=uneven, seconds=110)


# The indices that a rank reads of other ranks are symbols only if pieces are equal.
NUMBERS_IF_UNEVEN = ["flip_of_rows", "roll_of_rows", "roll_back", "rolled", "logcumsumexp_of_rows", "cdist", "instance_norm"]
# Which ranks a rank reads from, or where a step begins in its piece, depends on the remainder by the number of ranks.
BY_REMAINDER = ["cat_of_rows", "cat_of_rows_and_a_row", "second_half_of_rows", "every_second_row"]


@pytest.mark.parametrize(("world", "functions"), [(2, "DYNAMIC"), (3, "DYNAMIC"), (4, "DYNAMIC"), (2, "DYNAMIC_FAMILIES")])
def test_one_graph_for_all_uneven_lengths(pools, world, functions):
    pools(world).run(dynamic, functions, True, uneven=True, seconds=110)


@pytest.mark.parametrize("world", [2, 3])
def test_one_graph_for_all_lengths_without_gradients(pools, world):
    pools(world).run(dynamic, "DYNAMIC_FORWARD", True, grad=False)


@pytest.mark.parametrize("world", [2, 3])
def test_other_ops_are_compiled_for_each_length(pools, world):
    pools(world).run(dynamic, "SPECIALISED", False, seconds=110)


# With the same seed as in eager mode.
RANDOM = {
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout_of_product": lambda x: F.dropout(x, 0.1) @ x.new_ones(6, 2),
    "normal": lambda x: torch.normal(x, x.abs()),
    "rand_like": lambda x: torch.rand_like(x) + x,
    "uniform": lambda x: x.clone().uniform_(),
}


@pytest.mark.parametrize("name", RANDOM)
@on_ranks(2)
def test_random_ops_are_one_graph(name):
    function, world = RANDOM[name], mesh_here().size()
    compiled, counter = _counting(function, dynamic=True)
    frames = []
    for n in (8 * world, 12 * world, 16 * world + 1, 20 * world + 1):
        results = []
        for run in (function, compiled):
            torch.manual_seed(n)
            x = spread(torch.arange(6.0 * n).reshape(n, 6) / 30, S0, grad=True)
            out = run(x)
            if out.requires_grad:
                _whole(out.sum()).backward()
            results.append((_whole(out.detach()), None if x.grad is None else _whole(x.grad), torch.rand(1)))
        torch.testing.assert_close(results[1], results[0])
        frames.append(counter.frame_count)
    assert frames == [1, 1, 2, 2], frames


@on_ranks(2, 3)
def test_unbacked_sizes():
    """mark_unbacked is taken as mark_dynamic: one graph for lengths that the ranks divide, one for others."""
    from torch._dynamo.decorators import mark_unbacked

    world = mesh_here().size()

    def function(x, w):
        return torch.relu(x @ w).softmax(0) * x.shape[0]

    for placement in (S0, R):
        torch._dynamo.reset()
        compiled, counter = _counting(function)
        for n in (4 * world, 6 * world, 4 * world + 1, 6 * world + 1):
            x, w = torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).double(), torch.eye(3).double() + 1
            ours, plain = spread(x, placement, grad=True), x.clone().requires_grad_()
            mark_unbacked(ours, 0)
            got, want = compiled(ours, spread(w, R)), function(plain, w)
            torch.testing.assert_close(_whole(got), want)
            want.square().sum().backward()
            _whole(got.square().sum()).backward()
            torch.testing.assert_close(_whole(ours.grad), plain.grad)
        assert counter.frame_count == (2 if placement == S0 else 1)


def _gradients_of_plain(x, w):
    """The graph's roots are plain; there is no ShardTensor among its leaves."""
    local = x.to_local().detach().requires_grad_()
    y = ShardTensor.from_local(local, x.device_mesh, [S0], shape=x.shape, sharding_shapes=rows(x.device_mesh.size(), 6)) @ w.detach()
    y.square().sum().full_tensor().backward()
    return local.grad


def _gradients_of_leaves(x, w):
    F.linear(x.softmax(0), w).mean(0).square().sum().backward()
    return x.grad, w.grad


def _gradients_asked_for(x, w):
    return torch.autograd.grad((x @ w).relu().square().sum().full_tensor(), (x, w))


def compiled_autograd():
    """The engine runs the backward of ShardTensors; compiled autograd still runs that of plain tensors."""
    from torch._dynamo import compiled_autograd

    graphs = []

    def compiler(graph):
        graphs.append(graph)
        return graph

    x, w = torch.randn(7, 6, generator=torch.Generator().manual_seed(1)).double(), torch.eye(6).double() + 1
    for function in (_gradients_of_plain, _gradients_of_leaves, _gradients_asked_for):
        want = function(spread(x, grad=True), spread(w, R, grad=True))
        with compiled_autograd._enable(compiler), pytest.warns(UserWarning, match="compiled autograd cannot trace the backward of ShardTensors"):
            got = function(spread(x, grad=True), spread(w, R, grad=True))
        torch.testing.assert_close(pytree.tree_map(_whole, got), pytree.tree_map(_whole, want))
        assert not graphs
        with torch._dynamo.config.patch(compiled_autograd=True), pytest.warns(UserWarning, match="compiled autograd cannot"):
            got = torch.compile(function, backend="eager")(spread(x, grad=True), spread(w, R, grad=True))
        torch.testing.assert_close(pytree.tree_map(_whole, got), pytree.tree_map(_whole, want))
        torch._dynamo.reset()
    plain = x.clone().requires_grad_()
    with compiled_autograd._enable(compiler):
        plain.square().sum().backward()
    torch.testing.assert_close(plain.grad, 2 * x)
    assert graphs


def test_compiled_autograd(pools):
    pools(2).run(compiled_autograd)


def _through(view, write):
    def run(x):
        y = x * 1
        write(view(y))
        return y * 2

    return run


def _add_row(t):
    t[0] += 1


def _write_twice(x):
    y = x * 1
    before, row = y.sum(), y[2]
    row += 1
    between = y * 3
    row *= y[-1].sum()
    after = row * 1
    y[-1] -= y.sum(0)
    return before, between, after, y.sum(), y


def _write_and_return(x):
    y = x * 1
    row = y[3]
    row.mul_(2)
    return y, row


# Writes through rows, which are views at their owners, and through views that have to move data, which are copied back into the base.
MOVED_WRITES = {
    "row": _through(lambda y: y, _add_row),
    "last_row": _through(lambda y: y[-1], lambda t: t.mul_(5)),
    "row_of_rows": _through(lambda y: y[1:3], _add_row),
    "row_of_columns": _through(lambda y: y.t()[:, 2], lambda t: t.exp_()),
    "part_of_row": _through(lambda y: y[2, 1:3], lambda t: t.fill_(9.0)),
    "row_of_row": _through(lambda y: y[2].view(2, 3), _add_row),
    "reshaped": _through(lambda y: y.view(2, y.shape[0] // 2, y.shape[1])[1], _add_row),
    "flattened": _through(lambda y: y.view(-1)[5:9], lambda t: t.zero_()),
    "twice": _write_twice,
    "and_return": _write_and_return,
}


def moved_writes(names, backend, kinds=("uneven", "even", "empty")):
    """As in plain torch, with gradients; inputs as well as results of the graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    for name, grad, cuts in itertools.product(names, (False, True), kinds):
        torch._dynamo.reset()
        function, world = MOVED_WRITES[name], mesh_here().size()
        cut = {"uneven": [5, 3, 0], "even": [8 // world] * world if world < 3 else [3, 3, 2], "empty": [0, 8, 0]}[cuts][:world]
        compiled = torch.compile(function, backend=CompileCounterWithBackend(backend), fullgraph=True)
        plain = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)).double().requires_grad_(grad)
        ours = spread(plain.detach(), S0, cuts={0: [(n, 6) for n in cut]}, grad=grad)
        want, got = function(plain), compiled(ours)
        torch.testing.assert_close(pytree.tree_map(_whole, got), want, msg=lambda m: f"{name}, {cuts}: {m}")  # noqa: B023
        if grad:
            sum(t.square().sum() for t in pytree.tree_leaves(want)).backward()
            _whole(sum(t.square().sum() for t in pytree.tree_leaves(got))).backward()
            torch.testing.assert_close(_whole(ours.grad), plain.grad, msg=lambda m: f"{name}, {cuts}: {m}")  # noqa: B023


@pytest.mark.parametrize(("name", "world"), share(list(itertools.product(MOVED_WRITES, (2, 3))), 3, 1))
def test_writes_through_moved_views(pools, name, world):
    pools(world).run(moved_writes, [name], "aot_eager")


def test_writes_through_moved_views_by_inductor(pools):
    pools(2).run(moved_writes, ["row"], "inductor", ["uneven"])


@on_ranks(2, 3)
def test_writes_through_moved_views_of_inputs():
    """Also of a length that grows; and a view that was taken outside, which raises as in eager mode."""

    def function(x):
        x[0] += 1
        return x * 2

    compiled, counter = _counting(function, dynamic=True)
    for n in (8, 9, 12, 9):
        plain = torch.randn(n, 6, generator=torch.Generator().manual_seed(n)).double()
        ours = spread(plain, S0)
        row, moved = ours[0], ours.view(-1)[1]
        torch.testing.assert_close(_whole(compiled(ours)), function(plain))
        torch.testing.assert_close(_whole(ours), plain)
        torch.testing.assert_close(_whole(row + 0), plain[0])
        with pytest.raises(RuntimeError, match="is read after its base tensor was written"):
            moved + 0
    agree(counter.frame_count, "graphs")
    assert counter.frame_count <= 2


# The tensor that is written, made of a leaf of 8 rows and 6 columns.
WRITTEN_ARGUMENTS = {
    "result": lambda x: x * 1.5,
    "row": lambda x: (x * 1.5)[1],
    "columns": lambda x: (x * 1.5)[:, 1:3],
    "transposed": lambda x: (x * 1.5).t(),
    "summands": lambda x: (x * 1.5).sum(0),
    "number": lambda x: (x * 1.5).sum(),
}


@pytest.mark.parametrize(("name", "placement"), list(itertools.product(WRITTEN_ARGUMENTS, (S0, S1))))
@on_ranks(2)
def test_gradients_of_written_arguments(name, placement):
    """The gradients of a graph's result, alone and together with what it has written."""

    def function(a):
        a.mul_(2)
        return a.cos()

    for reads in (lambda a, out: out.sum() + a.square().sum(), lambda a, out: out.sum()):
        torch._dynamo.reset()
        grads = []
        for at, f in ((None, function), (placement, torch.compile(function, backend="aot_eager"))):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)).double()
            x = x.requires_grad_() if at is None else spread(x, at, grad=True)
            a = WRITTEN_ARGUMENTS[name](x)
            out = f(a)
            reads(a, out).backward()
            grads.append(_whole(x.grad))
        torch.testing.assert_close(grads[1], grads[0])


# Two arguments that may be views of the same tensor of 8 rows and 4 columns.
VIEWS = {
    "columns": (lambda y: (y[:, :2], y[:, 2:]), False),
    "rows": (lambda y: (y[:4], y[4:]), False),
    "moved_row": (lambda y: (y[1] * 1, y[2]), False),
    "diagonal": (lambda y: (y[:4].diagonal(), y[4:]), False),
    "unfolded": (lambda y: (y * 1, y.unfold(0, 3, 3)), False),
    "tensor_and_row": (lambda y: (y, y[1]), True),
    "row_and_tensor": (lambda y: (y[1], y), True),
    "tensor_and_column": (lambda y: (y, y[:, 2]), True),
    "crossing": (lambda y: (y[:, :3], y[:, 1:]), True),
}


@on_ranks(2, 3)
def test_views_as_arguments(backend="aot_eager"):
    """A graph takes views by their own layouts. One that writes an argument refuses others that share the memory."""

    def read(a, b):
        return a * 2 + b.sum(), b * 3, a.sum()

    def write(a, b):
        a += 1
        return a * 2, b * 3

    for name, (views, overlap) in VIEWS.items():
        for function in (read, write):
            torch._dynamo.reset()
            plain = torch.randn(8, 4, generator=torch.Generator().manual_seed(5)).double()
            ours = spread(plain, S0)
            compiled = torch.compile(function, backend=backend, fullgraph=True)
            if function is write and overlap:
                with pytest.raises(RuntimeError, match="a compiled function writes one of its arguments"):
                    compiled(*views(ours))
                continue
            got, want = compiled(*views(ours)), function(*views(plain))
            torch.testing.assert_close([_whole(t) for t in (*got, ours)], [*want, plain], msg=lambda m: f"{name}: {m}")  # noqa: B023


@on_ranks(2)
def test_views_as_arguments_with_gradients():
    """Views of an intermediate result of eager mode."""

    def function(a, b):
        return (a * b.sum()).relu(), b.exp()

    for views in (lambda y: (y, y[1]), lambda y: (y.t(), y.diagonal()), lambda y: (y[2:], y[:, 1:3])):
        torch._dynamo.reset()
        leaf = torch.randn(8, 4, generator=torch.Generator().manual_seed(5)).double()
        grads = []
        for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
            x = spread(leaf, S0, grad=True)
            _whole(sum(t.square().sum() for t in run(*views(x * 2)))).backward()
            grads.append(_whole(x.grad))
        torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize(("shard", "dim"), list(itertools.product((None, 0, 1), (0, 1))))
@on_ranks(2)
def test_from_local_of_a_graphs_sizes(shard, dim):
    """from_local's `shape` and `stride` may be a graph's symbols."""
    from shardtensor import Replicate, Shard, ShardTensor

    world = mesh_here().size()
    at = -1 if shard is None else shard

    def function(x):
        shape = [n * world if d == at else n for d, n in enumerate(x.shape)]
        placement = Replicate() if shard is None else Shard(shard)
        given = ShardTensor.from_local(x, mesh_here(), [placement], run_check=False, shape=shape, stride=(shape[1], 1))
        return (given * 2).to_local(), given.sum()

    compiled, counter = _counting(function)
    for n in (4, 6, 8, 9):
        local = torch.randn(*((n, 4) if dim == 0 else (4, n)))
        torch._dynamo.mark_dynamic(local, dim)
        (got, total), (want, all_of_it) = compiled(local), function(local)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(_whole(total), _whole(all_of_it))
        assert got.stride() == want.stride()
    assert counter.frame_count == 1


@on_ranks(2)
def test_memory_formats_where_sizes_are_symbols():
    """A memory format that is asked for holds in graphs whose sizes are symbols."""
    from shardtensor import Shard

    last = torch.channels_last

    def function(x):
        y = x.transpose(1, 2)
        return y.contiguous(), y.clone(memory_format=torch.contiguous_format), x.to(memory_format=last), torch.zeros_like(y, memory_format=last)

    whole = torch.randn(4, 6, 4, 5)
    for shard in (0, 3):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", dynamic=True)
        for got, want in zip(compiled(spread(whole, Shard(shard))), function(whole), strict=True):
            assert got.stride() == want.stride(), (shard, got.stride(), want.stride())
            assert got._local_tensor.is_contiguous() == want.is_contiguous()
            torch.testing.assert_close(_whole(got), want)


@pytest.mark.parametrize(("world", "beyond"), share([(2, 0), (2, 1), (3, 0), (3, 1)], 3))
@on_ranks()
def test_one_graph_for_two_lengths_at_once(beyond):
    """Two sequences joined, as text and image tokens are, and parted again: neither result has cuts that follow one length."""

    def function(x, y, w):
        joined = torch.cat([x * 2, y]) @ w
        joined.narrow(0, 1, x.shape[0]).mul_(3)
        return joined.relu(), joined.narrow(0, 2, x.shape[0]).clone() * x

    compiled, counter = _counting(function, dynamic=True)
    world = mesh_here().size()
    for rows in ((6, 4), (10, 6), (8, 5)):
        whole = [torch.randn(n * world + beyond, 2, generator=torch.Generator().manual_seed(n)).double() for n in rows]
        results = []
        for run in (function, compiled):
            x, y = (spread(t, S0, grad=True) for t in whole)
            out = run(x, y, spread(torch.eye(2).double() + 1, R))
            _whole(sum(t.sum() for t in out)).backward()
            results.append([_whole(t.detach()) for t in (*out, x.grad, y.grad)])
        torch.testing.assert_close(results[1], results[0])
    assert counter.frame_count == 1


# Of 6 and 5 rows two ranks have one piece as before; of 3 and 2 a piece has one row.
HISTORY = (7, 6, 5, 8, 9, 3, 4, 12, 13, 2, 11)
HISTORY_OF_JOINS = (33, 58, 83, 64, 37)


def compiles_as_often(functions, limit, lengths):
    """A rank that compiles more often than others reaches torch's limit alone. Then it runs eager mode, which may send otherwise."""
    from torch._dynamo.testing import CompileCounterWithBackend

    for name, function in ((n, DYNAMIC[n]) for n in functions):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled, weight = torch.compile(function, backend=counter), torch.eye(6).double() + 1
        mine = []
        with torch._dynamo.config.patch(recompile_limit=limit):
            for n in lengths:
                whole = torch.randn(n, 6, generator=torch.Generator().manual_seed(n)).double()
                got = compiled(spread(whole, S0), spread(weight, R))
                torch.testing.assert_close(_whole(got), _whole(function(spread(whole, S0), spread(weight, R))), msg=lambda m: f"{name}, {n}: {m}")  # noqa: B023
                mine.append(counter.frame_count)
        agree(mine, name)


@pytest.mark.parametrize(("world", "limit"), [(2, 3), (3, 3), (2, 99)])
def test_ranks_compile_as_often(pools, world, limit):
    functions = ["mul", "mm", "flip_of_rows", "sort_of_rows", "to_other_dim", "repeat"]
    pools(world).run(compiles_as_often, functions, limit, HISTORY)


def test_ranks_compile_joins_as_often(pools):
    """Each rank sends to and receives from others than its neighbours; all compare the bounds of all pieces."""
    pools(4).run(compiles_as_often, ["cat_of_rows"], 99, HISTORY_OF_JOINS)


@on_ranks(2, 3)
def test_a_piece_as_long_as_another_tensor():
    """On rank 0, x's piece is as long as y. What makes x's length a number must leave y's a symbol there, as on the other ranks."""
    world = mesh_here().size()
    for function in (lambda x, y: y.repeat(2, 1), lambda x, y: torch.cat([y, x.mean(0, True)])[1:]):
        both = lambda x, y, function=function: (x.roll(1, 0), function(x, y))  # noqa: E731
        compiled, _ = _counting(both, dynamic=True)
        whole = [torch.randn(n, 6, generator=torch.Generator().manual_seed(n)).double() for n in (4 * world - 1, 4)]
        got, want = compiled(*(spread(t, S0) for t in whole)), both(*whole)
        torch.testing.assert_close([_whole(t) for t in got], list(want))


# Views that are returned, of arguments and of tensors made in the graph: neither their offsets nor their pieces follow from their
# sizes.
RETURNED = {
    "last_rows": lambda x, y: (x[-3:-1], y[-2:].t()),
    "last_rows_of_result": lambda x, y: (x * 2)[-3:-1],
    "last_of_last_rows": lambda x, y: x[-5:][-3:],
    "diagonal": lambda x, y: x.diagonal(1),
    "diagonals_of_results": lambda x, y: ((x * 2).diagonal(1), (y * 2).diagonal(-1)),
    "part_of_two": lambda x, y: torch.cat([x * 2, y])[1 : x.shape[0] - 1],
    "written": lambda x, y: ((x * 2).diagonal().mul_(3), (y * 2)[-2:].add_(1)),
    "strided": lambda x, y: (x.as_strided((2, 3), (x.shape[1], 1), x.shape[1]), (y * 2).as_strided((3, 2), (x.shape[1] + 1, 1), 1)),
    "filled": lambda x, y: (x * 2).fill_diagonal_(5),
}


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in (2, 3) for name in share(RETURNED, 2, world - 2)])
@on_ranks()
def test_returned_views_are_one_graph(name):
    function, world = RETURNED[name], mesh_here().size()
    compiled, counter = _counting(function, dynamic=True)
    for *rows, columns in ((11, 16, 9), (17, 23, 15), (23, 31, 20)):  # all sizes differ, and no rank sends one row, which torch would guard
        whole = [torch.randn(n * world, columns * world, generator=torch.Generator().manual_seed(n)).double() for n in rows]
        results = []
        for run in (function, compiled):
            ours = [spread(t, S0, grad=True) for t in whole]
            out = pytree.tree_leaves(run(*ours))
            _whole(sum((t * t).sum() for t in out)).backward()
            results.append([[_whole(t.detach()) for t in out], [_whole(t.grad) for t in ours if t.grad is not None]])
        torch.testing.assert_close(results[1], results[0])
    assert counter.frame_count == 1, counter.frame_count


# The families whose every case is compiled once for all lengths, but for those below.
ONE_GRAPH = ["attention", "flip_roll_repeat", "indexing", "joins", "losses", "padding", "reductions", "views"]
SEVERAL_GRAPHS = {
    "which of a diagonal's two sides ends it is guarded": ["diagonal_none"],
    "one graph for each remainder by the number of chunks, or by ranks times steps": ["chunk", "slice_step"],
    "what a rank reads of the others are numbers": ["unfold"],
    "raises: torch traces no write through a piece that becomes one of numbers": ["write_flat_any"],
    "torch before 2.14": [
        "multi_head", "sdpa_3d", "sdpa_3d_causal", "sdpa_broadcast_causal", "sdpa_causal", "sdpa_gqa", "sdpa_math", "sdpa_math_causal",
        "sdpa_no_batch", "sdpa_no_keys", "sdpa_no_keys_mask_bool", "sdpa_no_queries", "sdpa_query",
    ] if torch.__version__ < "2.14" else [],
    "torch before 2.13": [f"cross_entropy_probabilities_{r}" for r in ("mean", "none", "sum")] if torch.__version__ < "2.13" else [],
}  # fmt: skip


# With lengths that the ranks do not divide, of different remainders.
SEVERAL_IF_UNEVEN = {
    "where the element of a row lies in its owner's piece becomes a number": ["write_row_of_row"],
    "what a rank reads of the others are numbers": ["flip", "flip_negative", "roll", "prod_a_zero"],
    "the size of a dim that is merged with a cut one is a number": ["flatten_used", "view_minus_one", "write_flat"],
    "what is cut, heads or sequences, is chosen by its cost": ["sdpa_broadcast_causal", "sdpa_query"],
}


@pytest.mark.parametrize(("world", "longer"), [(2, LONGER), (3, LONGER_UNEVEN)])
@pytest.mark.parametrize("family", ONE_GRAPH)
def test_one_graph_for_two_lengths_of_each_case(pools, family, world, longer):
    """A part of the table's cases; `python tests/compiled.py --frames` takes all."""
    listed = [*itertools.chain(*SEVERAL_GRAPHS.values()), *(itertools.chain(*SEVERAL_IF_UNEVEN.values()) if longer == LONGER_UNEVEN else ())]
    names = [n for n in pools(world).run(names_of, family, (world,))[0] if not _listed(family, n, LEFT_OUT)]
    names = [n for n in names if _expected(family, n) != RAISES and n not in listed]
    part = share(names, 8 * (world - 1), min(4 * (world - 2), len(names) - 1))
    counted = pools(world).run(frames_of, family, part, (world,), longer, seconds=110 * -(-len(part) // 60))[0]
    more = [f for f in counted if f.ours not in (1, f.plain)]
    assert counted and not more, more


# On uneven pieces too. Of these, some wrote, some raised, and in others the ranks chose different layouts.
SYMBOLIC = {
    "out_arguments": ["abs", "amax", "sum", "tril"],
    "random": ["uniform_", "transposed"],
    "joins": ["stack", "stack_alike", "hstack", "cat_alike", "cat_columns"],
    "padding": ["pad_negative"],
    "matmul": ["addbmm", "einsum_attention"],
    "attention": ["sdpa_mask_heads"],
    "normalization": ["batch_norm_channels"],
    "embedding": ["embedding_padding_negative"],
    "losses": ["multi_margin_loss_none", "multilabel_margin_loss_mean"],
}


@pytest.mark.parametrize(("family", "names"), SYMBOLIC.items())
def test_tables_of_symbolic_sizes(pools, family, names):
    outcomes = pools(2).run(run_cases, family, names, (2,), alone=names, dynamic=True)[0]
    assert [o.kind for o in outcomes] == [RIGHT] * len(names), outcomes


@on_ranks(1, 2)
def test_no_elements_under_symbolic_sizes():
    from shardtensor import Shard

    for shape, dim in (((0, 4), 0), ((0, 4), 1), ((5, 0), 0), ((0,), 0)):
        for function in (lambda x: x * 2, lambda x: torch.cat([x, x]), lambda x: x.sum() + x.transpose(0, -1).exp()):
            results = []
            for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)):
                x = spread(torch.zeros(shape), Shard(dim), grad=True)
                out = run(x)
                _whole(out.sum()).backward()
                results.append((_form(out), _whole(out.detach()), _whole(x.grad)))
            assert results[0][0] == results[1][0], (shape, dim, results)
            torch.testing.assert_close(results[1][1:], results[0][1:])


# ---- what a graph holds ----


def _graph_of(function, *arguments):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch.compile(function, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)(*arguments)
    return [node for node in graphs[0].graph.nodes if node.op == "call_function"]


def _names(nodes):
    return [node.target._opname for node in nodes if isinstance(node.target, torch._ops.OpOverload)]


@on_ranks(3)
def test_a_forward_that_ends_with_a_move():
    """torch's default partitioner goes by the order of the nodes: no wait of the forward may come after the backward's nodes."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: (x * x).redistribute(placements=[R]), backend="aot_eager_default_partitioner", fullgraph=True, dynamic=False
    )
    whole = torch.randn(7, 6)
    x = spread(whole).requires_grad_()
    y = compiled(x)
    y.sum().backward()
    torch.testing.assert_close(_whole(y.detach()), whole * whole)
    torch.testing.assert_close(_whole(x.grad), 2 * whole)


@on_ranks(2, 3, seconds=110)
def test_graphs_wait_where_a_value_is_first_used():
    def function(x, w):
        gathered = x.redistribute(placements=[R])
        meanwhile = (w @ w).relu()
        return gathered @ meanwhile, x

    def writes(piece, w):
        gathered = ShardTensor.from_local(piece, w.device_mesh, [S0]).redistribute(placements=[R])
        piece.add_(1)
        return gathered, w.relu()

    w = spread(torch.randn(6, 6), R)
    for x in (spread(torch.randn(6 * mesh_here().size(), 6), S0), spread(torch.randn(7, 6))):
        names = _names(_graph_of(function, x, w))
        assert names.index("mm") < names.index("wait_tensor") and names.index("relu") < names.index("wait_tensor"), names
        torch._dynamo.reset()
        torch.testing.assert_close(_whole(torch.compile(function, fullgraph=True)(x, w)[0]), _whole(function(x, w)[0]))
    piece = torch.ones(3, 6)
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        written = piece.clone()
        gathered, _ = torch.compile(writes, backend=backend, fullgraph=True)(written, w)
        assert (_whole(gathered) == 1).all() and (written == 2).all()


def test_no_wait_goes_past_a_write():
    from shardtensor.patches.capture import _wait_late

    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    arriving = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 2, "group"))
    arrived = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (arriving,))
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (y, 2))
    graph.call_function(torch.ops.aten.copy_.default, (x, doubled))
    graph.output(arrived)
    _wait_late(graph)
    graph.lint()
    assert _names(graph.nodes) == ["all_gather_into_tensor", "mul", "wait_tensor", "copy_"]


@pytest.mark.parametrize("world", share([2, 3], 2))
@on_ranks(seconds=110)
def test_two_moves_to_one_layout_are_one():
    """What needs a tensor in the same layout several times moves it once, unless it has been written in between."""
    x, w = spread(torch.randn(7, 6)), spread(torch.randn(7, 5))

    def moves(nodes):
        return [n for n in _names(nodes) if n == "all_gather_into_tensor" or n == "all_to_all_single"]

    def twice(x, w):
        return x.redistribute(placements=[R]) * 2, x.full_tensor() + 1

    def three_products(x, w):
        return x.t() @ w.relu(), (x.sin(), x @ x.t(), x @ x.t().cos())

    def written_between(x, w):
        y = x * 1
        first = y.redistribute(placements=[R]) * 1
        y[:, :2].add_(1)
        second = y.redistribute(placements=[R]) * 1
        y.to_local().add_(1)
        return first, second, y.redistribute(placements=[R])

    def written_results(x, w):
        a = x.redistribute(placements=[R])
        a.add_(1)
        b = x.redistribute(placements=[R])
        b.mul_(2)
        return a, b, x.redistribute(placements=[R])

    for function, most in ((twice, 1), (three_products, 2), (written_between, 3), (written_results, 1)):
        found = moves(_graph_of(function, x, w))
        assert len(found) <= most, f"{function.__name__}: {found}"
        for backend in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            got = torch.compile(function, backend=backend, fullgraph=True)(x, w)
            torch.testing.assert_close(*(torch.utils._pytree.tree_map(_whole, out) for out in (got, function(x, w))))


@on_ranks(2, 3)
def test_graphs_send_few_bytes_more_than_eager():
    """Padding costs a quarter more than eager mode's bytes at most; pieces that differ more travel as they are."""
    def sent_in_graph(nodes):
        for node in nodes:
            if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default:
                yield node.args[0].meta["val"].nbytes
            if node.target is torch.ops._c10d_functional.all_to_all_single.default:
                splits, others = node.args[2], world - 1
                yield (sum(splits) - splits[dist.get_rank()]) * node.args[0].meta["val"].element_size() // others

    world = dist.get_world_size()
    for x, most in ((spread(torch.randn(7, 6)), 1), (spread(torch.randn(8, 6), S0), 1.25), (spread(torch.randn(6, 6), S0), 1)):
        _C.reset_comm_counts()
        x.full_tensor()
        totals = [sum(nbytes for _, nbytes in _C.comm_counts().values()), sum(sent_in_graph(_graph_of(lambda x: x.full_tensor(), x)))]
        both = torch.tensor(totals)
        dist.all_reduce(both)
        eager, graph = both.tolist()
        assert 0 < graph <= most * eager, f"{x._layout}: {graph} bytes in graphs, {eager} in eager mode"


@on_ranks(2, 3)
def test_graphs_hold_the_collectives_of_the_eager_plan():
    def calls(nodes):
        return [n for n in _names(nodes) if n in ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "all_to_all_single")]

    world = mesh_here().size()
    even = spread(torch.randn(6 * world, 6), S0)
    assert _names(_graph_of(lambda x: x.redistribute(placements=[R]), even)) == ["all_gather_into_tensor", "wait_tensor"]
    uneven, almost, cuts = spread(torch.randn(7, 6)), spread(torch.randn(8 * world - 1, 6), S0), rows(world, 7)
    for function, x, kind in (
        (lambda x: x.full_tensor(), almost, "all_gather_into_tensor"),
        (lambda x: x.full_tensor(), uneven, "all_to_all_single"),
        (lambda x: (x.t() @ x).redistribute(placements=[S0], sharding_shapes=cuts), spread(torch.randn(7, 7)), "all_to_all_single"),
        (lambda x: x.redistribute(placements=[S1]), uneven, "all_to_all_single"),
        (lambda x: x.sum().full_tensor(), uneven, "all_reduce"),
        (lambda x: (x.t() @ x).redistribute(placements=[S0]), uneven, "reduce_scatter_tensor"),
        (lambda x: x.softmax(0), uneven, "all_reduce"),
        (lambda x: torch.relu(x) * 2, uneven, None),
    ):
        _C.reset_comm_counts()
        function(x)
        eager = sum(count for count, _ in _C.comm_counts().values())
        found = calls(_graph_of(function, x))
        assert set(found) == ({kind} if kind else set()), found
        assert len(found) <= eager, f"{kind}: {len(found)} calls in the graph, {eager} in eager mode"


# ---- tangents ----

TANGENTS = {
    "cut": lambda x, w: torch.relu(x @ w),
    "in_summands": lambda x, w: (x * x).sum(0) * w,
    "replicated": lambda x, w: (w @ w, x.exp()),
    "two_results": lambda x, w: (x * 2, x.sum(0) @ w),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("name", TANGENTS)
def test_tangents_laid_out_otherwise(name):
    """Gradients come laid out as the result or otherwise: whole, cut elsewhere, by other cuts, in summands."""
    function = TANGENTS[name]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(7, 6, generator=generator), torch.randn(6, 6, generator=generator)]
    plain = [t.clone().requires_grad_() for t in wholes]
    results = pytree.tree_leaves(function(*plain))
    seeds = [torch.randn(t.shape, generator=generator) for t in results]
    want = torch.autograd.grad(results, plain, seeds)
    for where in (("R", EVEN), ("S(0)", EVEN), ("S(0)", UNEVEN), ("S(0)", EMPTY), ("S(1)", UNEVEN), ("P", EVEN)):
        ours = [spread(wholes[0], grad=True), spread(wholes[1], R, grad=True)]
        out = pytree.tree_leaves(compiled(*ours))
        fits = [("R", EVEN) if where[0] == "S(1)" and t.ndim == 1 else where for t in seeds]
        got = torch.autograd.grad(out, ours, [place(t, mesh_here(), (p,), cut) for t, (p, cut) in zip(seeds, fits, strict=True)])
        torch.testing.assert_close([_whole(t) for t in out], [t.detach() for t in results], msg=lambda m, w=where: f"{w}: {m}")
        torch.testing.assert_close([_whole(t) for t in got], list(want), msg=lambda m, w=where: f"gradients of {w}: {m}")


# ---- inputs, attributes, meshes ----


def module_with_tensors():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(spread(torch.randn(6, 5), R))
            self.register_buffer("bias", spread(torch.ones(5), R))
            self.attribute, self.listed = spread(torch.ones(7, 6)), [spread(torch.ones(7, 6))]

        def forward(self, x):
            return (x + self.attribute + self.listed[0]) @ self.weight + self.bias

    torch.manual_seed(0)
    model, x = Model(), spread(torch.randn(7, 6))
    torch.testing.assert_close(_whole(torch.compile(model, backend="aot_eager", fullgraph=True)(x)), _whole(model(x)))
    closed_over = spread(torch.ones(7, 6))
    out = torch.compile(lambda x: x + closed_over, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(_whole(out), _whole(x) + 1)


def several_meshes():
    world = mesh_here().size()
    plane = init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b"))
    x = spread(torch.arange(42.0).reshape(7, 6))
    y = distribute_tensor(torch.ones(5, 4), plane, [S0, S1])
    z = distribute_tensor(torch.ones(5, 4), plane["b"], [S1])

    def function(x, y, z):
        return x * 2, y.redistribute(placements=[R, R]) + 1, z.full_tensor() + 2

    a, b, c = torch.compile(function, backend="aot_eager", fullgraph=True)(x, y, z)
    torch.testing.assert_close((_whole(a), _whole(b), c), (_whole(x) * 2, torch.full((5, 4), 2.0), torch.full((5, 4), 3.0)))


def written_inputs():
    def function(x):
        x.add_(1)
        x[:, 1:3].mul_(3)
        return x * 1, x

    one, two = spread(torch.ones(7, 6)), spread(torch.ones(7, 6))
    (want, _), (got, same) = function(one), torch.compile(function, backend="aot_eager", fullgraph=True)(two)
    torch.testing.assert_close((_whole(got), _whole(two)), (_whole(want), _whole(one)))
    assert same is two
    columns = torch.compile(lambda x: x[:, 1:3], backend="aot_eager", fullgraph=True)
    columns(two).zero_()
    assert not _whole(two)[:, 1:3].any()
    columns(two[:, 2:]).fill_(5.0)
    assert (_whole(two)[:, 3:5] == 5).all() and not (_whole(two)[:, 5:] == 5).any()
    bits = torch.compile(lambda x: x.view(torch.int32), backend="aot_eager", fullgraph=True)(two)
    assert torch.equal(_whole(bits), _whole(two).view(torch.int32))
    none = spread(torch.ones(0, 6), S0)
    assert torch.compile(lambda x: x * 2, backend="aot_eager", fullgraph=True)(none).shape == (0, 6)


WRITES = {
    "copy": lambda t: t.copy_(torch.ones_like(t)),
    "detached": lambda t: t.detach().mul_(2),
    "element": lambda t: t.__setitem__((slice(None), 0), 2.0),
    "graph": lambda t: torch.compile(lambda t: t.add_(1), backend="aot_eager", fullgraph=True)(t),
    "list": lambda t: torch._foreach_add_([t], 1.0),
    "moved_row": lambda t: t[1].add_(1),
    "mul": lambda t: t.mul_(2),
    "reshaped": lambda t: t.view(-1).add_(1),
    "transposed": lambda t: t.t().zero_(),
    "view": lambda t: t[:, 1:].mul_(2),
}


def writes_are_seen():
    """What one side of a graph has saved, the other has not written unnoticed."""

    def compiled(function):
        torch._dynamo.reset()
        return torch.compile(function, backend="aot_eager", fullgraph=True)

    def product(a, b):
        return a * b

    def refuses_backward(y):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def made(grad=False):
        return spread(torch.arange(42.0).reshape(7, 6), grad=grad)

    for write in WRITES.values():
        a, b = made(grad=True), made()
        y = compiled(product)(a, b)
        with torch.no_grad():
            write(b)
        refuses_backward(y)
    for options in ({}, {"foreach": True}, {"foreach": False}):  # torch counts no write of a fused step
        weight = torch.nn.Parameter(spread(torch.ones(6, 6), R))
        weight.grad = torch.ones_like(weight)
        y = compiled(torch.matmul)(made(grad=True), weight)
        torch.optim.SGD([weight], lr=0.1, **options).step()
        refuses_backward(y)
    a = made(grad=True)
    y = compiled(torch.exp)(a * 0.01)
    with torch.no_grad():
        y.mul_(2)
    refuses_backward(y)
    b = made()
    y = made(grad=True) * b
    WRITES["graph"](b)
    refuses_backward(y)

    def writes_first(a, b):
        b.mul_(2)
        return a * b

    a, b = made(grad=True), made()
    compiled(writes_first)(a, b).sum().backward()
    torch.testing.assert_close(_whole(a.grad), _whole(b))


def writes_reach_views():
    """A graph's write counts for a view that had to move data, and for sums that are kept."""

    def add(t):
        return t.add_(1)

    compiled = torch.compile(add, backend="aot_eager", fullgraph=True)

    def row_after(write, part):
        cache = spread(torch.arange(42.0).reshape(7, 6))
        row = cache[1]
        write(part(cache))
        try:
            return _whole(row + 0)
        except RuntimeError as error:
            assert "after its base tensor was written" in str(error)
            return None

    for part in (lambda t: t, lambda t: t[:, 1:]):
        torch.testing.assert_close(row_after(compiled, part), row_after(add, part))
    for make in (lambda: spread(torch.ones(4, 6), S1) @ spread(torch.ones(6, 6), S0), lambda: spread(torch.ones(7, 6)).sum()):
        summands = []
        for write in (add, compiled):
            t = make()
            _whole(t)
            write(t)
            summands.append(_whole(t))
        torch.testing.assert_close(summands[1], summands[0])


def running_statistics():
    def run(backend):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = distribute_module(torch.nn.Sequential(torch.nn.Conv1d(6, 4, 1), torch.nn.BatchNorm1d(4)), mesh_here())
        step = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        for _ in range(2):
            out = step(spread(torch.randn(7, 6, 3)))
            _whole(out.square().sum()).backward()
        assert isinstance(model[1].running_mean, ShardTensor)
        state = [_whole(t.detach()) for t in (out, *model.state_dict().values())]
        return state, [_whole(p.grad) for p in model.parameters()]

    torch.testing.assert_close(run("aot_eager"), run(None))


def inference():
    x = spread(torch.randn(7, 6))
    compiled = torch.compile(lambda x: x.softmax(0) * 2, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(_whole(compiled(x)), _whole(x.softmax(0) * 2))
    with torch.no_grad():
        assert not compiled(x).requires_grad


def copied_results():
    """What a graph returns is copied and saved as any other, and so is a compiled module."""
    from test_copies import COPIES

    model = torch.nn.Linear(6, 5, bias=False)
    model.weight = torch.nn.Parameter(spread(torch.randn(5, 6), R))
    model, x = torch.compile(model, backend="aot_eager", fullgraph=True), spread(torch.randn(7, 6))
    out = model(x).detach()
    for name, copied in COPIES.items():
        got = copied(out)
        assert got._layout == out._layout and got.stride() == out.stride(), name
        torch.testing.assert_close(_whole(got), _whole(out), msg=lambda m, name=name: f"{name}: {m}")
    twin = copy.deepcopy(model)
    twin.load_state_dict(COPIES["save_weights_only"](model.state_dict()))
    torch.testing.assert_close(_whole(twin(x)), _whole(model(x)))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "name",
    [
        "copied_results", "inference", "module_with_tensors", "running_statistics", "several_meshes", "writes_are_seen", "writes_reach_views",
        "written_inputs",
    ],
)
def test_inputs_and_outputs(pools, name, world):
    pools(world).run(globals()[name])


# ---- training ----


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(12, 12) for _ in range(4))

    def forward(self, x):
        def heads(t):
            return t.unflatten(-1, (-1, 4)).transpose(1, 2)

        y = F.scaled_dot_product_attention(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(torch.nn.Module):
    """Three heads and 19 features, which two ranks do not divide."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), torch.nn.LayerNorm(12)
        self.up, self.down = torch.nn.Linear(12, 19), torch.nn.Linear(19, 12)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))


def _tensor_parallel(block, mesh):
    plan = {f"attention.{name}": ColwiseParallel(multiple_of=4) for name in "qkv"}
    plan |= {"attention.o": RowwiseParallel(multiple_of=4), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(block, mesh, plan)


def _features(step):
    return torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(step))


def _steps(make, backend, compiled_blocks=False, batch=_features):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make(backend)
    run = torch.compile(model, backend=backend, fullgraph=True) if backend and not compiled_blocks else model
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(3):
        loss = _whole(run(batch(step)).square().mean())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def styles(backend):
    def make(_):
        return _tensor_parallel(Block(), mesh_here())

    torch.testing.assert_close(_steps(make, backend), _steps(make, None), atol=1e-5, rtol=0)


@pytest.mark.parametrize("world", [2, 3])
def test_parallel_styles(pools, world):
    pools(world).run(styles, "aot_eager")


def test_parallel_styles_by_inductor(pools):
    pools(2).run(styles, "inductor", seconds=110)


@pytest.mark.parametrize("over_tensor_parallel", [False, True])
@on_ranks(2, 3)
def test_fsdp_with_compiled_blocks(over_tensor_parallel):
    world = mesh_here().size()
    mesh = init_device_mesh("cpu", (1, world) if over_tensor_parallel else (world, 1), mesh_dim_names=("dp", "tp"))

    def make(backend):
        model = torch.nn.Sequential(Block(), Block())
        for block in model:
            if over_tensor_parallel:
                _tensor_parallel(block, mesh["tp"])
            if backend:
                block.compile(backend=backend, fullgraph=True)
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model

    torch.testing.assert_close(_steps(make, "aot_eager", compiled_blocks=True), _steps(make, None), atol=1e-5, rtol=0)


@on_ranks(1, 2, 3)
def test_compiled_optimizers_and_clipping():
    def run(compiled, **options):
        torch._dynamo.reset()
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(spread(torch.randn(7, 6))), torch.nn.Parameter(spread(torch.randn(6, 5), R))]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for i in range(2):
            for p in parameters:
                p.grad = p.detach() * 0.5 + i
            norm = (torch.compile(torch.nn.utils.clip_grad_norm_, backend="aot_eager") if compiled else torch.nn.utils.clip_grad_norm_)(
                parameters, 1.0
            )
            step()
        return [_whole(p.detach()) for p in parameters], _whole(norm)

    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        torch.testing.assert_close(run(True, **options), run(False, **options))


SCHEDULED = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam"]


@pytest.mark.parametrize("name", share(SCHEDULED, 3))
@on_ranks(2)
def test_compiled_optimizers_with_a_scheduler(name):
    """A compiled optimizer whose learning rate is a tensor that a scheduler changes: one graph, which sends nothing."""
    from torch._dynamo.testing import CompileCounterWithBackend

    values = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).double()
    parameters, sent = [torch.nn.Parameter(values.clone()), torch.nn.Parameter(spread(values))], 0
    torch._dynamo.reset()
    for p in parameters:
        optimizer = getattr(torch.optim, name)([p], lr=torch.tensor(0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        counter = CompileCounterWithBackend("aot_eager")
        step = torch.compile(optimizer.step, backend=counter)
        for i in range(3):
            p.grad = (p * 0.5 + i).detach()
            _C.reset_comm_counts()
            step()
            sent += sum(calls for calls, _ in _C.comm_counts().values())
            scheduler.step()
    torch.testing.assert_close(_whole(parameters[1].detach()), parameters[0].detach())
    assert (counter.frame_count, sent) == (1, 0)


@on_ranks(2)
def test_arguments_that_change():
    """Few graphs where the argument changes from call to call."""

    def agreed(function, arguments, most):
        torch._dynamo.reset()
        compiled, counter = _counting(function)
        for a in arguments:
            torch.testing.assert_close(_whole(compiled(*a)), _whole(function(*a)))
        agree(counter.frame_count, "graphs")
        assert counter.frame_count <= most, counter.frame_count

    def rows_of(n):
        return spread(torch.randn(n, 4, generator=torch.Generator().manual_seed(n)).double(), S0)

    agreed(lambda x: (x * 2).sum(), [(rows_of(8).requires_grad_(i % 2 == 0),) for i in range(5)], 2)
    agreed(lambda x: torch.softmax(x, -1).sum(0), [(rows_of(n),) for n in (8, 7, 1, 0, 4, 2)], 6)
    heads = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(1)).double()
    caches = [(spread(heads[:, :, :n], S1), spread(heads[:, :, n : n + 1], S1)) for n in range(3, 9)]
    agreed(lambda k, q: torch.softmax(q @ torch.cat((k, q), 2).mT, -1) @ torch.cat((k, q), 2), caches, 2)


# ---- what is refused ----


@on_ranks(2, 3)
def test_what_cannot_be_traced_says_why():
    mesh = mesh_here()
    x = spread(torch.ones(7, 6))

    def infer(x):
        return ShardTensor.from_local(x.to_local(), mesh, [S0], sharding_shapes="infer")

    def check(x):
        return ShardTensor.from_local(x.to_local(), mesh, [R], run_check=True)

    def by_values(x):
        return torch.poisson(x)

    def selected(x):
        return x[x > 0] * 2

    def lasting(x):
        shardtensor.set_promotion_mode("replicate")
        return x * torch.ones(6)

    mapped = local_map(lambda t: t[:1], out_placements=[S0], in_placements=([S0],), device_mesh=mesh)
    for function, why in (
        (infer, "the ranks exchange sizes"),
        (check, "the ranks exchange sizes"),
        (by_values, "depends on a tensor's values"),
        (selected, "depends on a tensor's values"),
        (lasting, "cannot set a mode of shardtensor"),
        (mapped, "the ranks exchange sizes"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=why):
            torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()  # without fullgraph, the graph is split there
    out = torch.compile(lambda x: infer(x * 2) + 1, backend="aot_eager")(x)
    torch.testing.assert_close(_whole(out), torch.full((7, 6), 3.0))


@on_ranks(2, seconds=110)
def test_indices_out_of_range_raise():
    table, logits = spread(torch.randn(7, 6)), spread(torch.randn(6, 7), S1)
    index = spread(torch.tensor([1, 9]), R)
    for function, x, i in (
        (lambda x, i: F.embedding(i, x), table, index),
        (lambda x, i: x[i], table, index),
        (lambda x, i: x.gather(0, i[:, None]), table, index),
        (lambda x, i: F.cross_entropy(x[:2], i), logits, index),
    ):
        for backend in (None, "aot_eager", "inductor"):
            torch._dynamo.reset()
            with pytest.raises(Exception, match=r"out of (range|bounds)"):
                _whole((torch.compile(function, backend=backend, fullgraph=True) if backend else function)(x, i))


@on_ranks(2, 3)
def test_a_move_between_meshes_says_why():
    world = mesh_here().size()
    x, other = spread(torch.ones(7, 6)), DeviceMesh("cpu", list(reversed(range(world))))

    def move(x):
        return x.redistribute(other, [S0]) * 2

    with pytest.raises(Exception, match="a move between meshes cannot be traced"):
        torch.compile(move, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(move(x).full_tensor(), torch.full((7, 6), 2.0))


@on_ranks(2)
def test_older_torch_says_so():
    """The version is said by hand: torch 2.11 itself is tried apart from the suite."""
    x, installed = spread(torch.ones(7, 6)), _compile._TORCH
    _compile._TORCH = (2, 11)
    try:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"cannot compile functions of ShardTensors; 2\.12 and newer can"):
            torch.compile(lambda x: x * 2, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(_whole(x * 2), torch.full((7, 6), 2.0))
    finally:
        _compile._TORCH = installed
