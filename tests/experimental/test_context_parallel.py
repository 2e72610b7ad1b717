"""Attention over sequences that are spread over ranks equals attention over the whole."""

from __future__ import annotations

import copy

import pytest
import shardtensor
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import mesh_here, mesh_of
from pool import on_ranks
from shardtensor import _C
from shardtensor.experimental import _kernels, context_parallel, context_parallel_unshard, set_rotate_method
from shardtensor.experimental import _torch_names as ours
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as imported_before


def by_document(q, k, v, documents, **options):
    """Attention within each document."""
    parts = [F.scaled_dot_product_attention(*t, **options) for t in zip(*(x.split(documents, 2) for x in (q, k, v)), strict=True)]
    return torch.cat(parts, 2)


def attends(length, method, causal, balance, documents, features, dtype):
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
                pools(world).run(attends, length, method, causal, balance, documents, 3, torch.float64)


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_other_features(pools, method):
    """Values with another size than keys, which the fused kernel does not support; and half precision."""
    pools(3).run(attends, 13, method, True, True, None, 5, torch.float64)
    pools(3).run(attends, 13, method, True, True, None, 3, torch.bfloat16)


# ---- models that call attention in their own way ----


class Model(torch.nn.Module):
    """Predicts the next token; `attend` gets queries, keys and values [batch, heads, sequence, features]."""

    def __init__(self, attend, checkpoint=False):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = torch.nn.Embedding(11, 8), torch.nn.Embedding(32, 8)
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 11)
        self.attend, self.checkpoint = attend, checkpoint
        self.double()

    def layer(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, tokens, targets, places):
        x = self.words(tokens) + self.places(places)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False) if self.checkpoint else self.layer(x)
        return F.cross_entropy(self.out(x).flatten(0, 1), targets.flatten(), reduction="sum")


def imported(q, k, v):
    return imported_before(q, k, v, is_causal=True)


def attribute(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_aten(q, k, v):
    return torch.ops.aten.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_hand(q, k, v):
    return (q @ k.mT * 0.5).softmax(-1) @ v


def by_einsum(q, k, v):
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


def by_bmm(q, k, v):
    return torch.bmm(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1), v.flatten(0, 1)).unflatten(0, q.shape[:2])


def by_broadcast(q, k, v):
    return ((q.unsqueeze(3) * k.unsqueeze(2)).sum(-1).softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)


def by_kernel(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def masked_as_in_transformers(q, k, v):
    """is_causal where one token or more follow each other, else a mask: transformers make it from position_ids."""
    mask = masked_as_in_transformers.mask
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.size(2) > 1)


def mask_of(places):
    jumps = (torch.diff(places, prepend=places[:1] - 1) != 1).cumsum(0)
    if not jumps.any():
        return None
    order = torch.arange(len(places))
    return ((order[:, None] >= order) & (jumps[:, None] == jumps))[None, None]


def text(length):
    generator = torch.Generator().manual_seed(length)
    return [torch.randint(11, (2, length), generator=generator) for _ in range(2)]


def trains(attend, length, checkpoint=False, documents=None, restart=False, **options):
    """The loss and the gradients of a model, summed over the ranks, are those of the model on the whole sequence."""
    def whole_attention(q, k, v):
        return by_document(q, k, v, documents or [length], is_causal=True)

    places = torch.cat([torch.arange(n) for n in documents]) if restart else torch.arange(length)
    plain, ours = Model(whole_attention), Model(globals()[attend], checkpoint)
    want = plain(*text(length), places)
    want.backward()
    buffers = [*text(length), places.clone()]
    with context_parallel(mesh_here(), buffers=buffers, buffer_seq_dims=[1, 1, 0], document_lengths=documents, **options):
        masked_as_in_transformers.mask = mask_of(buffers[2])
        loss = ours(*buffers)
        loss.backward()
    for a, b in zip([loss.detach(), *(p.grad for p in ours.parameters())], [want.detach(), *(p.grad for p in plain.parameters())], strict=True):
        dist.all_reduce(a)
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("world", [2, 3])
def test_however_a_model_has_imported_attention(pools, world):
    for attend in ("imported", "attribute", "by_aten"):
        for checkpoint in (False, True):
            pools(world).run(trains, attend, 13, checkpoint)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("length", "documents"), [(13, None), (5, None), (4, None), (13, [4, 1, 8]), (16, [3, 13])])
