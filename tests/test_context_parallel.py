"""Attention over sequences that are spread over ranks equals attention over the whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F


def by_document(q, k, v, documents, **options):
    """Attention within each document."""
    parts = [F.scaled_dot_product_attention(*t, **options) for t in zip(*(x.split(documents, 2) for x in (q, k, v)), strict=True)]
    return torch.cat(parts, 2)


def attends(length, method, causal, balance, documents, features, dtype):
    from oracle import mesh_here
    from shardtensor.experimental import context_parallel, context_parallel_unshard, set_rotate_method

    mesh, n = mesh_here(), dist.get_world_size()
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, 4, length, 3), (2, 2, length, 3), (2, 2, length, features)]
    whole = [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    seed = torch.randn(2, 4, length, features, generator=generator, dtype=torch.float64).to(dtype)
    options = dict(is_causal=causal, scale=0.7, enable_gqa=True)
    plain = [t.clone().requires_grad_() for t in whole]
    want = by_document(*plain, documents or [length], **options)
    want.backward(seed)
    set_rotate_method(method)
    buffers = [*(t.clone() for t in whole), seed.clone()]
    stock = F.scaled_dot_product_attention
    try:
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[2, -2, 2, 2], no_restore_buffers={buffers[3]}, load_balance=balance, document_lengths=documents
        ):
            ours = [t.clone().requires_grad_() for t in buffers[:3]]
            out = F.scaled_dot_product_attention(*ours, **options)
            part = buffers[3].clone()
        assert F.scaled_dot_product_attention is stock
        out.backward(part)  # outside the context
    finally:
        set_rotate_method("allgather")
    assert all(torch.equal(a, b) for a, b in zip(buffers[:3], whole, strict=True)) and buffers[3].size(2) == part.size(2)
    held = [torch.zeros(1, dtype=torch.int64) for _ in range(n)]
    dist.all_gather(held, torch.tensor([part.size(2)]))
    assert sum(held) == length and max(held) - min(held) <= 2
    tolerance = dict(rtol=1e-9, atol=1e-9) if dtype == torch.float64 else dict(rtol=2e-2, atol=2e-2)
    tensors = [out.detach(), *(t.grad for t in ours)]
    got = context_parallel_unshard(mesh, tensors, [2] * 4, load_balance=balance)
    for a, b in zip(got, [want, *(t.grad for t in plain)], strict=True):
        torch.testing.assert_close(a, b, **tolerance)


DOCUMENTS = {13: [4, 1, 0, 8], 16: [3, 13], 2: [1, 1]}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize("length", [13, 16, 2])  # 2 leaves some ranks empty
def test_attention(pools, world, method, length):
    for causal in (False, True):
        for balance in (False, True):
            for documents in (None, DOCUMENTS[length]):
                pools(world).run(f"{__name__}:attends", length, method, causal, balance, documents, 3, torch.float64)


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_other_features(pools, method):
    """Values with another size than keys, which the fused kernel does not support; and half precision."""
    pools(3).run(f"{__name__}:attends", 13, method, True, True, None, 5, torch.float64)
    pools(3).run(f"{__name__}:attends", 13, method, True, True, None, 3, torch.bfloat16)


def bad_use():
    from oracle import mesh_here, mesh_of
    from shardtensor.experimental import context_parallel, set_rotate_method

    mesh, x = mesh_here(), torch.zeros(1, 2, 8, 4)
    for options, error, text in [
        (dict(buffers=[x], buffer_seq_dims=[]), ValueError, "same number of elements"),
        (dict(buffers=[]), ValueError, "'buffers' is empty"),
        (dict(buffers=[x], buffer_seq_dims=[2], no_restore_buffers={torch.zeros(1)}), ValueError, "subset"),
        (dict(buffers=[x, x.clone()], buffer_seq_dims=[2, 3]), ValueError, r"different lengths, \[4, 8\]"),
        (dict(buffers=[x], buffer_seq_dims=[2], document_lengths=[3, 4]), ValueError, "adds up to 7, but sequences have 8"),
    ]:
        with pytest.raises(error, match=text), context_parallel(mesh, **options):
            pass
    assert x.shape == (1, 2, 8, 4)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        with pytest.raises(NotImplementedError, match="'dropout_p'"):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        with pytest.raises(ValueError, match=rf"'key' has shape \(1, 2, 1, 4\) on rank {dist.get_rank()}"):
            F.scaled_dot_product_attention(x, x[:, :, :1], x)
    with pytest.raises(NotImplementedError, match="'ring'"):
        set_rotate_method("ring")
    if dist.get_world_size() == 4:
        with pytest.raises(ValueError, match="has 2 dims"), context_parallel(mesh_of((2, 2)), buffers=[x], buffer_seq_dims=[2]):
            pass


@pytest.mark.parametrize("world", [2, 4])
def test_bad_use(pools, world):
    pools(world).run(f"{__name__}:bad_use")
