"""Attention whose query heads are shared out over the ranks, with the key/value heads that they read.

The projections give each rank plain tensors with its own heads, so the attention module computes on whole heads, as in one
process, and keeps only these heads in its cache.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Partial, Replicate, _StridedShard

from shardtensor.parallel._styles import ColwiseParallel, RowwiseParallel, _enter, _Target, is_conv1d, note_style, shared_out
from shardtensor.tensor._factories import distribute_module, distribute_tensor

# The attributes in which attention modules keep how often they repeat a key/value head.
_REPEATS = ("num_key_value_groups", "n_rep", "num_queries_per_kv", "num_kv_groups", "kv_groups", "n_groups")


@dataclass(frozen=True)
class Share:
    """One rank's heads. `kv` are the key/value heads in the order in which the rank has them, each for `repeats` query heads."""

    first: int
    queries: int
    kv: tuple[int, ...]
    repeats: int


@lru_cache(maxsize=4096)
def shares(heads: int, kv_heads: int, ranks: int) -> tuple[Share, ...]:
    """Every rank's heads: whole groups if there is one for each rank, else any query heads."""
    group = heads // kv_heads
    counts = [n * group for n in shared_out(kv_heads, ranks)] if kv_heads >= ranks else shared_out(heads, ranks)
    out: list[Share] = []
    first = 0
    for count in counts:
        needed = [query // group for query in range(first, first + count)]
        # torch repeats each key/value head equally often: heads that differ in the number of their queries here come several times.
        repeats = gcd(*(needed.count(head) for head in set(needed))) or 1
        out.append(Share(first, count, tuple(needed[::repeats]), repeats))
        first += count
    return tuple(out)


@dataclass(frozen=True)
class AttentionHeads:
    """Makes the styles of attention with `heads` query heads, `kv_heads` key/value heads (if these are fewer) and `head_dim`
    features a head.

        heads = AttentionHeads(heads=32, kv_heads=8, head_dim=128)
        plan |= heads.plan("layers.*.attention", q="wq", k="wk", v="wv", o="wo")

    If there are as many key/value heads as ranks, or more, each rank has whole groups: some key/value heads, and the query heads
    that read them. If there are fewer, the query heads are shared out as evenly as possible, and each rank has the key/value heads
    that its query heads read: it computes these from weights that all ranks hold, and the weights' gradients are summed.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int = 0

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if min(self.heads, self.kv, self.head_dim) < 1 or self.heads % self.kv:
            raise ValueError(f"{self}: needs a head_dim, and kv_heads that divide heads")

    @property
    def kv(self) -> int:
        assert self.kv_heads is not None
        return self.kv_heads

    def shares(self, ranks: int) -> tuple[Share, ...]:
        """Which heads each of so many ranks has."""
        return shares(self.heads, self.kv, ranks)

    def plan(
        self,
        attention: str = "",
        *,
        q: str = "q_proj",
        k: str = "k_proj",
        v: str = "v_proj",
        o: str = "o_proj",
        repeats: str | bool = True,
    ) -> dict[str, ParallelStyle]:
        """The styles for a plan of parallelize_module. `attention` is the pattern of the names of the modules that call the four
        linear layers named `q`, `k`, `v` and `o`; empty for the module that is parallelized.

        With fewer key/value heads than ranks, the module's number of query heads per key/value head must be changed to this
        rank's. `repeats` names the attribute with this number, if it is not a usual one; False says that the module has none
        (it calls scaled_dot_product_attention with enable_gqa=True).
        """
        inside = f"{attention}." if attention else ""
        styles: dict[str, ParallelStyle] = {f"{inside}{q}": QueryHeads(self), f"{inside}{o}": OutputHeads(self)}
        styles |= {f"{inside}{name}": KeyValueHeads(self) for name in (k, v)}
        return styles | ({attention: RepeatedHeads(self, repeats)} if self.kv < self.heads and repeats is not False else {})


class QueryHeads(ColwiseParallel):
    """The linear layer that computes the queries: each rank computes its own heads."""

    def __init__(self, heads: AttentionHeads):
        super().__init__()
        self.heads = heads

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.heads})"

    def _sizes(self, features: int, mesh: DeviceMesh) -> list[int]:
        _check_features(self, self.heads.heads, self.heads, features, mesh)
        return [share.queries * self.heads.head_dim for share in self.heads.shares(mesh.size())]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        return _with_a_head(module, self.heads, device_mesh)


class KeyValueHeads(QueryHeads):
    """A linear layer that computes keys or values: each rank computes the heads that its queries read."""

    def _sizes(self, features: int, mesh: DeviceMesh) -> list[int]:
        _check_features(self, self.heads.kv, self.heads, features, mesh)
        return [len(share.kv) * self.heads.head_dim for share in self.heads.shares(mesh.size())]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.heads.kv >= device_mesh.size():
            return super()._apply(module, device_mesh)
        if not isinstance(module, nn.Linear) and not is_conv1d(module):
            raise NotImplementedError(f"{type(self).__name__}: expected nn.Linear or Conv1D, got {type(module).__name__}")
        self._sizes(_features_of(module), device_mesh)
        note_style(module, self)
        size, kv = self.heads.head_dim, self.heads.shares(device_mesh.size())[device_mesh.get_local_rank()].kv
        compute_features(module, device_mesh, [(kv[0] * size, (kv[-1] + 1) * size) if kv else (0, 0)], self.src_data_rank)
        if len(set(kv)) < len(kv):
            starts = [(head - kv[0]) * size for head in kv]
            module.register_forward_hook(lambda m, inputs, output: torch.cat([output[..., n : n + size] for n in starts], -1))
        return _with_a_head(module, self.heads, device_mesh)


class FusedHeads(ParallelStyle):
    """One linear layer that computes several projections, side by side, each with all the query heads: each rank computes its own
    heads of each.

    If the ranks have equally many heads, each rank holds the weights of its own. If not, no layout has a rank's parts of all
    projections: then each rank holds the layer whole, and the gradients are summed.
    """

    def __init__(self, heads: AttentionHeads):
        super().__init__()
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks, size = device_mesh.size(), self.heads.head_dim
        width = self.heads.heads * size
        features = _features_of(module)
        if self.heads.kv != self.heads.heads or features % width:
            raise ValueError(
                f"{type(self).__name__}: {features} features are no projections of {width} features each, by {self.heads} "
                f"(rank {device_mesh.get_rank()})"
            )
        share = self.heads.shares(ranks)[device_mesh.get_local_rank()]
        starts = [part + share.first * size for part in range(0, features, width)]
        runs = [(start, start + share.queries * size) for start in starts]
        compute_features(module, device_mesh, runs, self.src_data_rank, held=self.heads.heads % ranks == 0)
        return _with_a_head(module, self.heads, device_mesh, len(runs))


class OutputHeads(RowwiseParallel):
    """The linear layer behind attention: each rank gives it its own heads, and the results are summed."""

    def __init__(self, heads: AttentionHeads):
        super().__init__()
        self.heads = heads

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.heads})"

    def _sizes(self, features: int, mesh: DeviceMesh) -> list[int]:
        _check_features(self, self.heads.heads, self.heads, features, mesh)
        return [share.queries * self.heads.head_dim for share in self.heads.shares(mesh.size())]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not self.heads.shares(device_mesh.size())[device_mesh.get_local_rank()].queries:
            module.register_forward_pre_hook(_drop_features)
        return super()._apply(module, device_mesh)


class RepeatedHeads(ParallelStyle):
    """The attention module itself: the number of query heads per key/value head becomes this rank's."""

    def __init__(self, heads: AttentionHeads, attribute: str | bool = True):
        super().__init__()
        self.heads = heads
        self.attribute = attribute

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.heads.kv >= device_mesh.size():
            return module  # whole groups
        group = self.heads.heads // self.heads.kv
        names = (self.attribute,) if isinstance(self.attribute, str) else _REPEATS
        if all(getattr(module, name, None) != group for name in names):
            raise ValueError(
                f"{self.heads}: {type(module).__name__} has no attribute {' or '.join(names)} that is {group}, its number of query heads "
                f"per key/value head. With {self.heads.kv} key/value heads on {device_mesh.size()} ranks this number must become each "
                "rank's: give plan() the attribute's name as repeats=, or repeats=False if the module never repeats key/value heads "
                "(it calls scaled_dot_product_attention with enable_gqa=True)"
            )
        share = self.heads.shares(device_mesh.size())[device_mesh.get_local_rank()]
        return set_numbers(module, dict.fromkeys(names, (group, share.repeats)))


def set_numbers(module: nn.Module, numbers: dict[str, tuple[int, int]]) -> nn.Module:
    """Changes attributes that count the whole model's heads to this rank's: {name: (whole, this rank's)}."""
    for name, (whole, own) in numbers.items():
        if getattr(module, name, None) == whole:
            setattr(module, name, own)
    return module


class CountedHeads(ParallelStyle):
    """An attention module that counts its heads: the attributes in `features` become this rank's; each is the number of query
    heads times the number given here."""

    def __init__(self, heads: AttentionHeads, features: dict[str, int]):
        super().__init__()
        self.heads = heads
        self.features = features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = max(self.heads.shares(device_mesh.size())[device_mesh.get_local_rank()].queries, 1)
        return set_numbers(module, {name: (self.heads.heads * n, own * n) for name, n in self.features.items()})


def _features_of(module: Any) -> int:
    return int(module.weight.shape[1 if is_conv1d(module) else 0])


def _check_features(style: ParallelStyle, count: int, heads: AttentionHeads, features: int, mesh: DeviceMesh) -> None:
    if features != count * heads.head_dim:
        raise ValueError(
            f"{type(style).__name__}: a layer of {features} features was given heads of {count} * {heads.head_dim}, by {heads} "
            f"(rank {mesh.get_rank()})"
        )


# ---- a rank without heads ----
# A view as heads fails on an empty tensor, and so do some kernels. Such a rank computes attention with one head of zeros.


def _with_a_head(module: nn.Module, heads: AttentionHeads, mesh: DeviceMesh, parts: int = 1) -> nn.Module:
    if not heads.shares(mesh.size())[mesh.get_local_rank()].queries:
        size = parts * heads.head_dim
        module.register_forward_hook(lambda m, inputs, output: F.pad(output, (0, size)))
    return module


def _drop_features(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0][..., :0], *inputs[1:])


