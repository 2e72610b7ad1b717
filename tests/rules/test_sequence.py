"""scaled_dot_product_attention with queries, keys and values cut along the sequence: values are the whole's, and the cheapest way is taken.

Random calls are compared with plain torch, forward and backward: even, uneven, thin and empty pieces, on meshes of one and two dims.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import compare
from pool import on_ranks
from shardtensor import Replicate, Shard, distribute_module, strict_mode
from test_spatial import counted, draw_cut, numbers, place
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

MESHES = [(2,), (3,), (2, 2)]
CALLS = 30  # per mesh


def draw_call(draw: random.Random) -> tuple[str, list[torch.Tensor], dict[str, Any]]:
    batch, kv_heads, groups = draw.randint(1, 4), draw.choice((1, 2, 3, 5)), draw.choice((1, 1, 2))
    length = draw.randint(1, 40)
    keys = length if draw.random() < 0.6 else draw.randint(1, 40)
    q = numbers(draw, batch, kv_heads * groups, length, 3)
    k, v = numbers(draw, batch, kv_heads, keys, 3), numbers(draw, batch, kv_heads, keys, 3)
    how: dict[str, Any] = {"enable_gqa": groups > 1, "scale": draw.choice((None, 0.3))}
    kind = draw.choice(("causal", "causal", "all", "mask"))
    if kind == "causal":
        how["is_causal"] = True
    elif kind == "mask":
        mask = numbers(draw, *draw.choice(((length, keys), (batch, 1, length, keys), (batch, 1, 1, keys)))) > 0
        mask[..., 0] = True  # no row without a key
        how["attn_mask"] = mask
    return f"{kind} {list(q.shape)} {list(k.shape)} {how}", [q, k, v], how


def place_keys(draw: random.Random, whole: list[torch.Tensor], mesh: Any) -> list[Any]:
    """Keys and values are cut along the sequence, queries are not."""
    other = draw.choice((Shard(0), Shard(1), Replicate()))
    placements = [Shard(2), *(other for _ in range(1, mesh.ndim))]
    at = draw.randrange(mesh.ndim)
    placements[0], placements[at] = placements[at], placements[0]
    cuts = [draw_cut(draw, whole[1].shape[2], n) if p == Shard(2) else None for p, n in zip(placements, mesh.shape, strict=True)]
    keys = [place(t, mesh, placements, cuts) for t in whole[1:]]
    return [place(whole[0], mesh, [Replicate() if p == Shard(2) else p for p in placements], [None] * mesh.ndim), *keys]


def place_sequences(draw: random.Random, whole: list[torch.Tensor], mesh: Any) -> list[Any]:
    placements: list[Any] = [Shard(2), *(draw.choice((Shard(0), Shard(1), Shard(2), Replicate())) for _ in range(1, mesh.ndim))]
    draw.shuffle(placements)
    alike = draw.random() < 0.5
    out: list[Any] = []
    for t in whole:
        cuts: list[Any] = []
        for m, p in enumerate(placements):
            cut = draw_cut(draw, t.shape[2], mesh.size(m)) if p == Shard(2) and p not in placements[:m] else None
            same = out and alike and t.shape[2] == whole[0].shape[2]
            cuts.append(out[0]._layout.cuts[m] if same and p == Shard(2) else cut)
        if len(out) == 2:  # values are where the keys are
            cuts = list(out[1]._layout.cuts)
        out.append(place(t, mesh, placements, cuts))
    return out


@pytest.mark.parametrize("shape", MESHES, ids=lambda s: "x".join(map(str, s)))
@on_ranks(of="shape")
def test_equals_torch(shape, seed=0):
    calls = CALLS

    mesh = init_device_mesh("cpu", shape)
    draw = random.Random(f"{shape} {seed}")
    for _ in range(calls):
        text, whole, how = draw_call(draw)
        given = (place_keys if draw.random() < 0.3 else place_sequences)(draw, whole, mesh)
        text += f" {[t._layout for t in given]}"
        plain = [t.requires_grad_() for t in whole]
        leaves = [t.requires_grad_() for t in given]
        ours = dict(how)
        if "attn_mask" in how:
            ours["attn_mask"] = place(how["attn_mask"], mesh, [Replicate()] * mesh.ndim, [None] * mesh.ndim)
        want = F.scaled_dot_product_attention(*plain, **how)
        y = F.scaled_dot_product_attention(*leaves, **ours)
        assert y.placements == given[0].placements, f"{text}: {y.placements}"
        compare(y, want.detach(), 1e-9, f"result of {text}")
        upstream = numbers(draw, *want.shape)
        grads = torch.autograd.grad(y, leaves, place(upstream, mesh, y.placements, y._layout.cuts))
        for name, g, w in zip("qkv", grads, torch.autograd.grad(want, plain, upstream), strict=True):
            compare(g, w, 1e-9, f"gradient of {name} of {text}")


# ---- the choice, from sizes alone ----

ROW = 16 * 4  # bytes of the features of one query, key or value of one head


def lengths(size: int, ranks: int) -> list[int]:
    return [len(c) for c in torch.arange(size).chunk(ranks)]


# What rank r sends in a forward and in a backward.


def exchanging(count: int, ranks: int, length: int, r: int) -> tuple[int, int]:
    """`count` heads or batches for the sequence: queries, keys and values, and the result back. Backward: the reverse."""
    mine = lengths(length, ranks)[r]
    others = mine * (count - count // ranks) * ROW
    back = (length - mine) * (count // ranks) * ROW
    return 3 * others + back, others + 3 * back


def ring(heads: int, ranks: int, length: int, r: int) -> tuple[int, int]:
    """Keys and values to each other rank; in the backward again, and the gradients of the others' back."""
    each = lengths(length, ranks)
    keys = 2 * heads * (ranks - 1) * each[r] * ROW
    return keys, keys + 2 * heads * (length - each[r]) * ROW


