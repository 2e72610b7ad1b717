"""The checking mode finds ranks that diverge and pieces that do not match the layout. All ranks raise, before any waits."""

from __future__ import annotations

import pytest
import shardtensor as st
import torch
import torch.distributed as dist
from oracle import UNEVEN, mesh_here, place
from pool import on_ranks
from shardtensor import _C, debug


def debug_is_on():
    return _C.checking()


@on_ranks(1, 2, 3)
def test_right_calls_pass():
    """Nothing is wrong: forward, backward, in place, views, lists, summands, moves and attention run as without the mode."""
    mesh = mesh_here()
    for full in (False, True):
        with debug.check(full):
            x = place(torch.randn(7, 6), mesh, ("S(0)",), UNEVEN).requires_grad_()
            w = place(torch.randn(6, 6), mesh, ("R",), UNEVEN).requires_grad_()
            y = (torch.relu(x @ w).t() * 2).softmax(0)
            y.flatten()[3:].sum().backward()
            assert x.grad.full_tensor().isfinite().all()
            with torch.no_grad():
                w.mul_(0.5)
                torch._foreach_add_([w, x], 1.0)
            torch.optim.SGD([x, w], lr=0.1).step()
            x.redistribute(placements=[st.Replicate()]).to_local()
            st.ShardTensor.from_local(torch.ones(2, 3), mesh, [st.Partial()]).full_tensor()
            q = place(torch.randn(2, 3, 5, 4), mesh, ("S(1)",), UNEVEN)
            torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 5, 12)
    assert not debug_is_on()


def parted(how):
    """Every rank gets the error that names both calls. Afterwards the ranks are in step."""
    mesh, rank = mesh_here(), mesh_here().get_rank()
    x = place(torch.ones(7, 6), mesh, ("S(0)",), UNEVEN)
    calls = {
        "op": lambda: torch.neg(x) if rank else torch.exp(x),
        "argument": lambda: x.sum(rank % 2),
        "move": lambda: x.redistribute(placements=[st.Shard(1) if rank else st.Replicate()]),
        "op and move": lambda: x.full_tensor() if rank else x * 2,
        "sizes": lambda: st.ShardTensor.from_local(
            torch.ones(2, 3), mesh, [st.Shard(0)], shape=(2 * mesh.size() + (rank == 1), 3), stride=(3, 1), run_check=False
        ),
    }
    with debug.check(), pytest.raises(RuntimeError, match="run different calls") as caught:
        calls[how]()
    text = str(caught.value)
    assert text.count("\n  rank ") >= 2 and "test_check.py:" in text, text
    with debug.check():
        assert x.full_tensor().eq(1).all()
    return text


@pytest.mark.parametrize("how", ["op", "argument", "move", "op and move", "sizes"])
def test_ranks_that_part(pools, how):
    texts = pools(2).run(parted, how)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("how", ["differ", "sizes", "order"])
@on_ranks(2)
def test_wrong_pieces(how):
    mesh, rank = mesh_here(), mesh_here().get_rank()
    last = rank == mesh.size() - 1
    if how == "differ":
        x = st.ShardTensor.from_local(torch.full((3, 2000), 1.0), mesh, [st.Replicate()], run_check=False)
        x.to_local()[2, 1999] += last  # one element, past what is sampled
    elif how == "sizes":
        x = place(torch.ones(6, 4), mesh, ("S(0)",), UNEVEN)
        _C.set_local(x, torch.ones(7, 4) if last else x._local_tensor)
    elif how == "order":
        x = place(torch.ones(6, 4), mesh, ("S(1)",), UNEVEN)
        _C.set_local(x, x._local_tensor.t().contiguous().t() if last else x._local_tensor)
    want = {"differ": "differs from that of another rank", "sizes": "its piece has sizes", "order": "its piece has strides"}[how]
    with debug.check(full=True), pytest.raises(RuntimeError, match=want):
        x.zero_() if how != "differ" else x * 2
    if how == "differ":
        with debug.check():
            x * 2  # only samples, so it misses this


@on_ranks(2)
def test_a_rank_that_raises_alone():
    """If one rank raises in an op, all ranks raise at once. If all raise, each keeps its own error."""
    rank = mesh_here().get_rank()
    library = torch.library.Library("shardtensor_check", "DEF")
    library.define("picky(Tensor x, bool all) -> Tensor")

    def picky(x, all):
        if all or rank == 1:
            raise ValueError(f"rank {rank} does not like it")
        return x * 2

    library.impl("picky", picky, "CPU")
    x = place(torch.ones(5), mesh_here(), ("S(0)",), UNEVEN)
    with debug.check():
        with pytest.raises(RuntimeError, match=r"raises on some ranks .* alone") as caught:
            torch.ops.shardtensor_check.picky(x, False)
        assert "rank 1 does not like it" in str(caught.value) and "test_check.py:" in str(caught.value)
        with pytest.raises(ValueError, match=f"rank {rank} does not like it"):
            torch.ops.shardtensor_check.picky(x, True)
        assert (x * 2).full_tensor().eq(2).all()
    library._destroy()


@on_ranks(2, seconds=60)
def test_indexing_does_not_wait_with_the_gil():
    """Indexing holds the GIL. Its collectives must release the GIL before they wait: Gloo's threads may need it."""
    x = place(torch.randn(6, 7), mesh_here(), ("S(0)",), UNEVEN)
    with debug.check():
        for _ in range(300):
            dist.all_reduce(torch.ones(2))  # a Gloo thread drops this tensor, which has a Python object
            x[1:, :2]


@on_ranks(2, 3)
def test_infinite_factors_of_summands():
    """Summands are multiplied one by one. NaN is an error if the whole would have none, and accepted if the whole has it too."""
    mesh = mesh_here()
    row = st.ShardTensor.from_local(torch.ones(2) * (torch.distributed.get_rank() == 0), mesh, [st.Partial()])
    factor, divisor = (place(torch.tensor(t), mesh, ("R",), UNEVEN) for t in ([float("inf"), 2.0], [0.0, 2.0]))
    zeros = st.ShardTensor.from_local(torch.zeros(2), mesh, [st.Partial()])
    with debug.check():
        for f in (lambda: row * factor, lambda: row / divisor):
            with pytest.raises(RuntimeError, match=r"gives NaN for summands, but not for the whole tensor.*test_check\.py"):
                f()
        assert (zeros * factor).full_tensor().isnan().tolist() == [True, False]
        assert (row * 2 / 4).full_tensor().tolist() == [0.5, 0.5]
    assert (row.redistribute(placements=[st.Replicate()]) * factor).full_tensor().tolist() == [float("inf"), 2.0]
