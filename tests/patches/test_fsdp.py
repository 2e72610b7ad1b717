"""FSDP2 trains as one process does: alone, over tensor parallelism, for sizes that do not divide by the ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from oracle import mesh_of
from pool import on_ranks
from shardtensor import _C, Shard, ShardTensor, distribute_tensor, init_device_mesh, replace_dtensor
from shardtensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch import nn
from torch.distributed.fsdp import fully_shard


def train(ours, plain, batches, accumulate=1):
    """Both take the same steps; the losses and the clipped norms agree, and so do the parameters in the end."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (ours, plain)]
    for i, x in enumerate(batches):
        losses, norms = [], []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            if (i + 1) % accumulate == 0:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
                optimizer.step()
                optimizer.zero_grad()
        assert losses[0] == pytest.approx(losses[1], rel=1e-9), i
        assert norms == pytest.approx(norms[1:] * 2, rel=1e-9), i
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.data, msg=lambda text, name=name: f"{name}: {text}")


def columns():
    """FSDP's options for cutting along the last dim, whatever its size."""
    return {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)}


def needs_uneven_columns():
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    if not hasattr(FSDPParam, "_init_sharding_spec"):
        pytest.skip("before torch 2.15 FSDP2 cuts the first dim alone unevenly")


def fully_sharded(over, options):
    from test_parallel import MLP

    plain = nn.Sequential(MLP(7))
    ours = copy.deepcopy(plain)
    if over == "tensor parallel":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
        style = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(ours[0], mesh["tp"], style)
        mesh = mesh["dp"]
    elif over == "replicas":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    accumulate = options.pop("accumulate", 1)
    if options.pop("columns", False):
        options |= columns()
    fully_shard(ours[0], mesh=mesh, **options)
    fully_shard(ours, mesh=mesh, **options)
    train(ours, plain, torch.randn(4, 4, 6, dtype=torch.float64), accumulate)


OPTIONS = {
    "usual": {},
    "kept": dict(reshard_after_forward=False),
    "accumulated": dict(accumulate=2),
    "columns": dict(columns=True),
    "columns_kept": dict(columns=True, reshard_after_forward=False),
}

MESHES = [("nothing", 3), *((over, world) for over in ("nothing", "replicas", "tensor parallel") for world in (2, 4))]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("over", "world"), MESHES)
def test_trains_as_one_process(pools, over, world, options):
    if "columns" in options:
        needs_uneven_columns()
    pools(world).run(fully_sharded, over, dict(OPTIONS[options]))


@on_ranks(2)
def test_later_steps():
    """The hooks make no more functions that dynamo skips; gradients have the layouts and dtypes that FSDP's specs say."""
    with replace_dtensor():
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        for module in (model[0], model):
            fully_shard(module)
        model.to(torch.float64)  # FSDP makes new specs
        made, disable = [], torch._dynamo.disable
        for step in range(3):
            torch._dynamo.disable = lambda *args, **kwargs: made.append(args) or disable(*args, **kwargs)
            try:
                model(torch.randn(4, 5, dtype=torch.float64)).sum().backward()
            finally:
                torch._dynamo.disable = disable
            for p in model.parameters():
                assert type(p.grad) is ShardTensor and _C.layout(p.grad) == _C.layout(p)
                assert p.grad.dtype == torch.float64 and p.grad.shape == p.shape
            if step == 0:
                made.clear()
        assert made == []


@on_ranks(4)
def test_gradients_together():
    """The gradients of norms over pieces of a sequence are summands over the inner mesh. FSDP's group adds them up in one call."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.LayerNorm(6, dtype=torch.float64) for _ in range(3)))
    for p in plain.parameters():
        nn.init.normal_(p)
    ours = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    for norm in ours:
        parallelize_module(norm, mesh["tp"], SequenceParallel(use_local_output=False))
    fully_shard(ours, mesh=mesh["dp"])
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    inner = mesh["tp"]
    for _ in range(2):
        plain.zero_grad()
        ours.zero_grad()
        loss = ours(distribute_tensor(x, inner, [Shard(1)])).square().sum().full_tensor()
        _C.reset_comm_counts()
        loss.backward()
        assert _C.comm_counts()["all_reduce"] == (1, 6 * x.shape[-1] * 8)
        plain(x).square().sum().backward()
        for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, msg=lambda text, name=name: f"{name}: {text}")


def nothing_of_a_piece(hidden, options):
    """Some ranks of the tensor-parallel dim have no hidden unit, or none has."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(4, hidden), nn.GELU(), nn.Linear(hidden, 3))
    with replace_dtensor():
        ours = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(ours, mesh=mesh["dp"], **options())
        for p in ours.parameters():
            assert p.to_local().shape == p.local_sizes()
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, plain)]
        for step in range(3):
            x = torch.randn(8, 4)
            ours(x.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
            plain(x).square().mean().backward()
            for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(a.grad.full_tensor(), b.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            ours.load_state_dict(copy.deepcopy(ours.state_dict()), assign=step == 1)
            if step == 1:
                optimizers[0] = torch.optim.AdamW(ours.parameters(), lr=0.1)
                optimizers[1] = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.full_tensor(), b)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(("hidden", "options"), [(1, dict), (1, columns), (0, dict)])
def test_nothing_of_a_piece(pools, hidden, options):
    needs_uneven_columns()
    pools(4).run(nothing_of_a_piece, hidden, options)


@on_ranks(2)
def test_optimizer_from_before():
    with replace_dtensor():
        model = nn.Linear(4, 3)
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        fully_shard(model, mesh=mesh_of((2,)))
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError, match=r"SGD.step: 2 of its 2 parameters .* fully_shard has replaced them"):
            early.step()
        late = torch.optim.SGD(model.parameters(), lr=0.1)
        late.step()
        early.param_groups[0]["params"] = list(model.parameters())  # as accelerate does
        early.step()