def balanced(heads: int, length: int, r: int) -> tuple[int, int]:
    """Two ranks, causal: the second one has three quarters of the work. The first takes half of its queries off it, and sends its keys for
    the others."""
    queries, logs, keys = heads * length // 4 * ROW, heads * length // 4 * 4, 2 * heads * length // 2 * ROW
    if r == 0:
        return keys + queries + logs, keys + queries
    return queries, 3 * queries + logs + keys


# ranks, sizes of queries and keys, causal; what a forward calls; the bytes that rank r sends
CHOICES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], bool, dict[str, int], Any]] = {
    # there and back
    "heads": (3, (1, 6, 1024, 16), (1, 6, 1024, 16), False, {"all_to_all": 4}, lambda r: exchanging(6, 3, 1024, r)),
    "batch": (3, (3, 1, 1024, 16), (3, 1, 1024, 16), False, {"all_to_all": 4}, lambda r: exchanging(3, 3, 1024, r)),
    # some queries travel, and come back
    "ring, causal": (2, (1, 4, 1024, 16), (1, 4, 1024, 16), True, {"all_to_all": 2}, lambda r: balanced(4, 1024, r)),
    "ring": (3, (1, 8, 1024, 16), (1, 2, 1024, 16), False, {"all_to_all": 2}, lambda r: ring(2, 3, 1024, r)),
    "few keys": (3, (1, 8, 1024, 16), (1, 8, 8, 16), False, {"all_gather": 2}, lambda r: (2 * 8 * lengths(8, 3)[r] * ROW, None)),
}


@pytest.mark.parametrize("case", CHOICES)
@on_ranks(of=lambda case: CHOICES[case][0])
def test_choice(case):
    ranks, q, k, causal, calls, bytes_of = CHOICES[case]
    mesh = init_device_mesh("cpu", (ranks,))
    draw = random.Random(1)
    whole = [numbers(draw, *sizes).float() for sizes in (q, k, k)]
    given = [place(t, mesh, [Shard(2)], [None]) for t in whole]
    how = {"is_causal": causal, "enable_gqa": True}
    forward, backward = bytes_of(mesh.get_local_rank())
    for inference in (False, True):
        with torch.inference_mode(inference):
            y, sent = counted(lambda: F.scaled_dot_product_attention(*given, **how))
        assert {kind: n for kind, (n, _) in sent.items()} == calls, sent
        assert sum(size for _, size in sent.values()) == forward, sent
        assert y.placements == (Shard(2),)
        compare(y, F.scaled_dot_product_attention(*whole, **how), 1e-5, "result")
    y = F.scaled_dot_product_attention(*(t.requires_grad_() for t in given), **how)
    grad = place(numbers(draw, *y.shape).float(), mesh, [Shard(2)], [None])
    _, sent = counted(lambda: y.backward(grad))
    assert backward is None or sum(size for _, size in sent.values()) == backward, sent