# ---- some features of a layer, given as runs ----


def compute_features(
    module: nn.Module, mesh: DeviceMesh, runs: Sequence[tuple[int, int]], src_data_rank: int | None, *, held: bool = False
) -> None:
    """Makes the forward of a linear layer compute the output features [start, end) of each run, this rank's own. Its output is
    plain; the gradient of its input is summed over the ranks.

    The layer's parameters are replicated, and their gradients summed. With `held`, each rank holds its runs alone: these must be
    what a strided cut gives it.
    """
    dims = {"weight": 1 if is_conv1d(module) else 0, "bias": 0}

    def partition(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(submodule.named_parameters(recurse=False)):
            placement = _StridedShard(dims[key], split_factor=len(runs)) if held else Replicate()
            spread = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=src_data_rank)
            submodule.register_parameter(key, nn.Parameter(spread, parameter.requires_grad))

    def own(module: nn.Module, key: str) -> torch.Tensor | None:
        parameter = getattr(module, key)
        if parameter is None or held:
            return None if parameter is None else parameter.to_local()  # type: ignore[no-any-return]
        t, dim = _summed(parameter), dims[key]
        parts = [t.narrow(dim, start, end - start) for start, end in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    whole = _Target(Replicate())

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        entered = whole.move(_enter(x, mesh, Replicate(), None, type(module).__name__))
        weight = own(module, "weight")
        assert weight is not None
        return F.linear(_summed(entered), weight.t() if dims["weight"] else weight, own(module, "bias"))

    distribute_module(module, mesh, partition)
    module.forward = types.MethodType(forward, module)


def _summed(replicated: Any) -> torch.Tensor:
    """The local tensor. Each rank gives its own part of the gradient."""
    local: torch.Tensor = replicated.to_local(grad_placements=[Partial()])
    return local
