"""torch's training tools on modules cut unevenly: checkpointing, FSDP2, schedulers, scaling, averages, clipping, Muon."""

from __future__ import annotations

import copy
import itertools
import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from oracle import EMPTY, EVEN, UNEVEN, mesh_of, place
from pool import on_ranks
from shardtensor import _C, DeviceMesh, Replicate, Shard, ShardTensor, distribute_module, distribute_tensor, init_device_mesh
from shardtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from test_fsdp import columns, needs_uneven_columns
from test_optimizers import OPTIMIZERS
from test_parallel import DOUBLE, MLP, Attention, full, mesh_here
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# ---- activation checkpointing ----


class Dropped(nn.Module):
    """Two blocks with dropout where their features are cut; `calls` counts how often each has run."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([MLP(7), MLP(4)])
        self.blocks[1].up = nn.Linear(5, 4, dtype=DOUBLE)
        self.run = lambda block, x: block(x)
        self.calls = [0, 0]

    def block(self, i, x):
        self.calls[i] += 1
        block = self.blocks[i]
        return block.down(nn.functional.dropout(torch.relu(block.up(x)), 0.4))

    def forward(self, x):
        for i in range(len(self.blocks)):
            x = self.run(partial(self.block, i), x)
        return x


def _save_linears():
    def policy(context, op, *args, **kwargs):
        save = op is torch.ops.aten.linear.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


CHECKPOINTS = {
    "reentrant": dict(use_reentrant=True),
    "not reentrant": dict(use_reentrant=False),
    "no early stop": dict(use_reentrant=False, early_stop=False),
    "selective": dict(use_reentrant=False, context_fn=_save_linears),
    "recomputed alike": dict(use_reentrant=False, determinism_check="default"),
}


def tensor_parallel(module, names, local=True):
    style = {}
    for name in names:
        style |= {f"{name}up": ColwiseParallel(use_local_output=False), f"{name}down": RowwiseParallel(use_local_output=local)}
    return parallelize_module(module, mesh_here(), style)


@pytest.mark.parametrize("local", [True, False], ids=["local", "distributed"])
@pytest.mark.parametrize("how", CHECKPOINTS)
@on_ranks(2, 4)
def test_checkpointing(how, local):
    """The same values, gradients and random state as without checkpoints and as with the whole model on every rank."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(op)
            return op(*args, **(kwargs or {}))

    plain = Dropped()
    kept, ours = (tensor_parallel(copy.deepcopy(plain), ["blocks.*."], local) for _ in range(2))
    whole = distribute_module(plain, mesh_here())
    ours.run = lambda block, x: checkpoint(block, x, **CHECKPOINTS[how])
    x = torch.randn(3, 6, dtype=DOUBLE)
    results = []
    for model in (whole, kept, ours):
        torch.manual_seed(5)
        given = x.clone().requires_grad_()
        if model is whole:
            given = distribute_tensor(x, mesh_here(), [Replicate()]).requires_grad_()
        for _ in range(2):
            out = model(given)
            seen = []
            with Ops():
                out.square().sum().backward()
        results.append((full(out.detach()), full(given.grad), torch.get_rng_state(), [full(p.grad) for p in model.parameters()]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])
    assert kept.calls == [2, 2] and ours.calls == [4, 4]
    aten = torch.ops.aten
    assert aten.bernoulli_.float in seen and aten.relu.default in seen
    # Without early stop, as in the reentrant kind, the last linear runs again too.
    assert seen.count(aten.linear.default) == {"selective": 0}.get(how, 4 if how in ("reentrant", "no early stop") else 2)


class Noisy(nn.Sequential):
    """Dropout on cut activations."""

    def forward(self, x):
        for block in self:
            x = block.down(nn.functional.dropout(block.up(x), 0.3))
        return x