# queries, rows of each rank's keys, and which queries each rank has: by default all
CACHES = {"even": (1, [300, 300, 300], None), "uneven": (2, [700, 0, 200], None), "query on one rank": (1, [300, 299, 1], [0, 1, 0])}


@pytest.mark.parametrize("case", CACHES)
@on_ranks(3)
def test_a_long_cache_of_keys_stays(case):
    """A few queries against many keys: only their results travel, and the queries to ranks that lack them."""
    queries, cut, of_query = CACHES[case]
    mesh = init_device_mesh("cpu", (3,))
    draw = random.Random(1)
    heads, groups, features = 8, 2, 16
    q, k, v = (numbers(draw, 2, h, n, features).float() for h, n in ((heads, queries), (groups, sum(cut)), (groups, sum(cut))))
    mask = torch.rand(2, 1, queries, sum(cut), generator=torch.Generator().manual_seed(1)) < 0.7
    mask[..., : cut[0]] &= False  # the first rank's keys are all hidden
    ours = [place(t, mesh, [Shard(2)], [cut]) for t in (k, v)]
    ours.insert(0, place(q, mesh, [Shard(2) if of_query else Replicate()], [of_query]))
    rows = 2 * heads * queries
    for masked in (False, True) if sum(cut[1:]) else (False,):
        how: dict[str, Any] = {"enable_gqa": True}
        theirs = how | ({"attn_mask": place(mask, mesh, [Replicate()], [None])} if masked else {})
        how |= {"attn_mask": mask} if masked else {}
        with torch.inference_mode(), strict_mode():
            y, sent = counted(lambda: F.scaled_dot_product_attention(*ours, **theirs))  # noqa: B023
        compare(y, F.scaled_dot_product_attention(q, k, v, **how), 1e-5, f"result, masked {masked}")
        assert y._layout == ours[0]._layout and set(sent) == {"all_gather"}, sent
        assert sent["all_gather"][1] <= rows * (features + 1) * 4 + rows * features * 4, sent  # results, logs of sums; queries


@on_ranks(3)
def test_causal_queries_see_few_keys():
    """Causal queries see as many keys as there are queries: no others take part."""
    mesh = init_device_mesh("cpu", (3,))
    for cut in ([100, 100, 100], [3, 200, 97], [0, 1, 299]):
        draw = random.Random(2)
        whole = [numbers(draw, 2, h, n, 8).requires_grad_() for h, n in ((4, 5), (4, 300), (4, 300))]
        ours = [place(whole[0], mesh, [Replicate()], [None])] + [place(t, mesh, [Shard(2)], [cut]) for t in whole[1:]]
        ours = [t.requires_grad_() for t in ours]
        want = F.scaled_dot_product_attention(*whole, is_causal=True)
        y, sent = counted(lambda: F.scaled_dot_product_attention(*ours, is_causal=True))  # noqa: B023
        compare(y, want.detach(), 1e-9, f"result of {cut}")
        assert sum(size for _, size in sent.values()) <= 3 * 2 * 4 * 5 * 8 * 8, sent  # of five queries' and keys' sizes
        for g, w in zip(torch.autograd.grad(y.square().sum(), ours), torch.autograd.grad(want.square().sum(), whole), strict=True):
            compare(g, w, 1e-9, f"gradient of {cut}")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@on_ranks(3, seconds=100)
