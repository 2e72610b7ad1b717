"""Attention over a sequence whose runs are spread over ranks: keys and values travel, and each rank computes attention for its
own queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shardtensor._C as _C
from shardtensor.experimental._kernels import Extras, Kernel
from shardtensor.tensor._mesh import as_mesh

Method = Literal["allgather", "alltoall"]
SEQUENCE = 2  # the dim of queries, keys and values [batch, heads, sequence, features]


# ---- which rank has what ----


@dataclass(frozen=True)
class Run:
    start: int
    stop: int
    document: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    mesh: DeviceMesh
    length: int
    runs: tuple[tuple[Run, ...], ...]  # per rank along the mesh

    @property
    def me(self) -> int:
        return self.mesh.get_local_rank()

    def lengths(self) -> list[int]:
        return [sum(map(len, runs)) for runs in self.runs]

    def order(self) -> torch.Tensor:
        """The positions in the order in which the ranks hold them."""
        return torch.cat([torch.arange(0), *(torch.arange(run.start, run.stop) for runs in self.runs for run in runs)])

    def mine(self) -> torch.Tensor:
        lengths = self.lengths()
        return self.order().narrow(0, sum(lengths[: self.me]), lengths[self.me])

    def documents(self) -> torch.Tensor:
        """The document of each of this rank's positions."""
        runs = self.runs[self.me]
        return torch.cat([torch.full((len(run),), run.document) for run in runs]) if runs else torch.empty(0, dtype=torch.int64)

    def in_blocks(self, block: int | None) -> Plan:
        """The same, with runs of at most `block` positions."""
        if block is None:
            return self

        def parts(run: Run) -> list[Run]:
            return [Run(a, min(a + block, run.stop), run.document) for a in range(run.start, run.stop, block)]

        return replace(self, runs=tuple(tuple(part for run in own for part in parts(run)) for own in self.runs))


