"""Random ops: the global values depend on the seed and the global index alone."""

from __future__ import annotations

import itertools
import math
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from oracle import EMPTY, EVEN, MESHES, UNEVEN, mesh_id, mesh_of, place
from pool import on_ranks
from shardtensor import _C
from shardtensor.tensor._layout import make_layout
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

SIZES = (7, 6)

# Each is called on a ShardTensor of SIZES in double precision.
OPS: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 3),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_tensor_": lambda x: x.bernoulli_(torch.full_like(x, 0.6)),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.4)),
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.4),
    "random_": lambda x: x.random_(),
    "random_to": lambda x: x.random_(10),
    "random_from_to": lambda x: x.random_(-5, 5),
    "exponential_": lambda x: x.exponential_(2.0),
    "log_normal_": lambda x: x.log_normal_(0.5, 0.2),
    "cauchy_": lambda x: x.cauchy_(1, 2),
    "geometric_": lambda x: x.geometric_(0.3),
    "rand_like": torch.rand_like,
    "rand_like_float": lambda x: torch.rand_like(x, dtype=torch.float32),
    "randn_like": torch.randn_like,
    "randn_like_bfloat16": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "randn_like_complex": lambda x: torch.randn_like(x, dtype=torch.complex128),
    "randint_like": lambda x: torch.randint_like(x, 3, 9, dtype=torch.int64),
    "randint_like_high": lambda x: torch.randint_like(x, 9, dtype=torch.uint8),
    "normal_tensors": lambda x: torch.normal(torch.zeros_like(x), torch.ones_like(x) * 2),
    "normal_mean": lambda x: torch.normal(torch.ones_like(x), 2.0),
    "normal_std": lambda x: torch.normal(1.0, torch.ones_like(x)),
    "dropout": lambda x: torch.nn.functional.dropout(torch.ones_like(x), 0.4),
    "dropout_of_partial": lambda x: torch.nn.functional.dropout(x.fill_(1.0), 0.4),
    "native_dropout": lambda x: torch.native_dropout(torch.ones_like(x), 0.4, True),
    "native_dropout_eval": lambda x: torch.native_dropout(torch.ones_like(x), 0.4, False),
    "feature_dropout": lambda x: torch.feature_dropout(torch.ones_like(x), 0.4, True),
    "alpha_dropout": lambda x: torch.alpha_dropout(torch.ones_like(x), 0.4, True),
    "rrelu": lambda x: torch.rrelu(torch.ones_like(x).neg(), training=True),
    "multinomial": lambda x: torch.multinomial(torch.ones_like(x), 2),
    "multinomial_one": lambda x: torch.multinomial(torch.ones_like(x), 1),
    "multinomial_replacement": lambda x: torch.multinomial(torch.ones_like(x), 4, replacement=True),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 3.0)),
    "generator": lambda x: x.uniform_(generator=torch.Generator().manual_seed(5)),
    "transposed": lambda x: x.t().normal_().t(),
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x),
    "xavier_uniform_": lambda x: torch.nn.init.xavier_uniform_(x),
    "kaiming_normal_": lambda x: torch.nn.init.kaiming_normal_(x),
}
PLACEMENTS = ["R", "S(0)", "S(1)", "P"]