def test_a_long_cache_stays_in_a_graph(dynamic):
    """In a graph too, a long cache of keys stays where it is. One graph serves all its lengths, if these are symbols."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    mesh = init_device_mesh("cpu", (3,))
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append([n for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    function = torch.compile(F.scaled_dot_product_attention, backend=aot_autograd(fw_compiler=keep), dynamic=dynamic)
    for length in (300, 600, 900):
        draw = random.Random(length)
        whole = [numbers(draw, 2, 4, n, 8) for n in (2, length, length)]
        ours = [place(whole[0], mesh, [Replicate()], [None])] + [place(t, mesh, [Shard(2)], [None]) for t in whole[1:]]
        with torch.no_grad():
            compare(function(*ours), F.scaled_dot_product_attention(*whole), 1e-9, f"result of {length}")
    for nodes in graphs:
        assert "all_to_all_single" not in [n.target._opname for n in nodes]
        gathered = [n.args[0].meta["val"].numel() for n in nodes if n.target._opname == "all_gather_into_tensor"]
        assert gathered == [2 * 4 * 2 * (8 + 1)], gathered  # the results, and the logs of their sums
    assert len(graphs) == (1 if dynamic else 3)


# ---- the same in graphs ----


def graph_keeper(graphs: list[list[str]]) -> Any:
    """A backend that notes the ops of each graph, forward and backward."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def keep(graph: Any, _: Any) -> Any:
        graphs.append([n.target._opname for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)])
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=keep, bw_compiler=keep)


def collectives_of(ops: list[str]) -> list[str]:
    return [op for op in ops if op in ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "reduce_scatter_tensor", "defer_call")]


@pytest.mark.parametrize("case", CHOICES)
@on_ranks(of=lambda case: CHOICES[case][0], seconds=100)
def test_choice_in_a_graph(case):
    """The plan is eager mode's, also where heads could be exchanged instead."""
    ranks, q, k, causal, calls, _ = CHOICES[case]
    mesh, graphs = init_device_mesh("cpu", (ranks,)), list[list[str]]()
    torch._dynamo.reset()
    attention = torch.compile(F.scaled_dot_product_attention, backend=graph_keeper(graphs), fullgraph=True, dynamic=False)
    given = [place(numbers(random.Random(1), *sizes).float(), mesh, [Shard(2)], [None]) for sizes in (q, k, k)]
    with torch.no_grad():
        attention(*given, is_causal=causal, enable_gqa=True)
    functional = {"all_to_all": "all_to_all_single", "all_gather": "all_gather_into_tensor"}
    want = ["defer_call"] if case.startswith("ring") else [functional[name] for name, n in calls.items() for _ in range(n)]
    assert [collectives_of(ops) for ops in graphs] == [want], graphs


# mesh; heads of queries and keys; rows of each rank's pieces (along the first mesh dim); dtype; how; other placements
RINGS: dict[str, tuple[tuple[int, ...], tuple[int, int], list[int], torch.dtype, dict[str, Any], str]] = {
    "even": ((2,), (4, 2), [512, 512], torch.float64, {"is_causal": True, "enable_gqa": True}, ""),
    "not causal": ((2,), (1, 1), [700, 1348], torch.float32, {"scale": 0.3}, ""),
    "empty": ((3,), (3, 1), [700, 0, 324], torch.float64, {"is_causal": True, "enable_gqa": True}, ""),
    "one row": ((3,), (1, 1), [1, 1023, 0], torch.float64, {}, ""),
    "half precision": ((3,), (1, 1), [342, 342, 340], torch.bfloat16, {"is_causal": True}, ""),
    "masked": ((3,), (1, 1), [400, 0, 240], torch.float64, {"masked": True}, ""),
    "batch cut too": ((2, 2), (1, 1), [600, 424], torch.float64, {"is_causal": True}, "S(0)"),
    "cut twice": ((2, 2), (1, 1), [600, 424], torch.float64, {}, "S(2)"),
}


