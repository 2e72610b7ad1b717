"""What torch refuses is refused on all ranks, whatever their pieces: the op database's wrong inputs, tensors of
mixed dtypes, and dtypes that ops do not take.

An error on one rank alone would leave the others waiting for it.
"""

from __future__ import annotations

import opinfo
import pytest
import shardtensor as st
import torch
from oracle import EMPTY, EVEN, UNEVEN, mesh_here, place
from pool import on_ranks
from shardtensor.parallel import ColwiseParallel, parallelize_module
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PARTS = 4
# We ask a kernel for its dtypes with few elements: too few for the square that these ops need.
SQUARES = ("nn.functional.pixel_shuffle", "nn.functional.pixel_unshuffle")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", ["errors", "mixed", "int64", "bool", "complex128", "float8_e4m3fn", "uint16"])
def test_on_all_ranks(pools, kind, part):
    left_out = SQUARES if kind in ("float8_e4m3fn", "uint16") else ()
    names = sorted(n for n in opinfo.database() if n not in (*opinfo.BY_VALUE, *left_out))[part::PARTS]
    refused = pools(3).run(opinfo.run_refusals, names, 2, kind, seconds=110)
    assert refused[0] > 80, refused


@on_ranks(2)
def test_what_is_asked_by_name():
    mesh, n = mesh_here(), mesh_here().size()
    x = st.distribute_tensor(torch.arange(6.0), mesh, [st.Shard(0)])
    with st.debug.comm_budget(calls=0):
        assert not x.is_pinned() and not torch.ops.aten.is_pinned(x)
        if x.device_mesh.get_rank() == 0:  # one rank may ask alone
            assert torch.ops.aten.is_pinned(x) is False
    with pytest.raises(NotImplementedError, match=r"ShardTensor\.to_mkldnn"):
        x.to_mkldnn()
    with pytest.raises(NotImplementedError, match=r"to_mkldnn: .* holds dense pieces"):
        torch.ops.aten.to_mkldnn(x)
    rows = st.distribute_tensor(torch.ones(5, 3), mesh, [st.Shard(0)])
    mask = st.distribute_tensor(torch.ones(1, 5, dtype=torch.bool), mesh, [st.Replicate()])
    for nest in (
        lambda: torch.nested.nested_tensor([rows, rows[:2]]),
        lambda: torch.nested.nested_tensor([rows, torch.ones(2, 3)]),
        lambda: torch.nested.as_nested_tensor([rows, rows]),
        lambda: torch.nested.as_nested_tensor(rows),
        lambda: torch._nested_tensor_from_mask(rows.unsqueeze(0), mask),
    ):
        with st.debug.comm_budget(calls=0), pytest.raises(NotImplementedError, match=r"_nested_.*layout=torch\.jagged, .*to_local\(\)"):
            nest()
    jagged = torch.nested.nested_tensor([rows, rows[:2]], layout=torch.jagged)
    assert [t.full_tensor().shape[0] for t in (jagged * 2).unbind()] == [5, 2]
    with pytest.raises(TypeError, match="distribute_tensor: argument 'tensor' is a list"):
        st.distribute_tensor([1.0, 2.0], mesh, [st.Shard(0)])
    model = nn.Sequential(nn.Linear(4, 4 * n), nn.Linear(4 * n, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": ColwiseParallel()})
    with pytest.raises(ValueError, match=f"has 4 features on rank .* the Linear takes {4 * n}.*RowwiseParallel"):
        model(torch.ones(2, 4))
    with pytest.raises(TypeError, match=r"parameter '0.weight' is a ShardTensor, S\(0\).*fully_shard"):
        DistributedDataParallel(model)


@on_ranks(2, 3)
def test_crops_beyond_the_end():
    """torch crops before it pads, and a piece that is cut otherwise has enough, or nothing."""
    x = torch.arange(20.0).reshape(4, 5)
    for pad in ((-6, 0), (-6, 7), (0, -6), (-3, -3), (9, -6), (0, 0, -5, 0), (1, 1, -5, 3)):
        for at in ("R", "S(0)", "S(1)"):
            for cut in (EVEN, UNEVEN, EMPTY):
                with pytest.raises(RuntimeError, match=r"must be non-negative|negative output size"):
                    torch.nn.functional.pad(place(x, mesh_here(), (at,), cut), pad)
