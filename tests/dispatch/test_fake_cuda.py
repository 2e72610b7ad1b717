"""CUDA without a GPU: fake tensors have a device, refuse to mix two devices, and give results the forms that CUDA's kernels give.

This finds rules that make a CPU tensor on the way, read a value from the device, or know only the CPU's kernels.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter, defaultdict

import numpy
import opinfo
import pytest
import shardtensor as st
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from oracle import EMPTY, UNEVEN, _check_piece, place
from pool import on_ranks
from shardtensor import Partial, ShardTensor, init_device_mesh
from shardtensor.tensor._mesh import as_mesh
from test_op_db import UNSUPPORTED

_VALUES = "torch itself looks at the values"
DIFFERENT = {
    "bernoulli": _VALUES,
    "multinomial": _VALUES,
    "normal": _VALUES,
    "norm.inf": "fake tensors have no infinity norm of an empty piece",
    "as_strided.partial_views": "it reaches outside of the tensor",
}
BATCHES = 4


class Graph:
    """Runs the backward node by node, because autograd's engine would ask for the device's streams. As it does without create_graph:
    in no_grad mode."""

    def __init__(self, outputs):
        self.arrived = defaultdict(dict)
        self.gradients = {}
        waits, seen, stack = Counter(), set(), [t.grad_fn for t in outputs]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                for after, _ in node.next_functions:
                    if after is not None:
                        waits[after] += 1
                        stack.append(after)
        for t in outputs:
            self.add(t.grad_fn, t.output_nr, torch.ones_like(t))
        ready = [node for node in {t.grad_fn for t in outputs} if not waits[node]]
        while ready:
            node = ready.pop()
            with torch.no_grad():
                given = self.run(node)
            for (after, i), gradient in zip(node.next_functions, given, strict=True):
                if after is not None:
                    self.add(after, i, gradient)
                    waits[after] -= 1
                    if not waits[after]:
                        ready.append(after)

    def add(self, node, i, gradient):
        if gradient is not None:
            before = self.arrived[node].get(i)
            self.arrived[node][i] = gradient if before is None else before + gradient

    def run(self, node):
        given = [self.arrived[node].get(i) for i in range(len(node._input_metadata) or 1)]
        if hasattr(node, "variable"):
            self.gradients[id(node.variable)] = given[0]
            return ()
        if all(g is None for g in given):
            return (None,) * len(node.next_functions)
        out = node(*given)
        return out if isinstance(out, tuple) else (out,)


_meshes = {}


def cuda_mesh():
    """A mesh of all ranks, whose groups are never called. Make it outside a fake mode."""
    if not _meshes:
        _meshes["all"] = init_device_mesh("cuda", (dist.get_world_size(),))
        as_mesh(_meshes["all"])
    return _meshes["all"]


def fake(like):
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cuda").requires_grad_(like.requires_grad)


def put(t, mesh, placement, cut):
    if placement == "P":
        return ShardTensor.from_local(t.detach(), mesh, [Partial()], shape=t.shape, stride=t.stride())
    return place(t, mesh, (placement,), cut)


def attempt(op, sample, layouts, mesh, inplace):
    """What is wrong with one call and its gradients, or None."""
    flat, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    where = [i for i, t in enumerate(flat) if opinfo._is_strided(t)]
    plain, ours = list(flat), list(flat)
    for i, ((placement,), cut) in zip(where, layouts, strict=True):
        plain[i] = fake(flat[i])
        ours[i] = put(plain[i], mesh, placement, cut).requires_grad_(flat[i].requires_grad)

    def run(leaves):
        x, args, kwargs = pytree.tree_unflatten(leaves, tree)
        kwargs = {name: "cuda" if str(v) == "cpu" else v for name, v in kwargs.items()}
        out = op.inplace_variant(x.clone(), *args, **kwargs) if inplace else opinfo.AS_WRITTEN.get(op.name, op.op)(x, *args, **kwargs)
        outs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        graph = Graph([t for t in outs if t.grad_fn is not None])
        return outs + [g for i in where if (g := graph.gradients.get(id(leaves[i]))) is not None]

    try:
        wanted = run(plain)
    except Exception:
        return "plain"
    try:
        with st.implicit_replication():
            got = run(ours)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    for g, w in zip(got, wanted, strict=False):
        local = g._local_tensor if isinstance(g, st.ShardTensor) else g
        if (g.device, local.device) != (w.device, w.device):
            return f"a result is on {g.device}, its piece on {local.device}, torch's on {w.device}"
    return None


def sweep(batch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    mesh = cuda_mesh()
    wrong, counts = {}, Counter()
    for name, op in list(opinfo.database().items())[batch::BATCHES]:
        dtypes = op.supported_dtypes("cpu")
        dtype = next((d for d in (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64) if d in dtypes), None)
        if dtype is None:
            continue
        torch.manual_seed(0)
        numpy.random.seed(0)
        random.seed(0)
        drawn = list(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype.is_floating_point))
        for number, sample in enumerate(opinfo._spread(drawn, 1)):
            tensors = [t for t in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if opinfo._is_strided(t)]
            for inplace in (False, True) if op.inplace_variant else (False,):
                for layouts in opinfo._layouts(tensors, mesh.ndim, 2, f"{name} {number}"):
                    with FakeTensorMode():
                        answer = attempt(op, sample, layouts, mesh, inplace)
                    counts[answer if answer in (None, "plain") else "wrong"] += 1
                    key = name + " in place" * inplace
                    if answer not in (None, "plain") and key not in UNSUPPORTED and name not in DIFFERENT:
                        wrong[f"{key}, sample {number}, {layouts}"] = answer
    assert not wrong, "\n".join(f"{what}: {answer}" for what, answer in wrong.items())
    return counts


@pytest.mark.skipif(
    tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 15),
    reason="older torch gives fake ShardTensors to DTensor's engine first, which refuses plain tensors among them",
)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_op_db(pools, batch):
    for counts in pools(2).run(sweep, batch, seconds=120):
        assert counts[None] > 5 * counts["plain"], counts


@on_ranks(2)
def test_attention_kernels():
    """Each of CUDA's fused kernels by name, on cut batches, heads and sequences: results have the same forms, and their pieces fit."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    aten, mesh = torch.ops.aten, cuda_mesh()

    def flash(g, q, k, v):
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        return out, aten._scaled_dot_product_flash_attention_backward(g, q, k, v, *out[:6], 0.0, True, *out[6:8])

    def efficient(g, q, k, v):
        out = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
        masks = [True, True, True, False]
        return out, aten._scaled_dot_product_efficient_attention_backward(g, q, k, v, None, *out, 0.0, masks, True)

    def cudnn(g, q, k, v):
        out = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
        rest = (*out[:2], *out[6:8], None, *out[2:6])
        return out, aten._scaled_dot_product_cudnn_attention_backward(g, q, k, v, *rest, 0.0, True)

    cases = itertools.product((flash, efficient, cudnn), (40, 64), (UNEVEN, EMPTY), ("R", "S(0)", "S(1)", "S(2)"))
    for kernel, length, cut, placement in cases:
        with FakeTensorMode():
            plain = [torch.empty(5, 6, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
            wanted = kernel(*plain)
            got = kernel(*(put(t, mesh, placement, cut) for t in plain))
            ring = placement == "S(2)"  # statistics of a ring are its own
            pairs = zip(*(out[:1] if ring else out for out in (got[0], wanted[0])), strict=True)
            for g, w in (*pairs, *zip(got[1], wanted[1], strict=True)):
                if not isinstance(w, torch.Tensor):
                    assert g == w
                    continue
                what = f"{kernel.__name__} {length} {placement} {cut}: {g.shape} {g.placements}"
                assert (g.shape, g.dtype, g.device) == (w.shape, w.dtype, w.device), what
                assert isinstance(g, ShardTensor)
                assert w.ndim < 2 or str(g._layout).startswith(placement), what
                _check_piece(g)
