"""Tensor parallelism, sequence parallelism and sharded parameters written with collectives, the way Megatron-LM and FSDP do it.

The sequence is the first dim of activations, so a gather or a scatter needs no copy. Uneven pieces are padded: Gloo and NCCL
gather and scatter equal ones only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Group = Any


def shares(units: int, ranks: int) -> list[int]:
    """How many of the units each rank has: torch.chunk's sizes."""
    each = -(-units // ranks)
    return [max(0, min(each, units - each * rank)) for rank in range(ranks)]


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.contiguous() if len(x) == rows else torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))


def gathered(x: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
    most = max(sizes)
    out = x.new_empty(most * len(sizes), *x.shape[1:])
    dist.all_gather_into_tensor(out, padded(x, most), group=group)
    return out if min(sizes) == most else torch.cat([piece[:n] for piece, n in zip(out.split(most), sizes, strict=True)])


def scattered(x: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
    most = max(sizes)
    if min(sizes) != most:
        x = torch.cat([padded(piece, most) for piece in x.split(list(sizes))])
    out = x.new_empty(most, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out[: sizes[dist.get_rank(group)]]


class Copy(torch.autograd.Function):
    """The input of linear layers whose columns are cut: every rank has a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return gathered(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return scattered(grad, ctx.sizes, ctx.group), None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return scattered(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return gathered(grad, ctx.sizes, ctx.group), None, None


class Rows(nn.Module):
    """A linear layer with its input features cut."""

    def __init__(self, linear: nn.Linear, mine: slice) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(linear.weight.detach()[:, mine].clone()), linear.bias
        self.leave: Any = None  # from summands to the result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.leave(F.linear(x, self.weight)) + self.bias
        return out


def _cut(module: nn.Module, columns: Sequence[str], rows: str, unit: int, group: Group) -> None:
    """Cuts the features between the layers `columns` and the layer `rows`, in whole units."""
    last, rank = getattr(module, rows), dist.get_rank(group)
    counts = [n * unit for n in shares(last.in_features // unit, dist.get_world_size(group))]
    mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    for name in columns:
        linear = getattr(module, name)
        linear.weight, linear.bias = (nn.Parameter(p.detach()[mine].clone()) for p in (linear.weight, linear.bias))
    last = Rows(last, mine)
    last.leave = lambda x: Reduce.apply(x, group)
    setattr(module, rows, last)
    module.enter = module.register_forward_pre_hook(lambda m, args: (Copy.apply(args[0], group),))  # type: ignore[assignment]


def tensor_parallel(model: Any, group: Group, head: int) -> None:
    """Cuts heads and hidden features. Between the layers every rank has whole activations."""
    for block in model.blocks:
        _cut(block.attention, "qkv", "out", head, group)
        _cut(block.mlp, ["up"], "down", 1, group)


def sequence_parallel(model: Any, group: Group, x: torch.Tensor) -> torch.Tensor:
    """After tensor_parallel: cuts the sequence between the layers too. Returns this rank's part of the input."""
    sizes = shares(len(x), dist.get_world_size(group))
    for block in model.blocks:
        for module, rows in ((block.attention, block.attention.out), (block.mlp, block.mlp.down)):
            module.enter.remove()
            module.register_forward_pre_hook(lambda m, args: (Gather.apply(args[0], sizes, group),))
            rows.leave = lambda x: ReduceScatter.apply(x, sizes, group)
    return x.split(sizes)[dist.get_rank(group)]


def whole_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The module's own parameters that every rank has, and whose gradients need to be added up if the sequence is cut."""
    if isinstance(module, nn.LayerNorm):
        return list(module.parameters())
    return [module.bias] if isinstance(module, Rows) else []


def sum_gradients(parameters: Sequence[nn.Parameter], group: Group) -> None:
    """In one call."""
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.view(-1) for g in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(total.view_as(grad))


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, owner: FlatShards) -> Any:
        ctx.owner = owner
        whole = shard.new_empty(owner.padded)
        dist.all_gather_into_tensor(whole, shard, group=owner.group)
        return tuple(t.view(shape) for t, shape in zip(whole[: owner.length].split(owner.lengths), owner.shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        owner = ctx.owner
        flat = F.pad(torch.cat([g.reshape(-1) for g in grads]), (0, owner.padded - owner.length))
        mine = flat.new_empty(owner.padded // owner.ranks)
        dist.reduce_scatter_tensor(mine, flat, group=owner.group)
        return mine.div_(owner.ranks), None


class FlatShards:
    """A module's parameters as one flat tensor, of which every rank keeps a part. A forward pass gathers it; it stays until the
    backward pass has used it."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        named = [(m, name, p) for m in module.modules() for name, p in m.named_parameters(recurse=False)]
        self.group, self.ranks = group, dist.get_world_size(group)
        self.shapes = [p.shape for *_, p in named]
        self.lengths = [p.numel() for *_, p in named]
        self.length = sum(self.lengths)
        self.padded = -(-self.length // self.ranks) * self.ranks
        flat = F.pad(torch.cat([p.detach().reshape(-1) for *_, p in named]), (0, self.padded - self.length))
        self.shard = nn.Parameter(flat.chunk(self.ranks)[dist.get_rank(group)].clone())
        places = [(m, name) for m, name, _ in named]
        for m, name in places:
            del m._parameters[name]

        def before(m: nn.Module, args: Any) -> None:
            for (owner, name), value in zip(places, _Unshard.apply(self.shard, self), strict=True):
                owner.__dict__[name] = value

        def after(m: nn.Module, args: Any, output: Any) -> None:
            for owner, name in places:
                del owner.__dict__[name]

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
