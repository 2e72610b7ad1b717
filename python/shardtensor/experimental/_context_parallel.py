"""Attention over a sequence that is cut over ranks, in pieces of any length.

The sequence is cut into runs: two per rank, one from the front and one from the back, so that causal attention gives every rank
the same work; and again where documents end. A run then attends to another run completely or not at all, and to itself
causally: no mask is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import _attention as stock
from torch.overrides import TorchFunctionMode

import shardtensor._C as _C
from shardtensor.experimental._kernels import kernel_for
from shardtensor.experimental._ring import SEQUENCE, Method, Plan, RingAttention, make_plan
from shardtensor.tensor._from_local import from_everyone
from shardtensor.tensor._mesh import as_mesh

_method: Method = "allgather"
_unshard = stock.context_parallel_unshard


def set_rotate_method(rotate_method: Method) -> None:
    """How ranks get each other's keys and values: "allgather" brings all of them to every rank at once. "alltoall" passes them
    round a ring, piece by piece, while the previous piece is used, and holds two pieces at a time."""
    global _method
    if rotate_method not in ("allgather", "alltoall"):
        raise NotImplementedError(f"set_rotate_method: argument 'rotate_method' is {rotate_method!r}; use 'allgather' or 'alltoall'")
    _method = rotate_method


# ---- one call of the model's ----


@dataclass
class _Inside:
    """A context that is active."""

    plan: Plan
    calls: int = 0
    mask: torch.Tensor | None = None  # the last one that means the same as is_causal

    @property
    def mine(self) -> int:
        return self.plan.lengths()[self.plan.me]


def _attention(
    inside: _Inside,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention with the other ranks' keys and values."""
    error: Exception | None = None
    try:
        _check_shapes(inside, query, key, value, enable_gqa)
        is_causal = _check_arguments(inside, attn_mask, dropout_p, is_causal)
    except (NotImplementedError, ValueError) as refused:
        error = refused
    is_causal = _agree(inside, query, key, value, is_causal, error)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    kernel = kernel_for(query, key, value, scale)
    out: torch.Tensor = RingAttention.apply(query, key, value, inside.plan, is_causal, scale, _method, kernel)  # type: ignore[no-untyped-call]
    return out


