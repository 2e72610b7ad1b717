"""LocalShardsWrapper: several shards of one tensor on a rank, alone and as the piece of a ShardTensor."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from oracle import mesh_of, whole
from pool import on_ranks
from shardtensor import _C, LocalShardsWrapper, Replicate, Shard
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

# Mesh shape, placements, and per rank the boxes (offsets, sizes) of a tensor of sizes (7, 6) or (7,).
TABLES = {
    "rows 2": ((2,), "S0", [[((0, 0), (3, 6))], [((3, 0), (4, 6))]]),
    "rows 3": ((3,), "S0", [[((2, 0), (5, 6))], [], [((0, 0), (2, 6))]]),  # one has none, and they are out of order
    "apart 2": ((2,), "S0", [[((0, 0), (2, 6)), ((5, 0), (2, 6))], [((2, 0), (3, 6))]]),
    "columns 2": ((2,), "S1", [[((0, 0), (7, 1))], [((0, 1), (7, 5))]]),
    "interleaved 3": ((3,), "S1", [[((0, 0), (7, 2)), ((0, 4), (7, 1))], [((0, 2), (7, 2))], [((0, 5), (7, 1))]]),
    "grid 4": (
        (2, 2),
        "S0 S1",
        [
            [((0, 0), (4, 2)), ((0, 4), (4, 1))],
            [((0, 2), (4, 2)), ((0, 5), (4, 1))],
            [((4, 0), (3, 2)), ((4, 4), (3, 2))],
            [((4, 2), (3, 2))],
        ],
    ),
    "replicas 4": ((2, 2), "R S1", [[((0, 0), (7, 4))], [((0, 4), (7, 2))]] * 2),
    "anywhere 4": ((4,), "S0", [[((0, 0), (2, 3)), ((5, 3), (2, 3))], [((2, 0), (5, 3))], [((0, 3), (1, 3))], [((1, 3), (4, 3)), ((7, 0), (0, 6))]]),
    "vector 3": ((3,), "S0", [[((0,), (2,)), ((4,), (1,))], [], [((2,), (2,)), ((5,), (2,))]]),
}


def world(name):
    return math.prod(TABLES[name][0])


def values(name="rows 2", dtype=torch.float64):
    out = torch.arange(1.0, 43.0, dtype=dtype).view(7, 6)
    return out[:, 0].clone() if name == "vector 3" else out


def objects(text):
    return [Replicate() if one == "R" else Shard(int(one[1:])) for one in text.split()]


def at(value, box):
    return value[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


def pieces(name, value):
    boxes = TABLES[name][2][dist.get_rank()]
    return [at(value, box).clone() for box in boxes], [offsets for offsets, _ in boxes]


def table(name, value, kind="ours"):
    """The value in these shards: a ShardTensor of our wrapper or of torch's, or a stock DTensor of either."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper as Stock

    shape, placements, _ = TABLES[name]
    shards, offsets = pieces(name, value)
    wrapper = (Stock if "torch's" in kind else st.LocalShardsWrapper)(shards, offsets)
    cls = DTensor if "stock" in kind else st.ShardTensor
    how = dict(run_check=False, shape=value.shape, stride=value.stride())
    return cls.from_local(wrapper, mesh_of(shape), objects(placements), **how)


# ---- alone ----


def some(dtype=torch.float32):
    shards = [torch.arange(6, dtype=dtype).view(3, 2), torch.arange(6, 9, dtype=dtype).view(3, 1)]
    return LocalShardsWrapper(shards, [(0, 0), (0, 4)])


def none(**told):
    return LocalShardsWrapper([], [], **told)


def vector():
    return LocalShardsWrapper([torch.ones(2), torch.ones(3)], [(4,), (8,)])


