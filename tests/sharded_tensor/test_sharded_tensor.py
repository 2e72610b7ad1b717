"""ShardedTensor: torch's older tensor of shards, over one exchange of boxes."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import math
import os
import pickle
import random
import re
import subprocess
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import shardtensor
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import on_ranks
from shardtensor import _C, sharded_tensor
from shardtensor import sharded_tensor as st
from shardtensor import sharding_spec as our_specs
from shardtensor.sharded_tensor import ShardedTensor, TensorProperties, _ops, _remote, api
from shardtensor.sharding_spec import ChunkShardingSpec, ShardingSpec, ShardMetadata
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard

SIZES = (7, 5)
ROOT = Path(__file__).parents[2]


# ---- ways to cut a tensor of 7 x 5: lists of (rank, offsets, sizes) ----

GRID = [(0, (0, 0), (3, 2)), (1, (0, 2), (3, 3)), (2, (3, 0), (4, 2)), (3, (3, 2), (4, 3))]
CUTS = {
    "one rank has all": [(1, (0, 0), (7, 5))],
    "rows": [(0, (0, 0), (4, 5)), (1, (4, 0), (3, 5))],
    "rows, ranks turned": [(1, (0, 0), (4, 5)), (0, (4, 0), (3, 5))],
    "columns": [(0, (0, 0), (7, 1)), (1, (0, 1), (7, 4))],
    "two to a rank": [(0, (0, 0), (2, 5)), (1, (2, 0), (1, 5)), (0, (3, 0), (3, 5)), (1, (6, 0), (1, 5))],
    "grid of 2": [(rank % 2, offsets, sizes) for rank, offsets, sizes in GRID],
    "windmill": [
        (0, (0, 0), (2, 4)), (1, (0, 4), (4, 1)), (0, (4, 2), (3, 3)), (1, (2, 0), (5, 2)), (0, (2, 2), (2, 2)), (1, (2, 2), (0, 2)),
    ],
    "rows of 3": [(0, (0, 0), (3, 5)), (1, (3, 0), (3, 5)), (2, (6, 0), (1, 5))],
    "nothing in the middle": [(0, (0, 0), (5, 5)), (1, (5, 0), (0, 5)), (2, (5, 0), (2, 5))],
    "grid of 3": [(rank % 3, offsets, sizes) for rank, offsets, sizes in GRID],
    "grid": GRID,
}  # fmt: skip


def ranks_of(name):
    return 1 + max(rank for rank, *_ in CUTS[name])


def cuts_for(world):
    return [name for name in CUTS if ranks_of(name) <= world]


def shard_list(name, device="cpu"):
    return [ShardMetadata(list(offsets), list(sizes), f"rank:{rank}/{device}") for rank, offsets, sizes in CUTS[name]]


def spec_of(name):
    from shardtensor.sharding_spec import EnumerableShardingSpec

    return EnumerableShardingSpec(shard_list(name))


def chunks(dim=0, ranks=None):
    return ChunkShardingSpec(dim, [f"rank:{r}/cpu" for r in (ranks if ranks is not None else range(dist.get_world_size()))])


def whole(dtype=torch.float32, sizes=SIZES):
    return torch.arange(math.prod(sizes)).view(sizes).to(dtype)


def part(t, shard):
    return t[tuple(slice(o, o + n) for o, n in zip(shard.shard_offsets, shard.shard_sizes, strict=True))]


def shards_of(spec, value, module=None):
    """This rank's shards of the value, cut as the spec says."""
    from shardtensor.sharded_tensor import Shard, TensorProperties

    metadata = spec.build_metadata(value.size(), TensorProperties()).shards_metadata
    return [Shard(part(value, s).clone(), s) for s in metadata if s.placement.rank() == dist.get_rank()]


def mine_of(metadata):
    return [s for s in metadata.shards_metadata if s.placement.rank() == dist.get_rank()]


def lay(value, spec, **options):
    return sharded_tensor.init_from_local_shards(shards_of(spec, value), *value.shape, **options)


def together(t, dst=0):
    """The whole tensor, on every rank."""
    me = dist.get_rank(t._process_group)
    out = torch.empty(t.size(), dtype=t.dtype) if me == dst else None
    t.gather(dst, out)
    box = [out]
    dist.broadcast_object_list(box, dist.get_global_rank(t._process_group, dst), group=t._process_group)
    return box[0]


def holds(t, value):
    for shard in t.local_shards():
        torch.testing.assert_close(shard.tensor.detach(), part(value, shard.metadata), rtol=0, atol=0)
    return t


def raises_everywhere(function, kind, match):
    """The function raises on every rank, and the ranks can go on."""
    with pytest.raises(kind, match=match):
        function()
    dist.barrier()


# ---- specs ----


def test_specs_are_torchs_and_equal_torchs():
    from shardtensor.sharded_tensor import _spec as ours
    from torch.distributed._shard import sharding_spec as stock

    pairs = [
        (ours.ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]), stock.ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"])),
        (spec_of("grid"), stock.EnumerableShardingSpec(shard_list("grid"))),
    ]
    for mine, theirs in pairs:
        assert isinstance(mine, stock.ShardingSpec) and isinstance(mine, type(theirs))
        assert mine == theirs and theirs == mine and ours.own_spec(theirs) == mine and type(ours.own_spec(theirs)) is type(mine)
        assert pickle.loads(pickle.dumps(mine)) == mine and copy.deepcopy(mine) == mine
        assert repr(mine) == repr(theirs)
        for sizes in [SIZES, (7, 5, 2)[:2]]:
            properties = ours.TensorProperties()
            assert mine.build_metadata(torch.Size(sizes), properties) == theirs.build_metadata(torch.Size(sizes), properties)
    assert pairs[0][0] != pairs[1][0]
    device = ours.DevicePlacementSpec("rank:1/cpu")
    assert device.device.rank() == 1 and isinstance(device, ours.PlacementSpec)


@pytest.mark.parametrize(
    ("shards", "match"),
    [
        ([], "Empty shard list provided"),
        ([((0, 0), (4, 5)), ((3, 0), (4, 5))], "Shards .*offsets=\\[0, 0\\].* and .*offsets=\\[3, 0\\].* overlap"),
        ([((0, 0), (4, 3)), ((4, 0), (3, 5)), ((2, 2), (3, 3))], "overlap"),
        ([((0, 0), (4, 5)), ((0, 0), (4, 5))], "overlap"),
        ([((0, 0), (4, 5)), ((4,), (3,))], "Found inconsistent ranks for shards: 2 and 1"),
        ([((), ()), ((), ())], "overlap"),
    ],
)
def test_enumerated_shards_are_checked(shards, match):
    from shardtensor.sharding_spec import EnumerableShardingSpec, ShardMetadata

    with pytest.raises(ValueError, match=match):
        EnumerableShardingSpec([ShardMetadata(list(o), list(n), "rank:0/cpu") for o, n in shards])


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ((7, 5, 1), "Rank of tensor is 3, but shards rank is 2"),
        ((7, 4), "Shard offset 2 and length 3 exceeds tensor dim: 4 for shard"),
        ((7, 6), "Total volume of shards: 35 does not match tensor volume: 42, in other words all the individual shards do not cover"),
    ],
)
def test_enumerated_shards_make_up_the_tensor(sizes, match):
    with pytest.raises(ValueError, match=match):
        spec_of("grid").build_metadata(torch.Size(sizes), TensorProperties())


def test_overlaps_are_found_as_by_brute_force():
    from shardtensor.sharded_tensor._spec import _overlapping

    def touch(a, b):
        return all(
            set(range(o, o + n)) & set(range(p, p + m))
            for o, n, p, m in zip(a.shard_offsets, a.shard_sizes, b.shard_offsets, b.shard_sizes, strict=True)
        )

    found = 0
    for seed in range(300):
        draw = random.Random(seed)
        ndim = draw.randint(1, 3)
        shards = [
            ShardMetadata([draw.randint(0, 6) for _ in range(ndim)], [draw.randint(0, 3) for _ in range(ndim)])
            for _ in range(draw.randint(1, 5))
        ]
        pairs = [(a, b) for i, a in enumerate(shards) for b in shards[i + 1 :] if touch(a, b)]
        pair = _overlapping(shards)
        assert (pair is not None) == bool(pairs)
        assert pair is None or any(a is pair[0] and b is pair[1] for a, b in pairs)
        found += bool(pairs)
    assert 50 < found < 250


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda s: s.ChunkShardingSpec("row", ["rank:0/cpu"]), NotImplementedError, "does not support named dimension yet"),
        (lambda s: s.ChunkShardingSpec(0.5, ["rank:0/cpu"]), ValueError, "Sharding dim needs to be an integer, found: 0.5"),
        (lambda s: s.ChunkShardingSpec(0, []), ValueError, "argument 'placements' is empty"),
        (lambda s: s.ChunkShardingSpec(0, ["rank:0/nowhere"]), RuntimeError, "nowhere"),
        (lambda s: s.ChunkShardingSpec(0, ["rank:a/cpu"]), ValueError, "Could not parse remote_device"),
        (lambda s: s.DevicePlacementSpec("rank:0/cpu/1"), ValueError, "Could not parse remote_device"),
        (lambda s: s.ChunkShardingSpec(2, ["rank:0/cpu"]).build_metadata(torch.Size(SIZES), None), ValueError, "Invalid sharding dim: 2"),
        (lambda s: s.ShardMetadata([-1, 0], [2, 2]), ValueError, "shard_offsets should be >=0"),
        (lambda s: s.ShardMetadata([0], [2, 2]), ValueError, "should have the same number of elements"),
        (lambda s: s.own_spec("rank:0/cpu"), ValueError, "Expecting ShardingSpec but got: <class 'str'>"),
    ],
)
def test_specs_refuse(make, kind, match):
    from shardtensor.sharded_tensor import _spec as sharding_spec

    with pytest.raises(kind, match=match):
        make(sharding_spec)


@pytest.mark.parametrize("size", range(9))
@pytest.mark.parametrize("dim", [0, 1])
def test_the_spec_of_shards_is_found_as_torch_does(size, dim):
    from shardtensor.sharded_tensor import _spec as ours
    from torch.distributed._shard.sharding_spec import _infer_sharding_spec_from_shards_metadata as stock

    sizes = torch.Size([size, 3] if dim == 0 else [3, size])
    spec = ours.ChunkShardingSpec(dim, ["rank:2/cpu", "rank:0/cpu", "rank:1/cpu"])
    shards = spec.build_metadata(sizes, ours.TensorProperties()).shards_metadata
    found = ours._infer_sharding_spec_from_shards_metadata(shards[::-1])
    if size and math.ceil(size / math.ceil(size / 3)) == 3:  # no empty chunk, whose offset torch may refuse
        assert found == stock(shards[::-1]) == spec
    if size:
        assert found == spec
    assert ours._infer_sharding_spec_from_shards_metadata(shard_list("grid")) == spec_of("grid")


