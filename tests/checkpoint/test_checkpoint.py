"""Checkpoints and state dicts: written in one layout on some ranks, read into another on others."""

from __future__ import annotations

import copy
import importlib
import io
import math
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from oracle import mesh_of, place, whole
from pool import on_ranks
from shardtensor import _C, Replicate, Shard, distribute_tensor, init_device_mesh
from shardtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardtensor.tensor._layout import make_layout
from shardtensor.tensor._pieces import _piece
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

SIZES = (7, 5)

# Mesh shape, placements (SS: _StridedShard, with its split factor), cuts where they are explicit.
LAYOUTS = {
    "even 2": ((2,), ("S0",)),
    "uneven 2": ((2,), ("S0",), [[1, 6]]),
    "uneven 3": ((3,), ("S0",), [[4, 0, 3]]),
    "columns 3": ((3,), ("S1",), [[0, 4, 1]]),
    "whole 3": ((3,), ("R",)),
    "even 4": ((4,), ("S0",)),
    "one has all 4": ((4,), ("S0",), [[0, 0, 7, 0]]),
    "grid 4": ((2, 2), ("S0", "S1"), [[2, 5], [4, 1]]),
    "even grid 4": ((2, 2), ("S0", "S1")),
    "nested 4": ((2, 2), ("S0", "S0"), [[5, 2], [4, 1, 0, 2]]),
    "strided 4": ((2, 2), ("SS0/2", "S0")),
    "three boxes 4": ((2, 2), ("SS0/3", "S1"), [None, [1, 4]]),
    "replicas 4": ((2, 2), ("R", "S1"), [None, [1, 4]]),
}

PAIRS = [
    ("uneven 2", "even 4"),
    ("even 2", "uneven 3"),
    ("even 4", "uneven 2"),
    ("uneven 3", "columns 3"),
    ("columns 3", "uneven 3"),
    ("uneven 2", "grid 4"),
    ("grid 4", "uneven 3"),
    ("nested 4", "uneven 2"),
    ("uneven 3", "nested 4"),
    ("strided 4", "uneven 3"),
    ("uneven 3", "three boxes 4"),
    ("three boxes 4", "strided 4"),
    ("three boxes 4", "columns 3"),
    ("one has all 4", "uneven 2"),
    ("even 2", "one has all 4"),
    ("replicas 4", "columns 3"),
    ("columns 3", "replicas 4"),
    ("whole 3", "nested 4"),
    ("nested 4", "whole 3"),
]

STOCK = ["even 2", "even 4", "even grid 4", "whole 3"]


def world(name):
    return math.prod(LAYOUTS[name][0])


def values():
    return torch.arange(1.0, 36.0, dtype=torch.float64).view(SIZES)


def objects(texts):
    def one(text):
        if text.startswith("SS"):
            dim, factor = text[2:].split("/")
            return _StridedShard(int(dim), split_factor=int(factor))
        return Replicate() if text == "R" else Shard(int(text[1:]))

    return [one(text) for text in texts]


def lay(value, name, device=None):
    """The value in the layout of that name, without communication."""
    shape, texts, *cuts = LAYOUTS[name]
    layout = make_layout(mesh_of(shape), objects(texts), value.ndim, *cuts, who="test")
    local = _piece(value, layout).clone()
    return _C.wrap(local.to(device) if device else local, layout, list(value.shape), list(value.stride()))


def replicate(value, name, device=None):
    mesh = mesh_of(LAYOUTS[name][0])
    return st.distribute_tensor(value.to(device) if device else value, mesh, [st.Replicate()] * mesh.ndim, src_data_rank=None)


def state_of(value, name, kind):
    """A state dict with each kind of value. `value` is laid out as `name` says."""
    scalar, nothing = value.sum(), value[:0]
    rest = {"plain": value[0].clone(), "number": int(scalar), "nested": {"scalar": scalar}}
    if kind == "plain":
        return {"x": value.clone(), "none": nothing.clone(), **rest}
    if kind == "stock":
        from torch.distributed.tensor import Replicate, distribute_tensor

        mesh = mesh_of(LAYOUTS[name][0])
        placements = objects(LAYOUTS[name][1])
        rest["nested"]["scalar"] = distribute_tensor(scalar, mesh, [Replicate()] * mesh.ndim)
        return {"x": distribute_tensor(value, mesh, placements), "none": distribute_tensor(nothing, mesh, placements), **rest}
    rest["nested"]["scalar"] = replicate(scalar, name)
    return {"x": lay(value, name), "none": replicate(nothing, name), **rest}