@pytest.mark.parametrize("kind", ["NO_REENTRANT", "REENTRANT", "offload"])
@on_ranks(2, 4)
def test_checkpoint_wrappers(kind):
    """The wrapper modules of torch.distributed.algorithms, put around the blocks by a function that asks for their class."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

    plain = nn.Sequential(Noisy(MLP(7)), nn.Tanh(), Noisy(MLP(4)))
    plain[2][0].up = nn.Linear(5, 4, dtype=DOUBLE)
    kept, ours = (tensor_parallel(copy.deepcopy(plain), ["0.0.", "2.0."]) for _ in range(2))
    if kind == "offload":
        ours = torchs.offload_wrapper(ours)
    else:
        wrapper = partial(torchs.checkpoint_wrapper, checkpoint_impl=getattr(torchs.CheckpointImpl, kind))
        torchs.apply_activation_checkpointing(ours, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, Noisy))
        assert isinstance(ours[0], torchs.CheckpointWrapper)
    assert list(ours.state_dict()) == list(kept.state_dict())
    results = []
    for model in (kept, ours):
        torch.manual_seed(5)
        x = torch.linspace(-1, 1, 24, dtype=DOUBLE).view(4, 6).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, *(full(p.grad) for p in model.parameters())))
    torch.testing.assert_close(results[1], results[0])


# ---- FSDP2 ----


class Layers(nn.Sequential):
    def __init__(self):
        super().__init__(MLP(7), nn.Tanh(), nn.Linear(5, 6, dtype=DOUBLE), MLP(3))


def fsdp_mesh(over, ours):
    """The mesh that FSDP is given; Makes `ours` tensor-parallel if `over` asks for it."""
    world = dist.get_world_size()
    if over == "nothing":
        return mesh_here()
    if over == "replicas":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    style = {}
    for name in ("0.", "3."):
        style |= {f"{name}up": ColwiseParallel(), f"{name}down": RowwiseParallel()}
    parallelize_module(ours, mesh["tp"], style)
    return mesh["dp"]


def shard_fully(model, mesh, **options):
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def frozen(model):
    model[0].up.weight.requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def losses(model, steps=3, sync_every=1, seed=1):
    """The losses of some steps, each of `sync_every` backwards. Every rank has the same batches."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    out = []
    for _ in range(steps):
        for i in range(sync_every):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(i + 1 == sync_every)
                model.set_is_last_backward(i + 1 == sync_every)
            x = torch.randn(4, 6, generator=generator, dtype=DOUBLE)
            loss = model(x).square().mean()
            loss.backward()
            out.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return out


def same_parameters(ours, plain, **tolerance):
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(
            full(a.detach()), b.detach(), msg=lambda text, name=name: f"{name}: {text}", check_dtype=False, **tolerance
        )