# ---- made in place ----


@on_ranks(2, 4)
def test_factories_make_what_the_spec_says():
    for spec in [chunks(0), chunks(1), chunks(-1), chunks(0, list(range(dist.get_world_size()))[::-1]), *map(spec_of, cuts_for(dist.get_world_size()))]:
        for made, value in [
            (st.zeros(spec, *SIZES), torch.zeros(SIZES)),
            (st.ones(spec, SIZES, dtype=torch.int64), torch.ones(SIZES, dtype=torch.int64)),
            (st.full(spec, SIZES, 2.5, requires_grad=True), torch.full(SIZES, 2.5)),
            (st.full(spec, list(SIZES), 3, dtype=torch.float64), torch.full(SIZES, 3.0, dtype=torch.float64)),
        ]:
            holds(made, value)
            assert made.dtype == value.dtype and made.size() == value.size() == made.shape and made.dim() == made.ndim == 2
            assert made.size(1) == 5 and made.numel() == 35 and made.stride() == (5, 1) and made.layout == torch.strided
            assert made.metadata() == spec.build_metadata(value.size(), made.metadata().tensor_properties)
            assert made.sharding_spec() is spec and not made.is_pinned() and made.device == torch.device("cpu") and not made.is_meta
            assert torch.equal(together(made), value)
        assert st.full(spec, SIZES, 2.5, requires_grad=True).requires_grad
        empty = st.ShardedTensor(spec, *SIZES, dtype=torch.bool)
        assert [s.metadata for s in empty.local_shards()] == mine_of(empty.metadata())
        assert all(s.tensor.dtype == torch.bool and list(s.tensor.shape) == s.metadata.shard_sizes for s in empty.local_shards())


@on_ranks(3)
def test_chunks_may_be_empty_and_several_on_a_rank():
    for sizes, ranks in [((4, 3), [0, 1, 2]), ((2, 3), [2, 1, 0]), ((0, 3), [0, 1, 2]), ((7, 0), [0, 1, 2]), ((7, 2), [1, 0, 1, 0, 1]), ((5, 3), [0, 1, 2, 0])]:
        value = torch.arange(math.prod(sizes), dtype=torch.float64).view(sizes)
        t = lay(value, chunks(0, ranks))
        holds(t, value)
        if 0 not in sizes:
            assert t.sharding_spec() == chunks(0, ranks)
        assert torch.equal(together(t, dst=1), value)
        assert torch.equal(together(t.clone()), value) and torch.equal(together(torch.zeros_like(t)), value * 0)
        assert torch.equal(together(t.reshard(chunks(1, [1]))), value)


@on_ranks(2)
def test_factories_refuse_on_all_ranks():
    for make, kind, match in [
        (lambda: st.zeros(chunks(0, [0, 2]), 7, 5), ValueError, r"Global rank 2 does not exist in input process group: \[0, 1\]"),
        (lambda: st.zeros(chunks(), 7, 5, layout=torch.sparse_coo), ValueError, "Only torch.strided layout is currently supported"),
        (lambda: st.zeros(chunks(), 7, 5, memory_format=torch.channels_last), ValueError, "Only torch.contiguous_format memory_format"),
        (lambda: st.zeros("rows", 7, 5), ValueError, "Expecting ShardingSpec but got"),
        (lambda: st.zeros(chunks(2), 7, 5), ValueError, "Invalid sharding dim: 2"),
        (lambda: st.zeros(chunks(), 7, "5"), TypeError, "size has to be a sequence of ints, found"),
        (lambda: st.zeros(spec_of("rows"), 8, 5), ValueError, "do not cover the entire tensor"),
        (lambda: st.zeros(ChunkShardingSpec(0, ["cpu", "cpu"]), 7, 5), ValueError, "placement cpu names no rank"),
        (lambda: st.zeros(ChunkShardingSpec(0, ["trainer/cpu"]), 7, 5), RuntimeError, "RPC framework needs to be initialized for using worker names: trainer"),
        (lambda: st.zeros(chunks(), 7, 5, init_rrefs=True), RuntimeError, "RPC Framework needs to be initialized"),
        (lambda: st.zeros(chunks(), 7, 5).remote_shards(), RuntimeError, "created with init_rrefs=False"),
    ]:
        raises_everywhere(make, kind, match)


# ---- from local shards ----


@on_ranks(2, 3, 4)
def test_from_local_shards():
    me = dist.get_rank()
    for name in cuts_for(dist.get_world_size()):
        spec, value = spec_of(name), whole()
        mine = shards_of(spec, value)
        t = st.init_from_local_shards(mine, *SIZES)
        assert all(a is b for a, b in zip(t.local_shards(), mine, strict=True))  # the user's own, not copies
        assert sorted(map(repr, t.metadata().shards_metadata)) == sorted(map(repr, spec.shards))
        assert torch.equal(together(t), value)
        if len(mine) == 1:
            assert t.local_tensor() is mine[0].tensor
        else:
            with pytest.raises(NotImplementedError, match=f"Only single local shard is supported. Number of shards: {len(mine)}"):
                t.local_tensor()
        # The same from metadata that all ranks know, and in another order.
        again = st.ShardedTensor._init_from_local_shards_and_global_metadata(mine[::-1], t.metadata(), sharding_spec=spec)
        assert torch.equal(together(again), value) and again.sharding_spec() == spec
        base = st.ShardedTensorBase._init_from_local_shards_and_global_metadata(mine, t.metadata())
        assert isinstance(base, st.ShardedTensor) and base.metadata() == t.metadata() and base.local_shards() == mine
    chunked = st.ShardedTensor._init_from_local_tensor(shards_of(chunks(1), whole())[0].tensor, chunks(1), SIZES)
    assert torch.equal(together(chunked), whole()) and chunked.sharding_spec() == chunks(1)
    own = st.Shard.from_tensor_and_offsets(whole()[:1] + me, [me, 0], me)
    assert torch.equal(together(st.init_from_local_shards([own], dist.get_world_size(), 5))[:, 0], torch.arange(dist.get_world_size()) * 1.0)


@on_ranks(3)
def test_shards_of_unknown_places_are_stacked():
    me = dist.get_rank()
    mine = st.Shard.from_tensor_and_offsets(torch.full((me + 1, 5), float(me)), [0, 0], me)
    for sizes in [(None, 5), ((None, 5),), (None, None)]:
        t = st.init_from_local_shards([mine], *sizes)
        assert t.size() == (6, 5) and t.local_shards()[0].metadata.shard_offsets == [[0, 0], [1, 0], [3, 0]][me]
        assert together(t)[:, 0].tolist() == [0, 1, 1, 2, 2, 2]
    raises_everywhere(lambda: st.init_from_local_shards([mine], None, 4), ValueError, r"global_size' is \(None, 4\), but the shards make up \(6, 5\)")


def broken(how):
    """Shards and sizes that are wrong in one way, on rank 1 or taken together."""
    from shardtensor.sharded_tensor import Shard

    sizes, value = list(SIZES), whole()
    mine = shards_of(chunks(0, [0, 1, 2, 0, 1, 2]), value)
    if dist.get_rank() == 1 and how in ("dtype", "requires_grad"):
        other = mine[1].tensor.double() if how == "dtype" else mine[1].tensor.requires_grad_()
        mine[1] = Shard(other, mine[1].metadata)
    elif how in ("dtypes", "requires_grads") and dist.get_rank() == 1:
        mine = [Shard(s.tensor.double() if how == "dtypes" else s.tensor.requires_grad_(), s.metadata) for s in mine]
    elif how in ("pin_memory", "pin_memories") and dist.get_rank() == 1:
        for shard in mine[how == "pin_memory" :]:
            shard.tensor.is_pinned = lambda: True  # real pinned memory needs a GPU
    elif how == "layout" and dist.get_rank() == 1:
        mine[0] = Shard(mine[0].tensor.to_sparse(), mine[0].metadata)
    elif how == "strides" and dist.get_rank() == 1:
        mine[0] = Shard(torch.empty(mine[0].tensor.shape[::-1]).t(), mine[0].metadata)
        mine[0].tensor.resize_(5, 2).t_() if mine[0].tensor.is_contiguous() else None
    elif how == "rank" and dist.get_rank() == 1:
        mine[0].metadata.placement._rank = 0
    elif how == "no rank" and dist.get_rank() == 1:
        mine[0].metadata.placement = None
    elif how == "foreign rank" and dist.get_rank() == 1:
        mine[0].metadata.placement._rank = 7
    elif how == "device" and dist.get_rank() == 1:
        mine[0].metadata.placement._device = torch.device("meta")
    elif how == "sizes" and dist.get_rank() == 1:
        mine[0].metadata.shard_sizes = [1, 1]
    elif how == "offsets" and dist.get_rank() == 1:
        mine[0].metadata.shard_offsets = [7, 0]
    elif how == "overlap" and dist.get_rank() == 1:
        mine[0].metadata.shard_offsets = [0, 0]
    elif how == "gap" and dist.get_rank() == 1:
        mine = mine[1:]
    elif how == "nothing":
        mine = []
    elif how == "dims":
        sizes = [7, 5, 1]
    elif how == "global size" and dist.get_rank() == 1:
        sizes = [5, 7]
    elif how == "no sizes" and dist.get_rank() == 1:
        sizes = [7, 5.0]
    return mine, sizes


# torch's texts. An error of rank 1 alone is raised on the other ranks too.
MISMATCHES = {
    "dtype": "Local shards' tensor dtype property need to be the same on rank:1! Found one local shard tensor dtype=torch.float64",
    "requires_grad": "Local shards' tensor requires_grad property need to be the same on rank:1!",
    "pin_memory": "Local shards' tensor pin_memory property need to be the same on rank:1! Found one local shard tensor pin_memory=True, the other",
    "pin_memories": "ShardedTensor pin_memory property does not match from different ranks! Found pin_memory=False on rank:0, and pin_memory=True on rank:1.",
    "dtypes": "ShardedTensor dtype property does not match from different ranks! Found dtype=torch.float32 on rank:0, and dtype=torch.float64 on rank:1.",
    "requires_grads": "ShardedTensor requires_grad property does not match from different ranks!",
    "layout": "Only torch.strided layout is currently supported, but found torch.sparse_coo on rank:1!",
    "strides": "Only torch.contiguous_format memory_format is currently supported!",
    "rank": "Local shard metadata's rank does not match with the rank in its process group! Found current rank in the process group: 1, ",
    "no rank": "remote device is None",
    "foreign rank": "Global rank 7 does not exist in input process group: [0, 1, 2]",
    "device": "Local shard tensor device does not match with local Shard's placement! Found local shard tensor device: cpu, ",
    "sizes": "Local shards' tensor size property need to be the same on rank:1! Found one local shard tensor size=[1, 1]",
    "offsets": "Shard offset 7 and length 2 exceeds tensor dim: 7 for shard",
    "overlap": "overlap",
    "gap": "do not cover the entire tensor",
    "nothing": "ShardedTensor have no local shards on all ranks!",
    "dims": "Rank of tensor is 3, but shards rank is 2",
    "global size": "ShardedTensor global_size property does not match from different ranks! Found global_size=torch.Size([7, 5]) on rank:0",
    "no sizes": "size has to be a sequence of ints, found: [7, 5.0]",
}


