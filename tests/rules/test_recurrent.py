"""Recurrent layers, and the fused kernels that torch's modules take in eval mode: a cut batch stays cut."""

from __future__ import annotations

import pytest
import shardtensor as st
import torch
from oracle import EMPTY, EVEN, UNEVEN, compare, mesh_here, place, whole
from pool import on_ranks
from shardtensor import _C, Shard, distribute_module
from torch import nn

LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True),
    "lstm_time_first": lambda: nn.LSTM(3, 4, bidirectional=True),
    "gru": lambda: nn.GRU(3, 4, batch_first=True),
    "rnn": lambda: nn.RNN(3, 4, batch_first=True),
    "rnn_relu": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
}


def modules(make):
    """The same module twice, the second with replicated parameters."""
    torch.manual_seed(3)
    plain = make().double()
    ours = make().double()
    ours.load_state_dict(plain.state_dict())
    return plain, distribute_module(ours, mesh_here())


def recurrent(name, cut, given_state):
    plain, ours = modules(LAYERS[name])
    batch = 0 if plain.batch_first else 1
    x = torch.randn(5, 5, 3, dtype=torch.float64)
    state = torch.randn(plain.num_layers * (1 + plain.bidirectional), 5, 4, dtype=torch.float64)
    mesh = mesh_here()
    ours_x = place(x, mesh, (f"S({batch})",), cut).requires_grad_()
    x.requires_grad_()
    ours_state = place(state, mesh, ("S(1)",), cut)
    if isinstance(plain, nn.LSTM):
        state, ours_state = (state, state), (ours_state, ours_state)
    want = plain(x, state if given_state else None)
    _C.reset_comm_counts()
    got = ours(ours_x, ours_state if given_state else None)
    assert not _C.comm_counts()
    assert got[0].placements == (Shard(batch),)
    torch.testing.assert_close(whole(got[0]), want[0])
    (want[0].cos()).sum().backward()
    _C.reset_comm_counts()
    (grad,) = torch.autograd.grad(got[0].cos().sum(), [ours_x], retain_graph=True)
    assert "all_gather" not in _C.comm_counts()
    torch.testing.assert_close(whole(grad), x.grad)
    got[0].cos().sum().backward()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), p.grad)


@pytest.mark.parametrize("given_state", [False, True], ids=["no_state", "state"])
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_equal_torch(pools, name, given_state):
    for cut in ("uneven", "empty"):
        pools(3).run(recurrent, name, cut, given_state)


def with_dropout():
    _, ours = modules(lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True, dropout=0.5))
    x = place(torch.ones(6, 2, 3, dtype=torch.float64), mesh_here(), ("R",), "even")
    torch.manual_seed(5)
    hx = place(torch.zeros(2, 6, 4, dtype=torch.float64), mesh_here(), ("R",), "even")
    out = ours(x, (hx, hx))[0]
    return out.full_tensor().detach()


def test_ranks_drop_the_same(pools):
    first, *others = pools(3).run(with_dropout)
    assert all(torch.equal(first, o) for o in others)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("name", ["encoder", "layer", "attention"])
@on_ranks(3)
def test_fused_layers_equal_torch(name, masked):
    layer = lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)  # noqa: E731
    make = {"encoder": lambda: nn.TransformerEncoder(layer(), 2), "layer": layer, "attention": lambda: nn.MultiheadAttention(4, 2, batch_first=True)}
    plain, ours = modules(make[name])
    plain.eval(), ours.eval()
    mesh = mesh_here()
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    mask = torch.arange(3) >= torch.tensor([[3], [2], [3], [1], [2]])
    ours_x = place(x, mesh, ("S(0)",), UNEVEN)
    ours_mask = place(mask, mesh, ("S(0)",), UNEVEN)
    keyword = "key_padding_mask" if name == "attention" else "src_key_padding_mask"
    with torch.no_grad():
        arguments = (x, x, x) if name == "attention" else (x,)
        want = plain(*arguments, **({keyword: mask} if masked else {}))
        _C.reset_comm_counts()
        got = ours(*[ours_x] * len(arguments), **({keyword: ours_mask} if masked else {}))
        assert not _C.comm_counts()
    if name == "attention":
        want, got = want[0], got[0]
    assert got.placements == (Shard(0),)
    kept = ~mask if masked else torch.ones_like(mask)  # padding may hold any value
    torch.testing.assert_close(whole(got)[kept], want[kept])


CELLS = {"RNNCell": torch.nn.RNNCell, "GRUCell": torch.nn.GRUCell, "LSTMCell": torch.nn.LSTMCell}


@pytest.mark.parametrize("name", CELLS)
@on_ranks(2)
def test_cells_without_a_state(name):
    """A cell without a state starts from zeros on the input's mesh."""
    torch.manual_seed(0)
    for inputs, shape in ((4, (3, 4)), (6, (3, 6)), (4, (4,)), (4, (0, 4))):
        plain = CELLS[name](inputs, 6, dtype=torch.float64)
        ours = CELLS[name](inputs, 6, dtype=torch.float64)
        ours.load_state_dict(plain.state_dict())
        st.distribute_module(ours, mesh_here())
        x = torch.randn(shape, dtype=torch.float64)
        for at, cut in (("R", EVEN), ("P", EVEN), ("S(0)", EVEN), ("S(0)", UNEVEN), ("S(0)", EMPTY), (f"S({x.ndim - 1})", UNEVEN)):
            y = place(x, mesh_here(), (at,), cut)
            out, want = ours(y), plain(x)
            out = ours(y, out)
            compare(out, plain(x, want), 1e-9, f"{name} {shape} {at} {cut}")