def plain(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def save(path, name, kind="ours"):
    dcp.save(state_of(values(), name, kind), checkpoint_id=path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    for key in ("x", "nested.scalar"):  # no element is written twice, and every box is in the file
        written = metadata.state_dict_metadata[key]
        assert sum(math.prod(c.sizes) for c in written.chunks) == math.prod(written.size)
        assert sum(index.fqn == key for index in metadata.storage_data) == len(written.chunks)


def load(path, name, kind="ours"):
    """Loads in place, reads no more than this rank's elements, and compares with what was saved."""
    class Planner(dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            self.read = sum(math.prod(item.lengths) for item in plan.items if item.dest_index.fqn == "x")
            return plan

    state, want, planner = state_of(torch.zeros_like(values()), name, kind), state_of(values(), name, "plain"), Planner()
    before = dict(state)
    dcp.load(state, checkpoint_id=path, planner=planner)
    x = state["x"]
    assert x is before["x"] and state["number"] == want["number"]
    for key in ("x", "none", "plain"):
        assert type(state[key]) is type(before[key])
        torch.testing.assert_close(plain(state[key]), want[key], rtol=0, atol=0)
    torch.testing.assert_close(plain(state["nested"]["scalar"]), want["nested"]["scalar"], rtol=0, atol=0)
    assert planner.read == (x._local_tensor if isinstance(x, DTensor) else x).numel()
    if kind == "ours":
        assert torch.equal(whole(x), values())  # and the piece is as large as the layout says


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_other_layout(pools, saved, loaded, tmp_path):
    pools(world(saved)).run(save, str(tmp_path), saved)
    pools(world(loaded)).run(load, str(tmp_path), loaded)


@pytest.mark.parametrize("stock", STOCK)
def test_stock_and_plain(pools, stock, tmp_path):
    for number, other in enumerate(("uneven 3", "three boxes 4")):
        paths = [str(tmp_path / f"{number}{way}") for way in ("there", "back", "plain")]
        pools(world(stock)).run(save, paths[0], stock, "stock")
        pools(world(other)).run(load, paths[0], other)
        pools(world(other)).run(save, paths[1], other)
        pools(world(stock)).run(load, paths[1], stock, "stock")
        pools(world(stock)).run(load, paths[1], stock, "plain")
        pools(world(stock)).run(save, paths[2], stock, "plain")
        pools(world(other)).run(load, paths[2], other)


@pytest.mark.parametrize("name", ["uneven 2", "uneven 3", "three boxes 4"])
def test_one_file_and_back(pools, name, tmp_path):
    """torch's own converters, without ranks."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    there, file, back = (str(tmp_path / part) for part in ("there", "file", "back"))
    pools(world(name)).run(save, there, name)
    dcp_to_torch_save(there, file)
    assert torch.equal(torch.load(file, weights_only=True)["x"], values())
    torch_save_to_dcp(file, back)
    pools(world(name)).run(load, back, name)


def save_on_some(path):
    mesh = st.DeviceMesh("cpu", [1, 3])
    how = dict(placements=[st.Shard(0)], src_data_rank=None, sharding_shapes={0: [(2, 5), (5, 5)]})
    x, y = (st.distribute_tensor(value, mesh, **how) for value in (values(), torch.zeros_like(values())))
    dcp.save({"x": x}, checkpoint_id=path)
    dcp.load({"x": y}, checkpoint_id=path)
    if mesh.get_coordinate() is not None:
        assert torch.equal(whole(y), values())


def load_alone(path, name):
    x = lay(torch.zeros_like(values()), name)
    dcp.load({"x": x}, checkpoint_id=path)
    assert torch.equal(whole(x), values())


def test_mesh_of_some_ranks(pools, tmp_path):
    pools(4).run(save_on_some, str(tmp_path))
    pools(3).run(load_alone, str(tmp_path), "uneven 3")


def save_later(path, name, way):
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    state = state_of(values(), name, "ours")
    state["x"].label = "kept"
    if way == "twice":  # the second reuses the first's memory
        stager = DefaultStager(StagingOptions(False, True, False, False))
        staged = [stager.stage(state), stager.stage(state)]
        assert staged[0]["x"]._local_tensor.data_ptr() == staged[1]["x"]._local_tensor.data_ptr()
        assert staged[1]["x"]._layout == state["x"]._layout and staged[1]["x"].label == "kept"
        assert torch.equal(whole(staged[1]["x"]), values())
    how = {
        "default": dict(checkpoint_id=path),
        "twice": dict(checkpoint_id=path),
        "writer": dict(storage_writer=dcp.FileSystemWriter(path)),
    }[way]
    future = dcp.async_save(state, **how)
    state["x"]._local_tensor.zero_()  # staged already
    future.result()


@pytest.mark.parametrize("way", ["default", "twice", "writer"])
@pytest.mark.parametrize(("saved", "loaded"), [("uneven 2", "uneven 3"), ("three boxes 4", "uneven 2"), ("uneven 3", "nested 4")])
def test_async_save(pools, saved, loaded, way, tmp_path):
    if way == "twice" and torch.__version__ < "2.15":
        pytest.skip("this torch's stager serves once")
    pools(world(saved)).run(save_later, str(tmp_path), saved, way)
    pools(world(loaded)).run(load, str(tmp_path), loaded)


@pytest.mark.parametrize("name", ["uneven 2", "uneven 3", "nested 4", "three boxes 4"])
@on_ranks(of=world)
def test_load_into_meta(tmp_path, name):
    path = str(tmp_path)

    x = lay(values(), name)
    state = {"x": x.to("meta"), "deep": {"x": lay(values(), name, "meta")}}
    assert state["x"].is_meta and state["x"]._layout == x._layout
    dcp.save({"x": x, "deep": {"x": x}}, checkpoint_id=path)
    dcp.load(state, checkpoint_id=path)
    for got in (state["x"], state["deep"]["x"]):
        assert got._layout == x._layout and got.device.type == "cpu" and torch.equal(whole(got), values())


@on_ranks(2)
def test_what_does_not_fit_is_refused(tmp_path):
    path = str(tmp_path)

    x = place(values(), mesh_of((2,)), ("P",), "even")
    for action in (dcp.save, dcp.load):
        if action is dcp.load:
            dcp.save({"x": values()}, checkpoint_id=path)
        with pytest.raises(dcp.CheckpointException, match="in summands"):
            action({"x": x}, checkpoint_id=path)
    model = nn.Module()
    model.weight = nn.Parameter(x)
    with pytest.raises(RuntimeError, match="in summands"):
        set_model_state_dict(model, {"weight": values()}, options=StateDictOptions(full_state_dict=True))
    x = x.redistribute(placements=objects(("S1",)))
    dcp.save({"x": x}, checkpoint_id=path)
    model.weight = nn.Parameter(x)
    for options in ({}, dict(broadcast_from_rank0=True)):
        with pytest.raises(ValueError, match=r"'weight' has sizes \[6, 5\], but is loaded into a tensor of sizes \[7, 5\]"):
            set_model_state_dict(model, {"weight": values()[:6]}, options=StateDictOptions(full_state_dict=True, **options))


# ---- state dicts ----


class Model(nn.Module):
    """A weight in the layout of that name, a scalar, a bias of another dtype, a buffer."""

    def __init__(self, name, seed, device=None):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(lay(torch.randn(SIZES, generator=g, dtype=torch.float64), name, device))
        self.scale = nn.Parameter(replicate(torch.randn((), generator=g, dtype=torch.float64), name, device))
        self.bias = nn.Parameter(replicate(torch.randn(5, generator=g), name, device), requires_grad=False)
        self.register_buffer("mask", lay(torch.rand(SIZES, generator=g, dtype=torch.float64), name, device))

    def forward(self, x):
        return ((x @ (self.weight * self.mask)) * self.scale + self.bias).square().mean()


def full(model):
    return {key: value.full_tensor() for key, value in model.state_dict().items()}


def same_model(model, want, like):
    for key, value in model.state_dict().items():
        assert value._layout == like.state_dict()[key]._layout, key
        assert value.dtype == want[key].dtype and value.requires_grad is False
        torch.testing.assert_close(whole(value), want[key], rtol=0, atol=0, msg=lambda m, key=key: f"{key}: {m}")
    for key, value in model.named_parameters():
        assert isinstance(value, nn.Parameter) and value.requires_grad == dict(like.named_parameters())[key].requires_grad


@pytest.mark.parametrize("name", ["uneven 2", "uneven 3", "columns 3", "nested 4", "three boxes 4", "replicas 4"])
@on_ranks(of=world)
def test_model_state(name):
    model, first = Model(name, 1), dist.get_rank() == 0
    want = full(model)
    for options in ({}, dict(cpu_offload=True)):
        got = get_model_state_dict(model, options=StateDictOptions(**options))
        assert all(type(v) is st.ShardTensor and v._layout == model.state_dict()[k]._layout for k, v in got.items())
    for offload in (False, True):
        got = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
        assert list(got) == (list(want) if first or not offload else [])
        assert all(type(v) is torch.Tensor and torch.equal(v, want[k]) for k, v in got.items())

    for device in (None, "meta"):
        other = Model(name, 2, device)
        _C.reset_comm_counts()
        set_model_state_dict(other, dict(want), options=StateDictOptions(full_state_dict=True))
        assert not _C.comm_counts()
        same_model(other, want, model)
        for offload in (False, True):
            other = Model(name, 2, device)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload)
            set_model_state_dict(other, dict(want) if first else {}, options=options)
            same_model(other, want, model)
    other = Model(name, 2)
    set_model_state_dict(other, get_model_state_dict(model))
    same_model(other, want, model)


@pytest.mark.parametrize("most", [None, 1], ids=["one batch", "each its own"])
@on_ranks(3)
def test_full_state_is_gathered_in_batches(most):
    """Many small tensors, on a mesh of all ranks and on one of some of them: one collective for each mesh's batch."""
    from shardtensor.patches import checkpoints

    everyone = st.init_device_mesh("cpu", (3,))
    pair, alone = (st.DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2]))
    some = pair if pair.get_coordinate() is not None else alone
    model, want = nn.Module(), {}
    for i in range(12):
        whole = torch.randn(5 + i, 3, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        mesh = some if i % 3 == 2 else everyone
        want[f"p{i}"] = whole
        model.register_parameter(f"p{i}", nn.Parameter(st.distribute_tensor(whole, mesh, [st.Shard(i % 2)], src_data_rank=None)))
    stock = checkpoints._TOGETHER
    checkpoints._TOGETHER = most or stock
    try:
        for offload in (False, True):
            _C.reset_comm_counts()
            got = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
            counts = sum(n for n, _ in _C.comm_counts().values())
            kept = not offload or dist.get_rank() == 0
            assert sorted(got) == (sorted(want) if kept else [])
            assert all(type(v) is torch.Tensor and torch.equal(v, want[k]) for k, v in got.items())
            one_by_one = 12 if some is pair else 8  # a mesh of one rank has nothing to gather
            batched = 2 if some is pair else 1
            assert counts == (one_by_one if most else batched), counts
    finally:
        checkpoints._TOGETHER = stock


def steps(model, optimizer, count):
    mesh = model.weight.device_mesh

    losses = []
    for i in range(count):
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(50 + i), dtype=torch.float64)
        loss = model(st.distribute_tensor(x, mesh, [st.Replicate()] * mesh.ndim, src_data_rank=None))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.full_tensor().item())
    return losses