@on_ranks(3)
def test_every_mismatch_is_named_on_all_ranks():
    for how, text in MISMATCHES.items():
        with pytest.raises((ValueError, TypeError)) as raised:
            mine, sizes = broken(how)
            st.init_from_local_shards(mine, *sizes)
        assert text in str(raised.value), how
        told = [None] * 3
        dist.all_gather_object(told, str(raised.value))  # the ranks are in step
        assert len({t.replace(" (on rank 1)", "") for t in told}) == 1, told


@on_ranks(2)
def test_metadata_taken_at_its_word_is_compared_with_this_ranks_shards():
    from shardtensor.sharded_tensor import Shard

    t = lay(whole(), chunks())
    good, (mine,) = t.metadata(), t.local_shards()

    def make(shards, metadata=good):
        return lambda: st.ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)

    def other(**changes):
        metadata = copy.deepcopy(good)
        for name, value in changes.items():
            setattr(metadata.tensor_properties, name, value)
        return metadata

    size, foreign = copy.deepcopy(mine.metadata), st.ShardMetadata([0, 0], [1, 5], mine.metadata.placement)
    for function, kind, match in [
        (make([]), RuntimeError, rf"Number of local shards \(0\) does not match .* \(1\) on rank \({dist.get_rank()}\)"),
        (make([mine], other(dtype=torch.int64)), ValueError, "dtype property is incompatible with tensor property on rank"),
        (make([mine], other(requires_grad=True)), ValueError, "requires_grad property is incompatible with tensor property"),
        (make([mine], other(pin_memory=True)), ValueError, "pin_memory property is incompatible with tensor property"),
        (make([mine], other(layout=torch.sparse_coo)), ValueError, "Only torch.strided layout is currently supported"),
        (make([Shard(torch.zeros(size.shard_sizes[::-1]).t(), size)]), ValueError, "Only torch.contiguous_format"),
        (make([Shard(mine.tensor[:1], foreign)]), ValueError, "is not in sharded_tensor_metadata"),
        (make([mine], replace(good, shards_metadata=[])), RuntimeError, "does not match number of local"),
        (make([mine], replace(good, size=torch.Size([7, 6]))), ValueError, "do not cover"),
    ]:
        with pytest.raises(kind, match=match):
            function()
    with pytest.raises(ValueError, match="local_tensor is not a contiguous Tensor"):
        st.ShardedTensor._init_from_local_tensor(torch.zeros(5, 7).t(), chunks(), SIZES)
    with pytest.raises(ValueError, match="shards_metadata must not be empty!"):
        st.ShardedTensorBase._init_from_local_shards_and_global_metadata([], st.ShardedTensorMetadata())
    with pytest.raises(ValueError, match="Found shard tensor size"):
        Shard(torch.zeros(2, 2), size)


# ---- moved ----