def run_ring_in_graph(case: str, backend: str | None) -> None:
    """A graph sends what eager mode sends, forward and backward, and gathers nothing. Its tensors lie in memory as eager mode's."""
    shape, heads, cut, dtype, how, other = RINGS[case]
    mesh, draw, graphs = init_device_mesh("cpu", shape), random.Random(1), list[list[str]]()
    placements = [Shard(1), *([Shard(1 if other == "S(2)" else 0)] if other else [])]  # of [batch, sequence, heads, features]
    cuts: list[Any] = [cut, *[None] * (mesh.ndim - 1)]
    batch = 1 if case == "cut twice" else 2  # else a mesh dim would cut that instead
    whole = [numbers(draw, batch, sum(cut), h, 16).to(dtype) for h in (heads[0], heads[1], heads[1])]
    options = {name: value for name, value in how.items() if name != "masked"}
    mask = numbers(draw, sum(cut), sum(cut)) > 0
    mask[:, 0] = True  # no row without a key

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        rows = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*rows, attn_mask=mask if "masked" in how else None, **options).transpose(1, 2)

    plain = [t.clone().requires_grad_() for t in whole]
    want = attend(*plain, mask)
    upstream = numbers(draw, *want.shape).to(dtype)
    expected = torch.autograd.grad(want, plain, upstream)

    def both_ways(function: Any) -> tuple[Any, ...]:
        leaves = [place(t, mesh, placements, cuts).requires_grad_() for t in whole]
        masks = place(mask, mesh, [Replicate()] * mesh.ndim, [None] * mesh.ndim)
        y, forward = counted(lambda: function(*leaves, masks))
        grads, backward = counted(lambda: torch.autograd.grad(y, leaves, place(upstream, mesh, placements, cuts)))
        return [y.detach(), *grads], forward, backward

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend or graph_keeper(graphs), fullgraph=True, dynamic=False)
    eager, forward, backward = both_ways(attend)
    both_ways(compiled)
    got, *sent = both_ways(compiled)
    assert set(forward) == set(backward) == {"all_to_all"} and sent == [forward, backward], (forward, backward, sent)
    assert [collectives_of(ops) for ops in graphs] == ([] if backend else [["defer_call"]] * 2), graphs
    tolerance = {torch.bfloat16: 4e-2, torch.float32: 1e-4}.get(dtype, 1e-9)
    for name, a, b, w in zip(("result", "q", "k", "v"), got, eager, (want.detach(), *expected), strict=True):
        compare(a, w, tolerance, f"{name} of {case}")
        assert a._layout == b._layout and a.stride() == b.stride(), f"{name}: {a._layout} {a.stride()} {b.stride()}"


@pytest.mark.parametrize("case", RINGS)
def test_ring_in_a_graph(pools, case):
    pools(math.prod(RINGS[case][0])).run(run_ring_in_graph, case, None, seconds=100)


@pytest.mark.parametrize("case", ["even", "empty"])
def test_ring_in_a_graph_of_inductor(pools, case):
    pools(math.prod(RINGS[case][0])).run(run_ring_in_graph, case, "inductor", seconds=120)


LENGTHS: dict[str, Any] = {
    "all": F.scaled_dot_product_attention,
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "of a slice": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], is_causal=True),
    "joined": lambda q, k, v: F.scaled_dot_product_attention(*(torch.cat([t, t[:, :, :3]], 2) for t in (q, k, v))),
}


@pytest.mark.parametrize("name", LENGTHS)
@on_ranks(3, seconds=100)
def test_ring_of_all_lengths(name):
    """Where sizes are symbols, a graph serves all lengths that the ranks divide, another one all others."""
    from torch._dynamo.testing import CompileCounterWithBackend

    mesh, function = init_device_mesh("cpu", (3,)), LENGTHS[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for length in (900, 1200, 1201, 1000):
        whole = [numbers(random.Random(i), 2, 1, length, 16).requires_grad_() for i in range(3)]
        want = function(*whole)
        upstream = numbers(random.Random(3), *want.shape)
        expected = torch.autograd.grad(want, whole, upstream)
        leaves = [place(t.detach(), mesh, [Shard(2)], [None]).requires_grad_() for t in whole]
        y, sent = counted(lambda: compiled(*leaves))  # noqa: B023
        assert set(sent) == {"all_to_all"}, sent
        compare(y, want.detach(), 1e-9, f"result of {length}")
        grads, sent = counted(lambda: torch.autograd.grad(y, leaves, place(upstream, mesh, [Shard(2)], [None])))  # noqa: B023
        assert set(sent) == {"all_to_all"}, sent
        for g, w in zip(grads, expected, strict=True):
            compare(g, w, 1e-9, f"gradient of {length}")
    assert counter.frame_count <= 2, counter.frame_count


@on_ranks(2, seconds=100)
def test_ring_in_a_checkpoint():
    """The backward of a checkpointed region does not send keys and values round a second time for the forward."""
    mesh, graphs = init_device_mesh("cpu", (2,)), list[list[str]]()
    torch._dynamo.reset()

    def block(q: Any, k: Any, v: Any) -> Any:
        return checkpoint(lambda q, k, v: F.scaled_dot_product_attention(q, k.sin(), v).cos(), q, k, v, use_reentrant=False)

    whole = [numbers(random.Random(i), 2, 1, 1201, 16).requires_grad_() for i in range(3)]
    leaves = [place(t.detach(), mesh, [Shard(2)], [[700, 501]]).requires_grad_() for t in whole]
    y, want = torch.compile(block, backend=graph_keeper(graphs), fullgraph=True, dynamic=False)(*leaves), block(*whole)
    compare(y, want.detach(), 1e-9, "result")
    for g, w in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(want.sum(), whole), strict=True):
        compare(g, w, 1e-9, "gradient")
    assert [ops.count("defer_call") for ops in graphs] == [1, 1], graphs