def trained(name, seed, count):
    model = Model(name, seed)
    optimizer = torch.optim.AdamW([model.weight, model.scale], lr=0.05)
    return model, optimizer, steps(model, optimizer, count)


@pytest.mark.parametrize("name", ["uneven 2", "uneven 3", "three boxes 4"])
@on_ranks(of=world)
def test_optimizer_state(name):
    """With each set of options, state goes to an optimizer that has never stepped. Training continues unchanged."""
    first = dist.get_rank() == 0
    for full_state, offload, broadcast in ((False, False, False), (False, True, False), (True, False, False), (True, True, True)):
        model, optimizer, _ = trained(name, 1, 2)
        got = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=full_state, cpu_offload=offload))
        got = copy.deepcopy(got)
        if full_state and (first or not offload):
            assert type(got[1]["state"]["weight"]["exp_avg"]) is torch.Tensor
        want = steps(model, optimizer, 2)
        other, again, _ = trained(name, 2, 0)
        if broadcast:
            got = got if first else ({}, {})
        options = StateDictOptions(full_state_dict=full_state, broadcast_from_rank0=broadcast)
        set_model_state_dict(other, got[0], options=options)  # set_state_dict() refuses {} as the model's state
        set_optimizer_state_dict(other, again, got[1], options=options)
        for p in again.param_groups[0]["params"]:
            state = again.state[p]
            assert state["exp_avg"]._layout == p._layout and state["step"].item() == 2
        assert steps(other, again, 2) == want