@on_ranks(2, 3, 4)
def test_gather():
    world, me = dist.get_world_size(), dist.get_rank()
    for name in cuts_for(world):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            t = lay(whole(dtype), spec_of(name))
            for dst in range(world):
                out = torch.zeros(SIZES, dtype=dtype) if me == dst else None
                assert t.gather(dst, out) is None
                assert out is None or torch.equal(out, whole(dtype))
    t = lay(whole() + 0.3, chunks())
    out = torch.zeros(SIZES, dtype=torch.float64) if me == 0 else None
    t.gather(out=out, dtype=torch.int32)  # the dtype that is sent
    assert out is None or torch.equal(out, whole(torch.float64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t.gather(out=out, enforce_dtype=True)
    assert any("`enforce_dtype` is deprecated" in str(w.message) for w in caught)
    assert out is None or torch.equal(out, (whole() + 0.3).double())
    for arguments, match in [
        ((0, None), r"Argument ``dst_tensor`` must be specified on destination rank 0"),
        ((0, torch.zeros(SIZES)), "must NOT be specified on non-destination ranks"),
        ((0, torch.zeros(7, 4) if me == 0 else None), r"Argument ``dst_tensor`` have size \(7, 4\),but should be \(7, 5\)"),
        ((world, None), f"argument 'dst' is {world}, not a rank of a group of {world} ranks"),
        ((me, torch.zeros(SIZES)), rf"dst={me} on rank: {me} does not match with dst=\d on rank: \d"),
    ]:
        raises_everywhere(lambda arguments=arguments: t.gather(*arguments), ValueError, match)


@on_ranks(2, 3, 4)
def test_reshard_to_any_spec_in_one_exchange():
    world = dist.get_world_size()
    specs = [chunks(0), chunks(1), chunks(0, list(range(world))[::-1]), *map(spec_of, cuts_for(world))]
    for source in specs:
        for target in specs:
            t = lay(whole(torch.float64), source)
            kept = {id(s.tensor) for s in t.local_shards()}
            _C.reset_comm_counts()
            assert t.reshard(target) is t
            calls = {name: n for name, (n, _) in _C.comm_counts().items() if n}
            assert calls.pop("all_gather") == 1  # of two numbers: do all ranks ask for the same?
            assert calls in ([{}] if source == target else [{"all_to_all": 1}, {}])
            assert t.sharding_spec() == target and t.metadata().shards_metadata == target.build_metadata(t.size(), None).shards_metadata
            assert [s.metadata for s in t.local_shards()] == mine_of(t.metadata())
            holds(t, whole(torch.float64))
            if source == target:
                assert kept == {id(s.tensor) for s in t.local_shards()}
    raises_everywhere(lambda: t.reshard("rows"), ValueError, "Expecting ShardingSpec but got")
    raises_everywhere(lambda: t.reshard(chunks(0, [0, 9])), ValueError, "Global rank 9 does not exist")
    raises_everywhere(lambda: t.reshard(chunks(dist.get_rank() % 2)), ValueError, "resharding_spec=.* does not match with resharding_spec=")


@on_ranks(3)
def test_the_gradient_of_reshard_goes_the_way_back():
    weight = whole(torch.float64) + 1
    for source, target in [(chunks(0), chunks(1)), (spec_of("grid of 3"), spec_of("rows of 3")), (spec_of("rows"), spec_of("nothing in the middle"))]:
        t = lay(whole(torch.float64), source).requires_grad_()
        leaves = [s.tensor for s in t.local_shards()]
        t.reshard(target)
        loss = sum((s.tensor.square() * part(weight, s.metadata)).sum() for s in t.local_shards())
        loss.backward()
        for leaf, shard in zip(leaves, shards_of(source, 2 * whole(torch.float64) * weight), strict=True):
            torch.testing.assert_close(leaf.grad, shard.tensor)
    t = lay(whole(), chunks()).requires_grad_()
    raises_everywhere(lambda: t.reshard(spec_of("rows")), RuntimeError, r"ranks \[2\] would have no shard and so no part in the backward")
    with torch.no_grad():
        t.reshard(spec_of("rows"))
    assert all(s.tensor.requires_grad and s.tensor.is_leaf for s in t.local_shards()) and t.requires_grad
    holds(t, whole())


@on_ranks(2)
def test_to_other_dtypes_devices_and_groups():
    t = lay(whole(), spec_of("two to a rank"))
    for same in (t.to(torch.float32), t.to("cpu"), t.cpu(), t.to(torch.zeros(1)), t.to(device="cpu", dtype=torch.float32), t.float()):
        assert same is t
    double = torch.zeros(1).double()
    for made in (t.to(torch.float64), t.to("cpu", torch.float64), t.to(dtype=torch.float64), t.to(double), t.double(), t.type_as(double)):
        assert made.dtype == torch.float64 and made.metadata().tensor_properties.dtype == torch.float64
        assert made.sharding_spec() == t.sharding_spec()
        holds(made, whole(torch.float64))
    copied = t.to("cpu", torch.float32, False, True)
    assert all(a.tensor is not b.tensor for a, b in zip(copied.local_shards(), t.local_shards(), strict=True))
    nowhere = t.to("meta")
    assert nowhere.is_meta and nowhere.device.type == "meta"
    assert {str(s.placement) for s in nowhere.metadata().shards_metadata} == {"rank:0/meta", "rank:1/meta"}
    group = dist.new_group([0, 1])
    moved = t.to(process_group=group)
    assert moved._process_group is group and t._process_group is not group and torch.equal(together(moved), whole())
    assert not t.requires_grad_().to(torch.int32).requires_grad
    with pytest.raises(RuntimeError, match=r"ShardedTensor.to\(\) have wrong arguments"):
        t.to([1])
    with pytest.raises(RuntimeError, match=r"Only `torch.contiguous_format` or `torch.preserve_format` is supported!"):
        t.cpu(memory_format=torch.channels_last)


def places(t):
    return [str(shard.placement) for shard in t.metadata().shards_metadata]


@on_ranks(2, 3, 4)
def test_cuda():
    """With fake tensors, which need no device. The test sets the current device by hand."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    me, world = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(torch.accelerator, "current_device_index", lambda: me)
        for spec in (chunks(), spec_of("two to a rank")):
            t = st.zeros(spec, *SIZES, pin_memory=True, requires_grad=True)
            there = torch.empty(1, device="cuda")
            for moved in (t.cuda(), t.cuda("cuda"), t.cuda(f"cuda:{me}", True), t.to("cuda"), t.to(there)):
                assert moved.device == torch.device("cuda", me) and moved.requires_grad and not moved.is_pinned()
                assert [s.tensor.device for s in moved.local_shards()] == [moved.device] * len(t.local_shards())
                wanted = [f"rank:{s.placement.rank()}/cuda" + f":{me}" * (s.placement.rank() == me) for s in t.metadata().shards_metadata]
                assert places(moved) == wanted == places(moved.cuda())
                assert {s.metadata.placement.device() for s in moved.local_shards()} <= {moved.device}
                assert moved.sharding_spec().build_metadata(SIZES, moved.metadata().tensor_properties).shards_metadata == moved.metadata().shards_metadata
                assert places(moved.cpu()) == places(t) and moved.cpu().device.type == "cpu"
            elsewhere = f"cuda:{me + world}"
            with pytest.raises(AssertionError, match=r"Only device without device id .* is expected for ShardedTensor!"):
                t.cuda(elsewhere)
            with pytest.warns(UserWarning, match="only move tensor to its current device"):
                assert t.to(elsewhere).device == torch.device("cuda", me)
            with pytest.raises(RuntimeError, match=r"Only `torch.contiguous_format` or `torch.preserve_format` is supported!"):
                t.cuda(memory_format=torch.channels_last)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@on_ranks(2)
def test_without_a_gpu_the_error_is_torchs():
    t = lay(whole(), chunks())
    for ours, torchs in [
        (t.cuda, whole().cuda),
        (lambda: st.zeros(chunks(), *SIZES, pin_memory=True), lambda: torch.zeros(1, pin_memory=True)),
    ]:
        with pytest.raises(RuntimeError) as wanted:
            torchs()
        with pytest.raises(RuntimeError) as raised:
            ours()
        assert str(raised.value) == str(wanted.value)
    holds(t, whole())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@on_ranks(2)
def test_on_a_gpu():
    t = lay(whole(), spec_of("two to a rank"))
    moved = t.cuda()
    assert all(s.tensor.is_cuda and torch.equal(s.tensor.cpu(), h.tensor) for s, h in zip(moved.local_shards(), t.local_shards(), strict=True))
    holds(moved.cpu(), whole())
    pinned = st.full(chunks(), SIZES, 3.0, pin_memory=True)
    assert pinned.is_pinned() and all(s.tensor.is_pinned() for s in pinned.local_shards())
    again = st.init_from_local_shards(pinned.local_shards(), *SIZES)
    assert again.is_pinned() and not again.cuda().is_pinned()


@on_ranks(3)
def test_in_a_group_of_some_ranks():
    group, me = dist.new_group([1, 2]), dist.get_rank()
    spec = chunks(0, [2, 1])
    made = st.zeros(spec, *SIZES, process_group=group)
    assert len(made.local_shards()) == (me > 0)
    if me == 0:
        for call in (made.gather, lambda: made.reshard(chunks(1, [1, 2])), lambda: st.init_from_local_shards([], 7, 5, process_group=group)):
            with pytest.raises(RuntimeError, match="rank 0 is not in the process group"):
                call()
        assert torch.equal(made, st.zeros(chunks(0, [2, 1]), *SIZES, process_group=group))
        return
    with pytest.raises(ValueError, match=r"Global rank 0 does not exist in input process group: \[1, 2\]"):
        st.zeros(chunks(), *SIZES, process_group=group)
    t = lay(whole(), spec, process_group=group)
    assert torch.equal(together(t, dst=1), whole())  # rank 1 of the group
    holds(t.reshard(chunks(1, [1, 2])), whole())
    assert torch.equal(together(t.reshard(spec)), whole()) and torch.equal(t, lay(whole(), spec, process_group=group))
    sharded = st._shard_tensor(whole() + me, spec, src_rank=1, process_group=group)
    holds(sharded, whole() + 2)
    torch.manual_seed(3)
    shared = dict(process_group=group, generator=torch.default_generator)
    once = together(st.rand(spec, *SIZES, **shared))
    torch.manual_seed(3)
    assert torch.equal(once, together(st.rand(chunks(1, [1]), *SIZES, **shared)))


class Halves:
    """A user's spec, which does not define equality."""

    def build_metadata(self, tensor_sizes, tensor_properties):
        return chunks(0, [1, 0]).build_metadata(tensor_sizes, tensor_properties)

    def shard(self, tensor, src_rank=0, process_group=None):
        return chunks(0, [1, 0]).shard(tensor, src_rank, process_group)


@on_ranks(2)
def test_users_own_specs():
    class Own(Halves, ShardingSpec):
        pass

    spec = Own()
    t = st.ones(spec, 7, 5)
    assert t.sharding_spec() is spec and t.to(torch.float64).sharding_spec() == chunks(0, [1, 0])
    assert lay(whole(), chunks(1)).reshard(spec).sharding_spec() is spec
    holds(lay(whole(), chunks(1)).reshard(spec), whole())
    holds(st._shard_tensor(whole() + dist.get_rank(), spec, src_rank=1), whole() + 1)


@on_ranks(2)
def test_specs_of_users_that_only_shard():
    """torch asks such a spec's `shard` alone."""
    from shardtensor import sharding_spec

    class Bare(sharding_spec.ShardingSpec):
        def build_metadata(self, tensor_sizes, tensor_properties):
            raise NotImplementedError("no metadata")

        def shard(self, tensor, src_rank=0, process_group=None):
            return chunks(1).shard(tensor, src_rank, process_group)

    class Elsewhere(Bare):  # its placements fit no group here
        def build_metadata(self, tensor_sizes, tensor_properties):
            return sharding_spec.ChunkShardingSpec(0, ["rank:7/cpu"]).build_metadata(tensor_sizes, tensor_properties)

        def shard(self, tensor, src_rank=0, process_group=None):
            raise NotImplementedError("Elsewhere.shard not implemented")

    holds(st._shard_tensor(whole() + dist.get_rank(), Bare(), src_rank=1), whole() + 1)
    raises_everywhere(lambda: st._shard_tensor(whole(), Elsewhere()), NotImplementedError, "Elsewhere.shard not implemented")
    raises_everywhere(
        lambda: st._shard_tensor(whole(), Bare() if dist.get_rank() else Elsewhere()), ValueError, "sharding_spec=.* does not match"
    )


# ---- copies, comparison, files ----


@on_ranks(2, 3)
def test_copies_and_comparison():
    t = lay(whole(), spec_of("windmill")).requires_grad_()
    for made, same_memory in [(t.clone(), False), (copy.deepcopy(t), False), (t.detach(), True)]:
        assert made.metadata().shards_metadata == t.metadata().shards_metadata and made._process_group is t._process_group
        for a, b in zip(made.local_shards(), t.local_shards(), strict=True):
            assert (a.tensor.data_ptr() == b.tensor.data_ptr()) == (same_memory or not b.tensor.numel())
        holds(made, whole())
    assert not t.detach().requires_grad and not t.detach().metadata().tensor_properties.requires_grad and t.requires_grad
    assert copy.deepcopy(t).requires_grad and all(s.tensor.is_leaf and s.tensor.requires_grad for s in copy.deepcopy(t).local_shards())
    assert not t.detach().requires_grad_().requires_grad_(False).requires_grad
    parameter = nn.Parameter(t.detach())
    assert isinstance(parameter, nn.Parameter) and isinstance(copy.deepcopy(parameter), nn.Parameter)
    twice = copy.deepcopy([t, t])
    assert twice[0] is twice[1] and hash(t) == id(t)
    with pytest.raises(RuntimeError, match=r"Only support torch.preserve_format"):
        t.clone(memory_format=torch.contiguous_format)

    a, b = lay(whole(), chunks()), lay(whole(), chunks())
    assert torch.equal(a, b) and torch.allclose(a, b + 1e-9, rtol=0, atol=1e-6)
    if dist.get_rank() == 0:
        b.local_shards()[0].tensor[0, 0] += 1
    assert not torch.equal(a, b) and not torch.allclose(a, b)  # on all ranks
    assert not torch.equal(a, lay(whole(), chunks(1))) and not torch.equal(a, a.double())
    with pytest.raises(TypeError, match=r"Both arguments to torch\.equal need to be of type ShardedTensor"):
        torch.equal(a, whole())
    assert torch.equal(b.copy_(a), a)
    with pytest.raises(RuntimeError, match="inplace copy can only happen between two ShardedTensor with same metadata!"):
        b.copy_(lay(whole(), chunks(1)))
    assert repr(a) == f"{a}" == f"ShardedTensor({a.metadata()})"


@on_ranks(2, 3)
def test_files():
    group = dist.new_group(list(range(dist.get_world_size())))
    t = lay(whole(), spec_of("windmill"), process_group=group).requires_grad_()
    t.note = "mine"
    for weights_only in (False, True):
        file = io.BytesIO()
        torch.save({"t": t, "p": nn.Parameter(lay(whole(), chunks()))}, file)
        file.seek(0)
        with st.load_with_process_group(group):
            back = torch.load(file, weights_only=weights_only)
        assert back["t"]._process_group is group and back["t"].note == "mine" and back["t"].sharding_spec() == t.sharding_spec()
        assert torch.equal(back["t"], t) and back["t"].requires_grad and isinstance(back["p"], nn.Parameter)
        holds(back["t"], whole())
    plain = pickle.loads(pickle.dumps(lay(whole(), chunks())))
    assert plain._process_group is dist.group.WORLD and torch.equal(plain, lay(whole(), chunks()))
    with st.load_with_process_group(group), pytest.raises(RuntimeError, match="ProcessGroup already set by previous"), st.load_with_process_group(group):
        pass


@on_ranks(3)
def test_files_of_other_groups_are_refused():
    me = dist.get_rank()
    pair, turned = dist.new_group([0, 1]), dist.new_group([1, 2])
    whole_world = pickle.dumps(lay(whole(), chunks()))
    if me < 2:
        with st.load_with_process_group(pair), pytest.raises(RuntimeError, match="Local world size at save time was 3, but at load time was 2"):
            pickle.loads(whole_world)
    if me == 1:
        data = pickle.dumps(st.zeros(chunks(0, [0, 1]), 2, 2, process_group=pair))
        with st.load_with_process_group(turned), pytest.raises(RuntimeError, match="Local rank at save time was 1, but at load time was 0"):
            pickle.loads(data)
    others = [None] * 3
    dist.all_gather_object(others, whole_world)
    with pytest.raises(RuntimeError, match=f"(Local|Global) rank at save time was {(me + 1) % 3}, but at load time was {me}"):
        pickle.loads(others[(me + 1) % 3])


def test_files_need_a_process_group(pools, tmp_path):
    pools(2).run(write_pickle, str(tmp_path))
    with pytest.raises(RuntimeError, match='Need to initialize default process group using "init_process_group" before loading ShardedTensor'):
        pickle.loads((tmp_path / "0").read_bytes())


def write_pickle(folder):
    Path(folder, str(dist.get_rank())).write_bytes(pickle.dumps(lay(whole(), chunks())))


# ---- random values ----

# Every one of torch.nn.init's, and torch.Tensor's, that draws; `g` is a generator or None.
DRAWS = {
    "rand": lambda st, spec, g: st.rand(spec, *SIZES, generator=g),
    "randn": lambda st, spec, g: st.randn(spec, SIZES, dtype=torch.float64, generator=g),
    "uniform_": lambda st, spec, g: nn.init.uniform_(st.empty(spec, *SIZES), -1, 3, generator=g),
    "normal_": lambda st, spec, g: nn.init.normal_(st.empty(spec, *SIZES), mean=2, std=0.5, generator=g),
    "kaiming_uniform_": lambda st, spec, g: nn.init.kaiming_uniform_(st.empty(spec, *SIZES), a=1, mode="fan_out", generator=g),
    "kaiming_normal_": lambda st, spec, g: nn.init.kaiming_normal_(st.empty(spec, *SIZES), generator=g),
    "xavier_uniform_": lambda st, spec, g: nn.init.xavier_uniform_(st.empty(spec, *SIZES), generator=g),
    "trunc_normal_": lambda st, spec, g: nn.init.trunc_normal_(st.empty(spec, *SIZES), generator=g),
    "bernoulli_": lambda st, spec, g: st.empty(spec, *SIZES).bernoulli_(0.3, generator=g),
}


def drawn(name, spec, own):
    """Two draws in a row, and what torch draws after them."""
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(8) if own else torch.default_generator
    values = [together(DRAWS[name](st, spec, generator)) for _ in range(2)]
    return torch.stack(values), torch.rand(1)


def draw_all(cuts):
    specs = [chunks(0), chunks(1), *map(spec_of, cuts)]
    first = {(name, own): drawn(name, specs[0], own) for name in DRAWS for own in (False, True)}
    for spec in specs:
        for (name, own), (values, behind) in first.items():
            mine, mine_behind = drawn(name, spec, own)
            assert torch.equal(mine, values) and torch.equal(mine_behind, behind), (name, own, spec)
    assert all(torch.equal(behind, first["rand", True][1]) for (_, own), (_, behind) in first.items() if own)
    return {name: values.tolist() for (name, own), (values, _) in first.items() if not own}


def test_a_shared_generator_draws_the_same_values_whatever_the_sharding(pools):
    told = [told for world in (2, 4) for told in pools(world).run(draw_all, ["windmill", cuts_for(world)[-1]])]
    assert all(one == told[0] for one in told)
    values = {name: torch.tensor(v) for name, v in told[0].items()}
    assert not values["rand"][0].equal(values["rand"][1])
    bound = math.sqrt(3) / math.sqrt(7)  # gain 1, fan_out 7: of the whole, not of a shard
    assert 0.9 * bound < values["kaiming_uniform_"].abs().max() <= bound
    assert values["uniform_"].min() < 0 and values["uniform_"].max() > 2 and abs(values["normal_"].mean() - 2) < 0.4
    assert set(values["bernoulli_"].flatten().tolist()) == {0.0, 1.0}


@on_ranks(2)
def test_the_default_generator_draws_the_values_of_shardtensor():
    import shardtensor as shards

    for name in ("rand", "randn"):
        torch.manual_seed(3)
        mine = together(getattr(st, name)(spec_of("windmill"), 7, 5, generator=torch.default_generator))
        torch.manual_seed(3)
        placed = getattr(shards, name)(7, 5, device_mesh=shards.init_device_mesh("cpu", (2,)), placements=[shards.Shard(0)])
        assert torch.equal(mine, placed.full_tensor())


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, 3)
def test_random_values_are_torchs_on_each_rank():
    import torch.distributed._shard.sharded_tensor as stock

    makes = {
        "rand": lambda lib, spec: lib.rand(spec, *SIZES),
        "randn": lambda lib, spec: lib.randn(spec, SIZES, dtype=torch.float64),
        "rand_like": lambda lib, spec: torch.rand_like(lib.empty(spec, *SIZES)),
        "uniform_": lambda lib, spec: nn.init.uniform_(tensor=lib.empty(spec, *SIZES), a=-1, b=3),
        "normal_": lambda lib, spec: nn.init.normal_(tensor=lib.empty(spec, *SIZES), mean=2, std=0.5),
        "kaiming_uniform_": lambda lib, spec: nn.init.kaiming_uniform_(tensor=lib.empty(spec, *SIZES), a=1),  # fan_in is whole in rows
    }
    for name, make in makes.items():
        for spec in (chunks(0), *([chunks(1)] if name != "kaiming_uniform_" else [])):
            drawn = []
            for library in (st, stock):
                torch.manual_seed(dist.get_rank())
                made = make(library, spec)
                drawn.append(([s.tensor for s in made.local_shards()], torch.rand(1)))
            torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=0)