def fsdp_options(name):
    return {
        "usual": {},
        "kept": dict(reshard_after_forward=False),
        "smaller groups": dict(reshard_after_forward=2),
        "offloaded": dict(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "reduced in double": dict(mp_policy=MixedPrecisionPolicy(reduce_dtype=DOUBLE)),
        "columns": columns(),
        "columns offloaded": columns() | dict(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    }[name]


def trains_alike(over, options, freeze, sync_every):
    plain = Layers()
    if freeze:
        frozen(plain)
    ours = copy.deepcopy(plain)
    mesh = fsdp_mesh(over, ours)
    shard_fully(ours, mesh, **fsdp_options(options))
    wanted = losses(plain, sync_every=sync_every)
    assert losses(ours, sync_every=sync_every) == pytest.approx(wanted, rel=1e-9)
    for layer in (ours[0], ours[2], ours[3], ours):
        layer.reshard()
    same_parameters(ours, plain)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert a.requires_grad == b.requires_grad


FSDP = [
    ("nothing", "kept", False, 2),
    ("nothing", "offloaded", True, 1),
    ("nothing", "smaller groups", False, 1),
    ("nothing", "usual", True, 2),
    ("replicas", "usual", True, 1),
    ("replicas", "offloaded", False, 2),
    ("nothing", "columns", True, 2),
    ("nothing", "columns offloaded", True, 1),
    ("tensor parallel", "columns", False, 2),
    ("tensor parallel", "usual", True, 2),
    ("tensor parallel", "offloaded", False, 1),
    ("tensor parallel", "kept", True, 1),
    ("tensor parallel", "reduced in double", False, 1),
]


@pytest.mark.parametrize(("over", "options", "freeze", "sync_every"), FSDP)
def test_fsdp(ranks, over, options, freeze, sync_every):
    if "columns" in options:
        needs_uneven_columns()
    ranks.run(trains_alike, over, options, freeze, sync_every)


def mixed_precision(over, options="usual"):
    """Computes in bfloat16, as a single process does under the same casts; the parameters and the steps stay in float32."""
    plain = Layers().float()
    ours = copy.deepcopy(plain)
    mesh = fsdp_mesh(over, ours)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    shard_fully(ours, mesh, mp_policy=policy, **fsdp_options(options))
    x = torch.randn(4, 6)
    low = copy.deepcopy(plain).bfloat16()
    want, got = low(x.bfloat16()), ours(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want.float(), rtol=0.05, atol=0.01)
    got.square().mean().backward()
    want.square().mean().backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), low.named_parameters(), strict=True):
        assert a.dtype == a.grad.dtype == torch.float32, name
        torch.testing.assert_close(
            full(a.grad), b.grad.float(), rtol=0.1, atol=0.02, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.optim.SGD(ours.parameters(), lr=0.1).step()
    torch.optim.SGD(low.parameters(), lr=0.1).step()
    same_parameters(ours, low.float(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("over", ["nothing", "tensor parallel"])
def test_fsdp_mixed_precision(ranks, over):
    ranks.run(mixed_precision, over)


def from_meta(over, options="usual"):
    """Made without memory, sharded, then given memory and values; a single process with those values has the same losses."""
    with torch.device("meta"):
        ours = Layers()
    mesh = fsdp_mesh(over, ours)
    shard_fully(ours, mesh, **fsdp_options(options))
    assert all(p.is_meta for p in ours.parameters())
    ours.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in ours.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    plain = Layers()
    with torch.no_grad():
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            value = full(a.detach())
            assert value.abs().sum() > 0 and value.abs().max() < 1
            b.copy_(value)
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-9)
    return [full(p.detach()).tolist() for p in ours.parameters()]


@pytest.mark.parametrize("over", ["nothing", "tensor parallel"])
def test_fsdp_from_meta(ranks, over):
    first, *others = ranks.run(from_meta, over)
    assert all(values == first for values in others)


@pytest.mark.parametrize("over", ["nothing", "tensor parallel"])
@pytest.mark.parametrize("what", ["from_meta", "mixed_precision", "stored_in_columns"])
def test_fsdp_of_columns(ranks, over, what):
    """FSDP cuts along a dim that is not the first and that the ranks do not divide."""
    needs_uneven_columns()
    ranks.run(globals()[what], over, "columns")


def stored_in_columns(over, options):
    """State dicts in and out, also with assign=True. Cutting a second time, as torch does along the first dim, is refused."""
    plain, other = Layers(), Layers()
    ours = copy.deepcopy(plain)
    mesh = fsdp_mesh(over, ours)
    shard_fully(ours, mesh, **fsdp_options(options))
    weight = ours[2].weight.to_local()  # 6 x 5
    assert tuple(weight.shape) == (6, {4: [2, 2, 1, 0], 2: [3, 2]}[mesh.size()][mesh.get_local_rank()])
    for assign in (False, True):
        before = {name: value.detach().clone() for name, value in ours.state_dict().items()}
        assert losses(ours) == pytest.approx(losses(copy.deepcopy(plain)), rel=1e-9)
        ours.load_state_dict(before, assign=assign)
        same_parameters(ours, plain)
    set_model_state_dict(ours, other.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert losses(ours) == pytest.approx(losses(other), rel=1e-9)
    state = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.testing.assert_close(state, dict(other.state_dict()))
    if mesh.size() > 2:
        with pytest.raises(NotImplementedError, match="does not support uneven sharding on dim 1"):
            shard_fully(Layers(), mesh, **fsdp_options(options), reshard_after_forward=2)


def cut_in_heads(replicas):
    """FSDP cuts further what tensor parallelism has cut in whole heads: its pieces are ShardTensors that know where they are."""
    plain = Attention(5, 2)
    ours = copy.deepcopy(plain)
    shape, names = ((1, 2, 2), ("replicate", "dp", "tp")) if replicas else ((2, 2), ("dp", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    columns = {name: ColwiseParallel(multiple_of=2, use_local_output=False) for name in "qkv"}
    parallelize_module(ours, mesh["tp"], {**columns, "out": RowwiseParallel(multiple_of=2)})
    fully_shard(ours, mesh=mesh[names[:-1]])
    assert all(type(p) is ShardTensor and p.device_mesh.mesh_dim_names == names for p in ours.parameters())
    same_parameters(ours, plain)
    x = torch.randn(2, 5, 6, dtype=DOUBLE)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (ours, plain)]
    for _ in range(2):
        values = []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            loss = model(x).square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            values.append((loss.item(), full(norm).item()))
            if model is ours:
                assert all(type(p.grad) is ShardTensor and p.grad._layout == p._layout for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        assert values[0] == pytest.approx(values[1], rel=1e-9)
    ours.reshard()
    same_parameters(ours, plain)
    state = {name: value.full_tensor() for name, value in ours.state_dict().items()}
    torch.testing.assert_close(state, dict(plain.state_dict()))
    held = [len(p.__create_chunk_list__()) for p in ours.parameters()]
    return held, ours.q.weight.to_local().shape[0], ours.q.weight._layout.intervals(0, 10)


@pytest.mark.parametrize("replicas", [False, True], ids=["flat", "hybrid"])
def test_fsdp_over_whole_heads(pools, replicas):
    results = pools(4).run(cut_in_heads, replicas)
    assert [rows for _, rows, _ in results] == [3, 2, 3, 2]  # 6 and 4 rows, each in two
    assert [where for _, _, where in results] == [[(0, 3)], [(6, 2)], [(3, 3)], [(8, 2)]]
    assert all(count == 1 for held, _, _ in results for count in held)


def on_one_mesh():
    """FSDP along one dim of the mesh that the parameters are on already, cut unevenly along the other."""
    from torch.distributed.fsdp import DataParallelMeshDims  # not in torch 2.11

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = MLP(7)
    ours = copy.deepcopy(plain)
    for name, placement, shapes in (
        ("up.weight", Shard(0), [[5, 6], [2, 6]]),
        ("up.bias", Shard(0), [[5], [2]]),
        ("down.weight", Shard(1), [[5, 5], [5, 2]]),
        ("down.bias", Replicate(), None),
    ):
        cut = {} if shapes is None else dict(sharding_shapes={1: shapes})
        value = distribute_tensor(plain.get_parameter(name).detach(), mesh, [Replicate(), placement], **cut)
        module, _, key = name.partition(".")
        setattr(ours.get_submodule(module), key, nn.Parameter(value))
    fully_shard(ours, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    ours.set_gradient_divide_factor(1.0)  # the losses here are of the whole batch
    same_parameters(ours, plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (ours, plain)]
    for _ in range(2):
        seen = []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            x = distribute_tensor(batch(), mesh, [Shard(0), Replicate()]) if model is ours else batch()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        assert seen[0] == pytest.approx(seen[1], rel=1e-9)
    ours.reshard()
    assert all(type(p) is ShardTensor for p in ours.parameters())
    same_parameters(ours, plain)


def test_fsdp_on_one_mesh(pools):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("this torch's FSDP wants a mesh of its own")
    pools(4).run(on_one_mesh)


# ---- schedulers, scaling, averages, Muon ----


class Mixed(nn.Sequential):
    """Its last layer is plain, so an optimizer gets parameters of both kinds."""

    def __init__(self):
        super().__init__(MLP(7), nn.Linear(5, 3, dtype=DOUBLE))


def pair():
    plain = Mixed()
    return tensor_parallel(copy.deepcopy(plain), ["0."]), plain


def batch():
    return torch.linspace(-1, 2, 24, dtype=DOUBLE).sin().view(4, 6)


SCHEDULERS = {
    "OneCycleLR": dict(max_lr=0.1, total_steps=5),
    "CosineAnnealingWarmRestarts": dict(T_0=2),
    "CyclicLR": dict(base_lr=0.01, max_lr=0.1, step_size_up=2),
    "ExponentialLR": dict(gamma=0.5),
    "ReduceLROnPlateau": dict(patience=0, factor=0.5),
}


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
@on_ranks(2, 4)
def test_schedulers(name, as_tensor):
    seen = []
    for model in (models := pair()):
        rate = torch.tensor(0.05) if as_tensor else 0.05
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **SCHEDULERS[name])
        steps = []
        for _ in range(4):
            loss = model(batch()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([loss] if name == "ReduceLROnPlateau" else []))
            steps.append((loss.item(), float(optimizer.param_groups[0]["lr"])))
        seen.append(steps)
    torch.testing.assert_close(seen[0], seen[1])
    assert len({rate for _, rate in seen[0]}) > 1 or name == "ReduceLROnPlateau"
    same_parameters(*models)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@on_ranks(2, 4)
def test_scaler(foreach):
    """An infinity on one rank makes all skip the step and halve the scale."""
    seen = []
    for model in (models := pair()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=foreach)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        steps = []
        for step in range(5):
            loss = model(batch()).square().mean()
            scaler.scale(loss).backward()
            weight = model[0].up.weight
            if step == 2:
                with torch.no_grad():  # the last row is the last rank's
                    piece = weight.grad.to_local() if hasattr(weight, "to_local") else weight.grad
                    if piece is weight.grad or dist.get_rank() == dist.get_world_size() - 1:
                        piece[-1] = float("inf")
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
            before = full(weight.detach()).clone()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, full(weight.detach())) == (step == 2)
            optimizer.zero_grad()
            steps.append((loss.item(), full(norm).item(), scaler.get_scale()))
        seen.append(steps)
    torch.testing.assert_close(seen[0], seen[1])
    assert [scale for _, _, scale in seen[0]] == [8, 16, 8, 8, 16]
    same_parameters(*models)


@pytest.mark.parametrize("kind", ["swa", "swa one by one", "ema", "ema one by one", "buffers"])
@on_ranks(2, 4)
def test_averaged_models(kind):
    from torch.optim import swa_utils

    options = {
        "swa": {},
        "swa one by one": dict(avg_fn=swa_utils.get_swa_avg_fn()),
        "ema": dict(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
        "ema one by one": dict(avg_fn=swa_utils.get_ema_avg_fn(0.9)),
        "buffers": dict(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True),
    }[kind]
    averages = []
    for model in pair():
        average = swa_utils.AveragedModel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = swa_utils.SWALR(optimizer, swa_lr=0.1, anneal_epochs=2)
        for _ in range(3):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            schedule.step()
        averages.append(average)
        assert not torch.allclose(full(average.module[0].up.weight), full(model[0].up.weight))
    ours, plain = averages
    assert type(ours.module[0].up.weight) is not type(plain.module[0].up.weight)
    same_parameters(ours, plain)
    torch.testing.assert_close(ours(batch()), plain(batch()))


def other_optimizers(name):
    models = pair()
    patch = pytest.MonkeyPatch()
    if name == "Muon":  # it computes in bfloat16, where the order of a sum changes the result
        from torch.optim import _muon

        patch.setattr(_muon, "torch", SimpleNamespace(**{**vars(torch), "bfloat16": DOUBLE}))
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # for torch 2.11
    values = []
    for model in models:
        parameters = {
            "Adafactor": list(model.parameters()),
            "LBFGS": list(model[0].parameters()),  # it joins them into one vector: all ShardTensors, or all plain
            "Muon": [p for p in model.parameters() if p.ndim == 2],
        }[name]
        options = dict(max_iter=5) if name == "LBFGS" else {}
        optimizer = getattr(torch.optim, name)(parameters, lr=0.05, **options)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(batch()).square().mean()
            loss.backward()
            return loss

        values.append([float(optimizer.step(closure)) for _ in range(3)])
    patch.undo()
    torch.testing.assert_close(values[0], values[1])
    assert values[0][2] < values[0][0]
    same_parameters(*models)


OTHERS = ["Adafactor", "LBFGS", "Muon"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers(ranks, name):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    ranks.run(other_optimizers, name)


def sparse_gradients():
    """There are none: the only optimizer for sparse gradients refuses dense ones, and the op that would make them raises."""
    weight = nn.Parameter(place(torch.ones(5, 4), mesh_here(), ("S(0)",), UNEVEN))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        torch.optim.SparseAdam([weight]).step()
    with pytest.raises(NotImplementedError, match="gradients of ShardTensors are dense, pass sparse=False"):
        nn.functional.embedding(place(torch.tensor([0, 1]), mesh_here(), ("R",), EVEN), weight, sparse=True)


def test_every_optimizer_of_torch(ranks):
    there = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
    assert there - {"Optimizer", "SparseAdam"} <= {*OPTIMIZERS, *OTHERS}
    ranks.run(sparse_gradients)


# ---- clipping over several meshes ----

AMONG = ["two meshes", "plain", "plain first", "plain and two meshes"]


def gradients(kind):
    """Plain gradients, and the same ones on the meshes that `kind` says."""
    world = dist.get_world_size()
    one, two = mesh_of((world,)), mesh_of((1, world))
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(5, 4, generator=generator, dtype=DOUBLE) for _ in range(5)]
    values[4].zero_()
    placed = [
        values[0].clone() if kind == "plain first" else place(values[0], one, ("S(0)",), UNEVEN),
        place(values[1], two, ("R", "S(1)"), UNEVEN) if "two" in kind else values[1].clone(),
        place(values[2], one, ("P",), EVEN),
        values[3].clone() if kind == "plain and two meshes" else place(values[3], one, ("S(1)",), EMPTY),
        place(values[4], two, ("S(0)", "S(1)"), UNEVEN),
    ]
    return values, placed


def with_gradients(values):
    out = []
    for value in values:
        parameter = torch.zeros_like(value)
        if hasattr(value, "placements") and any(p.is_partial() for p in value.placements):
            parameter = torch.zeros_like(value.redistribute(placements=[_replicate()]))
        out.append(nn.Parameter(parameter))
        out[-1].grad = value
    return out


def _replicate():
    return Replicate()


@pytest.mark.parametrize("foreach", [None, True, False], ids=["default", "foreach", "loop"])
@pytest.mark.parametrize("kind", AMONG)
@on_ranks(2, 4)
def test_clipping_among_meshes(kind, foreach):
    for order in (0.0, 1.0, 2.0, 3.0, float("inf")):
        values, placed = gradients(kind)
        cut = [t for t in placed if isinstance(t, ShardTensor) and not any(p.is_partial() for p in t.placements)]
        _C.reset_comm_counts()
        get_total_norm([values[0], *cut], order, foreach=foreach)
        meshes = {t._layout.mesh for t in cut}
        assert {name: calls for name, (calls, _) in _C.comm_counts().items()} == {"all_reduce": len(meshes)}
        want = get_total_norm(values, order, foreach=foreach)
        torch.testing.assert_close(full(get_total_norm(placed, order, foreach=foreach)), want)
        plain, ours = with_gradients(values), with_gradients(placed)
        torch.testing.assert_close(full(clip_grad_norm_(ours, 0.3, order, foreach=foreach)), want)
        clip_grad_norm_(plain, 0.3, order, foreach=foreach)
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(full(a.grad), b.grad)
    clip_grad_value_(plain, 0.01, foreach=foreach)
    clip_grad_value_(ours, 0.01, foreach=foreach)
    # The norm of one gradient, on its own mesh, clips all of them.
    norm, total = (get_total_norm([p[2].grad]) for p in (ours, plain))
    clip_grads_with_norm_(ours, 0.001, norm, foreach=foreach)
    clip_grads_with_norm_(plain, 0.001, total, foreach=foreach)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(full(a.grad), b.grad)
    plain[0].grad[0, 0] = float("nan")
    ours[0].grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .* non-finite"):
        get_total_norm([p.grad for p in ours], 2.0, error_if_nonfinite=True, foreach=foreach)


def apart(shape):
    """Copies differ: all ranks take stock DTensor's norm, in one message for each mesh dim that cuts a gradient."""
    mesh = mesh_of(shape)
    uncut = [Replicate()] * (len(shape) - 1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for layouts in itertools.product(*[([*uncut, Shard(0)], [Replicate()] * len(shape), [Shard(0), *uncut])] * 2):
        pieces = [torch.randn(3, 4, generator=generator, dtype=DOUBLE) for _ in layouts]
        ours, stock = (
            [kind.from_local(p, mesh, layout, run_check=False) for p, layout in zip(pieces, layouts, strict=True)]
            for kind in (ShardTensor, DTensor)
        )
        cut = {m for layout in layouts for m, placement in enumerate(layout) if placement.is_shard() and shape[m] > 1}
        for order in (2.0, -1.0, float("inf")):
            _C.reset_comm_counts()
            norm = get_total_norm(ours, order)
            full(norm)
            assert sum(calls for calls, _ in _C.comm_counts().values()) == len(cut)
            want = full(get_total_norm(stock, order))
            torch.testing.assert_close(full(norm), want)
            if layouts[0] != layouts[1]:  # plain tensors count as copies
                with_plain = get_total_norm([ours[0], pieces[1]], order)
                replicated = DTensor.from_local(pieces[1], mesh, [Replicate()] * len(shape), run_check=False)
                torch.testing.assert_close(with_plain, full(get_total_norm([stock[0], replicated], order)))
    # Of several dtypes, in one message still.
    pieces = [torch.full((3, 4), 1.0 + dist.get_rank() % shape[-1], dtype=dtype) for dtype in (torch.half, torch.float, torch.bfloat16)]
    layouts = [[Replicate()] * len(shape), [*uncut, Shard(0)], [*uncut, Shard(0)]]
    _C.reset_comm_counts()
    norm = full(get_total_norm([ShardTensor.from_local(p, mesh, at, run_check=False) for p, at in zip(pieces, layouts, strict=True)]))
    assert norm.dtype == torch.float and sum(calls for calls, _ in _C.comm_counts().values()) == 1
    squares = [(1.0 + r) ** 2 for r in range(shape[-1])]
    torch.testing.assert_close(norm.item(), (12 * (sum(squares) / len(squares) + 2 * sum(squares))) ** 0.5, rtol=5e-3, atol=0)
    parameters = with_gradients([place(torch.ones(5, 4), mesh, (*"R" * len(uncut), "S(0)"), UNEVEN), ours[1].clone()])
    before = parameters[1].grad.to_local().clone()
    norm = full(clip_grad_norm_(parameters, 0.5))
    torch.testing.assert_close(parameters[1].grad.to_local(), before * 0.5 / norm)
    parameters[1].grad.to_local()[0] = float("nan") if dist.get_rank() == 1 else 1.0  # a copy on one rank: all ranks raise
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(parameters, 0.5, error_if_nonfinite=True)


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
@on_ranks(2, 4)
def test_clipping_tells_of_copies_that_differ(order):
    from shardtensor.patches.clipping import _apart

    rank, mesh = dist.get_rank(), mesh_here()
    _apart.told = False
    told = []
    handler = logging.Handler()
    handler.emit = told.append
    logging.getLogger("shardtensor").addHandler(handler)
    try:
        cut = place(torch.zeros(5, 4), mesh, ("S(0)",), UNEVEN)
        for differ in (0, 0.01, 0.01):
            copies = torch.full((4,), 1 + differ * rank, dtype=torch.float32)
            get_total_norm([cut, ShardTensor.from_local(copies, mesh, [Replicate()], run_check=False)], order)
            assert _apart.told == (differ != 0)
        assert [(r.levelname, "differs between them" in r.getMessage()) for r in told] == [("WARNING", True)] * (rank == 0)
    finally:
        logging.getLogger("shardtensor").removeHandler(handler)


def test_clipping_by_one_norm_where_copies_differ(ranks):
    for shape in [(ranks.world,)] + [(2, 2)] * (ranks.world == 4):
        ranks.run(apart, shape)


@on_ranks(2, 4)
def test_clipping_outside_a_mesh_raises():
    """The last rank is outside one of the meshes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inner = DeviceMesh("cpu", list(range(world - 1)))
    ours = with_gradients([place(torch.ones(5, 4), mesh, ("S(0)",), EVEN) for mesh in (mesh_of((world,)), inner)])
    if rank == world - 1:
        with pytest.raises(RuntimeError, match=rf"get_total_norm: tensor 1 is S\(0\) .* rank {rank} is not in.*redistribute"):
            torch.nn.utils.clip_grad_norm_(ours, 0.3)