def save_training(path, name, flat):
    model, optimizer, _ = trained(name, 1, 2)
    state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save(dict(zip(("model", "optimizer"), state, strict=True)), checkpoint_id=path)
    return steps(model, optimizer, 2)


def load_training(path, name, flat):
    model, optimizer, _ = trained(name, 2, 0)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)
    return steps(model, optimizer, 2)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("saved", "loaded"), [("uneven 2", "uneven 3"), ("columns 3", "nested 4"), ("three boxes 4", "uneven 2")])
def test_training_goes_on(pools, saved, loaded, flat, tmp_path):
    want = pools(world(saved)).run(save_training, str(tmp_path), saved, flat)
    got = pools(world(loaded)).run(load_training, str(tmp_path), loaded, flat)
    assert got == [pytest.approx(want[0], rel=1e-9)] * len(got)


def parallel_model(over, seed):
    """Seven hidden features: tensor parallel over all ranks, or over two ranks within FSDP2 over two."""
    from test_parallel import MLP

    torch.manual_seed(seed)
    model = MLP(7)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if over == "tensor parallel":
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer


def parallel_steps(model, optimizer):
    losses = []
    for i in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_parallel(path, over):
    model, optimizer = parallel_model(over, 1)
    parallel_steps(model, optimizer)
    for name, full_state in (("pieces", False), ("whole", True)):
        state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=full_state))
        dcp.save(dict(zip(("model", "optimizer"), state, strict=True)), checkpoint_id=f"{path}/{name}")
        if full_state and dist.get_rank() == 0:
            torch.save(state, f"{path}/file")
    return parallel_steps(model, optimizer)