@on_ranks(2)
def test_ranks_that_seed_differently_are_told_and_brought_together():
    def draw(cut):
        return st.rand(spec_of(cut), 7, 5, process_group=group, generator=torch.default_generator)

    group = dist.new_group([0, 1])
    torch.manual_seed(dist.get_rank())
    if dist.get_rank() == 1:
        with pytest.warns(UserWarning, match="on rank 1 the default random generator has another state than on rank 0"):
            t = draw("rows")
    else:
        t = draw("rows")
    value = together(t)
    torch.manual_seed(0)
    assert torch.equal(value, together(draw("columns")))


@on_ranks(2)
def test_initialisers_refuse():
    t = st.empty(chunks(), 7, 5)
    for call, match in [
        (lambda: nn.init.uniform_(t, None, 1), "param: a shouldn't be None!"),
        (lambda: nn.init.normal_(t, 0, None), "param: std shouldn't be None!"),
        (lambda: nn.init.constant_(t, None), "param: val shouldn't be None!"),
        (lambda: nn.init.kaiming_uniform_(t, mode=None), "param: mode shouldn't be None!"),
        (lambda: nn.init.kaiming_uniform_(st.empty(chunks(), 7)), "fewer than 2 dimensions"),
    ]:
        with pytest.raises(ValueError, match=match):
            call()


# ---- ops ----

ELEMENTWISE = {
    "relu": (torch.relu, nn.functional.relu),
    "gelu": (nn.functional.gelu,),
    "more": (torch.sigmoid, torch.tanh, torch.neg, torch.exp, nn.functional.silu, lambda t: t.clamp(2, 9), lambda t: t.float()),
    "numbers": (lambda t: t + 1, lambda t: 2 * t, lambda t: t / 3, lambda t: 1 - t, lambda t: t**2, lambda t: t > 4, lambda t: t + torch.tensor(2.0)),
    "two": (lambda t: t + t, lambda t: torch.where(t > 3, t, -t), lambda t: torch.addcmul(t, t, t, value=2), lambda t: t * t.detach()),
    "in place": (lambda t: t.clone().add_(1), lambda t: t.clone().mul_(t), lambda t: t.clone().zero_(), lambda t: t.clone().fill_(3)),
}


@on_ranks(2, 3)
def test_elementwise_ops():
    for name in ("rows, ranks turned", "windmill", "one rank has all"):
        t, value = lay(whole(torch.float64), spec_of(name)), whole(torch.float64)
        for functions in ELEMENTWISE.values():
            for function in functions:
                _C.reset_comm_counts()
                out, expected = function(t), function(value)
                assert not any(n for n, _ in _C.comm_counts().values())
                assert out.dtype == expected.dtype == out.metadata().tensor_properties.dtype and out.sharding_spec() == t.sharding_spec()
                assert torch.equal(together(out), expected)
        copied = t.clone()
        assert copied.add_(1) is copied
        holds(copied, value + 1)
        t.requires_grad_()
        (out,) = [torch.sigmoid(t) * 3]
        assert out.requires_grad and out.metadata().tensor_properties.requires_grad
        for before, after in zip(t.local_shards(), out.local_shards(), strict=True):
            after.tensor.sum().backward()
            torch.testing.assert_close(before.tensor.grad, part(3 * torch.sigmoid(value) * (1 - torch.sigmoid(value)), before.metadata))


@on_ranks(2)
def test_other_ops_are_refused_on_all_ranks():
    t = lay(whole(), spec_of("one rank has all"))
    for call, match in [
        (lambda: t.sum(), "torch function 'sum', with args: .* not supported for ShardedTensor!"),
        (lambda: torch.softmax(t, 1), "torch function 'softmax'(?s:.*)_softmax.* is not element-wise"),
        (lambda: t.t(), "not supported for ShardedTensor!"),
        (lambda: t[0], "not supported for ShardedTensor!"),
        (lambda: nn.functional.dropout(t, 0.5), "not supported for ShardedTensor!"),
        (lambda: t + whole(), "a plain tensor of more than one element has no shards"),
        (lambda: t + lay(whole(), chunks()), "not cut alike; reshard one"),
        (lambda: nn.functional.embedding_bag(torch.zeros(1, 2, dtype=torch.int64), t), "'embedding_bag', with .* not supported for ShardedTensor!"),
        (lambda: nn.functional.linear(t, torch.zeros(1, 1)), "not supported for ShardedTensor!"),
        (lambda: setattr(t, "requires_grad", True), "torch function '__set__', with args: (?s:.*)use requires_grad_"),
    ]:
        with pytest.raises(RuntimeError, match=match) as caught:
            call()
        assert str(caught.value).endswith("not supported for ShardedTensor!")  # as torch's; the reason is a note
    assert not t.requires_grad
    with pytest.raises(RuntimeError, match="A ShardedTensor object is being used from c"), torch._C.DisableTorchFunctionSubclass():
        torch.neg(t)


@on_ranks(2)
def test_users_own_ops():
    from shardtensor import sharding_spec

    t, enumerated = lay(whole(), chunks()), lay(whole(), spec_of("windmill"))

    @st.custom_sharded_op_impl(torch.asin)
    def asin(types, args, kwargs, process_group):
        assert st.ShardedTensor in types
        return "mine", len(args[0].local_shards()), kwargs, process_group is dist.group.WORLD

    @sharding_spec.custom_sharding_spec_op(sharding_spec.ChunkShardingSpec, torch.acos)
    def acos(types, args, kwargs, process_group):
        return "chunked"

    try:
        assert torch.asin(t) == ("mine", 1, {}, True)
        assert sharding_spec._has_custom_op(t.sharding_spec(), torch.acos) and not sharding_spec._has_custom_op(t.sharding_spec(), torch.cos)
        assert sharding_spec._dispatch_custom_op(t.sharding_spec(), torch.acos, (), (t,), {}, None) == "chunked"
        with pytest.raises(RuntimeError, match=r"Custom op: .* not registered for EnumerableShardingSpec"):
            sharding_spec._dispatch_custom_op(enumerated.sharding_spec(), torch.acos, (), (t,), {}, None)
        assert torch.acos(t) == "chunked" and torch.acos(enumerated).sharding_spec() == enumerated.sharding_spec()
        with pytest.raises(TypeError, match="Custom sharded op function expects signature"):
            st.custom_sharded_op_impl(torch.asin)(lambda types, args: None)
        other = st.zeros(chunks(), 7, 5, process_group=dist.new_group([0, 1]))
        with pytest.raises(RuntimeError, match="All distributed tensors should use the same ProcessGroup"):
            torch.Tensor.type_as(t, other)
    finally:
        del _ops._CUSTOM_SHARDED_OPS[torch.asin], _ops._SPEC_OPS[sharding_spec.ChunkShardingSpec, torch.acos]
    assert isinstance(torch.acos(t), st.ShardedTensor)