def test_masks_that_transformers_make(pools, world, length, documents):
    """Some ranks get a mask, others is_causal; a rank with one token gets neither."""
    for balance in (True, False):
        for restart in (False, True) if documents else (False,):
            pools(world).run(
                trains, "masked_as_in_transformers", length, documents=documents, restart=restart, load_balance=balance
            )


@on_ranks(2, 3)
def test_other_attention_is_refused():
    mesh = mesh_here()

    def attempt(run, **options):
        buffers = [*text(13), torch.arange(13)]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], **options):
            return run(*buffers)

    for attend, says in [
        (by_hand, r"matmul of two activations gives \[2, 2, (\d), \1\], the scores of \1 positions with each other"),
        (by_einsum, "einsum of two activations"),
        (by_bmm, "bmm of two activations"),
        (by_kernel, "a call of _scaled_dot_product_flash_attention_for_cpu would attend to this rank's part"),
        (by_broadcast, "was not called inside"),
        (lambda q, k, v: v, "was not called inside.*check_attention=False"),
    ]:
        with pytest.raises(RuntimeError, match=says):
            attempt(Model(attend))
        attempt(Model(attend), check_attention=False)
    # An error of the model's stays the error.
    with pytest.raises(ZeroDivisionError):
        attempt(lambda *_: 1 // 0)

    def layers(*, need_weights):
        torch.manual_seed(0)
        layer, words = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.nn.Embedding(11, 8)
        mine = words(text(13)[0])
        return lambda tokens, *_: [layer(x, x, x, need_weights=need_weights)[0] for x in [words(tokens)]], layer(mine, mine, mine)[0]

    run, want = layers(need_weights=False)
    order = torch.arange(13)
    with context_parallel(mesh, buffers=[order], buffer_seq_dims=[0], no_restore_buffers={order}, check_attention=False):
        pass
    torch.testing.assert_close(attempt(run)[0], want[:, order])
    with pytest.raises(RuntimeError, match="MultiheadAttention with need_weights=True"):
        attempt(layers(need_weights=True)[0])


@on_ranks(2)
def test_if_one_rank_refuses_all_raise():
    """All ranks raise, so none waits."""
    mesh, rank = mesh_here(), dist.get_rank()
    x = torch.zeros(1, 2, 8, 4)
    for options, error, says in [
        (dict(dropout_p=0.5 * rank), NotImplementedError if rank else RuntimeError, "'dropout_p'" if rank else "was refused on rank 1"),
        (dict(is_causal=rank == 0), RuntimeError, r"'is_causal' differs between ranks: \[True, False\]"),
        (dict(attn_mask=torch.ones(4, 4)), NotImplementedError, "'attn_mask'"),
    ]:
        with pytest.raises(error, match=says), context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            F.scaled_dot_product_attention(x, x, x, **options)
    with pytest.raises(RuntimeError, match="autograd records it on some ranks only"), context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        F.scaled_dot_product_attention(x.clone().requires_grad_(rank == 1), x, x)
    with pytest.raises(ValueError, match="2, 1 and 1 heads with enable_gqa=False"), context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        F.scaled_dot_product_attention(x, x[:, :1], x[:, :1])


# ---- kernels ----


def blocks(length, documents):
    """Without a fused kernel: scores are made for few positions at once."""
    before, _kernels._BLOCK = _kernels._BLOCK, 3
    try:
        with sdpa_kernel(SDPBackend.MATH):
            for causal in (False, True):
                attends(length, "alltoall", causal, True, documents, 3, torch.float64)
    finally:
        _kernels._BLOCK = before


@pytest.mark.parametrize("length", [13, 40])
def test_blocks_of_scores(pools, length):
    for documents in (None, [5, 0, length - 5]):
        pools(3).run(blocks, length, documents)


@on_ranks(2)
def test_the_scores_are_never_whole(length=1500):
    """With and without a fused kernel, no tensor is as large as this rank's scores."""
    scores = (length // dist.get_world_size()) * length * 4
    x = torch.randn(1, 1, length, 8)
    before, _kernels._BLOCK = _kernels._BLOCK, 64
    try:
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            with sdpa_kernel(backend), context_parallel(mesh_here(), buffers=[x], buffer_seq_dims=[2]):
                q = x.clone().requires_grad_()
                _C.count_memory(True)
                _C.reset_peak_memory()
                start = _C.allocated_memory()[0]
                imported_before(q, q, q, is_causal=True).sum().backward()
                most = _C.allocated_memory()[1] - start
                _C.count_memory(False)
            assert most < scores / 2, (backend, most, scores)
    finally:
        _kernels._BLOCK = before


@on_ranks(2)
def test_grouped_heads_travel_once():
    """Keys and values travel once, not once for each query head that shares them."""
    q, kv = torch.randn(1, 6, 8, 4), torch.randn(1, 2, 8, 4)
    with context_parallel(mesh_here(), buffers=[q, kv], buffer_seq_dims=[2, 2]):
        F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)  # the first call also compares the ranks' arguments
        _C.reset_comm_counts()
        F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)
        assert _C.comm_counts()["all_gather"] == (2, 2 * kv.nbytes), _C.comm_counts()