def load_parallel(path, over):
    losses = []
    for name in ("pieces", "whole"):
        model, optimizer = parallel_model(over, 2)
        state = get_state_dict(model, optimizer)
        dcp.load(dict(zip(("model", "optimizer"), state, strict=True)), checkpoint_id=f"{path}/{name}")
        set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
        losses.append(parallel_steps(model, optimizer))
    model, optimizer = parallel_model(over, 2)
    state = torch.load(f"{path}/file") if dist.get_rank() == 0 else ({}, {})
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state[0], options=options)
    set_optimizer_state_dict(model, optimizer, state[1], options=options)
    losses.append(parallel_steps(model, optimizer))
    return losses


PARALLEL = [(2, "tensor parallel", 4, "FSDP"), (4, "FSDP", 3, "tensor parallel"), (4, "FSDP", 4, "FSDP")]


@pytest.mark.parametrize(("ranks", "saved", "more", "loaded"), PARALLEL)
def test_parallel_training_goes_on(pools, ranks, saved, more, loaded, tmp_path):
    want = pools(ranks).run(save_parallel, str(tmp_path), saved)[0]
    for got in pools(more).run(load_parallel, str(tmp_path), loaded):
        assert got == [pytest.approx(want, rel=1e-9)] * 3


# ---- files of other kinds ----


def safetensors_save(path, name, together):
    state = {"x": lay(values(), name), "y": lay(values() * 2, name)}
    names = {"x": 1, "y": 2} if together else None
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, names, save_distributed=True, enable_consolidation=together))


def safetensors_load(path, name):
    state = {key: lay(torch.zeros_like(values()), name) for key in ("x", "y")}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
    assert torch.equal(whole(state["x"]), values()) and torch.equal(whole(state["y"]), values() * 2)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("saved", "loaded"), [("uneven 2", "uneven 3"), ("three boxes 4", "uneven 2"), ("replicas 4", "three boxes 4")])
def test_safetensors(pools, saved, loaded, together, tmp_path):
    load_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").load_file
    pools(world(saved)).run(safetensors_save, str(tmp_path), saved, together)
    if together:
        assert torch.equal(load_file(str(next(tmp_path.glob("model-00001*"))))["x"], values())
    pools(world(loaded)).run(safetensors_load, str(tmp_path), loaded)


@pytest.mark.parametrize("name", ["uneven 2", "uneven 3", "three boxes 4"])
@on_ranks(of=world)
def test_one_file_per_rank(tmp_path, name):
    path = str(tmp_path)
    model = Model(name, 1)
    file = f"{path}/{dist.get_rank()}"
    torch.save(model.state_dict(), file)
    for options in (dict(weights_only=True), dict(weights_only=False), dict(weights_only=True, mmap=True, map_location="cpu")):
        other = Model(name, 2)
        other.load_state_dict(torch.load(file, **options))
        same_model(other, full(model), model)