def _check_shapes(inside: _Inside, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.ndim != 4 or t.size(SEQUENCE) != inside.mine:
            raise ValueError(
                f"context_parallel: scaled_dot_product_attention's argument '{name}' has shape {tuple(t.shape)} on rank "
                f"{dist.get_rank()}; [batch, heads, {inside.mine}, features] is expected, this rank's part of {inside.plan.length}"
            )
    heads = [t.size(1) for t in (query, key, value)]
    if heads[1] != heads[2] or (heads[0] % heads[1] if enable_gqa else heads[0] != heads[1]):
        raise ValueError(
            f"context_parallel: scaled_dot_product_attention's arguments have {heads[0]}, {heads[1]} and {heads[2]} heads "
            f"with enable_gqa={enable_gqa} (rank {dist.get_rank()})"
        )


def _check_arguments(inside: _Inside, attn_mask: torch.Tensor | None, dropout_p: float, is_causal: bool) -> bool:
    """Whether attention is causal."""
    if attn_mask is not None and not (is_causal or dropout_p) and _says_causal(attn_mask, inside):
        return True
    if attn_mask is not None or dropout_p:
        what = "attn_mask" if attn_mask is not None else "dropout_p"
        raise NotImplementedError(
            f"context_parallel: scaled_dot_product_attention's argument '{what}' cannot be used here; is_causal and document_lengths can "
            f"(rank {dist.get_rank()})"
        )
    return is_causal


def _says_causal(mask: torch.Tensor, inside: _Inside) -> bool:
    """Whether a mask of this rank's part is causal attention within stretches of positions that follow each other. Models of
    transformers make such a mask from position_ids: they take each jump for the start of a document. Here the jumps are between
    the plan's runs, and the plan knows the documents."""
    if mask is inside.mask:  # one mask for all layers
        return True
    mine = inside.plan.mine()
    if mask.dtype != torch.bool or mask.ndim < 2 or mask.shape[-2:] != (len(mine), len(mine)):
        return False
    jumps = mine.diff() != 1
    order = torch.arange(len(mine))
    past = order.unsqueeze(1) >= order
    for ends in (jumps, jumps | (inside.plan.documents().diff() != 0)):
        stretch = torch.cat([torch.zeros(1, dtype=torch.int64), ends.cumsum(0)])[: len(mine)]
        if bool((mask == (past & (stretch.unsqueeze(1) == stretch)).to(mask.device)).all()):
            inside.mask = mask
            return True
    return False


def _agree(
    inside: _Inside, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, error: Exception | None
) -> bool:
    """Raises on all ranks if one refuses or if they differ. Whether attention is causal. Only a context's first call asks the
    other ranks. But if a model sees one position or none, its call may not show whether attention is causal; then every call asks."""
    inside.calls += 1
    lengths = inside.plan.lengths()
    if inside.calls > 1 and min(lengths) > 1:
        if error is not None:
            raise error
        return is_causal
    records = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    view = as_mesh(inside.plan.mesh)
    told = from_everyone([error is not None, is_causal, records], view, query.device)
    if error is not None:
        raise error
    who = "context_parallel: scaled_dot_product_attention"
    for rank, (refused, _, others) in zip(view.ranks, told, strict=True):
        if refused:
            raise RuntimeError(f"{who} was refused on rank {rank}, whose error says why (rank {view.rank})")
        if bool(others) != records:
            raise RuntimeError(f"{who}: autograd records it on some ranks only: rank {view.rank} {records}, rank {rank} {bool(others)}")
    said = {bool(causal) for (_, causal, _), n in zip(told, lengths, strict=True) if n > 1 or causal}
    if len(said) > 1:
        raise RuntimeError(f"{who}: argument 'is_causal' differs between ranks: {[bool(t[1]) for t in told]} on ranks {view.ranks}")
    return said == {True}


# ---- the model's calls ----

_active: list[_Inside] = []


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model calls it between its graphs
def _patched(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _attention(_active[-1], *args, **kwargs)


class _Calls(TorchFunctionMode):
    """Finds the model's calls of scaled_dot_product_attention, however the model has imported it, and refuses other attention."""

    def __init__(self, inside: _Inside, check: bool) -> None:
        self.inside, self.check = inside, check

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name == "scaled_dot_product_attention":
            return _attention(self.inside, *args, **kwargs)
        if not self.check:
            return func(*args, **kwargs)
        if name == "multi_head_attention_forward":  # it calls F.scaled_dot_product_attention, which is patched
            if kwargs.get("need_weights", True):
                _refuse("torch.nn.MultiheadAttention with need_weights=True; use need_weights=False")
        elif "attention" in name or "attn" in name:
            _refuse(f"a call of {name}")
        out = func(*args, **kwargs)
        if name in _PRODUCTS and self._are_scores(out, args):
            _refuse(f"{name} of two activations gives {list(out.shape)}, the scores of {self.inside.mine} positions with each other,")
        return out

    def _are_scores(self, out: Any, args: Any) -> bool:
        mine = self.inside.mine
        weights = any(isinstance(t, torch.nn.Parameter) for t in args)
        return type(out) is torch.Tensor and mine > 1 and not weights and out.shape[-2:] == (mine, mine)


_PRODUCTS = frozenset({"matmul", "mm", "bmm", "baddbmm", "einsum", "__matmul__", "__rmatmul__"})


@contextmanager
def _replaced(module: Any, name: str, new: Any) -> Iterator[None]:
    old = getattr(module, name)
    setattr(module, name, new)
    try:
        yield
    finally:
        setattr(module, name, old)


@contextmanager
def _served(inside: _Inside, check: bool) -> Iterator[None]:
    """Inside, the model's calls of scaled_dot_product_attention, also those that a backward makes, come here."""
    calls, engine = _Calls(inside, check), torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with calls:  # torch turns the mode off while it handles backward(), but activation checkpointing runs the model there
            return engine(*args, **kwargs)

    _active.append(inside)
    try:
        with _replaced(F, "scaled_dot_product_attention", _patched), _replaced(torch.autograd, "_engine_run_backward", run_backward), calls:
            yield
    finally:
        _active.pop()


def _name(func: Any) -> str:
    """matmul for torch.matmul, torch.Tensor.matmul and torch.ops.aten.matmul.default."""
    return str(getattr(func, "__name__", "")).partition(".")[0]


def _refuse(what: str) -> None:
    raise RuntimeError(
        f"context_parallel: {what} would attend to this rank's part of the sequence only. Use scaled_dot_product_attention; if this is "
        f"no attention along the sequence, pass check_attention=False (rank {dist.get_rank()})"
    )


# ---- what users call ----


def _balances(load_balance: bool | None) -> bool:
    return bool(stock._cp_options.enable_load_balance) if load_balance is None else load_balance


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[torch.Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
    load_balance: bool | None = None,
    document_lengths: Sequence[int] | None = None,
    check_attention: bool = True,
) -> Iterator[None]:
    """Inside, `buffers` (plain tensors with the whole sequence) hold this rank's part of it, along `buffer_seq_dims`, and
    `scaled_dot_product_attention` attends over all ranks' parts. Afterwards the buffers are whole again, except
    `no_restore_buffers`.

    The number of ranks need not divide the length. `load_balance` gives each rank a part from the front and one from the back,
    so that causal attention costs the same on all; its default is torch's option, `_cp_options.enable_load_balance`, which is True
    unless a script has changed it. `document_lengths` says that the sequence is several documents, which do
    not attend to each other. Backward may run inside or after; inside, if activation checkpointing calls attention again.

    Only attention looks at other positions. Positions must come from a buffer (position_ids), not from a count of what is
    there. A mask is refused, except the one that models of transformers make of position_ids, which says no more than
    is_causal. If the model computes attention in another way, each rank would attend to its own part: `check_attention`
    raises for other attention functions, for products that give the scores of all positions with each other, and at the end
    if there was no attention. Other code that mixes positions (a convolution along the sequence) is not found.
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
    plan = make_plan(mesh, lengths.pop(), _balances(load_balance), document_lengths)
    mine = plan.mine()
    originals = [(b, b.clone()) for b in buffers if not any(b is k for k in kept)]
    with torch.no_grad():
        for buffer, dim in zip(buffers, dims, strict=True):
            part = buffer.index_select(dim, mine.to(buffer.device))
            buffer.resize_(part.shape).copy_(part)
    inside = _Inside(plan)
    try:
        with _served(inside, check_attention):
            yield
        if check_attention and not inside.calls:
            _refuse("scaled_dot_product_attention was not called inside, so the model's attention")
    finally:
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
    load_balance: bool | None = None,
) -> list[torch.Tensor]:
    """Makes whole tensors, in the order of the sequence, of tensors that hold each rank's part (results of a forward pass
    inside context_parallel). All ranks of the mesh must call it, with the `load_balance` of that context, or with the load balancer
    that torch's `_context_parallel_shard` got."""
    if load_balancer is not None:
        return list(_unshard(mesh, buffers, seq_dims, load_balancer))  # plain tensors only
    out = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        sizes = [n for (n,) in from_everyone([buffer.size(dim)], as_mesh(mesh), buffer.device)]
        moved = buffer.movedim(dim, 0).contiguous()
        pieces = _C.all_gather([moved.new_empty(n, *moved.shape[1:]) for n in sizes], moved, as_mesh(mesh), 0)
        whole = held = torch.cat(pieces)
        if _balances(load_balance):
            plan = make_plan(mesh, sum(sizes), True, None)
            if plan.lengths() != sizes:
                raise ValueError(
                    f"context_parallel_unshard: argument 'buffers': the ranks have {sizes} positions, but load_balance=True gives them "
                    f"{plan.lengths()}; pass the load_balance or the load_balancer of the context (rank {as_mesh(mesh).rank})"
                )
            whole = torch.empty_like(held)
            whole[plan.order().to(whole.device)] = held
        out.append(whole.movedim(0, dim).contiguous())
    return out