def test_the_kernel_is_torchs_choice():
    from shardtensor.experimental._kernels import _KERNELS, kernel_for

    q = torch.randn(1, 4, 6, 8)
    for kv, v, backends, name in [
        (q, q, None, "flash on the CPU"),
        (q[:, :2], q[:, :2], None, "flash on the CPU"),
        (q.bfloat16(), q.bfloat16(), None, "flash on the CPU"),
        (q, q[..., :5], None, "by blocks"),
        (q, q, [SDPBackend.MATH], "by blocks"),
    ]:
        with sdpa_kernel(backends or list(SDPBackend.__members__.values())[1:]):
            assert kernel_for(q.to(kv.dtype), kv, v, 0.5).name == name
    names = {(device, SDPBackend(choice).name): kernel.name for (device, choice), kernel in _KERNELS.items()}
    assert names == {
        ("cpu", "FLASH_ATTENTION"): "flash on the CPU",
        ("cuda", "FLASH_ATTENTION"): "flash",
        ("cuda", "EFFICIENT_ATTENTION"): "efficient",
        ("cuda", "CUDNN_ATTENTION"): "cudnn",
    }


@pytest.mark.parametrize("choice", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])
@pytest.mark.parametrize("features", [8, 20])
def test_calls_of_cuda_kernels(choice, features):
    """On fake tensors: the arguments are in their places, results and statistics have the sizes of the queries."""
    from shardtensor.experimental._kernels import _KERNELS
    from torch._subclasses.fake_tensor import FakeTensorMode

    kernel = _KERNELS["cuda", choice.value]
    with FakeTensorMode():
        for queries, keys, causal in ((7, 7, True), (40, 3, False)):
            q, out, grad = (torch.empty(2, 4, queries + 5, features, device="cuda", dtype=torch.bfloat16)[:, :, 2:-3] for _ in "123")
            k, v = (torch.empty(2, 4, keys, features, device="cuda", dtype=torch.bfloat16) for _ in "kv")
            part, total, extras = kernel.forward(q, k, v, causal, 0.5)
            assert part.shape == q.shape and total.shape == q.shape[:3] and total.dtype == torch.float32
            all_total = torch.empty(2, 4, queries + 5, device="cuda")[:, :, 2:-3]
            grads = kernel.backward(grad, q, k, v, out, all_total, extras, causal, 0.5)
            assert [g.shape for g in grads] == [q.shape, k.shape, v.shape] and grads[0].device.type == "cuda"


# ---- bad use ----


@on_ranks(2, 4)
def test_bad_use():
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


class Attention(torch.nn.Module):
    def forward(self, q, k, v, **options):
        return F.scaled_dot_product_attention(q, k, v, **options)