@on_ranks(2)
def test_likes_take_dtype_and_group():
    group = dist.new_group([0, 1])
    t = lay(whole(torch.float64), spec_of("windmill"), process_group=group)
    for made, value in [
        (torch.zeros_like(t), torch.zeros(SIZES).double()),
        (torch.ones_like(t, dtype=torch.int64), torch.ones(SIZES, dtype=torch.int64)),
        (torch.full_like(t, 4.5, requires_grad=True), torch.full(SIZES, 4.5).double()),
    ]:
        assert made.dtype == value.dtype and made._process_group is group and made.sharding_spec() == t.sharding_spec()
        holds(made, value)
    assert torch.empty_like(t).metadata() == t.metadata() and torch.randn_like(t).dtype == torch.float64


@on_ranks(2, 3)
def test_embedding_of_each_ranks_own_indices():
    world, me = dist.get_world_size(), dist.get_rank()
    all_ids = [torch.tensor([[r, 2, 6], [3, 4 - r, 5], [0, 0, r]])[: r + 1] for r in range(world)]
    plain = nn.Embedding(7, 5, padding_idx=2, _weight=whole(torch.float64))
    scale = torch.arange(5.0, dtype=torch.float64)
    for ids in all_ids:
        (plain(ids) * scale).sum().backward()
    uneven = spec_of("nothing in the middle") if world == 3 else spec_of("one rank has all")
    for spec in (chunks(0), chunks(1), chunks(-1), uneven):
        module = nn.Embedding(7, 5, padding_idx=2, _weight=whole(torch.float64))
        st.shard_parameter(module, "weight", spec)
        out = module(all_ids[me])
        assert torch.equal(out, plain(all_ids[me]))
        (out * scale).sum().backward()
        for shard in module.weight.local_shards():
            if shard.tensor.numel():
                torch.testing.assert_close(shard.tensor.grad, part(plain.weight.grad, shard.metadata))
        with pytest.raises(NotImplementedError, match="argument 'max_norm' would write to rows that other ranks hold"):
            nn.functional.embedding(all_ids[me], module.weight, max_norm=1.0)
    with pytest.raises(NotImplementedError, match="does not cut one dim in order of rank; reshard it first"):
        nn.functional.embedding(all_ids[me], lay(whole(), spec_of("windmill")))


# ---- parameters and modules ----


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(5, 7)
        self.ten = nn.Sequential(nn.Linear(7, 3))
        self.cut = Cut()


class Cut(nn.Module):
    """Gives a ShardedTensor."""

    def forward(self, spec):
        return lay(whole(), spec)


@on_ranks(2, 3)
def test_shard_parameter_and_tensor():
    world, me = dist.get_world_size(), dist.get_rank()
    for spec in [chunks(0), chunks(1), *map(spec_of, cuts_for(world))]:
        module = nn.Linear(5, 7)
        module.weight.data.copy_(whole() + me)
        st.shard_parameter(module, "weight", spec, src_rank=1)
        assert isinstance(module.weight, nn.Parameter) and isinstance(module.weight, st.ShardedTensor) and module.weight.requires_grad
        assert module.weight.sharding_spec() == spec and dict(module.named_parameters())["weight"] is module.weight
        assert all(s.tensor.is_leaf and s.tensor.requires_grad for s in module.weight.local_shards())
        holds(module.weight, whole() + 1)
        for direct in (spec.shard(whole() * (me + 1)), st._shard_tensor(whole() * (me + 1), spec)):
            holds(direct, whole())
        module.double()
        assert module.weight.dtype == torch.float64 and isinstance(module.weight, nn.Parameter)
        holds(module.weight, whole(torch.float64) + 1)
    module = nn.Linear(5, 7, bias=False).requires_grad_(False)
    st.shard_parameter(module, "weight", chunks())
    assert not module.weight.requires_grad and not module.weight.local_tensor().requires_grad


@on_ranks(2)
def test_shard_parameter_refuses_on_all_ranks():
    me, module = dist.get_rank(), nn.Linear(5, 7)
    odd = nn.Linear(5, 7, bias=me == 1)
    turned = nn.Linear(5, 7)
    if me == 0:
        turned.weight = nn.Parameter(torch.zeros(5, 7).t())
    small = nn.Linear(5, 7 - me)
    for call, kind, match in [
        (lambda: st.shard_parameter(module, "wait", chunks()), AttributeError, "Linear has no attribute `wait`"),
        (lambda: st.shard_parameter(odd, "bias", chunks()), ValueError, "Expected Linear.bias to be a Tensor, but found NoneType"),
        (lambda: st.shard_parameter(turned, "weight", chunks()), ValueError, "param: weight is not a contiguous Tensor"),
        (lambda: st._shard_tensor(turned.weight, chunks()), ValueError, "input tensor is not a contiguous Tensor"),
        (lambda: st.shard_parameter(small, "weight", chunks()), ValueError, "size=.* on rank: . does not match with size="),
        (lambda: st.shard_parameter(module, "weight", chunks(), src_rank=me), ValueError, "src_rank=. on rank: . does not match with src_rank=. on rank: ."),
        (lambda: st.shard_parameter(module, "weight", chunks(me)), ValueError, "sharding_spec=.* does not match with sharding_spec="),
        (lambda: st.shard_parameter(module, "weight", chunks(), src_rank=2), ValueError, "src_rank=2 is not a rank of a group of 2 ranks"),
        (lambda: st.shard_parameter(module, "weight", chunks(0, [0, 5])), ValueError, "Global rank 5 does not exist"),
        (lambda: st.shard_parameter(module, "weight", chunks(3)), ValueError, "Invalid sharding dim: 3"),
    ]:
        raises_everywhere(call, kind, match)
    assert type(module.weight) is nn.Parameter


@on_ranks(2)
def test_shard_module():
    from shardtensor.sharding_plan import Sharder, ShardingPlan, ShardingPlanner

    class Halve(Sharder):
        def shard(self, module):
            return nn.Sequential(module, nn.Identity())

    class Planner(ShardingPlanner):
        def build_plan(self, module):
            plan = {"one.weight": chunks(0), "one.bias": spec_of_sizes(7), "ten.0": Halve()}
            return ShardingPlan(plan, output_plan={"cut": chunks(1)}, return_local_tensor=["cut"])

    def spec_of_sizes(n):
        return chunks(0, [1, 0])

    net = Net()
    st.shard_module(net, Planner().build_plan(net), src_rank=0)
    assert isinstance(net.one.weight, st.ShardedTensor) and isinstance(net.one.bias, st.ShardedTensor)
    assert isinstance(net.ten[0], nn.Sequential) and not hasattr(net.ten, "mod_name")
    assert torch.equal(net.cut(chunks(0)), whole()[:, :3] if dist.get_rank() == 0 else whole()[:, 3:])

    squeezed = Net()
    st.shard_module(squeezed, ShardingPlan({}, return_local_tensor=["cut"]))
    assert squeezed.cut(spec_of("rows of 3") if dist.get_world_size() > 2 else chunks(0)).dim() == 2
    assert squeezed.cut(chunks(0, [0, 1])).shape == ((4, 5), (3, 5))[dist.get_rank()]
    st._collect_local_shard(hooked := nn.Identity())
    assert hooked(lay(whole(sizes=(2, 5)), chunks(0))).shape == (5,) and torch.equal(hooked(whole()), whole())
    st._reshard_output(hooked := nn.Identity(), chunks(1))
    assert hooked(lay(whole(), chunks(0))).sharding_spec() == chunks(1)

    for plan, kind, match in [
        (ShardingPlan({"one.weight": "rows"}), TypeError, "Only `ShardingSpec` and `Sharder` are supported to shard 'one.weight'"),
        (ShardingPlan({"": Halve()}), KeyError, "Module path must not be empty for custom sharder!"),
        (ShardingPlan({"ten.0.weight": chunks(0), "ten": Halve()}), RuntimeError, "ShardingPlan is in-valid, trying to shard a parameter: ten.0.weight"),
        (ShardingPlan({}, output_plan={"one": 3}), TypeError, "Only `ShardingSpec` is supported as output_plan for 'one'"),
        (ShardingPlan({"two.weight": chunks(0)}), AttributeError, "two"),
    ]:
        raises_everywhere(lambda plan=plan: st.shard_module(Net(), plan), kind, match)


class Table(nn.Module):
    """ShardedTensors that are attributes."""

    def __init__(self, fill=None):
        super().__init__()
        self.rows = lay(whole(), chunks(0)) if fill is None else fill
        self.inner = nn.Module()
        self.inner.columns = lay(whole() + 1, spec_of("windmill")) if fill is None else fill
        self.plain = nn.Linear(2, 2)


@on_ranks(2)
def test_state_dict_hooks():
    module, other = Table(), Table(st.zeros(chunks(0), 7, 5))
    for m in (module, other):
        m._register_state_dict_hook(st.state_dict_hook)
        m.register_load_state_dict_pre_hook(st.pre_load_state_dict_hook)
    state = module.state_dict()
    assert {"rows", "inner.columns", "plain.weight"} <= set(state) and state["rows"] is module.rows
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other.load_state_dict(torch.load(file), strict=False)
    assert torch.equal(other.rows, module.rows) and torch.equal(other.inner.columns, module.inner.columns)
    holds(other.inner.columns, whole() + 1)
    outer = nn.Sequential(module)
    assert "0.inner.columns" in outer.state_dict()


# ---- distributed checkpoints ----


def state_of(kind, name, value=None):
    """A state dict of ours, torch's or a ShardTensor's; without a value, one to load into."""
    from shardtensor import sharded_tensor as ours
    from torch.distributed._shard import sharded_tensor as stock
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

    given = value if value is not None else torch.full(SIZES, -1.0, dtype=torch.float64)
    spec = chunks(0) if name is None else spec_of(name)
    if kind == "placed":
        return {"x": shardtensor.distribute_tensor(given, shardtensor.init_device_mesh("cpu", (dist.get_world_size(),)), [shardtensor.Shard(1)])}
    if kind == "stock":
        t = stock.empty(EnumerableShardingSpec(spec.shards) if name else spec, *SIZES, dtype=given.dtype)
        for shard in t.local_shards():
            shard.tensor.copy_(part(given, shard.metadata))
        return {"x": t}
    nothing = ours.zeros(spec_of_nothing(), 0, 5) if name else ours.zeros(spec, 0, 5)
    return {"x": lay(given, spec), "nested": {"y": lay(given.long(), chunks(1)), "none": nothing}, "n": 3}


