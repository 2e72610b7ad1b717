"""LocalShardsWrapper: several shards of one tensor on a rank, alone and as the piece of a ShardTensor."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
from oracle import mesh_of, whole

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
    from shardtensor import Replicate, Shard

    return [Replicate() if one == "R" else Shard(int(one[1:])) for one in text.split()]


def at(value, box):
    return value[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


def pieces(name, value):
    boxes = TABLES[name][2][dist.get_rank()]
    return [at(value, box).clone() for box in boxes], [offsets for offsets, _ in boxes]


def table(name, value, kind="ours"):
    """The value in these shards: as a ShardTensor of ours, or of torch's wrapper, or as a stock DTensor of either."""
    import shardtensor as st
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper as Stock

    shape, placements, _ = TABLES[name]
    shards, offsets = pieces(name, value)
    wrapper = (Stock if "torch's" in kind else st.LocalShardsWrapper)(shards, offsets)
    cls = DTensor if "stock" in kind else st.ShardTensor
    how = dict(run_check=False, shape=value.shape, stride=value.stride())
    return cls.from_local(wrapper, mesh_of(shape), objects(placements), **how)


# ---- alone ----


def some(dtype=torch.float32):
    from shardtensor import LocalShardsWrapper

    shards = [torch.arange(6, dtype=dtype).view(3, 2), torch.arange(6, 9, dtype=dtype).view(3, 1)]
    return LocalShardsWrapper(shards, [(0, 0), (0, 4)])


def none(**told):
    from shardtensor import LocalShardsWrapper

    return LocalShardsWrapper([], [], **told)


def vector():
    from shardtensor import LocalShardsWrapper

    return LocalShardsWrapper([torch.ones(2), torch.ones(3)], [(4,), (8,)])


def same(wrapper, shards, like):
    assert wrapper.local_chunks == like.local_chunks
    assert len(wrapper.local_shards()) == len(shards)
    for got, want in zip(wrapper.local_shards(), shards, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    return True


def test_it_says_what_torchs_says():
    from shardtensor import LocalShardsWrapper
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
    from shardtensor import LocalShardsWrapper

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
    ("dims", ValueError, r"\[0\] is no place for shard 0", [torch.ones(2, 2)], [(0,)]),
    ("negative", ValueError, r"\[0, -1\] is no place", [torch.ones(2, 2)], [(0, -1)]),
    ("dtype", ValueError, "dtype torch.float64 of shard 1 differs", [torch.ones(2), torch.ones(2).double()], [(0,), (2,)]),
    ("device", ValueError, "device meta of shard 1 differs", [torch.ones(2), torch.ones(2, device="meta")], [(0,), (2,)]),
    ("ndim", ValueError, "ndim 1 of shard 1 differs", [torch.ones(2, 2), torch.ones(2)], [(0, 0), (2,)]),
]


@pytest.mark.parametrize(("error", "text", "shards", "offsets"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused(error, text, shards, offsets):
    from shardtensor import LocalShardsWrapper

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
    from shardtensor import LocalShardsWrapper

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


def test_equal():
    from shardtensor import LocalShardsWrapper

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
    from shardtensor import LocalShardsWrapper

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
    parameter = torch.nn.Parameter(some())
    assert isinstance(parameter, torch.nn.Parameter) and all(s.requires_grad for s in parameter.local_shards())


def test_checkpoint_protocol():
    from torch.distributed.checkpoint.metadata import MetadataIndex

    wrapper = some()
    for index, (shard, start) in enumerate(zip(wrapper.local_shards(), wrapper.local_offsets(), strict=True)):
        for hint in (None, index, 1 - index, 7):
            assert wrapper.__get_tensor_shard__(MetadataIndex("x", start, hint)) is shard
    with pytest.raises(ValueError, match=r"Could not find shard at .* for FQN: 'x'"):
        wrapper.__get_tensor_shard__(MetadataIndex("x", [0, 1]))
    assert none().__get_tensor_shard__(MetadataIndex("x", [0, 1])).numel() == 0


# ---- between ranks ----


def gathered():
    import torch.distributed._functional_collectives as funcol
    from shardtensor import LocalShardsWrapper

    rank, n = dist.get_rank(), dist.get_world_size()
    shards = [torch.full((2, 3), rank), torch.full((1, 3), rank + 10)]
    out = funcol.all_gather_tensor(LocalShardsWrapper(shards, [(0, 0), (0, 3)]), 0, dist.group.WORLD)
    assert torch.equal(out + 0, torch.cat([torch.cat([torch.full((2, 3), r), torch.full((1, 3), r + 10)]) for r in range(n)]))
    line = LocalShardsWrapper([torch.full((2,), rank)], [(0,)])
    assert torch.equal(funcol.all_gather_tensor(line, 0, dist.group.WORLD) + 0, torch.arange(n).repeat_interleave(2))
    assert funcol.wait_tensor(line) is line
    with pytest.raises(NotImplementedError, match="all_gather_into_tensor"):
        funcol.all_gather_tensor(some(), 0, dist.group.WORLD)


def test_all_gather(pools):
    pools(2).run(f"{__name__}:gathered")


def moved(name):
    import shardtensor as st
    from shardtensor import _C

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
    if starts:
        assert t.offsets() == tuple(min(s[d] for s in starts) for d in range(value.ndim))


@pytest.mark.parametrize("name", TABLES)
def test_the_whole_is_told_by_the_offsets(pools, name):
    pools(world(name)).run(f"{__name__}:moved", name)


def differentiated(name):
    value = values(name)
    t = table(name, value).requires_grad_()
    (t.full_tensor() * value).sum().backward()
    same(t.grad.to_local(), pieces(name, value)[0], t.to_local())
    t.grad = None
    (t * 3).full_tensor().sum().backward()
    same(t.grad.to_local(), pieces(name, torch.full_like(value, 3.0))[0], t.to_local())


@pytest.mark.parametrize("name", ["interleaved 3", "vector 3", "grid 4", "anywhere 4"])
def test_gradients(pools, name):
    pools(world(name)).run(f"{__name__}:differentiated", name)
