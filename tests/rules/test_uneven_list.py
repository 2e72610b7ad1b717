"""Common ops on a tensor whose 8 rows are cut 5 + 3 over two ranks, or 5 + 3 + 0 over three: forward, backward, and what the
forward communicates. Arguments with 8 rows are sharded on them, any other is replicated. After each op the ranks are still in step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import Case, Maker, arguments_of, bools, case, check_backward, compare, ints, mesh_of, place, plain_gradients, positive
from shardtensor import _C
from torch.utils._pytree import tree_leaves

ROWS = {2: (5, 3), 3: (5, 3, 0)}
X, V, W, C = (8, 4), (8,), (4, 3), (4,)
SEQ = (8, 2, 6)
IMAGE = (8, 2, 5, 5)


def op(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Case:
    """The forward may communicate."""
    return case(name, function, *arguments, **options)


def local(name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Case:
    """The forward must not communicate."""
    return case(name, function, *arguments, quiet=lambda *_: True, **options)


def written(f: Callable[..., Any]) -> Callable[..., Any]:
    """f writes a copy of its first argument."""

    def g(x: Any, *rest: Any) -> Any:
        y = x.clone()
        f(y, *rest)
        return y * 1

    return g


def clipped(x: Any, y: Any) -> Any:
    p, q = x.detach().clone().requires_grad_(), y.detach().clone().requires_grad_()
    ((p**2).sum() + (q**3).sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_([p, q], 1.0)
    return norm, p.grad, q.grad


def stepped(optimizer: Any, **options: Any) -> Callable[..., Any]:
    def f(x: Any, y: Any) -> Any:
        p, q = x.detach().clone().requires_grad_(), y.detach().clone().requires_grad_()
        o = optimizer([p, q], lr=0.1, **options)
        for _ in range(2):
            o.zero_grad()
            ((p**2).sum() + (q**3).sum()).backward()
            o.step()
        return p.detach(), q.detach()

    return f


def rows(n: int) -> Maker:
    """n different rows of 8."""
    return lambda g: torch.randperm(8, generator=g)[:n]


def out_of(f: Callable[..., Any]) -> Callable[..., Any]:
    """f with out= a tensor like its first argument."""
    return lambda x, *rest: f(x, *rest, out=torch.empty_like(x.detach()))


CASES = [
    # elementwise
    local("where", lambda x, y: torch.where(x > 0, x, y), X, X),
    local("where_number", lambda x: torch.where(x > 0, x, 0.0), X),
    local("masked_fill", lambda x, m: x.masked_fill(m, -1.0), X, bools(*X)),
    local("masked_fill_rows", lambda x, m: x.masked_fill(m, -1.0), X, bools(8, 1)),
    local("to_float", lambda x: x.to(torch.float32).to(torch.float64), X, tolerance=1e-6),
    local("to_int", lambda x: (x * 10).to(torch.int64), X),
    local("type_as", lambda x, y: x.type_as(y.float()).double(), X, X, tolerance=1e-6),
    local("bool", lambda x: x.bool(), X),
    local("add", lambda x, y: x + y, X, X),
    local("add_columns", lambda x, b: x + b, X, C),
    local("mul_rows", lambda x, y: x * y, X, (8, 1)),
    local("numbers", lambda x: 2 / (x * 3 + 1) - (1 - x) + x % 2, X),
    local("pow", lambda x: x**3, X),
    local("pow_tensor", lambda x, y: x**y, positive(*X), X),
    local("clamp", lambda x: x.clamp(-0.5, 0.5), X),
    local("clamp_tensor", lambda x, y: x.clamp(max=y), X, X),
    local("maximum", lambda x, y: (torch.maximum(x, y), torch.minimum(x, y)), X, X),
    local("abs_sign", lambda x: x.abs() + x.sign() + x.neg(), X),
    local("exp_log", lambda x: (x.exp(), x.log(), x.log1p(), x.sqrt(), x.rsqrt(), x.reciprocal()), positive(*X)),
    local("sin_cos", lambda x: (x.sin(), x.cos(), x.tanh(), x.atan(), x.erf()), X),
    local("atan2", torch.atan2, X, X),
    local("lerp", lambda x, y: torch.lerp(x, y, 0.3), X, X),
    local("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=2) + torch.addcdiv(x, y, z.exp()), X, X, X),
    local("round", lambda x: (x.floor(), x.ceil(), x.round(), x.trunc(), x.frac()), X),
    local("comparisons", lambda x, y: (x > y, x >= 0, x == y, x != y, x < y, x.le(0.1)), X, X),
    local("logical", lambda x, y: (x & y, x | ~y, x ^ y, x.logical_not(), x.logical_and(y)), bools(*X), bools(*X)),
    local("floor_divide", lambda x, y: (x // 0.5, x.div(y, rounding_mode="trunc"), x.fmod(y)), X, X, backward=False),
    local("isnan", lambda x: (x.isnan(), x.isinf(), x.isfinite(), x.nan_to_num()), X),
    local("isclose", lambda x, y: torch.isclose(x, y), X, X),
    op("equal", lambda x, y: (torch.equal(x, x), torch.equal(x, y), torch.allclose(x, x)), X, X),
    local("complex", lambda x, y: torch.view_as_real(torch.complex(x, y) * torch.complex(y, x)), X, X),
    # activations
    local("relu", F.relu, X),
    local("gelu", lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"), X),
    local("silu", F.silu, X),
    local("activations", lambda x: (F.leaky_relu(x), F.elu(x), F.softplus(x), F.mish(x), F.hardswish(x), F.selu(x)), X),
    local("sigmoid", lambda x: (x.sigmoid(), F.logsigmoid(x), F.hardsigmoid(x), F.hardtanh(x), F.softsign(x)), X),
    local("glu", lambda x: F.glu(x, -1), X),
    local("prelu", F.prelu, X, C),
    local("dropout_eval", lambda x: F.dropout(x, 0.5, training=False), X),
    # reductions
    local("sum", lambda x: x.sum(), X),
    local("sum_rows", lambda x: x.sum(0), X),
    local("sum_columns", lambda x: x.sum(1, keepdim=True), X),
    op("sum_item", lambda x: round(x.sum().item(), 9), X, backward=False),
    op("sum_float", lambda x: (round(float(x.sum()), 9), bool((x > 9).any()), int(x.argmax())), X, backward=False),
    local("mean", lambda x: x.mean(), X),
    local("mean_rows", lambda x: x.mean(0, keepdim=True), X),
    local("mean_columns", lambda x: x.mean(-1), X),
    op("var", lambda x: x.var(), X),
    op("var_rows", lambda x: x.var(0), X),
    local("var_columns", lambda x: x.var(1, correction=0), X),
    op("std", lambda x: x.std(0), X),
    op("var_mean", lambda x: torch.var_mean(x, 0), X),
    op("std_mean", lambda x: torch.std_mean(x), X),
    op("prod", lambda x: x.prod(), X),
    op("prod_rows", lambda x: x.prod(0), X),
    local("prod_columns", lambda x: x.prod(1), X),
    op("norm", lambda x: x.norm(), X),
    op("norm_rows", lambda x: torch.linalg.vector_norm(x, dim=0), X),
    op("norm_inf", lambda x: torch.linalg.vector_norm(x, float("inf")), X),
    local("norm_columns", lambda x: x.norm(dim=1), X),
    op("norm_fro", lambda x: torch.linalg.matrix_norm(x), X),
    op("amax", lambda x: (x.amax(), x.amin()), X),
    op("amax_rows", lambda x: (x.amax(0), x.amin(0)), X),
    local("amax_columns", lambda x: (x.amax(1), x.amin(1)), X),
    op("max", lambda x: (x.max(), x.min()), X),
    op("max_rows", lambda x: (*x.max(0), *x.min(0)), X),
    local("max_columns", lambda x: (*x.max(1), *x.min(1)), X),
    op("aminmax", lambda x: tuple(torch.aminmax(x, dim=0)), X, backward=False),
    op("argmax", lambda x: (x.argmax(), x.argmin()), X),
    op("argmax_rows", lambda x: (x.argmax(0), x.argmin(0)), X),
    local("argmax_columns", lambda x: x.argmax(1), X),
    op("any_all", lambda x: (x.any(), x.all(), x.any(0), x.all(0)), bools(*X)),
    op("count_nonzero", lambda x: (torch.count_nonzero(x), torch.count_nonzero(x, 0)), bools(*X)),
    op("nansum", lambda x: (x.nansum(), x.nansum(0), x.nanmean(0)), X),
    op("logsumexp_rows", lambda x: x.logsumexp(0), X),
    local("logsumexp_columns", lambda x: x.logsumexp(1), X),
    op("median", lambda x: (x.median(), *x.median(0)), X),
    local("median_columns", lambda x: tuple(x.median(1)), X),
    op("quantile", lambda x: (x.quantile(0.3, dim=0), x.nanquantile(0.5)), X),
    op("dist", lambda x, y: torch.dist(x, y), X, X),
    local("trace", lambda x: x.trace(), X if torch.__version__ >= "2.15" else (8, 8)),  # torch 2.11's gradient is wrong if taller
    # sort and scans
    local("sort_columns", lambda x: tuple(x.sort(1)), X),
    op("sort_rows", lambda x: tuple(x.sort(0, descending=True)), X),
    op("argsort_rows", lambda x: x.argsort(0), X),
    local("topk_columns", lambda x: tuple(x.topk(2, 1)), X),
    op("topk_rows", lambda x: tuple(x.topk(3, 0)), X),
    local("kthvalue", lambda x: tuple(x.kthvalue(2, 1)), X),
    op("cumsum_rows", lambda x: x.cumsum(0), X),
    local("cumsum_columns", lambda x: x.cumsum(1), X),
    op("cumprod_rows", lambda x: x.cumprod(0), X),
    op("cummax_rows", lambda x: (*x.cummax(0), *x.cummin(0)), X),
    op("logcumsumexp", lambda x: x.logcumsumexp(0), X),
    op("diff_rows", lambda x: x.diff(dim=0), X),
    local("diff_columns", lambda x: x.diff(dim=1), X),
    op("unique", lambda x: torch.unique(x), ints(5, *X)),
    op("nonzero", lambda x: x.nonzero(), bools(*X)),
    op("bincount", lambda x: torch.bincount(x, minlength=6), ints(5, 8)),
    local("bucketize", lambda x, b: torch.bucketize(x, b.detach().sort()[0]), X, C, backward=False),
    # products
    local("mm", lambda x, w: x @ w, X, W),
    local("mm_rows_summed", lambda x, y: x.t() @ y, X, (8, 3)),
    op("mm_rows_meet", lambda x, y: x @ y.t(), X, X),
    local("mv", lambda x, v: x @ v, X, C),
    local("dot", lambda v, w: v @ w, V, V),
    op("outer", lambda v, w: torch.outer(v, w), V, V),
    local("bmm", torch.bmm, (8, 2, 3), (8, 3, 2)),
    local("baddbmm", torch.baddbmm, (8, 2, 2), (8, 2, 3), (8, 3, 2)),
    local("matmul_batched", lambda x, w: x @ w, (8, 2, 4), W),
    local("addmm", lambda b, x, w: torch.addmm(b, x, w, beta=0.5), (3,), X, W),
    local("linear", F.linear, (8, 2, 4), (3, 4), (3,)),
    local("einsum", lambda x, w: torch.einsum("bi,ij->bj", x, w), X, W),
    local("einsum_batch", lambda x, y: torch.einsum("bhd,bkd->bhk", x, y), (8, 2, 3), (8, 4, 3)),
    local("einsum_summed", lambda x, y: torch.einsum("bi,bj->ij", x, y), X, (8, 3)),
    local("tensordot", lambda x, w: torch.tensordot(x, w, 1), (8, 2, 4), W),
    op("cdist", lambda x, y: torch.cdist(x, y), X, (3, 4)),
    # dims in another order, other dims
    local("transpose", lambda x: x.transpose(0, 1), X),
    local("permute", lambda x: x.permute(2, 0, 1), (8, 2, 3)),
    local("t", lambda x: x.t() * 2, X),
    local("mT", lambda x: x.mT, (8, 2, 3)),
    local("movedim", lambda x: (x.movedim(0, 2), x.swapdims(0, 1), x.moveaxis(0, 1)), (8, 2, 3)),
    local("expand", lambda x: x.unsqueeze(1).expand(-1, 3, -1), X),
    local("expand_as", lambda x, y: x.expand_as(y), (8, 1), X),
    local("repeat_columns", lambda x: x.repeat(1, 3), X),
    local("repeat_batch", lambda x: x.repeat(2, 1, 1), X),
    op("repeat_rows", lambda x: x.repeat(2, 1), X),
    local("repeat_interleave_columns", lambda x: x.repeat_interleave(2, 1), X),
    local("repeat_interleave_rows", lambda x: x.repeat_interleave(2, 0), X),
    local("tile", lambda x: x.tile((1, 2)), X),
    local("squeeze", lambda x: (x.squeeze(1), x.unsqueeze(0), x.squeeze()), (8, 1, 3)),
    local("flatten", lambda x: (x.flatten(), x.flatten(1)), (8, 2, 3)),
    local("unflatten", lambda x: x.unflatten(1, (2, -1)), X),
    op("unflatten_rows", lambda x: x.unflatten(0, (4, 2)), X),
    local("view", lambda x: (x.view(-1), x.view(8, 2, 2), x.view_as(x)), X),
    local("reshape", lambda x: (x.reshape(-1), x.reshape(8, 1, 4), x.t().reshape(2, 2, 8)), X),
    op("reshape_rows", lambda x: x.reshape(2, 16), X),
    local("diagonal_columns", lambda x: x.diagonal(0, 1, 2), (8, 3, 3)),
    local("diagonal_rows", lambda x: x.diagonal(), X),
    local("diag_embed", lambda x: x.diag_embed(), X),
    local("flip_columns", lambda x: (x.flip(1), x.fliplr()), X),
    op("flip_rows", lambda x: x.flip(0), X),
    local("roll_columns", lambda x: x.roll(1, 1), X),
    op("roll_rows", lambda x: x.roll(3, 0), X),
    local("rot90", lambda x: x.rot90(1, (1, 2)), (8, 2, 3)),
    local("unfold_columns", lambda x: x.unfold(1, 2, 1), X),
    local("tril_triu", lambda x: (x.tril(), x.triu(1)), X),
    local("contiguous", lambda x: (x.contiguous(), x.t().contiguous(), x.clone()), X),
    # parts
    local("slice_rows", lambda x: x[2:7], X),
    local("slice_step", lambda x: x[1::3], X),
    local("slice_columns", lambda x: x[:, 1:3], X),
    local("select_row", lambda x: x[6], X),
    local("select_column", lambda x: x[:, -1], X),
    local("element", lambda x: x[3, 2], X),
    local("ellipsis", lambda x: x[..., 1:, None], X),
    local("narrow", lambda x: (x.narrow(0, 4, 3), x.narrow(1, 1, 2)), X),
    local("split_rows", lambda x: x.split(3), X),
    local("split_columns", lambda x: x.split([1, 3], 1), X),
    local("chunk", lambda x: (*x.chunk(3), *x.chunk(2, 1)), X),
    local("tensor_split", lambda x: (*x.tensor_split(3), *x.tensor_split((2, 3), 1)), X),
    local("hsplit", lambda x: (*x.hsplit(2), *x.vsplit((3, 5))), X),
    local("unbind_rows", lambda x: x.unbind(), X),
    local("unbind_columns", lambda x: x.unbind(1), X),
    op("mask_rows", lambda x, m: x[m], X, bools(8)),
    op("mask_elements", lambda x: x[x > 0], X),
    op("masked_select", lambda x, m: x.masked_select(m), X, bools(*X)),
    op("index_rows", lambda x, i: x[i], X, ints(8, 5)),
    local("index_columns", lambda x, i: x[:, i], X, ints(4, 5)),
    op("index_both", lambda x, i, j: x[i, j], X, ints(8, 5), ints(4, 5)),
    local("take_along_columns", lambda x, i: torch.take_along_dim(x, i, 1), X, ints(4, 8, 2)),
    local("gather_columns", lambda x, i: x.gather(1, i), X, ints(4, 8, 2)),
    op("gather_rows", lambda x, i: x.gather(0, i), X, ints(8, 3, 4)),
    local("scatter_columns", lambda x, i: x.scatter(1, i, 0.5), X, ints(4, 8, 2)),
    local("scatter_add_columns", lambda x, i, y: x.scatter_add(1, i, y), X, ints(4, 8, 2), (8, 2)),
    op("scatter_add_rows", lambda x, i, y: x.scatter_add(0, i, y), X, ints(8, 3, 4), (3, 4)),
    local("index_select_columns", lambda x, i: x.index_select(1, i), X, ints(4, 3)),
    op("index_select_rows", lambda x, i: x.index_select(0, i), X, ints(8, 3)),
    op("index_add_rows", lambda x, i, y: x.index_add(0, i, y), X, ints(8, 3), (3, 4)),
    op("index_copy_rows", lambda x, i, y: x.index_copy(0, i, y), X, rows(3), (3, 4)),
    op("index_put", lambda x, i, y: x.index_put((i,), y), X, rows(3), (3, 4)),
    op("take", lambda x, i: x.take(i), X, ints(32, 5)),
    # joins
    local("cat_columns", lambda x, y: torch.cat((x, y), 1), X, (8, 3)),
    op("cat_rows", lambda x, y: torch.cat((x, y)), X, X),
    local("stack", lambda x, y: torch.stack((x, y)), X, X),
    local("stack_last", lambda x, y: torch.stack((x, y), -1), X, X),
    local("hstack", lambda x, y: torch.hstack((x, y)), X, X),
    local("pad_columns", lambda x: F.pad(x, (1, 2), value=3.0), X),
    op("pad_rows", lambda x: F.pad(x, (0, 0, 1, 2)), X),
    local("broadcast_tensors", lambda x, y: torch.broadcast_tensors(x, y), (8, 1), (8, 4)),
    op("meshgrid", lambda v, w: torch.meshgrid(v, w, indexing="ij"), V, C),
    # softmax, losses
    local("softmax_columns", lambda x: (x.softmax(1), x.log_softmax(1)), X),
    op("softmax_rows", lambda x: x.softmax(0), X),
    op("log_softmax_rows", lambda x: x.log_softmax(0), X),
    op("cross_entropy", F.cross_entropy, X, ints(4, 8)),
    local("cross_entropy_sum", lambda x, t: F.cross_entropy(x, t, reduction="sum"), X, ints(4, 8)),
    op("cross_entropy_weight", lambda x, t, w: F.cross_entropy(x, t, w.detach(), label_smoothing=0.1), X, ints(4, 8), positive(4)),
    local("cross_entropy_soft", lambda x, y: F.cross_entropy(x, y.softmax(1)), X, X),
    local("nll_loss", lambda x, t: F.nll_loss(x, t, reduction="none"), X, ints(4, 8)),
    local("mse_loss", F.mse_loss, X, X),
    local("l1_loss", lambda x, y: (F.l1_loss(x, y, reduction="none"), F.smooth_l1_loss(x, y)), X, X),
    local("huber_loss", F.huber_loss, X, X),
    local("bce_with_logits", lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), X, X),
    local("kl_div", lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), X, X),
    local("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=1), X, X),
    local("normalize", lambda x: F.normalize(x, dim=1), X),
    # layers
    local("embedding", lambda i, w: F.embedding(i, w), ints(6, 8, 2), (6, 3)),
    local("one_hot", lambda i: F.one_hot(i, 5), ints(5, 8)),
    local("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), X, C, C),
    local("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), X, C),
    local("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (8, 4, 3), C, C),
    op("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), X, C, C),
    local("batch_norm_eval", lambda x, m, v: F.batch_norm(x, m.detach(), v.detach()), X, C, positive(4)),
    local("instance_norm", lambda x: F.instance_norm(x), (8, 2, 5)),
    local("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), SEQ, (3, 2, 3), (3,)),
    local("conv2d", lambda x, w: F.conv2d(x, w, stride=2, padding=1), IMAGE, (3, 2, 3, 3)),
    local("conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w), IMAGE, (2, 3, 2, 2)),
    local("max_pool2d", lambda x: F.max_pool2d(x, 2), IMAGE),
    local("avg_pool2d", lambda x: F.avg_pool2d(x, 2), IMAGE),
    local("interpolate", lambda x: F.interpolate(x, scale_factor=2), IMAGE),
    local("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (8, 4, 2, 2)),
    local("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (8, 2, 3, 4), (8, 2, 3, 4), (8, 2, 3, 4)),
    # new tensors made from another
    local("like", lambda x: (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0)), X),
    local("new", lambda x: (x.new_zeros(8, 4), x.new_ones(3), x.new_full((2, 2), 7.0)), X),
    local("copy_", written(lambda y, z: y.copy_(z)), X, X),
    # in place
    local("add_", written(lambda y, z: y.add_(z).mul_(2).sub_(1).div_(3)), X, X),
    local("relu_", written(lambda y: y.mul_(2).relu_()), X),
    local("masked_fill_", written(lambda y, m: y.masked_fill_(m, 0.0)), X, bools(*X)),
    local("fill_", written(lambda y: (y[2:6].zero_(), y[:, 1].fill_(3.0))), X),
    local("set_rows", written(lambda y: y.__setitem__(slice(1, 6), 4.0)), X),
    op("set_row", written(lambda y, z: y.__setitem__(6, z)), X, C),
    op("set_mask", written(lambda y: y.__setitem__(y.detach() > 0, 0.0)), X),
    local("out", out_of(torch.mul), X, X, backward=False),
    # training
    op("clip_grad_norm_", clipped, X, C, backward=False),
    local("foreach", lambda x, y: (torch._foreach_add([x, y], 1.0), torch._foreach_mul([x, y], [y, x])), X, X),
    op("foreach_norm", lambda x, y: torch._foreach_norm([x, y]), X, C),
    op("sgd", stepped(torch.optim.SGD, momentum=0.9), X, C, backward=False),
    op("adamw", stepped(torch.optim.AdamW), X, C, backward=False),
]


def run(name: str, world: int) -> tuple[dict[str, int], list[Any]]:
    """Runs the case on every rank. Returns the collectives of its forward, by kind, and the results' strides."""
    at, c = next((i, c) for i, c in enumerate(CASES) if c.name == name)
    mesh = mesh_of((world,))
    arguments = arguments_of(c)
    grad = [c.backward and a.is_floating_point() for a in arguments]
    plain = [a.clone().requires_grad_(g) for a, g in zip(arguments, grad, strict=True)]
    ours = [place(a, mesh, ("S(0)",) if a.ndim and len(a) == 8 else ("R",), ROWS[world]).requires_grad_(g) for a, g in zip(arguments, grad, strict=True)]
    want = c.function(*plain)
    _C.reset_comm_counts()
    got = c.function(*ours)
    counts = {kind: calls for kind, (calls, _) in _C.comm_counts().items()}
    compare(got, want, c.tolerance, name)
    if c.backward:
        check_backward(plain_gradients(plain, want), ours, want, got, mesh, c.tolerance, name)
    step = torch.tensor([at, -at])
    dist.all_reduce(step, dist.ReduceOp.MAX)
    assert step.tolist() == [at, -at], f"{name}: the ranks are out of step"
    return counts, [t.stride() for t in tree_leaves(got) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("world", ROWS)
@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_uneven(pools, name, world):
    ranks = pools(world).run(run, name, world)
    assert all(r == ranks[0] for r in ranks), f"the ranks' collectives or strides differ: {ranks}"
    if next(c for c in CASES if c.name == name).quiet:
        assert ranks[0][0] == {}, "communicates where it need not"


def test_names_are_unique():
    assert len({c.name for c in CASES}) == len(CASES)
