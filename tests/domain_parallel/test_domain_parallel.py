"""PhysicsNeMo's names over ShardTensors: code written for it runs after a change of its imports."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import warnings

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import mesh_here
from pool import on_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def theirs():
    """The import allows plain tensors; other tests on these ranks must not see that."""
    before = st.get_promotion_mode()
    import shardtensor.domain_parallel as module

    module.ShardTensor.set_promotion_mode("silent")
    try:
        yield module
    finally:
        st.set_promotion_mode(before)


@on_ranks(2)
def test_import_allows_plain_tensors():
    before = st.get_promotion_mode()
    saved = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("shardtensor.domain_parallel")}
    try:
        st.set_promotion_mode("error")
        importlib.import_module("shardtensor.domain_parallel")
        assert st.get_promotion_mode() == "replicate"
    finally:
        st.set_promotion_mode(before)
        sys.modules.update(saved)


# ---- a script of theirs ----


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(2, 4, 3, padding=1)
        self.norm = torch.nn.GroupNorm(2, 4)
        self.last = torch.nn.Conv2d(4, 1, 3, padding=1)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x):
        return self.last(F.gelu(self.norm(self.first(x)))) * self.scale


@on_ranks(2, 3)
def test_script():
    with theirs() as module:
        from oracle import mesh_here

        mesh = mesh_here()
        torch.manual_seed(dist.get_rank())  # other weights on each rank
        model = Net().double()
        module.sync_module_over_mesh(model, mesh, verify=True)
        torch.manual_seed(0)
        plain = Net().double()
        plain.load_state_dict(model.state_dict())
        whole, target = torch.randn(2, 2, 12, 6, dtype=torch.float64), torch.randn(2, 1, 12, 6, dtype=torch.float64)
        source = dist.get_rank() == 0
        x, y = (
            module.scatter_tensor(t if source else None, 0, mesh, (module.Shard(2),), global_shape=t.shape, dtype=t.dtype) for t in (whole, target)
        )
        assert type(x) is st.ShardTensor and isinstance(x, module.ShardTensor) and issubclass(type(x), module.ShardTensor)
        out = model(x)
        assert out.placements == (module.Shard(2),)
        loss = ((out - y) ** 2).mean()
        loss.backward()
        want = ((plain(whole) - target) ** 2).mean()
        want.backward()
        torch.testing.assert_close(loss.full_tensor(), want)
        for (name, got), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert type(got.grad) is torch.Tensor, name  # plain and whole, as DDP needs it
            torch.testing.assert_close(got.grad, other.grad)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@on_ranks(4)
def test_with_data_parallelism(how):
    """Two samples on one mesh dim, by DDP or FSDP2; each cut in space along the other."""
    with theirs() as module:
        mesh = st.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
        torch.manual_seed(dist.get_rank())
        model = Net().double()
        module.sync_module_over_mesh(model, mesh["domain"])
        # DDP does this along its own dim, FSDP2 does not.
        module.sync_module_over_mesh(model, mesh["ddp"])
        plain = Net().double()
        plain.load_state_dict(model.state_dict())
        model = DistributedDataParallel(model, process_group=mesh["ddp"].get_group()) if how == "ddp" else fully_shard(model, mesh=mesh["ddp"])
        torch.manual_seed(0)
        whole = torch.randn(2, 1, 2, 12, 6, dtype=torch.float64)
        sample, source = mesh.get_coordinate()[0], mesh.get_coordinate()[1] == 0
        first = mesh["domain"].mesh.tolist()[0]
        x = module.scatter_tensor(whole[sample] if source else None, first, mesh["domain"], (module.Shard(2),), sharding_shapes={0: [8, 4]})
        loss = (model(x) ** 2).mean()
        loss.backward()
        want = (plain(whole.flatten(0, 1)) ** 2).mean()
        want.backward()
        for (name, got), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            grad = got.grad.full_tensor() if isinstance(got.grad, torch.distributed.tensor.DTensor) else got.grad
            torch.testing.assert_close(grad, other.grad, msg=lambda m, name=name: f"{how} {name}: {m}")


# ---- the class ----


@on_ranks(2)
def test_class():
    with theirs() as module:
        mesh, rank = mesh_here(), dist.get_rank()
        mine = torch.full((2 + rank, 3), float(rank))
        x = module.ShardTensor.from_local(mine, mesh, [module.Shard(0)])  # "infer"
        assert x.shape == (5, 3) and not isinstance(mine, module.ShardTensor)
        shapes = x._spec.sharding_shapes()
        assert shapes == {0: (torch.Size([2, 3]), torch.Size([3, 3]))} and x._spec.sharding_shapes(0) == shapes[0]
        assert x._spec.local_shape == mine.shape and x._spec.offsets() == (2 * rank,) and x._spec.offsets(0) == x.offsets(0) == 2 * rank
        again = module.ShardTensor.from_local(mine, mesh, [module.Shard(0)], shapes)
        assert again._layout == x._layout
        even = module.ShardTensor.from_local(torch.ones([3, 2][rank], 2), mesh, [module.Shard(0)], "chunk", (5, 2))
        assert even.shape == (5, 2) and module.ShardTensor.patches_enabled()
        made = module.ShardTensor(mine, x._spec, requires_grad=False)
        assert isinstance(made, module.ShardTensor) and torch.equal(made.full_tensor(), x.full_tensor())

        kind, mode = module.ShardTensor, module.TensorPromotionMode
        assert kind.get_promotion_mode() is mode.SILENT
        torch.testing.assert_close((x + torch.ones(3)).full_tensor(), x.full_tensor() + 1)
        with kind.promotion_mode("disabled"):
            assert kind.get_promotion_mode() is mode.DISABLED
            with pytest.raises(RuntimeError, match="implicit_replication"):
                x + torch.ones(3)
        kind.set_promotion_mode(mode.WARN)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            x + torch.ones(3)
        assert st.get_promotion_mode() == "warn"
        with pytest.raises(ValueError, match="loud"):
            kind.set_promotion_mode("loud")


        class Mine(module.ShardTensor):
            pass

        assert not isinstance(x, Mine) and not issubclass(st.ShardTensor, Mine) and issubclass(Mine, module.ShardTensor)

        def as_models_ask(x, w):
            return F.relu(x) * w if isinstance(x, module.ShardTensor) else x

        torch._dynamo.reset()
        compiled = torch.compile(as_models_ask, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, torch.ones(3)).full_tensor(), x.full_tensor())
        assert torch.equal(compiled(mine, torch.ones(3)), mine)


# ---- handlers ----


def named_op():
    if not hasattr(torch.ops, "sttest_theirs") or not hasattr(torch.ops.sttest_theirs, "twice"):

        @torch.library.custom_op("sttest_theirs::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        named_op.call = twice
    return named_op.call


@on_ranks(2)
def test_handlers():
    with theirs() as module:
        mesh = mesh_here()
        kind = module.ShardTensor
        x = kind.from_local(torch.ones(2 + dist.get_rank(), 3), mesh, [module.Shard(0)])
        seen = []

        def handler(func, types, args, kwargs):
            seen.append([type(a).__name__ for a in args])
            local = func(*(a.to_local() if isinstance(a, kind) else a for a in args), **kwargs)
            return kind.from_local(local, mesh, [module.Shard(0)], args[0]._spec.sharding_shapes())

        kind.register_function_handler(F.hardshrink, handler)
        kind.register_named_function_handler("sttest_theirs.twice.default", handler)  # before the op exists
        try:
            assert torch.equal(F.hardshrink(x).full_tensor(), torch.ones(5, 3))
            twice = named_op()
            for call in (twice, torch.ops.sttest_theirs.twice, torch.ops.sttest_theirs.twice.default):
                assert torch.equal(call(x).full_tensor(), torch.full((5, 3), 2.0))
            kind.register_function_handler(torch.add, lambda func, types, args, kwargs: [type(a).__name__ for a in args])
            assert torch.add(x, torch.ones(3)) == ["ShardTensor", "ShardTensor"]
            with kind.promotion_mode("disabled"):
                assert torch.add(x, torch.ones(3)) == ["ShardTensor", "Tensor"]
        finally:
            for target in (F.hardshrink, torch.add, "sttest_theirs.twice.default"):
                kind.unregister_handler(target)
        assert seen == [["ShardTensor"]] * 4
        torch.testing.assert_close(torch.add(x, x).full_tensor(), torch.full((5, 3), 2.0))


# ---- halos and rings ----

# mesh, mesh dim, lengths of the pieces, rows of the halo, zeros at the edges
HALOS = [
    ((2,), 0, [5, 4], 2, 0),
    ((3,), 0, [3, 1, 4], 3, 1),  # a thin piece: rows of further ranks
    ((3,), 0, [3, 0, 4], 2, 2),
    ((2, 2), 1, [2, 5], 1, 0),
    ((2, 2), 0, [2, 5], 2, 0),
    ((2,), 0, [5, 4], 0, 0),
]


def run_halo(shape, mesh_dim, lengths, halo, edge):
    with theirs() as module:
        from oracle import mesh_of

        mesh = mesh_of(shape)
        other, me = mesh.get_coordinate()[1 - mesh_dim] if mesh.ndim > 1 else 0, mesh.get_coordinate()[mesh_dim]
        whole = torch.randn(2, sum(lengths), 3, dtype=torch.float64) + other
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        config = module.HaloConfig(mesh_dim=mesh_dim, tensor_dim=1, halo_size=halo, edge_padding_size=edge)
        mine = whole[:, starts[me] : starts[me + 1]].clone().requires_grad_()
        padded = module.halo_padding(mine, mesh, config)
        zeros = torch.zeros(2, edge, 3, dtype=torch.float64)
        last = len(lengths) - 1
        want = [
            zeros if me == 0 else whole[:, starts[me] - halo : starts[me]],
            mine,
            zeros if me == last else whole[:, starts[me + 1] : starts[me + 1] + halo],
        ]
        assert torch.equal(padded, torch.cat(want, 1))
        assert torch.equal(module.unhalo_padding(padded, mesh, config), mine)
        # Each row counts as often as ranks have it.
        (grad,) = torch.autograd.grad(padded.sum(), mine)
        times = torch.zeros(sum(lengths), dtype=torch.float64)
        for i in range(len(lengths)):
            times[starts[i] - halo * (i > 0) : starts[i + 1] + halo * (i < last)] += 1
        assert torch.equal(grad, times[starts[me] : starts[me + 1]].view(1, -1, 1).expand_as(mine))


@pytest.mark.parametrize("case", HALOS, ids=str)
def test_halo(pools, case):
    pools(math.prod(case[0])).run(run_halo, *case)


@on_ranks(2)
def test_halo_in_graphs():
    """A graph holds the removal of a halo, and is split where the ranks exchange sizes."""
    with theirs() as module:
        mesh, config = mesh_here(), module.HaloConfig(0, 0, 1, edge_padding_size=2)
        mine = torch.arange(12.0).reshape(4, 3) + 100 * dist.get_rank()
        padded = module.halo_padding(mine, mesh, config)

        def without(t):
            return module.unhalo_padding(t * 2, mesh, config) + 1

        def with_halo(t):
            return module.halo_padding(t * 2, mesh, config) + 1

        torch._dynamo.reset()
        assert torch.equal(torch.compile(without, backend="aot_eager", fullgraph=True)(padded), mine * 2 + 1)
        assert torch.equal(torch.compile(with_halo, backend="aot_eager")(mine)[2 if dist.get_rank() == 0 else 1 :][:4], mine * 2 + 1)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="the ranks exchange sizes"):
            torch.compile(with_halo, backend="aot_eager", fullgraph=True)(mine)


@pytest.mark.parametrize(("shape", "mesh_dim"), [((2,), 0), ((3,), 0), ((2, 2), 0), ((2, 2), 1)], ids=str)
@on_ranks(of="shape")
def test_ring(shape, mesh_dim):
    with theirs() as module:
        from oracle import mesh_of

        mesh = mesh_of(shape)
        n, me = mesh.size(mesh_dim), mesh.get_coordinate()[mesh_dim]
        rows = [3, 0, 2][:n]
        for direction, step in (("forward", 1), ("backward", -1)):
            for method in ("a2a", "p2p"):
                config = module.RingPassingConfig(mesh_dim=mesh_dim, mesh_size=n, ring_direction=direction, communication_method=method)
                t, other = torch.full((rows[me], 2), 1.0 + me, requires_grad=True), (me - step) % n
                got = module.perform_ring_iteration(t, mesh, config, torch.Size([rows[other], 2]))
                assert torch.equal(got, torch.full((rows[other], 2), 1.0 + other))
                (grad,) = torch.autograd.grad((got * (1 + me)).sum(), t)
                assert torch.equal(grad, torch.full_like(t, 1.0 + (me + step) % n))
                if method == "a2a":
                    with pytest.raises(ValueError, match=r"perform_ring_iteration_async only supports p2p communication.*'a2a'"):
                        module.perform_ring_iteration_async(torch.ones(2), mesh, config)
                    continue
                same, handles = module.perform_ring_iteration_async(torch.full((2,), float(me)), mesh, config)
                for handle in handles:
                    handle.wait()
                assert same.tolist() == [other] * 2
                buffer = torch.empty(2)
                assert module.perform_ring_iteration_async(torch.full((2,), float(me)), mesh, config, buffer)[0] is buffer


@on_ranks(2)
def test_refused_on_all_ranks():
    with theirs() as module:
        from oracle import mesh_here

        mesh, rank = mesh_here(), dist.get_rank()

        def raises(error, text, call, *args, **options):
            with pytest.raises(error, match=text):
                call(*args, **options)
            dist.barrier()

        raises(ValueError, "'communication_method' is 'mail'", module.HaloConfig, 0, 0, 1, communication_method="mail")
        raises(ValueError, "needs communication_method='a2a'", module.HaloConfig, 0, 0, 1, async_op=True, communication_method="p2p")
        raises(ValueError, "'ring_direction' is 'up'", module.RingPassingConfig, 0, 2, "up")
        raises(ValueError, "has 2 rows before or after it, the halo 3", module.halo_padding, torch.ones(2 + 2 * rank), mesh, module.HaloConfig(0, 0, 3))
        raises(ValueError, "'mesh_size' is 3", module.perform_ring_iteration, torch.ones(2), mesh, module.RingPassingConfig(0, 3))
        raises(ValueError, "'src_mesh_rank' is 2", module.sync_module_over_mesh, Net(), mesh, 2)
        raises(RuntimeError, "names, sizes or dtypes differ", module.sync_module_over_mesh, torch.nn.Linear(2, 2 + rank), mesh)
        raises(RuntimeError, "no plain tensors", module.sync_module_over_mesh, module.distribute_module(Net(), mesh), mesh)
