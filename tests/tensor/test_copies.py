"""Copies and files: what comes back is the same piece in the same layout."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from oracle import make, mesh_id, mesh_of, place, whole
from pool import on_ranks
from shardtensor import _C, Partial, Replicate, Shard, ShardTensor, distribute_module, distribute_tensor
from shardtensor.tensor import _tensor
from torch import nn

MESHES = [(2, (2,)), (3, (3,)), (4, (2, 2))]


def save_and_load(weights_only):
    def through_a_file(value):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=weights_only)

    return through_a_file


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": save_and_load(False),
    "save_weights_only": save_and_load(True),
    "clone": lambda x: x.clone(),
}


def tensors(shape):
    """A tensor in each kind of layout."""
    mesh = mesh_of(shape)
    value = make((5, 4), torch.Generator().manual_seed(3))
    rest = ("R",) * (mesh.ndim - 1)
    for first, cut in (("R", "even"), ("P", "even"), ("S(0)", "even"), ("S(0)", "uneven"), ("S(1)", "empty")):
        yield value, place(value, mesh, (first, *rest), cut)
    yield value, place(value.t(), mesh, ("S(0)", *rest), "uneven").t()  # strides


def file_of_another_rank(folder):
    mesh = mesh_of((2,))
    me, other = dist.get_rank(), 1 - dist.get_rank()
    for cut in ("even", "uneven"):
        x = place(make((6, 4), torch.Generator().manual_seed(3)), mesh, ("S(0)",), cut)
        torch.save({"x": x, "whole": x.redistribute(placements=[Replicate()])}, f"{folder}/{cut}{me}")
    torch.save({"sum": place(torch.ones(3), mesh, ("P",), "even")}, f"{folder}/sum{me}")
    dist.barrier()
    for weights_only in (True, False):
        for name in ("even", "uneven", "sum"):
            mine = torch.load(f"{folder}/{name}{me}", weights_only=weights_only)
            assert all(type(t) is ShardTensor for t in mine.values())
            with pytest.raises(ValueError, match=f"does not hold the piece of rank {me}: rank {other} saved it"):
                torch.load(f"{folder}/{name}{other}", weights_only=weights_only)
    whole = place(torch.arange(5.0), mesh, ("R",), "even")
    torch.save(whole, f"{folder}/whole{me}")
    dist.barrier()
    assert torch.equal(torch.load(f"{folder}/whole{other}", weights_only=True).to_local(), torch.arange(5.0))


def from_a_smaller_world(folder):
    with pytest.raises(ValueError, match="one of 2 ranks saved it, and now there are 3"):
        torch.load(f"{folder}/even{dist.get_rank() % 2}", weights_only=True)


def test_a_file_of_another_rank_is_refused(pools, tmp_path):
    pools(2).run(file_of_another_rank, str(tmp_path))
    pools(3).run(from_a_smaller_world, str(tmp_path))


@on_ranks(2)
def test_sizes_of_an_old_file_are_compared():
    """The state of a file that does not say who saved it: its sizes are compared."""
    x = place(make((5, 4), torch.Generator().manual_seed(3)), mesh_of((2,)), ("S(0)",), "uneven")
    rebuild, state = x.__reduce_ex__(2)
    assert rebuild is _tensor._rebuild
    assert rebuild(*state[:-1]).shape == x.shape
    with pytest.raises(ValueError, match=r"it has sizes \[7, 4\]"):
        rebuild(torch.ones(7, 4), *state[1:-1])


@on_ranks((2,), (3,), (2, 2))
@pytest.mark.parametrize("name", COPIES)
def test_copy(shape, name):
    for value, x in tensors(shape):
        for requires_grad, parameter in ((False, False), (True, False), (True, True), (False, True)):
            original = nn.Parameter(x.detach(), requires_grad) if parameter else x.detach().requires_grad_(requires_grad)
            with torch.no_grad():
                got = COPIES[name](original)
            assert type(got) is ShardTensor
            assert got._layout == original._layout
            assert got.shape == original.shape and got.dtype == original.dtype
            torch.testing.assert_close(whole(got), value)
            if name == "clone":
                continue
            assert got.stride() == original.stride()
            assert isinstance(got, nn.Parameter) == parameter
            assert got.requires_grad == requires_grad and got.is_leaf
            shares = got._local_tensor.untyped_storage().data_ptr() == original._local_tensor.untyped_storage().data_ptr()
            assert shares == (name == "copy") or not got._local_tensor.numel()


def attributes(shape):
    for _, x in tensors(shape):
        p = nn.Parameter(x.detach())
        p.label, p.friends = "left", {"right": [1, 2]}
        for name in ("deepcopy", "pickle", "save_weights_only", "copy"):
            got = COPIES[name](p)
            assert got.label == "left" and got.friends == p.friends, name
        assert copy.deepcopy(p).friends is not p.friends
        # A deep copy includes the gradient, and works for a tensor that refers to itself.
        p.me = p
        p.grad = torch.ones_like(p.detach())
        got = copy.deepcopy(p)
        assert got.me is got and got.grad is not p.grad
        assert whole(got.grad).eq(1).all()


def memo(shape):
    for _, x in tensors(shape):
        first, second = copy.deepcopy([x, x])
        assert first is second and first is not x
        y = x.detach().requires_grad_() * 2
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(y)


def modules(shape):
    mesh = mesh_of(shape)
    rest = [Replicate()] * (mesh.ndim - 1)

    def partition(name, part, where):
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(distribute_tensor(part.weight.data, where, [Shard(0), *rest]))

    net = distribute_module(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), mesh, partition)
    net[1].bias = net[0].bias = nn.Parameter(net[1].bias.detach())  # tied
    twin = copy.deepcopy(net)
    assert twin[0].bias is twin[1].bias and twin[0].bias is not net[0].bias
    loaded = save_and_load(True)(net.state_dict())
    assert list(loaded) == list(net.state_dict())
    for key, value in net.state_dict().items():
        assert loaded[key]._layout == value._layout and whole(loaded[key]).equal(whole(value))
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(loaded)
    assert whole(other[0].weight).equal(whole(net[0].weight))


def pickled_mesh(shape):
    """Meshes that ShardTensors have used can still be pickled and copied."""
    mesh = mesh_of(shape)
    list(tensors(shape))
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert copy.deepcopy(mesh) == mesh


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
@pytest.mark.parametrize("function", ["attributes", "memo", "modules", "pickled_mesh"])
def test_copies(pools, function, mesh):
    pools(mesh[0]).run(globals()[function], mesh[1])


@on_ranks((2,), (3,), (2, 2))
def test_checkpoint(shape, tmp_path):
    """Written in one layout, read into another."""
    path = str(tmp_path)

    mesh = mesh_of(shape)
    value = make((5, 4), torch.Generator().manual_seed(3))
    layouts = [(x, v) for v, x in tensors(shape) if not x._layout.has_partial]
    for number, (x, v) in enumerate(layouts):
        dcp.save({"x": x, "none": place(torch.ones(0), mesh, ("S(0)",) + ("R",) * (mesh.ndim - 1), "even")}, checkpoint_id=f"{path}/{number}")
        for y, _ in layouts:
            state = {"x": torch.zeros_like(y)}
            dcp.load(state, checkpoint_id=f"{path}/{number}")
            assert type(state["x"]) is ShardTensor and state["x"]._layout == y._layout
            torch.testing.assert_close(whole(state["x"]), v)
    if mesh.ndim == 2:
        from torch.distributed.tensor.placement_types import _StridedShard

        x = place(value, mesh, ("R", "R"), "even").redistribute(placements=[_StridedShard(0, split_factor=2), Shard(0)])
        dcp.save({"x": x}, checkpoint_id=f"{path}/strided")
        state = {"x": place(torch.zeros_like(value), mesh, ("S(1)", "S(0)"), "uneven")}
        dcp.load(state, checkpoint_id=f"{path}/strided")
        torch.testing.assert_close(whole(state["x"]), value)


def saved(shape, path):
    mesh = mesh_of(shape)
    x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)], sharding_shapes={0: [(1,), (4,)]})
    if mesh.get_rank() == 1:
        torch.save({"x": nn.Parameter(x)}, path)
    x.full_tensor()  # waits until the file is written


def test_load_without_ranks(pools, tmp_path):
    """A file of one rank, read without a process group, gives the piece and its place in the whole."""
    path = str(tmp_path / "file")
    pools(2).run(saved, (2,), path)
    program = f"""
