"""torch's functions that make tensors of their own beside their arguments: nobody has to distribute these."""

from __future__ import annotations

import pytest
import shardtensor as st
import torch
from oracle import EMPTY, EVEN, UNEVEN, compare, mesh_here, place
from pool import on_ranks

FUNCTIONS = {
    "combinations": torch.combinations,
    "combinations_of_3": lambda x: torch.combinations(x, 3),
    "combinations_of_the_same": lambda x: torch.combinations(x, 2, True),
    "no_combinations": lambda x: torch.combinations(x, 9),
    "combinations_of_none": lambda x: torch.combinations(x, 0),
    "vander": torch.vander,
    "vander_3": lambda x: torch.vander(x, 3, increasing=True),
    "vander_1": lambda x: torch.vander(x, 1),
    "vander_0": lambda x: torch.vander(x, 0),
    "vander_of_integers": lambda x: torch.vander((x * 3).int()),
    "istft": lambda x: torch.istft(torch.complex(x, x.flip(0)).view(-1, 1).expand(-1, 8), 8),
}


@on_ranks(2)
def test_functions():
    mesh = mesh_here()
    x = torch.randn(5, dtype=torch.float64)
    for name, f in FUNCTIONS.items():
        for placement, cut in (("R", EVEN), ("S(0)", EVEN), ("S(0)", UNEVEN), ("S(0)", EMPTY), ("P", EVEN)):
            ours, plain = place(x, mesh, (placement,), cut).requires_grad_(), x.clone().requires_grad_()
            got, want = f(ours), f(plain)
            assert isinstance(got, st.ShardTensor) and got.stride() == want.stride(), name
            compare(got, want, 1e-9, f"{name} {placement} {cut}")
            if want.requires_grad and "vander" not in name:  # torch's own has no gradient
                got.square().sum().backward()
                want.square().sum().backward()
                torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)


@on_ranks(2)
def test_attention_with_zeros():
    mesh = mesh_here()
    for batch_first in (False, True):
        torch.manual_seed(1)
        plain, ours = (torch.nn.MultiheadAttention(4, 2, add_zero_attn=True, batch_first=batch_first, dtype=torch.float64) for _ in range(2))
        ours.load_state_dict(plain.state_dict())
        st.distribute_module(ours, mesh)
        x = torch.randn(4, 6, 4, dtype=torch.float64)
        for dim in (0, 1, 2):
            p, y = x.clone().requires_grad_(), st.distribute_tensor(x, mesh, [st.Shard(dim)]).requires_grad_()
            want, got = plain(p, p, p), ours(y, y, y)
            compare(got, want, 1e-9, f"{batch_first} {dim}")
            want[0].square().sum().backward()
            got[0].square().sum().backward()
            torch.testing.assert_close(y.grad.full_tensor(), p.grad)
        mask = torch.zeros(6 if batch_first else 4, 6 if batch_first else 4, dtype=torch.float64)
        with pytest.raises(RuntimeError, match=r"plain torch\.Tensor"):  # a user's plain mask may differ between ranks
            ours(y, y, y, attn_mask=mask)


@on_ranks(2)
def test_sparse_weights():
    for placement, cut in (("R", EVEN), ("S(0)", EVEN), ("S(0)", UNEVEN), ("S(1)", UNEVEN), ("S(0)", EMPTY)):
        weight = torch.nn.Parameter(place(torch.ones(10, 6), mesh_here(), (placement,), cut))
        assert torch.nn.init.sparse_(weight, 0.25, std=2) is weight
        whole = weight.detach().full_tensor()
        assert (whole == 0).sum(0).tolist() == [3] * 6 and 0.5 < whole.std() < 3
        assert len({tuple(column) for column in (whole == 0).T.tolist()}) > 1
    with pytest.raises(ValueError, match="2 dimensions"):
        torch.nn.init.sparse_(st.distribute_tensor(torch.ones(4), mesh_here(), [st.Shard(0)]), 0.5)