def same(wrapper, shards, like):
    assert wrapper.local_chunks == like.local_chunks
    assert len(wrapper.local_shards()) == len(shards)
    for got, want in zip(wrapper.local_shards(), shards, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    return True


def test_it_says_what_torchs_says():
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper as Stock

    shards, offsets = [torch.arange(6.0).view(3, 2), torch.ones(3, 1)], [(0, 0), (0, 4)]
    ours, stock = LocalShardsWrapper(shards, offsets), Stock(shards, offsets)
    assert isinstance(ours, Stock)
    for name in ("local_shards", "local_sizes", "local_offsets", "storage_metadata", "is_empty_shard", "is_pinned", "_get_tensor_size_bytes"):
        assert getattr(ours, name)() == getattr(stock, name)(), name
    for name in ("local_chunks", "device", "is_meta", "shape", "requires_grad"):
        assert getattr(ours, name) == getattr(stock, name), name
    assert ours.__create_chunk_list__() == stock.__create_chunk_list__()
    assert ours.__create_write_items__("x", ours) == stock.__create_write_items__("x", stock)
    assert all(a is b for a, b in zip(ours.local_shards(), shards, strict=True))
    assert "[0, 4]" in repr(ours) and hash(ours) == id(ours)


def test_with_torchs_in_one_call():
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper as Stock

    ours = some()
    stock = Stock([torch.zeros_like(s) for s in ours.local_shards()], ours.local_offsets())
    assert stock.copy_(ours) is stock and torch.equal(ours, stock)
    assert same(stock + ours, [s * 2 for s in ours.local_shards()], ours)
    assert ours.zero_() is ours and torch.equal(ours.copy_(stock), stock)


SIZES = [
    ("columns", [(3, 2), (3, 1)], [(0, 0), (0, 4)], (3, 3)),
    ("rows", [(3, 2), (1, 2)], [(0, 0), (5, 0)], (4, 2)),  # torch: (3, 4)
    ("grid", [(3, 2), (3, 1), (1, 2), (1, 1)], [(0, 0), (0, 4), (5, 0), (5, 4)], (4, 3)),
    ("vector", [(3,), (2,)], [(0,), (3,)], (5,)),
    ("three dims", [(2, 3, 4), (2, 3, 1)], [(0, 0, 0), (0, 0, 4)], (2, 3, 5)),  # torch: (2, 3, 4)
    ("no tensor", [(3, 2), (1, 1)], [(0, 0), (5, 4)], (3, 3)),  # as torch
    ("scalar", [()], [()], ()),
]


@pytest.mark.parametrize(("sizes", "offsets", "want"), [case[1:] for case in SIZES], ids=[case[0] for case in SIZES])
def test_sizes(sizes, offsets, want):
    wrapper = LocalShardsWrapper([torch.ones(s) for s in sizes], offsets)
    assert tuple(wrapper.shape) == want == tuple(wrapper.storage_metadata().size)
    assert wrapper.local_sizes() == [torch.Size(s) for s in sizes]
    assert tuple(wrapper.view(wrapper.shape).shape) == want


def test_of_an_empty_list():
    wrapper = none()
    assert wrapper.local_shards() == wrapper.local_sizes() == wrapper.local_offsets() == wrapper.local_chunks == []
    assert wrapper.is_empty_shard() and wrapper.device.type == "meta" and wrapper.is_meta and wrapper.shape == (0, 0)
    assert wrapper._get_tensor_size_bytes() == 0 and wrapper.__create_write_items__("x", wrapper) == []
    told = none(ndim=1, dtype=torch.float16, device="cpu")
    assert told.shape == (0,) and told.dtype == torch.float16 and told.device.type == "cpu" and not told.is_meta
    for got in (told.clone(), told.detach(), told.view(-1), copy.deepcopy(told), told + 1, torch.zeros_like(told)):
        assert got.local_shards() == [] and got.shape == (0,) and got.dtype == torch.float16 and got.device.type == "cpu"
    assert told.to(torch.int32).dtype == torch.int32 and told.copy_(told) is told and torch.equal(told, told.clone())
    assert not vector().is_empty_shard() and vector().device.type == "cpu"


REFUSED = [
    ("entries", ValueError, "'local_offsets' has 1 entries for 2", [torch.ones(2, 2)] * 2, [(0, 0)]),
    ("dims", ValueError, r"\[0\] is not a valid offset for shard 0", [torch.ones(2, 2)], [(0,)]),
    ("negative", ValueError, r"\[0, -1\] is not a valid offset", [torch.ones(2, 2)], [(0, -1)]),
    ("dtype", ValueError, "dtype torch.float64 of shard 1 differs", [torch.ones(2), torch.ones(2).double()], [(0,), (2,)]),
    ("device", ValueError, "device meta of shard 1 differs", [torch.ones(2), torch.ones(2, device="meta")], [(0,), (2,)]),
    ("ndim", ValueError, "ndim 1 of shard 1 differs", [torch.ones(2, 2), torch.ones(2)], [(0, 0), (2,)]),
]


@pytest.mark.parametrize(("error", "text", "shards", "offsets"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused(error, text, shards, offsets):
    with pytest.raises(error, match=text):
        LocalShardsWrapper(shards, offsets)


SHARD_BY_SHARD = {
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "clone contiguous": lambda t: t.clone(memory_format=torch.contiguous_format),
    "to dtype": lambda t: t.to(torch.float16),
    "to meta": lambda t: t.to("meta").to(torch.int32).new_empty(t.shape, device="cpu").zero_(),
    "zeros_like": lambda t: torch.zeros_like(t),
    "ones_like": lambda t: torch.ones_like(t, dtype=torch.int64),
    "full_like": lambda t: torch.full_like(t, 3.0),
    "new_empty": lambda t: t.new_empty(t.shape).fill_(2),
    "empty_like": lambda t: torch.empty_like(t).zero_(),
    "view": lambda t: t.view(t.shape),
    "view as": lambda t: t.view_as(t),
    "number": lambda t: (t + 1) * 2 / 3,
    "scalar tensor": lambda t: t * torch.tensor(2.0),
    "both": lambda t: t + t.square(),
    "in place": lambda t: t.clone().mul_(2).add_(t, alpha=3),
    "addcdiv": lambda t: t.clone().addcdiv_(t, t + 1, value=-0.5),
    "lerp": lambda t: torch.lerp(t, t * 2, 0.25),
    "compare": lambda t: t > 2,
    "where": lambda t: torch.where(t > 2, t, t.neg()),
    "masked_fill": lambda t: t.masked_fill(t > 2, 0.0),
    "copy_": lambda t: torch.zeros_like(t).copy_(t),
    "out": lambda t: torch.add(t, t, out=torch.zeros_like(t)),
    "frexp": lambda t: torch.frexp(t)[0],
    "nan_to_num": lambda t: (t / 0).nan_to_num(0.0, 1.0, -1.0),
}


@pytest.mark.parametrize("op", SHARD_BY_SHARD)
@pytest.mark.parametrize("of", [some, vector])
def test_ops(op, of):
    wrapper, f = of(), SHARD_BY_SHARD[op]
    before = [shard.clone() for shard in wrapper.local_shards()]
    out = f(wrapper)
    assert same(out, [f(shard) for shard in before], wrapper) and type(out) is type(wrapper)
    assert same(wrapper, before, wrapper)
    assert out.dtype == f(before[0]).dtype and out.shape == wrapper.shape


def test_lists():
    first, second = some(), vector()
    steps = [torch.tensor(1.0), torch.tensor(2.0)]
    out = torch._foreach_mul([first, second, none(device="cpu")], [2.0, 3.0, 4.0])
    assert same(out[0], [s * 2 for s in first.local_shards()], first) and same(out[1], [s * 3 for s in second.local_shards()], second)
    assert out[2].local_shards() == []
    torch._foreach_add_(out[:2], [first, second], alpha=2)
    assert same(out[0], [s * 4 for s in first.local_shards()], first)
    torch._foreach_div_(out[:2], steps)
    assert same(out[1], [s * 5 / 2 for s in second.local_shards()], second)
    torch._foreach_copy_(out[:1], [first])
    torch._foreach_zero_(out[1:2])
    assert same(out[0], first.local_shards(), first) and same(out[1], [s * 0 for s in second.local_shards()], second)


def test_views_share_memory():
    wrapper = some()
    for view in (wrapper.detach(), wrapper.view(wrapper.shape), wrapper.view(3, -1)):
        for a, b in zip(view.local_shards(), wrapper.local_shards(), strict=True):
            assert a is not b and a.data_ptr() == b.data_ptr()

    alone = LocalShardsWrapper([torch.arange(6.0).view(2, 3)], [(0, 0)]).view(-1)
    assert alone.shape == (6,) and alone.local_offsets() == [(0,)]


def test_detach_leaves_the_original():
    wrapper = some().requires_grad_()
    assert wrapper.requires_grad and all(s.requires_grad for s in wrapper.local_shards())
    cut = wrapper.detach()
    assert not cut.requires_grad and not any(s.requires_grad for s in cut.local_shards())
    assert wrapper.requires_grad and all(s.requires_grad for s in wrapper.local_shards())
    wrapper.requires_grad = False
    assert not any(s.requires_grad for s in wrapper.local_shards())


def test_pinning_goes_shard_by_shard():
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoDevice(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not torch.ops.aten._pin_memory.default:
                return func(*args, **(kwargs or {}))
            if type(args[0]) is torch.Tensor:
                return args[0] + 1  # stands for a copy in pinned memory
            with self:
                return args[0].__torch_dispatch__(func, types, args, kwargs)

    wrapper = some()
    with NoDevice():
        pinned = torch.ops.aten._pin_memory(wrapper)
    assert same(pinned, [s + 1 for s in some().local_shards()], some())
    assert not torch.ops.aten.is_pinned(some())


def test_equal():
    wrapper = some()
    shards = wrapper.local_shards()
    wide = torch.arange(12.0).view(3, 4)
    apart = LocalShardsWrapper([wide[:, :2]], [(0, 0)])
    assert torch.equal(wrapper, wrapper.clone()) and torch.equal(wrapper, wrapper.detach())
    assert torch.equal(apart, apart.clone())  # however they lie in memory
    assert not torch.equal(wrapper, wrapper + 1)
    assert not torch.equal(wrapper, wrapper.double())
    assert not torch.equal(wrapper, LocalShardsWrapper(shards, [(0, 0), (0, 5)]))
    assert not torch.equal(wrapper, LocalShardsWrapper(shards[::-1], [(0, 4), (0, 0)]))
    assert not torch.equal(wrapper, LocalShardsWrapper(shards[:1], [(0, 0)]))


NOT_SHARD_BY_SHARD = [
    ("sum", "aten.sum", lambda t: t.sum()),
    ("mm", "aten.mm", lambda t: t @ t),
    ("norm", "aten.linalg_vector_norm", lambda t: t.norm()),
    ("norms", "aten._foreach_norm", lambda t: torch._foreach_norm([t])),
    ("transpose", "aten.t", lambda t: t.t()),
    ("index", "aten.slice", lambda t: t[1:]),
    ("random", "aten.uniform_", lambda t: t.uniform_()),
    ("view", "aten.view", lambda t: t.view(-1)),
    ("new_empty", "aten.new_empty", lambda t: t.new_empty(2, 2)),
    ("plain tensor", "aten.add.Tensor", lambda t: t + torch.ones(3, 3)),
    ("copy of a plain one", "aten.copy_", lambda t: t.copy_(torch.ones(3, 3))),
    ("equal to a plain one", "aten.equal", lambda t: torch.equal(t, torch.ones(3, 3))),
]


@pytest.mark.parametrize(("name", "f"), [case[1:] for case in NOT_SHARD_BY_SHARD], ids=[case[0] for case in NOT_SHARD_BY_SHARD])
def test_what_is_not_shard_by_shard_is_refused(name, f):
    with pytest.raises(NotImplementedError, match=name):
        f(some())


def test_other_places_are_refused():
    other = LocalShardsWrapper(some().local_shards(), [(0, 0), (0, 5)])
    with pytest.raises(ValueError, match="at different places"):
        some() + other
    with pytest.raises(ValueError, match="at different places"):
        torch._foreach_add_([some()], [other])


def test_copies_and_files():
    for wrapper in (some(), vector(), none(), none(ndim=1, dtype=torch.int8, device="cpu")):
        file = io.BytesIO()
        torch.save(wrapper, file)
        file.seek(0)
        for other in (copy.deepcopy(wrapper), torch.load(file, weights_only=True)):
            assert torch.equal(other, wrapper) and other.dtype == wrapper.dtype and other.device == wrapper.device
            assert all(a.data_ptr() != b.data_ptr() for a, b in zip(other.local_shards(), wrapper.local_shards(), strict=True))


def test_parameter():
    module = torch.nn.Module()
    module.table = torch.nn.Parameter(some())
    assert isinstance(module.table, torch.nn.Parameter) and all(s.requires_grad for s in module.table.local_shards())
    module.to(torch.float16)
    assert isinstance(module.table, torch.nn.Parameter) and module.table.dtype == torch.float16
    assert same(module.table.detach(), [s.half() for s in some().local_shards()], some())
    wrapper = some()
    wrapper.data = vector()
    assert torch.equal(wrapper, vector()) and wrapper.shape == (5,)


def test_shared_memory():
    wrapper = some()
    assert not wrapper.is_shared() and wrapper.share_memory_() is wrapper
    assert wrapper.is_shared() and all(s.is_shared() for s in wrapper.local_shards())


def test_checkpoint_protocol():
    wrapper = some()
    for index, (shard, start) in enumerate(zip(wrapper.local_shards(), wrapper.local_offsets(), strict=True)):
        for hint in (None, index, 1 - index, 7):
            assert wrapper.__get_tensor_shard__(MetadataIndex("x", start, hint)) is shard
    with pytest.raises(ValueError, match=r"Could not find shard at .* for FQN: 'x'"):
        wrapper.__get_tensor_shard__(MetadataIndex("x", [0, 1]))
    assert none().__get_tensor_shard__(MetadataIndex("x", [0, 1])).numel() == 0


# ---- between ranks ----


@on_ranks(2)
def test_all_gather():
    import torch.distributed._functional_collectives as funcol

    rank, n = dist.get_rank(), dist.get_world_size()
    shards = [torch.full((2, 3), rank), torch.full((1, 3), rank + 10)]
    out = funcol.all_gather_tensor(LocalShardsWrapper(shards, [(0, 0), (0, 3)]), 0, dist.group.WORLD)
    assert torch.equal(out + 0, torch.cat([torch.cat([torch.full((2, 3), r), torch.full((1, 3), r + 10)]) for r in range(n)]))
    line = LocalShardsWrapper([torch.full((2,), rank)], [(0,)])
    assert torch.equal(funcol.all_gather_tensor(line, 0, dist.group.WORLD) + 0, torch.arange(n).repeat_interleave(2))
    assert funcol.wait_tensor(line) is line
    with pytest.raises(NotImplementedError, match="all_gather_into_tensor"):
        funcol.all_gather_tensor(some(), 0, dist.group.WORLD)


@pytest.mark.parametrize("name", TABLES)
@on_ranks(of=world)
def test_the_whole_is_told_by_the_offsets(name):
    value = values(name)
    t = table(name, value)
    mine, starts = pieces(name, value)
    assert isinstance(t, st.ShardTensor) and t.shape == value.shape and type(t.to_local()) is st.LocalShardsWrapper
    assert [tuple(o) for o in t.to_local().local_offsets()] == starts
    for f in (lambda t: t, torch.Tensor.detach, torch.Tensor.clone, copy.deepcopy, lambda t: t.to(torch.float64, copy=True)):
        same(f(t).to_local(), mine, t.to_local())
    _C.reset_comm_counts()
    assert torch.equal(t.full_tensor(), value)
    assert _C.comm_counts()
    for dim in range(value.ndim):
        placements = [st.Replicate()] * (t.device_mesh.ndim - 1) + [st.Shard(dim)]
        assert torch.equal(whole(t.redistribute(placements=placements)), value)
    uneven = [7] + [0] * (t.device_mesh.size(0) - 1)
    placements = [st.Shard(0)] + [st.Replicate()] * (t.device_mesh.ndim - 1)
    out = t.redistribute(placements=placements, sharding_shapes={0: [(n, *value.shape[1:]) for n in uneven]}, forward_dtype=torch.float32)
    assert torch.equal(whole(out), value.float()) and out.dtype == torch.float32
    other = st.DeviceMesh("cpu", list(reversed(range(dist.get_world_size()))))
    assert torch.equal(whole(t.redistribute(other, [st.Shard(0)])), value)
    if starts:
        assert t.offsets() == tuple(min(s[d] for s in starts) for d in range(value.ndim))


@pytest.mark.parametrize("name", ["interleaved 3", "vector 3", "rows 3", "grid 4", "anywhere 4"])
@on_ranks(of=world)
def test_gradients(name):
    value = values(name)
    t = table(name, value).requires_grad_()
    (t.full_tensor() * value).sum().backward()
    same(t.grad.to_local(), pieces(name, value)[0], t.to_local())
    t.grad = None
    local = t.to_local()
    assert local.requires_grad and not t.detach().to_local().requires_grad
    again = st.ShardTensor.from_local(local * 3, t.device_mesh, t.placements, shape=t.shape)
    again.full_tensor().sum().backward()
    same(t.grad.to_local(), pieces(name, torch.full_like(value, 3.0))[0], t.to_local())
    t.grad = None
    pieced = t.redistribute(placements=[st.Replicate()] * (t.device_mesh.ndim - 1) + [st.Shard(0)], backward_dtype=torch.float32)
    (pieced * pieced.detach()).sum().backward()  # an empty rank, which does not know the dtype, sends gradients too
    same(t.grad.to_local(), pieces(name, value)[0], t.to_local())
    t.grad = None
    few = t.redistribute(st.DeviceMesh("cpu", [2, 0]), [st.Shard(0)])
    few.redistribute(t.device_mesh, [st.Replicate()] * t.device_mesh.ndim).to_local().sum().backward()
    same(t.grad.to_local(), pieces(name, torch.ones_like(value))[0], t.to_local())
    t.grad = None
    (t * 3).full_tensor().sum().backward()
    same(t.grad.to_local(), pieces(name, torch.full_like(value, 3.0))[0], t.to_local())


# ---- checkpoints ----

# ShardTensors without wrappers: mesh shape, placements, sharding_shapes.
PLAIN = {
    "plain 2": ((2,), "S0", {0: [(5, 6), (2, 6)]}),
    "plain 3": ((3,), "S1", {0: [(7, 1), (7, 0), (7, 5)]}),
    "plain 4": ((2, 2), "S0 S1", {0: [(1, 6), (6, 6)], 1: [(7, 4), (7, 2)]}),
}


def state(name, value, kind):
    if name not in PLAIN:
        return table(name, value, kind)
    shape, placements, shapes = PLAIN[name]
    return st.distribute_tensor(value, mesh_of(shape), objects(placements), sharding_shapes=shapes)


def save(path, name, kind, later=False):
    x = state(name, values(name), kind)
    if later:
        future = dcp.async_save({"x": x}, checkpoint_id=path)
        for shard in x.to_local().local_shards():
            shard.zero_()  # staged already
        future.result()
    else:
        dcp.save({"x": x}, checkpoint_id=path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    written = metadata.state_dict_metadata["x"]
    assert sum(math.prod(c.sizes) for c in written.chunks) == math.prod(written.size) == values(name).numel()
    assert written.properties.dtype == torch.float64


def load(path, name, kind, device=None):
    want = values(name)
    x = state(name, torch.zeros_like(want), kind)
    given = {"x": x.to(device) if device else x}
    dcp.load(given, checkpoint_id=path)
    assert device or given["x"] is x
    if name in PLAIN:
        assert torch.equal(whole(given["x"]), want)
        return
    for got, shard in zip(given["x"].to_local().local_shards(), pieces(name, want)[0], strict=True):
        assert torch.equal(got, shard)


def size_of(name):
    return world(name) if name in TABLES else math.prod(PLAIN[name][0])


PAIRS = [
    ("grid 4", "interleaved 3"),
    ("interleaved 3", "grid 4"),
    ("anywhere 4", "rows 3"),
    ("rows 3", "anywhere 4"),
    ("replicas 4", "columns 2"),
    ("apart 2", "replicas 4"),
    ("grid 4", "plain 3"),
    ("plain 3", "grid 4"),
    ("interleaved 3", "plain 4"),
    ("plain 4", "interleaved 3"),
    ("plain 2", "anywhere 4"),
    ("vector 3", "vector 3"),
]


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_save_and_load(pools, saved, loaded, tmp_path):
    pools(size_of(saved)).run(save, str(tmp_path), saved, "ours")
    pools(size_of(loaded)).run(load, str(tmp_path), loaded, "ours")


# torch cannot load where a rank's list is empty and the tensor has one dim.
STOCK = [("grid 4", "interleaved 3"), ("rows 3", "apart 2"), ("anywhere 4", "rows 3")]


@pytest.mark.parametrize("kind", ["stock torch's", "stock ours", "torch's"])
@pytest.mark.parametrize(("saved", "loaded"), STOCK)
def test_with_torchs_classes(pools, saved, loaded, kind, tmp_path):
    for number, (first, second) in enumerate((("ours", kind), (kind, "ours"))):
        path = str(tmp_path / str(number))
        pools(size_of(saved)).run(save, path, saved, first)
        pools(size_of(loaded)).run(load, path, loaded, second)


@pytest.mark.parametrize(("saved", "loaded"), [("interleaved 3", "anywhere 4"), ("anywhere 4", "apart 2")])
def test_async_save_and_meta(pools, saved, loaded, tmp_path):
    pools(size_of(saved)).run(save, str(tmp_path), saved, "ours", later=True)
    pools(size_of(loaded)).run(load, str(tmp_path), loaded, "ours", device="meta")


@on_ranks(2)
def test_bare(tmp_path):
    """A wrapper outside a ShardTensor: as with torch's, the file adds up the sizes of its shards, so they must have no gaps."""
    path = str(tmp_path / "bare")

    x = LocalShardsWrapper(some().local_shards(), [(0, 0), (0, 2)])
    want, empty = x + 1, none()
    dcp.save({"x": want, "none": empty, "n": 3}, checkpoint_id=path)
    dcp.load({"x": x}, checkpoint_id=path)
    assert torch.equal(x, want)
    dcp.async_save({"x": want + 1}, checkpoint_id=path + "later").result()
    dcp.load({"x": x}, checkpoint_id=path + "later")
    assert torch.equal(x, want + 1)
    with pytest.raises(dcp.CheckpointException, match="out of bounds chunk" if torch.__version__ >= "2.15" else "Failed to validate global plan"):
        dcp.save({"x": some()}, checkpoint_id=path)


def save_safetensors(path, name):
    dcp.save({"x": table(name, values(name))}, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))


def load_safetensors(path, name):
    x = table(name, torch.zeros_like(values(name)))
    dcp.load({"x": x}, storage_reader=HuggingFaceStorageReader(path))
    assert torch.equal(x.full_tensor(), values(name))


def test_safetensors(pools, tmp_path):
    pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    pools(4).run(save_safetensors, str(tmp_path), "grid 4")
    pools(3).run(load_safetensors, str(tmp_path), "interleaved 3")


class Tables(torch.nn.Module):
    def __init__(self, names, seed, device=None):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        for name in names:
            t = table(name, torch.randn(values(name).shape, generator=g, dtype=torch.float64))
            self.register_parameter(name.replace(" ", ""), torch.nn.Parameter(t.to(device) if device else t))


def trained(names, seed, make, steps=2):
    """Tables and their optimizer after some steps; the gradients are the tables' own values and a constant."""
    model = Tables(names, seed)
    optimizer = make(model.parameters())
    for _ in range(steps):
        for p in model.parameters():
            p.grad = p.detach() * 0.5 + 1
        optimizer.step()
    return model, optimizer


def trained_plain(names, seed, make, steps=2):
    g = torch.Generator().manual_seed(seed)
    tables = [torch.nn.Parameter(torch.randn(values(name).shape, generator=g, dtype=torch.float64)) for name in names]
    optimizer = make(tables)
    for _ in range(steps):
        for p in tables:
            p.grad = p.detach() * 0.5 + 1
        optimizer.step()
    return tables


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True, momentum=0.5),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
}
THREE = ["interleaved 3", "vector 3", "rows 3"]
FOUR = ["grid 4", "anywhere 4", "replicas 4"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("ranks", "names"), [(3, THREE), (4, FOUR)])
@on_ranks(of="ranks")
def test_optimizers(name, names):
    model, optimizer = trained(names, 1, OPTIMIZERS[name])
    for p, want in zip(model.parameters(), trained_plain(names, 1, OPTIMIZERS[name]), strict=True):
        torch.testing.assert_close(p.full_tensor(), want, rtol=1e-12, atol=1e-12)
        for key, entry in optimizer.state[p].items():
            assert key == "step" or isinstance(entry.to_local(), LocalShardsWrapper)


def training_state(path, names, way):
    make = OPTIMIZERS["Adam"]
    model, optimizer = trained(names, 1 if way == "save" else 2, make)
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if way == "save":
        dcp.save(parts, checkpoint_id=path)
        return
    dcp.load(parts, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    for p in model.parameters():
        p.grad = p.detach() * 0.5 + 1
    optimizer.step()
    for p, want in zip(model.parameters(), trained_plain(names, 1, make, 3), strict=True):
        torch.testing.assert_close(p.full_tensor(), want, rtol=1e-12, atol=1e-12)


def test_training_goes_on(pools, tmp_path):
    pools(3).run(training_state, str(tmp_path), THREE, "save")
    pools(3).run(training_state, str(tmp_path), THREE, "load")


@pytest.mark.parametrize(("ranks", "names"), [(3, THREE), (4, FOUR)])
@on_ranks(of="ranks")
def test_whole_state_dicts(names):
    model, first = Tables(names, 1), dist.get_rank() == 0
    want = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for key, p in model.named_parameters():
        assert type(want[key]) is torch.Tensor and torch.equal(want[key], p.full_tensor())
    for cpu in (False, True):
        for key, t in get_model_state_dict(model, options=StateDictOptions(cpu_offload=cpu)).items():
            same(t.to_local(), [s.detach() for s in model.get_parameter(key).to_local().local_shards()], t.to_local())
    for device in (None, "meta"):
        for options, given in (({}, want), (dict(broadcast_from_rank0=True), want if first else {})):
            other = Tables(names, 2, device)
            set_model_state_dict(other, dict(given), options=StateDictOptions(full_state_dict=True, **options))
            for key, p in other.named_parameters():
                assert torch.equal(p.full_tensor(), want[key])


@pytest.mark.parametrize("name", ["interleaved 3", "rows 3"])
@on_ranks(3)
def test_files_of_one_rank(tmp_path, name):
    path = str(tmp_path)
    value = values(name)
    t = torch.nn.Parameter(table(name, value))
    torch.save({"t": t}, f"{path}/{dist.get_rank()}")
    for options in (dict(weights_only=True), dict(weights_only=False)):
        other = torch.load(f"{path}/{dist.get_rank()}", **options)["t"]
        assert isinstance(other, torch.nn.Parameter) and torch.equal(other.full_tensor(), value)


# ---- with others, and what is refused ----


@pytest.mark.parametrize(("first", "second"), [("interleaved 3", "rows 3"), ("rows 3", "plain 3"), ("grid 4", "anywhere 4"), ("grid 4", "plain 4")])
@on_ranks(of=lambda first: size_of(first))
def test_copy_between_places(first, second):
    value = values(first)
    zeros = torch.zeros_like(value)
    for one, other in ((first, second), (second, first)):
        t, to = state(one, value, "ours"), state(other, zeros, "ours")
        assert to.copy_(t) is to and torch.equal(to.full_tensor(), value)
        if other in TABLES:
            same(to.to_local(), pieces(other, value)[0], to.to_local())
    alike = state(first, zeros, "ours")
    _C.reset_comm_counts()
    alike.copy_(state(first, value, "ours"))
    assert sum(calls for calls, _ in _C.comm_counts().values()) <= alike.device_mesh.ndim  # to ask whether all are alike
    assert torch.equal(alike, state(first, value, "ours")) and not torch.equal(alike, alike + 1)
    half = state(first, zeros, "ours").to(torch.float16)
    assert torch.equal(half.copy_(state(second, value, "ours")).full_tensor(), value.half())


@pytest.mark.parametrize("name", ["rows 3", "interleaved 3"])
@on_ranks(3)
def test_stock_dtensors(name):
    value = values(name)
    for kind in ("stock torch's", "stock ours"):
        stock = table(name, value, kind)
        t = st.ShardTensor.from_dtensor(stock)
        assert type(t.to_local()) is st.LocalShardsWrapper and t.shape == value.shape
        for a, b in zip(t.to_local().local_shards(), stock._local_tensor.local_shards(), strict=True):
            assert a.data_ptr() == b.data_ptr()
        assert torch.equal(t.full_tensor(), value)
        assert torch.equal((t + stock).full_tensor(), value * 2)
        assert torch.equal((stock + t).full_tensor(), value * 2)
        assert torch.equal(torch.zeros_like(t).copy_(stock).full_tensor(), value)
        back = t.to_dtensor()
        assert type(back) is DTensor and back.placements == stock.placements
        for a, b in zip(back.to_local().local_shards(), t.to_local().local_shards(), strict=True):
            assert a.data_ptr() == b.data_ptr()


@on_ranks(3)
def test_of_tools_that_tell_empty_ranks_nothing():
    """torchrec: on a rank without a shard of a table, it gives from_local neither placements nor sizes."""
    value, (shards, offsets) = values(), pieces("rows 3", values())
    how = dict(placements=[st.Shard(0)], shape=value.shape, stride=value.stride()) if shards else {}
    t = st.ShardTensor.from_local(st.LocalShardsWrapper(shards, offsets), mesh_of((3,)), run_check=False, **how)
    assert torch.equal(t.full_tensor(), value)
    assert torch.equal(whole(t.redistribute(placements=[st.Shard(1)])), value)
    other = table("interleaved 3", torch.zeros_like(value))
    assert torch.equal(other.copy_(t).full_tensor(), value)


@on_ranks(3)
def test_on_some_ranks():
    value, rank = values(), dist.get_rank()
    mesh = st.DeviceMesh("cpu", [0, 2])
    boxes = {0: [((4, 0), (3, 6))], 2: [((0, 0), (4, 6))]}.get(rank, [])
    wrapper = st.LocalShardsWrapper([at(value, box).clone() for box in boxes], [o for o, _ in boxes], dtype=None)
    t = st.ShardTensor.from_local(wrapper, mesh, [st.Shard(0)], shape=value.shape, stride=value.stride())
    everyone = mesh_of((3,))
    if boxes:
        assert torch.equal(t.full_tensor(), value)
        with pytest.raises(NotImplementedError, match="'device_mesh' has ranks besides those of"):
            t.redistribute(everyone, [st.Shard(0)])
    assert t.detach().clone().shape == value.shape


@on_ranks(2)
def test_refused_on_all_ranks():
    rank, mesh, value = dist.get_rank(), mesh_of((2,)), values()

    def enter(shards, offsets, **how):
        how = {"run_check": True, "shape": (7, 6), "placements": [st.Shard(0)]} | how
        return st.ShardTensor.from_local(st.LocalShardsWrapper(shards, offsets), mesh, **how)

    mine = [torch.ones(3, 6)] if rank == 0 else [torch.ones(4, 6)]
    start = [(3 * rank, 0)]
    assert enter(mine, start).full_tensor().sum() == 42
    with pytest.raises(ValueError, match=r"is torch.float32 on rank 0, torch.float64 on rank 1"):
        enter([mine[0].double()] if rank else mine, start)
    with pytest.raises(ValueError, match=r"has 2 dims on rank 0, 1 on rank 1"):
        enter([torch.ones(7)] if rank else mine, [(0,)] if rank else start)
    with pytest.raises(ValueError, match=r"'shape' has 1 dims, the local tensor 2"):
        enter(mine if rank else [], start if rank else [], shape=(7,))
    with pytest.raises(ValueError, match=r"sizes \[4, 6\] at \[4, 0\] on rank 1, outside of a tensor of sizes \[7, 6\]"):
        enter(mine, [(4 * rank, 0)])
    with pytest.raises(ValueError, match=r"'shape' or 'sharding_shapes', or the kinds of 'local_tensor', differ"):
        enter(mine, start, shape=(7 + rank, 6))
    with pytest.raises(ValueError, match=r"the kinds of 'local_tensor', differ"):
        if rank:
            enter(mine, start)
        else:
            st.ShardTensor.from_local(mine[0], mesh, [st.Shard(0)], run_check=True, shape=(7, 6))
    with pytest.raises(ValueError, match="has summands"):
        enter(mine, start, placements=[st.Partial()])
    with pytest.raises(ValueError, match="'sharding_shapes' is given with a LocalShardsWrapper"):
        enter(mine, start, sharding_shapes="infer")
    with pytest.raises(RuntimeError, match="no rank holds 12 elements"):
        enter(mine, [(5 * rank, 0)], shape=(9, 6)).full_tensor()
    with pytest.raises(ValueError, match=r"of sizes \[7, 6\] on rank 0, torch.float32 of sizes \[8, 6\] on rank 1"):
        enter(mine, start, shape=(7 + rank, 6), run_check=False).full_tensor()
    with pytest.raises(ValueError, match=r"of sizes \[8, 6\] does not fit into one of sizes \[7, 6\]"):
        enter(mine, start).copy_(enter([torch.ones(4, 6)], [(4 * rank, 0)], shape=(8, 6)))
    t = table("rows 2", value)
    with pytest.raises(RuntimeError, match="summands"):
        t.redistribute(placements=[st.Partial()])
    plain = state("plain 2", value, None)
    for name, f in {
        "aten.sum.default": lambda: t.sum(),
        "aten.matmul.default": lambda: t @ t.detach(),
        "aten.embedding.default": lambda: torch.nn.functional.embedding(torch.tensor([0]), t),
        "aten.uniform_.default": lambda: t.uniform_(),
        "aten.view.default": lambda: t.view(-1),
        "aten.equal.default": lambda: torch.equal(t, plain),
        "meets one with": lambda: t + plain,
        "explain: argument 'source' holds LocalShardsWrappers": lambda: t.explain([st.Replicate()]),
        "numpy": lambda: t.numpy(),
        "tolist": lambda: t.tolist(),
    }.items():
        with pytest.raises((NotImplementedError, RuntimeError), match=name):
            f()
    assert torch.equal((t * st.full((), 2.0, device_mesh=mesh, placements=[st.Replicate()])).full_tensor(), value * 2)
    assert "LocalShardsWrapper" in repr(t) and torch.equal(t.view(7, -1).full_tensor(), value)


# ---- a plain ShardTensor as shards ----


@pytest.mark.parametrize("name", ["uneven 3", "columns 3", "whole 3", "nested 4", "strided 4", "three boxes 4", "replicas 4", "one has all 4"])
@on_ranks(of=lambda name: int(name[-1]))
def test_shards_of_plain(name):
    from test_checkpoint import LAYOUTS, lay

    value = torch.arange(1.0, 36.0, dtype=torch.float64).view(7, 5)
    x = lay(value, name)
    wrapper = x.local_shards()
    boxes = [box for box in x._layout.boxes([7, 5]) if all(box[1])]
    assert [(list(c.offsets), list(c.sizes)) for c in wrapper.local_chunks] == boxes
    for shard, box in zip(wrapper.local_shards(), boxes, strict=True):
        assert torch.equal(shard, at(value, box)) and shard.untyped_storage().data_ptr() == x._local_tensor.untyped_storage().data_ptr()
    again = st.ShardTensor.from_local(wrapper, mesh_of(LAYOUTS[name][0]), x.placements, shape=value.shape)
    assert torch.equal(again.full_tensor(), value) and again.local_shards().local_chunks == wrapper.local_chunks
    x.local_shards().zero_()
    assert not x.full_tensor().any()
    if name == "uneven 3":
        with pytest.raises(RuntimeError, match=r"local_shards: .* has summands"):
            x.sum(0).local_shards()


# ---- documentation ----

PAGE = Path(__file__).parents[2] / "docs" / "local_shards.md"


@on_ranks(2)
def test_documentation(tmp_path):
    path = str(tmp_path)
    exec(PAGE.read_text().split("```python")[1].split("```")[0], {"path": path})


def test_every_name_of_torchs_class_is_documented():
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper as Stock

    names = {line.split("|")[1].strip(" `").split("(")[0] for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    own = {n for n in vars(Stock) if n.startswith(("__create", "__get")) or not n.startswith("__")} - {"_local_shards", "_storage_meta"}
    assert len(own) > 20 and own <= names, own - names