import sys; sys.path[:0] = {sys.path!r}
import shardtensor, torch
x = torch.load({path!r}, weights_only=True)["x"]
assert x.shape == (5,) and x.offsets() == (1,) and x.to_local().tolist() == [1.0, 2.0, 3.0, 4.0], x
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@on_ranks(2)
def test_emptied_buffers_stay_summands():
    for shape, placements in (((2,), [Partial()]), ((2,), [Partial("max")]), ((2, 1), [Partial("avg"), Replicate()])):
        model = nn.Module()
        model.register_buffer("counts", ShardTensor.from_local(torch.ones(3), mesh_of(shape), placements))
        assert torch.empty_like(model.counts, dtype=torch.float64).placements == tuple(placements)
        assert torch.zeros_like(model.counts).placements == (Replicate(),) * len(shape)  # as DTensor's
        model.to_empty(device="cpu")
        assert model.counts.placements == tuple(placements)
        model.counts.zero_()
        assert torch.equal(model.counts.full_tensor(), torch.zeros(3))


# ---- memory formats ----

TO_FORMAT = {
    "to": lambda x, f: x.to(memory_format=f),
    "to_dtype": lambda x, f: x.to(torch.float32, memory_format=f),
    "to_device": lambda x, f: x.to("cpu", memory_format=f),
    "to_both": lambda x, f: x.to("cpu", torch.float32, memory_format=f),
    "to_other": lambda x, f: x.to(torch.ones(1), memory_format=f),
    "to_copy": lambda x, f: x.to(x.dtype, copy=True, memory_format=f),
    "cpu": lambda x, f: x.cpu(memory_format=f),
    "half": lambda x, f: x.half(memory_format=f),
    "contiguous": lambda x, f: x.contiguous(memory_format=f),
    "clone": lambda x, f: x.clone(memory_format=f),
    "empty_like": lambda x, f: torch.empty_like(x, memory_format=f).fill_(2),
    "zeros_like": lambda x, f: torch.zeros_like(x, memory_format=f),
    "full_like": lambda x, f: torch.full_like(x, 3, memory_format=f),
    "module": lambda x, f: nn.ParameterList([nn.Parameter(x.detach())]).to(memory_format=f)[0].detach(),
}