class QKV(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.attention, self.out = torch.nn.Linear(8, 24), Attention(), torch.nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("order", "compiled"), [("head-tail", False), ("documents", False), (None, False), ("head-tail", True)])
@on_ranks(2, seconds=100)
def test_torchs_private_names(order, compiled):
    """As torchtitan does it, with torch's names."""
    from torch.distributed.tensor.experimental import _attention as names
    from torch.distributed.tensor.parallel import parallelize_module

    mesh, n = mesh_here(), dist.get_world_size()
    length = 8 * n if order else 8 * n - 3
    documents = [4 * n, 4 * n] if order == "documents" else [length]
    torch.manual_seed(7)
    plain, (x, y), qkv = QKV(), torch.randn(2, 2, length, 8), torch.randn(3, 2, 2, length, 4)
    x_parts, y_parts = x.split(documents, 1), y.split(documents, 1)
    with shardtensor.replace_dtensor():
        balancer = {
            "head-tail": lambda: names._HeadTailLoadBalancer(length, n, "cpu"),
            "documents": lambda: names._PerDocumentHeadTailLoadBalancer([documents] * 2, n, "cpu"),
            None: lambda: None,
        }[order]()
        model = copy.deepcopy(plain)
        names._enable_context_parallel_dispatcher()
        try:
            style = names._ContextParallel(seq_dim=2, attention_type=names._ContextParallel.AttentionType.SDPA)
            parallelize_module(model.attention, mesh, style)
            for _ in range(2):
                xs, ys = names._context_parallel_shard(mesh, [x, y], [1, 1], balancer)
                run = torch.compile(model, backend="aot_eager") if compiled else model
                loss = (run(xs) - ys).square().sum()
                loss.backward()
            sums = [loss.detach(), *(p.grad for p in model.parameters())]
            for t in sums:
                dist.all_reduce(t)
            for _ in range(2):
                want = sum((plain(a) - b).square().sum() for a, b in zip(x_parts, y_parts, strict=True))
                want.backward()
            for a, b in zip(sums, [want, *(p.grad for p in plain.parameters())], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            # ShardTensors made by hand, and results made whole
            pieces = names._context_parallel_shard(mesh, {"q": qkv[0], "k": qkv[1], "v": qkv[2]}, {"q": 2, "k": 2, "v": 2}, balancer)
            cuts = {0: [t.size() for t in qkv[0].chunk(n, 2)]}
            held = [DTensor.from_local(t, mesh, [Shard(2)], sharding_shapes=cuts) for t in pieces.values()]
            out = F.scaled_dot_product_attention(*held, is_causal=True)
            assert isinstance(out, shardtensor.ShardTensor)
            (whole,) = names.context_parallel_unshard(mesh, [out.to_local()], [2], balancer)
            parts = zip(*(t.split(documents, 2) for t in qkv), strict=True)
            torch.testing.assert_close(whole, torch.cat([plain.attention(*t, is_causal=True) for t in parts], 2))
            if order:
                with pytest.raises(NotImplementedError, match=r"all \[Shard\(2\)\]"):
                    F.scaled_dot_product_attention(held[0], *(t.full_tensor() for t in held[1:]))
        finally:
            names._disable_context_parallel_dispatcher()
            names._cp_options.enable_load_balance = True  # torch's function above sets it
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


@on_ranks(2)
def test_orders_refused():
    from torch.distributed.tensor.experimental import _attention as names

    mesh, n = mesh_here(), dist.get_world_size()
    q = torch.randn(2, 2, 4 * n, 4)
    with shardtensor.replace_dtensor():
        module = Attention()
        names._ContextParallel(2, names._ContextParallel.AttentionType.SDPA)._apply(module, mesh)
        ours._orders.clear()
        with pytest.raises(RuntimeError, match="call _context_parallel_shard"):
            module(q, q, q)
        pieces = names._context_parallel_shard(
            mesh, [q], [2], names._PerDocumentHeadTailLoadBalancer([[4 * n], [2 * n, 2 * n]], n, "cpu")
        )
        with pytest.raises(NotImplementedError, match="differently"):
            module(*pieces * 3)
        (piece,) = names._context_parallel_shard(mesh, [q], [2], names._HeadTailLoadBalancer(4 * n, n, "cpu"))
        with pytest.raises(ValueError, match="is expected, this rank's part"):
            module(piece[:, :, 1:], piece, piece)
        assert module(piece, piece, piece).shape == piece.shape
        with pytest.raises(NotImplementedError, match="seq_dim"):
            names._ContextParallel(1, names._ContextParallel.AttentionType.SDPA)._apply(module, mesh)
        # torch's option is the default of load_balance
        names._cp_options.enable_load_balance = False
        try:
            buffer = torch.arange(4 * n)
            with names.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], check_attention=False):
                assert buffer.tolist() == list(range(4 * dist.get_rank(), 4 * dist.get_rank() + 4))
                assert names.context_parallel_unshard(mesh, [buffer], [0])[0].tolist() == list(range(4 * n))
        finally:
            names._cp_options.enable_load_balance = True