@on_ranks(3, seconds=100)
def test_heads_of_symbols():
    """Heads are exchanged; what comes back lies in memory as the whole does, which torch's kernels lay out in an order of their own."""
    mesh, graphs = init_device_mesh("cpu", (3,)), list[list[str]]()
    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, backend=graph_keeper(graphs), fullgraph=True, dynamic=True)
    whole = [numbers(random.Random(i), 2, 3, 61, 4).requires_grad_() for i in range(3)]
    leaves = [place(t.detach(), mesh, [Shard(2)], [None]).requires_grad_() for t in whole]
    y, want = compiled(*leaves), F.scaled_dot_product_attention(*whole)
    assert collectives_of(graphs[0]) == ["all_to_all_single"] * 4, graphs
    compare(y, want.detach(), 1e-9, "result")
    upstream = numbers(random.Random(3), *want.shape)
    grads = torch.autograd.grad(y, leaves, place(upstream, mesh, [Shard(2)], [None]))
    for g, w in zip(grads, torch.autograd.grad(want, whole, upstream), strict=True):
        compare(g, w, 1e-9, "gradient")


# ---- the ring with CUDA's kernels: ones by matrix products stand in for them, with the same forms of statistics ----


def weights_of(q: Any, k: Any, total: Any, causal: bool, scale: float | None) -> tuple[Any, Any]:
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    total = scores.logsumexp(-1) if total is None else total
    return (scores - total.unsqueeze(-1)).exp(), total


def gradients_of(grad: Any, q: Any, k: Any, v: Any, out: Any, total: Any, causal: bool, scale: float | None) -> tuple[Any, Any, Any]:
    weights, _ = weights_of(q, k, total, causal, scale)
    scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores @ k, scores.mT @ q, weights.mT @ grad


def efficient(q: Any, k: Any, v: Any, bias: Any, logs: bool, dropout_p: float = 0, is_causal: bool = False, *, scale: Any = None) -> Any:
    weights, total = weights_of(q, k, None, is_causal, scale)
    total = F.pad(total, (0, -q.shape[2] % 32), value=torch.inf) if logs else total[..., :0]
    return weights @ v, total, torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)


def efficient_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, total: Any, seed: Any, offset: Any, dropout_p: float, mask: Any, is_causal: bool = False,
    *, scale: Any = None,
) -> Any:  # fmt: skip
    assert total.shape[2] % 32 == 0 and out.transpose(1, 2).is_contiguous()
    return *gradients_of(grad, q, k, v, out, total[:, :, : q.shape[2]], is_causal, scale), torch.Tensor()


def cudnn(q: Any, k: Any, v: Any, bias: Any, logs: bool, dropout_p: float = 0, is_causal: bool = False, debug: bool = False, *, scale: Any = None) -> Any:
    weights, total = weights_of(q, k, None, is_causal, scale)
    none = torch.zeros((), dtype=torch.long)
    return weights @ v, total.unsqueeze(-1) if logs else total[..., :0], None, None, q.shape[2], k.shape[2], none, none, None


def cudnn_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, total: Any, seed: Any, offset: Any, bias: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, *, scale: Any = None,
) -> Any:  # fmt: skip
    assert (max_q, max_k) == (q.shape[2], k.shape[2]) and total.shape[3] == 1
    return gradients_of(grad, q, k, v, out, total.squeeze(-1), is_causal, scale)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@on_ranks(3, seconds=100)