@pytest.mark.parametrize(("world", "shape"), MESHES)
@on_ranks()
def test_memory_formats(shape):
    """The strides of the whole are torch's, and the piece has its dims in their order."""
    mesh, g = mesh_of(shape), torch.Generator().manual_seed(2)
    last, last3 = torch.channels_last, torch.channels_last_3d
    wholes = [
        (make((4, 6, 5, 3), g), last),
        (make((4, 6, 5, 3), g).contiguous(memory_format=last), torch.contiguous_format),
        (make((6, 4, 3, 5), g).transpose(0, 1).transpose(2, 3), last),
        (make((4, 1, 5, 3), g), last),
        (make((4, 1, 5, 1), g), last),
        (make((4, 3, 1, 1), g), last),
        (make((3, 4, 2, 5, 3), g), last3),
        (make((3, 1, 2, 5, 3), g).contiguous(memory_format=last3), torch.preserve_format),
    ]
    for value, form in wholes:
        for d, cut in [(d, cut) for d in range(value.ndim) for cut in ("even", "uneven", "empty")]:
            x = place(value, mesh, (f"S({d})", *("R",) * (mesh.ndim - 1)), cut)
            for name, convert in TO_FORMAT.items():
                if name == "module" and form not in (last, last3):
                    continue
                got, want = convert(x, form), convert(value, form)
                what = f"{name} of {tuple(value.shape)} to {form}, dim {d} cut, {cut}"
                assert (got.stride(), got.dtype) == (want.stride(), want.dtype), f"{what}: {got.stride()}, not {want.stride()}"
                torch.testing.assert_close(whole(got), want, rtol=0, atol=0)
                assert got._local_tensor is _C.laid(got._local_tensor, got.stride()), f"{what}: {got._local_tensor.stride()}"
                if name == "to":
                    assert (got is x) == (want is value), what