def make_plan(mesh: DeviceMesh, length: int, load_balance: bool, documents: Sequence[int] | None) -> Plan:
    if mesh.ndim != 1:
        raise ValueError(f"context_parallel: argument 'mesh' has {mesh.ndim} dims; pass the 1-d mesh that splits sequences, mesh['cp']")
    ends = list(itertools.accumulate(documents)) if documents is not None else [length]
    if (ends[-1] if ends else 0) != length or any(n < 0 for n in documents or ()):
        raise ValueError(f"context_parallel: argument 'document_lengths' adds up to {ends[-1] if ends else 0}, but sequences have {length}")
    ranks = mesh.size()
    chunks = 2 * ranks if load_balance else ranks
    edges = [length * i // chunks for i in range(chunks + 1)]

    def runs(chunk: int) -> list[Run]:
        low, high = edges[chunk], edges[chunk + 1]
        starts = [0, *ends[:-1]]
        parts = [(max(low, a), min(high, b), i) for i, (a, b) in enumerate(zip(starts, ends, strict=True))]
        return [Run(a, b, i) for a, b, i in parts if a < b]

    held = [[r, chunks - 1 - r] if load_balance else [r] for r in range(ranks)]
    return Plan(mesh, length, tuple(tuple(run for chunk in own for run in runs(chunk)) for own in held))


# ---- two runs ----


def _pairs(plan: Plan, other: int, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
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
    return t.new_empty(*t.shape[:SEQUENCE], length, *t.shape[SEQUENCE + 1 :])


def _pass_on(plan: Plan, tensors: list[torch.Tensor], to: list[torch.Tensor]) -> list[dist.Work]:
    """Sends to the next rank of the ring and receives from the one before; empty pieces are not sent."""
    group = plan.mesh.get_group()
    n, me = len(plan.runs), plan.me
    ahead, behind = (dist.get_global_rank(group, r % n) for r in (me + 1, me - 1))
    calls = [dist.P2POp(dist.isend, t, ahead, group) for t in tensors if t.numel()]
    calls += [dist.P2POp(dist.irecv, t, behind, group) for t in to if t.numel()]
    return list(dist.batch_isend_irecv(calls)) if calls else []


def _rounds(plan: Plan, tensors: list[torch.Tensor], method: Method) -> Iterator[tuple[int, list[torch.Tensor]]]:
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


def _for_heads(t: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values, repeated for the query heads that share them."""
    return t if t.size(1) == q.size(1) else t.repeat_interleave(q.size(1) // t.size(1), 1)


def _of_heads(grad: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The gradient of `t` from that of _for_heads(t, q)."""
    return grad if grad.size(1) == t.size(1) else grad.unflatten(1, (t.size(1), -1)).sum(2)  # type: ignore[no-untyped-call]


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, causal: bool, scale: float, method: Method, kernel: Kernel
    ) -> torch.Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros(*q.shape[:-1], v.size(-1), dtype=wide)
        total = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
        plan, extras = plan.in_blocks(kernel.block), ()
        with torch._C.DisableTorchFunction():
            for other, (keys, values) in _rounds(plan, [k, v], method):
                for at_q, at_k, diagonal in _pairs(plan, other, causal):
                    seen, kept = (_for_heads(t[:, :, at_k], q) for t in (keys, values))
                    part, sums, extras = kernel.forward(q[:, :, at_q], seen, kept, diagonal, scale)
                    before = total[:, :, at_q]
                    now = torch.logaddexp(before, sums)
                    out[:, :, at_q] = out[:, :, at_q] * (before - now).exp().unsqueeze(-1) + part * (sums - now).exp().unsqueeze(-1)
                    total[:, :, at_q] = now
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.rest = plan, causal, scale, method, kernel, extras
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # activation checkpointing runs the model here
        with torch._C.DisableTorchFunction():  # from here on, no call is the model's
            return *_backward(grad, *saved, *ctx.rest), None, None, None, None, None


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    plan: Plan,
    causal: bool,
    scale: float,
    method: Method,
    kernel: Kernel,
    extras: Extras,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = total.dtype
    grad_q = torch.zeros_like(q, dtype=wide)
    parts: list[torch.Tensor] = []  # of the gradients of the current keys and values
    gathered: dict[int, list[torch.Tensor]] = {}
    for other, (keys, values) in _rounds(plan, [k, v], method):
        fresh = [torch.zeros_like(t, dtype=wide) for t in (keys, values)]
        if method == "alltoall" and parts:  # they travel one step behind their keys and values
            coming = [torch.empty_like(t) for t in fresh]
            for work in _pass_on(plan, parts, coming):
                work.wait()
            fresh = coming
        for at_q, at_k, diagonal in _pairs(plan, other, causal):
            of_keys = [_for_heads(t[:, :, at_k], q) for t in (keys, values)]
            of_q, *of_kv = kernel.backward(
                grad[:, :, at_q], q[:, :, at_q], *of_keys, out[:, :, at_q], total[:, :, at_q], extras, diagonal, scale
            )
            grad_q[:, :, at_q] += of_q
            for sum_, part, whole in zip(fresh, of_kv, (k, v), strict=True):
                sum_[:, :, at_k] += _of_heads(part, whole)
        parts = gathered[other] = fresh
    if method == "alltoall":
        home = [torch.zeros_like(t, dtype=wide) for t in (k, v)]
        for work in _pass_on(plan, parts, home):
            work.wait()
    else:
        home = [_summed(torch.cat([gathered[r][i] for r in range(len(plan.runs))], SEQUENCE), plan) for i in (0, 1)]
    return grad_q.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype)


def _summed(summand: torch.Tensor, plan: Plan) -> torch.Tensor:
    """This rank's piece of the sum over ranks."""
    mesh = as_mesh(plan.mesh)
    partial = _C.Layout(mesh, [(2, -1, 1, "sum", 2.0)])
    pieces = _C.Layout(mesh, [(1, SEQUENCE, 1, "sum", 2.0)], [plan.lengths()])
    whole = _C.wrap(summand, partial, list(summand.shape), list(summand.stride()))
    return _C.local(_C.redistribute(whole, pieces))
