"""Attention over a sequence that is cut over ranks, in pieces of any length.

The sequence is cut into runs: two per rank, one from the front and one from the back, so that causal attention gives every rank
the same work; and again where documents end. A run then attends to another run completely or not at all, and to itself
causally: no mask is ever made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import _C
from shardtensor.tensor._mesh import as_mesh

Method = Literal["allgather", "alltoall"]
_SEQUENCE = 2  # the dim of queries, keys and values [batch, heads, sequence, features]
_method: Method = "allgather"


def set_rotate_method(rotate_method: Method) -> None:
    """How ranks get each other's keys and values: "allgather" brings all of them to every rank at once. "alltoall" passes them
    round a ring, piece by piece, while the previous piece is used, and holds two pieces at a time."""
    global _method
    if rotate_method not in ("allgather", "alltoall"):
        raise NotImplementedError(f"set_rotate_method: argument 'rotate_method' is {rotate_method!r}; use 'allgather' or 'alltoall'")
    _method = rotate_method


# ---- which rank has what ----


@dataclass(frozen=True)
class _Run:
    start: int
    stop: int
    document: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class _Plan:
    mesh: DeviceMesh
    length: int
    runs: tuple[tuple[_Run, ...], ...]  # per rank along the mesh

    @property
    def me(self) -> int:
        return self.mesh.get_local_rank()

    def lengths(self) -> list[int]:
        return [sum(map(len, runs)) for runs in self.runs]

    def order(self) -> torch.Tensor:
        """The positions in the order in which the ranks hold them."""
        return torch.cat([torch.arange(run.start, run.stop) for runs in self.runs for run in runs])

    def mine(self) -> torch.Tensor:
        lengths = self.lengths()
        return self.order().narrow(0, sum(lengths[: self.me]), lengths[self.me])


def _plan(mesh: DeviceMesh, length: int, load_balance: bool, documents: Sequence[int] | None) -> _Plan:
    if mesh.ndim != 1:
        raise ValueError(f"context_parallel: argument 'mesh' has {mesh.ndim} dims; pass the 1-d mesh that splits sequences, mesh['cp']")
    ends = list(itertools.accumulate(documents)) if documents is not None else [length]
    if (ends[-1] if ends else 0) != length or any(n < 0 for n in documents or ()):
        raise ValueError(f"context_parallel: argument 'document_lengths' adds up to {ends[-1] if ends else 0}, but sequences have {length}")
    ranks = mesh.size()
    chunks = 2 * ranks if load_balance else ranks
    edges = [length * i // chunks for i in range(chunks + 1)]

    def runs(chunk: int) -> list[_Run]:
        low, high = edges[chunk], edges[chunk + 1]
        starts = [0, *ends[:-1]]
        parts = [(max(low, a), min(high, b), i) for i, (a, b) in enumerate(zip(starts, ends, strict=True))]
        return [_Run(a, b, i) for a, b, i in parts if a < b]

    held = [[r, chunks - 1 - r] if load_balance else [r] for r in range(ranks)]
    return _Plan(mesh, length, tuple(tuple(run for chunk in own for run in runs(chunk)) for own in held))


# ---- two runs ----


def _fused(q: torch.Tensor, v: torch.Tensor) -> bool:
    return q.is_cpu and q.size(-1) == v.size(-1)


def _see(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of one run to another, and the log of the sum that its weights were divided by."""
    if _fused(q, v):
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, total
    scores = _scores(q, k, causal, scale)
    total = scores.logsumexp(-1)
    return (scores - total.unsqueeze(-1)).exp().to(v.dtype) @ v, total


def _see_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, total: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One run's part of the gradients, from the whole result and the whole sum of weights."""
    if _fused(q, v):
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, total, 0.0, causal, scale=scale
        )
        return parts[0], parts[1], parts[2]
    weights = (_scores(q, k, causal, scale) - total.unsqueeze(-1)).exp()
    wide = grad.to(weights.dtype)
    through = wide @ v.to(weights.dtype).mT - (wide * out.to(weights.dtype)).sum(-1, keepdim=True)
    scores = weights * through * scale
    return (scores @ k.to(scores.dtype)).to(q.dtype), (scores.mT @ q.to(scores.dtype)).to(k.dtype), (weights.mT @ wide).to(v.dtype)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    scores = q.to(wide) @ k.to(wide).mT * scale
    if causal:
        future = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores


def _pairs(plan: _Plan, other: int, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """The runs of this rank that attend to runs of another rank: their places in both local pieces, and whether causally."""
    at_q = 0
    for q in plan.runs[plan.me]:
        at_k = 0
        for k in plan.runs[other]:
            if q.document == k.document and (not causal or k.start <= q.start):
                yield slice(at_q, at_q + len(q)), slice(at_k, at_k + len(k)), causal and k.start == q.start
            at_k += len(k)
        at_q += len(q)


# ---- all ranks' keys and values ----


def _resized(t: torch.Tensor, length: int) -> torch.Tensor:
    return t.new_empty(*t.shape[:_SEQUENCE], length, *t.shape[_SEQUENCE + 1 :])


def _pass_on(plan: _Plan, tensors: list[torch.Tensor], to: list[torch.Tensor]) -> list[dist.Work]:
    """Sends to the next rank of the ring and receives from the one before; empty pieces are not sent."""
    group = plan.mesh.get_group()
    n, me = len(plan.runs), plan.me
    ahead, behind = (dist.get_global_rank(group, r % n) for r in (me + 1, me - 1))
    calls = [dist.P2POp(dist.isend, t, ahead, group) for t in tensors if t.numel()]
    calls += [dist.P2POp(dist.irecv, t, behind, group) for t in to if t.numel()]
    return list(dist.batch_isend_irecv(calls)) if calls else []


def _round(plan: _Plan, tensors: list[torch.Tensor], method: Method) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Every rank's pieces, this one's first."""
    lengths, me = plan.lengths(), plan.me
    n = len(lengths)
    tensors = [t.contiguous() for t in tensors]
    if method == "allgather":
        gathered = [_C.all_gather([_resized(t, length) for length in lengths], t, as_mesh(plan.mesh), 0) for t in tensors]
        for step in range(n):
            yield (me - step) % n, [pieces[(me - step) % n] for pieces in gathered]
        return
    for step in range(n):
        coming = [_resized(t, lengths[(me - step - 1) % n]) for t in tensors] if step + 1 < n else []
        works = _pass_on(plan, tensors, coming) if coming else []
        yield (me - step) % n, tensors
        for work in works:
            work.wait()
        tensors = coming


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: _Plan, causal: bool, scale: float, method: Method
    ) -> torch.Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros(*q.shape[:-1], v.size(-1), dtype=wide)
        total = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
        for other, (keys, values) in _round(plan, [k, v], method):
            for at_q, at_k, diagonal in _pairs(plan, other, causal):
                part, sums = _see(q[:, :, at_q], keys[:, :, at_k], values[:, :, at_k], diagonal, scale)
                before = total[:, :, at_q]
                now = torch.logaddexp(before, sums)
                out[:, :, at_q] = out[:, :, at_q] * (before - now).exp().unsqueeze(-1) + part * (sums - now).exp().unsqueeze(-1)
                total[:, :, at_q] = now
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.rest = plan, causal, scale, method
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, total = ctx.saved_tensors
        plan, causal, scale, method = ctx.rest
        wide = total.dtype
        grad_q = torch.zeros_like(q, dtype=wide)
        lengths = plan.lengths()
        parts: list[torch.Tensor] = []  # of the gradients of the current keys and values
        gathered: dict[int, list[torch.Tensor]] = {}
        for other, (keys, values) in _round(plan, [k, v], method):
            fresh = [torch.zeros_like(t, dtype=wide) for t in (keys, values)]
            if method == "alltoall" and parts:  # they travel one step behind their keys and values
                coming = [torch.empty_like(t) for t in fresh]
                for work in _pass_on(plan, parts, coming):
                    work.wait()
                fresh = coming
            for at_q, at_k, diagonal in _pairs(plan, other, causal):
                of_q, of_k, of_v = _see_backward(
                    grad[:, :, at_q], q[:, :, at_q], keys[:, :, at_k], values[:, :, at_k], out[:, :, at_q], total[:, :, at_q], diagonal, scale
                )
                grad_q[:, :, at_q] += of_q
                fresh[0][:, :, at_k] += of_k
                fresh[1][:, :, at_k] += of_v
            parts = gathered[other] = fresh
        if method == "alltoall":
            home = [torch.zeros_like(t, dtype=wide) for t in (k, v)]
            for work in _pass_on(plan, parts, home):
                work.wait()
        else:
            home = [_summed(torch.cat([gathered[r][i] for r in range(len(lengths))], _SEQUENCE), plan) for i in (0, 1)]
        return grad_q.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype), None, None, None, None


def _summed(summand: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """This rank's piece of the sum over ranks."""
    mesh = as_mesh(plan.mesh)
    partial = _C.Layout(mesh, [(2, -1, 1, "sum", 2.0)])
    pieces = _C.Layout(mesh, [(1, _SEQUENCE, 1, "sum", 2.0)], [plan.lengths()])
    whole = _C.wrap(summand, partial, list(summand.shape), list(summand.stride()))
    return _C.local(_C.redistribute(whole, pieces))


# ---- what users call ----


_active: list[_Plan] = []


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    plan = _active[-1]
    if attn_mask is not None or dropout_p:
        what = "attn_mask" if attn_mask is not None else "dropout_p"
        raise NotImplementedError(f"context_parallel: scaled_dot_product_attention's argument '{what}' cannot be used here; is_causal and document_lengths can")
    mine = plan.lengths()[plan.me]
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.ndim != 4 or t.size(_SEQUENCE) != mine:
            raise ValueError(
                f"context_parallel: scaled_dot_product_attention's argument '{name}' has shape {tuple(t.shape)} on rank "
                f"{dist.get_rank()}; [batch, heads, {mine}, features] is expected, this rank's part of {plan.length}"
            )
    if enable_gqa:
        key, value = (t.repeat_interleave(query.size(1) // t.size(1), 1) for t in (key, value))
    out: torch.Tensor = _Attention.apply(query, key, value, plan, is_causal, scale or query.size(-1) ** -0.5, _method)  # type: ignore[no-untyped-call]
    return out


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[torch.Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
    load_balance: bool = True,
    document_lengths: Sequence[int] | None = None,
) -> Iterator[None]:
    """Inside, `buffers` (plain tensors with the whole sequence) hold this rank's part of it, along `buffer_seq_dims`, and
    `scaled_dot_product_attention` attends over all ranks' parts. Afterwards the buffers are whole again, except
    `no_restore_buffers`.

    The number of ranks need not divide the length. `load_balance` gives each rank a part from the front and one from the back,
    so that causal attention costs the same on all. `document_lengths` says that the sequence is several documents, which do
    not attend to each other. Backward may run inside or after.
    """
    buffers, dims, kept = buffers or [], buffer_seq_dims or [], no_restore_buffers or set()
    if len(buffers) != len(dims):
        raise ValueError("`seq_dims` must have the same number of elements as `buffers`.")
    if not buffers:
        raise ValueError("context_parallel: argument 'buffers' is empty; give at least one tensor with the sequence")
    if not all(any(b is buffer for buffer in buffers) for b in kept):
        raise ValueError("`no_restore_buffers` must be a subset of `buffers`.")
    lengths = {b.size(d) for b, d in zip(buffers, dims, strict=True)}
    if len(lengths) != 1:
        raise ValueError(f"context_parallel: argument 'buffers': sequences of different lengths, {sorted(lengths)}")
    plan = _plan(mesh, lengths.pop(), load_balance, document_lengths)
    mine = plan.mine()
    originals = [(b, b.clone()) for b in buffers if not any(b is k for k in kept)]
    with torch.no_grad():
        for buffer, dim in zip(buffers, dims, strict=True):
            part = buffer.index_select(dim, mine.to(buffer.device))
            buffer.resize_(part.shape).copy_(part)
    _active.append(plan)
    outside = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        _active.pop()
        F.scaled_dot_product_attention = outside
        with torch.no_grad():
            for buffer, original in originals:
                buffer.resize_(original.shape).copy_(original)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: list[torch.Tensor],
    seq_dims: list[int],
    load_balancer: Any = None,
    *,
    load_balance: bool = True,
) -> list[torch.Tensor]:
    """Makes whole tensors, in the order of the sequence, of tensors that hold each rank's part (results of a forward pass
    inside context_parallel). All ranks of the mesh must call it, with the `load_balance` of that context."""
    if load_balancer is not None:
        raise NotImplementedError("context_parallel_unshard: argument 'load_balancer': only the default, load_balance=True, is supported")
    out = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(mesh.size())]
        _C.all_gather(sizes, torch.tensor([buffer.size(dim)]), as_mesh(mesh), 0)
        plan = _plan(mesh, int(sum(sizes)), load_balance, None)
        moved = buffer.movedim(dim, 0).contiguous()
        pieces = _C.all_gather([moved.new_empty(n, *moved.shape[1:]) for n in plan.lengths()], moved, as_mesh(mesh), 0)
        held = torch.cat(pieces)
        whole = torch.empty_like(held)
        whole[plan.order().to(whole.device)] = held
        out.append(whole.movedim(0, dim).contiguous())
    return out