def strided(mesh: Any) -> Any:
    """A ShardTensor of SIZES under FSDP-over-TP's placements: rows in _StridedShard(0), Shard(0)."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    layout = make_layout(mesh, [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)], 2, who="test")
    return _C.wrap(torch.empty(layout.local_sizes(list(SIZES)), dtype=torch.float64), layout, list(SIZES), [SIZES[1], 1])


def run_op(name: str, mesh_shape: tuple[int, ...]) -> Any:
    """The op under every placement; returns the one value that all give."""
    mesh = mesh_of(mesh_shape)
    starts = []
    for combo in itertools.product(PLACEMENTS, repeat=len(mesh_shape)):
        nested = len({c for c in combo if c.startswith("S")}) < sum(c.startswith("S") for c in combo)
        for cut in (EVEN,) if nested else (EVEN, UNEVEN, EMPTY):
            starts.append((f"{combo} {cut}", place(torch.zeros(SIZES, dtype=torch.float64), mesh, combo, cut)))
    if len(mesh_shape) == 2:
        starts.append(("strided", strided(mesh)))
    first = None
    for what, x in starts:
        torch.manual_seed(11)
        out = pytree.tree_map_only(torch.Tensor, lambda t: t.full_tensor(), OPS[name](x))
        after = torch.rand(())  # the generators end in the same state, too
        value = [t.clone() for t in pytree.tree_leaves(out)] + [after]
        first = first or value
        for a, b in zip(first, value, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12, msg=lambda m, w=what: f"{name} with {w}: {m}")
    return [t.tolist() if not t.is_complex() else torch.view_as_real(t).tolist() for t in first]


@pytest.mark.parametrize("name", OPS)
def test_same_whatever_the_placement(pools, name):
    values = [v for world, shape in MESHES for v in pools(world).run(run_op, name, shape)]
    assert all(v == values[0] for v in values[1:])


# ---- the numbers themselves ----


def philox(counter: int, key: int) -> list[int]:
    c = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c


def test_reference_philox():
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def draw_bits() -> Any:
    mesh = mesh_of((2,))
    st.random.manual_seed(3, mesh)
    key = int(torch.empty((), dtype=torch.int64).random_(-(2**63), None)) % 2**64
    torch.manual_seed(3)
    x = st.empty(11, dtype=torch.int64, device_mesh=mesh, placements=[st.Shard(0)]).random_(-(2**63), None)
    return key, x.full_tensor().tolist()


def test_bits_are_philox_of_the_index(pools):
    for key, got in pools(2).run(draw_bits):
        for i, x in enumerate(got):
            words = philox(i // 2, key)
            bits = words[2 * (i % 2)] | words[2 * (i % 2) + 1] << 32
            assert (bits - 2**63 + 2**63) % 2**64 - 2**63 == x


def sample(name: str, n: int, dtype: str) -> Any:
    from shardtensor import Shard

    torch.manual_seed(zlib.crc32(name.encode()))
    x = st.empty(n // 16, 16, dtype=getattr(torch, dtype), device_mesh=mesh_of((3,)), placements=[Shard(0)])
    out = OF_SAMPLE[name](x).full_tensor().to(torch.float64).flatten()
    assert torch.isfinite(out).all()
    return out.mean().item(), out.var().item(), out.sort().values[:: n // 64].tolist(), out.min().item(), out.max().item()


OF_SAMPLE: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda x: x.uniform_(),
    "normal": lambda x: x.normal_(),
    "log_normal": lambda x: x.log_normal_(0, 0.5),
    "exponential": lambda x: x.exponential_(2.0),
    "bernoulli": lambda x: x.bernoulli_(0.3),
    "geometric": lambda x: x.geometric_(0.25),
    "randint": lambda x: x.random_(10),
}


def normal_cdf(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


# name: mean, variance, the distribution function of a continuous one
EXPECTED: dict[str, tuple[float, float, Callable[[float], float] | None]] = {
    "uniform": (0.5, 1 / 12, lambda x: x),
    "normal": (0.0, 1.0, normal_cdf),
    "log_normal": (math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25), lambda x: normal_cdf(math.log(x) / 0.5)),
    "exponential": (0.5, 0.25, lambda x: 1 - math.exp(-2 * x)),
    "bernoulli": (0.3, 0.21, None),
    "geometric": (4.0, 12.0, None),
    "randint": (4.5, 8.25, None),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OF_SAMPLE)
def test_statistics(pools, name, dtype):
    n = 48 * 1024
    mean, variance, cdf = EXPECTED[name]
    got_mean, got_variance, quantiles, low, high = pools(3).run(sample, name, n, dtype)[0]
    assert abs(got_mean - mean) < 5 * math.sqrt(variance / n)
    assert abs(got_variance / variance - 1) < 0.06
    if cdf is not None:  # Kolmogorov-Smirnov, at one in a million
        worst = max(abs(cdf(q) - i * (n // 64) / n) for i, q in enumerate(quantiles))
        assert worst < 2.7 / math.sqrt(n)
    if name == "uniform":
        assert low >= 0 and high < 1
    if name == "exponential":
        assert low > 0
    if name == "geometric":
        assert low == 1


def uniform_in_half_open() -> Any:
    torch.manual_seed(0)
    out = []
    for dtype in (torch.bfloat16, torch.float16):
        x = st.empty(64, 64, dtype=dtype, device_mesh=mesh_of((2,)), placements=[st.Shard(1)]).uniform_(0, 1).full_tensor()
        out.append((x.min().item(), x.max().item()))
    return out


def test_uniform_never_gives_its_end(pools):
    for low, high in pools(2).run(uniform_in_half_open)[0]:
        assert low >= 0 and high < 1


def different_draws() -> Any:
    from shardtensor import Shard

    torch.manual_seed(0)
    mesh = mesh_of((2,))
    a = st.randn(8, 3, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    b = st.randn(8, 3, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    torch.manual_seed(1)
    c = st.randn(8, 3, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    with torch.random.fork_rng():
        st.randn(8, 3, device_mesh=mesh, placements=[Shard(0)])
    d = st.randn(8, 3, device_mesh=mesh, placements=[Shard(1)]).full_tensor()
    torch.manual_seed(1)
    st.randn(8, 3, device_mesh=mesh)
    e = st.randn(8, 3, device_mesh=mesh).full_tensor()
    flat = torch.cat([a.flatten(), b.flatten(), c.flatten(), d.flatten()])
    return flat.unique().numel() == flat.numel(), torch.equal(d, e)


def test_ops_and_seeds_differ_and_fork_rng_restores(pools):
    assert pools(2).run(different_draws) == [(True, True)] * 2


# ---- training ----


def checkpointed(mesh_shape: tuple[int, ...], combo: tuple[str, ...]) -> Any:
    x = place(torch.ones(6, 4, dtype=torch.float64), mesh_of(mesh_shape), combo, UNEVEN).requires_grad_()
    grads = []
    for use_reentrant in (None, False, True):

        def block(t: Any) -> Any:
            return torch.nn.functional.dropout(t * 2, 0.5) + torch.nn.functional.dropout(t, 0.25)

        torch.manual_seed(4)
        out = block(x) if use_reentrant is None else checkpoint(block, x, use_reentrant=use_reentrant)
        (grad,) = torch.autograd.grad(out.sum(), x) if use_reentrant is not True else (None,)
        if grad is None:
            x.grad = None
            out.sum().backward()
            grad = x.grad
        grads.append((out.detach().full_tensor(), grad.full_tensor()))
    for out, grad in grads:
        assert torch.equal(out, grads[0][0])
        assert torch.equal(grad, grads[0][1])
        assert torch.equal(out, grad)  # the mask of the backward is the forward's
    return grads[0][0].tolist()


def test_checkpoint_draws_the_same_mask(pools):
    two = pools(2).run(checkpointed, (2,), ("S(0)",))
    three = pools(3).run(checkpointed, (3,), ("S(1)",))
    assert all(v == two[0] for v in two + three)


@on_ranks(2)
def test_dropout():
    mesh = mesh_of((2,))
    x = torch.full((8, 8), 2.0, dtype=torch.float64)
    for combo in ("S(0)", "S(1)", "P", "R"):
        t = place(x, mesh, (combo,), EVEN).requires_grad_()
        torch.manual_seed(1)
        out, mask = torch.native_dropout(t, 0.5, True)
        (grad,) = torch.autograd.grad(out.sum(), t)
        mask = mask.full_tensor()
        assert 10 < mask.sum() < 54
        torch.testing.assert_close(out.detach().full_tensor(), x * mask * 2)
        assert torch.equal(grad.full_tensor(), mask * 2.0)
        for p, want in ((0.0, x), (1.0, torch.zeros_like(x))):
            torch.testing.assert_close(torch.nn.functional.dropout(t, p).detach().full_tensor(), want)
            torch.testing.assert_close(torch.native_dropout(t, p, True)[0].detach().full_tensor(), want)


@on_ranks(2)
def test_rrelu():
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).view(4, 3)
    for combo in ("S(0)", "P"):
        t = place(x, mesh_of((2,)), (combo,), EVEN).requires_grad_()
        out = torch.rrelu(t, 0.1, 0.3, training=True)
        (grad,) = torch.autograd.grad(out.sum(), t)
        out, grad = out.detach().full_tensor(), grad.full_tensor()
        slope = out / x
        assert torch.allclose(slope[x > 0], torch.ones(6, dtype=torch.float64))
        assert ((slope > 0.0999) & (slope < 0.3001))[x < 0].all() and slope.unique().numel() > 6
        torch.testing.assert_close(grad, slope)
        still = torch.rrelu(t, 0.1, 0.3, training=False).detach().full_tensor()
        torch.testing.assert_close(still, torch.rrelu(x, 0.1, 0.3, training=False))


# ---- the contract ----


def quiet_after_the_first() -> Any:
    mesh = mesh_of((2,))
    st.random.manual_seed(0, mesh)
    _C.reset_comm_counts()
    for placement in (st.Shard(0), st.Replicate()):
        x = st.empty(5, 4, device_mesh=mesh, placements=[placement])
        x.normal_()
        torch.nn.functional.dropout(x, 0.5)
        torch.native_dropout(x, 0.5, True)
        torch.rand_like(x)
    torch.multinomial(st.ones(5, 4, device_mesh=mesh, placements=[st.Shard(0)]), 2)
    return _C.comm_counts()


def test_no_communication(pools):
    assert pools(2).run(quiet_after_the_first) == [{}, {}]


def first_op_takes_over(rank_dependent: bool) -> Any:
    mesh = st.init_device_mesh("cpu", (2,), mesh_dim_names=(f"agree_{rank_dependent}",))
    torch.manual_seed(100 + (dist.get_rank() if rank_dependent else 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = st.randn(6, device_mesh=mesh, placements=[st.Shard(0)]).full_tensor()
    return x.tolist(), torch.rand(()).item(), [str(w.message) for w in caught if "default random generator" in str(w.message)]


def test_first_op_compares_generators(pools):
    alike = pools(2).run(first_op_takes_over, False)
    differ = pools(2).run(first_op_takes_over, True)
    assert [v[:2] for v in differ] == [v[:2] for v in alike]
    assert [len(v[2]) for v in alike] == [0, 0]
    assert [len(v[2]) for v in differ] == [0, 1]


def seed_checks() -> Any:
    mesh = mesh_of((2, 2))
    assert st.random.is_rng_supported_mesh(mesh)
    st.random.manual_seed(-3, mesh)
    with pytest.raises(RuntimeError, match="must be the same on all ranks"):
        st.random.manual_seed(dist.get_rank() // 2, mesh)
    part = st.DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        st.random.manual_seed(5, part)
        return torch.rand(()).item()
    with pytest.raises(RuntimeError, match="does not hold rank"):
        st.random.manual_seed(5, part)
    torch.manual_seed(5)
    return torch.rand(()).item()


def test_manual_seed(pools):
    values = pools(4).run(seed_checks)
    assert all(v == values[0] for v in values)


@on_ranks(2)
def test_bad_arguments():
    x = st.zeros(4, 4, device_mesh=mesh_of((2,)), placements=[st.Shard(0)])
    for call, message in (
        (lambda: x.uniform_(2, 1), "from"),
        (lambda: x.normal_(0, -1), "std"),
        (lambda: x.bernoulli_(1.5), "p"),
        (lambda: x.exponential_(-1), "lambda"),
        (lambda: x.geometric_(0), "p"),
        (lambda: x.random_(5, 5), "from"),
        (lambda: torch.randint_like(x, 300, dtype=torch.uint8), "out of bounds"),
        (lambda: torch.multinomial(x, 1), "multinomial"),
        (lambda: torch.multinomial(x, 9), "without replacement"),
    ):
        with pytest.raises((RuntimeError, IndexError), match=message):
            call()
    integers = torch.zeros_like(x, dtype=torch.int64)
    for call in (integers.normal_, integers.bernoulli):
        with pytest.raises(NotImplementedError):
            call()


@on_ranks(2)
def test_normal_of_mixed_dtypes():
    mesh = mesh_of((2,))
    for mean, std in itertools.product((torch.float32, torch.float64, torch.bfloat16), repeat=2):
        plain = torch.zeros(3, dtype=mean), torch.ones(3, dtype=std)
        drawn = torch.normal(*(st.distribute_tensor(t, mesh, [st.Shard(0)]) for t in plain))
        assert drawn.dtype == torch.normal(*plain).dtype == mean


def init_module(world: int) -> Any:
    def shard(name: str, module: Any, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            where = [st.Shard(0)] if world != 2 else [st.Replicate()]
            module.register_parameter(key, torch.nn.Parameter(st.distribute_tensor(parameter.detach(), mesh, where)))

    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Embedding(5, 3))
    st.distribute_module(module, mesh_of((world,)), shard)
    torch.manual_seed(9)
    for m in module:
        m.reset_parameters()
    torch.nn.init.xavier_normal_(module[2].weight)
    return [p.detach().full_tensor().tolist() for p in module.parameters()]


def test_module_initialisation(pools):
    values = [v for world in (2, 3) for v in pools(world).run(init_module, world)]
    for v in values[1:]:
        torch.testing.assert_close([torch.tensor(p) for p in v], [torch.tensor(p) for p in values[0]])


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
def test_factories(pools, mesh):
    values = pools(mesh[0]).run(make_factories, mesh[1])
    want = pools(2).run(make_factories, (2,))[0]
    assert all(v == want for v in values)


def make_factories(mesh_shape: tuple[int, ...]) -> Any:
    torch.manual_seed(2)
    mesh = mesh_of(mesh_shape)
    placements = [st.Shard(1), st.Shard(0)][: mesh.ndim]
    return [f(5, 4, device_mesh=mesh, placements=placements).full_tensor().tolist() for f in (st.rand, st.randn)]


ON_A_GPU = [
    "uniform_",
    "normal_",
    "bernoulli_",
    "random_",
    "random_from_to",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
    "rand_like_float",
    "randn_like_bfloat16",
    "randn_like_complex",
    "transposed",
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_draws_what_the_cpu_draws(pools):
    there, here = (pools(1).run(draw_on, device)[0] for device in ("cuda", "cpu"))
    for name in ON_A_GPU:
        torch.testing.assert_close(there[name], here[name])


def draw_on(device: str) -> dict[str, torch.Tensor]:
    mesh = DeviceMesh(device, [0])
    drawn = {}
    for name in ON_A_GPU:
        torch.manual_seed(7)
        x = st.distribute_tensor(torch.zeros(40, 33, dtype=torch.float64, device=device), mesh, [st.Shard(0)])
        drawn[name] = OPS[name](x).full_tensor().cpu()
    return drawn