def spec_of_nothing():
    from shardtensor.sharding_spec import EnumerableShardingSpec, ShardMetadata

    return EnumerableShardingSpec([ShardMetadata([0, 0], [0, 5], f"rank:{r}/cpu") for r in (0, 0, 1)])


def save(path, kind, name):
    dcp.save(state_of(kind, name, whole(torch.float64)), checkpoint_id=path)
    written = dcp.FileSystemReader(path).read_metadata()
    chunks_ = written.state_dict_metadata["x"].chunks
    assert sum(math.prod(c.sizes) for c in chunks_) == 35 and all(math.prod(c.sizes) for c in chunks_)


def load(path, kind, name):
    state = {k: v for k, v in state_of(kind, name).items() if k == "x" or kind == "ours"}
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    if "nested.y" not in saved:
        state = {"x": state["x"]}
    t = state["x"]
    dcp.load(state, checkpoint_id=path)
    assert state["x"] is t
    if kind == "placed":
        assert torch.equal(t.full_tensor(), whole(torch.float64))
        return
    holds(t, whole(torch.float64))
    if "nested" in state:
        holds(state["nested"]["y"], whole(torch.int64))
        assert state["n"] == 3


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ((4, "ours", "grid"), (3, "ours", "grid of 3")),
        ((3, "ours", "nothing in the middle"), (4, "ours", "grid")),
        ((4, "ours", None), (3, "ours", "windmill")),
        ((3, "ours", "rows of 3"), (2, "ours", "windmill")),
        ((2, "ours", "windmill"), (4, "ours", None)),
        ((4, "ours", "grid"), (3, "stock", "rows of 3")),
        ((3, "ours", "windmill"), (2, "stock", None)),
        ((4, "stock", "grid"), (3, "ours", "nothing in the middle")),
        ((2, "stock", None), (3, "ours", "windmill")),
        ((4, "ours", "grid"), (3, "placed", None)),
        ((3, "placed", None), (4, "ours", "grid")),
    ],
)
def test_save_on_some_ranks_load_on_others(pools, tmp_path, writer, reader):
    path = str(tmp_path / "checkpoint")
    pools(writer[0]).run(save, path, *writer[1:])
    pools(reader[0]).run(load, path, *reader[1:])


def save_and_load_module(path, background):
    def net(fill, spec):
        module = nn.Linear(5, 7)
        nn.init.constant_(module.weight, fill)
        st.shard_parameter(module, "weight", spec)
        return module

    state = get_model_state_dict(net(4.0, spec_of("windmill")))
    if background:
        dcp.async_save(state, checkpoint_id=path).result()
    else:
        dcp.save(state, checkpoint_id=path)
    module = net(1.0, chunks(1))
    state = get_model_state_dict(module)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(module, state)
    assert isinstance(module.weight, nn.Parameter) and torch.equal(together(module.weight.detach()), torch.full(SIZES, 4.0))


@pytest.mark.parametrize("background", [False, True])
def test_a_modules_checkpoint(pools, tmp_path, background):
    pools(2).run(save_and_load_module, str(tmp_path / "checkpoint"), background)


@on_ranks(2)
def test_a_shard_that_is_not_here_is_named():
    t = lay(whole(), spec_of("one rank has all"))
    with pytest.raises(ValueError, match=r"Could not find shard at 'torch.Size\(\[1, 0\]\)' for FQN: 'x' on rank"):
        t.__get_tensor_shard__(MetadataIndex("x", torch.Size([1, 0])))
    with pytest.raises(ValueError, match="Cannot lookup x since its a ShardedTensor and no offset was provided"):
        t.__get_tensor_shard__(MetadataIndex("x"))
    assert len(t.__create_chunk_list__()) == dist.get_rank()


# ---- beside torch's own ----


@on_ranks(2, 3)
def test_as_torchs_own():
    """Where torch's works on CPU: the same shards, metadata, values and errors."""
    from shardtensor import sharded_tensor as ours
    from torch.distributed._shard import sharded_tensor as stock
    from torch.distributed._shard import sharding_spec as stock_specs

    world = dist.get_world_size()
    both = [(ours, our_specs), (stock, stock_specs)]

    def same(do):
        """Both must give the same: a value, or the error's kind and text."""
        told = []
        for module, specs in both:
            try:
                told.append(do(module, specs))
            except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
                told.append((type(error), str(error)))
        assert told[0] == told[1], told
        return told[0]

    def chunked(specs, dim=0, order=1):
        return specs.ChunkShardingSpec(dim, [f"rank:{r}/cpu" for r in range(world)][::order])

    def seen(t):
        shards = [(s.metadata, s.tensor.tolist(), s.tensor.requires_grad) for s in t.local_shards()]
        return t.metadata(), shards, t.size(), t.dtype, t.requires_grad, t.device, t.is_pinned()

    for dim, order in [(0, 1), (1, 1), (-1, 1), (0, -1)]:
        for dtype, grad in [(None, False), (torch.float64, True), (torch.int64, False)]:
            same(lambda m, s, d=dim, o=order, t=dtype, g=grad: seen(m.full(chunked(s, d, o), SIZES, 3, dtype=t, requires_grad=g)))
    same(lambda m, s: seen(m.ones(s.EnumerableShardingSpec(shard_list("windmill")[:-1] + shard_list("windmill")[-1:]), 7, 5)))
    for do in [
        lambda m, s: m.ones(chunked(s, 2), 7, 5),
        lambda m, s: m.ones("spec", 7, 5),
        lambda m, s: m.ones(chunked(s), 7, 0.5),
        lambda m, s: s.EnumerableShardingSpec([]),
        lambda m, s: s.EnumerableShardingSpec(shard_list("rows") + shard_list("grid")[1:2]),
        lambda m, s: s.ChunkShardingSpec("x", ["rank:0"]),
        lambda m, s: m.ones(chunked(s), 7, 5).remote_shards(),
        lambda m, s: m.ones(s.ChunkShardingSpec(0, ["rank:0/cpu", "rank:8/cpu"]), 7, 5),
    ]:
        assert isinstance(same(do)[0], type)

    def value(m, s):
        return m.init_from_local_shards(shards_of(chunked(s), whole()), *SIZES)

    for do in [
        lambda t: t.clone(), lambda t: t.detach(), copy.deepcopy, lambda t: t.to(torch.float64), lambda t: t.cpu(), lambda t: t.requires_grad_(),
        lambda t: t.type_as(torch.zeros(1).double()), lambda t: torch.zeros_like(t), lambda t: torch.full_like(t, 2),
    ]:  # fmt: skip
        same(lambda m, s, do=do: seen(do(value(m, s))))

    def gathered(m, s):
        out = torch.zeros(SIZES) if dist.get_rank() == 1 else None
        value(m, s).gather(1, out)
        return None if out is None else out.tolist()

    def resharded(m, s):
        even = whole(sizes=(2 * world, 2 * world))  # torch's reshard of uneven pieces does not work with Gloo
        t = m.init_from_local_shards(shards_of(chunked(s), even), *even.shape)
        return seen(t.reshard(chunked(s, 1)))

    same(gathered)
    same(resharded)
    same(lambda m, s: value(m, s).sharding_spec())
    same(lambda m, s: repr(value(m, s)))
    # Each takes the other's specs.
    assert seen(ours.ones(chunked(stock_specs), 7, 5)) == seen(stock.ones(chunked(our_specs), 7, 5))


# ---- RPC ----