@pytest.mark.parametrize("name", ["uneven 2", "uneven 3", "nested 4", "three boxes 4"])
@on_ranks(of=world)
def test_plans_and_specs(name):
    from torch.distributed.checkpoint.default_planner import _create_default_local_metadata

    x = lay(values(), name)
    boxes = [(list(c.offsets), list(c.sizes)) for c in x.__create_chunk_list__()]
    assert boxes == [b for b in x._layout.boxes(SIZES) if all(b[1])]
    assert sum(math.prod(sizes) for _, sizes in boxes) == x._local_tensor.numel()
    if boxes:
        metadata = _create_default_local_metadata({"x": x, "plain": values()})
        got = metadata.state_dict_metadata["x"]
        assert [(list(c.offsets), list(c.sizes)) for c in got.chunks] == boxes and tuple(got.size) == SIZES
    for offsets, sizes in boxes:
        part = values()[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert torch.equal(x.__get_tensor_shard__(MetadataIndex("x", offsets)), part)
    with pytest.raises(ValueError, match="no box of 'x' begins at"):
        x.__get_tensor_shard__(MetadataIndex("x", [6, 4]))
    # torch sends the spec to another rank's process and builds a DTensor from it.
    spec = pickle.loads(pickle.dumps(x._spec))
    assert spec == x._spec and spec._layout == x._layout
    again = DTensor(x._local_tensor, spec, requires_grad=False)
    assert type(again) is type(x) and torch.equal(whole(again), values())


def example(path, number):
    """The code blocks of docs/checkpoints.md: a save on two ranks, a load on three, a model and its optimizer."""
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    names = {"path": path}
    if number == 2:
        names["dcp"] = importlib.import_module("torch.distributed.checkpoint")
        names["model"], names["optimizer"], _ = trained("uneven 3", 1, 2)
    exec(page.read_text().split("```python")[1 + number].split("```")[0], names)


def test_documentation(pools, tmp_path):
    for number, ranks in enumerate((2, 3, 3)):
        pools(ranks).run(example, str(tmp_path / str(number // 2)), number)


# Where modules have imported a function by name, whose own module's entry in the table replaces it.
IMPORTED_BY_NAME = [
    ("torch.distributed.checkpoint.default_planner", "_create_default_metadata_only_plan"),
    ("torch.distributed.checkpoint.default_planner", "_init_state_dict"),
    ("torch.distributed.checkpoint.state_dict", "_broadcast_state_dict"),
    ("torch.distributed.checkpoint.state_dict", "_distribute_state_dict"),
    ("torch.distributed.checkpoint.state_dict", "_gather_state_dict"),
    ("torch.distributed.fsdp._optim_utils", "_gather_state_dict"),
]


def all_is_mended():
    """Every function of torch that loses the cuts is replaced, once there is a mesh."""
    from shardtensor.patches import checkpoints

    for module, path in [*((patch.module, patch.name) for patch in checkpoints.PATCHES), *IMPORTED_BY_NAME]:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        assert found.__code__.co_filename == checkpoints.__file__ and found.__wrapped__.__name__ == path.split(".")[-1], path
        assert not hasattr(found.__wrapped__, "__wrapped__"), path


@on_ranks(2)
def test_all_is_mended():
    mesh_of((2,))
    all_is_mended()


def test_all_is_mended_when_torch_was_first():
    program = f"""
import sys; sys.path[:0] = {sys.path!r}
import torch.distributed.checkpoint, torch.distributed.checkpoint.state_dict
import test_checkpoint, shardtensor
shardtensor._C.Mesh("cpu", [1], [0], [], [""], 0)
test_checkpoint.all_is_mended()
"""
    path = {"PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ | path)
    assert done.returncode == 0, done.stderr


def saved_alone(folder):
    mesh, rank = mesh_of((2,)), dist.get_rank()
    cut = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    whole = cut.redistribute(placements=[Replicate()])
    if rank == 1:
        with pytest.warns(UserWarning, match=r"model-10.pt' has only this rank's pieces of 2 ShardTensors .* \(rank 1\)"):
            torch.save({"x": cut, "deep": [torch.nn.Parameter(cut)]}, f"{folder}/model-10.pt")
        with pytest.warns(UserWarning, match="pieces of 1 ShardTensor "), open(f"{folder}/file", "wb") as file:
            torch.save(cut, file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save({"x": whole, "n": 3}, f"{folder}/whole{'ab'[rank]}.pt")
        torch.save(cut, f"{folder}/rank_0{rank}.pt")
        torch.save(cut, io.BytesIO())


def test_pieces_saved_alone_are_noticed(pools, tmp_path):
    folder = tmp_path / "no-digits"
    folder.mkdir()
    pools(2).run(saved_alone, str(folder))