def test_kernels_of_cuda(compiled):
    aten, mesh = torch.ops.aten, init_device_mesh("cpu", (3,))
    library = torch.library.Library("aten", "IMPL")
    for function in (efficient, efficient_backward, cudnn, cudnn_backward):
        name, _, backward = function.__name__.partition("_")
        library.impl(f"_scaled_dot_product_{name}_attention{backward and '_backward'}", function, "CPU")

    def of_efficient(q: Any, k: Any, v: Any, grad: Any, causal: bool) -> tuple[Any, ...]:
        out = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
        return out[0], *aten._scaled_dot_product_efficient_attention_backward(grad, q, k, v, None, *out, 0.0, [True, True, True, False], causal)[:3]

    def of_cudnn(q: Any, k: Any, v: Any, grad: Any, causal: bool) -> tuple[Any, ...]:
        out = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        return out[0], *aten._scaled_dot_product_cudnn_attention_backward(grad, q, k, v, *out[:2], *out[6:8], None, *out[2:6], 0.0, causal)

    for kernel, causal, cut in itertools.product((of_efficient, of_cudnn), (False, True), ([20, 20, 20], [37, 0, 23], [1, 58, 1])):
        whole = [numbers(random.Random(i), 2, 2, 60, 8) for i in range(4)]
        weights, _ = weights_of(*whole[:2], None, causal, None)
        want = (weights @ whole[2], *gradients_of(whole[3], *whole[:3], weights @ whole[2], None, causal, None))
        torch._dynamo.reset()
        function = torch.compile(kernel, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else kernel
        with torch.no_grad(), strict_mode():
            got, sent = counted(lambda: function(*(place(t, mesh, [Shard(2)], [cut]) for t in whole), causal))  # noqa: B023
        assert set(sent) == {"all_to_all"}, sent
        for a, b in zip(got, want, strict=True):
            assert a.placements == (Shard(2),)
            compare(a, b, 1e-9, f"{kernel.__name__} {causal} {cut}")


@on_ranks(4)
def test_several_pieces_per_rank():
    """Several runs of places per rank: no ring, and the same values."""
    mesh = init_device_mesh("cpu", (2, 2))
    for causal, split in itertools.product((False, True), ([_StridedShard(2, split_factor=2), Shard(2)], [_StridedShard(2, split_factor=3), Replicate()])):
        draw = random.Random(2)
        whole = [numbers(draw, 1, 1, 96, 4).requires_grad_() for _ in "qkv"]
        given = [place(t, mesh, [Replicate()] * 2, [None] * 2).redistribute(placements=split).detach().requires_grad_() for t in whole]
        want = F.scaled_dot_product_attention(*whole, is_causal=causal)
        y = F.scaled_dot_product_attention(*given, is_causal=causal)
        assert y.placements == tuple(split)
        compare(y, want.detach(), 1e-9, f"result of {split}")
        for g, w in zip(torch.autograd.grad(y.square().sum(), given), torch.autograd.grad(want.square().sum(), whole), strict=True):
            compare(g, w, 1e-9, f"gradient of {split}")


# ---- modules and graphs ----


class Block(torch.nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(12, heads, batch_first=True)
        self.norm, self.up, self.down = torch.nn.LayerNorm(12), torch.nn.Linear(12, 20), torch.nn.Linear(20, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm(x))))


def run_block(heads: int, cut: list[int], compiled: bool) -> None:
    mesh = init_device_mesh("cpu", (len(cut),))
    torch.manual_seed(3)
    block = Block(heads).double()
    whole = numbers(random.Random(1), 2, sum(cut), 12)
    plain = whole.clone().requires_grad_()
    want = block(plain)
    parameters = list(block.parameters())
    expected = torch.autograd.grad(want.square().sum(), [plain, *parameters])
    ours = distribute_module(block, mesh)
    x = place(whole, mesh, [Shard(1)], [cut]).requires_grad_()
    torch._dynamo.reset()
    y = (torch.compile(ours, backend="aot_eager") if compiled else ours)(x)
    assert y.placements == (Shard(1),)
    compare(y, want.detach(), 1e-9, "result")
    grads = torch.autograd.grad(y.square().sum(), [x, *ours.parameters()])
    for i, (g, w) in enumerate(zip(grads, expected, strict=True)):
        compare(g.redistribute(placements=[Replicate()]), w, 1e-9, f"gradient {i}")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("heads", [1, 4])  # too few to exchange; enough
def test_block(pools, heads, compiled):
    for cut in ([3, 4], [5, 0, 4]):
        pools(len(cut)).run(run_block, heads, cut, compiled, seconds=120)