RPC_RANK = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed import rpc
sys.path[:0] = {tests!r}
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{{folder}}/group", rank=rank, world_size=world)
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{{folder}}/rpc", rpc_timeout=30, _transports=["uv"], _channels=["basic"])
rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size=world, rpc_backend_options=options)
import test_sharded_tensor
test_sharded_tensor.remote_shards()
rpc.shutdown()
dist.destroy_process_group()
print("done")
"""


def remote_shards():
    me, world = dist.get_rank(), dist.get_world_size()
    for spec in (spec_of("windmill"), spec_of("nothing in the middle")):
        t = lay(whole(), spec, init_rrefs=True)
        assert api._sharded_tensor_map[t._sharded_tensor_id]() is t
        remote = t.remote_shards()
        held = {s.placement.rank() for s in t.metadata().shards_metadata}
        assert set(remote) == held - {me}
        for rank, rrefs in remote.items():
            shards = [rref.to_here() for rref in rrefs]
            assert all(rref.owner().id == rank for rref in rrefs)
            assert [s.metadata for s in shards] == [s for s in t.metadata().shards_metadata if s.placement.rank() == rank]
            assert all(torch.equal(s.tensor, part(whole(), s.metadata)) for s in shards)
        again = pickle.loads(pickle.dumps(st.ones(spec, 7, 5, init_rrefs=True)))
        assert set(again.remote_shards()) == held - {me}
        dist.barrier()
        del t, again, remote
        gc.collect()
        assert not api._sharded_tensor_map
    named = st.zeros(ChunkShardingSpec(0, [f"worker{r}/cpu" for r in range(world)]), 7, 5)
    assert [s.tensor.shape for s in named.local_shards()] == [(min(3, 7 - 3 * me), 5)]
    out = torch.ones(SIZES) if me == 0 else None
    named.gather(0, out)
    assert out is None or not out.any()
    with pytest.raises(ValueError, match="Invalid worker name: nobody"):
        st.zeros(ChunkShardingSpec(0, ["nobody/cpu"]), 7, 5)
    with pytest.raises(RuntimeError, match="Could not find sharded_tensor_id: 99"):
        _remote._receive(99, [], 0)
    group = dist.new_group(list(range(1, world)))
    part_of = st.zeros(chunks(0, range(1, world)), 7, 5, process_group=group, init_rrefs=True)
    assert set(part_of.remote_shards()) == set(range(1, world)) - {me}


def test_remote_shards_over_rpc(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(RPC_RANK.format(tests=[str(ROOT / "tests"), os.path.dirname(__file__)]))

    path = [str(Path(shardtensor.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), "3", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for rank in range(3)
    ]
    try:
        told = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 and "done" in text for rank, text in zip(ranks, told, strict=True)), "\n".join(told)


# ---- ShardTensors ----


def memory(*tensors):
    return {t.data_ptr() for t in tensors if t.numel()}


@on_ranks(2, 3)
def test_from_sharded_tensor():
    from shardtensor import _C, Replicate, Shard, ShardTensor
    from torch.distributed._shard import sharded_tensor as stock

    world = dist.get_world_size()
    in_a_row = {"rows", "columns", "one rank has all", *(["rows of 3", "nothing in the middle"] if world == 3 else [])}
    for name in [None, *cuts_for(world)]:
        t = lay(whole(torch.float64), chunks(1) if name is None else spec_of(name)).requires_grad_()
        _C.reset_comm_counts()
        placed = ShardTensor.from_sharded_tensor(t)
        assert placed.requires_grad and placed.is_leaf and placed.dtype == torch.float64 and placed.shape == SIZES
        silent = not any(n for n, _ in _C.comm_counts().values())
        shared = memory(placed.to_local()) == memory(*[s.tensor for s in t.local_shards()])
        assert (silent and shared) == (name is None or name in in_a_row), name
        assert torch.equal(placed.full_tensor(), whole(torch.float64))
    mesh, spec = shardtensor.init_device_mesh("cpu", (world,)), spec_of("windmill")
    for options in [
        dict(placements=[Shard(1)]),
        dict(placements=[Replicate()]),
        dict(placements=[Shard(0)], sharding_shapes={0: [(7, 5), *[(0, 5)] * (world - 1)]}),
        dict(placements=[_StridedShard(0, split_factor=2)]),
        dict(),
    ]:
        placed = ShardTensor.from_sharded_tensor(lay(whole(), spec), mesh, **options)
        assert list(placed.placements) == options.get("placements", [Shard(0)])
        assert torch.equal(placed.full_tensor(), whole())
    turned = DeviceMesh("cpu", list(range(world))[::-1])
    t = lay(whole(), chunks(0, list(range(world))[::-1]))
    assert memory(ShardTensor.from_sharded_tensor(t, turned).to_local()) == memory(t.local_tensor())
    theirs = stock.full(chunks(0), SIZES, 3)
    assert memory(ShardTensor.from_sharded_tensor(theirs).to_local()) == memory(*[s.tensor for s in theirs.local_shards()])
    with pytest.raises(TypeError, match="argument 'sharded_tensor' is Tensor, not a ShardedTensor"):
        ShardTensor.from_sharded_tensor(whole())


@on_ranks(4)
def test_grids_to_and_from_sharded_tensors():
    from shardtensor import Replicate, Shard, ShardTensor

    mesh = shardtensor.init_device_mesh("cpu", (2, 2))
    t = lay(whole(), spec_of("grid"))
    rows = 3 if dist.get_rank() < 2 else 4
    shapes = {0: [(3, 5), (4, 5)], 1: [(rows, 2), (rows, 3)]}
    placed = ShardTensor.from_sharded_tensor(t, mesh, [Shard(0), Shard(1)], sharding_shapes=shapes)
    assert memory(placed.to_local()) == memory(t.local_tensor())
    back = placed.to_sharded_tensor()
    assert back.sharding_spec() == t.sharding_spec() and memory(back.local_tensor()) == memory(t.local_tensor())
    half = shardtensor.distribute_tensor(whole(), mesh, [Replicate(), Shard(1)]).to_sharded_tensor()
    assert [len(half.local_shards())] == [[1, 1, 0, 0][dist.get_rank()]] and torch.equal(together(half), whole())
    some = DeviceMesh("cpu", [[0, 1]])
    if dist.get_rank() < 2:
        with pytest.raises(ValueError, match=r"argument 'process_group': .* has no group of all its ranks; pass one"):
            shardtensor.zeros(7, 5, device_mesh=some, placements=[Shard(0), Shard(1)]).to_sharded_tensor()


@on_ranks(2, 3)
def test_to_sharded_tensor():
    from shardtensor import _C, Partial, Replicate, Shard

    world = dist.get_world_size()
    mesh = shardtensor.init_device_mesh("cpu", (world,))
    for placements, options in [
        ([Shard(0)], {}),
        ([Shard(1)], {}),
        ([Replicate()], {}),
        ([Shard(0)], dict(sharding_shapes={0: [(0, 5), (6, 5), (1, 5)] if world == 3 else [(0, 5), (7, 5)]})),
        ([_StridedShard(0, split_factor=2)], {}),
        ([_StridedShard(1, split_factor=2)], {}),
    ]:
        placed = shardtensor.distribute_tensor(whole(), mesh, placements, **options).requires_grad_()
        _C.reset_comm_counts()
        t = placed.to_sharded_tensor()
        assert not any(n for n, _ in _C.comm_counts().values())
        assert t.requires_grad and all(s.tensor.requires_grad and s.tensor.is_leaf for s in t.local_shards())
        assert torch.equal(together(t), whole())
        if type(placements[0]) is Shard:
            assert options or t.sharding_spec() == chunks(placements[0].dim)
            assert memory(*[s.tensor for s in t.local_shards()]) == memory(placed.to_local())
        elsewhere = placed.to_sharded_tensor(spec_of("windmill"))
        assert elsewhere.sharding_spec() == spec_of("windmill")
        holds(elsewhere, whole())
    few = shardtensor.distribute_tensor(whole(sizes=(world - 1, 5)), mesh, [Shard(0)])
    assert few.to_sharded_tensor().sharding_spec() == chunks(0) and torch.equal(together(few.to_sharded_tensor()), few.full_tensor())
    for scalar in (torch.tensor(3.0), torch.zeros(0, 5)):
        placed = shardtensor.distribute_tensor(scalar, mesh, [Replicate()])
        t = placed.to_sharded_tensor()
        assert torch.equal(together(t), scalar) and torch.equal(shardtensor.ShardTensor.from_sharded_tensor(t).full_tensor(), scalar)
    sums = shardtensor.ShardTensor.from_local(whole(), mesh, [Partial()])
    with pytest.raises(RuntimeError, match=r"to_sharded_tensor: a tensor is in summands"):
        sums.to_sharded_tensor()


# ---- the optimizer; names in torch's files ----


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_the_sharded_optimizer_steps_as_torchs():
    import torch.distributed._shard as shard
    import torch.distributed._shard.sharded_optim as stock

    weights = []
    stock_rows = shard.sharding_spec.ChunkShardingSpec(0, chunks(0).placements)
    for library, cut, zeros, rows in (
        (st, st.shard_parameter, st.zeros, chunks(0)),
        (stock, shard.shard_parameter, shard.sharded_tensor.zeros, stock_rows),
    ):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        cut(module[0], "weight", rows)
        module[1].extra = zeros(rows, 4, 2)  # a plain attribute
        named = dict(library.named_params_with_sharded_tensor(module))
        optimizer = library.ShardedOptimizer(named, torch.optim.SGD, lr=0.1, momentum=0.9)
        local = module[0].weight.local_shards()[0].tensor
        for _ in range(2):
            optimizer.zero_grad()
            (local.square().sum() + module[1].weight.sum()).backward()
            optimizer.step()
        assert {*named} == {"0.weight", "0.bias", "1.weight", "1.bias", "1.extra"}
        weights.append(([*named], len(optimizer.state), local.detach().clone(), module[1].weight.detach().clone()))
        for missing, given in ((optimizer.state_dict, []), (optimizer.load_state_dict, [{}]), (optimizer.add_param_group, [{}])):
            with pytest.raises(NotImplementedError, match=r"ShardedOptimizer .* not implemented yet!"):
                missing(*given)
    assert weights[0][:2] == weights[1][:2]
    torch.testing.assert_close(weights[0][2:], weights[1][2:])


@on_ranks(2)
def test_a_shards_tensor_is_made_from_its_properties():
    properties = TensorProperties(torch.float64, requires_grad=True)
    t = api._create_tensor_from_params([3, 2], local_device=torch.device("cpu"), tensor_properties=properties)
    assert type(t) is torch.Tensor and t.shape == (3, 2) and t.dtype == torch.float64 and t.requires_grad


def test_the_api_module_has_the_functions_of_torchs_two():
    from torch.distributed._shard import api as shards
    from torch.distributed._shard.sharded_tensor import api as tensors

    for module in (shards, tensors):
        own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
        assert own - {"_register_remote_shards"} <= set(vars(api)), module  # that one is a target of RPCs between torch's


# ---- the page ----

PAGE = ROOT / "docs" / "sharded_tensor.md"


def rows_of(heading):
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n###")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (same|more|not) \|", section, re.M))


def public(module):
    found = {n: v for n, v in vars(module).items() if not n.startswith("_") and not isinstance(v, types.ModuleType)}
    return set(found) - {"TYPE_CHECKING"}


def test_the_page_says_how_each_of_torchs_names_is_here():
    import torch.distributed._shard as shard
    from shardtensor import sharded_tensor, sharding_plan, sharding_spec

    plans = sharded_tensor.__dict__ | sharding_plan.__dict__
    optim = {"Sharder", "ShardedOptimizer", "named_params_with_sharded_tensor"}
    for heading, stock, ours in [
        ("torch.distributed._shard.sharded_tensor", public(shard.sharded_tensor), sharded_tensor.__dict__),
        ("torch.distributed._shard.sharding_spec", public(shard.sharding_spec), sharding_spec.__dict__),
        ("torch.distributed._shard, torch.distributed._shard.sharding_plan", public(shard) | public(shard.sharding_plan), plans),
        ("torch.distributed._shard.sharded_optim, torch.distributed._shard.sharder", optim, plans),
        ("ShardedTensor", public(shard.sharded_tensor.ShardedTensor) | public(shard.sharded_tensor.ShardedTensorBase), dir(sharded_tensor.ShardedTensor)),
    ]:
        rows = rows_of(heading)
        assert set(rows) == stock, heading
        for name, how in rows.items():
            assert (how == "not") == (name not in ours), name


@pytest.mark.parametrize("name", ["gather", "cpu", "cuda", "reshard", "local_tensor", "remote_shards", "_init_from_local_shards", "_init_from_local_tensor"])
def test_methods_take_what_torchs_take(name):
    from torch.distributed._shard.sharded_tensor import ShardedTensor as Stock

    def taken(method):
        return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]

    assert taken(getattr(ShardedTensor, name)) == taken(getattr(Stock, name))


@pytest.mark.parametrize("name", ["empty", "full", "ones", "rand", "randn", "zeros"])
def test_factories_take_what_torchs_take(name):
    from shardtensor import sharded_tensor as ours
    from torch.distributed._shard import sharded_tensor as stock

    named = [p.name for p in inspect.signature(getattr(stock, name)).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert named == [*ours.Options.__annotations__]


@on_ranks(2)
def test_the_pages_example_runs():
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, str(PAGE), "exec"), {})
